"""When to try drafts a token shorter, or longer, than those that seem best, if nobody has made such for a while.

What they cost was measured when they were last made, perhaps while the machine was busy with something else; whoever
made others since would never know better. Where a rule ends drafts at many lengths, all of them have been made lately
and nothing comes of it. Knows nothing of seconds.
"""

from __future__ import annotations

from dsde.policies.occasions import Occasions

FIRST, LAST = 16, 256
"""drafts until the first try, and between any two in the long run"""
LONGER = 2
"""times as long a wait behind each"""
NUM_TRIES = 2
"""drafts of a try, one after the other: one alone is not believed"""


class Detour(Occasions):
    def __init__(self) -> None:
        super().__init__(FIRST, LAST, LONGER, NUM_TRIES)

    def step(self, num_sequences: int) -> int:
        """Tokens more than what seems best: one less and one more, by turns."""
        return 1 if self.num_past(num_sequences) % 2 else -1
