"""That calls below a loop with room never wait for memory of their frames, however deep the loop itself is called."""

from __future__ import annotations

import asyncio
import mmap
import resource
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from dsde import LLM, AsyncLLM, RequestOutput, SamplingParams
from dsde.bench.contender import PolicyContender, Task
from dsde.core.call_room import call_with_room
from dsde.engine.engine import Engine
from tiny import make_engine, tiny_model

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


class Watched:
    """An engine that notes of every step whether the loop that makes it has room."""

    def __init__(self) -> None:
        self.engine = make_engine(tiny_model(seed=7), None)
        self.have_room: list[bool] = []
        step = self.engine.step

        def watch() -> Any:
            frame = sys._getframe()
            codes = []
            while frame is not None:
                codes.append(frame.f_code)
                frame = frame.f_back  # type: ignore[assignment]
            self.have_room.append(call_with_room.__code__ in codes)
            return step()

        self.engine.step = watch  # type: ignore[method-assign]


PARAMS = SamplingParams(temperature=0, max_tokens=4)


def generate(engine: Engine) -> None:
    llm = LLM.__new__(LLM)
    llm.engine, llm._mail = engine, {}
    llm.generate([[1, 2, 3]], PARAMS)


def serve(engine: Engine) -> None:
    llm = AsyncLLM(engine)

    async def ask() -> None:
        async for event in llm.generate([1, 2, 3], PARAMS):
            if isinstance(event, RequestOutput):
                return

    try:
        asyncio.run(ask())
    finally:
        llm.shutdown()


def bench(engine: Engine) -> None:
    contender = PolicyContender("off", SimpleNamespace(engine=engine))  # type: ignore[arg-type]
    contender.take_turn([Task("any", "", [1, 2, 3], PARAMS)], 1, None, lambda: None)


@pytest.mark.parametrize("drive", [generate, serve, bench])
def test_every_loop_of_ours_has_room(drive: Callable[[Engine], None]) -> None:
    watched = Watched()
    drive(watched.engine)
    assert len(watched.have_room) >= 4
    assert all(watched.have_room)
