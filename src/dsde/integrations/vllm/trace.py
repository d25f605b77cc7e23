"""One JSON line for every request and step, as `dsde generate --trace` writes them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np

from dsde.core.outputs import StepRecord
from dsde.policies import Outcome

if TYPE_CHECKING:
    from dsde.integrations.vllm.controller import Decision


class TraceWriter:
    def __init__(self, path: str) -> None:
        self._file = open(path, "w", encoding="utf-8", buffering=1)  # noqa: SIM115 (for the life of the engine)

    def write(self, number: int, num_pass_tokens: int, decision: Decision, rows: list[int], outcome: Outcome) -> None:
        ends = np.cumsum(outcome.drafted)
        for place, row in enumerate(rows):
            name, plan = decision.request_ids[row], decision.plan
            num_drafted = int(outcome.drafted[place])
            signals = {} if plan is None else {key: float(column[row]) for key, column in plan.signals.items()}
            record = StepRecord(
                request_id=name,
                index=0,
                step=number,
                num_tokens=decision.num_tokens[row],
                num_decoding=outcome.num_decoding,
                num_pass_tokens=num_pass_tokens,
                predicted=None if plan is None else float(plan.predicted[row]),
                cap=None if plan is None else plan.cap,
                planned=int(decision.lengths[row]),
                drafted=num_drafted,
                accepted=int(outcome.accepted[place]),
                rejected_token_ids=None,
                klds=outcome.klds[ends[place] - num_drafted : ends[place]].tolist() if outcome.klds.size else [],
                signals={key: None if np.isnan(value) else value for key, value in signals.items()},
                draft_s=outcome.draft_s,
                verify_s=outcome.verify_s,
                step_s=outcome.draft_s + outcome.verify_s,
            )
            self._file.write(json.dumps(record.to_dict()) + "\n")
