"""How long nobody looks again, and what a look costs by then."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import ArrayLike

from dsde.policies.base import BatchView, FloatArray
from dsde.policies.cost import CostModel
from dsde.policies.probe import MOST_STEPS, SHARE, Probe

PLAIN_S = 0.008


class Reading(CostModel):
    """Everything is known, and what a draft has missed takes its time by the token."""

    def __init__(self, token_s: float) -> None:
        super().__init__()
        self.token_s = token_s

    def draft_s(self, batch_sizes: ArrayLike) -> FloatArray:
        return np.full_like(np.asarray(batch_sizes, np.float64), 0.001)

    def verify_s(self, tokens: ArrayLike) -> FloatArray:
        return np.full_like(np.asarray(tokens, np.float64), PLAIN_S)

    def catch_up_s(self, tokens: ArrayLike) -> FloatArray:
        return self.token_s * np.asarray(tokens, np.float64)


def batch(num_missed: int) -> BatchView:
    return BatchView(np.arange(64), np.full(64, 100), np.zeros(64), 64, num_missed=np.full(64, num_missed))


def rest(cost: Reading, asks_always: bool = False) -> list[int]:
    """Steps until each time that somebody asks, the last time being that of a look. Asked is when the steps that were
    announced are over, or always."""
    probe, total, asked = Probe(cost, max_length=8), 0, []
    while True:
        now = batch(100 + total)
        cost.see(now)
        asked.append(total)
        if probe.begin(now):
            return asked
        for _ in range(1 if asks_always else 1 + probe.num_steps_left(PLAIN_S)):
            probe.save(PLAIN_S)
            total += 1
        assert total < 10_000, "nobody ever looks"


@pytest.mark.parametrize("share", [0.0, 0.05, 0.2, 0.3, 0.7, 1.5])
def test_a_rest_is_announced_up_to_the_next_look_however_much_dearer_that_is_by_then(share: float) -> None:
    """A token more of what the draft missed takes so much of what a step sets aside. Whoever asks in between keeps a
    device waiting."""
    asked = rest(Reading(share * SHARE * PLAIN_S))
    assert len(asked) == 2
    assert asked[-1] == pytest.approx(rest(Reading(share * SHARE * PLAIN_S), asks_always=True)[-1], abs=2)
    assert asked[-1] <= MOST_STEPS / SHARE + 2, "no look is taken to cost more"
