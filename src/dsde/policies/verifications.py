"""Seconds of a verification against its tokens, for every size of batch by itself.

As many tokens take longer if more sequences share them, since all their contexts are read; how much longer depends on
the machine, the model and the contexts. So batches of different sizes, each up to twice as large as the one before,
learn from their own steps alone. One that is new goes by the nearest until it has measured some size twice, and steps
smaller than all of its own take no longer than would be expected in the next smaller batch, or in any larger one: its
own may all have read prompts. Knows nothing of drafts.
"""

from __future__ import annotations

from typing import Any

from dsde.policies.curve import Curve

LARGEST_SIZE = 32
"""of batches, the logarithm"""


def size_of_batch(num_sequences: int) -> int:
    """Those of one size are up to twice as large as the largest of the size before."""
    return min((max(num_sequences, 1) - 1).bit_length(), LARGEST_SIZE)


class Verifications:
    def __init__(self, prior_s: float, is_flat_below: bool = False) -> None:
        self._prior_s, self._is_flat_below = prior_s, is_flat_below
        self._curves: dict[int, Curve] = {}
        self._left_at: dict[int, int] = {}
        """by size: measurements that there were of all sizes when somebody last asked for it"""
        self._size = -1
        self.is_first = True
        """whether no other size was known when this was turned to"""
        self.turn_to(1)

    def turn_to(self, num_sequences: int) -> None:
        """From now on, whoever asks means a batch of so many."""
        size = size_of_batch(num_sequences)
        if size == self._size:
            return
        now = self.num_measured
        self._left_at[self._size] = now
        curve = self._curves.get(size)
        if curve is None:
            curve = self._curves[size] = Curve(self._prior_s, self._is_flat_below, may_fall=True)
        else:
            curve.pass_time(now - self._left_at.get(size, now))
        trusted = [other for other, one in self._curves.items() if one.is_trusted and other != size]
        nearest = min(trusted, key=lambda other: abs(other - size), default=None)
        smaller = [other for other in trusted if other < size]
        others = [*sorted(smaller)[-1:], *(other for other in trusted if other > size)]
        curve.go_by(None if nearest is None else self._curves[nearest], [self._curves[other] for other in others])
        self._size, self.current, self.is_first = size, curve, not trusted

    @property
    def num_measured(self) -> int:
        return sum(curve.num_measured for curve in self._curves.values())

    def scale(self, factor: float) -> None:
        for curve in self._curves.values():
            curve.scale(factor)

    def to_dict(self) -> dict[str, Any]:
        return {str(size): curve.to_dict() for size, curve in self._curves.items() if curve.num_measured}

    def restore(self, saved: dict[str, Any]) -> None:
        for name, held in saved.items():
            if not 0 <= int(name) <= LARGEST_SIZE:
                raise ValueError(name)
            curve = self._curves[int(name)] = Curve(self._prior_s, self._is_flat_below, may_fall=True)
            curve.restore(held)
        self._size = -1
        self.turn_to(1)
