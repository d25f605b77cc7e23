"""A bandit over lengths by batch size, off included: Nightjar (arXiv 2512.22420), a reconstruction from notes on it.

The objective and the scheme of blocks and bins are the paper's as reported; the length of a bin, that bins are counted
within their block, and that an arm never tried is left to exploration are our reading. The cost of taking speculation
up again is measured here where the paper has a table. Moving the draft out of memory is the engine's business, and not
done. Knows batch size, tokens and time; nothing of single requests: all draft the same length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dsde.policies.base import BatchView, FloatArray, IntArray, Outcome, Plan, Policy
from dsde.policies.cost import CostModel
from dsde.policies.limits import LONGEST, check_whole

LARGEST_SEED = 2**32 - 1


@dataclass(slots=True)
class _Context:
    """What is known at one batch size (between two powers of two)."""

    seconds: FloatArray
    """[arm] spent"""
    num_emitted: FloatArray
    """[arm] tokens of a sequence, mean over the batch, summed over steps"""
    arm: int = 0
    """locked until the bin ends"""
    block: int = 0
    """j: it has 2^(j-1) steps"""
    num_left: int = 0
    """steps of the block still to come"""
    num_left_in_bin: int = 0
    bin: int = 0
    """b: which bin of its block, from 1"""


class Nightjar(Policy):
    """k = argmin { 1 / g(B, k) + [nobody drafted before and k > 0] * C_switch / k } over k in 0..`max`.

    g(B, k) is the mean goodput of a sequence (tokens per second), C_switch the seconds until the draft has caught up.
    ADA-BINGREEDY: for every context, blocks of 1, 2, 4, ... steps, of bins as long as the square root of the block; at
    the start of bin b any arm is tried with probability 1 / b, otherwise the best one is taken, and kept for the bin.
    """

    def __init__(self, max: int = 5, seed: int = 0, cost: CostModel | None = None) -> None:
        check_whole("max", max, 1, LONGEST)
        check_whole("seed", seed, 0, LARGEST_SEED)
        self.max = max
        self.cost = cost or CostModel()
        self._rng = np.random.default_rng(seed)
        self._contexts: dict[int, _Context] = {}
        self._is_off = False
        """whether nobody drafted in the step before"""

    @property
    def cost_models(self) -> list[CostModel]:
        return [self.cost]

    def plan(self, batch: BatchView) -> Plan:
        num = batch.slots.size
        self.cost.see(batch)
        context = self._context(batch.num_sequences)
        switch_s = float(self.cost.catch_up_s(self.cost.num_behind(batch.slots))) if self._is_off else 0.0
        if num:
            self._advance(context, switch_s)
        goodput = self._goodputs(context)[context.arm]
        return Plan.wanting(context.arm, batch, goodput=goodput, switch_s=switch_s, bin=context.bin)

    def observe(self, outcome: Outcome) -> None:
        """What was drafted counts, not what was planned: a cap or a lack of memory may have come between."""
        cost = self.cost.observe(outcome)
        num = outcome.slots.size
        seconds = cost.draft_s + cost.verify_s
        if num == 0:
            return
        arm = int(outcome.drafted.max())
        self._is_off = arm == 0
        if seconds <= 0 or arm > self.max:
            return
        context = self._context(outcome.num_sequences)
        context.seconds[arm] += seconds
        context.num_emitted[arm] += 1 + float(outcome.accepted.sum()) / num

    def forget(self, slots: IntArray) -> None:
        self.cost.forget(slots)

    def _context(self, batch_size: int) -> _Context:
        bucket = (max(batch_size, 1) - 1).bit_length()
        if bucket not in self._contexts:
            self._contexts[bucket] = _Context(np.zeros(self.max + 1), np.zeros(self.max + 1))
        return self._contexts[bucket]

    def _advance(self, context: _Context, switch_s: float) -> None:
        """One step further; at the end of a bin, choose again."""
        if context.num_left_in_bin == 0:
            if context.num_left == 0:
                context.block += 1
                context.num_left = 2 ** (context.block - 1)
                context.bin = 0
            context.bin += 1
            length = math.isqrt(2 ** (context.block - 1))
            context.num_left_in_bin = min(length, context.num_left)
            explores = self._rng.random() < 1 / context.bin
            context.arm = int(self._rng.integers(self.max + 1)) if explores else self._best(context, switch_s)
        context.num_left -= 1
        context.num_left_in_bin -= 1

    def _best(self, context: _Context, switch_s: float) -> int:
        goodputs = self._goodputs(context)
        losses = np.divide(1.0, goodputs, out=np.full_like(goodputs, np.inf), where=goodputs > 0)
        losses[1:] += switch_s / np.arange(1, self.max + 1)
        return int(losses.argmin())

    @staticmethod
    def _goodputs(context: _Context) -> FloatArray:
        """[arm] tokens per second of a sequence; NaN where never tried."""
        untried = np.full_like(context.seconds, np.nan)
        return np.divide(context.num_emitted, context.seconds, out=untried, where=context.seconds > 0)
