"""When to try drafts that are longer than any before: whoever never does believes in what the last tokens cost.

What more tokens would cost than were ever verified is guessed from the last that were, and costs jump: behind a jump
there may be many tokens that cost next to nothing. So now and then drafts are about twice as long as any before, ever
more rarely. For every size of batch by itself, each up to twice as large as the one before. Knows nothing of seconds.
"""

from __future__ import annotations

from dsde.policies.verifications import size_of_batch

FIRST, LAST = 16, 4096
"""drafts until the first try, and between any two in the long run"""
LONGER = 4
"""times as long a wait behind each"""
NUM_TRIES = 2
"""drafts of a try, one after the other: one alone is not believed"""


class Stretch:
    def __init__(self) -> None:
        self._waits: dict[int, int] = {}
        """by size of batch: drafts from the last try to the next"""
        self._nums: dict[int, int] = {}
        """drafts since then, those of a try included"""

    def count(self, num_sequences: int) -> None:
        """A draft of so many was verified."""
        size = size_of_batch(num_sequences)
        num, wait = self._nums.get(size, 0) + 1, self._waits.get(size, FIRST)
        is_over = num >= wait + NUM_TRIES
        self._nums[size] = 0 if is_over else num
        self._waits[size] = min(LONGER * wait, LAST) if is_over else wait

    def is_due(self, num_sequences: int) -> bool:
        size = size_of_batch(num_sequences)
        return self._nums.get(size, 0) >= self._waits.get(size, FIRST)
