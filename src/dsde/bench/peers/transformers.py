"""Hugging Face transformers: plain generation, and assisted generation with the schedule and the confidence threshold
that it has by default. One request at a time, which is all that assisted generation can do.

The weights are those that our engine runs, read from the same files, so that the greedy texts can be compared.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from dsde.bench.contender import Advance, Contender, Task, Turn
from dsde.bench.results import Counts, Results, Round
from dsde.engine.llm import LLM
from dsde.models.embedded import ensure_embedded_target
from dsde.models.export import full_embedded_draft
from dsde.models.gguf import GGUFFile
from dsde.models.gguf_model import gguf_config, gguf_tensors
from dsde.models.hub import resolve

PLAIN, ASSISTED = "transformers", "transformers+draft"


def make_transformers(results: Results, llm: LLM) -> list[Contender]:
    """Without and with the draft; without alone where the draft is none that transformers can run."""
    _library().logging.set_verbosity_error()  # it warns of its own calls, in the middle of our progress bar
    target = _load(_target_path(results.setting.target), llm)
    eos = sorted(llm.engine.intake.eos_token_ids)
    contenders: list[Contender] = [TransformersContender(PLAIN, target, None, eos)]
    draft = _load_draft(llm, target)
    if draft is None:
        results.note(f"transformers has no draft here: it does not know {llm.draft}.")
    else:
        contenders.append(TransformersContender(ASSISTED, target, draft, eos))
    return contenders


class TransformersContender:
    most_places: int | None = 1

    def __init__(self, name: str, target: Any, draft: Any | None, eos_token_ids: list[int]) -> None:
        self.name = name
        self._target, self._draft, self._eos = target, draft, eos_token_ids
        self._passes = _Passes()
        self._hooks = [target.register_forward_hook(self._passes.count_target)]
        if draft is not None:
            self._hooks.append(draft.register_forward_hook(self._passes.count_draft))

    def take_turn(self, tasks: Sequence[Task], places: int, arrivals: Sequence[float] | None, advance: Advance) -> Turn:
        self._passes.reset()
        began = time.perf_counter()
        result = Round(0.0, [], [], [], [], Counts())
        answers = []
        for number, task in enumerate(tasks):
            arrived = time.perf_counter()
            if arrivals is not None:
                arrived = began + arrivals[number]
                time.sleep(max(0.0, arrived - time.perf_counter()))
            asked = time.perf_counter()
            answer, first_at = self._answer(task)
            ended = time.perf_counter()
            answers.append(answer)
            result.num_tokens.append(len(answer))
            result.shares_s.append(ended - asked)
            result.first_token_s.append(first_at - arrived)
            result.total_s.append(ended - arrived)
            advance()
        result.seconds = time.perf_counter() - began
        idle_s = result.seconds - sum(result.shares_s)
        result.shares_s = [share + idle_s / len(tasks) for share in result.shares_s]
        result.counts = self._passes.counts(sum(result.num_tokens))
        return Turn(result, answers)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _answer(self, task: Task) -> tuple[list[int], float]:
        params = task.params
        if params.seed is not None:
            torch.manual_seed(params.seed)
        config = _library().GenerationConfig(
            max_new_tokens=params.max_tokens,
            do_sample=not params.greedy,
            eos_token_id=self._eos,
            pad_token_id=self._eos[0] if self._eos else 0,
        )
        if not params.greedy:
            config.temperature, config.top_k, config.top_p = params.temperature, 0, 1.0
        prompt = torch.tensor([task.prompt], device=self._target.device)
        clock = _FirstToken()
        with torch.inference_mode():
            output = self._target.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                generation_config=config,
                assistant_model=self._draft,
                streamer=clock,
            )
        return output[0, len(task.prompt) :].tolist(), clock.first_at or time.perf_counter()


class _FirstToken:
    """A streamer, as transformers calls it, that notes when something else than the prompt came."""

    def __init__(self) -> None:
        self._num_calls = 0
        self.first_at = 0.0

    def put(self, value: torch.Tensor) -> None:
        self._num_calls += 1
        if self._num_calls == 2:
            self.first_at = time.perf_counter()

    def end(self) -> None:
        pass


class _Passes:
    """Counts forward passes; the draft makes one for every token that it proposes."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._num_target = self._num_since = 0
        self._lengths: Counter[int] = Counter()

    def count_target(self, *call: object) -> None:
        self._num_target += 1
        self._lengths[self._num_since] += 1
        self._num_since = 0

    def count_draft(self, *call: object) -> None:
        self._num_since += 1

    def counts(self, num_tokens: int) -> Counts:
        drafted = sum(length * count for length, count in self._lengths.items())
        return Counts(
            num_target_passes=self._num_target,
            num_draft_passes=drafted,
            num_decodes=self._num_target,
            num_drafts=self._num_target - self._lengths[0],
            num_draft_tokens=drafted,
            # Every pass of the target gives one token of its own; an answer may end within a draft.
            num_accepted_tokens=max(num_tokens - self._num_target, 0) if drafted else 0,
            drafts_by_length=[self._lengths[length] for length in range(1, max(self._lengths, default=0) + 1)],
        )


def _library() -> Any:
    return import_module("transformers")  # takes seconds, and most of its calls have no types


def _target_path(name: str | None) -> Path:
    return ensure_embedded_target() if name is None else resolve(name)


def _load_draft(llm: LLM, target: Any) -> Any | None:
    if llm.draft == "embedded":
        embedding = target.get_input_embeddings().weight.detach()
        return _build(*full_embedded_draft(embedding), llm)
    if llm.draft in ("none", "ngram") or llm.draft.partition(":")[0] in ("skip", "noise", "round"):
        return None
    return _load(resolve(llm.draft), llm)


def _load(path: Path, llm: LLM) -> Any:
    if path.suffix == ".gguf":
        file = GGUFFile(path)
        return _build(gguf_config(file), gguf_tensors(file), llm)
    model = llm.engine.target.model
    return _ready(_library().AutoModelForCausalLM.from_pretrained(path, dtype=model.dtype), llm)


def _build(config: dict[str, Any], tensors: dict[str, torch.Tensor], llm: LLM) -> Any:
    """A model of theirs with given weights: its own reader of GGUF takes half a minute."""
    dtype = llm.engine.target.model.dtype
    rest = {name: value for name, value in config.items() if name not in ("model_type", "dtype")}
    shape = _library().AutoConfig.for_model(config["model_type"], **rest)
    model = _library().AutoModelForCausalLM.from_config(shape, dtype=dtype)
    weights = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    absent = set(model.load_state_dict(weights, strict=False).missing_keys)
    assert absent <= {"lm_head.weight"}, absent  # tied to the embedding
    model.tie_weights()
    return _ready(model, llm)


def _ready(model: Any, llm: LLM) -> Any:
    # Files may bring penalties and truncations of their own, which our side would not have.
    model.generation_config = _library().GenerationConfig()
    return model.to(llm.engine.target.model.device).eval()
