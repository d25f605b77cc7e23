"""How many tokens requests are expected to have yet."""

from __future__ import annotations

import numpy as np
import pytest

from dsde.policies import Outcome
from dsde.policies.lifespan import MEMORY, Lifespan


def emitted(slots: list[int], accepted: list[int], num_steps: int = 1) -> Outcome:
    count = len(slots)
    return Outcome(
        np.array(slots), np.array(accepted), np.array(accepted), np.empty(0), np.zeros(count), num_steps=num_steps
    )


def test_before_any_has_ended_there_is_only_the_room() -> None:
    lifespan = Lifespan()
    lifespan.observe(emitted([0, 1], [3, 0]))
    assert lifespan.num_left(np.array([9, 0])).tolist() == [10, 1]


def test_the_mean_of_those_that_ended_and_no_more_than_there_is_room_for() -> None:
    lifespan = Lifespan()
    lifespan.observe(emitted([0, 40], [3, 0]))
    lifespan.observe(emitted([0, 40], [0, 0], num_steps=8))
    lifespan.forget(np.array([0, 7]))  # nobody ever saw the other
    assert lifespan.num_left(np.array([99, 4])).tolist() == [12, 5]
    lifespan.forget(np.array([40]))
    assert lifespan.num_left(np.array([99])).tolist() == [(12 + 9) / 2]
    lifespan.observe(emitted([0], [0]))  # another one, in a slot that was given back
    lifespan.forget(np.array([0]))
    assert lifespan.num_left(np.array([99])) == pytest.approx((12 + 9 + 1) / 3)


def test_others_than_before_count_before_long() -> None:
    lifespan = Lifespan()
    for count in [500] * 200 + [20] * int(2 * MEMORY):
        lifespan.observe(emitted([0], [count - 1]))
        lifespan.forget(np.array([0]))
    assert lifespan.num_left(np.array([1000]))[0] < 100
