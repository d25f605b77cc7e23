"""Whether everybody's prompt is read for drafts at once, or that of a few first."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import ArrayLike

from dsde.policies import Auto, BatchView, Outcome, Plan
from dsde.policies.advisor import Advisor
from dsde.policies.choice import Choice
from dsde.policies.cost import CostModel
from dsde.policies.waves import FIRST, HOPED, Waves

STEP_S, TOKEN_S = 6e-3, 10e-6
PROMPT = 500


class Known(CostModel):
    """Reading takes so long by the token, and a step without drafts as long for any batch."""

    def catch_up_s(self, tokens: object) -> np.ndarray:
        return TOKEN_S * np.asarray(tokens, np.float64)

    def verify_s(self, tokens: object) -> np.ndarray:
        return np.full_like(np.asarray(tokens, np.float64), STEP_S)


def view(num_missed: list[int]) -> BatchView:
    num = len(num_missed)
    return BatchView(np.arange(num), np.full(num, 100), np.zeros(num), num, num_missed=np.array(num_missed))


def limited(
    waves: Waves, batch: BatchView, lengths: list[int], is_doubtful: bool = False
) -> tuple[list[int], list[int]]:
    waves.cost.see(batch)
    found, wave = waves.limit(batch, np.array(lengths), is_doubtful)
    return found.tolist(), wave.tolist()


def test_who_has_little_to_read_does_not_wait() -> None:
    waves = Waves(Known())
    assert limited(waves, view([0, 2, 1]), [3, 4, 5]) == ([3, 4, 5], [])
    few = int(FIRST * STEP_S / TOKEN_S / 4)
    assert limited(waves, view([0, few, few, few]), [3, 4, 5, 6]) == ([3, 4, 5, 6], [])
    # Nor is anything read for whoever is not to draft.
    assert limited(waves, view([0, 10**6, 1]), [3, 0, 5]) == ([3, 0, 5], [])


def test_those_with_the_most_to_read_wait_until_it_is_known_what_came_of_the_others() -> None:
    waves, most = Waves(Known()), int(FIRST * STEP_S / TOKEN_S)
    missed, lengths = [most, 0, most // 2, most // 4, most], [1, 2, 3, 4, 5]
    assert limited(waves, view(missed), lengths) == ([0, 2, 3, 4, 0], [2, 3])
    waves.begin()
    assert limited(waves, view([most, 0, 0, 0, most]), lengths) == ([0, 2, 3, 4, 0], [])
    waves.end(9.0, 9.0)
    assert limited(waves, view([most, 0, 0, 0, most]), lengths) == (lengths, []), "twice as much"


def test_more_is_read_only_where_what_was_hoped_for_came() -> None:
    waves, most = Waves(Known()), int(FIRST * STEP_S / TOKEN_S)
    missed, lengths = [most] * 4, [1] * 4
    for share, num in ((1.0, 2), (HOPED, 4), (HOPED - 0.01, 1), (0.0, 1)):
        waves.begin()
        waves.end(10 * share, 10.0)
        found, wave = limited(waves, view(missed), lengths)
        assert (sum(found), len(wave)) == (num, num % 4), "none where nobody waits"
    waves.begin()
    waves.drop()
    assert sum(limited(waves, view(missed), lengths)[0]) == 1, "nothing was found out"
    waves.end(1.0, 1.0)
    waves.reset()
    assert sum(limited(waves, view(missed), lengths)[0]) == 1


def test_somebody_is_read_however_much_it_is_but_not_where_drafts_do_not_pay() -> None:
    waves = Waves(Known())
    assert limited(waves, view([10**7, 10**6]), [1, 1]) == ([0, 1], [1])
    assert limited(waves, view([10**7, 10**6]), [1, 1], is_doubtful=True) == ([0, 0], [])
    assert limited(waves, view([10**7, 0]), [1, 1], is_doubtful=True) == ([0, 1], [])


class Served:
    """Requests of a machine where a draft pass takes a tenth of a verification."""

    def __init__(self, policy: Auto, num: int = 64) -> None:
        self.policy, self.num, self.rng = policy, num, np.random.default_rng(0)
        self.missed = np.zeros(num, np.int64)
        self.left = np.full(num, 2000)

    def step(self, rate: ArrayLike, can_read: ArrayLike = True, num_cut: int = 0) -> tuple[Plan, int]:
        """With a rate for everybody, or one of each; a rule cuts off the whole draft of the first few. Returns what the
        draft read, too."""
        everybody = np.arange(self.num)
        batch = BatchView(everybody, self.left - 1, np.zeros(self.num), self.num)
        plan = self.policy.plan(replace(batch, num_left=self.left.copy(), num_missed=self.missed.copy()))
        self.policy.settle()
        lengths = np.where(np.asarray(can_read) | (self.missed < 3), plan.lengths, 0)
        drafts = lengths > 0
        if plan.stop is not None:
            lengths[:num_cut] = 0
        stands = self.rng.random((self.num, 20)) < np.broadcast_to(rate, self.num)[:, None]
        accepted = np.minimum(np.minimum.accumulate(stands, axis=1).sum(axis=1), lengths)
        num_read, num_passes = int(self.missed[drafts].sum()), max(int(lengths.max()), int(drafts.any()))
        self.missed[:] = np.where(drafts, 0, self.missed + 1)
        self.left -= accepted + 1
        seen = Outcome(
            slots=everybody,
            drafted=lengths,
            accepted=accepted,
            klds=np.empty(0),
            temperatures=np.zeros(self.num),
            draft_signals=np.full((int(lengths.sum()), 3), 0.5),
            draft_s=0.1 * STEP_S * num_passes + TOKEN_S * num_read,
            verify_s=STEP_S,
            num_decoding=self.num,
            num_drafted=int(lengths.sum()),
            num_draft_passes=num_passes,
            num_catch_up_tokens=num_read,
        )
        self.policy.observe(replace(seen, is_ruled=plan.stop is not None))
        return plan, num_read

    def others_come(self, slots: list[int]) -> None:
        self.policy.forget(np.array(slots))
        self.missed[slots], self.left[slots] = PROMPT, 2000


@pytest.fixture
def served() -> Served:
    served = Served(Auto())
    for _ in range(100):
        served.step(0.9)
    return served


@pytest.mark.parametrize(("rate", "least", "most"), [(0.9, 64, 64), (0.0, 1, 30)])
def test_requests_unlike_those_before_are_not_all_read_for(served: Served, rate: float, least: int, most: int) -> None:
    """They seem to be as easy as others were. In the end everybody drafts, or hardly anybody was read for."""
    served.others_come(list(range(64)))
    num_read = [served.step(rate)[1] for _ in range(40)]
    assert 0 < num_read[0] < 32 * PROMPT
    assert least * PROMPT <= sum(num_read) <= most * (PROMPT + 40)
    plan, _ = served.step(rate)
    assert np.count_nonzero(plan.lengths) == (64 if rate else 0)


def test_those_who_join_one_by_one_do_not_wait(served: Served) -> None:
    for slot in range(8):
        served.others_come([slot])
        assert served.step(0.9)[1] == PROMPT


def test_what_comes_of_others_is_no_reason_to_read_for_those_who_are_new(served: Served) -> None:
    others = list(range(8, 64))
    served.others_come(others)
    rates = np.where(np.isin(np.arange(64), others), 0.0, 0.9)
    assert sum(served.step(rates)[1] for _ in range(40)) < 40 * PROMPT


def test_drafting_goes_on_where_nothing_could_be_read(served: Served) -> None:
    """There was no memory for it, say. Nobody has found out that drafts do not pay."""
    served.others_come(list(range(64)))
    plans = [served.step(0.9, can_read=number > 8)[0] for number in range(20)]
    assert not any(plan.num_resting for plan in plans)
    assert sum(plan.lengths.any() for plan in plans[:8]) >= 3, "it is tried again and again"
    assert np.count_nonzero(plans[-1].lengths) > 32


def test_nobody_waits_for_ever_for_those_who_cannot_read(served: Served) -> None:
    """Their texts may be longer than the draft can read. Others draft on, and what comes of that is a measure again."""
    others = list(range(56))
    served.others_come(others)
    can_read = ~np.isin(np.arange(64), others)
    for _ in range(40):
        served.step(0.9, can_read)
    advice = served.policy._current
    assert advice is not None
    assert advice.can_be_repeated
    assert not advice.is_partial


def test_one_who_is_lucky_does_not_speak_for_a_wave(served: Served) -> None:
    """A rule may let somebody draft far beyond what was hoped for, while nothing stands of the others."""
    looking(served)
    waves = served.policy.advisor.waves
    waves._size = 2 * FIRST
    served.others_come(list(range(64)))
    plan, _ = served.step(np.where(np.arange(64) % 3, 0.0, 0.999))
    assert plan.lengths.max() > 1.5 * plan.predicted.max()
    served.policy.settle()
    assert not waves.is_open
    assert waves._size == FIRST


def test_nothing_is_thought_of_behind_a_wave_before_it_is_known_what_was_read(served: Served) -> None:
    served.others_come(list(range(64)))
    _, num_read = served.step(0.9)
    assert 0 < num_read < 64 * PROMPT
    assert served.policy._next is None
    missed = served.missed.copy()
    next_plan, _ = served.step(0.9)
    assert (next_plan.lengths[missed == 0] > 0).all(), "those who were read for draft on"


def looking(served: Served) -> None:
    """Every draft is by a rule."""
    served.policy.advisor.sight.is_worth_it = lambda *_: True  # type: ignore[method-assign]
    served.policy.advisor.sight.is_try = lambda *_: False  # type: ignore[method-assign]


@pytest.mark.parametrize(("num_cut", "size"), [(0, 4 * FIRST), (50, FIRST), (64, FIRST)])
def test_whom_a_rule_lets_have_nothing_was_read_for_all_the_same(served: Served, num_cut: int, size: float) -> None:
    """What comes of the others, all of which stands, is not what was hoped for."""
    looking(served)
    waves = served.policy.advisor.waves
    waves._size = 2 * FIRST
    served.others_come(list(range(64)))
    served.step(0.999, num_cut=num_cut)
    served.policy.settle()
    assert not waves.is_open
    assert waves._size == size


def test_no_more_was_hoped_for_than_drafts_may_have(served: Served) -> None:
    advisor = served.policy.advisor
    advisor._reach = 1
    served.others_come(list(range(64)))
    plan, _ = served.step(0.999)
    assert plan.lengths.max() <= 2
    served.policy.settle()
    assert advisor.waves._size == 2 * FIRST


def test_a_part_is_no_measure_of_all_nor_good_for_another_step(served: Served) -> None:
    served.others_come(list(range(64)))
    served.step(0.9)
    advice = served.policy._current
    assert advice is not None
    assert advice.is_partial
    assert not advice.can_be_repeated
    assert advice.planned_rate == 0


def test_who_waits_for_a_wave_goes_on_drafting_and_who_stops_has_none(served: Served) -> None:
    served.others_come(list(range(64)))
    served.step(0.9)
    advisor, advice = served.policy.advisor, served.policy._current
    assert advice is not None
    assert advisor.waves.is_open
    without = replace(advice, rule=None, wave=advice.wave[:0])
    advisor.take(replace(without, is_waiting=True))
    assert advisor.is_drafting
    assert advisor.waves.is_open
    advisor.take(without)
    assert not advisor.is_drafting
    assert not advisor.waves.is_open
    assert advisor._wave is None


def test_requests_that_end_within_a_wave_do_not_count(served: Served) -> None:
    served.others_come(list(range(64)))
    policy, everybody = served.policy, np.arange(64)
    view = BatchView(everybody, served.left - 1, np.zeros(64), 64, num_left=served.left, num_missed=served.missed)
    plan = policy.plan(view)
    assert policy.advisor.waves.is_open
    lengths = plan.lengths[1:]
    outcome = Outcome(
        slots=everybody[1:],
        drafted=lengths,
        accepted=lengths,
        klds=np.empty(0),
        temperatures=np.zeros(63),
        draft_signals=np.full((int(lengths.sum()), 3), 0.5),
        draft_s=1e-3,
        verify_s=STEP_S,
        num_decoding=63,
        num_drafted=int(lengths.sum()),
        num_draft_passes=int(lengths.max()),
        num_catch_up_tokens=PROMPT,
    )
    policy.observe(outcome)
    policy.settle()
    assert not policy.advisor.waves.is_open


def test_a_wave_is_no_more_once_nobody_drafts() -> None:
    waves, most = Waves(Known()), int(FIRST * STEP_S / TOKEN_S)
    waves.begin()
    waves.end(10.0, 10.0)
    assert sum(limited(waves, view([most] * 8), [1] * 8)[0]) == 2
    # All have been read for: whoever comes next may be others again.
    limited(waves, view([0] * 8), [1] * 8)
    assert sum(limited(waves, view([most] * 8), [1] * 8)[0]) == 1


@pytest.mark.parametrize(("gain", "is_read"), [(1.02, False), (1.2, True)])
@pytest.mark.parametrize("is_drafting", [True, False])
def test_prompts_are_read_only_for_what_drafts_bring_beyond_doubt(
    gain: float, is_read: bool, is_drafting: bool
) -> None:
    """Whoever drafts goes on where that brings a little; but reading everything for who is new costs more than that."""
    cost = Known()
    advisor, batch = Advisor(20, cost), replace(view([500] * 8), num_left=np.full(8, 2000))
    cost.see(batch)
    advisor.is_drafting = is_drafting
    rate_off = 8 / STEP_S
    choice = Choice(np.ones(8, np.int64), gain * rate_off, STEP_S, rate_off)
    assert advisor._seems_to_pay(choice) == (is_read or is_drafting)
    if advisor._seems_to_pay(choice):
        advisor._choose_for_next = lambda *_, choice=choice: choice  # type: ignore[method-assign]
        assert advisor._is_worth_reading(batch, choice, np.full(8, 0.5)).tolist() == [is_read] * 8
