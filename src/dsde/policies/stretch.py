"""When to try drafts that are longer than any before: whoever never does believes in what the last tokens cost.

What more tokens would cost than were ever verified is guessed from the last that were, and costs jump: behind a jump
there may be many tokens that cost next to nothing. So now and then drafts are about twice as long as any before, ever
more rarely. Knows nothing of seconds.
"""

from __future__ import annotations

from dsde.policies.occasions import Occasions

FIRST, LAST = 16, 4096
"""drafts until the first try, and between any two in the long run"""
LONGER = 4
"""times as long a wait behind each"""
NUM_TRIES = 2
"""drafts of a try, one after the other: one alone is not believed"""


class Stretch(Occasions):
    def __init__(self) -> None:
        super().__init__(FIRST, LAST, LONGER, NUM_TRIES)
