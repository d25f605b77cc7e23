"""Costs of a machine that becomes slower and faster little by little, and whose steps differ by accident.

Everything changes alike, as where somebody else computes on the same machine: three waves of different lengths over the
virtual time, and noise on every pass and verification. Knows nothing of policies.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from dsde.policies.base import FloatArray, IntArray
from dsde.simulation import Costs, MeasuredCosts

WAVES = ((1.0, 0.6), (2.3, 0.6), (0.43, 0.35))
"""periods and shares of the drift"""


class Unsteady:
    """For one run: its time goes on with what is asked of it."""

    def __init__(self, costs: Costs | MeasuredCosts, noise: float, drift: float, period_s: float, seed: int) -> None:
        """`noise` and `drift`: standard deviations, of logarithms."""
        self._costs, self._noise = costs, noise
        self._rng = np.random.default_rng(seed)
        phases = np.random.default_rng(seed + 1).uniform(0, 2 * math.pi, len(WAVES)).tolist()
        self._waves = [
            (2 * math.pi / (length * period_s), phase, math.sqrt(2) * drift * share)
            for (length, share), phase in zip(WAVES, phases, strict=True)
        ]
        self._now_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._costs, name)

    def draft_s(self, passes: IntArray, num_missed: int = 0, is_ruled: bool = False) -> float:
        return self._spend(self._costs.draft_s(passes, num_missed, is_ruled))

    def verify_s(self, num_sequences: int, num_tokens: int) -> float | FloatArray:
        return self._spend(float(self._costs.verify_s(num_sequences, num_tokens)))

    def _spend(self, seconds: float) -> float:
        wave = sum(height * math.sin(speed * self._now_s + phase) for speed, phase, height in self._waves)
        seconds *= math.exp(wave + self._noise * float(self._rng.standard_normal()))
        self._now_s += seconds
        return seconds
