"""Writes down, for requests that asked for it, what a step did to them and why."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dsde.core.outputs import StepRecord
from dsde.core.sequence import Sequence, Status
from dsde.engine.executor import Seconds
from dsde.engine.planning import LengthPlan
from dsde.engine.request import Request
from dsde.verification import Verdict


def record_step(
    requests: dict[str, Request],
    step: int,
    decodes: list[Sequence],
    plan: LengthPlan,
    drafted: NDArray[np.int64],
    verdict: Verdict,
    seconds: Seconds,
) -> None:
    ends = np.cumsum(drafted)
    places = {int(row): place for place, row in enumerate(plan.rows)}
    for i, sequence in enumerate(decodes):
        request = requests.get(sequence.request_id)
        trace = None if request is None else request.metrics.trace
        # One that is aborted meanwhile has no more steps, and its name may belong to another by now.
        if trace is None or sequence.status is Status.FINISHED:
            continue
        predicted, cap, signals = _reasons(plan, places.get(i))
        trace.append(
            StepRecord(
                request_id=sequence.request_id,
                index=sequence.index,
                step=step,
                num_tokens=sequence.num_tokens,
                num_decoding=len(decodes),
                predicted=predicted,
                cap=cap,
                planned=int(plan.planned[i]),
                drafted=int(drafted[i]),
                accepted=int(verdict.accepted[i]),
                klds=verdict.klds[ends[i] - drafted[i] : ends[i]].tolist(),
                signals=signals,
                draft_s=seconds.draft,
                verify_s=seconds.verify,
                step_s=seconds.draft + seconds.verify + seconds.idle,
            )
        )


def _reasons(plan: LengthPlan, place: int | None) -> tuple[float | None, float | None, dict[str, float | None]]:
    """What the policy thought of the sequence at `place` of its batch; nothing where it was not asked."""
    if plan.plan is None or place is None:
        return None, None, {}
    values = {name: float(column[place]) for name, column in plan.plan.signals.items()}
    signals = {name: None if np.isnan(value) else value for name, value in values.items()}
    return float(plan.plan.predicted[place]), plan.plan.cap, signals
