"""Drafts a token shorter or longer than those that seem best: when, and what for."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from dsde.policies import Auto, BatchView, CostModel, Outcome
from dsde.policies.detour import FIRST, LAST, LONGER, NUM_TRIES, Detour

NUM = 8
VERIFY_S = {1: 24e-3, 2: 28e-3, 3: 34e-3, 22: 170e-3}
"""by tokens of each sequence; with passes of 5 ms and a chance of 0.8 drafts of two tokens are the best"""


def test_it_is_tried_ever_more_rarely_in_both_directions_by_turns() -> None:
    detour, tries = Detour(), []
    for number in range(3_000):
        if detour.is_due(NUM):
            tries.append((number, detour.step(NUM)))
            detour.take(NUM)
        else:
            detour.count(NUM)
    firsts = tries[::NUM_TRIES]
    assert [step for _, step in tries] == [step for _, step in firsts for _ in range(NUM_TRIES)]
    assert [step for _, step in firsts[:4]] == [-1, 1, -1, 1]
    gaps = [after - before for (before, _), (after, _) in itertools.pairwise(firsts)]
    assert gaps[:2] == [LONGER * FIRST + NUM_TRIES, LONGER**2 * FIRST + NUM_TRIES]
    assert max(gaps) == LAST + NUM_TRIES


def seen(lengths: np.ndarray, accepted: np.ndarray, is_ruled: bool, slow: float) -> Outcome:
    longest, num_drafted = int(lengths.max()), int(lengths.sum())
    return Outcome(
        slots=np.arange(NUM),
        drafted=lengths,
        accepted=accepted,
        klds=np.empty(0),
        temperatures=np.zeros(NUM),
        draft_signals=np.full((num_drafted, 3), 0.5),
        draft_s=5e-3 * longest,
        verify_s=slow * float(np.interp(num_drafted / NUM + 1, list(VERIFY_S), list(VERIFY_S.values()))),
        num_decoding=NUM,
        num_drafted=num_drafted,
        num_draft_passes=longest,
        is_ruled=is_ruled,
    )


class Served:
    """Requests whose tokens stand with some chance, on a machine that may be busy at first with drafts of two."""

    def __init__(self, rate: float, slow: float = 1.0) -> None:
        self.policy, self.rate, self.slow = Auto(), rate, slow
        self.rng, self.number = np.random.default_rng(0), 0

    def step(self, settles: bool = False) -> int:
        """Returns how many tokens everybody drafted."""
        plan = self.policy.plan(BatchView(np.arange(NUM), np.full(NUM, 100), np.zeros(NUM), NUM))
        if settles:
            self.policy.settle()
        stands = self.rng.random((NUM, 20)) < self.rate
        # What looks say is the same for all: as many as are usual are drafted.
        drafted = plan.lengths if plan.stop is None else np.minimum(plan.lengths, plan.predicted.astype(np.int64))
        accepted = np.minimum(np.minimum.accumulate(stands, axis=1).sum(axis=1), drafted)
        longest = int(drafted.max(initial=0))
        is_busy = self.number < 40 and longest == 2
        self.number += 1
        self.policy.observe(seen(drafted, accepted, plan.stop is not None, self.slow if is_busy else 1.0))
        return longest


@pytest.mark.parametrize("has_detours", [True, False])
@pytest.mark.parametrize("slow", [1.2, 1.3])
def test_what_a_length_took_while_the_machine_was_busy_is_found_out_again(
    slow: float, has_detours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_detours:
        monkeypatch.setattr(Detour, "is_due", lambda *_: False)
    served = Served(0.8, slow)
    lengths = [served.step() for _ in range(600)]
    share = np.mean(np.array(lengths[300:]) == 2)
    assert share > 0.9 if has_detours else share < 0.1, "else this test would show nothing"


def test_a_detour_is_not_repeated_and_from_one_token_goes_up() -> None:
    served, detours = Served(0.6), []
    for _ in range(600):
        longest, advice = served.step(), served.policy._current
        assert advice is not None
        if advice.occasion is not None:
            detours.append(longest)
            assert not advice.can_be_repeated
            assert not advice.is_ruled
    assert longest == 1
    assert len(detours) >= 3 * NUM_TRIES
    assert set(detours[NUM_TRIES:]) == {2}


@pytest.mark.parametrize("settles", [False, True])
def test_a_try_is_of_two_drafts_whatever_had_been_made_before(settles: bool) -> None:
    """Where a device goes on by the last rule another plan is asked for a step later."""
    served, made = Served(0.6), []
    policy = served.policy
    for _ in range(600):
        before = policy._current
        is_late = settles and before is not None and not policy.rules_on()
        if is_late and before is not None:  # the same once more
            lengths = np.minimum(before.lengths, before.plan.predicted.astype(np.int64))
            policy.settle()
            policy.observe(seen(lengths, lengths // 2, before.is_ruled, 1.0))
        served.step(settles)
        advice = policy._current
        assert advice is not None
        made.append(advice.occasion is policy.advisor.detour)
    runs = [len(list(group)) for is_one, group in itertools.groupby(made) if is_one]
    assert len(runs) >= 4
    assert set(runs) == {NUM_TRIES}


def test_what_cannot_be_done_is_not_waited_for() -> None:
    served = Served(0.6)
    served.policy = Auto(max=1)
    for _ in range(200):
        served.step()
    assert served.policy.advisor.detour.num_past(NUM) >= 3
    assert not served.policy.advisor.detour.has_begun(NUM)


def test_what_was_measured_before_hardly_counts() -> None:
    cost, twos = CostModel(), np.full(NUM, 2)
    for lengths, slow in ((twos, 1.4), (np.full(NUM, 1), 1.0)):
        for _ in range(20):
            cost.observe(seen(lengths, lengths, False, slow))
    cost.renew_verified(replace(seen(twos, twos, False, 1.0), verify_s=0.0))  # a shape was met for the first time
    assert cost.num_verified(3 * NUM) == 20
    for _ in range(2):
        outcome = seen(twos, twos, False, 1.0)
        cost.renew_verified(outcome)
        cost.observe(outcome)
    cost.observe(seen(np.full(NUM, 1), twos, False, 1.0))  # the machine has not become a faster one
    assert float(cost.verify_s(3 * NUM)) == pytest.approx(VERIFY_S[3])
