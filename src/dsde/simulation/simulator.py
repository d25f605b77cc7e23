"""Drives a policy through continuous batching in virtual time: `plan -> draft -> verify -> observe -> commit`.

The policy sees what the engine would show it, the same objects with the same meaning; seconds come from the costs, and
agreement from the requests. Everything is an array over the batch. Knows nothing of who drew the requests.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from dsde.core.errors import InvalidInput
from dsde.core.stops import SIGNALS, Signal
from dsde.policies import BatchView, Need, Outcome, Pace, Policy
from dsde.policies.base import BoolArray, FloatArray, IntArray
from dsde.simulation.costs import Costs
from dsde.simulation.measured import MeasuredCosts
from dsde.simulation.requests import Requests
from dsde.simulation.stops import stop_drafts


@dataclass(slots=True)
class Result:
    """What a policy did. Counts are over all sequences and steps, seconds are virtual."""

    num_requests: int = 0
    """that ended"""
    num_paced: int = 0
    """of these, that had been given a pace"""
    num_on_time: int = 0
    """of these, that kept it over their whole output"""
    num_steps: int = 0
    num_turns: int = 0
    """sequences that decoded, summed over the steps"""
    num_emitted: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_draft_passes: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    total_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.num_emitted / self.total_s

    @property
    def num_wasted(self) -> int:
        return self.num_drafted - self.num_accepted

    @property
    def acceptance_rate(self) -> float | None:
        return self.num_accepted / self.num_drafted if self.num_drafted else None

    @property
    def acceptance_length(self) -> float:
        return self.num_emitted / self.num_turns

    @property
    def mean_length(self) -> float:
        """drafted a step and sequence"""
        return self.num_drafted / self.num_turns

    def to_dict(self) -> dict[str, Any]:
        derived = ("tokens_per_s", "num_wasted", "acceptance_rate", "acceptance_length", "mean_length")
        return asdict(self) | {name: getattr(self, name) for name in derived}


def simulate(
    policy: Policy,
    requests: Requests,
    costs: Costs | MeasuredCosts,
    batch_size: int | None = None,
    *,
    prompts: bool = False,
    unread: bool = False,
    tpot_s: FloatArray | None = None,
) -> Result:
    """Run until as many requests have ended as there are.

    With a batch size the batch is always full: whoever ends is replaced, by the first requests again once all have had
    their turn, and the run ends with a full batch. Without one all requests start at once and nobody replaces them.
    With `prompts` a request spends its first step on reading its prompt, in the same target pass as everybody else;
    with `unread` its draft has yet to read it, before it drafts for the first time.
    `tpot_s` [request] are the seconds a token that requests ask for, from the step on in which they begin to decode;
    infinite: none. `policy` must be fresh.
    """
    if batch_size is not None and not 1 <= batch_size <= requests.size:
        raise InvalidInput(f"batch size must be from 1 to the number of requests, {requests.size}, not {batch_size}")
    simulator = _Simulator(policy, requests, costs, batch_size, prompts, unread, tpot_s)
    while simulator.result.num_requests < requests.size:
        simulator.step()
    return simulator.result


class _Simulator:
    def __init__(
        self,
        policy: Policy,
        requests: Requests,
        costs: Costs | MeasuredCosts,
        batch_size: int | None,
        prompts: bool,
        unread: bool,
        tpot_s: FloatArray | None,
    ) -> None:
        self.policy, self.requests, self.costs = policy, requests, costs
        self.tpot_s = np.full(requests.size, np.inf) if tpot_s is None else tpot_s
        self.replaces = batch_size is not None
        self.reads_prompts = prompts
        self.are_unread = unread
        self.result = Result()
        num_slots = requests.size if batch_size is None else batch_size
        self.num_admitted = 0
        self.rows = np.zeros(num_slots, np.int64)
        """[slot] which request"""
        self.positions = np.zeros(num_slots, np.int64)
        """[slot] tokens emitted so far"""
        self.num_missed = np.zeros(num_slots, np.int64)
        """[slot] tokens that the draft has yet to read"""
        self.began_s = np.zeros(num_slots)
        """[slot] when it began to decode"""
        self.decoding = np.empty(0, np.int64)
        """slots, like the next"""
        self.reading = np.empty(0, np.int64)
        self.has_ended = False
        """whether somebody did in the newest step"""
        self.temperatures = np.full(num_slots, requests.temperature)
        everybody = np.arange(num_slots)
        self._admit(everybody)
        if not prompts:
            self.decoding = everybody

    def step(self) -> None:
        slots = self.decoding
        rows, positions = self.rows[slots], self.positions[slots]
        left = self.requests.num_tokens[rows] - positions
        batch = BatchView(
            slots=slots,
            rooms=left - 1,
            temperatures=self.temperatures[: slots.size],
            num_decoding=slots.size,
            num_waiting=max(self.requests.size - self.num_admitted, 0),
            num_prompt_tokens=int(self.requests.num_prompt_tokens[self.rows[self.reading]].sum()),
            num_joining=self.reading.size,
            num_left=left,
            num_missed=self.num_missed[slots],
            pace=Pace(self.tpot_s[rows], self.result.total_s - self.began_s[slots], positions),
            has_whole_passes=slots.size <= self.costs.whole,
        )
        accepted = self._decode(batch, rows, positions) if slots.size else np.empty(0, np.int64)
        if self.reading.size and not slots.size:
            verify_s = float(self.costs.verify_s(self.reading.size, batch.num_prompt_tokens))
            self._spend(0.0, verify_s, self.costs.step_s)
        emitted = accepted + 1
        self.positions[slots] += emitted
        self.result.num_steps += 1
        self.result.num_emitted += int(emitted.sum())
        self._commit(slots, emitted == left)

    def _decode(self, batch: BatchView, rows: IntArray, positions: IntArray) -> IntArray:
        """Plan, draft, verify and observe; returns how many were accepted."""
        plan = self.policy.plan(batch)
        if plan.consultant is not None:
            raise InvalidInput(
                "a simulation does not know what the target gives a token, which this policy or stage goes by"
            )
        drafted = passes = np.minimum(np.maximum(plan.lengths, 0), batch.rooms)
        if plan.stop is not None:
            drafted, passes = stop_drafts(plan.stop, self.requests, rows, positions, drafted)
        if plan.budget is not None:
            confidences = self._confidences(plan.budget.signal, rows, positions, int(drafted.max()))
            drafted = plan.budget.select(confidences, drafted, np.arange(rows.size))
        accepted = np.minimum(drafted, self.requests.runs[rows, positions])
        num_drafted, takes_part = int(drafted.sum()), passes > 0
        num_missed = int(self.num_missed[batch.slots[takes_part]].sum())
        self.num_missed[batch.slots] = np.where(takes_part, 0, self.num_missed[batch.slots] + 1)
        num_packed = batch.num_decoding + num_drafted + batch.num_prompt_tokens
        outcome = Outcome(
            slots=batch.slots,
            drafted=drafted,
            accepted=accepted,
            klds=self._klds(rows, positions, drafted) if self.policy.needs & Need.KLD else np.empty(0),
            temperatures=batch.temperatures,
            draft_signals=self._draft_signals(rows, positions, drafted),
            token_probs=self._token_probs(rows, positions, drafted),
            draft_s=self.costs.draft_s(passes, num_missed, plan.stop is not None),
            verify_s=float(self.costs.verify_s(batch.num_decoding, num_packed)),
            step_s=self.costs.step_s + (self.costs.end_s if self.has_ended and takes_part.any() else 0.0),
            num_decoding=batch.num_decoding,
            num_prompt_tokens=batch.num_prompt_tokens,
            num_drafted=num_drafted,
            num_cut=0 if plan.budget is None else plan.budget.num_cut,
            num_draft_passes=int(passes.max()),
            num_catch_up_tokens=num_missed,
            is_ruled=plan.stop is not None,
        )
        beyond_s = outcome.step_s
        outcome.step_s += outcome.draft_s + outcome.verify_s
        self.policy.settle()
        self.policy.observe(outcome)
        self._spend(outcome.draft_s, outcome.verify_s, beyond_s)
        self.result.num_turns += batch.num_decoding
        self.result.num_drafted += num_drafted
        self.result.num_accepted += int(accepted.sum())
        self.result.num_draft_passes += outcome.num_draft_passes
        return accepted

    def _draft_signals(self, rows: IntArray, positions: IntArray, drafted: IntArray) -> FloatArray:
        if not self.policy.needs & Need.DRAFT_SIGNALS:
            return np.empty((0, 3))
        signals: FloatArray = self.requests.draft_signals[self._places(rows, positions, drafted)]
        return signals

    def _token_probs(self, rows: IntArray, positions: IntArray, drafted: IntArray) -> FloatArray:
        if not self.policy.needs & Need.TOKEN_PROB:
            return np.empty(0)
        probs: FloatArray = self.requests.token_probs[self._places(rows, positions, drafted)]
        return probs

    def _confidences(self, signal: Signal, rows: IntArray, positions: IntArray, longest: int) -> FloatArray:
        """[batch, longest] of the positions ahead; beyond the end of a request they mean nothing."""
        values = self.requests.draft_signals[..., SIGNALS.index(signal)]
        places = np.minimum(positions[:, None] + np.arange(longest), values.shape[1] - 1)
        confidences: FloatArray = values[rows[:, None], places]
        return confidences

    def _klds(self, rows: IntArray, positions: IntArray, drafted: IntArray) -> FloatArray:
        """Of every drafted position, also those behind a disagreement."""
        klds: FloatArray = self.requests.klds[self._places(rows, positions, drafted)]
        return klds

    @staticmethod
    def _places(rows: IntArray, positions: IntArray, drafted: IntArray) -> tuple[IntArray, IntArray]:
        """Request and position of everything drafted, sequence after sequence."""
        firsts = np.add.accumulate(drafted) - drafted
        return np.repeat(rows, drafted), np.arange(drafted.sum()) + np.repeat(positions - firsts, drafted)

    def _spend(self, draft_s: float, verify_s: float, beyond_s: float) -> None:
        self.result.draft_s += draft_s
        self.result.verify_s += verify_s
        self.result.total_s += draft_s + verify_s + beyond_s

    def _commit(self, slots: IntArray, has_ended: BoolArray) -> None:
        """Those who have read their prompt decode from now on; those who have ended make room."""
        if self.reading.size:
            self.began_s[self.reading] = self.result.total_s
            self.decoding, self.reading = np.concatenate([slots, self.reading]), np.empty(0, np.int64)
        self.has_ended = bool(has_ended.any())
        if not self.has_ended:
            return
        ended = slots[has_ended]
        self.policy.forget(ended)
        self.result.num_requests += ended.size
        self._judge_pace(ended)
        if self.reads_prompts or not self.replaces:
            self.decoding = np.setdiff1d(self.decoding, ended, assume_unique=True)
        if self.replaces:
            self._admit(ended)

    def _judge_pace(self, ended: IntArray) -> None:
        tpot_s = self.tpot_s[self.rows[ended]]
        took_s = (self.result.total_s - self.began_s[ended]) / self.positions[ended]
        is_paced = np.isfinite(tpot_s)
        self.result.num_paced += int(is_paced.sum())
        self.result.num_on_time += int((is_paced & (took_s <= tpot_s)).sum())

    def _admit(self, slots: IntArray) -> None:
        self.rows[slots] = np.arange(self.num_admitted, self.num_admitted + slots.size) % self.requests.size
        self.positions[slots] = 0
        self.num_missed[slots] = self.requests.num_prompt_tokens[self.rows[slots]] if self.are_unread else 0
        self.began_s[slots] = self.result.total_s
        self.num_admitted += slots.size
        if self.reads_prompts:
            self.reading = slots
