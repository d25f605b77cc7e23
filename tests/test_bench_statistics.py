"""Intervals: wide enough for what they claim, in pairs, and honest about few rounds."""

from __future__ import annotations

import numpy as np
import pytest

from dsde.bench.results import Cell, Counts, Findings, Round
from dsde.bench.statistics import Bootstrap, Times, percentiles
from dsde.bench.summary import summarise_cell

ROUNDS, REQUESTS = 4, 12


def measured(rng: np.random.Generator, speed: float, slowness: np.ndarray) -> Times:
    """Requests differ in how fast they are, rounds in how slow the machine is; both are drawn anew for every run."""
    tokens = rng.integers(20, 90, REQUESTS).astype(float)
    ease = rng.normal(1.0, 0.15, REQUESTS)
    seconds = tokens / (speed * ease) * slowness[:, None] * rng.normal(1, 0.02, (ROUNDS, REQUESTS))
    return Times(np.tile(tokens, (ROUNDS, 1)), seconds)


def test_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    rng = np.random.default_rng(0)
    truth = measured_mean(rng)
    hits = 0
    for seed in range(150):
        estimate = Bootstrap(ROUNDS, REQUESTS, seed).speed(measured(rng, 40.0, rng.normal(1.0, 0.05, ROUNDS)))
        assert estimate.low <= estimate.value <= estimate.high
        hits += estimate.low <= truth <= estimate.high
    assert hits >= 0.88 * 150


def measured_mean(rng: np.random.Generator) -> float:
    return float(np.mean([measured(rng, 40.0, rng.normal(1.0, 0.05, ROUNDS)).speed for _ in range(3000)]))


def test_a_slow_round_widens_speeds_but_not_ratios() -> None:
    rng = np.random.default_rng(1)
    tokens = np.full((3, 8), 50.0)
    slowness = np.array([1.0, 2.5, 1.0])[:, None]
    base = Times(tokens, slowness * rng.normal(2.0, 0.01, (3, 8)))
    other = Times(tokens, slowness * rng.normal(1.0, 0.01, (3, 8)))
    bootstrap = Bootstrap(3, 8)
    speed, ratio = bootstrap.speed(other), bootstrap.ratio(other, base)
    assert speed.high / speed.low > 1.5
    assert ratio.high / ratio.low < 1.05
    assert ratio.value == pytest.approx(2.0, rel=0.02)


def test_two_rounds_that_differ_are_both_within_the_interval() -> None:
    times = Times(np.full((2, 4), 10.0), np.array([[1.0] * 4, [2.0] * 4]))
    estimate = Bootstrap(2, 4).speed(times)
    assert estimate.low == pytest.approx(5.0)
    assert estimate.high == pytest.approx(10.0)


def test_a_contender_is_exactly_as_fast_as_itself() -> None:
    times = measured(np.random.default_rng(2), 30.0, np.ones(ROUNDS))
    ratio = Bootstrap(ROUNDS, REQUESTS).ratio(times, times)
    assert (ratio.low, ratio.value, ratio.high) == (1.0, 1.0, 1.0)


def test_percentiles() -> None:
    assert percentiles([float(n) for n in range(1, 101)]) == pytest.approx((50.5, 90.1, 99.01))
    assert percentiles([]) == (0.0, 0.0, 0.0)


def test_a_row_adds_up() -> None:
    """Worked out by hand: two requests of 10 tokens, 4 and 5 steps after the first token, 2 rounds alike."""
    counts = Counts(11, 20, 9, 8, 20, 9, [2, 0, 6])
    done = Round(3.0, [10, 10], [1.0, 2.0], [0.2, 0.4], [1.1, 2.2], counts)
    off = Round(4.0, [10, 10], [2.0, 2.0], [0.2, 0.2], [2.0, 2.0], Counts(20, 0, 18, 0, 0, 0, []))
    cell = Cell(
        "mixed", 1, 0.0, ["code", "chat"], [5, 6], {"off": Findings([off, off]), "static:3": Findings([done, done])}
    )
    summary = summarise_cell(cell)
    row = summary.row("static:3")
    assert row is not None
    assert summary.best_static == "static:3"
    assert row.tokens_per_s.value == pytest.approx(20 / 3)
    assert row.vs_off.value == pytest.approx(4 / 3)
    assert row.vs_static is not None
    assert row.vs_static.value == 1.0
    assert row.latency_s == pytest.approx(1.65)
    assert row.per_token_s[0] == pytest.approx(0.15)  # between 0.9 / 9 and 1.8 / 9
    assert (row.num_tokens, row.num_target_passes, row.num_draft_passes) == (20, 11, 20)
    assert (row.num_draft_tokens, row.num_wasted_tokens) == (20, 11)
    assert row.acceptance_rate == pytest.approx(0.45)
    assert row.acceptance_length == pytest.approx(1 + 9 / 8)
    assert row.mean_length == pytest.approx(20 / 9)
    assert row.drafts_by_length == (2, 4, 0, 12)
