"""What a draft's step costs on this CPU beside the target's, and the speedup to expect of each shape.

    python -m training.step_time [--eval eval.json] [--threads 2] [--rounds 40]

Times our own decoder at batch 1: drafts of several depths and vocabularies (untrained; only the time counts), the
target's step, and the target over the tokens of a verification. All take turns, and the median of many rounds counts.
With figures of `training.evaluate`, also: emitted / (SL * draft + verification), in steps of the target.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from dsde.models.batch import BLOCK_SIZE, pack
from dsde.models.decoder import Decoder
from dsde.models.linear import Linear
from dsde.models.loader import load_model

CONTEXT = 256
DEPTHS = (1, 2, 3, 4, 6)
VOCABULARIES = (4096, 8192, 12288, 16384, 24576, 49152)


class Timed:
    """A decoder that reads `num_tokens` new tokens behind a context."""

    def __init__(self, model: Decoder, num_tokens: int) -> None:
        self.model = model
        blocks = -(-(CONTEXT + num_tokens) // BLOCK_SIZE)
        self.cache = model.new_cache(blocks)
        self.inputs = (
            np.full(num_tokens, 100),
            np.array([num_tokens]),
            np.array([CONTEXT + num_tokens]),
            [list(range(blocks))],
            None,
            model.device,
        )
        self.times: list[float] = []

    def run(self) -> None:
        started = time.perf_counter()
        self.model.forward(pack(*self.inputs), self.cache)
        self.times.append(time.perf_counter() - started)

    @property
    def ms(self) -> float:
        return statistics.median(self.times) * 1e3


def shape_of(target: Decoder, depth: int, head: Linear) -> Decoder:
    """A draft of the target's first layers with another head; only good for its time."""
    config = replace(target.config, num_layers=depth, layer_windows=target.config.layer_windows[:depth])
    return replace(target, config=config, layers=target.layers[:depth], head=head)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--eval", type=Path, help="figures of training.evaluate for a draft of four layers")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=40)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    target = load_model(None).model
    heads = {size: Linear(target.embedding[:size].clone()) for size in VOCABULARIES}
    drafts = {(depth, size): Timed(shape_of(target, depth, heads[size]), 1) for depth in DEPTHS for size in heads}
    verifying = {count: Timed(target, count) for count in (1, 2, 3, 4, 5, 6, 7, 9)}
    for _ in range(args.rounds + 2):
        for timed in (*drafts.values(), *verifying.values()):
            timed.run()
    step = verifying[1].ms
    print(
        f"target: {step:.1f} ms a step; over n tokens: " + ", ".join(f"{n}: {v.ms:.1f}" for n, v in verifying.items())
    )
    print("\n| layers | " + " | ".join(f"vocab {size}" for size in heads) + " |\n" + "| --- " * (len(heads) + 1) + "|")
    for depth in DEPTHS:
        print(f"| {depth} | " + " | ".join(f"{drafts[depth, size].ms:.2f} ms" for size in heads) + " |")
    if args.eval:
        print_speedups(json.loads(args.eval.read_text("utf-8")), drafts, verifying)


def print_speedups(
    results: dict[str, dict[str, dict[str, dict[str, float]]]],
    drafts: dict[tuple[int, int], Timed],
    verifying: dict[int, Timed],
) -> None:
    row = next(iter(results.values()))["greedy"]["all"]
    step = verifying[1].ms
    lengths = [count - 1 for count in verifying if count > 1]
    print(
        "\n| vocab | acceptance | "
        + " | ".join(f"SL {k}" for k in lengths)
        + " |\n"
        + "| --- " * (len(lengths) + 2)
        + "|"
    )
    for depth, size in drafts:
        if depth == 4 and f"acceptance@{size}" in row:
            speedups = [
                row[f"emitted@{size}/{k}"] * step / (k * drafts[depth, size].ms + verifying[k + 1].ms) for k in lengths
            ]
            cells = " | ".join(f"{speedup:.2f}x" for speedup in speedups)
            print(f"| {size} | {row[f'acceptance@{size}']:.3f} | {cells} |")


if __name__ == "__main__":
    main()
