"""When the parts of a step were done, on the device that does them, without waiting for it.

On a GPU events mark the stream; they are read when the step's output has come, and by then they have passed. On a CPU
it is the time of day.
"""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import torch

NUM_HELD = 8
"""steps whose marks are kept; vLLM has two under way"""


class StepClock:
    """Marks of one step: begun, sampled, drafted."""

    def __init__(self, is_cuda: bool) -> None:
        self._is_cuda = is_cuda
        self._marks: list[Any] = [_make_event() if is_cuda else 0.0 for _ in range(3)]
        self._num_marked = 0

    def begin(self) -> None:
        self._num_marked = 0
        self.mark()

    def mark(self) -> None:
        if self._num_marked >= len(self._marks):
            return
        if self._is_cuda:
            self._marks[self._num_marked].record()
        else:
            self._marks[self._num_marked] = time.perf_counter()
        self._num_marked += 1

    def seconds(self) -> list[float]:
        """Between one mark and the next."""
        marks = self._marks[: self._num_marked]
        if not self._is_cuda:
            return [after - before for before, after in pairwise(marks)]
        if marks:
            marks[-1].synchronize()
        return [float(before.elapsed_time(after)) / 1e3 for before, after in pairwise(marks)]


class Clocks:
    """One for each step under way, used again in turn."""

    def __init__(self, is_cuda: bool) -> None:
        self._clocks = [StepClock(is_cuda) for _ in range(NUM_HELD)]
        self._next = 0

    def begin(self) -> StepClock:
        clock = self._clocks[self._next]
        self._next = (self._next + 1) % NUM_HELD
        clock.begin()
        return clock


def _make_event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
