"""Follows a machine that becomes slower or faster little by little, all of it alike.

Sizes are measured at different times, and what is compared would be decided by when: somebody who rests knows what a
step takes by now, and of drafts what they took on a machine that was slower. So what steps of a well-known size take,
compared with what they took lately, is taken for the machine's. That is one number; where it is wrong, it is wrong for
everything alike, and nothing that is compared changes. Sudden changes are the matter of `Tempo`. Knows nothing of
sizes, passes or policies.
"""

from __future__ import annotations

import math

MEMORY = 8.0
"""steps over which a change is followed"""
MOST = math.log(1.25)
"""in logarithms, that a step counts with: beyond that it was held up, or the machine has changed all at once"""
LEAST = 0.01
"""in logarithms, that is worth telling: everything has to be worked out again"""


class Pace:
    def __init__(self) -> None:
        self._moved = 0.0
        """in logarithms, since it was told last"""

    def observe(self, ratio: float, num_steps: int = 1) -> float:
        """So many steps of a well-known size took so many times as long as they should have. Returns by what everything
        that is known must be multiplied, mostly 1."""
        beyond = math.log(ratio) - self._moved
        if abs(beyond) > MOST:
            return 1.0
        self._moved += beyond * -math.expm1(-num_steps / MEMORY)
        if abs(self._moved) < LEAST:
            return 1.0
        factor, self._moved = math.exp(self._moved), 0.0
        return factor
