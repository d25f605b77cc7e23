"""Whether everybody's prompt is read for drafts at once, or that of a few first."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dsde.policies import Auto, BatchView, Outcome, Plan
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


def limited(waves: Waves, batch: BatchView, lengths: list[int], is_doubtful: bool = False) -> tuple[list[int], bool]:
    waves.cost.see(batch)
    found, is_wave = waves.limit(batch, np.array(lengths), is_doubtful)
    return found.tolist(), is_wave


def test_who_has_little_to_read_does_not_wait() -> None:
    waves = Waves(Known())
    assert limited(waves, view([0, 2, 1]), [3, 4, 5]) == ([3, 4, 5], False)
    few = int(FIRST * STEP_S / TOKEN_S / 4)
    assert limited(waves, view([0, few, few, few]), [3, 4, 5, 6]) == ([3, 4, 5, 6], False)
    # Nor is anything read for whoever is not to draft.
    assert limited(waves, view([0, 10**6, 1]), [3, 0, 5]) == ([3, 0, 5], False)


def test_those_with_the_most_to_read_wait_until_it_is_known_what_came_of_the_others() -> None:
    waves, most = Waves(Known()), int(FIRST * STEP_S / TOKEN_S)
    missed, lengths = [most, 0, most // 2, most // 4, most], [1, 2, 3, 4, 5]
    assert limited(waves, view(missed), lengths) == ([0, 2, 3, 4, 0], True)
    waves.begin()
    assert limited(waves, view([most, 0, 0, 0, most]), lengths) == ([0, 2, 3, 4, 0], False)
    waves.end(9.0, 9.0)
    assert limited(waves, view([most, 0, 0, 0, most]), lengths) == (lengths, False), "twice as much"


def test_more_is_read_only_where_what_was_hoped_for_came() -> None:
    waves, most = Waves(Known()), int(FIRST * STEP_S / TOKEN_S)
    missed, lengths = [most] * 4, [1] * 4
    for share, num in ((1.0, 2), (HOPED, 4), (HOPED - 0.01, 1), (0.0, 1)):
        waves.begin()
        waves.end(10 * share, 10.0)
        found, is_wave = limited(waves, view(missed), lengths)
        assert (sum(found), is_wave) == (num, num < 4)
    waves.begin()
    waves.drop()
    assert sum(limited(waves, view(missed), lengths)[0]) == 1, "nothing was found out"
    waves.end(1.0, 1.0)
    waves.reset()
    assert sum(limited(waves, view(missed), lengths)[0]) == 1


def test_somebody_is_read_however_much_it_is_but_not_where_drafts_do_not_pay() -> None:
    waves = Waves(Known())
    assert limited(waves, view([10**7, 10**6]), [1, 1]) == ([0, 1], True)
    assert limited(waves, view([10**7, 10**6]), [1, 1], is_doubtful=True) == ([0, 0], False)
    assert limited(waves, view([10**7, 0]), [1, 1], is_doubtful=True) == ([0, 1], False)


class Served:
    """Requests of a machine where a draft pass takes a tenth of a verification."""

    def __init__(self, policy: Auto, num: int = 64) -> None:
        self.policy, self.num, self.rng = policy, num, np.random.default_rng(0)
        self.missed = np.zeros(num, np.int64)
        self.left = np.full(num, 2000)

    def step(self, rate: float) -> tuple[Plan, int]:
        """Returns what the draft read, too."""
        everybody = np.arange(self.num)
        batch = BatchView(everybody, self.left - 1, np.zeros(self.num), self.num)
        plan = self.policy.plan(replace(batch, num_left=self.left.copy(), num_missed=self.missed.copy()))
        self.policy.settle()
        drafts = plan.lengths > 0
        stands = self.rng.random((self.num, 20)) < rate
        accepted = np.minimum(np.minimum.accumulate(stands, axis=1).sum(axis=1), plan.lengths)
        num_read, num_passes = int(self.missed[drafts].sum()), int(plan.lengths.max())
        self.missed[:] = np.where(drafts, 0, self.missed + 1)
        self.left -= accepted + 1
        seen = Outcome(
            slots=everybody,
            drafted=plan.lengths,
            accepted=accepted,
            klds=np.empty(0),
            temperatures=np.zeros(self.num),
            draft_signals=np.full((int(plan.lengths.sum()), 3), 0.5),
            draft_s=0.1 * STEP_S * num_passes + TOKEN_S * num_read,
            verify_s=STEP_S,
            num_decoding=self.num,
            num_drafted=int(plan.lengths.sum()),
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
