"""Turns a policy's opinion into the lengths of a step, and the step's outcome into what the policy learns.

Requests that fix their own length, or want none, never reach the policy. Knows nothing of tokens.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dsde.core.sequence import Sequence, Status
from dsde.core.stops import Stop, StopByWorth
from dsde.drafting import Drafter
from dsde.engine.executor import Landing
from dsde.engine.metrics import EngineMetrics
from dsde.engine.scheduler import Schedule, Scheduler
from dsde.policies import FOREVER, BatchView, Need, Outcome, Pace, Plan, Policy
from dsde.sampling.penalties import is_edited

IntArray = NDArray[np.int64]


@dataclass(slots=True)
class LengthPlan:
    """Lengths for the decoding sequences of one step."""

    planned: IntArray
    """what policy or request asked for"""
    lengths: IntArray
    """what there is memory for"""
    rows: IntArray
    """the sequences whose length the policy chose"""
    batch: BatchView
    plan: Plan | None
    """the policy's own; None where it had nobody to choose for"""
    stop: Stop | None = None
    """the policy's, for all decoding sequences"""
    num_resting: int = 0
    """steps after this one in which none of these sequences drafts"""


class Planner:
    def __init__(self, policy: Policy, scheduler: Scheduler, drafter: Drafter | None, metrics: EngineMetrics) -> None:
        self.policy = policy
        self.scheduler = scheduler
        self.can_draft = drafter is not None
        self._must_read = drafter is not None and drafter.kv_bytes_per_block > 0
        """whether a draft has to have read a text first"""
        self._longest_text = 0 if drafter is None else drafter.longest_text
        self.num_ahead = 0
        """tokens to reserve memory for beyond those drafted"""
        self.most_whole = 0
        """sequences of the largest batch that is as a whole in every pass of a draft"""
        self.metrics = metrics

    @property
    def needs_klds(self) -> bool:
        return bool(self.policy.needs & Need.KLD)

    @property
    def needs_token_probs(self) -> bool:
        return bool(self.policy.needs & Need.TOKEN_PROB)

    @property
    def needs_draft_signals(self) -> bool:
        return bool(self.policy.needs & Need.DRAFT_SIGNALS)

    def plan(self, decodes: list[Sequence], num_prompt_tokens: int = 0, num_joining: int = 0) -> LengthPlan:
        nobody = np.empty(0, dtype=np.int64)
        if not self.can_draft or not decodes:
            zeros = np.zeros(len(decodes), dtype=np.int64)
            batch = BatchView(nobody, nobody, np.empty(0), len(decodes))
            return LengthPlan(zeros, zeros, nobody, batch, None, num_resting=FOREVER)
        rooms = self._rooms(decodes)
        wishes = [s.params.speculation for s in decodes]
        if all(wish == "on" for wish in wishes):
            rows, planned = np.arange(len(decodes)), np.zeros_like(rooms)
        else:
            rows = np.array([i for i, wish in enumerate(wishes) if wish == "on"], dtype=np.int64)
            fixed = np.array([wish if isinstance(wish, int) else 0 for wish in wishes], dtype=np.int64)
            planned = np.minimum(fixed, rooms)
        chosen = decodes if len(rows) == len(decodes) else [decodes[i] for i in rows.tolist()]
        batch = self._view(chosen, rooms[rows], decodes)
        batch.num_prompt_tokens, batch.num_joining = num_prompt_tokens, num_joining
        plan = None
        if len(rows):
            plan = self.policy.plan(batch)
            planned[rows] = np.minimum(np.maximum(plan.lengths, 0), batch.rooms)
            self.metrics.num_capped += plan.num_lowered
        lengths = self._reserve(decodes, planned)
        num_resting = 0
        if not any(isinstance(wish, int) for wish in wishes):
            num_resting = FOREVER if plan is None else plan.num_resting
        return LengthPlan(planned, lengths, rows, batch, plan, _spread(plan, rows, len(decodes)), num_resting)

    def repeat(self, plan: LengthPlan, decodes: list[Sequence]) -> LengthPlan:
        """The same once more, for the same sequences."""
        planned = np.minimum(plan.planned, self._rooms(decodes))
        return replace(plan, planned=planned, lengths=self._reserve(decodes, planned))

    def _reserve(self, decodes: list[Sequence], planned: IntArray) -> IntArray:
        """What there is memory for."""
        if not planned.any():
            return planned
        reserve, more = self.scheduler.reserve, self.num_ahead
        wanted = zip(decodes, planned.tolist(), strict=True)
        lengths = np.array([min(reserve(s, k + more), k) if k else 0 for s, k in wanted], dtype=np.int64)
        self.metrics.num_trimmed += int((lengths < planned).sum())
        return lengths

    def foresee(self, work: Schedule) -> BatchView | None:
        """The batch of the next step, where this one ends prompts and nothing else will be read then, as long as nobody
        ends; None: it is that of this step, for all that is known, or nobody knows."""
        joining = work.joining
        is_known = self.can_draft and len(joining) == len(work.prefills) and not self.scheduler.has_room
        if not joining or not is_known:
            return None
        decodes = sorted([*work.decodes, *joining], key=lambda sequence: sequence.arrival)
        return self._foresee(decodes, 1)

    def foresee_left(self, work: Schedule, num_under_way: int) -> BatchView | None:
        """The batch behind steps without drafts, of which so many are under way, where somebody ends in them; None:
        nobody does, or nobody knows."""
        left = [s for s in work.decodes if s.status is Status.RUNNING and s.num_left > num_under_way]
        if not self.can_draft or self.scheduler.waiting or not 0 < len(left) < len(work.decodes):
            return None
        return self._foresee(left, num_under_way)

    def _foresee(self, decodes: list[Sequence], num_more: int) -> BatchView | None:
        """A batch of these, if the policy chooses for all of them, who will have so many tokens more."""
        if any(sequence.params.speculation != "on" for sequence in decodes):
            return None
        return self._view(decodes, np.maximum(self._rooms(decodes) - num_more, 0), decodes, num_more)

    def _rooms(self, sequences: list[Sequence]) -> IntArray:
        """[sequences] tokens that may be drafted of each, at most."""
        # Beyond what a draft can read nothing would come of it, and somebody might wait for that.
        beyond = self._longest_text + 1
        return np.array([max(min(s.num_left - 1, beyond - s.num_tokens), 0) for s in sequences], dtype=np.int64)

    def _view(
        self,
        chosen: list[Sequence],
        rooms: IntArray,
        decodes: list[Sequence],
        num_more: int = 0,
    ) -> BatchView:
        """As it will be when everybody has had so many tokens more."""
        return BatchView(
            slots=np.array([s.slot for s in chosen], dtype=np.int64),
            rooms=rooms,
            temperatures=np.array([s.params.temperature for s in chosen], dtype=np.float64),
            num_decoding=len(decodes),
            num_waiting=len(self.scheduler.waiting),
            num_left=np.array([max(s.num_left - num_more, 1) for s in chosen], dtype=np.int64),
            num_missed=_num_missed(chosen) if self._must_read else None,
            pace=_pace(chosen) if self.policy.needs & Need.PACE else None,
            # Where logits are wanted, or edited, the host is asked about every token, and fewer still draft.
            has_whole_passes=len(decodes) <= self.most_whole and not any(map(_is_asked_about, decodes)),
        )

    def observe(
        self,
        plan: LengthPlan,
        drafted: IntArray,
        num_catch_up_tokens: IntArray | None,
        landing: Landing,
        step_s: float = 0.0,
    ) -> None:
        """Tell the policy what became of its lengths. `drafted` and the tokens caught up on are of all decoding;
        `step_s` as in Outcome."""
        if plan.plan is None:
            return
        rows, verdict = plan.rows, landing.verdict
        is_typical = not landing.is_cold and not landing.is_padded
        draft_s, verify_s = (landing.drafting_s, landing.seconds.verify) if is_typical else (0.0, 0.0)
        klds = verdict.klds if self.needs_klds else np.empty(0)
        probs = np.empty(0) if landing.token_probs is None else landing.token_probs
        signals = np.empty((0, 3)) if landing.draft_signals is None else landing.draft_signals
        if len(rows) < len(drafted):
            mine = np.zeros(len(drafted), dtype=bool)
            mine[rows] = True
            mine = np.repeat(mine, drafted)
            klds, probs, signals = (values[mine] if len(values) else values for values in (klds, probs, signals))
        outcome = Outcome(
            slots=plan.batch.slots,
            drafted=drafted[rows],
            accepted=verdict.accepted[rows],
            klds=klds,
            temperatures=plan.batch.temperatures,
            token_probs=probs,
            draft_signals=signals,
            draft_s=draft_s,
            verify_s=verify_s,
            step_s=0.0 if landing.is_cold else step_s,
            num_decoding=plan.batch.num_decoding,
            num_prompt_tokens=plan.batch.num_prompt_tokens,
            num_drafted=int(drafted.sum()),
            num_cut=0 if plan.plan.budget is None else plan.plan.budget.num_cut,
            num_draft_passes=landing.num_draft_passes,
            num_catch_up_tokens=0 if num_catch_up_tokens is None else int(num_catch_up_tokens.sum()),
            is_resumed=landing.is_resumed,
            is_ruled=plan.plan.stop is not None,
            is_by_heart=landing.is_by_heart,
        )
        self.policy.observe(outcome)


def _is_asked_about(sequence: Sequence) -> bool:
    return sequence.params.logprobs is not None or is_edited(sequence)


def _num_missed(sequences: list[Sequence]) -> IntArray:
    """[sequences] tokens that the draft has yet to read, beside the newest."""
    return np.array([max(len(s.tokens) - 1 - s.num_draft_computed, 0) for s in sequences], dtype=np.int64)


def _pace(sequences: list[Sequence]) -> Pace:
    now = time.perf_counter()
    targets_ms = [s.params.slo_tpot_ms for s in sequences]
    return Pace(
        tpot_s=np.array([np.inf if target is None else target / 1e3 for target in targets_ms]),
        elapsed_s=now - np.array([s.first_token_at for s in sequences]),
        num_emitted=np.array([s.num_output_tokens - 1 for s in sequences], dtype=np.int64),
    )


def _spread(plan: Plan | None, rows: IntArray, num_decoding: int) -> Stop | None:
    """A policy's stop with thresholds for everybody: those it does not choose for are never stopped."""
    if plan is None or plan.stop is None or len(rows) == num_decoding:
        return None if plan is None else plan.stop
    if isinstance(plan.stop, StopByWorth):
        offsets, outlooks = np.full(num_decoding, np.inf), np.ones(num_decoding)
        offsets[rows], outlooks[rows] = plan.stop.offsets, plan.stop.outlooks
        usual = None
        if plan.stop.usual is not None:
            usual = np.zeros(num_decoding, dtype=np.int64)
            usual[rows] = plan.stop.usual
        return replace(plan.stop, offsets=offsets, outlooks=outlooks, usual=usual)
    thresholds = np.full(num_decoding, np.inf if plan.stop.stops_above else -np.inf)
    thresholds[rows] = plan.stop.thresholds
    return replace(plan.stop, thresholds=thresholds)
