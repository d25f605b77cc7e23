"""Times steps on a device by the device's own clock, without ever waiting for it."""

from __future__ import annotations

import time

import torch

from dsde.engine.executor import Seconds


class Moment:
    """A point in a device's work, or right now where there is no device."""

    __slots__ = ("event", "time")

    def __init__(self, device: torch.device) -> None:
        # External: recorded within a graph, it is recorded again at every replay.
        self.event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self.event = torch.cuda.Event(enable_timing=True, external=True)  # type: ignore[no-untyped-call]
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


class Timing:
    """A step begins when the device first hears of it, its draft is over, the target has read, the verdict is there.

    Between its end and the next step's beginning the device waits for the host, unless the draft reads ahead: that
    belongs to the next step's draft.
    """

    def __init__(self, device: torch.device) -> None:
        self.begun, self.drafted, self.judged, self.ahead, self.reads = (Moment(device) for _ in range(5))
        self.has_begun = False
        self.has_read_ahead = False
        self.before: Timing | None = None
        """the step that this one follows on"""

    def begin(self) -> None:
        """The device is about to hear of it; the first call counts."""
        if not self.has_begun:
            self.begun.record()
            self.has_begun = True

    def go_on(self) -> None:
        """The device is about to hear of a whole step behind this one, some time behind its verdict."""
        self.reads.record()

    def read_ahead(self) -> None:
        self.ahead.record()
        self.has_read_ahead = True

    def seconds_alone(self, draft_s: float) -> Seconds:
        """Of a step that was queued as a whole, behind the one before it, and is over; its draft took so long."""
        assert self.before is not None
        begun = self.before.reads
        whole_s, idle_s = begun.until(self.judged), max(self.before.judged.until(begun), 0.0)
        return Seconds(draft_s, whole_s - draft_s, 0.0, idle_s)

    def seconds(self, read: Moment | None) -> Seconds:
        """Wait until the step is over; its times. `read` None: nobody knows when the target had read."""
        self.judged.wait()
        draft = self.begun.until(self.drafted)
        idle = 0.0
        if self.before is not None:
            ended = self.before.judged
            if self.before.has_read_ahead:
                ended = self.before.ahead
                draft += self.before.judged.until(ended)
            idle = max(ended.until(self.begun), 0.0)
        if read is None:
            return Seconds(draft, self.drafted.until(self.judged), 0.0, idle)
        return Seconds(draft, self.drafted.until(read), read.until(self.judged), idle)


class Clock:
    """Hands out timings, a few of them in turn: no more steps than that are under way."""

    def __init__(self, device: torch.device, num_timings: int = 4) -> None:
        self._timings = [Timing(device) for _ in range(num_timings)]
        self._next = 0
        self._last: Timing | None = None

    def start(self) -> Timing:
        """For a step that is about to be queued."""
        timing = self._timings[self._next]
        self._next = (self._next + 1) % len(self._timings)
        timing.has_begun = timing.has_read_ahead = False
        timing.before, self._last = self._last, timing
        return timing

    def forget(self) -> None:
        """What comes next does not follow on a step."""
        self._last = None
