"""When the parts of a step were done, on the device that does them, without waiting for it.

On a GPU events mark the stream, and are read when they have passed: the beginning and the sampling when the step's
output has come; the drafting, which vLLM does not wait for, when that of the next step has. On a CPU it is the time of
day.
"""

from __future__ import annotations

import time
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

    def verify_s(self) -> float:
        return self._until(1)

    def draft_s(self) -> float:
        return self._until(2)

    def _until(self, number: int) -> float:
        """From the mark before; 0 where the step never came to it."""
        if self._num_marked <= number:
            return 0.0
        before, after = self._marks[number - 1 : number + 1]
        if not self._is_cuda:
            return float(after - before)
        after.synchronize()
        return float(before.elapsed_time(after)) / 1e3


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
