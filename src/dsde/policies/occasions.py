"""When to do for once what does not seem the best: soon at first, then ever more rarely.

Counted in drafts, for every size of batch by itself, each up to twice as large as the one before. Knows nothing of what
is done.
"""

from __future__ import annotations

from dsde.policies.verifications import size_of_batch


class Occasions:
    def __init__(self, first: int, last: int, longer: int, num_tries: int) -> None:
        """`first` drafts until the first occasion, `longer` times as many until the next, `last` in the long run; one
        is for `num_tries` drafts, one after the other."""
        self.first, self.last, self.longer, self.num_tries = first, last, longer, num_tries
        self._waits: dict[int, int] = {}
        """drafts from the last occasion to the next"""
        self._nums: dict[int, int] = {}
        """drafts since then"""
        self._nums_tried: dict[int, int] = {}
        """drafts made for the present occasion"""
        self._nums_past: dict[int, int] = {}
        """occasions so far, taken or not"""

    def count(self, num_sequences: int) -> None:
        """A draft of so many was verified that was made for none."""
        size = size_of_batch(num_sequences)
        self._nums[size] = self._nums.get(size, 0) + 1

    def is_due(self, num_sequences: int) -> bool:
        size = size_of_batch(num_sequences)
        return self._nums.get(size, 0) >= self._waits.get(size, self.first)

    def has_begun(self, num_sequences: int) -> bool:
        """Whether some of the drafts of the present one have been made."""
        return self._nums_tried.get(size_of_batch(num_sequences), 0) > 0

    def take(self, num_sequences: int) -> None:
        """A draft for it is made."""
        size = size_of_batch(num_sequences)
        self._nums_tried[size] = self._nums_tried.get(size, 0) + 1
        if self._nums_tried[size] >= self.num_tries:
            self.pass_over(num_sequences)

    def pass_over(self, num_sequences: int) -> None:
        """It is over, taken or not."""
        size = size_of_batch(num_sequences)
        self._nums[size] = self._nums_tried[size] = 0
        self._waits[size] = min(self.longer * self._waits.get(size, self.first), self.last)
        self._nums_past[size] = self.num_past(num_sequences) + 1

    def num_past(self, num_sequences: int) -> int:
        return self._nums_past.get(size_of_batch(num_sequences), 0)
