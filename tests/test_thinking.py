"""What `auto` does about its own thinking where the machine waits for it: a CPU, on which nobody calls `settle`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dsde.policies import Auto, BatchView, Outcome, Plan, Policy
from dsde.policies.advice import Advice
from dsde.policies.auto import MOST_REPEATS
from dsde.policies.base import Stage
from dsde.policies.thinking import LEAST, SHARE, Thinking

STEP_S = 30e-3


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Slow(Auto):
    """Takes its time to think of a plan."""

    def __init__(self, thought_s: float) -> None:
        super().__init__()
        clock = Clock()
        self.thinking = Thinking(clock)
        self.num_thoughts = 0
        self.thought_s = thought_s
        think = self.advisor.advise

        def slowly(batch: BatchView) -> Advice:
            self.num_thoughts += 1
            clock.now_s += self.thought_s
            return think(batch)

        self.advisor.advise = slowly  # type: ignore[method-assign]


def step(policy: Policy, rng: np.random.Generator, slots: np.ndarray, rate: float = 0.9, room: int = 100) -> Plan:
    """Of a machine where a draft pass takes a tenth of a verification."""
    return _step(policy, rng, BatchView(slots, np.full(slots.size, room), np.zeros(slots.size), slots.size), rate)[0]


def _step(policy: Policy, rng: np.random.Generator, batch: BatchView, rate: float) -> tuple[Plan, np.ndarray]:
    """[batch] how many tokens each got, too."""
    slots, plan = batch.slots, policy.plan(batch)
    stands = rng.random((slots.size, 20)) < rate
    accepted = np.minimum(np.minimum.accumulate(stands, axis=1).sum(axis=1), plan.lengths)
    num_drafted, num_passes = int(plan.lengths.sum()), int(plan.lengths.max())
    seen = Outcome(
        slots=slots,
        drafted=plan.lengths,
        accepted=accepted,
        klds=np.empty(0),
        temperatures=np.zeros(slots.size),
        draft_signals=rng.random((num_drafted, 3)),
        draft_s=0.1 * STEP_S * num_passes,
        verify_s=STEP_S,
        step_s=STEP_S * (1 + 0.1 * num_passes),
        num_decoding=slots.size,
        num_drafted=num_drafted,
        num_draft_passes=num_passes,
    )
    policy.observe(replace(seen, is_ruled=plan.stop is not None))
    return plan, accepted + 1


@pytest.mark.parametrize("share", [0.0, 0.5 * SHARE, 10 * SHARE])
def test_a_plan_serves_for_several_steps_where_thinking_is_dear(share: float) -> None:
    policy, rng = Slow(share * STEP_S), np.random.default_rng(0)
    slots = np.arange(2)
    for _ in range(60):
        plan = step(policy, rng, slots)
    assert plan.lengths.all(), "drafts pay here"
    before = policy.num_thoughts
    for _ in range(60):
        step(policy, rng, slots)
    assert policy.num_thoughts - before == 60 // (1 + MOST_REPEATS * (share > SHARE))
    # And everything is learnt in the end, but for what the newest plan led to.
    assert len(policy._unlearnt) <= 1 + MOST_REPEATS


def test_for_another_batch_there_is_another_plan_by_all_that_was_seen() -> None:
    policy, rng = Slow(STEP_S), np.random.default_rng(0)
    for _ in range(60):
        step(policy, rng, np.arange(2))
    while not policy._num_put_off:
        step(policy, rng, np.arange(2))
    before, learnt = policy.num_thoughts, []
    learn = policy.advisor.learn
    policy.advisor.learn = lambda *told: (learnt.append(told), learn(*told))[1]  # type: ignore[method-assign,func-returns-value]
    num_unlearnt = len(policy._unlearnt)
    step(policy, rng, np.arange(3))
    assert policy.num_thoughts == before + 1
    assert len(learnt) == num_unlearnt


def test_an_interrupted_repeat_is_one_thought() -> None:
    """Sizes of batch by turns, so that no plan is ever repeated."""
    policy, rng = Slow(STEP_S), np.random.default_rng(0)
    for thought_s in (STEP_S, 0.5 * STEP_S):
        policy.thought_s = thought_s
        before = policy.num_thoughts
        for number in range(100):
            step(policy, rng, np.arange(2 + number % 2))
        assert policy.num_thoughts - before == 100
        assert policy.thinking._thought_s == pytest.approx(thought_s, rel=0.01)


class Stopped(Stage):
    """Nobody drafts in these steps."""

    def __init__(self, numbers: set[int]) -> None:
        self.numbers = numbers
        self.num_plans = 0

    def apply(self, plan: Plan, batch: BatchView) -> None:
        self.num_plans += 1
        if self.num_plans in self.numbers:
            plan.lengths[:] = 0
            plan.signals["stopped"] = np.ones(batch.slots.size)


@pytest.mark.parametrize("thought_s", [0.0, STEP_S])
def test_what_a_stage_made_of_a_plan_is_not_repeated(thought_s: float) -> None:
    stopped = {70, 81, 92, 103}
    policy, rng = Slow(thought_s) | Stopped(stopped), np.random.default_rng(0)
    plans = [step(policy, rng, np.arange(2)) for _ in range(120)]
    without = {number for number, plan in enumerate(plans, 1) if number > 60 and not plan.lengths.any()}
    assert stopped <= without
    assert not without & {number + later for number in stopped for later in (1, 2)}
    assert {number for number, plan in enumerate(plans, 1) if "stopped" in plan.signals} == stopped
    assert {number for number, plan in enumerate(plans, 1) if number > 60 and plan.num_lowered} == stopped


@pytest.mark.parametrize("thought_s", [0.0, STEP_S])
@pytest.mark.parametrize("num_tokens", [20, 100])
def test_no_token_counts_twice_when_it_is_learnt_of_late(thought_s: float, num_tokens: int) -> None:
    """Of requests that all have as many: how long they last would be overrated."""
    policy, rng, slots = Slow(thought_s), np.random.default_rng(0), np.arange(2)
    left, means = np.full(2, num_tokens), []
    for _ in range(600):
        batch = BatchView(slots, left - 1, np.zeros(2), 2, num_left=left.copy(), num_missed=np.zeros(2, np.int64))
        left -= _step(policy, rng, batch, 0.9)[1]
        gone = slots[left <= 0]
        if gone.size:
            policy.forget(gone)
            left[gone] = num_tokens
        means.append(policy.advisor.lifespan._mean)
    assert set(means[300:]) == {num_tokens}


def test_drafts_that_no_longer_pay_are_stopped_nearly_as_soon() -> None:
    drafted = []
    for thought_s in (0.0, STEP_S):
        policy, rng = Slow(thought_s), np.random.default_rng(0)
        for _ in range(60):
            step(policy, rng, np.arange(8))
        lengths = [int(step(policy, rng, np.arange(8), rate=0.0).lengths.sum()) for _ in range(40)]
        drafted.append(lengths[: lengths.index(0)])
    quickly, slowly = drafted
    assert len(slowly) <= len(quickly) + MOST_REPEATS


def test_nothing_is_said_before_there_were_a_few_thoughts_and_steps() -> None:
    clock = Clock()
    thinking = Thinking(clock)
    for number in range(2 * LEAST):
        assert thinking.num_repeats(5) == (3 if number >= LEAST else 0)
        thinking.count(STEP_S)
        thinking.count(0.0)  # nobody measured
        for _ in range(2):
            with thinking:
                clock.now_s += 1.75 * SHARE * STEP_S
            clock.now_s += STEP_S
        thinking.end()
    assert thinking.num_repeats(2) == 2
