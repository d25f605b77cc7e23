"""The length with the most tokens per second: SmartSpec / TurboSpec (arXiv 2406.14066), a reconstruction.

Reconstructed from the idea and the formulas as remembered: goodput(k) = E[tokens] / T with
E = sum over requests (1 - alpha^(k+1)) / (1 - alpha) and T = k * T_draft(B) + T_target(B * (k+1)). Seconds come from
`CostModel`, which is learnt while serving instead of profiled, and does not know the context length. Knows acceptance,
load and time; knows nothing of KLDs or of what is being written.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dsde.policies.base import BatchView, FloatArray, IntArray, Outcome, Plan, Policy
from dsde.policies.cost import CostModel
from dsde.policies.limits import LONGEST, check_choice, check_whole
from dsde.policies.probe import Probe
from dsde.policies.slots import SlotTable

KEPT = 0.97
"""of what is known of acceptance, that a step which drafted leaves standing"""
PRIOR_ACCEPTED, PRIOR_TESTED = 7.0, 10.0
"""acceptance before the first step, worth so many tokens"""
LARGEST_ALPHA = 0.999


@dataclass
class _Sequences(SlotTable):
    num_accepted: FloatArray
    """fading sums, like the next"""
    num_tested: FloatArray


@dataclass(slots=True)
class _Choice:
    lengths: IntArray
    goodput: float
    """tokens per second expected of it"""
    goodput_off: float


class Goodput(Policy):
    """Argmax over lengths 0..`max` of expected tokens per second, one length for the batch or one per sequence.

    `per="batch"`: one acceptance rate, one length. `per="sequence"`: every sequence has a rate of its own, drawn
    towards that of the batch while little is known, and the tokens most likely to be accepted are drafted first,
    whoever they belong to.

    Acceptance is accepted / tested, where the tested tokens of a step are the accepted ones and the first rejected one:
    those after it were not looked at. Where nothing is drafted nothing is learnt, so a short probe is drafted whenever
    one hundredth of the time since the last one pays for it.
    """

    def __init__(self, max: int = 12, per: str = "batch", cost: CostModel | None = None) -> None:
        check_whole("max", max, 1, LONGEST)
        check_choice("per", per, ("batch", "sequence"))
        self.max = max
        self.per = per
        self.cost = cost or CostModel()
        self._num_accepted, self._num_tested = PRIOR_ACCEPTED, PRIOR_TESTED
        self._sequences = _Sequences(num_accepted=np.zeros(1), num_tested=np.zeros(1))
        self._probe = Probe(self.cost, max)
        self._is_looking = False
        """whether the newest plan was made only to see what comes of it"""

    @property
    def cost_models(self) -> list[CostModel]:
        return [self.cost]

    @property
    def alpha(self) -> float:
        """Acceptance rate of the batch."""
        return self._num_accepted / self._num_tested

    def plan(self, batch: BatchView) -> Plan:
        self.cost.see(batch)
        alphas = self._alphas(batch.slots)
        choice = self._per_sequence(batch, alphas) if self.per == "sequence" else self._per_batch(batch)
        predicted = choice.lengths.astype(np.float64)
        lengths = np.minimum(choice.lengths, batch.rooms)
        num_resting = 0
        self._is_looking = False
        if lengths.any():
            self._probe.pass_over()
        elif self._probe.begin(batch):
            self._is_looking, lengths = True, self._probe.lengths
        else:
            num_resting = self._probe.num_steps_left(float(self.cost.verify_s(batch.num_plain_tokens)))
        num = batch.slots.size
        return Plan(
            lengths=lengths,
            predicted=predicted,
            votes=np.ones(num, np.bool_),
            signals={
                "alpha": alphas,
                "goodput": np.full(num, choice.goodput),
                "goodput_off": np.full(num, choice.goodput_off),
            },
            num_resting=num_resting,
        )

    def observe(self, outcome: Outcome) -> None:
        step = self.cost.observe(outcome)
        plain_s = float(self.cost.verify_s(outcome.num_plain_tokens))
        active = outcome.drafted > 0
        if not active.any():
            self._probe.save(outcome.num_steps * plain_s)
            return
        if self._probe.is_under_way or self._is_looking:  # one may have several drafts
            self._probe.end(step, plain_s, outcome.is_resumed, outcome.delay_s)
        slots, accepted = outcome.slots[active], outcome.accepted[active]
        tested = np.minimum(accepted + 1, outcome.drafted[active])
        self._num_accepted = KEPT * self._num_accepted + float(accepted.sum())
        self._num_tested = KEPT * self._num_tested + float(tested.sum())
        sequences = self._sequences
        sequences.cover(slots)
        sequences.num_accepted[slots] = KEPT * sequences.num_accepted[slots] + accepted
        sequences.num_tested[slots] = KEPT * sequences.num_tested[slots] + tested

    def forget(self, slots: IntArray) -> None:
        self._sequences.reset(slots)
        self.cost.forget(slots)
        self._probe.forget(slots)

    def _alphas(self, slots: IntArray) -> FloatArray:
        if self.per == "batch":
            return np.full(slots.size, self.alpha)
        self._sequences.cover(slots)
        accepted = self._sequences.num_accepted[slots] + PRIOR_TESTED * self.alpha
        return accepted / (self._sequences.num_tested[slots] + PRIOR_TESTED)

    def _per_batch(self, batch: BatchView) -> _Choice:
        """One k for all; whoever has no room for it drafts as far as it goes."""
        lengths = np.arange(self.max + 1)
        num_with_room = np.add.reduce(batch.rooms[:, None] >= lengths[1:], axis=0)
        gains = num_with_room * min(self.alpha, LARGEST_ALPHA) ** lengths[1:]
        num_base = batch.num_sequences
        expected = num_base + np.concatenate([[0.0], np.add.accumulate(gains)])
        num_drafted = np.concatenate([[0], np.add.accumulate(num_with_room)])
        num_passes = np.minimum(lengths, batch.rooms.max(initial=0))
        tokens = batch.num_plain_tokens + num_drafted
        draft_s = num_passes * self.cost.draft_s(max(batch.slots.size, 1)) + self.cost.start_s * (num_passes > 0)
        goodputs = expected / (draft_s + self.cost.verify_s(tokens))
        best = int(goodputs.argmax())
        return _Choice(np.full(batch.slots.size, best), float(goodputs[best]), float(goodputs[0]))

    def _per_sequence(self, batch: BatchView, alphas: FloatArray) -> _Choice:
        """For every number of draft passes, the tokens worth verifying; then the number that pays best.

        A sequence's tokens become less likely along its draft, so the best ones of all are always whole beginnings.
        """
        num, depths = batch.slots.size, np.arange(1, self.max + 1)
        chances = np.minimum(alphas, LARGEST_ALPHA)[:, None] ** depths
        possible = np.flatnonzero(depths <= batch.rooms[:, None])
        order = possible[np.argsort(-chances.ravel()[possible], kind="stable")]
        sorted_chances, sorted_depths = chances.ravel()[order], order % self.max + 1
        num_base = batch.num_sequences
        verify_s = self.cost.verify_s(batch.num_plain_tokens + np.arange(order.size + 1))
        draft_s = float(self.cost.draft_s(max(num, 1)))
        goodput_off = num_base / float(verify_s[0])
        best, best_chosen = goodput_off, order[:0]
        for num_passes in depths.tolist():
            within = sorted_depths <= num_passes
            expected = num_base + np.add.accumulate(sorted_chances[within])
            if expected.size == 0:
                break
            goodputs = expected / (self.cost.start_s + num_passes * draft_s + verify_s[1 : expected.size + 1])
            place = int(goodputs.argmax())
            if goodputs[place] > best:
                best, best_chosen = float(goodputs[place]), order[within][: place + 1]
        return _Choice(np.bincount(best_chosen // self.max, minlength=num), best, goodput_off)
