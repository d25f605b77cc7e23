"""Advice for a batch that is nearly the one it was made for: what it says of each goes with them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dsde.core.stops import StopByWorth
from dsde.policies import BatchView, Plan
from dsde.policies.advice import Advice


def batch(slots: list[int], room: int = 100) -> BatchView:
    num = len(slots)
    return BatchView(np.array(slots), np.full(num, room), np.zeros(num), num)


def advice(is_ruled: bool = True) -> Advice:
    """For slots 4 to 7, in which everything differs."""
    view = batch([4, 5, 6, 7])
    rule = StopByWorth(
        weights=np.ones(3),
        offsets=np.array([0.1, 0.2, 0.3, 0.4]),
        outlooks=np.array([0.5, 0.6, 0.7, 0.8]),
        keep_above=0.01,
        go_on_above=0.02,
        pass_above=0.03,
        usual=np.array([1, 2, 3, 4]),
    )
    plan = Plan.wanting(np.array([2, 4, 6, 8]), view, outlook=rule.outlooks)
    plan.stop = rule if is_ruled else None
    flags = dict.fromkeys(("is_probing", "is_blind", "is_roomless", "is_doubtful"), False)
    return Advice(view, plan, 800.0, rule, **flags, foregone_s=0.02)


@pytest.mark.parametrize("is_ruled", [True, False])
def test_who_is_left_drafts_on_as_planned(is_ruled: bool) -> None:
    left = batch([7, 5], room=6)
    found = advice(is_ruled).drafting_on(left, np.array([3, 1]))
    assert found.batch is left
    assert found.plan.lengths.tolist() == [6, 4]
    assert found.plan.predicted.tolist() == [8, 4]
    assert found.plan.votes.tolist() == [True, True]
    assert found.plan.signals["outlook"].tolist() == [0.8, 0.6]
    assert found.rule is not None
    assert found.rule.usual is not None
    assert found.rule.offsets.tolist() == [0.4, 0.2]
    assert found.rule.outlooks.tolist() == [0.8, 0.6]
    assert found.rule.usual.tolist() == [4, 2]
    assert found.plan.stop is (found.rule if is_ruled else None)
    assert found.planned_rate == 400  # of half as many


@pytest.mark.parametrize("is_ruled", [True, False])
def test_who_joins_does_not_draft_yet(is_ruled: bool) -> None:
    found = advice(is_ruled).drafting_on(batch([9, 6]), np.array([-1, 2]))
    assert found.plan.lengths.tolist() == [0, 6]
    assert found.plan.predicted.tolist() == [0, 6]
    assert found.plan.votes.tolist() == [False, True]
    np.testing.assert_array_equal(found.plan.signals["outlook"], [np.nan, 0.7])
    assert found.rule is not None
    assert found.rule.usual is not None
    assert found.rule.usual.tolist() == [0, 3]
    assert found.planned_rate == 0, "what comes of it says nothing of the plan"


def test_a_rest_goes_on_with_newcomers_of_whom_nothing_is_known() -> None:
    others = batch([9, 6])
    found = advice().resting_on(others, np.array([-1, 2]), 5)
    assert found.batch is others
    assert not found.plan.lengths.any()
    assert found.plan.num_resting == 5
    np.testing.assert_array_equal(found.plan.signals["outlook"], [np.nan, 0.7])
    assert found.foregone_s == 0.01  # half as many save half as much


def test_it_fits_the_same_batch_alone() -> None:
    told = advice()
    assert told.fits(batch([4, 5, 6, 7], room=1))
    for other in (batch([4, 5, 6]), batch([4, 5, 7, 6])):
        assert not told.fits(other)
    prompts = batch([4, 5, 6, 7])
    prompts.num_prompt_tokens = 8
    assert told.fits(prompts), "which are read anyway"
    for other in (replace(told, is_doubtful=True), replace(told, rule=None)):
        assert not other.fits(prompts)
    prompts.num_joining = 3
    assert told.fits(prompts), "with nothing to read it does not matter who joins"
    prompts.num_missed = np.array([0, 0, 60, 0])
    assert not told.fits(prompts)
