"""AdaServe (arXiv 2501.12162) in chain form: first what requests need to keep their pace, then the likeliest tokens.

A request says by `slo_tpot_ms` how fast its tokens should come. A reconstruction in these respects: drafts are chains
and not trees, so that the width of a tree has no counterpart; a token's score is made of the probability of the draft's
likeliest token, which knows nothing of the token it may drop; a step's expected seconds come from `CostModel` and not
from a profile; the budget counts drafted tokens, and the paper's first token of every request comes on top. What one
request may get for its need follows the paper's public code. Knows pace, load and confidence.
"""

from __future__ import annotations

import math

import numpy as np

from dsde.core.selection import VerifyBudget
from dsde.core.stops import Signal
from dsde.policies.base import BatchView, FloatArray, IntArray, Need, Outcome, Plan, Policy, Stage
from dsde.policies.cost import CostModel
from dsde.policies.limits import LARGEST_BUDGET, LONGEST, check_whole

NEED_SHARE = 1.2
"""of an even share of the budget, that one request may get for its need: one that cannot be met must not eat it all"""
SECONDS_MARGIN = 1.05
"""a step is taken to last so many times what it is expected to: there is more to it than draft and verification"""


class AdaServe(Stage):
    """`budget` of all drafted tokens are verified. A request needs A = (l + t) / TPOT - o tokens of this step, l being
    the seconds since its first token, o its tokens since then and t the seconds that the step will take. The neediest
    request first, the beginning of its draft is kept until 1 + the sum of its scores reaches A."""

    needs = Need.PACE

    def __init__(self, budget: int = 64, cost: CostModel | None = None) -> None:
        check_whole("budget", budget, 0, LARGEST_BUDGET)
        self.budget = budget
        self.cost = cost or CostModel()

    @property
    def cost_models(self) -> list[CostModel]:
        return [self.cost]

    def apply(self, plan: Plan, batch: BatchView) -> None:
        self.cost.turn_to(batch.num_sequences)
        needs = self._needed(plan.lengths, batch)
        most_for_need = math.ceil(NEED_SHARE * self.budget / max(batch.slots.size, 1))
        plan.budget = VerifyBudget(Signal.TOP_PROB, self.budget, needs, most_for_need)
        plan.signals["needed"] = np.where(np.isfinite(needs), needs, np.nan)

    def observe(self, outcome: Outcome) -> None:
        self.cost.observe(outcome)

    def forget(self, slots: IntArray) -> None:
        self.cost.forget(slots)

    def _needed(self, lengths: IntArray, batch: BatchView) -> FloatArray:
        """[batch] A; -inf where a request asks for no pace."""
        if batch.pace is None:
            return np.full(batch.slots.size, -np.inf)
        num_drafted = int(lengths.sum())
        draft_s = self.cost.drafting_s(num_drafted, int(lengths.max(initial=0)))
        num_packed = batch.num_decoding + batch.num_prompt_tokens + min(num_drafted, self.budget)
        step_s = SECONDS_MARGIN * (draft_s + float(self.cost.verify_s(max(num_packed, 1))))
        pace = batch.pace
        needed: FloatArray = (pace.elapsed_s + step_s) / pace.tpot_s - pace.num_emitted
        return np.where(np.isfinite(pace.tpot_s), needed, -np.inf)


class DepthByLoad(Policy):
    """AdaServe's depth: everybody drafts an even share of the budget, between `min` and `max` tokens."""

    def __init__(self, budget: int = 64, min: int = 4, max: int = 8) -> None:
        check_whole("budget", budget, 0, LARGEST_BUDGET)
        check_whole("max", max, 1, LONGEST)
        check_whole("min", min, 0, max)
        self.budget, self.min, self.max = budget, min, max

    def plan(self, batch: BatchView) -> Plan:
        share = self.budget // batch.slots.size if batch.slots.size else 0
        return Plan.wanting(min(max(share, self.min), self.max), batch)
