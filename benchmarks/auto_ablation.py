"""`auto` without its parts, and with the part that was left out of it: the KLD of what was verified."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dsde.policies import Auto, CostModel, Need, Outcome, Policy
from dsde.policies.acceptance import HIGHEST, LOWEST, PRIOR_RATE, PRIOR_WEIGHTS, AcceptanceModel
from dsde.policies.advisor import NUM_TRIED
from dsde.policies.base import FloatArray, IntArray
from dsde.policies.cost import StepCost
from dsde.policies.slots import SlotTable


class Blindfolded(Auto):
    """Lengths are chosen before drafting; nobody looks at tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.advisor.sight.is_worth_it = self.advisor.sight.is_try = lambda *_: False  # type: ignore[method-assign]


class Amnesiac(AcceptanceModel):
    """Every sequence is like all."""

    def outlooks(self, slots: IntArray) -> tuple[FloatArray, FloatArray]:
        return np.full(slots.size, np.clip(self.rate, LOWEST, HIGHEST)), np.zeros(slots.size)


class Alone(AcceptanceModel):
    """A sequence knows its own history; nothing is learnt from others, nor what signals mean."""

    @property
    def rate(self) -> float:
        return PRIOR_RATE

    def observe(self, outcome: Outcome) -> None:
        super().observe(outcome)
        self._lessons, self._num_due, self._weights = [], 0, PRIOR_WEIGHTS.copy()
        self._evidence[:] = 0.0


class Guessed(CostModel):
    """What was thought of costs before anything was measured."""

    def observe(self, outcome: Outcome) -> StepCost:
        return StepCost(outcome.draft_s, 0.0, outcome.verify_s)


@dataclass
class _Divergences(SlotTable):
    total: FloatArray
    """fading sums of roots, like the next"""
    count: FloatArray


class Divergent(AcceptanceModel):
    """Outlooks are put right by the sequence's recent KLD, as far as a regression finds that it helps."""

    def __init__(self) -> None:
        super().__init__()
        self._divergences = _Divergences(np.zeros(1), np.zeros(1))
        self._roots = (1.0, 4.0)
        self._slopes, self._curvature = np.array([0.0, 1.0, 0.0]), np.eye(3)

    def outlooks(self, slots: IntArray) -> tuple[FloatArray, FloatArray]:
        outlooks, doubts = super().outlooks(slots)
        corrected = 1 / (1 + np.exp(-(self._features(slots, outlooks) @ self._slopes)))
        return np.clip(corrected, LOWEST, HIGHEST), doubts

    def observe(self, outcome: Outcome) -> None:
        features = self._features(outcome.slots, super().outlooks(outcome.slots)[0])
        super().observe(outcome)
        if not outcome.drafted.any():
            return
        chances = 1 / (1 + np.exp(-(features @ self._slopes)))
        tested = np.minimum(outcome.accepted + 1, outcome.drafted)
        weights = tested * chances * (1 - chances)
        kept = np.exp(-tested.sum() / 4096)
        self._curvature = kept * self._curvature + (1 - kept) * np.eye(3) + features.T @ (features * weights[:, None])
        self._slopes += np.linalg.solve(self._curvature, features.T @ (outcome.accepted - tested * chances))
        owners = np.repeat(np.arange(outcome.slots.size), outcome.drafted)
        sums = np.bincount(owners, np.sqrt(outcome.klds), outcome.slots.size)
        fading = np.exp(-outcome.drafted / 24)
        self._divergences.total[outcome.slots] = fading * self._divergences.total[outcome.slots] + sums
        self._divergences.count[outcome.slots] = fading * self._divergences.count[outcome.slots] + outcome.drafted
        total, count = self._roots
        self._roots = (kept * total + float(sums.sum()), kept * count + float(outcome.drafted.sum()))

    def forget(self, slots: IntArray) -> None:
        super().forget(slots)
        self._divergences.reset(slots)

    def _features(self, slots: IntArray, outlooks: FloatArray) -> FloatArray:
        self._divergences.cover(slots)
        usual = self._roots[0] / self._roots[1]
        mean = (self._divergences.total[slots] + 4 * usual) / (self._divergences.count[slots] + 4)
        return np.column_stack((np.ones(slots.size), np.log(outlooks / (1 - outlooks)), mean - usual))


def with_model(model: Callable[[], AcceptanceModel]) -> Callable[[], Policy]:
    def make() -> Policy:
        policy = Auto()
        policy.advisor.acceptance = model()
        if model is Divergent:
            policy.needs = policy.needs | Need.KLD
        return policy

    return make


ABLATIONS: dict[str, Callable[[], Policy]] = {
    "without the draft's signals": Blindfolded,
    "without history": with_model(Amnesiac),
    "without sharing": with_model(Alone),
    "without measured costs": lambda: Auto(cost=Guessed(NUM_TRIED, NUM_TRIED)),
    "with KLD": with_model(Divergent),
}
