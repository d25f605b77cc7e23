"""TapOut: its index written out here, its arms left as they would be alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from dsde.core.errors import InvalidInput
from dsde.policies import BatchView, Need, Outcome, Static, make_policy
from dsde.policies.adaedl import AdaEDL
from dsde.policies.tapout import TapOut


def view(count: int = 3) -> BatchView:
    return BatchView(np.arange(count), np.full(count, 50), np.zeros(count), count)


def outcome(drafted: int, accepted: list[int], seconds: float) -> Outcome:
    count = len(accepted)
    klds, temperatures = np.empty(0), np.zeros(count)
    return Outcome(np.arange(count), np.full(count, drafted), np.array(accepted), klds, temperatures, verify_s=seconds)


def arms() -> list[tuple[str, Any]]:
    return [("static:1", Static(1)), ("static:4", Static(4)), ("static:8", Static(8))]


def test_ucb_by_its_rule() -> None:
    policy = TapOut(arms())
    rng = np.random.default_rng(0)
    rates: list[list[float]] = [[], [], []]
    for step in range(300):
        length = int(policy.plan(view()).lengths[0])
        arm = [1, 4, 8].index(length)
        if step < 3:
            assert arm == step
        else:
            unit = max(max(seen) for seen in rates)
            total = sum(map(len, rates))
            scores = [sum(r) / len(r) / unit + math.sqrt(2 * math.log(total) / len(r)) for r in rates]
            assert scores[arm] == pytest.approx(max(scores))
        accepted = [int(rng.integers(0, length + 1)) for _ in range(3)]
        seconds = 0.01 + 0.002 * length
        policy.observe(outcome(length, accepted, seconds))
        rates[arm].append((sum(accepted) / 3 + 1) / seconds)


@pytest.mark.parametrize("method", ["ucb", "thompson"])
def test_the_faster_arm_wins(method: Any) -> None:
    policy = TapOut(arms(), method=method, seed=1)
    rng = np.random.default_rng(1)
    played = []
    for _ in range(3000):
        length = int(policy.plan(view(8)).lengths[0])
        played.append(length)
        accepted = np.minimum(rng.geometric(0.15, 8) - 1, length).tolist()
        policy.observe(outcome(length, accepted, 0.010 + 0.004 * length))
    # Expected tokens a second: 132 for 1, 143 for 4, 106 for 8.
    late = played[1000:]
    assert late.count(4) > late.count(1) > late.count(8)


def test_a_step_teaches_the_arm_that_planned_it_and_no_other() -> None:
    first, second = AdaEDL(threshold=0.5), AdaEDL(threshold=0.5)
    policy = TapOut([("a", first), ("b", second)])
    alone = AdaEDL(threshold=0.5)
    policy.plan(view())
    policy.observe(outcome(5, [1, 0, 5], 0.01))
    alone.observe(outcome(5, [1, 0, 5], 0.01))
    np.testing.assert_array_equal(first.plan(view()).signals["lambda"], alone.plan(view()).signals["lambda"])
    np.testing.assert_array_equal(second.plan(view()).signals["lambda"], [0.5] * 3)
    policy.forget(np.arange(3))
    np.testing.assert_array_equal(first.plan(view()).signals["lambda"], [0.5] * 3)


def test_blend_is_within_one_and_ignores_steps_without_drafts() -> None:
    policy = TapOut(arms(), reward="blend")
    for _ in range(50):
        length = int(policy.plan(view()).lengths[0])
        policy.observe(outcome(length, [length] * 3, 0.01))
    assert (policy._sums <= policy._num_played).all()
    before = policy._num_played.copy()
    policy.plan(view())
    policy.observe(outcome(0, [0, 0, 0], 0.01))
    np.testing.assert_array_equal(policy._num_played, before)


def test_nobody_rests_for_those_who_may_be_chosen_next() -> None:
    batch = BatchView(np.arange(2), np.full(2, 9), np.zeros(2), 2)
    policy = make_policy("tapout:[off,static:4]")
    assert policy.plan(batch).num_resting == 0
    assert make_policy("off").plan(batch).num_resting > 0


def test_needs_are_those_of_its_arms() -> None:
    assert make_policy("tapout:[dsde,confidence:0.4]").needs == Need.KLD | Need.TOKEN_PROB


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("tapout:[svip]", "at least two policies"),
        ("tapout:[svip,nonsense]", "unknown policy 'nonsense'"),
        ("tapout:[svip,static:4],method=best", "method must be one of ucb, thompson"),
        ("tapout:svip", "policies must be a list"),
    ],
)
def test_bad_specs(spec: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        make_policy(spec)


def test_arms_may_have_stages_and_options() -> None:
    policy = make_policy("tapout:[svip:0.3,c=0.15; dsde; static:4|meancap],method=thompson,seed=3")
    assert isinstance(policy, TapOut)
    assert [name for name, _ in policy.arms] == ["svip:0.3,c=0.15", "dsde", "static:4|meancap"]
