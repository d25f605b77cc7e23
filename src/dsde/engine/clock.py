"""Times a step on a device by the device's own clock, without ever waiting for it."""

from __future__ import annotations

import time

import torch

from dsde.engine.executor import Seconds


class Moment:
    """A point in a device's work, or right now where there is no device."""

    __slots__ = ("event", "time")

    def __init__(self, device: torch.device) -> None:
        # External: recorded within a graph, it is recorded again at every replay.
        self.event = torch.cuda.Event(enable_timing=True, external=True) if device.type == "cuda" else None
        self.time = 0.0

    def record(self) -> None:
        if self.event is None:
            self.time = time.perf_counter()
        else:
            self.event.record()

    def until(self, later: Moment) -> float:
        if self.event is None or later.event is None:
            return later.time - self.time
        return float(self.event.elapsed_time(later.event)) / 1e3

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()


class Clock:
    """A step begins when the device first hears of it, its draft is over, the target has read, the verdict is there.

    Everything between the verdict of one step and the beginning of the next is time that the device spent waiting for
    the host.
    """

    def __init__(self, device: torch.device) -> None:
        self._begun, self._drafted, self._judged, self._last_judged = (Moment(device) for _ in range(4))
        self._has_begun = False
        self._follows = False

    def start(self) -> None:
        """A step is about to be queued."""
        self._judged, self._last_judged = self._last_judged, self._judged
        self._has_begun = False

    def begin(self) -> None:
        """The device is about to hear of it; the first call counts."""
        if not self._has_begun:
            self._begun.record()
            self._has_begun = True

    def drafted(self) -> None:
        self._drafted.record()

    def judged(self) -> None:
        self._judged.record()

    def forget(self) -> None:
        """What comes next does not follow on a step."""
        self._follows = False

    def seconds(self, read: Moment) -> Seconds:
        """Wait until the step is over; its times."""
        self._judged.wait()
        idle = self._last_judged.until(self._begun) if self._follows else 0.0
        self._follows = True
        return Seconds(
            self._begun.until(self._drafted), self._drafted.until(read), read.until(self._judged), max(idle, 0.0)
        )
