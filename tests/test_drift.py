"""A machine that becomes slower or faster little by little, and steps that differ by accident."""

from __future__ import annotations

import numpy as np
import pytest

from dsde.policies.base import Outcome
from dsde.policies.cost import CostModel
from dsde.policies.curve import Curve
from dsde.policies.drift import LEAST, LONGEST_UNSEEN, MOST_APART, MOST_AT_ONCE, NUM_STEPS, Drift
from dsde.policies.steadiness import Steadiness

NOISE = 0.1


def outcome_of(length: int, drift: float) -> Outcome:
    return Outcome(
        slots=np.array([0]),
        drafted=np.array([length]),
        accepted=np.array([0]),
        klds=np.empty(0),
        temperatures=np.ones(1),
        draft_s=(1e-3 + 5e-3 * length) * drift if length else 0.0,
        verify_s=(28e-3 + 1e-3 * length) * drift,
        num_decoding=1,
        num_drafted=length,
        num_draft_passes=length,
    )


def prices(cost: CostModel) -> np.ndarray:
    return np.array([*cost.verify_s([1, 2, 3, 5]), float(cost.draft_s(1)), cost.start_s])


@pytest.mark.parametrize("change", [1.2, 0.8])
@pytest.mark.parametrize("length", [0, 4])
def test_sizes_that_are_not_in_use_follow_those_that_are(length: int, change: float) -> None:
    """Whoever rests compares what steps take now with drafts of a machine that was slower, or the other way round. Not
    all of it is taken for the machine's: a part is learnt of the size itself meanwhile."""
    cost = CostModel()
    for number in range(128):
        cost.observe(outcome_of((0, 1, 2, 4)[number % 4], 1.0))
    before = prices(cost)
    for drift in np.geomspace(1.0, change, 200):
        cost.observe(outcome_of(length, float(drift)))
    for _ in range(32):
        cost.observe(outcome_of(length, change))
    shares = np.log(prices(cost) / before)[:5] / np.log(change)  # what a draft takes once is learnt by drafting
    assert (shares > 0.4).all()
    assert (shares < 1.1).all()


def test_a_size_that_was_not_known_well_says_nothing_of_the_machine() -> None:
    """Its first steps were slow, and the others are as they always were."""
    cost = CostModel()
    for number in range(128):
        cost.observe(outcome_of((1, 2, 4)[number % 3], 1.0))
    before = prices(cost)
    for number in range(32):
        cost.observe(outcome_of(0, 1.2 if number < 4 else 1.0))
    np.testing.assert_allclose(prices(cost)[1:], before[1:], rtol=0.01)


@pytest.mark.parametrize("late", [1.15, 3.0])
def test_accidents_are_no_change(late: float) -> None:
    """Every fifth step is late, and none is early: on average they take longer than mostly, for ever."""
    drift, rng, moved, total = Drift(), np.random.default_rng(0), [], 1.0
    for number in range(2000):
        total *= drift.observe(8, (late if number % 5 == 0 else 1.0) * float(rng.lognormal(0, 0.05)))
        moved.append(total)
    assert 0.93 < min(moved) <= max(moved) < 1.07


def test_what_drafts_take_is_not_changed_by_steps_that_are_late_while_nobody_drafts() -> None:
    cost, rng = CostModel(), np.random.default_rng(0)
    for number in range(128):
        cost.observe(outcome_of((0, 1, 2, 4)[number % 4], 1.0))
    before = prices(cost)
    for number in range(2000):
        cost.observe(outcome_of(0, (1.15 if number % 5 == 0 else 1.0) * float(rng.lognormal(0, 0.02))))
    np.testing.assert_allclose(prices(cost), before, rtol=0.04)


def test_a_few_steps_at_once_count_as_many() -> None:
    totals = []
    for num in (1, MOST_AT_ONCE):
        drift, total = Drift(), 1.0
        for seconds in (1.0, 1.1):
            for _ in range(NUM_STEPS // num + 1):
                total *= drift.observe(1, seconds, num)
        totals.append(total)
    assert totals == pytest.approx([1.1, 1.1], abs=LEAST)


def test_one_rest_that_was_slow_changes_nothing() -> None:
    """It may be of hundreds of steps and is one figure all the same."""
    drift = Drift()
    for number in range(64):
        assert drift.observe(1, 1.0 if number % 4 else 1.1, 256) == 1.0


@pytest.mark.parametrize("grown", [1.06, 1.5])
def test_cohorts_whose_contexts_grow_and_are_short_again_do_not_make_everything_dearer_for_ever(grown: float) -> None:
    """They end one by one, and the few who are left at last are seen too shortly to tell anything."""
    drift, total, totals = Drift(), 1.0, []
    for _ in range(12):
        for step in range(200):
            total *= drift.observe(8, 1.0 + (grown - 1.0) * step / 200)
        totals.append(total)
        for left in range(7, 0, -1):
            for _ in range(12):
                total *= drift.observe(left, 0.9 * grown)
    assert totals[0] > 1 + (grown - 1) / 2
    assert max(totals) < 1.02 * grown


def test_a_change_that_somebody_else_has_told_is_not_told_again() -> None:
    drift = Drift()
    for _ in range(NUM_STEPS):
        assert drift.observe(1, 1.0) == 1.0
    drift.scale(1.5)
    for _ in range(NUM_STEPS):
        assert drift.observe(1, 1.5) == 1.0


def observed(drift: Drift, seconds: dict[int, float], num: int) -> float:
    """By what was multiplied, in so many steps of each of these sizes by turns."""
    total = 1.0
    for _ in range(num):
        for size, each in seconds.items():
            total *= drift.observe(size, each)
    return total


def test_what_was_out_of_use_may_have_changed_for_another_reason() -> None:
    drift = Drift()
    assert observed(drift, {1: 1.0}, NUM_STEPS) == 1.0
    assert observed(drift, {2: 3.0}, LONGEST_UNSEEN + 1) == 1.0
    assert observed(drift, {1: 1.2}, 10 * NUM_STEPS) == 1.0
    # And what comes into use on a machine that has changed tells no change of its own.
    assert observed(drift, {1: 1.32}, 10 * NUM_STEPS) == pytest.approx(1.1, abs=LEAST)
    assert observed(drift, {3: 5.0}, 10 * NUM_STEPS) == 1.0
    assert observed(drift, {3: 5.5}, 10 * NUM_STEPS) == pytest.approx(1.1, abs=LEAST)


@pytest.mark.parametrize("change", [1.15, 0.85])
def test_one_size_that_changes_by_itself_says_nothing_of_the_machine(change: float) -> None:
    drift = Drift()
    assert observed(drift, {1: 1.0, 8: 2.0}, NUM_STEPS) == 1.0
    assert observed(drift, {1: 1.0, 8: 2.0 * change}, 10 * NUM_STEPS) == 1.0
    assert observed(drift, {1: change**2, 8: 2.0 * change}, 10 * NUM_STEPS) == pytest.approx(change, abs=LEAST)


def test_the_price_of_one_length_beside_another_is_that_of_its_own_steps() -> None:
    """By turns short drafts and long ones, of which only these become dearer."""
    cost = CostModel()
    for dearer in (1.0, 1.15):
        for _ in range(200):
            for length in (1, 7):
                outcome = outcome_of(length, 1.0)
                outcome.verify_s = 20e-3 if length == 1 else 24e-3 * dearer
                cost.observe(outcome)
    assert cost.verify_s([2, 8]) == pytest.approx([20e-3, 24e-3 * 1.15])
    assert float(cost.draft_s(1)) == pytest.approx(5e-3, rel=0.05)


@pytest.mark.parametrize("lengths", [(3,), (3, 5), (1, 3, 5), (1, 3, 5, 7)])
def test_a_machine_is_followed_whatever_lengths_there_are_by_turns(lengths: tuple[int, ...]) -> None:
    cost, rng = CostModel(), np.random.default_rng(0)
    for number in range(1200):
        drift = 1 + 0.2 * float(np.clip((number - 300) / 400, 0, 1))
        length = 0 if number < 60 else int(rng.choice(lengths))
        cost.observe(outcome_of(length, drift * float(rng.lognormal(0, 0.02))))
    assert float(cost.verify_s(1)) == pytest.approx(1.2 * 28e-3, rel=0.03)


def test_a_size_that_is_rare_does_not_hold_up_the_others() -> None:
    drift = Drift()
    often = dict.fromkeys(range(2), 1.0)
    rarely = {9: 1.0}
    for _ in range(2 * NUM_STEPS):
        assert observed(drift, often, MOST_APART) * observed(drift, rarely, 1) == 1.0
    slower = dict.fromkeys(often, 1.1)
    assert observed(drift, slower, NUM_STEPS) == pytest.approx(1.1, abs=LEAST)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_scaled_is_what_would_be_worked_out_again(seed: int) -> None:
    rng = np.random.default_rng(seed)
    other, curve = Curve(0.01, is_flat_below=True), Curve(0.01, is_flat_below=True, may_fall=True, noise=0.1)
    for each, least in ((other, 1), (curve, 40)):
        for _ in range(60):
            size = int(rng.integers(least, 900))
            each.observe(size, (1 + size / 300) * 1e-3 * float(rng.lognormal(0, 0.1)))
    curve.go_by(None, [other])
    sizes = np.arange(1, 2000, 7)
    before = curve.seconds(sizes)
    for each in (other, curve):
        each.scale(1.7)
    np.testing.assert_allclose(curve.seconds(sizes), 1.7 * before)
    assert float(curve.seconds(50)) == pytest.approx(1.7 * float(np.interp(50, sizes, before)), rel=0.01)
    curve._is_stale = True
    np.testing.assert_allclose(curve.seconds(sizes), 1.7 * before)


def test_a_step_that_was_short_by_accident_does_not_say_what_steps_without_drafts_take() -> None:
    """One is measured now and then while everybody drafts: by the lower one of two they seemed too short."""
    rng, believed = np.random.default_rng(1), []
    for _ in range(100):
        cost = CostModel()
        for number in range(150):
            length = 4 if number % 30 and number > 1 else 0
            cost.observe(outcome_of(length, float(rng.lognormal(0, NOISE))))
        believed.append(float(cost.verify_s(1)) / 28e-3)
    assert np.mean(believed) == pytest.approx(1.0, abs=0.035)
    assert np.std(believed) < 0.7 * NOISE


def test_steps_that_differ_by_accident_are_steady_nevertheless() -> None:
    """What is compared is the median of many of them."""
    rng, steadiness = np.random.default_rng(2), Steadiness()
    for _ in range(400):
        steadiness.observe(float(rng.lognormal(0, NOISE)), 1)
    assert steadiness.spread < NOISE / 2
