"""The engine: requests go in, tokens come out, one step at a time.

A step is `schedule -> plan -> draft -> verify -> observe -> commit`. Everything it decides is somebody else's business:
who runs (scheduler), how far to draft (policy), what to propose (drafter), what stands (verification).
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
import torch

from dsde.core.errors import InvalidInput, OutOfMemory
from dsde.core.outputs import FinishReason, Logprob, RequestOutput, StepRecord, StreamChunk
from dsde.core.params import SamplingParams
from dsde.core.sequence import Sequence, Status
from dsde.device import backend
from dsde.device.backend import device_context
from dsde.drafting import Drafter
from dsde.engine.block_pool import BlockPool
from dsde.engine.config import EngineConfig
from dsde.engine.executor import DraftWish, Executor, Flight, HostExecutor, HostFlight, Landing
from dsde.engine.intake import Intake
from dsde.engine.memory import count_blocks, describe_shortage
from dsde.engine.metrics import EngineMetrics
from dsde.engine.planning import LengthPlan, Planner
from dsde.engine.request import Completion, Request
from dsde.engine.scheduler import Schedule, Scheduler
from dsde.engine.target import TargetRunner
from dsde.engine.trace import expect_seconds, record_step
from dsde.models.batch import BLOCK_SIZE
from dsde.models.decoder import Decoder
from dsde.models.tokenizer import Tokenizer
from dsde.policies import Policy
from dsde.sampling import Sampler
from dsde.verification import top_logprobs

NUM_SPARE = 4 * BLOCK_SIZE
"""tokens that a sequence has memory for beyond those it has, if there is any: a device can be given steps ahead until
somebody needs more"""
_PRESSED = 0.03
"""share of a step that a device may wait for the host before it"""
_NUM_CALM = 32
"""steps with drafts after which it counts no more that the device waited before one: what keeps it from waiting would
be given up as soon as it has helped"""
_MOST_FLIGHTS = 2
"""One more would only make the end of a request known later."""


@dataclass(slots=True)
class StepOutput:
    """What a step gave its users."""

    chunks: list[StreamChunk] = field(default_factory=list)
    finished: list[RequestOutput] = field(default_factory=list)
    records: list[StepRecord] = field(default_factory=list)
    """one for every sequence that decoded, while the engine is watched"""


@dataclass(slots=True)
class _StepInFlight:
    work: Schedule
    plan: LengthPlan
    scored: set[Sequence]
    flight: Flight
    num_resting: int
    """steps after this one that are certain not to draft"""

    @property
    def decoded_by_policy(self) -> list[Sequence]:
        return [self.work.decodes[row] for row in self.plan.rows]


class _Emission(NamedTuple):
    """What a step gave one completion."""

    request: Request
    completion: Completion
    tokens: list[int]
    drafted: int
    accepted: int


class Engine:
    """Continuous batching with speculation. Not thread-safe: one caller at a time."""

    def __init__(
        self,
        target: Decoder,
        drafter: Drafter | None,
        policy: Policy,
        tokenizer: Tokenizer | None,
        sampler: Sampler,
        config: EngineConfig,
    ) -> None:
        num_blocks = count_blocks(target, drafter.kv_bytes_per_block if drafter else 0, config)
        max_model_len = config.max_model_len or min(target.config.max_position_embeddings, num_blocks * BLOCK_SIZE)
        if max_model_len > target.config.max_position_embeddings:
            raise InvalidInput(
                f"max_model_len must be at most {target.config.max_position_embeddings}, the model's own limit, "
                f"got {max_model_len}."
            )
        eos = set(target.config.eos_token_ids) | set(tokenizer.eos_token_ids if tokenizer else ())
        # A name of its own: a function that held the engine would keep its caches alive until a garbage collection.
        requests: dict[str, Request] = {}
        self.requests = requests
        self.config = config
        self.policy = policy
        self.drafter = drafter
        self.metrics = EngineMetrics()
        self.intake = Intake(tokenizer, target.config.vocab_size, sorted(eos), max_model_len, num_blocks, config.seed)
        self.scheduler = Scheduler(
            BlockPool(num_blocks),
            config.max_num_seqs,
            config.tokens_per_pass(target.device),
            may_share=lambda s: not requests[s.request_id].wants_prompt_logprobs,
        )
        self.planner = Planner(policy, self.scheduler, drafter, self.metrics)
        try:
            with device_context(target.device):
                self.target = TargetRunner(target, num_blocks)
                if drafter is not None:
                    drafter.allocate(num_blocks)
                self.executor: Executor = _make_executor(self.target, drafter, sampler, config, max_model_len)
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(describe_shortage(target.device, config)) from error
        if self.executor.is_asynchronous:
            self.planner.num_ahead = self.executor.num_ahead
            self.scheduler.num_spare = NUM_SPARE
        self._flights: deque[_StepInFlight] = deque()
        """steps under way, the next to land first"""
        self._unreported: deque[_Emission] = deque()
        """outlives a step that fails after these were committed"""
        self._latest_plan: LengthPlan | None = None
        self.num_calm = _NUM_CALM
        """steps with drafts since the device last waited for the host before one"""
        self._num_traced = 0
        """unfinished requests that want a trace"""
        self.watched = False
        """whether somebody wants to see the records of everybody's steps"""
        self._records: list[StepRecord] = []
        self._free_slots: list[int] = []
        self._freed_slots: list[int] = []
        """since the last step was begun: policies have yet to learn of those who had them, and if somebody got one now
        the device would wait for that"""
        self._num_slots = 0
        self._landed_at: float | None = None
        """when the last step was over, if there has been something to do ever since"""

    @property
    def has_work(self) -> bool:
        return self._has_sequences or bool(self._unreported)

    def add(
        self, prompt: str | Seq[int], params: SamplingParams, request_id: str | None = None, trace: bool = False
    ) -> str:
        """Queue a request; returns its id. Refuses at once what could never be served."""
        request = self.intake.accept(prompt, params, request_id)
        if request.request_id in self.requests:
            raise InvalidInput(f"request_id {request.request_id!r} is in use by a request that has not finished.")
        if trace:
            request.metrics.trace = []
            self._num_traced += 1
        self.requests[request.request_id] = request
        for completion in request.completions:
            self.scheduler.add(completion.sequence)
        self.metrics.num_requests += 1
        self.metrics.num_prompt_tokens += len(request.prompt_token_ids)
        return request.request_id

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now, keeping what it has; None if there is none of that name."""
        request = self.requests.get(request_id)
        if request is None:
            return None
        for completion in request.completions:
            if completion.finish_reason is None:
                self._end(request, completion, "abort")
        self.metrics.num_aborted += 1
        self._drop(request)
        return request.output()

    def step(self) -> StepOutput:
        """Advance every running request; does nothing where there is none.

        Where the executor is asynchronous the next step is on its way before this one is reported: the device works
        while texts are made, and while the caller does whatever it does with them.
        """
        if not self._has_sequences:
            if self._flights:
                # Everybody was aborted: the device must have read its inputs before they are written anew.
                self._ground()
            self._landed_at = None
            self._release_slots()
            return self._report()
        began = time.perf_counter()
        try:
            with torch.inference_mode(), self._on_device():
                if not self._flights:
                    self._begin()
                self._unreported += self._land(self._flights[0])
                self._flights.popleft()
                if not self._has_sequences:
                    self._ground()
                    self._landed_at = None
                elif self.executor.is_asynchronous:
                    self._keep_busy()
                output = self._report()
        except BaseException as error:
            # Interrupted, or out of memory: caches may hold less than the books say. Everybody starts again.
            self._flights.clear()
            self._landed_at = None
            self.scheduler.restart()
            with suppress(Exception):  # a device that has failed fails again, and the first error says why
                self.executor.recover()
            if isinstance(error, torch.OutOfMemoryError):
                raise OutOfMemory(describe_shortage(self.target.model.device, self.config)) from error
            raise
        self.metrics.step_s += time.perf_counter() - began
        return output

    def _on_device(self) -> AbstractContextManager[None]:
        """Kernels go to a thread's current device, whatever their tensors lie on."""
        return device_context(self.target.model.device)

    @property
    def _has_sequences(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running)

    def _ground(self) -> None:
        """Nothing is under way any more, or matters."""
        self._flights.clear()
        self.executor.reset()

    def _keep_busy(self) -> None:
        """Give the device its next step, and another behind it where that can be known already."""
        was_idle = not self._flights
        if was_idle:
            self._begin()
        if self._can_follow():
            last = self._flights[-1]
            following = self.executor.follow(last.flight)
            if following is not None:
                self._flights.append(_StepInFlight(last.work, last.plan, set(), following, last.num_resting - 1))
        elif not was_idle:
            # A rest is over, or somebody's end is near: what comes next is thought of before the device waits for it.
            self.policy.settle(self.planner.foresee_left(self._flights[-1].work, len(self._flights)))

    def _begin(self) -> None:
        """A step, when nothing is under way; while it is, the policy has time to think."""
        self._flights.append(self._launch())
        if self.executor.is_asynchronous:
            self.policy.settle(self.planner.foresee(self._flights[-1].work), self.num_calm < _NUM_CALM)

    def _can_follow(self) -> bool:
        """Whether the step after those under way is certain: nobody drafts, joins, may end for its length, lacks memory
        or wants to see logits that would be gone."""
        last, pending = self._flights[-1], len(self._flights)
        work = last.work
        if pending >= _MOST_FLIGHTS:
            return False
        if work.prefills or last.num_resting <= 0 or len(work.decodes) < len(self.scheduler.running):
            return False
        if self.scheduler.has_room:
            return False
        for sequence in work.decodes:
            num_tokens = len(sequence.tokens)
            if (
                sequence.status is not Status.RUNNING
                or sequence.num_left <= pending
                or len(sequence.block_table) * BLOCK_SIZE < num_tokens + pending
                or sequence.params.logprobs is not None
            ):
                return False
        return True

    def _launch(self) -> _StepInFlight:
        """schedule -> plan -> draft -> verify, of which a device may still be doing the last two."""
        times = [time.perf_counter()]
        work = self._schedule()
        self._release_slots()
        times.append(time.perf_counter())
        # What a device has made already by the last plan need not be in vain because the next one is another.
        latest = self._latest_plan
        is_known = latest is not None and len(latest.planned) == len(work.decodes)
        is_late = is_known and self.executor.has_made(work.decodes) and not work.prefills and not self.policy.rules_on()
        if is_late and latest is not None:
            plan = self.planner.repeat(latest, work.decodes)
        else:
            self.planner.most_whole = self.executor.most_whole
            plan = self.planner.plan(work.decodes, sum(chunk for _, chunk in work.prefills), len(work.joining))
        self._latest_plan = plan
        times.append(time.perf_counter())
        scored = {s for s, _ in work.prefills if s.index == 0 and self.requests[s.request_id].wants_prompt_logprobs}
        wish = self._wish(work.decodes, plan)
        wish.is_steady = wish.is_steady and not is_late
        flight = self.executor.launch(work, wish, scored)
        self.metrics.num_host_steps += self.executor.is_asynchronous and isinstance(flight, HostFlight)
        self.metrics.schedule_s += times[1] - times[0]
        self.metrics.plan_s += times[2] - times[1]
        return _StepInFlight(work, plan, scored, flight, plan.num_resting)

    def _land(self, step: _StepInFlight) -> list[_Emission]:
        """observe -> commit: all that the next step builds on."""
        landing = step.flight.land()
        times = [time.perf_counter()]
        step_s = 0.0 if self._landed_at is None else times[0] - self._landed_at
        self._landed_at = times[0]
        seconds = landing.seconds
        count = len(step.work.decodes)
        drafted = step.flight.drafted[:count]
        self._count_drafts(step.work.decodes, step.plan, step.flight)
        is_recorded = self._num_traced > 0 or self.watched
        expected = expect_seconds(self.policy, step.plan, drafted, landing) if is_recorded else None
        self.planner.observe(step.plan, drafted, step.flight.num_catch_up_tokens, landing, step_s)
        times.append(time.perf_counter())
        # Gone meanwhile, but observed again: its slot must not pass anything on.
        gone = [s.status is Status.FINISHED for s in step.decoded_by_policy]
        if any(gone):
            self.policy.forget(step.plan.batch.slots[gone])
        if step.scored:
            self._score_prompts(step.work, step.scored, landing.prompt_logits)
        if is_recorded:
            number = self.metrics.num_steps
            records = record_step(self.requests, number, step.work, step.plan, drafted, landing, expected, self.watched)
            self._records += records if self.watched else []
        emissions = self._commit(step, landing)
        times.append(time.perf_counter())
        self.metrics.num_steps += 1
        self.metrics.count_klds(landing.verdict.klds)
        if step.plan.plan is not None and step.plan.plan.cap is not None:
            self.metrics.last_cap = step.plan.plan.cap
        if landing.num_draft_passes and not landing.is_cold and not landing.is_resumed:
            has_waited = seconds.idle > _PRESSED * (seconds.draft + seconds.verify)
            self.num_calm = 0 if has_waited else self.num_calm + 1
        self.metrics.num_draft_passes += landing.num_draft_passes
        self.metrics.num_cold_steps += landing.is_cold
        self.metrics.plan_s += times[1] - times[0]
        self.metrics.commit_s += times[2] - times[1]
        self.metrics.draft_s += seconds.draft
        self.metrics.target_s += seconds.target
        self.metrics.accept_s += seconds.accept
        self.metrics.idle_s += seconds.idle
        return emissions

    def _schedule(self) -> Schedule:
        # Whoever takes the place of one that has ended begins a step later, if the others' has been made already.
        admits = not (self.scheduler.has_room and self.executor.has_made(self.scheduler.running))
        work = self.scheduler.schedule(admits)
        now = time.perf_counter()
        for sequence in work.preempted:
            self.requests[sequence.request_id].metrics.num_preemptions += 1
        self.metrics.num_preemptions += len(work.preempted)
        for sequence in work.admitted:
            if sequence.slot < 0:
                request = self.requests[sequence.request_id]
                sequence.slot = self._take_slot()
                request.metrics.queue_s = request.metrics.queue_s or now - request.arrived
                request.metrics.num_cached_prompt_tokens += sequence.num_computed
                self.metrics.num_cached_prompt_tokens += sequence.num_computed
        return work

    def _wish(self, decodes: list[Sequence], plan: LengthPlan) -> DraftWish:
        # A device looks in passing, and all its graphs are made for that.
        is_looked_at = self.executor.is_asynchronous or plan.plan is None or plan.plan.wants_signals
        wish = DraftWish(
            plan.lengths,
            plan.stop,
            self._wants_klds(decodes),
            self.planner.needs_token_probs,
            self.planner.needs_draft_signals and is_looked_at,
        )
        wish.is_steady = not self.scheduler.has_room and all(s.params.logprobs is None for s in decodes)
        if plan.plan is not None:
            wish.budget = plan.plan.budget
            wish.consultant, wish.chosen = plan.plan.consultant, plan.rows
        if wish.consultant is not None:
            self._note_lossy([decodes[i] for i in plan.rows.tolist() if plan.lengths[i] > 0])
        return wish

    def _note_lossy(self, sequences: list[Sequence]) -> None:
        """Say so wherever these requests' figures are read."""
        for sequence in sequences:
            self.requests[sequence.request_id].metrics.lossless = False
        self.metrics.num_lossy += len(sequences)

    def _count_drafts(self, decodes: list[Sequence], plan: LengthPlan, flight: Flight) -> None:
        if not plan.lengths.any():
            return
        num_shorter = int((flight.drafted[: len(decodes)] < plan.lengths).sum())
        if plan.plan is not None and plan.plan.budget is not None:
            self.metrics.num_cut += num_shorter
        elif plan.stop is not None:
            self.metrics.num_stopped += num_shorter
        else:
            self.metrics.num_undrafted += num_shorter
        if flight.num_catch_up_tokens is not None:
            self.metrics.num_catch_up_tokens += int(flight.num_catch_up_tokens.sum())
            for i in np.flatnonzero(flight.num_catch_up_tokens):
                if decodes[i].status is not Status.FINISHED:  # aborted meanwhile
                    metrics = self.requests[decodes[i].request_id].metrics
                    metrics.num_catch_up_tokens += int(flight.num_catch_up_tokens[i])

    def _wants_klds(self, decodes: list[Sequence]) -> bool:
        return (
            self.planner.needs_klds
            or self.watched
            or (self._num_traced > 0 and any(self.requests[s.request_id].metrics.trace is not None for s in decodes))
        )

    def _commit(self, step: _StepInFlight, landing: Landing) -> list[_Emission]:
        """Append what was emitted, roll back what was rejected, finish. Requests that were aborted get nothing."""
        for sequence, chunk in step.work.prefills:
            if chunk < sequence.num_pending and sequence.status is not Status.FINISHED:
                sequence.num_computed += chunk
        emissions = []
        row = 0
        verdict = landing.verdict
        counts = zip(step.flight.drafted.tolist(), verdict.accepted.tolist(), strict=True)
        for sequence, emitted, (drafted, accepted) in zip(step.flight.judged, verdict.emitted, counts, strict=True):
            first_row, row = row, row + drafted + 1
            if sequence.status is Status.FINISHED:
                continue
            request = self.requests[sequence.request_id]
            completion = request.completions[sequence.index]
            stood = len(sequence.tokens) + accepted
            sequence.num_steps += 1
            if request.metrics.first_token_s == 0.0:
                request.metrics.first_token_s = time.perf_counter() - request.arrived
            sequence.first_token_at = sequence.first_token_at or time.perf_counter()
            kept = completion.extend(emitted)
            # A completion may end before all accepted tokens are used.
            sequence.num_computed = min(stood, len(sequence.tokens))
            if sequence.num_draft_computed > sequence.num_computed:
                sequence.num_draft_computed = sequence.num_computed
            if sequence.params.logprobs is not None:
                rows = landing.logits[first_row : first_row + len(kept)].float()
                completion.logprobs += self._logprobs(rows, kept, sequence.params.logprobs)
            self.scheduler.settle(sequence)
            if completion.finish_reason is not None:
                self._end(request, completion, completion.finish_reason)
            emissions.append(_Emission(request, completion, kept, drafted, accepted))
        return emissions

    def _report(self) -> StepOutput:
        """Count, stream, close: nothing that the next step waits for."""
        output = StepOutput(records=self._records)
        self._records = []
        while self._unreported:
            emission = self._unreported.popleft()
            request = emission.request
            request.metrics.num_steps += 1
            for metrics in (request.metrics, self.metrics):
                metrics.count_step(emission.drafted, emission.accepted, len(emission.tokens))
            output.chunks.append(request.chunk(emission.completion, emission.tokens))
            if request.finished and self.requests.get(request.request_id) is request:
                output.finished.append(self._close(request))
        return output

    def _end(self, request: Request, completion: Completion, reason: FinishReason) -> None:
        completion.finish_reason = reason
        completion.text.finish()
        sequence = completion.sequence
        self.scheduler.finish(sequence)
        if sequence.slot >= 0:
            self.policy.forget(np.array([sequence.slot], dtype=np.int64))
            self._freed_slots.append(sequence.slot)
            sequence.slot = -1
        request.metrics.total_s = time.perf_counter() - request.arrived

    def _close(self, request: Request) -> RequestOutput:
        self._drop(request)
        self.metrics.num_finished += 1
        return request.output()

    def _drop(self, request: Request) -> None:
        del self.requests[request.request_id]
        self._num_traced -= request.metrics.trace is not None

    def _release_slots(self) -> None:
        while self._freed_slots:
            heappush(self._free_slots, self._freed_slots.pop())

    def _take_slot(self) -> int:
        if self._free_slots:
            return heappop(self._free_slots)
        self._num_slots += 1
        return self._num_slots - 1

    def _logprobs(self, logits: torch.Tensor, tokens: list[int], count: int) -> list[dict[int, Logprob]]:
        entries = top_logprobs(logits, tokens, count)
        if (tokenizer := self.intake.tokenizer) is not None:
            for entry in entries:
                for token, logprob in entry.items():
                    logprob.decoded_token = tokenizer.token_text(token)
        return entries

    def _score_prompts(self, work: Schedule, scored: set[Sequence], logits: torch.Tensor) -> None:
        """Log-probabilities of prompt tokens, each from the row before it; the first has none."""
        row = 0
        for sequence, chunk in work.prefills:
            if sequence not in scored:
                continue
            if sequence.status is Status.FINISHED:  # aborted meanwhile
                row += chunk
                continue
            request = self.requests[sequence.request_id]
            start = sequence.num_computed
            following = request.prompt_token_ids[start + 1 : start + chunk + 1]
            if start == 0:
                request.prompt_logprobs[:] = [None]
            count = request.params.prompt_logprobs or 0
            request.prompt_logprobs += self._logprobs(logits[row : row + len(following)], following, count)
            row += chunk


def _make_executor(
    target: TargetRunner, drafter: Drafter | None, sampler: Sampler, config: EngineConfig, max_model_len: int
) -> Executor:
    host = HostExecutor(target, drafter, sampler, config.synthetic_acceptance)
    if not backend.has_kernels(target.model.device):
        if target.model.device.type == "cuda":
            warnings.warn(f"{backend.why_no_kernels(target.model.device)} Decoding will be slow.", stacklevel=3)
        return host
    from dsde.engine.device_executor import DeviceExecutor

    return DeviceExecutor(host, config.max_num_seqs, max_model_len)
