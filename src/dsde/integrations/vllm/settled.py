"""Lengths for steps in which a policy is not asked, because it has yet to see what came of its latest plan.

Knows requests by name; knows nothing of policies or of vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


@dataclass
class Settled:
    """What steps repeat."""

    lengths: dict[str, int] = field(default_factory=dict)
    is_on: bool = False
    was_on: bool | None = None
    """of the plan before"""

    def follow(self, request_ids: list[str], lengths: IntArray, is_sure: bool) -> None:
        """A plan that turns drafting on or off counts for its own step alone, until a second one says the same: it may
        be a look at the alternative. Unless it says of itself that it is none."""
        is_on = bool(lengths.any())
        if is_sure or self.was_on in (None, is_on):
            self.is_on = is_on
            self.lengths = dict(zip(request_ids, lengths.tolist(), strict=True))
        self.was_on = is_on

    def repeat(self, request_ids: list[str], rooms: IntArray) -> IntArray:
        usual = max(self.lengths.values(), default=0)
        wanted = np.array([self.lengths.get(name, usual) for name in request_ids], np.int64)
        return np.minimum(wanted, rooms)
