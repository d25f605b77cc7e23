"""What benchmarks on a GPU share: options, and a report that is saved after every measurement."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch

Row = dict[str, Any]

MAX_NUM_BATCHED_TOKENS = 8192
"""as much as vLLM reads at once, or early requests would have finished before late ones begin"""


class Report(dict[str, Any]):
    """What was measured so far: an interrupted run loses nothing that was saved."""

    def __init__(self, options: argparse.Namespace, **empty: list[Row]) -> None:
        name = torch.cuda.get_device_name(options.device) if options.device.startswith("cuda") else "CPU"
        machine = f"{name}, torch {torch.__version__}"
        super().__init__(machine=machine, command=" ".join(sys.argv[1:]), **empty)
        self._out: Path | None = options.out
        print(f"{machine}, {options.dtype}".replace("torch.", ""), flush=True)

    def save(self) -> None:
        if self._out:
            draft = self._out.with_suffix(".tmp")
            draft.write_text(json.dumps(self, indent=1))
            draft.replace(self._out)


def speed_ratio(first: Row | None, second: Row | None) -> float | None:
    return first["tokens_per_s"] / second["tokens_per_s"] if first and second else None


def items(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]


def whole(text: str) -> list[int]:
    return [int(item) for item in items(text)]


def policy_names(text: str) -> list[str]:
    """`0` and `4` are short for `off` and `static:4`."""
    return [("off" if int(item) == 0 else f"static:{item}") if item.isdigit() else item for item in items(text)]


def make_parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON, rewritten after every measurement")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", help="default: bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--time-limit", type=float, default=math.inf, help="seconds after which nothing more begins")
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    options = parser.parse_args()
    options.dtype = getattr(torch, options.dtype or ("bfloat16" if options.device.startswith("cuda") else "float32"))
    return options
