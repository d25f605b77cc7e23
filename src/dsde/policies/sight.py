"""Whether to decide token by token, or beforehand: what looking at tokens while they are drafted is worth on average.

A rule saves passes that would not pay and goes on where tokens look sure, but a device waits to hear what was decided:
on one whose host is slow longer than a pass takes. Both ways are worked out for the same drafts, those that a rule
ended, by the chances that their tokens turned out to have, so that luck is in neither. For every size of batch by
itself, each up to twice as large as the one before. Knows nothing of signals, nor what anything takes.
"""

from __future__ import annotations

import numpy as np

from dsde.policies.base import FloatArray, IntArray
from dsde.policies.verifications import size_of_batch

MEMORY = 64.0
"""drafts worked out, after which one counts about a third"""
WORKED_OUT_EVERY = 4
"""drafts; of a try all are"""
LEAST = 6.0
"""of them, before anything is decided by them"""
CLEAR = 1.02
"""times as many tokens per second, that lengths chosen beforehand must bring before they are; then until they bring
less"""
FIRST_TRY, LAST_TRY = 16, 512
"""drafts until the other way is tried, at first and in the long run: what it takes is not known otherwise"""
NUM_TRIES = 3
"""drafts of a try, one after the other"""


class Sight:
    def __init__(self) -> None:
        self._sums: dict[int, FloatArray] = {}
        """by size of batch, fading: tokens and seconds beside starts, decided beforehand and by a rule; and drafts"""
        self._is_ruled: dict[int, bool] = {}
        """the way that was found better"""
        self._waits: dict[int, int] = {}
        """drafts from the last try to the next"""
        self._nums: dict[int, int] = {}
        """drafts since then, those of a try included"""

    def count(self, num_sequences: int, is_ruled: bool) -> bool:
        """A draft of so many was verified, decided on by a rule or beforehand. Returns whether it is to be worked
        out."""
        size = size_of_batch(num_sequences)
        if self.is_try(num_sequences) and is_ruled == self._is_ruled.get(size, True):
            return False  # it had been begun before there was to be a try
        num = self._nums[size] = self._nums.get(size, 0) + 1
        wait = self._waits.get(size, FIRST_TRY)
        if num >= wait + NUM_TRIES:
            self._nums[size], self._waits[size] = 0, min(2 * wait, LAST_TRY)
        return num > wait or num % WORKED_OUT_EVERY == 0

    def observe(self, num_sequences: int, tokens: tuple[float, float], seconds: tuple[float, float]) -> None:
        """What a draft would have brought, decided beforehand and by a rule, and taken beside what one takes once."""
        size = size_of_batch(num_sequences)
        kept = np.exp(-1 / MEMORY)
        self._sums[size] = kept * self._sums.get(size, np.zeros(5)) + np.array([*tokens, *seconds, 1.0])

    def is_worth_it(self, num_sequences: int, starts_s: tuple[float, float]) -> bool:
        """Whether a rule is to decide in drafts of so many, where one takes so long once, decided beforehand and by a
        rule."""
        size = size_of_batch(num_sequences)
        is_ruled, sums = self._is_ruled.get(size, True), self._sums.get(size)
        if sums is None or sums[4] < LEAST:
            return is_ruled
        # One start may be less than nothing, by drafts that were longer than these.
        seconds = np.maximum(sums[2:4] + sums[4] * np.array(starts_s), sums[2:4] / 2)
        rates = (sums[:2] / seconds).tolist()
        if rates[not is_ruled] > (CLEAR if is_ruled else 1.0) * rates[is_ruled]:
            is_ruled = self._is_ruled[size] = not is_ruled
            self._nums[size], self._waits[size] = 0, FIRST_TRY
        return is_ruled

    def is_try(self, num_sequences: int) -> bool:
        """Whether the next draft of so many is to be made the other way all the same."""
        size = size_of_batch(num_sequences)
        return self._nums.get(size, 0) >= self._waits.get(size, FIRST_TRY)


def fill_chances(drafted: IntArray, found: FloatArray, outlooks: FloatArray, num: int) -> FloatArray:
    """[sequences, num] those `found` of drafted tokens, sequence after sequence, and the outlook behind them."""
    chances = np.repeat(outlooks[:, None], num, axis=1)
    chances[np.arange(num) < drafted[:, None]] = found
    return chances
