"""What speculation did for one request, in the shape of vLLM's `metrics.speculative_decoding`."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from pydantic import BaseModel

from dsde.core.outputs import RequestMetrics


class SpeculationMetrics(BaseModel):
    mean_acceptance_length: float
    """the bonus token included"""
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    """at index j, steps that accepted exactly j drafted tokens"""
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    """most that a step drafted: lengths differ from step to step"""
    per_step_accepted: list[int] | None = None
    per_step_drafted: list[int] | None = None


def describe_speculation(metrics: RequestMetrics) -> dict[str, Any]:
    """With the steps one by one where the request has a trace."""
    # Steps that accepted at least j tokens are those that accepted position j - 1.
    at_least = [metrics.num_drafts, *metrics.num_accepted_tokens_per_pos]
    at_least += [0] * (len(metrics.num_draft_tokens_per_pos) + 2 - len(at_least))
    summary = SpeculationMetrics(
        mean_acceptance_length=metrics.acceptance_length,
        draft_acceptance_rate=metrics.acceptance_rate,
        acceptance_histogram=[more - less for more, less in pairwise(at_least)],
        num_spec_steps=metrics.num_drafts,
        num_accepted_draft_tokens=metrics.num_accepted_tokens,
        num_draft_tokens=metrics.num_draft_tokens,
        num_spec_tokens=len(metrics.num_draft_tokens_per_pos),
    )
    if metrics.trace is not None:
        drafting = [record for record in metrics.trace if record.drafted]
        summary.per_step_accepted = [record.accepted for record in drafting]
        summary.per_step_drafted = [record.drafted for record in drafting]
    return summary.model_dump(exclude_none=True)
