"""vLLM's side of `gpu.py`: one process for one speculation length, because vLLM fixes it at its start.

`run_process` starts this file again as that process and hands on what it reports, one measurement at a time, however
the process ends. Needs nothing but vLLM there and nothing at all here; knows nothing of dsde.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

RESULT = "RESULT "
PROMPT_TOKENS = 128
SHORT_TOKENS = 8

ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}

Event = dict[str, Any]


@dataclass
class Job:
    """What one process measures."""

    target: str
    """a folder with a `config.json`; weights are made up"""
    draft: str
    vocab_size: int
    length: int
    """tokens drafted in every step; 0: no speculation"""
    acceptance: list[float]
    """by position: how often it and all before it are accepted"""
    max_model_len: int
    gpu_memory_utilization: float
    cells: list[tuple[int, int]]
    """batch, and tokens that each sequence generates in the long run beyond the short one"""
    rounds: int

    def options(self) -> dict[str, Any]:
        """Arguments of `vllm.LLM`."""
        options: dict[str, Any] = {
            "model": self.target,
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "max_model_len": self.max_model_len,
            "max_num_seqs": max(256, *(batch for batch, _ in self.cells)),
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "enable_prefix_caching": False,
        }
        if self.length:
            options["speculative_config"] = {
                "method": "draft_model",
                "model": self.draft,
                "num_speculative_tokens": self.length,
                "rejection_sample_method": "synthetic",
                "synthetic_acceptance_rates": self.acceptance,
            }
        return options


def random_prompts(seed: int, batch: int, vocab_size: int) -> list[list[int]]:
    """The prompts of one generation, the same for every engine."""
    rng = random.Random(seed)
    return [[rng.randrange(10, min(vocab_size, 100_000)) for _ in range(PROMPT_TOKENS)] for _ in range(batch)]


def prompt_seed(batch: int, round_number: int, tokens: int) -> int:
    """Different for every generation of an engine, so that no prefix cache can help it."""
    return (batch << 32) + (round_number << 16) + tokens


def run_process(job: Job, site: str | None, timeout: float) -> Iterator[Event]:
    """Measure in a process of its own, with `site` to import from.

    Events are `ready` (init_s, version), `round` (batch, tokens, seconds, steps) and at last `end` (seconds, and error
    if there was one).
    """
    environment = {**os.environ, **ENVIRONMENT}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [site, environment.get("PYTHONPATH")]))
    # -P: what lies beside this file must not hide modules of vLLM.
    command = [sys.executable, "-P", __file__, json.dumps(asdict(job))]
    begun, late = time.perf_counter(), threading.Event()
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
        )

        def end() -> None:
            late.set()
            os.killpg(process.pid, signal.SIGKILL)

        timer = threading.Timer(timeout, end)
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith(RESULT):
                    yield json.loads(line.removeprefix(RESULT))
            process.wait()
        finally:
            timer.cancel()
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        log.seek(0)
        complaints = [line.strip() for line in log if line.strip()]
    event: Event = {"event": "end", "seconds": time.perf_counter() - begun}
    if late.is_set():
        event["error"] = f"stopped after {timeout:.0f} s"
    elif process.returncode:
        event["error"] = complaints[-1] if complaints else f"ended with status {process.returncode}"
        event["log"] = complaints[-40:]
    yield event


def cell_row(policy: str, rounds: Sequence[Event]) -> dict[str, Any]:
    """A cell of vLLM, from the rounds that its process reported so far."""
    batch, tokens = rounds[0]["batch"], rounds[0]["tokens"]
    seconds, steps = [one["seconds"] for one in rounds], [one["steps"] for one in rounds]
    speeds = [batch * tokens / one for one in seconds]
    return {
        "batch": batch,
        "policy": policy,
        "tokens": tokens,
        "seconds": seconds,
        "steps": steps,
        "rounds": [round(speed, 1) for speed in speeds],
        "tokens_per_s": statistics.median(speeds),
        "step_ms": 1000 * sum(seconds) / max(sum(steps), 1),
        "tokens_per_step": tokens * len(rounds) / max(sum(steps), 1),
    }


def run_lines(run: dict[str, Any], cells: Iterable[dict[str, Any]]) -> list[str]:
    started = f"started in {run['init_s']:.0f} s" if "init_s" in run else "did not start"
    failed = f"; failed: {run['error']}" if "error" in run else ""
    lines = [f"vLLM {run['policy']}: {started}, {run['seconds']:.0f} s in all{failed}"]
    for row in cells:
        if row["policy"] == run["policy"] and "error" not in row:
            lines.append(
                f"  batch {row['batch']:3}: {row['tokens_per_s']:9.1f} tokens/s, {row['step_ms']:.2f} ms a step, "
                f"{row['tokens_per_step']:.2f} tokens a step and sequence; rounds {row['rounds']}"
            )
    return lines


def report(**event: Any) -> None:
    print(RESULT + json.dumps(event), flush=True)


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    start = time.perf_counter()
    import vllm

    llm = vllm.LLM(**job.options())
    report(event="ready", init_s=time.perf_counter() - start, version=vllm.__version__)

    num_steps = 0
    engine_step = llm.llm_engine.step

    def counted_step() -> Any:
        nonlocal num_steps
        num_steps += 1
        return engine_step()

    llm.llm_engine.step = counted_step

    def generate(batch: int, tokens: int, round_number: int) -> tuple[float, int]:
        """Seconds and steps of one generation."""
        prompts = random_prompts(prompt_seed(batch, round_number, tokens), batch, job.vocab_size)
        params = vllm.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        steps, begin = num_steps, time.perf_counter()
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return time.perf_counter() - begin, num_steps - steps

    for batch, tokens in job.cells:
        # Not measured: whatever the batch needs while it grows and shrinks is compiled and captured after it.
        generate(batch, tokens + SHORT_TOKENS, 0)
        for number in range(1, job.rounds + 1):
            long, short = generate(batch, tokens + SHORT_TOKENS, number), generate(batch, SHORT_TOKENS, number)
            report(event="round", batch=batch, tokens=tokens, seconds=long[0] - short[0], steps=long[1] - short[1])


if __name__ == "__main__":
    main()
