"""Asks the policy for the lengths of vLLM's next step, and tells it what came of them. Lives beside the scheduler.

vLLM drafts at the end of a step what the next one verifies, and its scheduler must know how much before the step
begins. So a plan is made with one step, obeyed at its end, verified by the next and seen after that; with asynchronous
scheduling another step is under way meanwhile. Policies that pay for what they try, or that credit their latest choice,
are asked again only when they have seen what came of it; steps in between repeat what was settled. Knows requests as
vLLM's scheduler keeps them; knows nothing of tokens, models or devices.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsde.integrations.vllm.backlog import Backlog
from dsde.integrations.vllm.messages import Directive, Feedback
from dsde.integrations.vllm.meter import Meter
from dsde.integrations.vllm.slots import Slots
from dsde.integrations.vllm.support import looks_ahead, pairs, takes_turns
from dsde.integrations.vllm.trace import TraceWriter
from dsde.policies import BatchView, Need, Outcome, Pace, Plan, Policy

IntArray = NDArray[np.int64]

NUM_GAPS = 31


@dataclass(slots=True)
class Decision:
    """Lengths for the drafting at the end of one step."""

    step: int
    request_ids: list[str]
    batch: BatchView
    lengths: IntArray
    plan: Plan | None
    """None: those of an earlier plan again"""
    num_tokens: list[int] = field(default_factory=list)
    """[requests] so far; empty unless there is a trace"""
    num_catch_up_tokens: int = 0
    draft_s: float = 0.0
    """what it took; written when the step has been reported"""


@dataclass(slots=True)
class Step:
    """One step of vLLM between its scheduling and its report."""

    scheduled_at: float
    decision: Decision
    """for the next one"""
    verified: Decision | None
    """the decision whose drafts it verifies"""
    drafted: dict[str, int]
    """verified tokens of each request that decodes in it"""
    num_prompt_tokens: int
    num_tokens: int


@dataclass
class Limits:
    """What vLLM allows."""

    max_length: int
    max_model_len: int
    num_in_flight: int
    """steps that are scheduled and not yet reported when a plan is made, its own included"""
    exact_rooms: bool
    """do not draft beyond a request's end; otherwise a batch of one length is worth more, for it has a CUDA graph"""
    can_skip: bool
    """whether the draft can be left out of a step, and catch up later"""
    catch_up_budget: int = 2048


@dataclass
class _Settled:
    """What steps in between repeat."""

    lengths: dict[str, int] = field(default_factory=dict)
    is_on: bool = False
    was_on: bool | None = None
    """of the plan before"""

    def follow(self, request_ids: list[str], lengths: IntArray) -> None:
        """A plan that turns drafting on or off counts for its own step alone, until a second one says the same: it may
        be a look at the alternative."""
        is_on = bool(lengths.any())
        if self.was_on in (None, is_on):
            self.is_on = is_on
            self.lengths = dict(zip(request_ids, lengths.tolist(), strict=True))
        self.was_on = is_on

    def repeat(self, request_ids: list[str], rooms: IntArray) -> IntArray:
        usual = max(self.lengths.values(), default=0)
        wanted = np.array([self.lengths.get(name, usual) for name in request_ids], np.int64)
        return np.minimum(wanted, rooms)


class Controller:
    def __init__(
        self,
        policy: Policy,
        limits: Limits,
        meter: Meter | None = None,
        trace: TraceWriter | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.policy = policy
        self.limits = limits
        self.slots = Slots()
        self.backlog = Backlog(limits.catch_up_budget)
        self.meter = meter or Meter()
        self._trace = trace
        self._clock = clock
        self._reported_at: float | None = None
        self._gaps_s: deque[float] = deque(maxlen=NUM_GAPS)
        """of the newest steps without drafts, in which the device did nothing"""
        self._takes_turns = takes_turns(policy)
        self._pairs = pairs(policy)
        self._obeys_prediction = looks_ahead(policy)
        self._wants_pace = bool(policy.needs & Need.PACE)
        self._settled = _Settled()
        self._awaited: int | None = None
        """step whose plan the policy has yet to see the outcome of"""
        self._steps: dict[int, Step] = {}
        self._latest: Decision | None = None
        self._number = 0

    @property
    def latest_lengths(self) -> dict[str, int]:
        """Of the drafts that the step scheduled last ends with."""
        latest = self._latest
        return {} if latest is None else dict(zip(latest.request_ids, latest.lengths.tolist(), strict=True))

    # With every step of the scheduler

    def decide(self, scheduler_output: Any, requests: Mapping[str, Any], num_waiting: int) -> Directive:
        """Lengths for the drafting at the end of the step that was just scheduled."""
        self._number += 1
        self.forget(scheduler_output.finished_req_ids)
        step = self._verification(scheduler_output)
        request_ids = [name for name in scheduler_output.num_scheduled_tokens if not requests[name].is_prefill_chunk]
        batch = self._view(request_ids, requests, num_waiting, step.num_prompt_tokens)
        plan, lengths = self._plan(request_ids, batch)
        if not self.limits.can_skip:
            directive = Directive(self._number, {})
        else:
            directive = self._with_backlog(scheduler_output, requests, request_ids, lengths)
        directive.lengths = dict(zip(request_ids, lengths.tolist(), strict=True))
        num_tokens = [requests[name].num_tokens for name in request_ids] if self._trace is not None else []
        step.decision = self._latest = Decision(
            self._number, request_ids, batch, lengths, plan, num_tokens, directive.num_catch_up_tokens
        )
        if step.num_tokens:  # of an empty one nothing is reported
            self._steps[self._number] = step
        self.meter.count_plan(lengths, plan, directive.num_catch_up_tokens)
        return directive

    def _verification(self, scheduler_output: Any) -> Step:
        """What the step does with the drafts of the one before."""
        verified, scheduled = self._latest, scheduler_output.num_scheduled_tokens
        drafts = scheduler_output.scheduled_spec_decode_tokens
        drafted = {}
        for name in verified.request_ids if verified is not None else ():
            num_drafted = len(drafts.get(name, ()))
            # One that was preempted meanwhile reads all its tokens again, and decodes nothing.
            if scheduled.get(name) == num_drafted + 1:
                drafted[name] = num_drafted
        num_tokens = int(scheduler_output.total_num_scheduled_tokens)
        num_prompt_tokens = num_tokens - len(drafted) - sum(drafted.values())
        nothing = Decision(self._number, [], _nobody(), np.empty(0, np.int64), None)
        return Step(self._clock(), nothing, verified, drafted, num_prompt_tokens, num_tokens)

    def _view(
        self, request_ids: list[str], requests: Mapping[str, Any], num_waiting: int, num_prompt_tokens: int
    ) -> BatchView:
        limits, num, latest = self.limits, len(request_ids), self._latest
        asked = [requests[name] for name in request_ids]
        # As a rule they are those of the step before; but a name may be another request's by now.
        if latest is not None and latest.request_ids == request_ids and all(map(self.slots.__contains__, request_ids)):
            slots, temperatures = latest.batch.slots, latest.batch.temperatures
        else:
            slots = np.array([self.slots.of(name) for name in request_ids], np.int64)
            temperatures = np.array([request.sampling_params.temperature for request in asked], np.float64)
        if limits.exact_rooms:
            ends = [
                min(request.num_prompt_tokens + request.max_tokens, limits.max_model_len) - request.num_tokens
                for request in asked
            ]
            rooms = np.clip(np.array(ends, np.int64) - limits.num_in_flight - 1, 0, limits.max_length)
        else:
            rooms = np.full(num, limits.max_length, np.int64)
        return BatchView(
            slots=slots,
            rooms=rooms,
            temperatures=temperatures,
            num_decoding=num,
            num_waiting=num_waiting,
            # The next step reads prompts if this one does and others wait; how many is not known yet.
            num_prompt_tokens=num_prompt_tokens if num_waiting else 0,
            pace=_no_pace(num) if self._wants_pace else None,
        )

    def _plan(self, request_ids: list[str], batch: BatchView) -> tuple[Plan | None, IntArray]:
        if not request_ids:
            return None, np.empty(0, np.int64)
        if self._awaited is not None:
            return None, self._settled.repeat(request_ids, batch.rooms)
        plan = self.policy.plan(batch)
        lengths = np.clip(plan.lengths, 0, batch.rooms)
        if plan.stop is not None and self._obeys_prediction:
            lengths = np.minimum(lengths, plan.predicted.astype(np.int64))
        if self._takes_turns:
            self._awaited = self._number
            self._settled.follow(request_ids, lengths)
        return plan, lengths

    def _with_backlog(
        self, scheduler_output: Any, requests: Mapping[str, Any], request_ids: list[str], lengths: IntArray
    ) -> Directive:
        """Catch up where somebody drafts; where nobody does, note what the draft will have missed. Lowers `lengths`."""
        backlog, scheduled = self.backlog, scheduler_output.num_scheduled_tokens
        directive = Directive(self._number, {})
        # A request that begins within the prefix cache may begin on blocks that the draft never read.
        for new in scheduler_output.scheduled_new_reqs if backlog.has_skipped else ():
            if new.num_computed_tokens:
                backlog.skip(new.req_id, 0)
        if len(backlog) and lengths.any():
            wanting = {}
            for name, length in zip(request_ids, lengths.tolist(), strict=True):
                if length and name in backlog:
                    request = requests[name]
                    wanting[name] = (request, request.num_computed_tokens - scheduled[name])
            directive.catch_up, waiting = backlog.catch_up(wanting)
            if waiting:
                lengths[[name in waiting for name in request_ids]] = 0
        if lengths.any():
            return directive
        for name, num_scheduled in scheduled.items():
            if name not in backlog:
                request = requests[name]
                first = min(request.num_computed_tokens - num_scheduled, request.num_tokens - 1)
                backlog.skip(name, max(first, 0))
        return directive

    # With every report

    def observe(self, number: int, sampled: Mapping[str, int], feedback: Feedback | None) -> None:
        """The step of that number is over; `sampled` is how many tokens each request got of it."""
        step = self._steps.pop(number, None)
        if step is None:
            return
        feedback = feedback or Feedback()
        verify_s = self._share_time(step, feedback)
        verified = step.verified
        if verified is None:
            return
        is_answer = self._awaited is not None and verified.step >= self._awaited
        if is_answer:
            self._awaited = None
        rows = [row for row, name in enumerate(verified.request_ids) if name in step.drafted and name in self.slots]
        if not rows:
            return
        outcome = self._outcome(step, verified, rows, sampled, feedback, verify_s)
        self.meter.count_outcome(outcome)
        if self._trace is not None:
            self._trace.write(number, step.num_tokens, verified, rows, outcome)
        if not self._pairs or is_answer:
            self.policy.observe(outcome)
            self.policy.settle()

    def _share_time(self, step: Step, feedback: Feedback) -> float:
        """Note what the drafting at the end of a step took; what the rest of it did.

        A step takes as long as from one report to the next. What the device does not do in it, vLLM's own work, counts
        for the verification as much as in steps without drafts, and beyond that for the draft.
        """
        now = self._clock()
        since, reported_at = step.scheduled_at, self._reported_at
        if reported_at is not None and since - reported_at < now - since:  # or else nobody had anything to do
            since = reported_at
        self._reported_at = now
        if not feedback.verify_s > 0:
            return 0.0
        gap_s = max(now - since - feedback.verify_s - feedback.draft_s, 0.0)
        if not step.decision.lengths.any():
            self._gaps_s.append(gap_s)
            return feedback.verify_s + gap_s
        plain_s = min(statistics.median(self._gaps_s), gap_s) if self._gaps_s else 0.0
        step.decision.draft_s = feedback.draft_s + gap_s - plain_s
        return feedback.verify_s + plain_s

    def _outcome(
        self,
        step: Step,
        verified: Decision,
        rows: list[int],
        sampled: Mapping[str, int],
        feedback: Feedback,
        verify_s: float,
    ) -> Outcome:
        names = [verified.request_ids[row] for row in rows]
        drafted = np.array([step.drafted[name] for name in names], np.int64)
        accepted = np.array([max(sampled.get(name, 1) - 1, 0) for name in names], np.int64)
        outcome = Outcome(
            slots=verified.batch.slots[rows],
            drafted=drafted,
            accepted=np.minimum(accepted, drafted),
            klds=np.empty(0),
            temperatures=verified.batch.temperatures[rows],
            draft_s=verified.draft_s,
            verify_s=verify_s,
            num_decoding=len(step.drafted),
            num_prompt_tokens=step.num_prompt_tokens,
            num_drafted=sum(step.drafted.values()),
            num_draft_passes=int(verified.lengths.max(initial=0)),
            num_catch_up_tokens=verified.num_catch_up_tokens,
        )
        needs = self.policy.needs
        if needs & (Need.KLD | Need.DRAFT_SIGNALS | Need.TOKEN_PROB):
            signals = _arrange(feedback, names, drafted)
            if needs & Need.KLD:
                outcome.klds = signals[:, 0]
            if needs & Need.DRAFT_SIGNALS:
                outcome.draft_signals = signals[:, 1:4]
            if needs & Need.TOKEN_PROB:
                outcome.token_probs = signals[:, 4]
        return outcome

    def forget(self, request_ids: Any) -> None:
        """These requests have ended."""
        for name in request_ids:
            self.backlog.forget(name)
            self._settled.lengths.pop(name, None)
        freed = self.slots.release(request_ids)
        if freed.size:
            self.policy.forget(freed)


def _arrange(feedback: Feedback, names: list[str], drafted: IntArray) -> NDArray[np.float64]:
    """[sum(drafted), 5] signals in the order of `names`; NaN where the worker had none."""
    num = int(drafted.sum())
    found = feedback.signals
    if found is None or not num:
        return np.full((num, 5), np.nan)
    if feedback.request_ids == names and feedback.num_drafted == drafted.tolist():
        return found
    ends = np.cumsum(feedback.num_drafted)
    places = {
        name: (end - count, count)
        for name, end, count in zip(feedback.request_ids, ends.tolist(), feedback.num_drafted, strict=True)
    }
    pieces = []
    for name, count in zip(names, drafted.tolist(), strict=True):
        first, num_found = places.get(name, (0, 0))
        pieces.append(found[first : first + count] if num_found == count else np.full((count, 5), np.nan))
    return np.concatenate(pieces)


def _nobody() -> BatchView:
    return BatchView(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0), 0)


def _no_pace(num: int) -> Pace:
    return Pace(np.full(num, np.inf), np.zeros(num), np.zeros(num, np.int64))
