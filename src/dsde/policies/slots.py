"""Per-sequence state of a policy: columns indexed by slot. Knows nothing of what the columns mean."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsde.policies.base import IntArray

INITIAL_CAPACITY = 16


@dataclass
class SlotTable:
    """Base of a dataclass of arrays whose first axis is the slot.

    Made from arrays of one row, which is the initial state of every slot. Memory follows the largest slot seen, never
    the number of steps or tokens.
    """

    def __post_init__(self) -> None:
        self._columns = tuple(column.name for column in fields(self))
        self._blank: dict[str, NDArray[Any]] = {name: getattr(self, name).copy() for name in self._columns}
        self._capacity = 1
        self._grow(INITIAL_CAPACITY)

    def cover(self, slots: IntArray) -> None:
        """Make sure that every one of these slots has a row."""
        needed = int(slots.max(initial=-1)) + 1
        if needed > self._capacity:
            self._grow(max(needed, 2 * self._capacity))

    def reset(self, slots: IntArray) -> None:
        """Put these slots back into the initial state."""
        known = slots[slots < self._capacity]
        for name in self._columns:
            getattr(self, name)[known] = self._blank[name]

    def _grow(self, capacity: int) -> None:
        for name in self._columns:
            added = np.repeat(self._blank[name], capacity - self._capacity, axis=0)
            setattr(self, name, np.concatenate([getattr(self, name), added]))
        self._capacity = capacity
