"""How fast the host is just now: some machines have fast and slow times of seconds, whoever runs what.

Where the host decides how long a step takes, two turns can only be compared if it was as fast in both. Knows nothing of
what is measured.
"""

from __future__ import annotations

import time

NUM_TURNS = 40_000
NUM_TRIES = 3
ALIKE = 0.04
"""share by which it may differ between turns that are compared"""
SLOW = 0.1
"""share by which it is slower than at its best in a slow time"""


def pace_ms() -> float:
    """Milliseconds that the same little work takes in this thread; the best of a few."""
    return min(_work_ms() for _ in range(NUM_TRIES))


def _work_ms() -> float:
    table: dict[int, int] = {}
    begin = time.perf_counter()
    for number in range(NUM_TURNS):
        table[number & 255] = number
    return 1e3 * (time.perf_counter() - begin)


class Watch:
    """Tells turns that begin or end in a slow time, by the fastest that this thread has seen."""

    def __init__(self) -> None:
        self._best_ms = pace_ms()

    def is_slow(self) -> bool:
        now_ms = pace_ms()
        self._best_ms = min(self._best_ms, now_ms)
        return now_ms > (1 + SLOW) * self._best_ms


def is_alike(one: list[float], other: list[float]) -> bool:
    """Whether the host was as fast before and after one turn as before and after the other."""
    paces = [*one, *other]
    return max(paces) <= (1 + ALIKE) * min(paces)
