"""Acceptance by a coin instead of by the models: for benchmarks on weights that mean nothing. Knows no tokens."""

from __future__ import annotations

from typing import cast

import numpy as np
from numpy.typing import NDArray

from dsde.core.sequence import Sequence

SyntheticRates = tuple[float, ...] | tuple[tuple[float, ...], ...]
"""by depth, the last one serving all beyond; or several of these, of which every request has one"""


def by_kind(rates: SyntheticRates) -> list[tuple[float, ...]]:
    several = isinstance(rates[0], tuple)
    return cast("list[tuple[float, ...]]", list(rates) if several else [rates])


def kind_of(stream: int, num_kinds: int) -> int:
    """Which of them a request has, by the stream of its random numbers, as the device works it out."""
    return (stream & 0x7FFFFFFF) % num_kinds


def table(rates: SyntheticRates, num_depths: int) -> NDArray[np.float32]:
    """[kinds, depths]"""
    return np.array(
        [[row[min(depth, len(row) - 1)] for depth in range(num_depths)] for row in by_kind(rates)], dtype=np.float32
    )


def rates_of(sequences: list[Sequence], rates: SyntheticRates, num_depths: int) -> NDArray[np.float32]:
    """[sequences, depths]"""
    rows = table(rates, num_depths)
    return rows[[kind_of(sequence.stream, len(rows)) for sequence in sequences]]
