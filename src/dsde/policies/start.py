"""What a draft takes once, told from what its passes take. Knows nothing of models or devices."""

from __future__ import annotations

from collections import deque
from functools import cache

import numpy as np

from dsde.policies.base import FloatArray, IntArray

NUM_STARTS = 32
"""newest drafts, by which what a draft costs beside its passes is told from what the passes cost"""
TRIFLE = 0.02
"""share of a draft by which what it takes once may change, and its passes stay as they were measured"""
NUM_REMAINS = 9
"""newest drafts, of which the median counts where others tell what passes cost: of a few tries, apart in time"""
MOST_UNLIKE = 0.2
"""share by which sizes may differ whose passes are taken to cost the same"""
MOST_APART = 0.4
"""share by which they may once it is known what a token more takes"""


class Start:
    """Seconds that a draft takes once, whatever its length: the host decides, and the device waits.

    Told from its passes as soon as the newest drafts differ in length: those of one length tell what a token more in a
    pass takes, then those of different ones what a pass takes, and what remains is taken once; by medians, which a few
    steps that were held up do not move. (Of a long draft the last passes are for few sequences: without the former they
    seemed cheap, and what the others take beyond that seemed to be taken once.) Never more than half of a draft just
    seen: under another load what was learnt is wrong, and the passes would cost nothing. Where others, which take
    something else once, tell what a pass takes, it is what remains.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.is_told = False
        """whether drafts of different lengths told it"""
        self.is_known = False
        """whether anybody did"""
        self._held = np.zeros((NUM_STARTS, 3))
        self._num_seen = 0
        self._num_before = 0
        """of them, before the last pause"""
        self._remains: deque[float] = deque(maxlen=NUM_REMAINS)
        """of the newest drafts, where others tell what a pass takes"""

    @property
    def is_stuck(self) -> bool:
        """Whether drafts of another length would tell it, and there are none."""
        return not self.is_known and self._num_seen >= NUM_STARTS // 4

    @property
    def beside_s(self) -> float:
        """The same, less than nothing where its passes take less than those that tell."""
        return _median(np.array(self._remains)) if self._remains else self.seconds

    def pause(self) -> None:
        """Drafts from now on are told from those before, which tell no more what passes take."""
        self._num_before = self._num_seen

    def renew(self) -> None:
        """Drafts so far tell no more."""
        self._num_seen = self._num_before = 0

    def restore(self, seconds: float) -> None:
        """As it was told before there was any draft."""
        self.seconds, self.is_known = seconds, True

    def observe(self, num_passes: int, size: float, seconds: float) -> bool:
        """A draft took this, with passes of so many sequences. Returns whether it takes something else once than the
        passes of those before it were measured with."""
        before_s = self.seconds
        self._hold(num_passes, size, seconds)
        self._remains.clear()
        if self._num_seen % 4 == 0:
            self._fit(size)
        self.seconds = min(self.seconds, seconds / 2)
        return abs(self.seconds - before_s) > TRIFLE * seconds

    def observe_beside(self, num_passes: int, size: float, seconds: float, pass_s: float) -> None:
        """The same where others tell that each of the passes took `pass_s`."""
        self._hold(num_passes, size, seconds)
        self._remains.append(seconds - num_passes * pass_s)
        self.seconds, self.is_known = max(_median(np.array(self._remains)), 0.0), True

    def _hold(self, num_passes: int, size: float, seconds: float) -> None:
        self._held[self._num_seen % NUM_STARTS] = num_passes, size, seconds
        self._num_seen += 1

    @property
    def drafts(self) -> FloatArray:
        """[drafts, 3] the newest of those since the last pause, oldest first: passes, size and seconds."""
        num = min(self._num_seen - self._num_before, NUM_STARTS)
        return self._held[np.arange(self._num_seen - num, self._num_seen) % NUM_STARTS]

    def scale(self, factor: float) -> None:
        """As of a curve."""
        self._held[:, 2] *= factor
        self.seconds *= factor
        self._remains = deque((seconds * factor for seconds in self._remains), NUM_REMAINS)

    def _fit(self, size: float) -> None:
        held = self._held[: min(self._num_seen, NUM_STARTS)]
        unlike = np.abs(held[:, 1] / size - 1)
        passes, sizes, taken = held[unlike <= MOST_APART].T
        num_more = passes * (sizes - size)
        token_s = _slope(num_more, taken, passes)
        if token_s is None:
            num_passes, _, seconds = held[unlike <= MOST_UNLIKE].T
        else:
            num_passes, seconds = passes, taken - token_s * num_more
        pass_s = _slope(num_passes, seconds)
        if pass_s is not None:
            self.is_told = self.is_known = True
            self.seconds = max(_median(seconds - pass_s * num_passes), 0.0)


def _slope(counts: FloatArray, seconds: FloatArray, alike: FloatArray | None = None) -> float | None:
    """What one more takes, by pairs that are `alike` in something else; None: too few have more, or fewer."""
    ones, others = _pairs(seconds.size)
    tells = counts[others] != counts[ones]
    if alike is not None:
        tells &= alike[others] == alike[ones]
    if np.count_nonzero(tells) < NUM_STARTS // 2:
        return None
    ones, others = ones[tells], others[tells]
    return max(_median((seconds[others] - seconds[ones]) / (counts[others] - counts[ones])), 0.0)


@cache
def _pairs(count: int) -> tuple[IntArray, IntArray]:
    """The two of each pair of so many."""
    ones, others = np.triu_indices(count, 1)
    return ones, others


def _median(values: FloatArray) -> float:
    """As NumPy's, which takes longer to look at its arguments than to sort a few hundred."""
    ordered = np.sort(values)
    return float(ordered[(ordered.size - 1) // 2] + ordered[ordered.size // 2]) / 2
