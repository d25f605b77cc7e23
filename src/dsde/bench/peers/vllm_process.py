"""The process that runs vLLM: reads questions from standard input, one JSON object a line, and answers likewise."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from dsde.bench.contender import Drive, Task
from dsde.bench.peers.vllm import MARK
from dsde.core.params import SamplingParams


@dataclass(slots=True)
class _Finished:
    request_id: str
    token_ids: list[int]
    first_token_s: float
    total_s: float


@dataclass(slots=True)
class _Step:
    finished: list[_Finished] = field(default_factory=list)


@dataclass(slots=True)
class _Running:
    arrived: float
    first_token_s: float = 0.0


class VllmEngine:
    """vLLM as `Drive` wants an engine."""

    def __init__(self, vllm: Any, options: dict[str, Any], eos_token_ids: list[int]) -> None:
        self._vllm, self._eos = vllm, eos_token_ids
        self._engine = vllm.LLM(**options).llm_engine
        self._running: dict[str, _Running] = {}
        self._num_requests = 0
        self.num_steps = 0

    def add(self, prompt: list[int], params: SamplingParams) -> str:
        self._num_requests += 1
        request_id = str(self._num_requests)
        theirs = self._vllm.SamplingParams(
            temperature=params.temperature,
            max_tokens=params.max_tokens,
            seed=params.seed,
            stop_token_ids=self._eos,
            detokenize=False,
        )
        self._running[request_id] = _Running(time.perf_counter())
        self._engine.add_request(request_id, {"prompt_token_ids": prompt}, theirs)
        return request_id

    def step(self) -> _Step:
        outputs, now = self._engine.step(), time.perf_counter()
        self.num_steps += 1
        step = _Step()
        for output in outputs:
            running = self._running[output.request_id]
            tokens = list(output.outputs[0].token_ids)
            if tokens and not running.first_token_s:
                running.first_token_s = now - running.arrived
            if output.finished:
                del self._running[output.request_id]
                finished = _Finished(output.request_id, tokens, running.first_token_s, now - running.arrived)
                step.finished.append(finished)
        return step

    def abort(self, request_id: str) -> None:
        self._engine.abort_request([request_id])


def answer(engine: VllmEngine, question: dict[str, Any]) -> dict[str, Any]:
    tasks = [
        Task("", "", prompt, SamplingParams(max_tokens=tokens, temperature=temperature, seed=seed))
        for prompt, tokens, temperature, seed in question["requests"]
    ]
    drive: Drive[_Finished] = Drive(engine, tasks, question["places"], question["arrivals"], lambda: None)
    steps = engine.num_steps
    seconds = drive.run()
    outputs = [drive.outputs[place] for place in range(len(tasks))]
    return {
        "seconds": seconds,
        "num_tokens": [len(output.token_ids) for output in outputs],
        "shares_s": drive.shares_s,
        "first_token_s": [late + one.first_token_s for late, one in zip(drive.late_s, outputs, strict=True)],
        "total_s": [late + one.total_s for late, one in zip(drive.late_s, outputs, strict=True)],
        "num_steps": engine.num_steps - steps,
        "answers": [output.token_ids for output in outputs],
    }


def main() -> None:
    vllm: Any = import_module("vllm")
    start = json.loads(sys.stdin.readline())
    engine = VllmEngine(vllm, start["options"], start["eos_token_ids"])
    print(MARK + json.dumps({"version": vllm.__version__}), flush=True)
    for line in sys.stdin:
        print(MARK + json.dumps(answer(engine, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
