"""What speculation brings on this machine: every length against `off`, on prompts of your own, one request at a time.

    python benchmarks/speculation.py --prompts spec_bench_question.jsonl [--per-category 4] [--lengths 1,2,3,4,6]

A prompt file has one JSON object a line, with `turns` (a list, the first is used) or `prompt`, and perhaps a
`category`. Without one the prompts of `dsde demo` are used. For every prompt all policies run in turn, so that whatever
else the machine does hits all of them; of several rounds the best counts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from dsde import LLM, RequestOutput, SamplingParams  # isort: skip  (before torch, as in cpu.py)
import torch

from cpu import machine
from dsde.cli.demo import PROMPTS


@dataclass
class Tally:
    """What one policy needed for some prompts."""

    tokens: int = 0
    seconds: float = 0.0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    steps: int = 0

    def add(self, output: RequestOutput) -> None:
        metrics = output.metrics
        # From the first token on: reading the prompt is the same for everybody.
        self.tokens += metrics.num_emitted_tokens - 1
        self.seconds += metrics.total_s - metrics.first_token_s
        self.num_drafts += metrics.num_drafts
        self.num_draft_tokens += metrics.num_draft_tokens
        self.num_accepted_tokens += metrics.num_accepted_tokens
        # The first draft step also reads the prompt.
        for record in (metrics.trace or [])[1:]:
            self.steps += 1
            self.draft_s += record.draft_s
            self.verify_s += record.verify_s

    def merge(self, other: Tally) -> None:
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


def read_prompts(path: Path | None, per_category: int) -> list[tuple[str, str]]:
    """(category, prompt), the first few of every category."""
    if path is None:
        return [("demo", prompt) for prompt in PROMPTS]
    chosen: dict[str, list[str]] = defaultdict(list)
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        prompt = row["turns"][0] if "turns" in row else row["prompt"]
        category = str(row.get("category", "all"))
        if len(chosen[category]) < per_category:
            chosen[category].append(prompt)
    return [(category, prompt) for category, prompts in chosen.items() for prompt in prompts]


def measure(base: LLM, policies: list[str], prompt: list[int], params: SamplingParams, rounds: int) -> dict[str, Tally]:
    """The best round of every policy for one prompt. All texts must be equal."""
    best: dict[str, Tally] = {}
    texts = set()
    for _ in range(rounds):
        for name in policies:
            # A fresh engine has an empty prefix cache: the draft has to read the prompt, as it would for a new request.
            output = base.with_policy(name).generate(prompt, params, trace=True)[0]
            texts.add(tuple(output.outputs[0].token_ids))
            tally = Tally()
            tally.add(output)
            if name not in best or tally.seconds < best[name].seconds:
                best[name] = tally
    assert params.temperature > 0 or len(texts) == 1, "policies gave different texts"
    return best


def show(title: str, tallies: dict[str, Tally]) -> None:
    print(f"\n{title}")
    print(
        f"{'policy':12}{'tokens/s':>10}{'vs off':>8}{'per step':>10}{'accepted':>10}{'draft ms':>10}{'verify ms':>11}"
    )
    baseline = tallies["off"].tokens / tallies["off"].seconds
    for name, tally in tallies.items():
        speed = tally.tokens / tally.seconds
        length = 1 + tally.num_accepted_tokens / tally.num_drafts if tally.num_drafts else 1.0
        rate = f"{tally.num_accepted_tokens / tally.num_draft_tokens:.3f}" if tally.num_draft_tokens else "-"
        steps = max(tally.steps, 1)
        print(
            f"{name:12}{speed:10.1f}{speed / baseline:8.2f}{length:10.2f}{rate:>10}"
            f"{1000 * tally.draft_s / steps:10.1f}{1000 * tally.verify_s / steps:11.1f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--per-category", type=int, default=4)
    parser.add_argument("--lengths", default="1,2,3,4,6")
    parser.add_argument("--draft")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()

    base = LLM(draft=options.draft, policy="off", kv_cache_bytes=192 << 20)
    names = ["off", *(f"static:{length}" for length in options.lengths.split(",")), "dsde"]
    params = SamplingParams(temperature=options.temperature, max_tokens=options.tokens)
    print(f"{machine()}; target {base.target}, draft {base.draft}, temperature {options.temperature:g}, batch 1")
    measure(base, names, base.chat_prompt([{"role": "user", "content": "Hello!"}]), params, 1)

    totals: dict[str, dict[str, Tally]] = {}
    prompts = read_prompts(options.prompts, options.per_category)
    for number, (category, text) in enumerate(prompts, start=1):
        print(f"prompt {number} of {len(prompts)}", end="\r", file=sys.stderr, flush=True)
        prompt = base.chat_prompt([{"role": "user", "content": text}])
        best = measure(base, names, prompt, params, options.rounds)
        for key in (category, "all"):
            for name, tally in best.items():
                totals.setdefault(key, {}).setdefault(name, Tally()).merge(tally)
    for key in [*(key for key in totals if key != "all"), "all"]:
        if key != "all" or len(totals) > 2:
            show(f"{key}", totals[key])


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
