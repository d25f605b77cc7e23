"""BanditSpec: speculation lengths as the arms of a bandit, UCBSpec and EXP3Spec (arXiv 2505.15141).

One arm for the whole batch and step, because there is one reward a step: time is measured for the batch, not for its
sequences, and the longest draft makes everybody wait, so the rate of one sequence says little of its own arm. All
requests share the statistics, which outlive them: one alone is too short for the paper's wide confidence radius.

Rewards lie within 0..1. "rate", tokens per second and sequence over the largest seen so far, is the reward of the
paper's serving experiment; dividing by the largest is ours, the paper leaves it in tokens per second. "accepted",
accepted tokens over the longest arm, is the reward of its theory: the paper's (y - 1) / L, so the choices are the
paper's. It sees no cost, so it always ends at the longest arm where arms are lengths.

Does not know the batch size. Both take rewards to be the same all the time: when load or texts change, an arm that was
bad before is tried ever more rarely, and it may take thousands of steps to notice that it is good now.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from dsde.core.errors import InvalidInput
from dsde.policies.base import BatchView, FloatArray, Outcome, Plan, Policy
from dsde.policies.limits import LONGEST, check_choice, check_real, check_whole

Reward = Literal["rate", "accepted"]
DEFAULT_LENGTHS = tuple(range(9))
LARGEST_SEED = 2**63 - 1
LEAST_PLAYED = 1e-9


class BanditSpec(Policy):
    """Plays one arm a step and learns from what came of it: caps and short rooms are part of what an arm brings.

    `lengths` may be given as JSON text, `[0,2,4,8]`.
    """

    def __init__(self, lengths: str | Sequence[int], reward: Reward) -> None:
        self.lengths = _checked(lengths)
        check_choice("reward", reward, get_args(Reward))
        self.reward: Reward = reward
        self.num_rewards = 0
        self._arm: int | None = None
        self._unit = float(max(*self.lengths, 1)) if reward == "accepted" else 0.0
        """what a reward is divided by to lie within 0..1"""

    def plan(self, batch: BatchView) -> Plan:
        # With nobody there it must not play: no reward would follow.
        self._arm = self._choose() if batch.slots.size else None
        if self._arm is None:
            return Plan.wanting(0, batch)
        return Plan.wanting(self.lengths[self._arm], batch, **self._signals(self._arm))

    def observe(self, outcome: Outcome) -> None:
        arm, self._arm = self._arm, None
        if arm is None or outcome.slots.size == 0:
            return
        reward = float(outcome.accepted.mean())
        if self.reward == "rate":
            seconds = outcome.draft_s + outcome.verify_s
            if seconds <= 0:  # nobody measured
                return
            reward = (reward + 1) / seconds
            self._unit = max(self._unit, reward)
        self._learn(arm, reward)
        self.num_rewards += 1

    @abstractmethod
    def _choose(self) -> int:
        """The arm to play."""

    @abstractmethod
    def _learn(self, arm: int, reward: float) -> None:
        """This came of playing it. Not yet divided by the unit."""

    @abstractmethod
    def _signals(self, arm: int) -> dict[str, float]:
        """Why it was chosen."""


class UCBSpec(BanditSpec):
    """Plays the arm whose mean reward may be the highest, given how little is known of it.

    `delta`: the paper's bounds fail with at most this probability; its value is not known to us. `exploration` scales
    the confidence radius: 1 is the paper's, 0 always plays the best mean. The released code's bonus is the same for all
    arms, which amounts to 0. With `discount` below 1 (not the paper's) every step makes the earlier ones count less, so
    that arms not played for long are tried again.
    """

    def __init__(
        self,
        lengths: str | Sequence[int] = DEFAULT_LENGTHS,
        *,
        reward: Reward = "rate",
        delta: float = 0.1,
        exploration: float = 1.0,
        discount: float = 1.0,
    ) -> None:
        super().__init__(lengths, reward)
        check_real("delta", delta, 1e-9, 1)
        check_real("exploration", exploration, 0, 1000)
        check_real("discount", discount, 0.5, 1)
        self.delta, self.exploration, self.discount = float(delta), float(exploration), float(discount)
        self._num_played = np.zeros(len(self.lengths))
        self._sums = np.zeros(len(self.lengths))

    def _choose(self) -> int:
        if self.num_rewards < len(self.lengths):
            return self.num_rewards
        return int((self._means() + self._radii()).argmax())

    def _learn(self, arm: int, reward: float) -> None:
        self._num_played *= self.discount
        self._sums *= self.discount
        self._num_played[arm] += 1
        self._sums[arm] += reward

    def _signals(self, arm: int) -> dict[str, float]:
        if self.num_rewards < len(self.lengths):
            return {"mean_reward": np.nan, "radius": np.nan}
        return {"mean_reward": float(self._means()[arm]), "radius": float(self._radii()[arm])}

    def _means(self) -> FloatArray:
        means: FloatArray = self._sums / (np.maximum(self._num_played, LEAST_PLAYED) * self._unit)
        return means

    def _radii(self) -> FloatArray:
        """Half the range of a reward, times the root of (1 + n) / n^2 * (1 + 2 ln(K t^2 sqrt(1 + n) / delta))."""
        # Discounted, an arm may come close to not having been played at all.
        n, num_arms = np.maximum(self._num_played, LEAST_PLAYED), len(self.lengths)
        t = self._num_played.sum() + 1
        logarithms = np.log(num_arms * t**2 * np.sqrt(1 + n) / self.delta)
        radii: FloatArray = self.exploration / 2 * np.sqrt((1 + n) / n**2 * (1 + 2 * logarithms))
        return radii


class EXP3Spec(BanditSpec):
    """Draws the arm with a probability that falls exponentially in its losses, each divided by its own probability."""

    def __init__(
        self, lengths: str | Sequence[int] = DEFAULT_LENGTHS, *, reward: Reward = "rate", seed: int = 0
    ) -> None:
        super().__init__(lengths, reward)
        check_whole("seed", seed, 0, LARGEST_SEED)
        self.seed = seed
        self._rng = np.random.default_rng(seed)
        self._losses = np.zeros(len(self.lengths))
        self._probability = 1.0
        """of the arm drawn last"""

    def _choose(self) -> int:
        probabilities = self.probabilities()
        sums = np.add.accumulate(probabilities)
        # Of the arms with the largest sum the first: rounding must not draw one that has no probability left.
        last = int(sums.searchsorted(sums[-1]))
        arm = min(int(sums.searchsorted(self._rng.random() * sums[-1], side="right")), last)
        self._probability = float(probabilities[arm])
        return arm

    def _learn(self, arm: int, reward: float) -> None:
        self._losses[arm] += (1 - reward / self._unit) / self._probability

    def _signals(self, arm: int) -> dict[str, float]:
        return {"probability": self._probability}

    def probabilities(self) -> FloatArray:
        """Of every arm, at the learning rate sqrt(ln K / (t K))."""
        num_arms = len(self.lengths)
        rate = np.sqrt(np.log(num_arms) / ((self.num_rewards + 1) * num_arms))
        weights = np.exp(-rate * (self._losses - self._losses.min()))
        probabilities: FloatArray = weights / weights.sum()
        return probabilities


def _checked(lengths: str | Sequence[int]) -> tuple[int, ...]:
    given: object = lengths
    if isinstance(lengths, str):
        try:
            given = json.loads(lengths)
        except (ValueError, RecursionError):
            given = None
    if not isinstance(given, list | tuple | range) or not given:
        raise InvalidInput(f"lengths must be a list as in [0,2,4,8], not {lengths!r}")
    for length in given:
        check_whole("a length", length, 0, LONGEST)
    if len(set(given)) < len(given):
        raise InvalidInput(f"lengths must differ from each other, not {lengths!r}")
    return tuple(given)
