"""How often drafts went on, or ended, as was expected: whether the host need hear what a rule has decided.

Knows nothing of rules, passes or tokens.
"""

from __future__ import annotations

MOST_WASTE = 0.04
"""chance that a pass is for nobody, up to which that costs less than waiting to hear whether it is: a pass that waits
takes 4 % longer or more"""
MOST_SURPRISE = 0.1
"""chance that a draft which is expected to be over is not, up to which that is not worth waiting for: one that goes on
would bring a third of a step's tokens or so, and to wait takes a few hundredths of a step"""
MEMORY = 32
"""decisions after which an older one counts about a third"""
PREPARING_MEMORY = 8
"""the same of what preparing takes"""
MANY = 8
"""So many or more that are expected to go on are alike."""


class _Chance:
    """Of what happened at times: the mean of all, as long as there are few, and one of them is a toss-up."""

    __slots__ = ("_num", "value")

    def __init__(self) -> None:
        self.value, self._num = 0.5, 1

    def learn(self, happened: bool) -> None:
        self._num = min(self._num + 1, MEMORY)
        self.value += (happened - self.value) / self._num


class Foresight:
    def __init__(self) -> None:
        self._no_one = [_Chance() for _ in range(MANY + 1)]
        """goes on, by how many were expected to"""
        self._surprises = [_Chance(), _Chance()]
        """that something else is decided than that all drafts are over, where nobody was expected to go on: on first
        tokens, and on later ones"""
        self._in_time = [_Chance(), _Chance()]
        """that what the host prepares while it waits is done before the device has decided: on first tokens, and on
        later ones"""
        self._preparing_s = 0.0
        """that this takes"""

    def is_sure(self, num_expected: int) -> bool:
        """Whether somebody goes on where so many are expected to, but for a risk that is worth taking."""
        return self._no_one[min(num_expected, MANY)].value < MOST_WASTE

    def is_sure_of_end(self, num_expected: int, depth: int) -> bool:
        """Whether all drafts are over where so many are expected to go on behind a token of this depth, and keep what
        they have."""
        return num_expected == 0 and self._surprises[depth > 0].value < MOST_SURPRISE

    def is_worth_preparing(self, num_expected: int, depth: int) -> bool:
        """Whether to prepare for the end of all drafts, where so many are expected to go on behind a token of this
        depth. The device waits as long for what was not prepared, if they end, as for whoever prepares too long, if
        they go on."""
        ends = self._no_one[min(num_expected, MANY)].value
        return ends >= (1 - ends) * (1 - self._in_time[depth > 0].value)

    def learn(self, num_expected: int, somebody_goes_on: bool) -> None:
        self._no_one[min(num_expected, MANY)].learn(not somebody_goes_on)

    def learn_prepared(self, seconds: float, was_in_time: bool, depth: int) -> None:
        """It took so long."""
        self._preparing_s += (seconds - self._preparing_s) / PREPARING_MEMORY
        self._in_time[depth > 0].learn(was_in_time)

    def learn_waited(self, seconds: float, depth: int) -> None:
        """Nothing was prepared meanwhile."""
        self._in_time[depth > 0].learn(seconds > self._preparing_s)

    def learn_end(self, is_surprise: bool, depth: int) -> None:
        """Where nobody was expected to go on."""
        self._surprises[depth > 0].learn(is_surprise)
