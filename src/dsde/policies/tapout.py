"""TapOut (arXiv 2511.02017): a bandit that chooses, step by step, which policy or stopping rule to follow.

A reconstruction: the paper's abstract is known, its reward and arms only second hand. One arm for the whole batch and
step, because there is one measured time a step; the reward is tokens per second and sequence, over the largest seen, or
as in the paper a blend of accepted length and acceptance rate. The chosen arm alone learns from its step, as it would
alone; a sequence that ends is forgotten by all. Knows nothing of what its arms look at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, get_args

import numpy as np

from dsde.core.errors import InvalidInput
from dsde.policies.base import BatchView, FloatArray, IntArray, Need, Outcome, Plan, Policy
from dsde.policies.cost import CostModel
from dsde.policies.limits import check_choice, check_real, check_whole

Method = Literal["ucb", "thompson"]
Reward = Literal["rate", "blend"]


class TapOut(Policy):
    """`arms` are policies by name. `ucb` plays the arm with the highest mean + sqrt(2 ln t / n); `thompson` draws every
    arm's mean from a Beta distribution of its rewards and plays the best. With `discount` below 1 (not the paper's)
    earlier steps count less, for traffic that changes."""

    def __init__(
        self,
        arms: Sequence[tuple[str, Policy]],
        *,
        method: Method = "ucb",
        reward: Reward = "rate",
        discount: float = 1.0,
        seed: int = 0,
    ) -> None:
        if len(arms) < 2:
            raise InvalidInput(f"tapout needs at least two policies to choose from, not {len(arms)}")
        check_choice("method", method, get_args(Method))
        check_choice("reward", reward, get_args(Reward))
        check_real("discount", discount, 0.5, 1)
        check_whole("seed", seed, 0, 2**63 - 1)
        self.arms = list(arms)
        self.method, self.reward, self.discount = method, reward, float(discount)
        self.needs = Need.NOTHING
        for _, policy in self.arms:
            self.needs |= policy.needs
        self._rng = np.random.default_rng(seed)
        self._num_played = np.zeros(len(self.arms))
        self._sums = np.zeros(len(self.arms))
        self._unit = 0.0
        """the largest rate seen: rewards are shares of it"""
        self._playing: int | None = None

    @property
    def cost_models(self) -> list[CostModel]:
        return [model for _, policy in self.arms for model in policy.cost_models]

    def plan(self, batch: BatchView) -> Plan:
        self._playing = arm = self._choose()
        plan = self.arms[arm][1].plan(batch)
        chosen = {"arm": np.full(batch.slots.size, float(arm))}
        # Whoever is chosen next may draft, however long this one would have rested.
        return replace(plan, num_resting=0, signals={**plan.signals, **chosen})

    def observe(self, outcome: Outcome) -> None:
        arm, self._playing = self._playing, None
        if arm is None:
            return
        self.arms[arm][1].observe(outcome)
        reward = self._rate(outcome) if self.reward == "rate" else _blend(outcome)
        if reward is not None:
            self._num_played *= self.discount
            self._sums *= self.discount
            self._num_played[arm] += 1
            self._sums[arm] += reward

    def forget(self, slots: IntArray) -> None:
        for _, policy in self.arms:
            policy.forget(slots)

    def _choose(self) -> int:
        untried = np.flatnonzero(self._num_played == 0)
        if len(untried):
            return int(untried[0])
        if self.method == "thompson":
            successes = self._means() * self._num_played
            return int(self._rng.beta(1 + successes, 1 + self._num_played - successes).argmax())
        return int((self._means() + np.sqrt(2 * np.log(self._num_played.sum()) / self._num_played)).argmax())

    def _means(self) -> FloatArray:
        unit = self._unit if self.reward == "rate" else 1.0
        means: FloatArray = self._sums / (self._num_played * unit)
        return means

    def _rate(self, outcome: Outcome) -> float | None:
        seconds = outcome.draft_s + outcome.verify_s
        if seconds <= 0 or outcome.slots.size == 0:  # nobody measured
            return None
        rate = float(outcome.accepted.mean() + 1) / seconds
        self._unit = max(self._unit, rate)
        return rate


_LONGEST_NAMED = 20
"""the paper's longest draft, which a full accepted length is measured by"""


def _blend(outcome: Outcome) -> float | None:
    """Half the accepted length, half the acceptance rate, both within 0..1."""
    drafted = int(outcome.drafted.sum())
    if drafted == 0:
        return None
    length = min(float(outcome.accepted.mean()) / _LONGEST_NAMED, 1.0)
    return 0.5 * length + 0.5 * float(outcome.accepted.sum()) / drafted
