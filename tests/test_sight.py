"""Whether tokens are looked at while drafted, or lengths decided beforehand: by what each way brings and takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dsde.core.stops import StopByWorth, make_looks
from dsde.policies import Auto, BatchView, CostModel, Outcome
from dsde.policies.sight import FIRST_TRY, LAST_TRY, NUM_TRIES, Sight, fill_chances
from dsde.policies.start import Start


def ways(sight: Sight, num_sequences: int, num: int, starts_s: tuple[float, float] = (0.0, 0.0)) -> list[bool]:
    """Of so many drafts, whether a rule decides."""
    found = []
    for _ in range(num):
        found.append(sight.is_worth_it(num_sequences, starts_s) != sight.is_try(num_sequences))
        sight.count(num_sequences, found[-1])
    return found


def test_a_draft_that_had_been_begun_before_is_no_try() -> None:
    sight = Sight()
    ways(sight, 8, FIRST_TRY)
    assert sight.is_try(8)
    assert not sight.count(8, True)
    assert ways(sight, 8, NUM_TRIES + 1) == [False] * NUM_TRIES + [True]


def test_the_other_way_is_tried_ever_more_rarely() -> None:
    found = ways(Sight(), 8, 3000)
    tries = np.flatnonzero(~np.array(found))
    firsts = tries[::NUM_TRIES]
    assert firsts[0] == FIRST_TRY
    np.testing.assert_array_equal(tries.reshape(-1, NUM_TRIES), firsts[:, None] + np.arange(NUM_TRIES))
    gaps = np.diff(firsts) - NUM_TRIES
    assert gaps[:5].tolist() == [32, 64, 128, 256, LAST_TRY]
    assert (gaps[5:] == LAST_TRY).all()


def test_the_way_that_brings_more_tokens_per_second_is_taken_for_every_size_of_batch() -> None:
    sight = Sight()
    for _ in range(8):  # a rule brings a tenth more in as long
        sight.observe(1, (2.0, 2.2), (0.02, 0.02))
        sight.observe(8, (2.0, 2.2), (0.02, 0.02))
    assert sight.is_worth_it(1, (0.0, 0.0))
    assert sight.is_worth_it(1, (0.0, 0.0015))
    assert not sight.is_worth_it(1, (0.0, 0.003))  # but begins so much later
    assert not sight.is_worth_it(1, (0.0, 0.0021)), "where it brings a little less it stays as it is"
    assert sight.is_worth_it(1, (0.0, 0.0019))
    assert sight.is_worth_it(1, (0.0, 0.0021))
    assert sight.is_worth_it(8, (0.0, 0.0021))
    assert sight.is_worth_it(64, (0.0, 1.0)), "of which nothing is known"


def test_behind_the_tokens_that_were_drafted_there_is_the_outlook() -> None:
    chances = fill_chances(np.array([2, 0, 1]), np.array([0.1, 0.2, 0.3]), np.array([0.7, 0.8, 0.9]), 3)
    np.testing.assert_array_equal(chances, [[0.1, 0.2, 0.7], [0.8, 0.8, 0.8], [0.3, 0.9, 0.9]])


def test_what_a_draft_takes_once_is_what_remains_if_others_tell_what_a_pass_takes() -> None:
    start = Start()
    for _ in range(12):
        start.observe(3, 1.0, 0.7e-3 + 3 * 0.5e-3)
    assert start.seconds == 0
    assert not start.is_known
    start.observe_beside(3, 1.0, 0.7e-3 + 3 * 0.5e-3, pass_s=0.5e-3)
    assert start.seconds == pytest.approx(0.7e-3)
    assert start.is_known
    assert not start.is_told


def test_drafts_never_take_less_than_half_of_what_their_passes_do() -> None:
    """What remains of a few tries may be less than nothing, if they were longer."""
    sight = Sight()
    for _ in range(20):
        sight.observe(4, (8.0, 9.0), (10e-3, 10e-3))
    assert sight.is_worth_it(4, (-1e-3, 0.0))
    assert not sight.is_worth_it(4, (-20e-3, 0.0))


def test_of_what_remains_the_median_of_a_few_tries_counts() -> None:
    """One of them may have been held up; but not once drafts of that way have told it themselves."""
    start = Start()
    for once_s in (0.7e-3, 5e-3, 0.6e-3, 0.8e-3):
        start.observe_beside(2, 1.0, once_s + 2 * 0.5e-3, pass_s=0.5e-3)
    assert start.seconds == pytest.approx(0.75e-3)
    start.renew()
    for num_passes in [1, 2, 3, 4] * 8:
        start.observe(num_passes, 1.0, 0.1e-3 + num_passes * 0.5e-3)
    assert start.seconds == pytest.approx(0.1e-3)
    start.observe_beside(2, 1.0, 0.2e-3 + 2 * 0.5e-3, pass_s=0.5e-3)
    assert start.seconds == pytest.approx(0.2e-3)


def test_drafts_of_other_sizes_do_not_tell_what_one_takes_once_while_nobody_knows_what_a_token_takes() -> None:
    start = Start()
    for num_passes, size, seconds in [(1, 96.0, 1.8e-3), (2, 64.0, 3e-3)] * 16:
        start.observe(num_passes, size, seconds)
    assert start.seconds == 0
    assert not start.is_told


def end_by(rule: StopByWorth, most: int, chances: np.ndarray) -> int:
    """How far a draft goes whose tokens have these chances when they are looked at."""
    only, survival = np.zeros(1, np.int64), np.ones(1)
    for depth in range(most):
        survival = survival * chances[depth]
        if not rule.keeps(depth, only, survival)[0]:
            return depth
        if not rule.goes_on(depth, only, survival, np.array([depth + 1 < most]))[0]:
            return depth + 1
    return most


def serve(
    policy: Auto,
    ruled_s: float,
    num_steps: int,
    obeys: bool = True,
    quick_steps: range = range(0),
    pass_s: float = 0.5e-3,
) -> list[bool | None]:
    """One sequence, whose tokens stand as often as they look sure: nine of ten, or four. Whether a rule decided; None:
    nobody drafted. In `quick_steps` a rule costs nothing."""
    rng = np.random.default_rng(0)
    found: list[bool | None] = []
    for step in range(num_steps):
        plan = policy.plan(BatchView(np.arange(1), np.full(1, 100), np.zeros(1), 1))
        wanted = plan.lengths
        sure = np.where(rng.random(40) < 0.7, 0.95, 0.4)
        signals = np.stack((3 * (1 - sure), sure, 2 * sure - 1), 1)
        if plan.stop is not None and obeys:
            assert isinstance(plan.stop, StopByWorth)
            odds = plan.stop.offsets[0] + make_looks(signals) @ plan.stop.weights
            drafted = np.array([end_by(plan.stop, int(wanted[0]), 1 / (1 + np.exp(-odds)))])
        else:
            drafted = wanted if plan.stop is None else np.minimum(wanted, plan.predicted.astype(np.int64))
        num = int(drafted[0])
        accepted = int(np.minimum.accumulate(rng.random(40) < sure)[:num].sum())
        found.append(plan.stop is not None if num else None)
        is_ruled = plan.stop is not None and obeys
        once_s = 0.1e-3 + ruled_s * (is_ruled and step not in quick_steps)
        policy.settle()
        policy.observe(
            Outcome(
                slots=np.arange(1),
                drafted=drafted,
                accepted=np.array([accepted]),
                klds=np.empty(0),
                temperatures=np.zeros(1),
                draft_signals=signals[:num],
                draft_s=(once_s + pass_s * max(num, 1) if wanted.any() else 0.0) * float(rng.uniform(1, 1.02)),
                verify_s=(2e-3 + 0.02e-3 * num) * float(rng.uniform(1, 1.02)),
                num_decoding=1,
                num_drafted=num,
                num_draft_passes=max(num, 1) if wanted.any() else 0,
                is_ruled=is_ruled,
            )
        )
    return found


@pytest.mark.parametrize(("ruled_s", "is_ruled"), [(0.0, True), (1.5e-3, False)])
def test_tokens_are_looked_at_unless_the_device_waits_too_long_for_that(ruled_s: float, is_ruled: bool) -> None:
    policy = Auto()
    found = [way for way in serve(policy, ruled_s, 1500)[500:] if way is not None]
    assert len(found) > 800
    assert (sum(found) > 0.9 * len(found)) is is_ruled
    assert (sum(found) < 0.1 * len(found)) is not is_ruled
    assert 0 < sum(found) < len(found), "the other way is tried now and then"
    difference = policy.cost.start_of(True) - policy.cost.start_of(False)
    assert difference == pytest.approx(ruled_s, abs=0.3e-3)


@pytest.mark.parametrize("look_share", [0.0, 0.2])
def test_where_looks_take_time_and_tell_nothing_few_are_taken(look_share: float) -> None:
    """As on a CPU. Passes that are looked at tell what one takes, and others take less than that."""
    policy, rng, found = Auto(), np.random.default_rng(0), []
    for _ in range(1500):
        plan = policy.plan(batch_of_one())
        is_looked_at = plan.stop is not None or plan.wants_signals
        num = int(np.minimum(plan.lengths, plan.predicted.astype(np.int64))[0])
        found.append((plan.stop is not None, is_looked_at) if num else None)
        stands = np.minimum.accumulate(rng.random(40) < 0.8)[:num].sum()
        outcome = Outcome(
            slots=np.arange(1),
            drafted=np.array([num]),
            accepted=np.array([stands]),
            klds=np.empty(0),
            temperatures=np.zeros(1),
            draft_signals=rng.random((num, 3)) if is_looked_at else np.empty((0, 3)),
            draft_s=4e-3 * (1 + look_share * is_looked_at) * num,
            verify_s=18e-3 + 0.5e-3 * num,
            num_decoding=1,
            num_drafted=num,
            num_draft_passes=num,
            is_ruled=plan.stop is not None,
        )
        policy.observe(outcome)
    drafts = [each for each in found[500:] if each is not None]
    assert len(drafts) > 900
    if look_share:
        assert sum(is_ruled for is_ruled, _ in drafts) < 0.05 * len(drafts)
        assert 0.2 < sum(is_looked_at for _, is_looked_at in drafts) / len(drafts) < 0.3
        assert policy.cost.start_of(False) >= 0
    assert all(is_looked_at for is_ruled, is_looked_at in drafts if is_ruled)


def test_drafts_that_take_less_than_their_passes_are_told_from_others() -> None:
    start = Start()
    for _ in range(3):
        start.observe_beside(3, 1.0, 3 * 0.4e-3, pass_s=0.5e-3)
    assert start.seconds == 0
    assert start.beside_s == pytest.approx(-0.3e-3)
    start.renew()
    for num_passes in [1, 2, 3, 4] * 8:
        start.observe(num_passes, 1.0, 0.1e-3 + num_passes * 0.5e-3)
    assert start.beside_s == start.seconds > 0


def test_what_a_rule_takes_once_is_in_the_passes_where_all_drafts_are_of_one_token() -> None:
    """What the others take less than such passes is no property of both."""
    cost = CostModel()
    for number in range(40):
        is_ruled = not 20 <= number < 23
        drafted = np.ones(8, np.int64)
        cost.observe(
            Outcome(
                slots=np.arange(8),
                drafted=drafted,
                accepted=drafted,
                klds=np.empty(0),
                temperatures=np.zeros(8),
                draft_signals=np.zeros((8, 3)),
                draft_s=2e-3 + 0.8e-3 * is_ruled,
                verify_s=10e-3,
                num_decoding=8,
                num_drafted=8,
                num_draft_passes=1,
                is_ruled=is_ruled,
            )
        )
    assert cost.beside_of(True) == 0.0
    assert cost.beside_of(False) == pytest.approx(-0.8e-3, rel=0.01)


def batch_of_one() -> BatchView:
    return BatchView(np.arange(1), np.full(1, 100), np.zeros(1), 1)


def test_a_way_that_loses_outright_is_tried_and_not_stuck_to() -> None:
    """Where it does not pay at all the other one still does, and whether it pays again is seen."""
    policy, num = Auto(), 3000
    found = serve(policy, 2.5e-3, num, quick_steps=range(200), pass_s=0.3e-3)
    assert sum(way is True for way in found[100:200]) > 80
    later = found[600:]
    assert sum(way is False for way in later) > 0.9 * len(later)
    back = serve(policy, 2.5e-3, num, quick_steps=range(num), pass_s=0.3e-3)[num // 2 :]
    assert sum(way is True for way in back) > 0.9 * len(back)


def test_where_nobody_obeys_a_rule_there_is_only_one_way() -> None:
    """As in vLLM, where what is expected of it counts instead."""
    policy = Auto()
    found = [way for way in serve(policy, 0.0, 400, obeys=False)[20:] if way is not None]
    assert len(found) > 300
    # Looks are no drafts of its own: they have none either.
    assert sum(found) > 0.97 * len(found)


def test_what_is_saved_of_costs_tells_the_ways_apart() -> None:
    policy = Auto()
    serve(policy, 1.5e-3, 600)
    saved, loaded = policy.cost.to_dict(), Auto()
    loaded.cost.restore(saved)
    assert loaded.cost.start_of(True) == policy.cost.start_of(True) > loaded.cost.start_of(False)
    serve(loaded, 1.5e-3, 12)  # a few drafts of one kind say nothing of the other
    assert loaded.cost.start_of(False) != loaded.cost.start_of(True)
    del saved["ruled_start_s"]  # of an older version
    older = Auto()
    older.cost.restore(saved)
    assert older.cost.start_of(True) == older.cost.start_of(False) == policy.cost.start_of(False)


def drafted(num: int, is_ruled: bool, once_s: float) -> Outcome:
    """One sequence's draft, all of which stood."""
    return Outcome(
        slots=np.arange(1),
        drafted=np.array([num]),
        accepted=np.array([num]),
        klds=np.empty(0),
        temperatures=np.zeros(1),
        draft_signals=np.full((num, 3), 0.5),
        draft_s=once_s + 0.5e-3 * num,
        verify_s=2e-3,
        num_decoding=1,
        num_drafted=num,
        num_draft_passes=num,
        is_ruled=is_ruled,
    )


def test_what_was_restored_of_one_way_outlives_drafts_of_the_other() -> None:
    cost = CostModel()
    cost.restore(CostModel().to_dict() | {"start_s": 0.09e-3, "ruled_start_s": 0.65e-3})
    cost.observe(drafted(2, is_ruled=False, once_s=0.09e-3))
    assert cost.start_of(True) == pytest.approx(0.65e-3)
    assert cost.start_of(False) == pytest.approx(0.09e-3)


def test_what_was_realised_of_one_way_says_nothing_of_the_other() -> None:
    policy = Auto()
    serve(policy, 0.0, 200)
    before = list(policy.advisor.gains)
    draft = next(found for _ in range(40) if (found := policy.advisor.advise(single())).rule is not None)
    policy.advisor.learn(drafted(9, draft.is_ruled, 0.0), draft)
    assert policy.advisor.gains[draft.is_ruled] != before[draft.is_ruled]
    assert policy.advisor.gains[not draft.is_ruled] == before[not draft.is_ruled]


def single() -> BatchView:
    return BatchView(np.arange(1), np.full(1, 100), np.zeros(1), 1)


def test_lengths_that_nobody_looks_at_have_no_benefit_of_the_doubt() -> None:
    policy = Auto()
    serve(policy, 0.0, 300)
    policy.advisor.is_drafting = True
    policy.advisor.acceptance.forget(np.arange(1))  # of whom little is known
    wanted = {}
    seen: list[np.ndarray] = []
    choose = policy.advisor._choose

    def note(batch: BatchView, outlooks: np.ndarray, start_s: float) -> Any:
        seen.append(outlooks)
        return choose(batch, outlooks, start_s)

    policy.advisor._choose = note  # type: ignore[method-assign]
    policy.advisor.sight.is_try = lambda *_: False  # type: ignore[method-assign]
    for is_ruled in (True, False):
        policy.advisor.sight.is_worth_it = lambda *_, way=is_ruled: way  # type: ignore[method-assign, misc]
        seen.clear()
        policy.advisor.advise(single())
        wanted[is_ruled] = float(seen[0][0])
    outlook = float(policy.advisor.acceptance.outlooks(np.arange(1))[0][0])
    assert wanted[False] == pytest.approx(outlook)
    assert wanted[True] > outlook + 0.05
