"""Counters of an engine since it started. Nothing is silent: caps, trims, preemptions and pauses are all here."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dsde.core.outputs import SpeculationCounts


@dataclass(slots=True)
class EngineMetrics(SpeculationCounts):
    num_steps: int = 0
    num_requests: int = 0
    num_finished: int = 0
    num_aborted: int = 0
    num_prompt_tokens: int = 0
    num_draft_passes: int = 0
    """passes of the draft: the longest draft of every step"""
    num_klds: int = 0
    """drafted positions at which draft and target were compared"""
    kld_sum: float = 0.0
    last_cap: float | None = None
    """of the newest step that had one"""
    num_capped: int = 0
    """sequence-steps whose length a batch-wide stage lowered"""
    num_trimmed: int = 0
    """sequence-steps whose length was cut because KV memory was short"""
    num_undrafted: int = 0
    """sequence-steps in which the draft had fewer tokens to offer than planned"""
    num_stopped: int = 0
    """sequence-steps whose draft a rule ended before its length was reached"""
    num_cut: int = 0
    """sequence-steps of whose drafts a budget left something unverified"""
    num_lossy: int = 0
    """sequence-steps whose drafts were judged by a rule that is not lossless"""
    num_host_steps: int = 0
    """steps that a device could not do by itself, because somebody must look at every token"""
    num_cold_steps: int = 0
    """steps in which a device met a shape of a pass for the first or second time: much slower than those after them"""
    schedule_s: float = 0.0
    plan_s: float = 0.0
    draft_s: float = 0.0
    target_s: float = 0.0
    accept_s: float = 0.0
    commit_s: float = 0.0
    idle_s: float = 0.0
    """a device had nothing to do between two steps"""
    step_s: float = 0.0

    def count_klds(self, klds: NDArray[np.float64]) -> None:
        """Those that are no number are left out."""
        finite = klds[np.isfinite(klds)]
        self.num_klds += finite.size
        self.kld_sum += float(finite.sum())
