"""Whether tokens are looked at while drafted, or lengths decided beforehand: by what each way brings and takes."""

from __future__ import annotations

import numpy as np
import pytest

from dsde.core.stops import StopByWorth, make_looks
from dsde.policies import Auto, BatchView, Outcome
from dsde.policies.sight import FIRST_TRY, LAST_TRY, NUM_TRIES, Sight, fill_chances, lengths_by
from dsde.policies.start import Start
from dsde.simulation.requests import Requests
from dsde.simulation.stops import stop_drafts


def ways(sight: Sight, num_sequences: int, num: int, starts_s: tuple[float, float] = (0.0, 0.0)) -> list[bool]:
    """Of so many drafts, whether a rule decides."""
    found = []
    for _ in range(num):
        found.append(sight.is_worth_it(num_sequences, starts_s))
        sight.count(num_sequences)
    return found


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
    for _ in range(4):  # a rule brings a tenth more in as long
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


@pytest.mark.parametrize("seed", range(20))
def test_how_far_a_rule_goes_is_worked_out_as_it_would_go(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num, most = int(rng.integers(1, 6)), 7
    signals = rng.random((num, most, 3)) * np.array([2.0, 0.9, 0.9]) + np.array([0.0, 0.05, 0.0])
    requests = Requests.__new__(Requests)
    requests.draft_signals = np.pad(signals, ((0, 0), (0, 2), (0, 0)), constant_values=0.5)
    rule = StopByWorth(
        weights=np.array([-0.5, 0.7, 0.4]),
        offsets=rng.normal(0.5, 1.0, num),
        outlooks=rng.uniform(0.4, 0.95, num),
        keep_above=float(rng.uniform(0, 0.2)),
        go_on_above=float(rng.uniform(0, 0.3)),
        pass_above=float(rng.uniform(0, 0.3)),
        usual=rng.integers(1, 4, num),
        dearer=float(rng.uniform(0, 0.1)),
    )
    wanted = rng.integers(0, most + 1, num)
    drafted, _ = stop_drafts(rule, requests, np.arange(num), np.zeros(num, np.int64), wanted)
    odds = rule.offsets[:, None] + make_looks(signals.reshape(-1, 3)).reshape(num, most, 3) @ rule.weights
    np.testing.assert_array_equal(lengths_by(rule, wanted, 1 / (1 + np.exp(-odds))), drafted)


def test_behind_the_tokens_that_were_drafted_there_is_the_outlook() -> None:
    chances = fill_chances(np.array([2, 0, 1]), np.array([0.1, 0.2, 0.3]), np.array([0.7, 0.8, 0.9]), 3)
    np.testing.assert_array_equal(chances, [[0.1, 0.2, 0.7], [0.8, 0.8, 0.8], [0.3, 0.9, 0.9]])


def test_drafts_of_one_length_tell_what_they_take_once_if_others_tell_what_a_pass_takes() -> None:
    start = Start()
    for _ in range(12):
        start.observe(3, 1.0, 0.7e-3 + 3 * 0.5e-3)
    assert start.seconds == 0
    start.observe(3, 1.0, 0.7e-3 + 3 * 0.5e-3, pass_s=0.5e-3)
    assert start.seconds == pytest.approx(0.7e-3)
    assert not start.is_told
    for length in (1, 2, 4, 5) * 4:  # then by themselves
        start.observe(length, 1.0, 0.2e-3 + length * 0.6e-3, pass_s=0.5e-3)
    assert start.is_told
    assert start.seconds == pytest.approx(0.2e-3, abs=0.1e-3)


def serve(policy: Auto, ruled_s: float, num_steps: int, obeys: bool = True) -> list[bool | None]:
    """One sequence, whose tokens stand as often as they look sure: nine of ten, or four. Whether a rule decided; None:
    nobody drafted."""
    rng = np.random.default_rng(0)
    found: list[bool | None] = []
    for _ in range(num_steps):
        plan = policy.plan(BatchView(np.arange(1), np.full(1, 100), np.zeros(1), 1))
        wanted = plan.lengths
        sure = np.where(rng.random(40) < 0.7, 0.95, 0.4)
        signals = np.stack((3 * (1 - sure), sure, 2 * sure - 1), 1)
        if plan.stop is not None and obeys:
            assert isinstance(plan.stop, StopByWorth)
            odds = plan.stop.offsets[0] + make_looks(signals) @ plan.stop.weights
            drafted = lengths_by(plan.stop, wanted, 1 / (1 + np.exp(-odds))[None])
        else:
            drafted = wanted if plan.stop is None else np.minimum(wanted, plan.predicted.astype(np.int64))
        num = int(drafted[0])
        accepted = int(np.minimum.accumulate(rng.random(40) < sure)[:num].sum())
        found.append(plan.stop is not None if num else None)
        is_ruled = plan.stop is not None and obeys
        policy.settle()
        policy.observe(
            Outcome(
                slots=np.arange(1),
                drafted=drafted,
                accepted=np.array([accepted]),
                klds=np.empty(0),
                temperatures=np.zeros(1),
                draft_signals=signals[:num],
                draft_s=(0.1e-3 + 0.5e-3 * num + ruled_s * is_ruled if num else 0.0) * float(rng.uniform(1, 1.02)),
                verify_s=(2e-3 + 0.02e-3 * num) * float(rng.uniform(1, 1.02)),
                num_decoding=1,
                num_drafted=num,
                num_draft_passes=num,
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
    del saved["ruled_start_s"]  # of an older version
    older = Auto()
    older.cost.restore(saved)
    assert older.cost.start_of(True) == older.cost.start_of(False) == policy.cost.start_of(False)
