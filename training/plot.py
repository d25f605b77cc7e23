"""Draws a training curve: loss, greedy agreement and overlap on held-out texts, over the tokens trained on.

    python -m training.plot training/results/curve.json training/results/curve.png

Needs matplotlib (`pip install dsde[bench]`).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def draw(curve: list[dict[str, float]], path: Path) -> None:
    # The untrained start would squeeze all the rest.
    curve = [point for point in curve if point["step"] > 0]
    millions = [point["tokens"] / 1e6 for point in curve]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    left.plot(millions, [point["loss"] for point in curve], marker=".")
    left.set(title="KL divergence", xlabel="million tokens", ylim=(0, None))
    right.plot(millions, [point["greedy"] for point in curve], marker=".", label="same likeliest token")
    right.plot(millions, [point["overlap"] for point in curve], marker=".", label="overlap, sum of min(p, q)")
    right.set(title="acceptance on held-out texts", xlabel="million tokens")
    right.legend(loc="lower right")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("curve", type=Path)
    parser.add_argument("png", type=Path)
    args = parser.parse_args()
    draw(json.loads(args.curve.read_text("utf-8"))["curve"], args.png)


if __name__ == "__main__":
    main()
