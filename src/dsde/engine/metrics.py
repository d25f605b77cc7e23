"""Counters of an engine since it started. Nothing is silent: caps, trims, preemptions and pauses are all here."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class EngineMetrics:
    num_steps: int = 0
    num_requests: int = 0
    num_finished: int = 0
    num_aborted: int = 0
    num_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    num_emitted_tokens: int = 0
    num_drafts: int = 0
    """sequence-steps in which something was drafted"""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    num_draft_tokens_per_pos: list[int] = field(default_factory=list)
    """positions beyond a step's length are unobserved, not rejected: divide by these"""
    num_catch_up_tokens: int = 0
    """tokens the draft read because it had not seen them: prompts, pauses, preemptions"""
    num_capped: int = 0
    """sequence-steps whose length a batch-wide stage lowered"""
    num_trimmed: int = 0
    """sequence-steps whose length was cut because KV memory was short"""
    num_undrafted: int = 0
    """sequence-steps in which the draft had fewer tokens to offer than planned"""
    num_preemptions: int = 0
    schedule_s: float = 0.0
    plan_s: float = 0.0
    draft_s: float = 0.0
    target_s: float = 0.0
    accept_s: float = 0.0
    commit_s: float = 0.0
    step_s: float = 0.0

    @property
    def acceptance_rate(self) -> float:
        """accepted / drafted"""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def acceptance_length(self) -> float:
        """tokens emitted by a step that had drafted something, the bonus token included"""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0


def count_positions(totals: list[int], length: int) -> None:
    """Add one to each of the first `length` positions."""
    totals.extend([0] * (length - len(totals)))
    for position in range(length):
        totals[position] += 1
