"""Named arrays that travel together, to a device or back: page-locked memory on the host, and its twin there.

Knows which of them hold fractions, and nothing else of what they mean.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_ALIGNMENT = 4
"""words; kernels load 16 bytes at a time"""

FLOATS = frozenset(
    {
        *("inv_temperatures", "top_ps", "min_ps", "klds", "entropies"),
        *("bounds", "outlooks", "rule_numbers", "first_bounds", "first_outlooks", "first_rule_numbers", "costs"),
    }
)
"""names of arrays that hold float32; all others hold int32"""


class Layout:
    """Named arrays of 32-bit words, one after another."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self.places: dict[str, tuple[int, int]] = {}
        self.num_words = 0
        for name, size in sizes.items():
            self.places[name] = (self.num_words, size)
            self.num_words += -(-size // _ALIGNMENT) * _ALIGNMENT

    def views(self, words: torch.Tensor) -> dict[str, torch.Tensor]:
        views = {name: words[start : start + size] for name, (start, size) in self.places.items()}
        return {name: view.view(torch.float32) if name in FLOATS else view for name, view in views.items()}


@dataclass(slots=True)
class Sheet:
    """The host's side: arrays to write, and the words they lie in."""

    words: torch.Tensor
    arrays: dict[str, NDArray[np.int32]]
    written: dict[str, bytes] = field(default_factory=dict)
    """what parts of it were last written from: most of a sheet is the same from step to step"""

    def is_new(self, part: str, *sources: NDArray[Any]) -> bool:
        """Whether a part must be written again, which the caller is expected to do."""
        key = b"".join(source.tobytes() for source in sources)
        if self.written.get(part) == key:
            return False
        self.written[part] = key
        return True

    @staticmethod
    def blank(layout: Layout, pinned: bool) -> Sheet:
        return Sheet.over(layout, torch.zeros(layout.num_words, dtype=torch.int32, pin_memory=pinned))

    @staticmethod
    def over(layout: Layout, words: torch.Tensor) -> Sheet:
        """One whose memory is the caller's."""
        return Sheet(words, {name: view.numpy() for name, view in layout.views(words).items()})
