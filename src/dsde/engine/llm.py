"""`LLM`: the engine for people who have a list of prompts and want texts."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Any

import torch

from dsde.core.errors import InvalidInput
from dsde.core.outputs import RequestOutput, StreamChunk
from dsde.core.params import SamplingParams
from dsde.drafting import Drafter, ModelDrafter, NgramDrafter
from dsde.engine.config import EngineConfig
from dsde.engine.engine import Engine
from dsde.engine.metrics import EngineMetrics
from dsde.engine.speculative_config import SpeculativeConfig
from dsde.models.loader import load_draft, load_model
from dsde.models.tokenizer import Tokenizer
from dsde.policies import Policy, make_policy
from dsde.sampling import Sampler

Prompt = str | Seq[int]
Message = dict[str, Any]

EMBEDDED_DRAFT = "skip:12-15"
"""Draft of the embedded target as long as no trained one exists: the target with these layers left out."""


class LLM:
    """A target, a draft and a policy, ready to generate.

    `target` and `draft` are a hub id, a folder or a GGUF file. `draft` may also be "ngram" (prompt lookup), "none", or
    a draft made from the target: "skip:12-15" (layers left out), "noise:0.1", "round:4". Without a target the embedded
    pair is used; a target without a draft does not speculate.
    """

    def __init__(
        self,
        target: str | None = None,
        draft: str | None = None,
        policy: str | Policy = "dsde",
        *,
        speculative_config: dict[str, Any] | str | None = None,
        dtype: str = "auto",
        device: str = "auto",
        max_num_seqs: int = EngineConfig.max_num_seqs,
        max_num_batched_tokens: int = EngineConfig.max_num_batched_tokens,
        max_model_len: int | None = EngineConfig.max_model_len,
        kv_cache_bytes: int | None = EngineConfig.kv_cache_bytes,
        seed: int = EngineConfig.seed,
    ) -> None:
        self._config = EngineConfig(max_num_seqs, max_num_batched_tokens, max_model_len, kv_cache_bytes, seed)
        self._wanted = SpeculativeConfig.parse(speculative_config).over(draft, policy)
        chosen = make_policy(self._wanted.policy) if isinstance(self._wanted.policy, str) else self._wanted.policy
        where = _device(device)
        self._target = load_model(target, _dtype(dtype, where), where, progress=_report)
        self.draft = self._wanted.draft or (EMBEDDED_DRAFT if target is None else "none")
        is_model = self.draft not in ("none", "ngram")
        self._draft_model = load_draft(self.draft, self._target).model if is_model else None
        self._start(chosen)

    def with_policy(self, policy: str | Policy) -> LLM:
        """The same weights under another policy, with a KV cache of its own: for comparing policies side by side."""
        other = copy.copy(self)
        other._start(make_policy(policy) if isinstance(policy, str) else policy)
        return other

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
        ids = self._add(prompts, sampling_params, trace)
        done: dict[str, RequestOutput] = {}
        try:
            while len(done) < len(ids):
                done.update((output.request_id, output) for output in self.engine.step().finished)
        finally:
            self._abort(ids, done)
        return [done[request_id] for request_id in ids]

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

        Leaving the loop early ends the requests.
        """
        ids = self._add(prompts, sampling_params, trace)
        return self._stream(ids)

    def chat_prompt(self, messages: Seq[Message]) -> list[int]:
        """A conversation as the token ids the model was trained to continue."""
        if self.tokenizer is None:
            raise InvalidInput("This model has no tokenizer, so it cannot chat: use generate with token ids.")
        text = self.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _stream(self, ids: list[str]) -> Iterator[StreamChunk | RequestOutput]:
        done: dict[str, RequestOutput] = {}
        try:
            while len(done) < len(ids):
                output = self.engine.step()
                done.update((finished.request_id, finished) for finished in output.finished)
                yield from output.chunks
                yield from output.finished
        finally:
            self._abort(ids, done)

    def _add(
        self, prompts: Prompt | Seq[Prompt], params: SamplingParams | Seq[SamplingParams] | None, trace: bool
    ) -> list[str]:
        several = _as_prompts(prompts)
        each = [params or SamplingParams()] * len(several) if not isinstance(params, Seq) else list(params)
        if len(each) != len(several):
            raise InvalidInput(f"{len(several)} prompts need as many sampling_params or a single one, got {len(each)}.")
        ids: list[str] = []
        try:
            for prompt, one in zip(several, each, strict=True):
                ids.append(self.engine.add(prompt, one, trace=trace))
        except InvalidInput:
            self._abort(ids, {})
            raise
        return ids

    def _abort(self, ids: list[str], done: dict[str, RequestOutput]) -> None:
        for request_id in ids:
            if request_id not in done:
                self.engine.abort(request_id)

    def _start(self, policy: Policy) -> None:
        sampler = Sampler()
        target = self._target
        self.policy = policy
        self.engine = Engine(target.model, self._drafter(sampler), policy, target.tokenizer, sampler, self._config)

    def _drafter(self, sampler: Sampler) -> Drafter | None:
        target = self._target.model
        if self._draft_model is not None:
            budget = self._config.max_num_batched_tokens
            return ModelDrafter(self._draft_model, sampler, target.config.vocab_size, budget)
        if self.draft == "ngram":
            return NgramDrafter(self._wanted.prompt_lookup_max, self._wanted.prompt_lookup_min, target.device)
        return None


def _report(message: str) -> None:
    """Downloading takes long enough to be worth a line; nothing else is printed by the library."""
    print(message, file=sys.stderr, flush=True)


def _as_prompts(prompts: Prompt | Seq[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InvalidInput(f'device must be "auto", "cpu" or "cuda", got "{name}".') from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidInput(f'device is "{name}", but this machine has no usable CUDA device.')
    return device


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in _DTYPES:
        raise InvalidInput(f'dtype must be one of "auto", {", ".join(map(json.dumps, _DTYPES))}, got "{name}".')
    return _DTYPES[name]
