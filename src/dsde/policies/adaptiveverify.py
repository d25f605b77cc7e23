"""vLLM's adaptive verification (its scheduler for DSpark): verify as many drafted tokens as bring most tokens a second.

A reconstruction in two respects: there a trained head says how likely a token is to stand, here it is the probability
of the draft's likeliest token; and seconds come from `CostModel`, learnt while serving, instead of tables profiled at
the start. As there, the budget follows from the scores of the step before: those of the same step know the tokens that
the budget would drop. Knows load, confidence and time; learns nothing of acceptance.
"""

from __future__ import annotations

import numpy as np

from dsde.core.selection import VerifyBudget
from dsde.core.stops import Signal
from dsde.policies.base import BatchView, IntArray, Outcome, Plan, Stage
from dsde.policies.cost import CostModel


class AdaptiveVerify(Stage):
    """budget = argmax over b of (sequences + sum of the b best scores) / (seconds of drafting + of verifying b more).

    The `budget` likeliest tokens of all drafts are verified. Before there are scores, everything is.
    """

    def __init__(self, cost: CostModel | None = None) -> None:
        self.cost = cost or CostModel()
        self._last: VerifyBudget | None = None

    @property
    def cost_models(self) -> list[CostModel]:
        return [self.cost]

    def apply(self, plan: Plan, batch: BatchView) -> None:
        self.cost.turn_to(batch.num_sequences)
        budget = num_drafted = int(plan.lengths.sum())
        if num_drafted == 0:
            return
        if self._last is not None and self._last.scores.size:
            budget = self._best_budget(plan, batch, np.sort(self._last.scores)[::-1])
        plan.signals["budget"] = np.full(batch.slots.size, float(budget))
        self._last = plan.budget = VerifyBudget(Signal.TOP_PROB, budget)

    def observe(self, outcome: Outcome) -> None:
        self.cost.observe(outcome)

    def forget(self, slots: IntArray) -> None:
        self.cost.forget(slots)

    def _best_budget(self, plan: Plan, batch: BatchView, scores: np.ndarray[tuple[int], np.dtype[np.float64]]) -> int:
        draft_s = self.cost.drafting_s(int(plan.lengths.sum()), int(plan.lengths.max()))
        expected = batch.num_decoding + np.add.accumulate(np.concatenate([[0.0], scores]))
        sizes = batch.num_decoding + batch.num_prompt_tokens + np.arange(expected.size)
        return int((expected / (draft_s + self.cost.verify_s(sizes))).argmax())
