"""How much of the time a policy takes to think, where the machine waits for it.

Where a device works meanwhile thinking costs nothing. A CPU does one thing at a time: what is thought there delays
everybody, and with a small model a plan may take as long as a twentieth of a step. Knows nothing of plans.
"""

from __future__ import annotations

import time
from collections.abc import Callable

SHARE = 0.01
"""of the time, that thinking may take before plans serve for several steps"""
MEMORY = 8
"""thoughts after which what one took counts about a third"""
LEAST = 8
"""thoughts, and steps, before anything is said of them: the first ones of a program take longer"""


class Thinking:
    """`with thinking:` around everything that the machine waits for."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._began_s = 0.0
        self._taken_s = 0.0
        """since the last thought was over"""
        self._thought_s = 0.0
        """that one takes, lately"""
        self._step_s = 0.0
        """that a step takes, lately"""
        self._num_thoughts = 0
        self._num_steps = 0

    def __enter__(self) -> None:
        self._began_s = self.clock()

    def __exit__(self, *_: object) -> None:
        self._taken_s += self.clock() - self._began_s

    def end(self) -> None:
        """All that belongs to one plan has been thought."""
        self._num_thoughts += 1
        self._thought_s += (self._taken_s - self._thought_s) / min(self._num_thoughts, MEMORY)
        self._taken_s = 0.0

    def count(self, step_s: float) -> None:
        """A step took so long, thinking included; 0: nobody measured."""
        if step_s > 0:
            self._num_steps += 1
            self._step_s += (step_s - self._step_s) / min(self._num_steps, MEMORY)

    def num_repeats(self, most: int) -> int:
        """Steps, beyond the first, that a plan should serve for."""
        if self._num_thoughts < LEAST or self._num_steps < LEAST:
            return 0
        return min(int(self._thought_s / (SHARE * self._step_s)), most)
