"""Follows a machine that becomes slower or faster little by little, all of it alike.

Sizes are measured at different times, and what is compared would be decided by when: somebody who rests knows what a
step takes by now, and of drafts what they took on a machine that was slower. So what steps of a size that is in use
take, compared with what they took when it came into use, is taken for the machine's. What they mostly take, on both
sides: a step is often late and never early. And compared with the beginning, not with the last time, or what is a
little off each time would sum up, and everything not in use would become dearer for ever. Sudden changes are the
matter of `Tempo`. Knows nothing of passes or policies.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Hashable

NUM_STEPS = 31
"""of which the middle one says what they take"""
LEAST = 0.01
"""in logarithms, that is worth telling: everything has to be worked out again"""


class Pace:
    def __init__(self) -> None:
        self._told = 0.0
        """in logarithms, like all of it: how much slower the machine has become since the first step"""
        self._newest: dict[Hashable, deque[float]] = {}
        """by size: what steps took"""
        self._levels: dict[Hashable, float] = {}
        """by size: what they take on a machine as it was at the first step"""

    def observe(self, size: Hashable, seconds: float, num_steps: int = 1) -> float:
        """So many steps of a size that is in use took so long. Returns by what everything that is known must be
        multiplied, mostly 1."""
        newest = self._newest.setdefault(size, deque(maxlen=NUM_STEPS))
        newest.extend([math.log(seconds)] * min(num_steps, NUM_STEPS))
        if len(newest) < NUM_STEPS:
            return 1.0
        now = statistics.median(newest)
        moved = now - self._levels.setdefault(size, now - self._told) - self._told
        if abs(moved) < LEAST:
            return 1.0
        self._told += moved
        return math.exp(moved)

    def leave(self, size: Hashable) -> None:
        """It was out of use: what its steps took may have changed for another reason."""
        self._newest.pop(size, None)
        self._levels.pop(size, None)

    def scale(self, factor: float) -> None:
        """Somebody else has found the machine to be so many times as slow."""
        self._told += math.log(factor)
        for newest in self._newest.values():
            moved = [each + math.log(factor) for each in newest]
            newest.clear()
            newest.extend(moved)
