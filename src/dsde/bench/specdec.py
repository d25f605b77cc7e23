"""An adapter through which NVIDIA's specdec_bench (Model-Optimizer, examples/specdec_bench) can drive dsde.

It has the shape of that program's model classes: made with a model folder and keywords, `await run(...)` for a request,
`stop()` at the end. Register it in the `engines_available` of its run.py:

    from dsde.bench.specdec import SpecDecModel
    engines_available["DSDE"] = SpecDecModel

and start it with `--engine DSDE --speculative_algorithm DRAFT_TARGET --draft_model_dir ...`. The length is
`--draft_length` unless `engine_args` in the runtime parameters name a policy, as in `engine_args: {policy: dsde}`.
Needs nothing of specdec_bench itself.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from dsde.core.errors import InvalidInput
from dsde.core.outputs import StreamChunk
from dsde.core.params import SamplingParams
from dsde.engine.async_llm import AsyncLLM
from dsde.engine.llm import LLM

ALGORITHMS = ("DRAFT_TARGET", "NGRAM", "NONE")
NO_END = -1
"""what it says where a text is not to end by itself"""
_IGNORED = frozenset({"tensor_parallel_size", "moe_expert_parallel_size", "parallel_drafting", "trust_remote_code"})
"""keywords that it gives to every engine, whether they mean something there or not"""


class SpecDecModel:
    def __init__(
        self,
        model_dir: str,
        max_concurrent_requests: int,
        sampling_kwargs: Mapping[str, Any],
        *,
        speculative_algorithm: str | None = None,
        draft_model_dir: str | None = None,
        speculative_num_steps: int = 3,
        policy: str | None = None,
        **engine_args: Any,
    ) -> None:
        algorithm = speculative_algorithm or "NONE"
        if algorithm not in ALGORITHMS:
            raise InvalidInput(f"dsde can do {', '.join(ALGORITHMS)}, not {algorithm!r}")
        if algorithm == "DRAFT_TARGET" and draft_model_dir is None:
            raise InvalidInput("DRAFT_TARGET needs a draft: --draft_model_dir")
        draft = {"DRAFT_TARGET": draft_model_dir, "NGRAM": "ngram"}.get(algorithm, "none")
        chosen = policy or ("off" if algorithm == "NONE" else f"static:{speculative_num_steps}")
        options = {name: value for name, value in engine_args.items() if name not in _IGNORED}
        llm = LLM(model_dir, draft, chosen, max_num_seqs=max_concurrent_requests, **options)
        self._llm = AsyncLLM(llm.engine)
        self._sampling = {name: value for name, value in sampling_kwargs.items() if value is not None}
        if self._sampling.pop("beam_width", 1) != 1:
            raise InvalidInput("dsde does no beam search: beam_width must be 1")

    async def run(
        self, prompt_ids: Sequence[int], max_length: int, end_id: int, request_id: Any = None, turn_id: Any = None
    ) -> dict[str, Any]:
        """Answer one request: its tokens, how many came at a time, and when; the first time is that of the call."""
        ends = {"ignore_eos": True} if end_id == NO_END else {"stop_token_ids": [end_id]}
        params = SamplingParams(max_tokens=max_length, **ends, **self._sampling)
        tokens: list[int] = []
        lengths: list[int] = []
        times = [time.perf_counter()]
        async for event in self._llm.generate(list(prompt_ids), params):
            if isinstance(event, StreamChunk) and event.token_ids:
                times.append(time.perf_counter())
                lengths.append(len(event.token_ids))
                tokens += event.token_ids
        return {"output_ids": [tokens], "chunk_lengths": [lengths], "token_times": times}

    def stop(self) -> None:
        self._llm.shutdown()
