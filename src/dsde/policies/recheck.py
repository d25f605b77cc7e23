"""When to measure again what a step without drafts takes, while everybody drafts.

That is what drafts are compared with, and whoever drafts for good would never know better: the first steps of an
engine, or of a size of batch, may be slow, and machines change. At first soon, and as long as it turns out to be
otherwise than was thought; then ever more rarely. For every size of batch by itself, each up to twice as large as the
one before. Knows nothing of what is measured.
"""

from __future__ import annotations

from dsde.policies.verifications import size_of_batch

FIRST = 12
"""drafts until the first time, and until the next one if nothing came of that"""
LAST = 1024
"""drafts between any two in the long run"""
LONGER = 4
"""times as long a wait, if it was as thought, or nothing comes of it again"""


class Recheck:
    def __init__(self) -> None:
        self._waits: dict[int, int] = {}
        """by size of batch: drafts from the last time to the next"""
        self._nums: dict[int, int] = {}
        """drafts since the last time"""
        self._open: set[int] = set()
        """sizes of which it has begun, and was not seen yet"""

    def count(self, num_sequences: int) -> None:
        """A draft of so many was verified."""
        size = size_of_batch(num_sequences)
        self._nums[size] = self._nums.get(size, 0) + 1

    def is_due(self, num_sequences: int) -> bool:
        size = size_of_batch(num_sequences)
        return self._nums.get(size, 0) >= self._waits.get(size, FIRST)

    def begin(self, num_sequences: int) -> None:
        """It will be done now, whether it was due or not."""
        size = size_of_batch(num_sequences)
        if self.is_due(num_sequences):
            if size in self._open:  # twice in vain: perhaps nobody measures anything
                self._wait_longer(size)
            self._open.add(size)
        self._nums[size] = 0

    def end(self, num_sequences: int, is_as_thought: bool) -> None:
        """It was measured, perhaps for another reason."""
        size = size_of_batch(num_sequences)
        if size in self._open:
            self._open.remove(size)
            if is_as_thought:
                self._wait_longer(size)
            else:
                self._waits[size] = FIRST
        self._nums[size] = 0

    def _wait_longer(self, size: int) -> None:
        self._waits[size] = min(LONGER * self._waits.get(size, FIRST), LAST)
