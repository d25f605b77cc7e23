"""A policy that writes down what another one sees: of every step KLDs, and the entropy of the draft where it drafted.

Makes whatever it wraps cost more, as these signals are measured for it; for passes that are not timed.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from dsde.bench.contender import Task
from dsde.bench.results import Trace
from dsde.engine.llm import LLM
from dsde.policies import BatchView, CostModel, Need, Outcome, Plan, Policy
from dsde.policies.base import IntArray


class Recorder(Policy):
    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.needs = policy.needs | Need.KLD | Need.DRAFT_SIGNALS
        self.outcomes: list[Outcome] = []

    @property
    def cost_model(self) -> CostModel | None:
        return self.policy.cost_model

    def plan(self, batch: BatchView) -> Plan:
        plan = self.policy.plan(batch)
        plan.wants_signals = True
        return plan

    def observe(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self.policy.observe(outcome)

    def forget(self, slots: IntArray) -> None:
        self.policy.forget(slots)


def trace_task(name: str, llm: LLM, task: Task, workload: str) -> Trace:
    """Answer one request alone, under the policy that `llm` has, with all it has learnt."""
    recorder = Recorder(llm.policy)
    output = llm.with_policy(recorder).generate(task.prompt, task.params, trace=True)[0]
    assert llm.tokenizer is not None
    return Trace(
        contender=name,
        workload=workload,
        temperature=task.params.temperature,
        kind=task.kind,
        prompt=task.text,
        num_prompt_tokens=len(task.prompt),
        pieces=[llm.tokenizer.token_text(token) for token in output.outputs[0].token_ids],
        steps=[
            _step(asdict(record), outcome, llm)
            for record, outcome in zip(output.metrics.trace or [], recorder.outcomes, strict=False)
        ],
    )


def _step(record: dict[str, Any], outcome: Outcome, llm: LLM) -> dict[str, Any]:
    assert llm.tokenizer is not None
    rejected = record.pop("rejected_token_ids")
    pieces = None if rejected is None else [llm.tokenizer.token_text(token) for token in rejected]
    return record | {"rejected": pieces, "entropies": outcome.draft_signals[:, 0].tolist()}
