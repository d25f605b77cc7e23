"""`LLM`: the engine for people who have a list of prompts and want texts."""

from __future__ import annotations

import copy
import json
import sys
import weakref
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dsde.core.call_room import call_with_room
from dsde.core.errors import InvalidInput
from dsde.core.outputs import RequestOutput, StreamChunk
from dsde.core.params import DEFAULT_POLICY, SamplingParams
from dsde.drafting import Drafter, ModelDrafter, NgramDrafter
from dsde.engine.config import EngineConfig
from dsde.engine.cost_file import load_cost_model, save_cost_model
from dsde.engine.engine import Engine
from dsde.engine.metrics import EngineMetrics
from dsde.engine.rehearsal import rehearse
from dsde.engine.speculative_config import SpeculativeConfig
from dsde.models.loader import load_draft, load_model
from dsde.models.tokenizer import Tokenizer
from dsde.policies import Policy, make_policy
from dsde.sampling import Sampler

Prompt = str | Seq[int] | dict[str, Any]
Message = dict[str, Any]


class LLM:
    """A target, a draft and a policy, ready to generate.

    `target` and `draft` are a hub id, a folder or a GGUF file. `draft` may also be "embedded" (trained for the embedded
    target), "ngram" (prompt lookup), "none", or made from the target: "skip:12-15" (layers left out), "noise:0.1",
    "round:4". Without a target the embedded pair is used; a target without a draft does not speculate. `policy` is a
    name as in `dsde policies` or a `Policy` of your own. `cost_model` is a file for what the policy learns of seconds:
    read at the start if it is there, written when the engine has gone, at the latest when the program ends.
    """

    def __init__(
        self,
        target: str | None = None,
        draft: str | None = None,
        policy: str | Policy | None = None,
        *,
        speculative_config: dict[str, Any] | str | None = None,
        dtype: str = "auto",
        device: str = "auto",
        max_num_seqs: int = EngineConfig.max_num_seqs,
        max_num_batched_tokens: int | None = EngineConfig.max_num_batched_tokens,
        max_model_len: int | None = EngineConfig.max_model_len,
        kv_cache_bytes: int | None = EngineConfig.kv_cache_bytes,
        seed: int = EngineConfig.seed,
        cost_model: str | Path | None = None,
    ) -> None:
        self._config = EngineConfig(max_num_seqs, max_num_batched_tokens, max_model_len, kv_cache_bytes, seed)
        self._wanted = SpeculativeConfig.parse(speculative_config).over(draft, policy)
        chosen = _policy(self._wanted.policy or DEFAULT_POLICY)
        if cost_model is not None:
            load_cost_model(Path(cost_model), chosen)
        self._target = load_model(target, _dtype(dtype), _device(device), progress=_report)
        self.draft = self._wanted.draft or ("embedded" if target is None else "none")
        is_model = self.draft not in ("none", "ngram")
        self._draft_model = load_draft(self.draft, self._target).model if is_model else None
        self._start(chosen)
        if cost_model is not None:
            weakref.finalize(self.engine, save_cost_model, Path(cost_model), chosen)

    def with_policy(self, policy: str | Policy, **settings: Any) -> LLM:
        """The same weights under another policy, with a KV cache of its own: for comparing policies side by side.

        `settings` replace those of the engine, as in `LLM`. On a GPU give `kv_cache_bytes` or `max_num_seqs` and
        `max_model_len`, since a cache takes all memory that is free and could be used.
        """
        other = copy.copy(self)
        other._config = replace(self._config, **settings)
        other._start(_policy(policy))
        return other

    def warm_up(self) -> None:
        """Before the first request, on a GPU: compile kernels and capture graphs for what requests will ask for, so
        that they need not wait for it. Takes seconds; elsewhere there is nothing to do. `dsde serve` does it."""
        rehearse(self.engine)

    @property
    def target(self) -> str:
        return self._target.name

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.engine.intake.tokenizer

    @property
    def metrics(self) -> EngineMetrics:
        """Counters since the start."""
        return self.engine.metrics

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        trace: bool = False,
    ) -> list[RequestOutput]:
        """Complete every prompt (text or token ids), batched; results in the order of the prompts."""
        with self._requests(prompts, sampling_params, trace) as ids:
            results = call_with_room(self._results, ids)
        return [results[request_id] for request_id in ids]

    def chat(
        self,
        messages: Seq[Message] | Seq[Seq[Message]],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        trace: bool = False,
    ) -> list[RequestOutput]:
        """Answer one conversation or several."""
        single = len(messages) == 0 or isinstance(messages[0], dict)
        conversations: Seq[Any] = [messages] if single else messages
        return self.generate([self.chat_prompt(c) for c in conversations], sampling_params, trace=trace)

    def stream(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        trace: bool = False,
    ) -> Iterator[StreamChunk | RequestOutput]:
        """The same as `generate`, token by token: a chunk for everything a step added, and each request when it ends.

        Requests begin with the first chunk that is asked for; leaving the loop early ends them. Other calls may be made
        meanwhile: their requests share the batch.
        """
        with self._requests(prompts, sampling_params, trace) as ids:
            yield from self._events(ids)

    def chat_prompt(self, messages: Seq[Message]) -> list[int]:
        """A conversation as the token ids the model was trained to continue."""
        if self.tokenizer is None:
            raise InvalidInput("This model has no tokenizer, so it cannot chat: use generate with token ids.")
        text = self.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True)
        return self.tokenizer.encode(text, add_special_tokens=False)

    @contextmanager
    def _requests(
        self, prompts: Prompt | Seq[Prompt], params: SamplingParams | Seq[SamplingParams] | None, trace: bool
    ) -> Iterator[list[str]]:
        """Requests that are under way within the block; those that have not finished at its end are aborted."""
        pairs = _pair(prompts, params)
        ids: list[str] = []
        try:
            for prompt, one in pairs:
                ids.append(self.engine.add(prompt, one, trace=trace))
                self._mail[ids[-1]] = deque()
            yield ids
        finally:
            for request_id in ids:
                self.engine.abort(request_id)
                del self._mail[request_id]

    def _results(self, ids: list[str]) -> dict[str, RequestOutput]:
        return {event.request_id: event for event in self._events(ids) if isinstance(event, RequestOutput)}

    def _events(self, ids: list[str]) -> Iterator[StreamChunk | RequestOutput]:
        """What these requests are told, until all have finished. What a step tells others is kept for them."""
        num_running = len(ids)
        while num_running:
            for request_id in ids:
                mail = self._mail[request_id]
                while mail:
                    event = mail.popleft()
                    num_running -= isinstance(event, RequestOutput)
                    yield event
            if num_running:
                self._step()

    def _step(self) -> None:
        output = self.engine.step()
        events: list[StreamChunk | RequestOutput] = [*output.chunks, *output.finished]
        for event in events:
            if event.request_id in self._mail:
                self._mail[event.request_id].append(event)

    def _start(self, policy: Policy) -> None:
        self._mail: dict[str, deque[StreamChunk | RequestOutput]] = {}
        """what requests under way have been told and nobody has fetched yet"""
        sampler = Sampler()
        target = self._target
        self.policy = policy
        self.engine = Engine(target.model, self._drafter(sampler), policy, target.tokenizer, sampler, self._config)

    def _drafter(self, sampler: Sampler) -> Drafter | None:
        target = self._target.model
        if self._draft_model is not None:
            budget = self._config.tokens_per_pass(target.device)
            return ModelDrafter(self._draft_model, sampler, target.config.vocab_size, budget)
        if self.draft == "ngram":
            return NgramDrafter(self._wanted.prompt_lookup_max, self._wanted.prompt_lookup_min, target.device)
        return None


def _report(message: str) -> None:
    """Downloading takes long enough to be worth a line; nothing else is printed by the library."""
    print(message, file=sys.stderr, flush=True)


def _pair(
    prompts: Prompt | Seq[Prompt], params: SamplingParams | Seq[SamplingParams] | None
) -> list[tuple[str | Seq[int], SamplingParams]]:
    """Every prompt with its own parameters."""
    single = isinstance(prompts, str | dict) or (len(prompts) > 0 and isinstance(prompts[0], int))
    several: list[Any] = [prompts] if single else list(prompts)
    each = [SamplingParams() if params is None else params] * len(several) if not isinstance(params, Seq) else params
    if len(each) != len(several):
        raise InvalidInput(f"{len(several)} prompts need as many sampling_params or a single one, got {len(each)}.")
    for one in each:
        if not isinstance(one, SamplingParams):
            raise InvalidInput(f"sampling_params must be SamplingParams, got {one!r}.")
    return [(_plain(prompt), one) for prompt, one in zip(several, each, strict=True)]


def _plain(prompt: Any) -> str | Seq[int]:
    """Text or token ids, also out of a dictionary as vLLM takes it."""
    if not isinstance(prompt, dict):
        return prompt  # type: ignore[no-any-return]
    for key in ("prompt_token_ids", "prompt"):
        if key in prompt:
            return prompt[key]  # type: ignore[no-any-return]
    raise InvalidInput(f'A prompt given as a dictionary needs "prompt" or "prompt_token_ids", got {list(prompt)}.')


def _device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name


def _policy(policy: str | Policy) -> Policy:
    if isinstance(policy, str):
        return make_policy(policy)
    if not isinstance(policy, Policy):
        raise InvalidInput(f"policy must be a name or a Policy, got {policy!r}.")
    return policy


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def _dtype(name: str) -> torch.dtype | None:
    """None leaves it to the loader."""
    if name == "auto":
        return None
    if name not in _DTYPES:
        raise InvalidInput(f'dtype must be one of "auto", {", ".join(map(json.dumps, _DTYPES))}, got "{name}".')
    return _DTYPES[name]
