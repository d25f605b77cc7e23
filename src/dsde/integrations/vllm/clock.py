"""When the parts of a step were done, on the device that does them, without waiting for it.

On a GPU events mark the stream; they are read when the step's output has come, and by then they have passed. On a CPU
it is the time of day. From the end of one step to that of the next is what the next one took, whoever waited for whom:
the host hears of a step's end when it has launched another one, and its own clock would count that.
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
        self._last_end: Any = None
        """of the step before; None: nobody marked it"""

    @property
    def end(self) -> Any:
        """The last mark; None: something that failed has none."""
        return self._marks[self._num_marked - 1] if self._num_marked > 1 else None

    def begin(self, last_end: Any) -> None:
        self._last_end = last_end
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
        if self._is_cuda and marks:
            marks[-1].synchronize()
        return [self._between(before, after) for before, after in pairwise(marks)]

    def seconds_since_last(self) -> float:
        """From the end of the step before to the end of this one; 0: nobody knows."""
        return 0.0 if self._last_end is None or self.end is None else self._between(self._last_end, self.end)

    def _between(self, before: Any, after: Any) -> float:
        return float(before.elapsed_time(after)) / 1e3 if self._is_cuda else after - before


class Clocks:
    """One for each step under way, used again in turn."""

    def __init__(self, is_cuda: bool) -> None:
        self._clocks = [StepClock(is_cuda) for _ in range(NUM_HELD)]
        self._next = 0
        self._number: int | None = None
        """of the step marked last"""

    def begin(self, number: int) -> StepClock:
        """Of the step of this number; the one before it need not have been marked."""
        last_end = self._clocks[self._next - 1].end if self._number == number - 1 else None
        clock = self._clocks[self._next]
        self._next = (self._next + 1) % NUM_HELD
        self._number = number
        clock.begin(last_end)
        return clock


def _make_event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
