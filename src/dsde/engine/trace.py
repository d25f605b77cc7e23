"""Writes down what a step did to its sequences and why: for requests that asked for it, or for everybody."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dsde.core.outputs import StepRecord
from dsde.core.sequence import Status
from dsde.engine.executor import Landing
from dsde.engine.planning import LengthPlan
from dsde.engine.request import Request
from dsde.engine.scheduler import Schedule
from dsde.policies import Policy


def expect_seconds(
    policy: Policy, plan: LengthPlan, drafted: NDArray[np.int64], landing: Landing
) -> tuple[float, float] | None:
    """Of drafting and of verifying as much as the step did, by the policy's cost model, asked before it learns from it;
    None where it has none, or was not asked."""
    model = policy.cost_model
    if model is None or plan.plan is None:
        return None
    batch, budget, num_drafted = plan.batch, plan.plan.budget, int(drafted.sum())
    num_cut = 0 if budget is None else budget.num_cut
    model.turn_to(batch.num_sequences)
    verify_s = model.verify_s(batch.num_decoding + num_drafted + batch.num_prompt_tokens)
    is_ruled = plan.plan.stop is not None
    return model.drafting_s(num_drafted + num_cut, landing.num_draft_passes, is_ruled), float(verify_s)


def record_step(
    requests: dict[str, Request],
    step: int,
    work: Schedule,
    plan: LengthPlan,
    drafted: NDArray[np.int64],
    landing: Landing,
    expected: tuple[float, float] | None,
    everybody: bool,
) -> list[StepRecord]:
    """The records made, each also in the trace of its request if that wants one."""
    verdict, seconds, tokens = landing.verdict, landing.seconds, landing.draft_tokens
    num_pass_tokens = len(work.decodes) + int(drafted.sum()) + sum(chunk for _, chunk in work.prefills)
    expected_draft_s, expected_verify_s = expected or (None, None)
    records = []
    ends = np.cumsum(drafted)
    places = {int(row): place for place, row in enumerate(plan.rows)}
    for i, sequence in enumerate(work.decodes):
        request = requests.get(sequence.request_id)
        # One that is aborted meanwhile has no more steps, and its name may belong to another by now.
        if request is None or sequence.status is Status.FINISHED:
            continue
        trace = request.metrics.trace
        if trace is None and not everybody:
            continue
        predicted, cap, signals = _reasons(plan, places.get(i))
        record = StepRecord(
            request_id=sequence.request_id,
            index=sequence.index,
            step=step,
            num_tokens=sequence.num_tokens,
            num_decoding=len(work.decodes),
            num_pass_tokens=num_pass_tokens,
            predicted=predicted,
            cap=cap,
            planned=int(plan.planned[i]),
            drafted=int(drafted[i]),
            accepted=int(verdict.accepted[i]),
            rejected_token_ids=None if tokens is None else tokens[i, verdict.accepted[i] : drafted[i]].tolist(),
            klds=verdict.klds[ends[i] - drafted[i] : ends[i]].tolist(),
            signals=signals,
            draft_s=landing.drafting_s,
            verify_s=seconds.verify,
            step_s=seconds.draft + seconds.verify + seconds.idle,
            expected_draft_s=expected_draft_s,
            expected_verify_s=expected_verify_s,
        )
        records.append(record)
        if trace is not None:
            trace.append(record)
    return records


def _reasons(plan: LengthPlan, place: int | None) -> tuple[float | None, float | None, dict[str, float | None]]:
    """What the policy thought of the sequence at `place` of its batch; nothing where it was not asked."""
    if plan.plan is None or place is None:
        return None, None, {}
    values = {name: float(column[place]) for name, column in plan.plan.signals.items()}
    signals = {name: None if np.isnan(value) else value for name, value in values.items()}
    return float(plan.plan.predicted[place]), plan.plan.cap, signals
