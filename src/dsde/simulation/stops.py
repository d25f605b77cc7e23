"""Rules of a policy that end drafts early, on what a simulation knows of the draft: its entropy."""

from __future__ import annotations

import numpy as np

from dsde.core.errors import InvalidInput
from dsde.core.stops import Signal, Stop, StopBefore, is_beyond
from dsde.policies.base import IntArray
from dsde.simulation.requests import Requests


def stop_drafts(
    stop: Stop, requests: Requests, rows: IntArray, positions: IntArray, wanted: IntArray
) -> tuple[IntArray, IntArray]:
    """Tokens that are drafted of those wanted, and passes that this takes: a cancelled token has cost its pass."""
    if stop.signal is not Signal.ENTROPY:
        raise InvalidInput(f"a simulation knows the draft's entropy only; this policy needs {stop.signal.value}")
    if requests.entropies is None:
        raise InvalidInput("this policy needs the draft's entropy, and the recorded requests have no draft_entropy")
    depths = np.arange(wanted.max(initial=0))
    if not depths.size:
        return wanted, wanted
    places = np.minimum(positions[:, None] + depths, requests.entropies.shape[1] - 1)
    ends = is_beyond(stop, np.arange(wanted.size)[:, None], requests.entropies[rows[:, None], places])
    ends &= depths < wanted[:, None]
    if isinstance(stop, StopBefore):
        ends &= depths >= stop.first_depth
    passes = np.where(ends.any(axis=1), ends.argmax(axis=1) + 1, wanted)
    return (passes - ends.any(axis=1) if isinstance(stop, StopBefore) else passes), passes
