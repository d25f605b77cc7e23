"""What steps of vLLM took, and when it is known."""

from __future__ import annotations

import pytest

from dsde.integrations.vllm import clock
from dsde.integrations.vllm.clock import NUM_HELD, Clocks


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    """A second passes with every mark."""
    now = iter(range(1000))
    monkeypatch.setattr(clock.time, "perf_counter", lambda: float(next(now)))
    return Clocks(is_cuda=False)


def test_a_step_lasts_from_the_end_of_the_one_before(clocks: Clocks) -> None:
    first = clocks.begin(1)
    first.mark()
    first.mark()
    second = clocks.begin(2)
    second.mark()
    assert (first.seconds(), first.seconds_since_last()) == ([1.0, 1.0], 0.0)
    assert (second.seconds(), second.seconds_since_last()) == ([1.0], 2.0)


def test_a_step_that_nobody_marked_has_no_end(clocks: Clocks) -> None:
    """Nor has one that failed before anything was sampled."""
    clocks.begin(1).mark()
    behind_a_gap = clocks.begin(3)
    behind_a_gap.mark()
    clocks.begin(4)
    behind_a_failure = clocks.begin(5)
    behind_a_failure.mark()
    assert behind_a_gap.seconds_since_last() == behind_a_failure.seconds_since_last() == 0.0


def test_clocks_are_used_again_in_turn(clocks: Clocks) -> None:
    for number in range(3 * NUM_HELD):
        step = clocks.begin(number)
        step.mark()
        assert step.seconds_since_last() == (2.0 if number else 0.0)
