"""Notices that the whole machine has become slower or faster: somebody else computes on it, or its clock has changed.

Sizes are measured at different times. Those in use follow such a change soon and the others never, and what is compared
then is decided by when it was measured: whoever stopped drafting while the machine was slow would not begin again.
Knows nothing of sizes, passes or policies.
"""

from __future__ import annotations

from dsde.policies.curve import LEAST_CHANGE

NUM_ALIKE = 4
"""steps in a row, all slower than known or all faster, that are no accident"""


class Tempo:
    def __init__(self) -> None:
        self.is_in_doubt = False
        """whether the newest step was unlike what was known before it"""
        self._ratios: list[float] = []
        """of the newest steps, as far as they were all unlike that in the same way"""

    @property
    def is_waiting(self) -> bool:
        """Whether a few more steps will tell if the machine has changed."""
        return self.is_in_doubt and bool(self._ratios)

    def pass_over(self) -> None:
        """A step that tells nothing."""
        self.is_in_doubt = False

    def observe(self, ratio: float) -> float:
        """A step of a well-known size took so many times as long as it should have. Returns by what everything that is
        known must be multiplied, mostly 1."""
        self.is_in_doubt = not 1 / LEAST_CHANGE <= ratio <= LEAST_CHANGE
        if not self.is_in_doubt or (self._ratios and (ratio > 1) != (self._ratios[-1] > 1)):
            self._ratios.clear()
        if self.is_in_doubt:
            self._ratios.append(ratio)
        if len(self._ratios) < NUM_ALIKE:
            return 1.0
        factor = sorted(self._ratios)[(NUM_ALIKE - 1) // 2]
        self._ratios.clear()
        return factor
