"""Intervals by the bootstrap, over rounds and requests at once, in pairs: every contender met the same of both.

Rounds are resampled because the machine is not always equally fast, requests because other prompts would have been
answered otherwise. Both independently, which errs on the wide side, and one fewer of each than there are: a handful of
rounds would look too calm otherwise (the rescaling that makes the variance of a resampled mean unbiased).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

NUM_SAMPLES = 2000
LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Estimate:
    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3g} ({self.low:.3g} to {self.high:.3g})"


@dataclass(frozen=True, slots=True)
class Times:
    """Tokens and seconds of one contender, [rounds, requests]."""

    tokens: FloatArray
    seconds: FloatArray

    def only(self, chosen: Sequence[int]) -> Times:
        """Some of the requests."""
        return Times(self.tokens[:, list(chosen)], self.seconds[:, list(chosen)])

    @property
    def speed(self) -> float:
        return float(self.tokens.sum() / self.seconds.sum())


class Bootstrap:
    """Draws rounds and requests once, so that all contenders of a cell are compared on the same draws."""

    def __init__(self, num_rounds: int, num_requests: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self._rounds = _draw(rng, num_rounds)
        self._requests = _draw(rng, num_requests)

    def speed(self, times: Times) -> Estimate:
        """Tokens a second."""
        return _estimate(times.speed, self._speeds(times))

    def ratio(self, times: Times, base: Times) -> Estimate:
        """How much faster than `base`."""
        return _estimate(times.speed / base.speed, self._speeds(times) / self._speeds(base))

    def _speeds(self, times: Times) -> FloatArray:
        return self._total(times.tokens) / self._total(times.seconds)

    def _total(self, table: FloatArray) -> FloatArray:
        total: FloatArray = np.einsum("br,rn,bn->b", self._rounds, table, self._requests, optimize=True)
        return total


def _draw(rng: np.random.Generator, count: int) -> FloatArray:
    """[samples, count] how often each is drawn."""
    return rng.multinomial(max(count - 1, 1), np.full(count, 1 / count), size=NUM_SAMPLES).astype(np.float64)


def _estimate(value: float, samples: FloatArray) -> Estimate:
    low, high = np.quantile(samples, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(value, min(float(low), value), max(float(high), value))


def percentiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The 50th, 90th and 99th; 0 where there is nothing."""
    if not values:
        return 0.0, 0.0, 0.0
    p50, p90, p99 = np.percentile(values, [50, 90, 99]).tolist()
    return p50, p90, p99
