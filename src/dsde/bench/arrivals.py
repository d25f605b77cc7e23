"""When requests arrive: whenever a place is free (closed), or at random moments of a given rate (Poisson)."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from dsde.core.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class Arrivals:
    rate: float | None = None
    """requests a second; None: closed, the next one comes when one has finished"""

    def times(self, count: int, seed: int) -> list[float] | None:
        """Seconds after the start, rising; None where only free places count."""
        if self.rate is None:
            return None
        rng = random.Random(f"arrivals {seed}")
        now, times = 0.0, []
        for _ in range(count):
            times.append(now)
            now += rng.expovariate(self.rate)
        return times


def parse_arrivals(spec: str) -> Arrivals:
    name, _, rest = spec.partition(":")
    if name == "closed" and not rest:
        return Arrivals()
    try:
        rate = float(rest) if name == "poisson" else 0.0
    except ValueError:
        rate = 0.0
    if not (rate > 0 and math.isfinite(rate)):
        raise InvalidInput(f"arrival must be closed or poisson:RATE with requests a second above 0, not {spec!r}")
    return Arrivals(rate)
