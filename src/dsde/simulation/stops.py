"""Rules of a policy that end drafts early, on what a simulation knows of the draft: signals of its distribution.

Of the token that a draft drew it is known that it is the likeliest one, which is so at temperature 0; above it that is
what a simulation takes for it.
"""

from __future__ import annotations

import numpy as np

from dsde.core.stops import (
    SIGNALS,
    SMALLEST_PROB,
    Signal,
    Stop,
    StopBefore,
    StopByWorth,
    TokenSignal,
    is_beyond,
)
from dsde.policies.base import FloatArray, IntArray
from dsde.simulation.requests import Requests


def stop_drafts(
    stop: Stop, requests: Requests, rows: IntArray, positions: IntArray, wanted: IntArray
) -> tuple[IntArray, IntArray]:
    """Tokens that are drafted of those wanted, and passes that this takes: a cancelled token has cost its pass."""
    depths = np.arange(wanted.max(initial=0))
    if not depths.size:
        return wanted, wanted
    if isinstance(stop, StopByWorth):
        return _stop_by_worth(stop, requests, rows, positions, wanted)
    places = np.minimum(positions[:, None] + depths, requests.agreed.shape[1] - 1)
    ends = is_beyond(stop, np.arange(wanted.size)[:, None], _values(stop.signal, requests, rows[:, None], places))
    ends &= depths < wanted[:, None]
    if isinstance(stop, StopBefore):
        ends &= depths >= stop.first_depth
    passes = np.where(ends.any(axis=1), ends.argmax(axis=1) + 1, wanted)
    return (passes - ends.any(axis=1) if isinstance(stop, StopBefore) else passes), passes


def _values(signal: Signal | TokenSignal, requests: Requests, rows: IntArray, places: IntArray) -> FloatArray:
    """[sequences, depths] of the drafts that begin at the first of these places."""
    if isinstance(signal, Signal):
        found: FloatArray = requests.draft_signals[rows, places, SIGNALS.index(signal)]
        return found
    probs: FloatArray = requests.token_probs[rows, places]
    return probs if signal is TokenSignal.TOKEN_PROB else np.log(np.maximum(probs, SMALLEST_PROB)).cumsum(axis=1)


def _stop_by_worth(
    stop: StopByWorth, requests: Requests, rows: IntArray, positions: IntArray, wanted: IntArray
) -> tuple[IntArray, IntArray]:
    drafted, passes = np.zeros_like(wanted), np.zeros_like(wanted)
    survivals = np.ones(wanted.size)
    active = np.flatnonzero(wanted > 0)
    depth = 0
    while active.size:
        passes[active] += 1
        signals = requests.draft_signals[rows[active], positions[active] + depth]
        survivals[active] = stop.survivals(active, survivals[active], signals)
        active = active[stop.keeps(depth, active, survivals[active])]
        drafted[active] += 1
        active = active[stop.goes_on(depth, active, survivals[active], wanted[active] > depth + 1)]
        depth += 1
    return drafted, passes
