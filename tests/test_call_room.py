"""That calls below a loop with room never wait for memory of their frames, however deep the loop itself is called."""

from __future__ import annotations

import mmap
import resource
import sys
from collections.abc import Callable

import pytest

from dsde.core.call_room import call_with_room

NUM_CALLS = 200
DEPTHS = range(0, 240, 4)
"""more than a piece of Python's stack has room for"""


def counts_faults() -> bool:
    """Whether the system says when it gave a thread memory; not all do."""
    if not hasattr(resource, "RUSAGE_THREAD"):
        return False
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    with mmap.mmap(-1, 64 * mmap.PAGESIZE) as memory:
        for place in range(0, len(memory), mmap.PAGESIZE):
            memory[place] = 1
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt > before


needs_counts = pytest.mark.skipif(not counts_faults(), reason="nobody counts page faults here")


def call_many() -> int:
    """Page faults of calls that are as deep as a model's."""
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for _ in range(NUM_CALLS):
        descend(20, int)
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def descend(depth: int, function: Callable[[], int]) -> int:
    return descend(depth - 1, function) if depth else function()


@needs_counts
def test_no_depth_is_worse_than_others() -> None:
    assert max(descend(depth, lambda: call_with_room(call_many)) for depth in DEPTHS) < NUM_CALLS / 4


@needs_counts
@pytest.mark.skipif(sys.version_info >= (3, 15), reason="may keep a piece of its stack")
def test_without_room_some_depths_are() -> None:
    assert max(descend(depth, call_many) for depth in DEPTHS) >= NUM_CALLS / 2


def test_what_is_called_is_called_as_it_was() -> None:
    assert call_with_room(sorted, [2, 1, 3], reverse=True) == [3, 2, 1]
    with pytest.raises(ZeroDivisionError):
        call_with_room(lambda: 1 // 0)
