"""Rules of a policy that end drafts early, on what a simulation knows of the draft: signals of its distribution."""

from __future__ import annotations

import numpy as np

from dsde.core.errors import InvalidInput
from dsde.core.stops import SIGNALS, Signal, Stop, StopBefore, StopByWorth, is_beyond
from dsde.policies.base import IntArray
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
    if not isinstance(stop.signal, Signal):
        raise InvalidInput(f"a simulation knows no tokens; this policy needs {stop.signal.value}")
    values = requests.draft_signals[..., SIGNALS.index(stop.signal)]
    places = np.minimum(positions[:, None] + depths, values.shape[1] - 1)
    ends = is_beyond(stop, np.arange(wanted.size)[:, None], values[rows[:, None], places])
    ends &= depths < wanted[:, None]
    if isinstance(stop, StopBefore):
        ends &= depths >= stop.first_depth
    passes = np.where(ends.any(axis=1), ends.argmax(axis=1) + 1, wanted)
    return (passes - ends.any(axis=1) if isinstance(stop, StopBefore) else passes), passes


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
