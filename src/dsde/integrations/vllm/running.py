"""The workers' side of the plugin: wraps vLLM's model runner V1, which then drafts as a `Directive` says and reports.

Drafts are as deep as the longest length asked for; where nobody drafts the draft is left out, and it reads what it
missed before it drafts again. Signals are computed only if the policy asks for them, stay on the device until they
are judged and leave it in one copy with the step's output.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from dsde.integrations.vllm import hooks
from dsde.integrations.vllm.clock import Clocks, StepClock
from dsde.integrations.vllm.messages import Directive, Feedback, attach, attached
from dsde.integrations.vllm.omission import Omission
from dsde.integrations.vllm.settings import Settings, read_settings
from dsde.integrations.vllm.signals import divergences, looks
from dsde.integrations.vllm.support import make_supported, needs_of
from dsde.policies import Need

ADAPTER = "dsde_adapter"
NUM_SIGNALS = 5


@dataclass(slots=True)
class Drafts:
    """What is kept of the newest drafts until they are verified."""

    rows: dict[str, int] = field(default_factory=dict)
    logits: list[torch.Tensor] = field(default_factory=list)
    """[depth] of all rows; empty unless KLDs are wanted"""
    looks: list[torch.Tensor] = field(default_factory=list)
    """[depth][rows, 4]"""


@dataclass(slots=True)
class Report:
    """A step's feedback in the making: its signals may still be on their way."""

    clock: StepClock
    request_ids: list[str] = field(default_factory=list)
    num_drafted: list[int] = field(default_factory=list)
    signals: torch.Tensor | None = None
    has_none: list[bool] = field(default_factory=list)
    """[positions] drafts of which nothing was kept"""

    def finish(self) -> Feedback:
        """To be called when the step's output has come: then so have the signals."""
        seconds = [*self.clock.seconds(), 0.0, 0.0]
        step_s = self.clock.seconds_since_last()
        feedback = Feedback(seconds[0], seconds[1], step_s, self.request_ids, self.num_drafted)
        if self.signals is not None:
            feedback.signals = self.signals.numpy().astype(np.float64)
            feedback.signals[np.array(self.has_none, np.bool_)] = np.nan
        return feedback


class RunnerAdapter:
    def __init__(self, runner: Any, settings: Settings) -> None:
        self.runner = runner
        self.method: str = runner.speculative_config.method
        needs = needs_of(make_supported(settings.policy, self.method))
        self.wants_klds = bool(needs & Need.KLD)
        self.wants_looks = bool(needs & (Need.DRAFT_SIGNALS | Need.TOKEN_PROB))
        self.can_skip = self.method == "draft_model"
        self.omission = Omission(runner)
        self.is_plain = False
        """whether the step under way has nothing to do with drafts"""
        self.report: Report | None = None
        """of that step; None: nobody wants one"""
        self._clocks = Clocks(runner.device.type == "cuda")
        self._drafts = Drafts()
        self._no_tokens: torch.Tensor | None = None
        self._logits: torch.Tensor | None = None
        """of the draft pass just made"""
        # Where another adapter was here before, this one takes its place, whether or not it wants anything.
        if self.wants_klds or self.wants_looks or hasattr(runner.drafter, ADAPTER):
            self._tap()

    def _tap(self) -> None:
        """Keep what the draft's head computes: vLLM takes the likeliest token of it and lets it go."""
        drafter = self.runner.drafter
        is_tapped = hasattr(drafter, ADAPTER)
        setattr(drafter, ADAPTER, self)
        if is_tapped:
            return
        compute_logits = drafter.model.compute_logits

        def tapped(*args: Any, **kwargs: Any) -> Any:
            logits = compute_logits(*args, **kwargs)
            getattr(drafter, ADAPTER)._logits = logits
            return logits

        drafter.model.compute_logits = tapped

    def begin(self, scheduler_output: Any, directive: Directive) -> None:
        is_off = scheduler_output.num_spec_tokens_to_schedule == 0
        verifies = bool(scheduler_output.scheduled_spec_decode_tokens)
        self.is_plain = self.omission.is_possible and is_off and not directive.catch_up and not verifies
        self.report = Report(self._clocks.begin(directive.step)) if directive.is_timed else None
        if self.is_plain and directive.is_timed:  # as the first of a rest is
            self._drafts = Drafts()  # whose requests have ended

    def mark(self) -> None:
        if self.report is not None:
            self.report.clock.mark()

    # Drafting

    def look(self, token_ids: torch.Tensor) -> None:
        """At the pass that drew these tokens."""
        logits, self._logits = self._logits, None
        if logits is None:
            return
        if self.wants_klds:
            self._drafts.logits.append(logits)
        if self.wants_looks:
            self._drafts.looks.append(looks(logits, token_ids))

    def propose(self, original: Any, scheduler_output: Any, sampled_token_ids: Any, *args: Any) -> Any:
        runner, directive = self.runner, attached(scheduler_output)
        self._drafts = Drafts()
        if directive.catch_up:
            self._catch_up(directive, *args)
        if scheduler_output.num_spec_tokens_to_schedule == 0 and (self.can_skip or self.method == "ngram"):
            drafts = self._skip(sampled_token_ids, spec_decode_metadata=args[4])
        else:
            drafts = original(runner, scheduler_output, sampled_token_ids, *args)
            self._drafts.rows = {name: row for row, name in enumerate(runner.input_batch.req_ids)}
        self.mark()
        return drafts

    def _skip(self, sampled_token_ids: Any, spec_decode_metadata: Any) -> Any:
        """Nobody drafts: only what vLLM must know of the tokens just sampled."""
        runner = self.runner
        if isinstance(sampled_token_ids, list):
            return [[] for _ in sampled_token_ids]
        if spec_decode_metadata is not None and runner.valid_sampled_token_count_event is not None:
            next_token_ids, counts = runner.drafter.prepare_next_token_ids_padded(
                sampled_token_ids, runner.requests, runner.input_batch, runner.discard_request_mask.gpu
            )
            runner._copy_valid_sampled_token_count(next_token_ids, counts)
        num, nothing = sampled_token_ids.shape[0], self._no_tokens
        if nothing is None or nothing.shape[0] != num:
            nothing = self._no_tokens = torch.empty((num, 0), dtype=torch.int64, device=sampled_token_ids.device)
        return nothing

    def _catch_up(self, directive: Directive, sampling_metadata: Any, *args: Any) -> None:
        """Let the draft read what it missed, by the way in which vLLM lets it read a prompt."""
        runner, device = self.runner, self.runner.device
        metadata = args[4]
        places = runner.input_batch.req_id_to_index
        pieces = [piece for piece in directive.catch_up if piece.request_id in places]
        if not pieces:
            return
        rows = torch.tensor([places[piece.request_id] for piece in pieces])
        counts = np.array([len(piece.tokens) - 1 for piece in pieces], np.int32)
        firsts = np.array([piece.first for piece in pieces], np.int32)
        tokens = np.concatenate([np.array(piece.tokens[:-1], np.int32) for piece in pieces])
        positions = np.concatenate(
            [np.arange(first, first + count) for first, count in zip(firsts, counts, strict=True)]
        )
        starts = torch.from_numpy(np.concatenate(([0], np.cumsum(counts))).astype(np.int32))
        seq_lens = torch.from_numpy(firsts + counts)
        rows_there = rows.to(device, non_blocking=True)
        changes: dict[str, Any] = {
            "query_start_loc": starts.to(device, non_blocking=True),
            "query_start_loc_cpu": starts,
            "seq_lens": seq_lens.to(device, non_blocking=True),
            "num_reqs": len(pieces),
            "num_actual_tokens": len(tokens),
            "max_query_len": int(counts.max()),
            "max_seq_len": int(seq_lens.max()),
            "block_table_tensor": metadata.block_table_tensor[rows_there].contiguous(),
            "slot_mapping": torch.zeros(len(tokens), dtype=torch.int64, device=device),
            "seq_lens_cpu_upper_bound": seq_lens.clone(),
            "_seq_lens_cpu": seq_lens.clone(),
            "_num_computed_tokens_cpu": torch.from_numpy(firsts.copy()),
            "positions": None,
            "is_prefilling": torch.ones(len(pieces), dtype=torch.bool),
            "_num_computed_tokens_cache": None,
            "_token_to_req_indices_cache": None,
        }
        known = {one.name for one in dataclasses.fields(metadata)}
        changes = {name: value for name, value in changes.items() if name in known}
        runner.drafter.propose(
            num_speculative_tokens=0,
            target_token_ids=torch.from_numpy(tokens).to(device, non_blocking=True),
            target_positions=torch.from_numpy(positions.astype(np.int64)).to(device, non_blocking=True),
            target_hidden_states=None,
            next_token_ids=torch.tensor([piece.tokens[-1] for piece in pieces], dtype=torch.int32).to(device),
            token_indices_to_sample=None,
            common_attn_metadata=dataclasses.replace(metadata, **changes),
            sampling_metadata=sampling_metadata,
        )

    # Verifying

    def compare(self, logits: torch.Tensor | None, spec_decode_metadata: Any) -> None:
        """Put beside each verified position what the draft thought there, and how far the target is from it."""
        report, drafts = self.report, self._drafts
        if report is None or logits is None or spec_decode_metadata is None:
            return
        if not (self.wants_klds or self.wants_looks):
            return
        report.request_ids = list(self.runner.input_batch.req_ids)
        report.num_drafted = [int(count) for count in spec_decode_metadata.num_draft_tokens]
        num = sum(report.num_drafted)
        depths = [
            _Depth.of(depth, report.request_ids, report.num_drafted, drafts.rows)
            for depth in range(max(report.num_drafted, default=0))
        ]
        device = logits.device
        signals = torch.zeros((num, NUM_SIGNALS), dtype=torch.float32, device=device)
        report.has_none = [True] * num
        places = spec_decode_metadata.target_logits_indices
        for depth, at in enumerate(depths):
            if not at.rows or depth >= max(len(drafts.logits), len(drafts.looks)):
                continue
            for position in at.positions:
                report.has_none[position] = False
            positions = torch.tensor(at.positions).to(device, non_blocking=True)
            rows = torch.tensor(at.rows).to(device, non_blocking=True)
            if self.wants_klds:
                target, draft = logits[places[positions]], drafts.logits[depth][rows]
                width = min(target.shape[1], draft.shape[1])
                signals[positions, 0] = divergences(target[:, :width], draft[:, :width])
            if self.wants_looks:
                signals[positions, 1:] = drafts.looks[depth][rows]
        report.signals = signals.to("cpu", non_blocking=True)
        self._drafts = Drafts()


@dataclass(slots=True)
class _Depth:
    """The verified positions at one depth of the drafts."""

    positions: list[int]
    """in the list of all"""
    rows: list[int]
    """in what was kept of the drafts"""

    @classmethod
    def of(cls, depth: int, request_ids: list[str], num_drafted: list[int], rows: dict[str, int]) -> _Depth:
        found = cls([], [])
        first = 0
        for name, count in zip(request_ids, num_drafted, strict=False):
            row = rows.get(name)
            if depth < count and row is not None:
                found.positions.append(first + depth)
                found.rows.append(row)
            first += count
        return found


def adapter_of(runner: Any) -> RunnerAdapter | None:
    """None: this runner was not asked to take part."""
    return getattr(runner, ADAPTER, None)


def execute(original: Any, runner: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
    adapter, directive = adapter_of(runner), attached(scheduler_output)
    if adapter is not None:
        adapter.is_plain = False  # as the last step may have been
    if directive is not None and scheduler_output.total_num_scheduled_tokens:
        if adapter is None:
            adapter = RunnerAdapter(runner, _settings(runner))
            setattr(runner, ADAPTER, adapter)
        adapter.begin(scheduler_output, directive)
        if adapter.is_plain:
            return adapter.omission.call(original, scheduler_output, *args, **kwargs)
    return original(runner, scheduler_output, *args, **kwargs)


def _settings(runner: Any) -> Settings:
    settings = read_settings(runner.vllm_config.additional_config, os.environ)
    assert settings is not None, "the scheduler sends a directive only if it was asked to"
    return settings


def sample(original: Any, runner: Any, logits: Any, spec_decode_metadata: Any) -> Any:
    adapter = adapter_of(runner)
    if adapter is None or adapter.report is None:
        return original(runner, logits, spec_decode_metadata)
    adapter.compare(logits, spec_decode_metadata)
    output = original(runner, logits, spec_decode_metadata)
    adapter.mark()
    return output


def propose_drafts(original: Any, runner: Any, scheduler_output: Any, *args: Any) -> Any:
    adapter = adapter_of(runner)
    if adapter is None or attached(scheduler_output) is None:
        return original(runner, scheduler_output, *args)
    return adapter.propose(original, scheduler_output, *args)


def sample_draft(original: Any, proposer: Any, hidden_states: Any, sampling_metadata: Any) -> Any:
    result = original(proposer, hidden_states, sampling_metadata)
    adapter = getattr(proposer, ADAPTER, None)
    if adapter is not None:
        adapter.look(result[0])
    return result


def sample_tokens(original: Any, runner: Any, grammar_output: Any) -> Any:
    adapter = adapter_of(runner)
    if adapter is not None and adapter.is_plain:
        output = adapter.omission.call(original, grammar_output)
    else:
        output = original(runner, grammar_output)
    if adapter is None or adapter.report is None:
        return output
    report, adapter.report = adapter.report, None
    if output is not None:
        if hasattr(output, "get_output"):
            output.dsde_report = report
        else:
            attach(output, report.finish())
    return output


def get_output(original: Any, output: Any) -> Any:
    finished = original(output)
    report = getattr(output, "dsde_report", None)
    if report is not None:
        attach(finished, report.finish())
    return finished


def install() -> None:
    hooks.wrap(hooks.EXECUTE, execute)
    hooks.wrap(hooks.SAMPLE, sample)
    hooks.wrap(hooks.PROPOSE_DRAFTS, propose_drafts)
    hooks.wrap(hooks.SAMPLE_DRAFT, sample_draft)
    hooks.wrap(hooks.SAMPLE_TOKENS, sample_tokens)
    hooks.wrap(hooks.GET_OUTPUT, get_output)
