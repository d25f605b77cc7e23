"""`dsde generate`: one prompt, streamed to the terminal."""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from dsde.core.errors import InvalidInput
from dsde.core.outputs import RequestOutput, StreamChunk
from dsde.core.params import SamplingParams
from dsde.engine.llm import LLM


@dataclass(frozen=True, slots=True)
class ModelChoice:
    target: str | None
    draft: str | None
    policy: str
    speculative_config: str | None
    dtype: str
    device: str
    cost_model: Path | None = None

    def load(self, **limits: int | None) -> LLM:
        """With `limits` of the engine; those that are None are left to it."""
        return LLM(
            self.target,
            self.draft,
            self.policy,
            speculative_config=self.speculative_config,
            dtype=self.dtype,
            device=self.device,
            cost_model=self.cost_model,
            **{name: limit for name, limit in limits.items() if limit is not None},
        )


def run_generate(
    prompt: str, choice: ModelChoice, params: SamplingParams, *, raw: bool, trace: Path | None, as_json: bool
) -> None:
    text = sys.stdin.read().rstrip("\n") if prompt == "-" else prompt
    if not text:
        raise InvalidInput("The prompt is empty.")
    if trace is not None:
        _check_writable(trace)
    llm = choice.load(max_num_seqs=1)
    chats = not raw and llm.tokenizer is not None and llm.tokenizer.can_chat
    start = llm.chat_prompt([{"role": "user", "content": text}]) if chats else text
    output = _stream(llm, start, params, trace is not None, show=not as_json)
    if trace is not None:
        _write_trace(trace, output)
    if as_json:
        print(json.dumps(_as_dict(llm, output), ensure_ascii=False))
    else:
        Console(stderr=True, soft_wrap=True).print(_summary(llm, output), style="dim", highlight=False)


def _stream(llm: LLM, prompt: str | list[int], params: SamplingParams, trace: bool, show: bool) -> RequestOutput:
    result: RequestOutput | None = None
    try:
        for event in llm.stream(prompt, params, trace=trace):
            if isinstance(event, StreamChunk):
                if show:
                    print(event.text, end="", flush=True)
            else:
                result = event
    finally:
        if show:
            print(flush=True)
    assert result is not None
    return result


def _summary(llm: LLM, output: RequestOutput) -> str:
    metrics = output.metrics
    speed = metrics.num_emitted_tokens / metrics.total_s
    line = (
        f"{metrics.num_emitted_tokens} tokens in {metrics.total_s:.1f} s ({speed:.1f} tokens/s), first after "
        f"{metrics.first_token_s:.2f} s, ended by {output.outputs[0].finish_reason}; "
        f"target {llm.target}, draft {llm.draft}"
    )
    if metrics.num_draft_tokens:
        line += (
            f", {metrics.acceptance_length:.2f} tokens a step, "
            f"{metrics.num_accepted_tokens} of {metrics.num_draft_tokens} drafted tokens accepted"
        )
    if not metrics.lossless:
        line += "; LOSSY: not exactly what the target alone would say"
    return line


def _as_dict(llm: LLM, output: RequestOutput) -> dict[str, Any]:
    first = output.outputs[0]
    metrics = {k: v for k, v in dataclasses.asdict(output.metrics).items() if k != "trace"}
    return {
        "text": first.text,
        "token_ids": first.token_ids,
        "finish_reason": first.finish_reason,
        "target": llm.target,
        "draft": llm.draft,
        "metrics": metrics,
    }


def _check_writable(path: Path) -> None:
    """Find out before the work, not after it."""
    try:
        path.open("w").close()
    except OSError as error:
        raise InvalidInput(f"The trace cannot be written to {path}: {error.strerror}.") from None


def _write_trace(path: Path, output: RequestOutput) -> None:
    with path.open("w") as file:
        for record in output.metrics.trace or []:
            file.write(json.dumps(record.to_dict()) + "\n")
