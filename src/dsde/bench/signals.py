"""How well signals foretell acceptance: correlation, over the steps of traced requests, with the share that stood.

The draft's entropy is that of the step itself, which is known before it is verified. KLDs are known only afterwards:
mean KLD is that of the step before, and WVIR (as DSDE computes it) that of all tokens verified before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dsde.bench.results import Trace
from dsde.policies.base import BatchView, Outcome
from dsde.policies.dsde import DSDE

HINDSIGHT = "mean KLD of the same step"
SIGNALS = ("draft entropy", "mean KLD", "WVIR", HINDSIGHT)


@dataclass(frozen=True, slots=True)
class Correlation:
    value: float | None
    """Pearson's; None where one of the two never changes"""
    num_steps: int


def correlations(traces: Sequence[Trace]) -> dict[str, Correlation]:
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in SIGNALS}
    for trace in traces:
        for name, found in _pairs(trace).items():
            pairs[name] += found
    return {name: _correlate(found) for name, found in pairs.items()}


def _pairs(trace: Trace) -> dict[str, list[tuple[float, float]]]:
    """(signal, acceptance rate) of every step that has the signal."""
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in SIGNALS}
    steps = [step for step in trace.steps if step["drafted"]]
    wvirs = _wvirs(steps)
    previous: float | None = None
    for step, wvir in zip(steps, wvirs, strict=True):
        rate, kld = step["accepted"] / step["drafted"], float(np.mean(step["klds"]))
        if step["entropies"]:
            pairs["draft entropy"].append((float(np.mean(step["entropies"])), rate))
        if previous is not None:
            pairs["mean KLD"].append((previous, rate))
        if wvir is not None:
            pairs["WVIR"].append((wvir, rate))
        pairs[HINDSIGHT].append((kld, rate))
        previous = kld
    return pairs


def _wvirs(steps: Sequence[dict[str, Any]]) -> list[float | None]:
    """What DSDE would have known of stability before each step."""
    policy, slot, one = DSDE(), np.zeros(1, np.int64), np.ones(1)
    wvirs: list[float | None] = []
    for step in steps:
        plan = policy.plan(BatchView(slot, np.full(1, 1000), one, num_decoding=1))
        value = float(plan.signals["wvir"][0])
        wvirs.append(None if np.isnan(value) else value)
        drafted, accepted = np.array([step["drafted"]]), np.array([step["accepted"]])
        policy.observe(Outcome(slot, drafted, accepted, np.array(step["klds"]), one))
    return wvirs


def _correlate(pairs: Sequence[tuple[float, float]]) -> Correlation:
    table = np.array(pairs, np.float64).reshape(-1, 2)
    if len(table) < 3 or (table.std(axis=0) == 0).any():
        return Correlation(None, len(table))
    signal, rate = (table - table.mean(axis=0)).T
    return Correlation(float(signal @ rate / np.sqrt(signal @ signal * (rate @ rate))), len(table))
