"""Asks the policy for the lengths of vLLM's next step, and tells it what came of them. Lives beside the scheduler.

vLLM drafts at the end of a step what the next one verifies, and its scheduler must know how much before the step
begins. So a plan is made with one step, obeyed at its end, verified by the next and seen after that; with asynchronous
scheduling another step is under way meanwhile. Policies that pay for what they try, or that credit their latest choice,
are asked again only when they have seen what came of it; steps in between repeat what was settled. Where nobody drafts,
and the same requests go on, nothing is decided nor told for a while: that is a rest, and the policy hears of it at its
end. Knows requests as vLLM's scheduler keeps them; knows nothing of tokens, models or devices.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsde.integrations.vllm.backlog import Backlog
from dsde.integrations.vllm.messages import Directive, Feedback
from dsde.integrations.vllm.meter import Meter
from dsde.integrations.vllm.rest import LEAST_REST, LONGEST_REST, NUM_CHECKED, Rest
from dsde.integrations.vllm.settled import Settled
from dsde.integrations.vllm.slots import Slots
from dsde.integrations.vllm.support import looks_ahead, pairs, takes_turns
from dsde.integrations.vllm.trace import TraceWriter
from dsde.policies import BatchView, Need, Outcome, Pace, Plan, Policy

IntArray = NDArray[np.int64]

NUM_GAPS = 31


@dataclass(slots=True)
class Look:
    """Drafts that are made only to see what comes of them: of two steps in a row, since the first has to read what was
    missed, and what a draft takes is told by the second."""

    step: int
    """the first of them"""
    begun_at: float
    is_told_from_others: bool
    """whether steps without drafts are before it"""
    is_whole: bool = False
    """whether the second was decided, or will not be"""
    told_s: float = 0.0
    """by which steps that have been told took longer than without"""
    has_prompts: bool = False


@dataclass(slots=True)
class Decision:
    """Lengths for the drafting at the end of one step."""

    step: int
    request_ids: list[str]
    batch: BatchView
    lengths: IntArray
    plan: Plan | None
    """None: those of an earlier plan again"""
    look: Look | None = None
    num_tokens: list[int] = field(default_factory=list)
    """[requests] so far; empty unless there is a trace"""
    num_catch_up_tokens: int = 0
    num_draft_prompt_tokens: int = 0
    draft_s: float = 0.0
    """what it took; written when the step has been reported, and the one that verifies it"""

    @property
    def is_drafting(self) -> bool:
        """Whether the draft is run for somebody, if only to read."""
        return bool(self.lengths.any()) or self.num_catch_up_tokens > 0


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


@dataclass(slots=True)
class RestStep:
    """One step of a rest that is measured."""

    rest: Rest
    place: int | None
    """among those of it that read prompts; None: it reads none"""


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
    num_graph_tokens: int = 0
    """largest verification that runs whole if all its drafts have one length; drafts of others go in pieces"""


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
        self._settled = Settled()
        self._awaited: int | None = None
        """step whose plan the policy has yet to see the outcome of"""
        self._awaited_ids: list[str] = []
        """requests of that plan"""
        self._look: Look | None = None
        """that the latest decision is part of"""
        self._steps: dict[int, Step | RestStep] = {}
        self._latest: Decision | None = None
        self._rest: Rest | None = None
        self._plain: tuple[int, float] = 0, 0.0
        """number of requests in the newest rest, and what a step of it took; 0: nobody knows"""
        self._number = 0

    @property
    def latest_lengths(self) -> dict[str, int]:
        """Of the drafts that the step scheduled last ends with."""
        latest = self._latest
        return {} if latest is None else dict(zip(latest.request_ids, latest.lengths.tolist(), strict=True))

    # With every step of the scheduler

    def decide(self, scheduler_output: Any, requests: Mapping[str, Any], num_waiting: int) -> Directive:
        """Lengths for the drafting at the end of the step that was just scheduled."""
        scheduled_at = self._clock()
        self._number += 1
        self.forget(scheduler_output.finished_req_ids)
        rest = self._rest
        if rest is not None:
            if rest.covers(scheduler_output):
                return self._go_on(rest, scheduled_at)
            if rest.admits(scheduler_output):
                self._note_cached(scheduler_output)
                self._note_skipped(scheduler_output, requests)
                return self._go_on(rest, scheduled_at)
            self._end_rest(rest)
            if rest.has_changed:
                self._latest = self._resting(rest, scheduler_output, requests)
        verified = self._latest
        drafted = self._find_drafted(scheduler_output)
        num_tokens = int(scheduler_output.total_num_scheduled_tokens)
        num_prompt_tokens = num_tokens - len(drafted) - sum(drafted.values())
        request_ids = [name for name in scheduler_output.num_scheduled_tokens if not requests[name].is_prefill_chunk]
        batch = self._view(request_ids, requests, num_waiting, num_prompt_tokens)
        if self.limits.can_skip:
            self._note_cached(scheduler_output)
            if not self._waits_for_outcome():
                batch.num_left = self._num_left(request_ids, requests)
                batch.num_missed = self._num_missed(request_ids, requests, scheduler_output)
        plan, lengths = self._plan(request_ids, batch, scheduled_at)
        directive = Directive(self._number)
        if self.limits.can_skip:
            self._mind_backlog(directive, scheduler_output, requests, request_ids, lengths, batch.favours_one_length)
        directive.lengths = dict(zip(request_ids, lengths.tolist(), strict=True))
        directive.longest = int(lengths.max(initial=0))
        nums_tokens = [requests[name].num_tokens for name in request_ids] if self._trace is not None else []
        decision = self._latest = Decision(
            *(self._number, request_ids, batch, lengths, plan, self._look, nums_tokens),
            num_catch_up_tokens=directive.num_catch_up_tokens,
        )
        if directive.longest:
            decision.num_draft_prompt_tokens = num_prompt_tokens
        if num_tokens:  # of an empty one nothing is reported
            self._steps[self._number] = Step(scheduled_at, decision, verified, drafted, num_prompt_tokens, num_tokens)
        self.meter.count_plan(lengths, plan, directive.num_catch_up_tokens)
        if plan is not None and not directive.longest and not directive.catch_up:
            self._begin_rest(decision, plan, directive.lengths)
        return directive

    def _find_drafted(self, scheduler_output: Any) -> dict[str, int]:
        """What the step verifies of the drafts of the one before, by request that decodes in it."""
        verified, scheduled = self._latest, scheduler_output.num_scheduled_tokens
        drafts = scheduler_output.scheduled_spec_decode_tokens
        drafted = {}
        for name in verified.request_ids if verified is not None else ():
            num_drafted = len(drafts.get(name, ()))
            # One that was preempted meanwhile reads all its tokens again, and decodes nothing.
            if scheduled.get(name) == num_drafted + 1:
                drafted[name] = num_drafted
        return drafted

    def _view(
        self, request_ids: list[str], requests: Mapping[str, Any], num_waiting: int, num_prompt_tokens: int
    ) -> BatchView:
        limits, num, latest = self.limits, len(request_ids), self._latest
        # As a rule they are those of the step before; but a name may be another request's by now.
        if latest is not None and latest.request_ids == request_ids and all(map(self.slots.__contains__, request_ids)):
            slots, temperatures = latest.batch.slots, latest.batch.temperatures
        else:
            slots = np.array([self.slots.of(name) for name in request_ids], np.int64)
            temperatures = np.array([requests[name].sampling_params.temperature for name in request_ids], np.float64)
        if limits.exact_rooms:
            num_left = self._num_left(request_ids, requests)
            rooms = np.clip(num_left - limits.num_in_flight - 1, 0, limits.max_length)
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
            favours_one_length=2 * num <= limits.num_graph_tokens,
        )

    def _num_left(self, request_ids: list[str], requests: Mapping[str, Any]) -> IntArray:
        """Tokens that each may have yet."""
        most, asked = self.limits.max_model_len, [requests[name] for name in request_ids]
        ends = [min(request.num_prompt_tokens + request.max_tokens, most) - request.num_tokens for request in asked]
        return np.array(ends, np.int64)

    def _note_cached(self, scheduler_output: Any) -> None:
        """A request that begins within the prefix cache may begin on blocks that the draft never read."""
        for new in scheduler_output.scheduled_new_reqs if self.backlog.has_skipped else ():
            if new.num_computed_tokens:
                self.backlog.skip(new.req_id, 0)

    def _num_missed(self, request_ids: list[str], requests: Mapping[str, Any], scheduler_output: Any) -> IntArray:
        """Of those that decode. What the step itself reads the draft reads with it, prompts too: that is nothing more
        while somebody drafts anyway, but whoever begins has it read for this."""
        scheduled, num_missed = scheduler_output.num_scheduled_tokens, self.backlog.num_missed
        found = np.zeros(len(request_ids), np.int64)
        if len(self.backlog):
            found[:] = [num_missed(name, requests[name].num_computed_tokens - scheduled[name]) for name in request_ids]
        if self._latest is None or not self._latest.is_drafting:
            found += np.array([scheduled[name] - 1 for name in request_ids], np.int64)
        return found

    def _waits_for_outcome(self) -> bool:
        """Whether the policy is not asked before it has seen what came of its latest plan. Of one whose requests are
        all gone nobody learns anything any more."""
        return self._awaited is not None and any(map(self.slots.__contains__, self._awaited_ids))

    def _plan(self, request_ids: list[str], batch: BatchView, now: float) -> tuple[Plan | None, IntArray]:
        look, self._look = self._look, None
        if not request_ids:
            return None, np.empty(0, np.int64)
        if self._waits_for_outcome():
            if look is not None and not look.is_whole and (again := self._look_again(request_ids, batch)).any():
                self._look, look.is_whole, self._awaited = look, True, self._number
                return None, again
            return None, self._settled.repeat(request_ids, batch.rooms)
        # All that was seen is in it, and it is thought of once: whatever is thought of, vLLM waits.
        self.policy.settle(batch)
        plan = self.policy.plan(batch)
        lengths = np.clip(plan.lengths, 0, batch.rooms)
        if plan.stop is not None and self._obeys_prediction:
            lengths = np.minimum(lengths, plan.predicted.astype(np.int64))
        if self._takes_turns:
            self._awaited, self._awaited_ids = self._number, request_ids
            if lengths.any() and not plan.predicted.any():
                was_drafting = self._latest is not None and self._latest.is_drafting
                self._look = Look(self._number, now, is_told_from_others=not was_drafting)
            else:
                # Who says where drafts are to stop has decided that there will be some.
                decides = plan.stop is not None and self._obeys_prediction and bool(lengths.any())
                is_sure = plan.num_resting > 0 or decides
                self._settled.follow(request_ids, lengths, is_sure)
        return plan, lengths

    def _look_again(self, request_ids: list[str], batch: BatchView) -> IntArray:
        """Lengths as in the step before, if the same requests are there."""
        latest = self._latest
        assert latest is not None
        if latest.request_ids != request_ids:
            return np.zeros(len(request_ids), np.int64)
        return np.minimum(latest.lengths, batch.rooms)

    def _mind_backlog(
        self,
        directive: Directive,
        scheduler_output: Any,
        requests: Mapping[str, Any],
        request_ids: list[str],
        lengths: IntArray,
        favours_one_length: bool,
    ) -> None:
        """Catch up where somebody drafts; where nobody does, note what the draft will have missed. Lowers `lengths`."""
        backlog, scheduled = self.backlog, scheduler_output.num_scheduled_tokens
        if len(backlog) and lengths.any():
            wanting = {}
            for name, length in zip(request_ids, lengths.tolist(), strict=True):
                if length and name in backlog:
                    request = requests[name]
                    wanting[name] = (request, request.num_computed_tokens - scheduled[name])
            directive.catch_up, waiting = backlog.catch_up(wanting)
            if waiting:
                lengths[[name in waiting for name in request_ids]] = 0
                if favours_one_length and 2 * len(waiting) > np.count_nonzero(lengths):
                    lengths[:] = 0  # until most have caught up: drafts of few are verified more slowly than none
        if not lengths.any():
            self._note_skipped(scheduler_output, requests)

    def _note_skipped(self, scheduler_output: Any, requests: Mapping[str, Any]) -> None:
        """Nobody drafts at the end of this step, and the draft reads nothing."""
        for name, num_scheduled in scheduler_output.num_scheduled_tokens.items():
            # One that was preempted is read once more, and so is what the draft had read of it.
            if num_scheduled > 1 or name not in self.backlog:
                request = requests[name]
                first = min(request.num_computed_tokens - num_scheduled, request.num_tokens - 1)
                self.backlog.skip(name, max(first, 0))

    # While nobody drafts

    def _begin_rest(self, decision: Decision, plan: Plan, lengths: dict[str, int]) -> None:
        """As long as the policy says; or else until it has seen what came of a plan, if steps until then repeat it."""
        num_left = max(plan.num_resting, LEAST_REST) if plan.num_resting else 0
        is_check = self._obeys_prediction and self._settled.is_on and not plan.lengths.any()
        if is_check or (self._takes_turns and not self._settled.is_on):
            # When it ends, the newest of its steps have not been reported yet. Whoever is told of it as a whole is to
            # be told what a step took, too. A single one between drafts would say little: they are still launched.
            num_left = max(num_left, self.limits.num_in_flight + (NUM_CHECKED - 1 if self._pairs else 0))
        # A trace has a line for every step. A draft that cannot be left out takes its time in every one.
        if num_left > 0 and decision.request_ids and self.limits.can_skip and self._trace is None:
            # Who pairs outcomes with plans hears nothing of the step behind the rest, which is like the others.
            is_one = plan.num_resting > 0 or self._pairs
            self._rest = Rest(
                *(decision.batch, lengths, min(num_left, LONGEST_REST), is_one),
                num_untold=int(self._pairs),
                is_open=plan.num_resting > 0,
            )

    def _resting(self, rest: Rest, scheduler_output: Any, requests: Mapping[str, Any]) -> Decision:
        """What was decided for those who were in its newest step and go on: nobody drafts."""
        present = rest.scheduled.keys() & scheduler_output.num_scheduled_tokens.keys()
        request_ids = [name for name in rest.scheduled if name in present and not requests[name].is_prefill_chunk]
        batch = self._view(request_ids, requests, 0, 0)
        return Decision(self._number - 1, request_ids, batch, np.zeros(len(request_ids), np.int64), None)

    def _go_on(self, rest: Rest, now: float) -> Directive:
        """For most steps of a rest this is all that is done: not even their reports are heard of."""
        rest.take_step(now)
        if not rest.is_timed:
            return rest.directive
        self._steps[self._number] = RestStep(rest, None if rest.is_plain else len(rest.prompt_steps) - 1)
        return Directive(self._number, rest.directive.lengths)

    def _end_rest(self, rest: Rest) -> None:
        """Tell the policy of all its steps. Some may still be under way, but nothing new will come of them."""
        self._rest = None
        if not rest.num_steps:
            self._release(rest.retired)
            return
        self._awaited = None
        self._reported_at = self._clock()  # most of its reports were not heard of
        # Steps are scheduled as often as they end.
        self.meter.count_rest(rest.num_lengths, rest.num_steps, self._reported_at - rest.begun_at)
        self._plain = (len(rest.scheduled), rest.step_s) if rest.is_plain else (0, 0.0)
        for outcome in rest.outcomes():
            self.policy.observe(outcome)
        self._release(rest.retired)

    def _note_rest(self, step: RestStep, feedback: Feedback | None) -> None:
        """Another step of a rest is over."""
        self._reported_at = self._clock()
        if feedback is not None and feedback.step_s > 0:
            step.rest.note(feedback.step_s, step.place)
            if step.place is None:
                self._gaps_s.append(max(feedback.step_s - feedback.verify_s, 0.0))

    # With every report

    def observe(self, number: int, sampled: Mapping[str, int], feedback: Feedback | None) -> None:
        """The step of that number is over; `sampled` is how many tokens each request got of it."""
        step = self._steps.pop(number, None)
        if isinstance(step, RestStep):
            self._note_rest(step, feedback)
        if not isinstance(step, Step):
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
        look = verified.look
        is_told = is_answer or look is not None or not self._pairs
        if not is_told and self._trace is None:
            names = [verified.request_ids[row] for row in rows] if sampled else []
            num_drafted = sum(step.drafted[name] for name in names)
            num_accepted = sum(min(max(sampled.get(name, 1) - 1, 0), step.drafted[name]) for name in names)
            self.meter.count_drafts(num_drafted, num_accepted, verified.draft_s, verify_s)
            return
        outcome = self._outcome(step, verified, rows, sampled, feedback, verify_s)
        self.meter.count_outcome(outcome)
        if self._trace is not None:
            self._trace.write(number, step.num_tokens, verified, rows, outcome)
        if look is not None:
            self._note_look(look, step, outcome, is_answer)
        if is_told:
            self.policy.observe(outcome)

    def _note_look(self, look: Look, step: Step, outcome: Outcome, is_over: bool) -> None:
        """Say by how much everybody is later for it, when it is over: what the device did for it is not all of that
        where a step without drafts is the host's work."""
        num_requests, plain_s = self._plain
        look.has_prompts = look.has_prompts or bool(step.num_prompt_tokens or outcome.num_draft_prompt_tokens)
        is_clear = look.is_told_from_others and not look.has_prompts
        if not is_clear or not plain_s or num_requests != outcome.num_sequences:
            return
        if is_over:
            num_steps = self._number - look.step + 1
            delay_s = self._clock() - look.begun_at - num_steps * plain_s - look.told_s
            outcome.delay_s = max(delay_s, 0.0)
        else:
            look.told_s += max(outcome.draft_s + outcome.verify_s - plain_s, 0.0)

    def _share_time(self, step: Step, feedback: Feedback) -> float:
        """Note what the drafting at the end of a step took; what the rest of it did.

        The device waits before a step for what the host does between two: in steps behind no draft that is vLLM's own
        work, which verification takes with it; what is beyond that was the draft's.
        """
        now = self._clock()
        was_idle = self._reported_at is not None and step.scheduled_at - self._reported_at >= now - step.scheduled_at
        self._reported_at = now
        if not feedback.verify_s > 0:
            return 0.0
        if step.decision.is_drafting:
            step.decision.draft_s = feedback.draft_s
        usual_s = statistics.median(self._gaps_s) if self._gaps_s else 0.0
        if was_idle or not feedback.step_s > 0:
            return feedback.verify_s + usual_s
        gap_s = max(feedback.step_s - feedback.verify_s - feedback.draft_s, 0.0)
        verified = step.verified
        if verified is None or not verified.is_drafting:
            self._gaps_s.append(gap_s)
            return feedback.verify_s + gap_s
        usual_s = min(usual_s, gap_s)
        verified.draft_s += gap_s - usual_s
        return feedback.verify_s + usual_s

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
            num_draft_prompt_tokens=verified.num_draft_prompt_tokens,
            # Beside prompts, and looks at few: others are as they were chosen, or as the draft found them.
            is_odd=self.limits.can_skip
            and verified.batch.favours_one_length
            and (step.num_prompt_tokens > 0 or (verified.look is not None and len(set(step.drafted.values())) > 1)),
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
        if not request_ids:
            return
        for name in request_ids:
            self.backlog.forget(name)
            self._settled.lengths.pop(name, None)
        retired, rest = self.slots.retire(request_ids), self._rest
        if rest is None:
            self._release(retired)
            return
        # While the others rest on the policy need not hear of it.
        rest.retired.update(dict.fromkeys(retired, rest.num_steps))
        if rest.scheduled.keys() <= set(request_ids):
            self._end_rest(rest)

    def _release(self, retired: Collection[int]) -> None:
        """Nothing more will be told of the requests that had these slots."""
        if retired:
            self.slots.free(retired)
            self.policy.forget(np.array(list(retired), np.int64))


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


def _no_pace(num: int) -> Pace:
    return Pace(np.full(num, np.inf), np.zeros(num), np.zeros(num, np.int64))
