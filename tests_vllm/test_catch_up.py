"""The draft's KV cache after pauses: with a draft that equals its target, every drafted token must stand."""

from __future__ import annotations

import random

import numpy as np
import pytest

from asynchronous import force_asynchronous
from conftest import Engine, MakeEngine, asking, speculation
from dsde.policies import BatchView, Outcome, Plan, Policy


class Scripted(Policy):
    """Pauses of seven steps, then four in which each slot drafts its own length, some none."""

    def __init__(self) -> None:
        self.num_plans = 0
        self.outcomes: list[Outcome] = []

    def plan(self, batch: BatchView) -> Plan:
        self.num_plans += 1
        is_on = self.num_plans % 11 in (8, 9, 10, 0)
        return Plan.wanting(np.where(batch.slots % 3 == 0, 0, 2 + batch.slots % 3) * is_on, batch)

    def observe(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)


def run(engine: Engine) -> Scripted:
    from vllm import SamplingParams

    controller = engine.controller
    controller.policy = policy = Scripted()
    rng = random.Random(0)
    prompts = [[rng.randrange(10, 500) for _ in range(rng.choice([2, 3, 17, 40, 90]))] for _ in range(12)]
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    first = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    # The second time prompts begin within the prefix cache, on blocks that the draft may not have read.
    engine.generate([{"prompt_token_ids": [*prompt, 7, 8]} for prompt in prompts], params)
    assert all(len(tokens) == 60 for tokens in first)
    assert len(controller.slots) == len(controller.backlog) == len(controller._steps) == 0
    return policy


def check(policy: Scripted, engine: Engine) -> None:
    drafted = sum(int(outcome.drafted.sum()) for outcome in policy.outcomes)
    accepted = sum(int(outcome.accepted.sum()) for outcome in policy.outcomes)
    assert drafted > 200
    assert accepted == drafted
    assert engine.controller.meter["num_catch_up_tokens"] > drafted
    assert engine.controller.meter["num_off_steps"] > 20
    lengths = [set(outcome.drafted.tolist()) for outcome in policy.outcomes]
    assert any(len(found) >= 3 and 0 in found for found in lengths), "no ragged batch was seen"


@pytest.mark.parametrize("budget", [2048, 40])
def test_all_stand_after_pauses(make_engine: MakeEngine, same_pair: tuple[str, str], budget: int) -> None:
    target, draft = same_pair
    engine = make_engine(
        model=target,
        speculative_config=speculation(draft, 5),
        additional_config=asking("static:1"),
        enable_prefix_caching=True,
    )
    engine.controller.backlog.budget = budget
    check(run(engine), engine)


def test_also_with_asynchronous_scheduling(
    make_engine: MakeEngine, same_pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    force_asynchronous(monkeypatch)
    target, draft = same_pair
    engine = make_engine(
        model=target,
        speculative_config=speculation(draft, 5),
        additional_config=asking("static:1"),
        enable_prefix_caching=True,
        async_scheduling=True,
    )
    assert engine.controller.limits.num_in_flight == 2
    check(run(engine), engine)


def test_without_catching_up_they_fall(
    make_engine: MakeEngine, same_pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That the tests above can fail."""
    from dsde.integrations.vllm.running import RunnerAdapter

    monkeypatch.setattr(RunnerAdapter, "_catch_up", lambda *_: None)
    target, draft = same_pair
    engine = make_engine(model=target, speculative_config=speculation(draft, 5), additional_config=asking("static:1"))
    outcomes = run(engine).outcomes
    drafted, accepted = (sum(int(getattr(one, name).sum()) for one in outcomes) for name in ("drafted", "accepted"))
    assert accepted < 0.9 * drafted
