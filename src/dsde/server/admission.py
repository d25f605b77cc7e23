"""Who is let in: as many sequences as can run and wait, and nobody any more once the server is about to end."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from dsde.server.errors import ApiError

LONGEST_RETRY_S = 60
_NUM_FINISHES = 64
"""of which the pace is known"""


class Admission:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_requests = 0
        """let in and not yet answered"""
        self.num_sequences = 0
        self.num_refused = 0
        self.is_closed = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._finishes: deque[float] = deque(maxlen=_NUM_FINISHES)

    @contextmanager
    def enter(self, num_sequences: int) -> Iterator[None]:
        """Within the block the request counts; raises where there is no room for it."""
        self._check(num_sequences)
        self.num_requests += 1
        self.num_sequences += num_sequences
        self._idle.clear()
        try:
            yield
        finally:
            self.num_requests -= 1
            self.num_sequences -= num_sequences
            self._finishes.extend([time.monotonic()] * num_sequences)
            if not self.num_requests:
                self._idle.set()

    def close(self) -> None:
        """Let nobody in any more."""
        self.is_closed = True

    async def wait_idle(self) -> None:
        """Until everybody who was let in has been answered."""
        await self._idle.wait()

    def _check(self, num_sequences: int) -> None:
        if self.is_closed:
            self.num_refused += 1
            headers = {"Retry-After": "1", "Connection": "close"}
            raise ApiError(503, "The server is shutting down.", code="shutting_down", headers=headers)
        if num_sequences > self.capacity:
            raise ApiError(
                400,
                f"The request asks for {num_sequences} completions at once, but this server takes {self.capacity}.",
                code="too_many_completions",
                param="n",
            )
        if self.num_sequences + num_sequences > self.capacity:
            self.num_refused += 1
            raise ApiError(
                429,
                f"{self.num_sequences} completions are under way or waiting, and there is room for {self.capacity}: "
                "try again later.",
                code="queue_full",
                headers={"Retry-After": str(self._retry_s(num_sequences))},
            )

    def _retry_s(self, num_sequences: int) -> int:
        """How long it takes, at the pace of late, until so many have finished."""
        if len(self._finishes) < 2:
            return 1
        pace_s = (time.monotonic() - self._finishes[0]) / len(self._finishes)
        return min(max(1, math.ceil(pace_s * num_sequences)), LONGEST_RETRY_S)
