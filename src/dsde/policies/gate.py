"""Speculation off for the whole batch while it does not pay, a stage for any policy. Knows load, tokens and time.

Most policies look at acceptance only, and acceptance does not see load: at the same acceptance rate drafting pays for a
few sequences and costs for many. The gate compares what a step emitted with what the same seconds would have given
without speculation. Knows nothing of how the lengths came about.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from dsde.policies.base import BatchView, IntArray, Outcome, Plan, Stage
from dsde.policies.cost import CostModel

PROBE_SHARE = 0.01
"""of all time, that may be lost to looking at the alternative"""
HORIZONS = (64, 1024)
"""steps of evidence: few, to follow a change; many, to see a small difference through the noise"""
CERTAINTY = 3.0
"""standard errors between a mean and zero before it decides"""
LEAST_EVIDENCE = 3
"""steps before a verdict against speculation"""
LEAST_PROBE = 4
"""steps before a verdict for it"""
NUM_PLAIN = 2
"""steps of plain decoding measured before anything is compared; so many are made at once at every new load"""
LONGEST_UNSEEN = 2000
"""steps after which plain decoding is measured again"""


@dataclass(slots=True)
class _Evidence:
    """Fading mean of what a step saved, and how sure it is."""

    horizon: int
    weight: float = 0.0
    square_weight: float = 0.0
    total: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> None:
        kept = 1 - 1 / self.horizon
        self.weight = kept * self.weight + 1
        self.square_weight = kept * kept * self.square_weight + 1
        self.total = kept * self.total + value
        self.squares = kept * self.squares + value * value

    def clear(self) -> None:
        self.weight = self.square_weight = self.total = self.squares = 0.0

    @property
    def num(self) -> float:
        """Steps that count, the fading ones in part."""
        return self.weight**2 / self.square_weight if self.weight else 0.0

    @property
    def mean(self) -> float:
        return self.total / self.weight if self.weight else float("nan")

    @property
    def variance(self) -> float:
        num = self.num
        return max(self.squares / self.weight - self.mean**2, 0.0) * num / (num - 1)

    def score(self, noise: float) -> float:
        """The mean in its standard errors; `noise` is the variance of one step."""
        error = (noise / self.num) ** 0.5
        return self.mean / error if error else float(np.sign(self.mean) * np.inf) if self.mean else 0.0


@dataclass(slots=True)
class _Load:
    """What is known at one batch size (between two powers of two)."""

    is_on: bool
    short: _Evidence = field(default_factory=lambda: _Evidence(HORIZONS[0]))
    """while off: of the running probe only"""
    long: _Evidence = field(default_factory=lambda: _Evidence(HORIZONS[1]))
    noise: float | None = None
    """variance of what one step saves"""
    saved_up_s: float = 0.0
    """seconds that may be lost to looking at the alternative"""
    num_lent: int = 0
    gain: float = 1.0
    """tokens per second with speculation over without, fading mean"""

    def add(self, saved: float, usual_noise: float) -> None:
        self.short.add(saved)
        self.long.add(saved)
        # The short one: over the long one a change of level would pass for noise. While off it holds one probe only.
        evidence = self.short if self.is_on else self.long
        num = evidence.num
        if round(num) >= LEAST_EVIDENCE and (self.is_on or self.noise is None):
            # A few steps may agree by chance, as when all were rejected; as many usual ones temper them.
            self.noise = (num * evidence.variance + LEAST_EVIDENCE * usual_noise) / (num + LEAST_EVIDENCE)

    def decide(self) -> None:
        """On or off, if the evidence is clear; a change begins with no evidence but the noise."""
        noise, least = self.noise, LEAST_EVIDENCE if self.is_on else LEAST_PROBE
        if noise is None:
            return
        scores = [evidence.score(noise) for evidence in (self.short, self.long) if round(evidence.num) >= least]
        if not scores:
            return
        if self.is_on and min(scores) < -CERTAINTY:
            self.is_on = False
        elif not self.is_on and max(scores) > CERTAINTY:
            self.is_on = True
        else:
            return
        self.short.clear()
        self.long.clear()


class OnOffGate(Stage):
    """Nobody drafts while speculation costs more than it brings.

    Every step that drafts is worth what it saved: the seconds in which plain decoding would have emitted as much, less
    the seconds it took, in units of a plain step. Plain decoding is measured, in single steps without speculation, and
    taken from the cost model in between. Speculation goes off when the mean of what is saved lies below zero by three
    standard errors of what was seen of its noise, and on again when it lies above by as much: near zero nothing moves.

    While off, a probe is drafted when one hundredth of the time pays for it, with the draft's catching up. A probe that
    gains goes on until the verdict; a probe that does not ends. What catching up took is paid for but not held against
    speculation, which would not pause if it were on. Every load (batch size between two powers of two) has its own
    verdict, and a new one begins with speculation unless it failed at a smaller load.
    """

    def __init__(self, cost: CostModel | None = None) -> None:
        self.cost = cost or CostModel()
        self._loads: dict[int, _Load] = {}
        self._was_speculating = False
        """whether the step before drafted"""

    @property
    def cost_models(self) -> list[CostModel]:
        return [self.cost]

    @property
    def is_on(self) -> bool:
        """Whether speculation is on at every load seen."""
        return all(load.is_on for load in self._loads.values())

    def apply(self, plan: Plan, batch: BatchView) -> None:
        self.cost.see(batch)
        num = batch.slots.size
        load = self._load(batch.num_sequences)
        plan.signals["gate_saved"] = np.full(num, load.long.mean)
        if not plan.lengths.any():
            return
        speculates = not self._measures_plain(load, batch) if load.is_on else self._probes(load, plan, batch)
        if not speculates:
            plan.lengths[:] = 0
            plan.cap = 0.0

    def observe(self, outcome: Outcome) -> None:
        step = self.cost.observe(outcome)
        if outcome.slots.size == 0 or step.verify_s <= 0:
            return
        load = self._load(outcome.num_sequences)
        spent_s = step.draft_s + step.catch_up_s + step.verify_s
        load.saved_up_s += PROBE_SHARE * outcome.num_steps * spent_s
        speculated = bool(outcome.drafted.any()) or outcome.num_cut > 0
        if speculated:
            self._judge(load, outcome, spent_s, 0.0 if self._was_speculating else step.catch_up_s)
        elif load.is_on and self._was_speculating:
            load.saved_up_s -= _loss(load.gain) * step.verify_s
        self._was_speculating = speculated

    def forget(self, slots: IntArray) -> None:
        self.cost.forget(slots)

    def _judge(self, load: _Load, outcome: Outcome, spent_s: float, excused_s: float) -> None:
        """Take a step that drafted for what it saved."""
        num_decoding = outcome.num_sequences
        num_foreign = max(outcome.num_drafted - int(outcome.drafted.sum()), 0)
        base = outcome.num_plain_tokens + num_foreign
        first_s, further_s = self.cost.verify_s([base, num_decoding]).tolist()
        # Plain decoding would have read the prompts once, however many steps it took.
        plain_s = first_s + float(outcome.accepted.sum()) / num_decoding * further_s
        if not load.is_on:
            load.saved_up_s += plain_s - spent_s
        if self.cost.num_verified(num_decoding) < NUM_PLAIN:
            return
        saved = (plain_s - (spent_s - excused_s)) / further_s
        load.gain += (plain_s / (spent_s - excused_s) - load.gain) / HORIZONS[0]
        # As if a sequence had each number of its tokens accepted equally often, and no two were alike.
        usual_noise = float(outcome.drafted.max()) ** 2 / 12 / max(int((outcome.drafted > 0).sum()), 1)
        load.add(saved, usual_noise)
        load.decide()

    def _load(self, batch_size: int) -> _Load:
        bucket = (max(batch_size, 1) - 1).bit_length()
        if bucket not in self._loads:
            smaller = [known for known in self._loads if known < bucket]
            self._loads[bucket] = _Load(is_on=not smaller or self._loads[max(smaller)].is_on)
        return self._loads[bucket]

    def _measures_plain(self, load: _Load, batch: BatchView) -> bool:
        """Whether this step, of a batch that speculates, goes without to see what that costs."""
        num_decoding = batch.num_sequences
        if self.cost.num_verified(num_decoding) >= NUM_PLAIN and self.cost.age(num_decoding) < LONGEST_UNSEEN:
            return False
        if not self._was_speculating or batch.num_prompt_tokens:
            return False
        if load.num_lent < NUM_PLAIN:
            load.num_lent += 1
            return True
        return load.saved_up_s > _loss(load.gain) * float(self.cost.verify_s(num_decoding))

    def _probes(self, load: _Load, plan: Plan, batch: BatchView) -> bool:
        """Whether this step, of a batch that does not speculate, does so to see whether it would pay."""
        if self._was_speculating and load.saved_up_s > 0 and load.short.mean > 0:
            return True
        base = batch.num_plain_tokens
        num_drafted, num_passes = int(plan.lengths.sum()), int(plan.lengths.max())
        plain_s, verify_s = self.cost.verify_s([base, base + num_drafted]).tolist()
        catch_up_s = float(self.cost.catch_up_s(self.cost.num_behind(batch.slots)))
        price_s = self.cost.drafting_s(num_drafted, num_passes) + catch_up_s + verify_s - plain_s
        load.saved_up_s = min(load.saved_up_s, 2 * price_s)
        if load.saved_up_s < price_s:
            return False
        load.short.clear()
        return True


def _loss(gain: float) -> float:
    """Part of a plain step that is lost where speculation gains so much."""
    return max(1 - 1 / gain, 0.0)
