"""How many tokens requests are expected to have yet."""

from __future__ import annotations

import numpy as np
import pytest

from dsde.policies import BatchView, Outcome
from dsde.policies.lifespan import MEMORY, Lifespan


def emitted(lifespan: Lifespan, slots: list[int], accepted: list[int], num_steps: int = 1) -> None:
    places = np.array(slots)
    lifespan.see(places)
    lifespan.observe(
        Outcome(places, np.array(accepted), np.array(accepted), np.empty(0), np.zeros(len(slots)), num_steps=num_steps)
    )


def num_left(lifespan: Lifespan, *mosts: int) -> list[float]:
    count = len(mosts)
    batch = BatchView(np.arange(count), np.full(count, 3), np.zeros(count), count, num_left=np.array(mosts))
    return lifespan.num_left(batch).tolist()


def test_before_any_has_ended_there_is_only_what_they_may_have() -> None:
    lifespan = Lifespan()
    emitted(lifespan, [0, 1], [3, 0])
    assert num_left(lifespan, 10, 1) == [10, 1]


def test_the_mean_of_those_that_ended_and_no_more_than_they_may_have() -> None:
    lifespan = Lifespan()
    emitted(lifespan, [0, 40], [3, 0])
    emitted(lifespan, [0, 40], [0, 0], num_steps=8)
    lifespan.forget(np.array([0, 7]))  # nobody ever saw the other
    assert num_left(lifespan, 100, 5) == [12, 5]
    lifespan.forget(np.array([40]))
    assert num_left(lifespan, 100) == [(12 + 9) / 2]
    emitted(lifespan, [0], [0])  # another one, in a slot that was given back
    lifespan.forget(np.array([0]))
    assert num_left(lifespan, 100) == pytest.approx([(12 + 9 + 1) / 3])


def test_a_step_that_was_under_way_when_a_request_ended_is_not_another_one() -> None:
    lifespan = Lifespan()
    emitted(lifespan, [0], [19])
    lifespan.forget(np.array([0]))
    lifespan.observe(Outcome(np.array([0]), np.zeros(1, int), np.zeros(1, int), np.empty(0), np.zeros(1)))
    lifespan.forget(np.array([0]))
    assert num_left(lifespan, 100) == [20]
    emitted(lifespan, [0], [39])
    lifespan.forget(np.array([0]))
    assert num_left(lifespan, 100) == [30]


def test_where_nobody_knows_what_they_may_have_they_last_for_ever() -> None:
    lifespan = Lifespan()
    emitted(lifespan, [0], [0])
    lifespan.forget(np.array([0]))
    batch = BatchView(np.arange(2), np.full(2, 3), np.zeros(2), 2)
    assert lifespan.num_left(batch).tolist() == [np.inf, np.inf]


def test_others_than_before_count_before_long() -> None:
    lifespan = Lifespan()
    for count in [500] * 200 + [20] * int(2 * MEMORY):
        emitted(lifespan, [0], [count - 1])
        lifespan.forget(np.array([0]))
    assert num_left(lifespan, 1000)[0] < 100


def test_what_a_request_may_have_no_more_it_has_had() -> None:
    """Some engines tell of every third step only."""
    lifespan = Lifespan()
    for left in (100, 90, 70):
        assert lifespan.see(np.array([3]), np.array([left])).tolist() == [left == 100]
        lifespan.observe(Outcome(np.array([3]), np.zeros(1, int), np.zeros(1, int), np.empty(0), np.zeros(1)))
    lifespan.forget(np.array([3]))
    assert num_left(lifespan, 1000) == [31]
    assert lifespan.see(np.array([3]), np.array([50])).tolist() == [True]
    lifespan.see(np.array([3]), np.array([41]))
    lifespan.forget(np.array([3]))
    assert num_left(lifespan, 1000) == [20]


def num_coming(lifespan: Lifespan, ages: list[int], left: int = 100) -> float:
    """A request's tokens, and those of whoever comes after it, where requests that have ended had a hundred each."""
    lifespan.see(np.array([99]), np.array([100]))
    lifespan.see(np.array([99]), np.array([0]))
    lifespan.forget(np.array([99]))
    slots, count = np.arange(len(ages)), len(ages)
    lifespan.see(slots, np.full(count, 1000))
    lifespan.see(slots, 1000 - np.array(ages))
    batch = BatchView(slots, np.full(count, 3), np.zeros(count), count, num_left=np.full(count, left))
    return float(lifespan.num_coming(batch)[0])


def test_where_requests_come_one_by_one_others_follow() -> None:
    assert num_coming(Lifespan(), list(range(0, 96, 4))) > 300


@pytest.mark.parametrize(("age", "most"), [(60, 0), (5, 50)])
def test_where_all_came_together_they_end_before_others_come(age: int, most: float) -> None:
    """Of those who have just come nobody knows yet whether it is so."""
    assert 100 <= num_coming(Lifespan(), [age] * 24) <= 100 + most


def test_nobody_follows_any_more_when_none_has_come_of_late() -> None:
    assert num_coming(Lifespan(), list(range(30, 100, 5)), left=40) == 40


def test_of_those_who_come_nothing_is_known_before_any_has_ended() -> None:
    lifespan = Lifespan()
    batch = BatchView(np.arange(4), np.full(4, 3), np.zeros(4), 4, num_left=np.full(4, 70))
    lifespan.see(batch.slots, batch.num_left)
    assert lifespan.num_coming(batch).tolist() == [70] * 4
