"""Counts what the plugin does, where another process can read it: Prometheus asks the API server, and the scheduler
lives in a process of its own.

The numbers lie in a small file that both map; only the scheduler's process writes. Knows nothing of Prometheus.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from dsde.policies import Outcome, Plan

MOST_LENGTHS = 65
"""lengths counted each; longer ones count as the last"""
FIELDS = (
    *("num_steps", "num_off_steps", "num_plans", "num_lowered", "cap", "num_catch_up_tokens"),
    *("num_draft_tokens", "num_accepted_tokens", "draft_s", "verify_s", "mean_kld", "num_changed_hooks"),
)
_PLACES = {name: place for place, name in enumerate(FIELDS)}
SIZE = len(FIELDS) + MOST_LENGTHS


class Meter:
    def __init__(self, file: Path | None = None, policy: str = "") -> None:
        """Without a file the numbers are this process's own."""
        self.policy = policy
        if file is None:
            self._numbers: Any = np.zeros(SIZE)
        else:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.with_suffix(".json").write_text(json.dumps({"policy": policy}), encoding="utf-8")
            # Seen as a plain array: a single number of a mapped one is an array of its own first.
            self._numbers = np.memmap(file, np.float64, "w+", shape=SIZE).view(np.ndarray)
        self._numbers[_PLACES["cap"]] = self._numbers[_PLACES["mean_kld"]] = np.nan

    def __getitem__(self, name: str) -> float:
        return float(self._numbers[_PLACES[name]])

    def __setitem__(self, name: str, value: float) -> None:
        self._numbers[_PLACES[name]] = value

    @property
    def lengths(self) -> list[int]:
        """[length] how often it was chosen for a request"""
        return [int(count) for count in self._numbers[len(FIELDS) :]]

    def count_plan(self, lengths: np.ndarray[Any, Any], plan: Plan | None, num_catch_up_tokens: int) -> None:
        if lengths.size == 0:
            return
        counts = np.bincount(np.minimum(lengths, MOST_LENGTHS - 1), minlength=MOST_LENGTHS)
        self._numbers[len(FIELDS) :] += counts
        self["num_steps"] += 1
        self["num_off_steps"] += not lengths.any()
        self["num_catch_up_tokens"] += num_catch_up_tokens
        if plan is not None:
            self["num_plans"] += 1
            self["num_lowered"] += plan.num_lowered
            self["cap"] = np.nan if plan.cap is None else plan.cap

    def count_rest(self, num_lengths: int, num_steps: int, seconds: float) -> None:
        """Steps in which it was clear beforehand that nobody drafts, all at once, and so many lengths of 0 in them."""
        self["num_steps"] += num_steps
        self["num_off_steps"] += num_steps
        self["verify_s"] += seconds
        self._numbers[len(FIELDS)] += num_lengths

    def count_drafts(self, num_drafted: int, num_accepted: int, draft_s: float, verify_s: float) -> None:
        """What became of the drafts of a step."""
        self["num_draft_tokens"] += num_drafted
        self["num_accepted_tokens"] += num_accepted
        self["draft_s"] += draft_s
        self["verify_s"] += verify_s

    def count_outcome(self, outcome: Outcome) -> None:
        drafted, accepted = int(outcome.drafted.sum()), int(outcome.accepted.sum())
        self.count_drafts(drafted, accepted, outcome.draft_s, outcome.verify_s)
        if outcome.klds.size:
            self["mean_kld"] = float(outcome.klds.mean())


def read_meter(file: Path) -> tuple[dict[str, float], list[int], str]:
    """Numbers by name, how often every length was chosen, and the policy. OSError or ValueError: not there yet."""
    numbers = np.fromfile(file, np.float64)
    if numbers.size != SIZE:
        raise ValueError(file)
    policy = json.loads(file.with_suffix(".json").read_text(encoding="utf-8"))["policy"]
    values = dict(zip(FIELDS, numbers.tolist(), strict=False))
    return values, [int(count) for count in numbers[len(FIELDS) :]], policy
