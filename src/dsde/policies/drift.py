"""Follows a machine that becomes slower or faster little by little, all of it alike.

Sizes are measured at different times, and what is compared would be decided by when: somebody who rests knows what a
step takes by now, and of drafts what they took on a machine that was slower. So what all sizes that are in use agree on
is taken for the machine's: if each of them takes longer than when it came into use, by as much as the one that has
changed the least. A single one may have changed for a reason of its own. What steps mostly take counts, on both sides:
a step is often late and never early. And compared with the beginning, not with the last time, or what is a little off
each time would sum up, and everything not in use would become dearer for ever. For the same reason a size that comes
back is compared with what it took when it was last in use, if that says that the machine is more like it was at first:
contexts grow as long as requests last, and are short again when others come. Sudden changes are the matter of `Tempo`.
Knows nothing of passes or policies.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

NUM_STEPS = 31
"""of a size, of which the middle one says what they take"""
MOST_AT_ONCE = 4
"""steps that a rest counts as which is told as one: there is only one figure of it, and it may be off"""
LONGEST_UNSEEN = 64
"""steps of other sizes after which one is not in use any more"""
MOST_APART = 8
"""sizes, by turns, that may all be in use: what is made more rarely takes too long to tell"""
LEAST = 0.01
"""in logarithms, that is worth telling: everything has to be worked out again"""


@dataclass(slots=True)
class _Size:
    """One that is in use. In logarithms."""

    newest: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_STEPS))
    """what steps took"""
    seen_at: deque[int] = field(default_factory=lambda: deque(maxlen=NUM_STEPS))
    """and when"""
    now: float = 0.0
    """what they mostly take"""
    level: float | None = None
    """what they take on a machine as it was at the first step; None: too few have been seen"""
    level_before: float | None = None
    """the same when it was last in use"""


class Drift:
    def __init__(self) -> None:
        self._told = 0.0
        """in logarithms: how much slower the machine has become since the first step"""
        self._num_seen = 0
        """steps, of any size"""
        self._sizes: dict[Hashable, _Size] = {}

    def observe(self, key: Hashable, seconds: float, num_steps: int = 1) -> float:
        """So many steps of a size took so long. Returns by what everything that is known must be multiplied, mostly
        1."""
        num = min(num_steps, MOST_AT_ONCE)
        self._num_seen += num
        size = self._in_use(key)
        size.newest.extend([math.log(seconds)] * num)
        size.seen_at.extend(range(self._num_seen - num + 1, self._num_seen + 1))
        if len(size.newest) < NUM_STEPS:
            return 1.0
        size.now = statistics.median(size.newest)
        if size.level is None:
            size.level = size.now - self._told - self._way_back(size)
        moved = self._moved()
        if abs(moved) < LEAST:
            return 1.0
        self._told += moved
        return math.exp(moved)

    def scale(self, factor: float) -> None:
        """Somebody else has found the machine to be so many times as slow."""
        self._told += math.log(factor)
        for size in self._sizes.values():
            moved = [each + math.log(factor) for each in size.newest]
            size.newest.clear()
            size.newest.extend(moved)
            size.now += math.log(factor)

    def _in_use(self, key: Hashable) -> _Size:
        """What was out of use may have changed for a reason of its own, and begins anew."""
        size = self._sizes.get(key)
        if size is None:
            size = self._sizes[key] = _Size()
        elif self._num_seen - size.seen_at[-1] > LONGEST_UNSEEN:
            before = size.level_before if size.level is None else size.level
            size = self._sizes[key] = _Size(level_before=before)
        return size

    def _way_back(self, size: _Size) -> float:
        """How much nearer the machine is to what it was at first, by a size that has come back; 0: it says nothing."""
        if size.level_before is None:
            return 0.0
        moved = size.now - size.level_before - self._told
        return math.copysign(min(abs(moved), abs(self._told)), moved) if moved * self._told < 0 else 0.0

    def _moved(self) -> float:
        """What all agree on who tell it soon enough."""
        since = self._num_seen - MOST_APART * NUM_STEPS
        moves = [
            size.now - size.level - self._told
            for size in self._sizes.values()
            if size.level is not None and size.seen_at[0] > since
        ]
        least = min(moves, key=abs, default=0.0)
        return least if all(move * least > 0 for move in moves) else 0.0
