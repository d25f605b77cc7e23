"""Off, Static, MeanCap and the way stages compose with policies."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dsde.policies
from dsde.core.errors import InvalidInput
from dsde.policies import BatchView, MeanCap, Need, Off, Plan, Policy, Stage, Static
from dsde.policies.base import IntArray


def batch_of(rooms: list[int]) -> BatchView:
    num = len(rooms)
    return BatchView(np.arange(num), np.array(rooms, np.int64), np.ones(num), num_decoding=num)


class Wanting(Policy):
    """Wants what it is told to."""

    def __init__(self, predicted: list[float], votes: list[bool]) -> None:
        self.predicted, self.votes = predicted, votes
        self.forgotten: list[int] = []

    def plan(self, batch: BatchView) -> Plan:
        predicted = np.array(self.predicted, np.float64)
        lengths = np.minimum(np.floor(predicted + 0.5).astype(np.int64), batch.rooms)
        return Plan(lengths, predicted, np.array(self.votes, np.bool_))

    def forget(self, slots: IntArray) -> None:
        self.forgotten += slots.tolist()


def test_off_drafts_nothing() -> None:
    plan = Off().plan(batch_of([5, 0, 7]))
    assert plan.lengths.tolist() == [0, 0, 0]
    assert not plan.votes.any()


def test_static_drafts_its_length_or_the_room() -> None:
    plan = Static(4).plan(batch_of([5, 0, 3]))
    assert plan.lengths.tolist() == [4, 0, 3]
    assert plan.predicted.tolist() == [4.0, 4.0, 4.0]
    assert plan.votes.all()
    assert Static(4).needs is Need.NOTHING


@pytest.mark.parametrize("length", [-1, 129, 2.0, "4", None])
def test_static_refuses_bad_lengths(length: object) -> None:
    with pytest.raises(InvalidInput, match="length must be a whole number from 0 to 128"):
        Static(length)  # type: ignore[arg-type]


def test_mean_cap_rounds_the_mean_of_the_real_values() -> None:
    plan = (Wanting([2.4, 2.4, 9.0], [True] * 3) | MeanCap()).plan(batch_of([50] * 3))
    assert plan.cap == 5.0  # 4.6
    assert plan.lengths.tolist() == [2, 2, 5]


def test_mean_cap_of_the_release_rounds_up_before_and_after() -> None:
    plan = (Wanting([2.4, 2.4, 9.0], [True] * 3) | MeanCap("ceil")).plan(batch_of([50] * 3))
    assert plan.cap == 5.0  # (3 + 3 + 9) / 3
    plan = (Wanting([2.4, 2.4, 9.1], [True] * 3) | MeanCap("ceil")).plan(batch_of([50] * 3))
    assert plan.cap == 6.0  # 16 / 3


def test_halves_round_up() -> None:
    for predicted, cap in (([2.0, 3.0], 3.0), ([3.0, 4.0], 4.0)):
        assert (Wanting(predicted, [True] * 2) | MeanCap()).plan(batch_of([50] * 2)).cap == cap


def test_mean_cap_leaves_those_alone_who_do_not_vote() -> None:
    plan = (Wanting([2.0, 4.0, 20.0], [True, True, False]) | MeanCap()).plan(batch_of([50] * 3))
    assert plan.cap == 3.0
    assert plan.lengths.tolist() == [2, 3, 20]


def test_without_voters_there_is_no_cap() -> None:
    plan = (Wanting([2.0, 4.0], [False, False]) | MeanCap()).plan(batch_of([50] * 2))
    assert plan.cap is None
    assert plan.lengths.tolist() == [2, 4]
    assert (Off() | MeanCap()).plan(batch_of([3])).cap is None


def test_mean_cap_with_static() -> None:
    plan = (Static(4) | MeanCap()).plan(batch_of([9, 1]))
    assert plan.cap == 4.0
    assert plan.lengths.tolist() == [4, 1]


def test_the_lowest_of_two_caps_is_reported() -> None:
    predicted = [2.4, 2.4, 9.1]
    for stages in ([MeanCap("ceil"), MeanCap()], [MeanCap(), MeanCap("ceil")]):
        plan = (Wanting(predicted, [True] * 3) | stages[0] | stages[1]).plan(batch_of([50] * 3))
        assert plan.cap == 5.0
        assert plan.lengths.max() == 5


@given(
    st.lists(st.tuples(st.floats(0, 64), st.booleans(), st.integers(0, 64)), min_size=1, max_size=50),
    st.sampled_from(["nearest", "ceil"]),
)
def test_no_voter_exceeds_the_cap(rows: list[tuple[float, bool, int]], rounding: str) -> None:
    predicted, votes, rooms = (list(column) for column in zip(*rows, strict=True))
    policy, batch = Wanting(predicted, votes), batch_of(rooms)
    free = policy.plan(batch)
    capped = (policy | MeanCap(rounding)).plan(batch)  # type: ignore[arg-type]
    voters = free.votes
    assert (capped.lengths <= batch.rooms).all()
    assert (capped.lengths[~voters] == free.lengths[~voters]).all()
    if not voters.any():
        assert capped.cap is None
        return
    assert capped.cap is not None
    assert (capped.lengths[voters] == np.minimum(free.lengths[voters], capped.cap)).all()
    assert min(p for p, v in zip(predicted, votes, strict=True) if v) - 0.5 - 1e-9 <= capped.cap
    assert capped.cap <= math.ceil(max(p for p, v in zip(predicted, votes, strict=True) if v)) + 1


def test_mean_cap_refuses_unknown_rounding() -> None:
    with pytest.raises(InvalidInput, match="rounding must be one of nearest, ceil, not 'down'"):
        MeanCap("down")  # type: ignore[arg-type]


def test_stages_run_in_order_and_state_calls_reach_the_policy() -> None:
    order: list[str] = []

    class Noting(Stage):
        def __init__(self, name: str) -> None:
            self.name = name

        def apply(self, plan: Plan, batch: BatchView) -> None:
            order.append(self.name)

    policy = Wanting([1.0], [True])
    staged = policy | Noting("first") | Noting("second")
    staged.plan(batch_of([4]))
    staged.forget(np.array([7]))
    assert order == ["first", "second"]
    assert policy.forgotten == [7]


def test_exported_names_exist() -> None:
    assert all(hasattr(dsde.policies, name) for name in dsde.policies.__all__)
    assert len(set(dsde.policies.__all__)) == len(dsde.policies.__all__)
