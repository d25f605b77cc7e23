"""Correlations of signals with acceptance: against NumPy, and against the formulas written out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dsde.bench.results import Trace
from dsde.bench.signals import HINDSIGHT, correlations


def traced(steps: list[dict[str, Any]]) -> Trace:
    return Trace("static:4", "mixed", 0.0, "code", "", 3, [], steps)


def random_steps(seed: int, count: int = 40) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    return [
        {
            "drafted": 4,
            "accepted": int(rng.integers(0, 5)),
            "klds": rng.exponential(1.0, 4).tolist(),
            "entropies": rng.exponential(1.0, 4).tolist(),
        }
        for _ in range(count)
    ]


def stability(klds: list[float]) -> float:
    """WVIR: the weighted variance of the last 10 KLDs over that of the last 30, the newest weighing most."""

    def variance(newest_first: np.ndarray) -> float:
        weights = 0.85 ** np.arange(len(newest_first))
        mean = np.average(newest_first, weights=weights)
        return float(np.average((newest_first - mean) ** 2, weights=weights))

    newest_first = np.array(klds[::-1])
    return variance(newest_first[:10]) / variance(newest_first[:30])


def test_what_was_known_before_a_step_is_held_against_it() -> None:
    requests = [random_steps(seed) for seed in (1, 2)]
    found = correlations([traced(steps) for steps in requests])
    rates = [[step["accepted"] / 4 for step in steps] for steps in requests]
    means = [[float(np.mean(step["klds"])) for step in steps] for steps in requests]
    entropies = [np.mean(step["entropies"]) for steps in requests for step in steps]
    assert found["draft entropy"].value == pytest.approx(np.corrcoef(entropies, np.concatenate(rates))[0, 1])
    assert found[HINDSIGHT].value == pytest.approx(np.corrcoef(np.concatenate(means), np.concatenate(rates))[0, 1])
    earlier, later = np.concatenate([m[:-1] for m in means]), np.concatenate([r[1:] for r in rates])
    assert found["mean KLD"].value == pytest.approx(np.corrcoef(earlier, later)[0, 1])
    wvirs, known_rates = [], []
    for steps, shares in zip(requests, rates, strict=True):
        verified: list[float] = []
        for step, rate in zip(steps, shares, strict=True):
            if len(verified) >= 30:
                wvirs.append(stability(verified))
                known_rates.append(rate)
            verified += step["klds"]
    assert found["WVIR"].value == pytest.approx(np.corrcoef(wvirs, known_rates)[0, 1])
    assert found["WVIR"].num_steps == len(wvirs)


def test_a_signal_that_never_changes_correlates_with_nothing() -> None:
    steps = random_steps(3)
    for step in steps:
        step["entropies"] = [1.0] * 4
    assert correlations([traced(steps)])["draft entropy"].value is None


def test_steps_without_a_draft_say_nothing() -> None:
    steps = random_steps(4)
    pauses = [{"drafted": 0, "accepted": 0, "klds": [], "entropies": []}] * 3
    mixed = [*steps[:20], *pauses, *steps[20:]]
    assert correlations([traced(mixed)]) == correlations([traced(steps)])
