"""The engine: requests go in, tokens come out, one step at a time.

A step is `schedule -> plan -> draft -> verify -> observe -> commit`. Everything it decides is somebody else's business:
who runs (scheduler), how far to draft (policy), what to propose (drafter), what stands (verification).
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np
import torch

from dsde.core.errors import InvalidInput
from dsde.core.outputs import FinishReason, Logprob, RequestOutput, StreamChunk
from dsde.core.params import SamplingParams
from dsde.core.sequence import Sequence
from dsde.drafting import Drafter, Proposals
from dsde.engine.block_pool import BlockPool
from dsde.engine.config import EngineConfig
from dsde.engine.intake import Intake
from dsde.engine.memory import count_blocks
from dsde.engine.metrics import EngineMetrics
from dsde.engine.planning import LengthPlan, Planner
from dsde.engine.request import Completion, Request
from dsde.engine.scheduler import Schedule, Scheduler
from dsde.engine.target import TargetRunner
from dsde.engine.trace import Seconds, record_step
from dsde.models.batch import BLOCK_SIZE
from dsde.models.decoder import Decoder
from dsde.models.tokenizer import Tokenizer
from dsde.policies import Policy
from dsde.sampling import Sampler
from dsde.verification import Verdict, top_logprobs, verify


@dataclass(slots=True)
class StepOutput:
    """What a step gave its users."""

    chunks: list[StreamChunk] = field(default_factory=list)
    finished: list[RequestOutput] = field(default_factory=list)


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
        self.sampler = sampler
        self.metrics = EngineMetrics()
        self.intake = Intake(tokenizer, target.config.vocab_size, sorted(eos), max_model_len, num_blocks, config.seed)
        self.scheduler = Scheduler(
            BlockPool(num_blocks),
            config.max_num_seqs,
            config.max_num_batched_tokens,
            may_share=lambda s: not requests[s.request_id].wants_prompt_logprobs,
        )
        self.planner = Planner(policy, self.scheduler, drafter is not None, self.metrics)
        self.target = TargetRunner(target, num_blocks)
        if drafter is not None:
            drafter.allocate(num_blocks)
        self._free_slots: list[int] = []
        self._num_slots = 0

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running)

    def add(
        self, prompt: str | Seq[int], params: SamplingParams, request_id: str | None = None, trace: bool = False
    ) -> str:
        """Queue a request; returns its id. Refuses at once what could never be served."""
        request = self.intake.accept(prompt, params, request_id)
        if request.request_id in self.requests:
            raise InvalidInput(f"request_id {request.request_id!r} is in use by a request that has not finished.")
        if trace:
            request.metrics.trace = []
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
        del self.requests[request_id]
        return request.output()

    def step(self) -> StepOutput:
        """Advance every running request; does nothing where there is none."""
        if not self.has_work:
            return StepOutput()
        try:
            with torch.inference_mode():
                return self._step()
        except BaseException:
            # Interrupted, or out of memory: caches may hold less than the books say. Everybody starts again.
            self.scheduler.restart()
            raise

    def _step(self) -> StepOutput:
        times = [time.perf_counter()]

        def lap() -> float:
            times.append(time.perf_counter())
            return times[-1] - times[-2]

        work = self._schedule()
        self.metrics.schedule_s += lap()
        plan = self.planner.plan(work.decodes)
        self.metrics.plan_s += lap()
        proposals = self._draft(work.decodes, plan)
        self.metrics.draft_s += (draft_s := lap())
        judged, proposals, logits = self._read(work, proposals)
        self.metrics.target_s += (target_s := lap())
        verdict = verify(logits, judged, proposals, self.sampler, self._wants_klds(work.decodes))
        self.metrics.accept_s += (accept_s := lap())
        count = len(work.decodes)
        drafted, accepted = proposals.lengths[:count], verdict.accepted[:count]
        self.planner.observe(plan, drafted, accepted, verdict.klds, draft_s, target_s + accept_s)
        self.metrics.plan_s += lap()
        seconds = Seconds(draft_s, target_s + accept_s, times[-1] - times[0])
        record_step(self.requests, self.metrics.num_steps, work.decodes, plan, drafted, verdict, seconds)
        output = self._commit(work, judged, proposals, verdict, logits)
        self.metrics.commit_s += lap()
        self.metrics.step_s += times[-1] - times[0]
        self.metrics.num_steps += 1
        return output

    def _schedule(self) -> Schedule:
        self.sampler.begin_step()
        work = self.scheduler.schedule()
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

    def _draft(self, decodes: list[Sequence], plan: LengthPlan) -> Proposals:
        if self.drafter is None or not plan.lengths.any():
            return Proposals.nothing(len(decodes), self.target.model.device)
        proposals = self.drafter.propose(decodes, plan.lengths)
        self.metrics.num_undrafted += int((proposals.lengths < plan.lengths).sum())
        if proposals.num_catch_up_tokens is not None:
            self.metrics.num_catch_up_tokens += int(proposals.num_catch_up_tokens.sum())
            for sequence, count in zip(decodes, proposals.num_catch_up_tokens, strict=True):
                self.requests[sequence.request_id].metrics.num_catch_up_tokens += int(count)
        return proposals

    def _read(self, work: Schedule, proposals: Proposals) -> tuple[list[Sequence], Proposals, torch.Tensor]:
        """Run the target; returns the sequences that get tokens, what was drafted for them, and their logits."""
        completed = [s for s, chunk in work.prefills if chunk == s.num_pending]
        scored = {s for s, _ in work.prefills if s.index == 0 and self.requests[s.request_id].wants_prompt_logprobs}
        logits, prompt_logits = self.target.run(work, proposals, scored)
        if scored:
            self._score_prompts(work, scored, prompt_logits)
        return [*work.decodes, *completed], proposals.followed_by(len(completed)), logits

    def _wants_klds(self, decodes: list[Sequence]) -> bool:
        return self.planner.needs_klds or any(self.requests[s.request_id].metrics.trace is not None for s in decodes)

    def _commit(
        self, work: Schedule, judged: list[Sequence], proposals: Proposals, verdict: Verdict, logits: torch.Tensor
    ) -> StepOutput:
        """Append what was emitted, roll back what was rejected, stream, finish."""
        output = StepOutput()
        for sequence, chunk in work.prefills:
            if chunk < sequence.num_pending:
                sequence.num_computed += chunk
        row = 0
        for i, sequence in enumerate(judged):
            drafted, accepted = int(proposals.lengths[i]), int(verdict.accepted[i])
            request = self.requests[sequence.request_id]
            stood = sequence.num_tokens + accepted
            sequence.num_steps += 1
            completion = request.completions[sequence.index]
            kept = self._append(request, completion, verdict.emitted[i])
            # A completion may end before all accepted tokens are used.
            sequence.num_computed = min(stood, sequence.num_tokens)
            sequence.num_draft_computed = min(sequence.num_draft_computed, sequence.num_computed)
            if sequence.params.logprobs is not None:
                rows = logits[row : row + len(kept)]
                completion.logprobs += self._logprobs(rows, kept, sequence.params.logprobs)
            row += drafted + 1
            request.metrics.num_steps += 1
            for metrics in (request.metrics, self.metrics):
                metrics.count_step(drafted, accepted, len(kept))
            self.scheduler.settle(sequence)
            if completion.finish_reason is not None:
                self._end(request, completion, completion.finish_reason)
            output.chunks.append(request.chunk(completion, kept))
            if request.finished:
                output.finished.append(self._close(request))
        return output

    def _append(self, request: Request, completion: Completion, emitted: list[int]) -> list[int]:
        """Add tokens until one ends the completion; returns those added."""
        if request.metrics.first_token_s == 0.0:
            request.metrics.first_token_s = time.perf_counter() - request.arrived
        for count, token in enumerate(emitted, start=1):
            if completion.append(token):
                return emitted[:count]
        return emitted

    def _end(self, request: Request, completion: Completion, reason: FinishReason) -> None:
        completion.finish_reason = reason
        completion.text.finish()
        sequence = completion.sequence
        self.scheduler.finish(sequence)
        if sequence.slot >= 0:
            self.policy.forget(np.array([sequence.slot], dtype=np.int64))
            heappush(self._free_slots, sequence.slot)
            sequence.slot = -1
        request.metrics.total_s = time.perf_counter() - request.arrived

    def _close(self, request: Request) -> RequestOutput:
        del self.requests[request.request_id]
        self.metrics.num_finished += 1
        return request.output()

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
            request = self.requests[sequence.request_id]
            start = sequence.num_computed
            following = request.prompt_token_ids[start + 1 : start + chunk + 1]
            if start == 0:
                request.prompt_logprobs[:] = [None]
            count = request.params.prompt_logprobs or 0
            request.prompt_logprobs += self._logprobs(logits[row : row + len(following)], following, count)
            row += chunk
