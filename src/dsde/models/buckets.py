"""Sizes that passes on a device are padded to, so that few graphs serve all. Knows nothing of what a pass does."""

from __future__ import annotations

from bisect import bisect_left

from dsde.models.batch import BLOCK_SIZE

MOST_GRAPH_TOKENS = 1024
"""Beyond it a pass computes longer than its launches take."""


def _buckets() -> list[int]:
    """Few up to 16, where rows cost next to nothing, then four from one power of two to the next: a fifth of padding at
    most. Every size that is met costs two slow passes, the first and the one that is captured."""
    sizes = [1, 2, 3, 4, 6, 8, 12, 16]
    while sizes[-1] < MOST_GRAPH_TOKENS:
        sizes.append(sizes[-1] + (1 << (sizes[-1].bit_length() - 3)))
    return sizes


_BUCKETS = _buckets()
_LEAST_COARSE, _MOST_COARSE = 8, 64
"""Up to the least every row more is noticed, beyond the most padding is; between them a product's tiles are coarse."""


def bucket(count: int) -> int:
    """The size that `count`, at most MOST_GRAPH_TOKENS, is padded to."""
    return _BUCKETS[bisect_left(_BUCKETS, count)]


def ragged_bucket(count: int) -> int:
    """The same for sequences of different lengths, whose sum changes with every step: powers of two in the middle, up
    to twice what is needed, as every new size costs two slow passes."""
    return power_of_2(count) if _LEAST_COARSE < count <= _MOST_COARSE else bucket(count)


def ragged_buckets(least: int, most: int) -> list[int]:
    """All that sums between these are padded to."""
    return sorted({ragged_bucket(count) for count in range(least, most + 1)})


def coarse_bucket(count: int) -> int:
    """Powers of two, and one between each two of them from 8 on."""
    most = power_of_2(count)
    between = most - (most >> 2)
    return between if count <= between and most > _LEAST_COARSE else most


def reading_bucket(count: int) -> int:
    """For what is read now and then, and is never the same: powers of four, and of two where a pass over so many tokens
    takes as much longer as it is padded."""
    size = power_of_2(count)
    return size if size > 256 or size.bit_length() % 2 else 2 * size


def context_bucket(num_tokens: int) -> int:
    """Tokens that a pass has room for in every sequence's block table. A context that outgrows it meets nothing but new
    shapes, so there are few; but long tables take time to copy."""
    room = 128 * BLOCK_SIZE
    while room < num_tokens:
        room *= 4 if room < 512 * BLOCK_SIZE else 2
    return room


def power_of_2(count: int) -> int:
    """The next one, at least `count`: the most that sequences are padded to."""
    return 1 << (count - 1).bit_length()
