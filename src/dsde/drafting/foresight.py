"""How often drafts that were expected to go on did: whether the next pass may start before a rule has said so.

Knows nothing of rules, passes or tokens.
"""

from __future__ import annotations

MOST_WASTE = 0.04
"""chance that a pass is for nobody, up to which that costs less than waiting to hear whether it is: a pass that waits
takes 4 % longer or more"""
MEMORY = 32
"""decisions after which an older one counts about a third"""
MANY = 8
"""So many or more that are expected to go on are alike."""


class Foresight:
    def __init__(self) -> None:
        self._chances = [0.5] * (MANY + 1)
        """that nobody goes on, by how many were expected to"""

    def is_sure(self, num_expected: int) -> bool:
        """Whether somebody goes on where so many are expected to, but for a risk that is worth taking."""
        return self._chances[min(num_expected, MANY)] < MOST_WASTE

    def learn(self, num_expected: int, somebody_goes_on: bool) -> None:
        place = min(num_expected, MANY)
        self._chances[place] += ((not somebody_goes_on) - self._chances[place]) / MEMORY
