"""How far what a step without drafts takes is from what such steps took before, without anything having changed.

Drafts are compared with such steps, and both are measured at different times: where the host decides how long a step
takes, and has fast and slow times of its own, drafts that seem to bring a tenth may bring nothing. Knows nothing of
drafts, nor of sizes.
"""

from __future__ import annotations

import math
from collections import deque

NUM_HELD = 16
"""newest measurements"""
NUM_STEPS = 8
"""from one of them to the next: steps one behind the other are alike"""


class Steadiness:
    def __init__(self) -> None:
        self._held: deque[float] = deque(maxlen=NUM_HELD)
        """squares of how far off they were, of logarithms"""
        self._num_steps = 0
        """since the last one was kept"""
        self._sum = 0.0
        """of their logarithms"""
        self.spread = 0.0
        """share by which a measurement differs from those before it, typically"""

    def observe(self, ratio: float, num_steps: int) -> None:
        """So many steps without drafts took so many times as long as was known of such."""
        self._num_steps += num_steps
        self._sum += num_steps * math.log(ratio)
        if self._num_steps >= NUM_STEPS:
            self._held.append((self._sum / self._num_steps) ** 2)
            self._num_steps, self._sum = 0, 0.0
            # Of few it would be anything.
            self.spread = math.sqrt(sum(self._held) / NUM_HELD)
