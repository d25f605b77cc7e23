"""Random numbers from a counter: a value depends on its key alone, never on what was drawn before.

So what a request draws does not depend on who shares its batch. Knows nothing of distributions over tokens.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MASK = (1 << 64) - 1


class Purpose(IntEnum):
    """What a uniform is for. Draws for different purposes at the same place are independent."""

    DRAFT = 1
    ACCEPT = 2
    EMIT = 3


def _avalanche(x: U64) -> U64:
    """SplitMix64's finaliser: every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def hash_words(*words: U64 | NDArray[np.int64] | int) -> U64:
    """Mix any number of integer words, broadcast against each other, into 64 bits."""
    state = np.zeros((), dtype=np.uint64)
    with np.errstate(over="ignore"):
        for word in words:
            value = np.uint64(word & _MASK) if isinstance(word, int) else word.astype(np.uint64)
            state = np.asarray(_avalanche(np.asarray((state ^ value) + _GOLDEN, dtype=np.uint64)))
    return state


def derive_stream(seed: int, *words: int) -> int:
    """A stream of its own for a sequence."""
    return int(hash_words(seed, *words))


def uniforms(
    streams: U64, steps: NDArray[np.int64], offsets: NDArray[np.int64], purpose: Purpose
) -> NDArray[np.float64]:
    """One uniform in [0, 1) for every stream, at a step of that stream and an offset within the step."""
    bits = hash_words(streams, steps, offsets, int(purpose))
    return np.asarray((bits >> np.uint64(11)) * 2.0**-53)


def random_bits(stream: int, position: int, size: int) -> NDArray[np.uint32]:
    """`size` random words for one position of one stream."""
    # SFC64, not a counter generator per word: a whole vocabulary is drawn at once, and this takes half the time.
    generator = np.random.SFC64(np.random.SeedSequence([stream, position]))
    return generator.random_raw((size + 1) // 2).view(np.uint32)[:size]
