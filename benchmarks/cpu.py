"""The engine on a CPU: against transformers, its own overhead, and the time to the first token. SmolLM2, float32.

    python benchmarks/cpu.py [--threads 2] [--rounds 3] [--tokens 64] [--json out.json]

Both sides of every comparison run in turn, in one process, and the best of several rounds counts: other work on the
machine can only make a round slower.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dsde import LLM, SamplingParams  # isort: skip  (before torch, whose threads it keeps from spinning needlessly)
import torch

from dsde.cli.demo import PROMPTS
from dsde.models.batch import KVCache, PackedBatch
from dsde.models.decoder import Decoder
from dsde.models.embedded import ensure_embedded_target
from dsde.models.gguf import GGUFFile
from dsde.models.gguf_model import gguf_config, gguf_tensors

Prompts = list[list[int]]


def machine() -> str:
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    vectors = torch.backends.cpu.get_cpu_capability()
    return f"{model}, {torch.get_num_threads()} threads, {vectors}, torch {torch.__version__}"


def transformers_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    file = GGUFFile(ensure_embedded_target())
    config = LlamaConfig(**gguf_config(file))
    model = LlamaForCausalLM(config).eval()
    missing, unexpected = model.load_state_dict(gguf_tensors(file), strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {"lm_head.weight"}, missing
    model.tie_weights()
    return model


def run_transformers(model: Any, prompts: Prompts, tokens: int) -> float:
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    start = time.perf_counter()
    with torch.inference_mode():
        model.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=tokens, min_new_tokens=tokens, pad_token_id=0
        )
    return time.perf_counter() - start


def run_dsde(llm: LLM, prompts: Prompts, tokens: int) -> float:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    # A prompt seen in an earlier round would come from the prefix cache, which transformers does not have.
    fresh = llm.with_policy(llm.policy)
    start = time.perf_counter()
    fresh.generate(prompts, params)
    return time.perf_counter() - start


def interleave(rounds: int, *sides: Callable[[], float]) -> list[float]:
    """Best seconds of every side; the first round only warms up."""
    times = [[side() for side in sides] for _ in range(rounds + 1)][1:]
    return [min(column) for column in zip(*times, strict=True)]


def against_transformers(rounds: int, tokens: int) -> list[dict[str, Any]]:
    rng = random.Random(0)
    model, llm = transformers_model(), LLM(policy="off", draft="none")
    rows = []
    for name, lengths in {"batch 1": [64], "batch 16, prompts of 16 to 256": [16 * (1 + i) for i in range(16)]}.items():
        prompts = [[rng.randrange(100, 49000) for _ in range(length)] for length in lengths]
        ours, theirs = interleave(
            rounds,
            lambda p=prompts: run_dsde(llm, p, tokens),  # type: ignore[misc]
            lambda p=prompts: run_transformers(model, p, tokens),  # type: ignore[misc]
        )
        total = tokens * len(prompts)
        rows.append({"case": name, "dsde": total / ours, "transformers": total / theirs, "ratio": theirs / ours})
    return rows


class ForwardClock:
    """Adds up the seconds that the models' forward passes take."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._forward = Decoder.forward

    def __enter__(self) -> ForwardClock:
        clock, forward = self, self._forward

        def timed(model: Decoder, batch: PackedBatch, cache: KVCache) -> torch.Tensor:
            start = time.perf_counter()
            logits = forward(model, batch, cache)
            clock.seconds += time.perf_counter() - start
            return logits

        Decoder.forward = timed  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        Decoder.forward = self._forward  # type: ignore[method-assign]


def overhead(rounds: int, tokens: int) -> list[dict[str, Any]]:
    """Share of a step outside the forward passes, 16 sequences."""
    llm = LLM(policy="off")
    prompts = [llm.chat_prompt([{"role": "user", "content": text}]) for text in PROMPTS] * 2
    cases = {
        "off": SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True),
        "static:4": SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True),
        "dsde": SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True),
        "dsde, temperature 0.8": SamplingParams(temperature=0.8, max_tokens=tokens, ignore_eos=True),
        "dsde, temperature 0.8, top_p 0.95": SamplingParams(
            temperature=0.8, top_p=0.95, max_tokens=tokens, ignore_eos=True
        ),
        "dsde, temperature 0.8, seeded": SamplingParams(temperature=0.8, seed=1, max_tokens=tokens, ignore_eos=True),
    }
    rows = []
    for name, params in cases.items():
        best: dict[str, Any] = {}
        for _ in range(rounds):
            run = llm.with_policy(name.partition(",")[0])
            with ForwardClock() as clock:
                run.generate(prompts, params)
            metrics = run.metrics
            share = 1 - clock.seconds / metrics.step_s
            if not best or share < best["share"]:
                parts = {k: getattr(metrics, k) for k in ("schedule_s", "plan_s", "accept_s", "commit_s", "step_s")}
                best = {"case": name, "share": share, "steps": metrics.num_steps, **parts}
        rows.append(best)
    return rows


def perfect_draft(tokens: int) -> dict[str, Any]:
    llm = LLM(policy="static:4", draft="round:4")
    prompts = [[{"role": "user", "content": text}] for text in PROMPTS]
    llm.chat(prompts, SamplingParams(temperature=0, max_tokens=tokens))
    metrics = llm.metrics
    return {"emitted_per_step": metrics.acceptance_length, "acceptance_rate": metrics.acceptance_rate}


def first_token(rounds: int) -> float:
    """Seconds of a whole `dsde generate --max-tokens 1`, process start included."""
    command = [sys.executable, "-m", "dsde", "generate", "Why is the sky blue?", "--max-tokens", "1"]
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        best = min(best, time.perf_counter() - start)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    report: dict[str, Any] = {"machine": machine(), "tokens": options.tokens, "rounds": options.rounds}
    print(report["machine"])
    report["transformers"] = against_transformers(options.rounds, options.tokens)
    for row in report["transformers"]:
        print(
            f"{row['case']:32} dsde {row['dsde']:7.1f}  transformers {row['transformers']:7.1f} tokens/s  "
            f"ratio {row['ratio']:.2f}"
        )
    report["overhead"] = overhead(options.rounds, options.tokens)
    for row in report["overhead"]:
        per_step = {k[:-2]: 1000 * row[k] / row["steps"] for k in row if k.endswith("_s")}
        parts = "  ".join(f"{k} {v:.2f}" for k, v in per_step.items())
        print(f"overhead at batch 16, {row['case']:34} {row['share']:6.2%}   ms a step: {parts}")
    report["perfect_draft"] = perfect_draft(options.tokens)
    print(
        "SL 4 with a perfect draft: {emitted_per_step:.2f} tokens a step, acceptance {acceptance_rate:.3f}".format(
            **report["perfect_draft"]
        )
    )
    report["first_token_s"] = first_token(options.rounds)
    print(f"start of `dsde generate` to first token (process included): {report['first_token_s']:.1f} s")
    if options.json:
        options.json.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
