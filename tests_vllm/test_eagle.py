"""EAGLE: a head that reads the target's hidden states, which nobody keeps, so that it runs in every step."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from asynchronous import force_asynchronous
from conftest import Engine, MakeEngine, speculation
from dsde.policies import BatchView, Outcome, Plan
from pairs import write_eagle
from test_catch_up import Scripted

LENGTH = 4


def requests() -> tuple[list[Any], list[Any]]:
    """Prompts of 1 to 90 tokens, answers of 1 to 60."""
    from vllm import SamplingParams

    rng = random.Random(0)
    prompts = [[rng.randrange(10, 500) for _ in range(num)] for num in (1, 2, 3, 17, 40, 90) * 2]
    lengths = (60, 1, 7, 60, 40, 60) * 2
    return (
        [{"prompt_token_ids": prompt} for prompt in prompts],
        [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in lengths],
    )


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return write_eagle(tmp_path_factory.mktemp("eagle"))


@pytest.fixture(scope="module")
def expected(make_engine: MakeEngine, pair: tuple[str, str]) -> list[list[int]]:
    return make_engine(model=pair[0]).generate(*requests())


def with_head(make_engine: MakeEngine, pair: tuple[str, str], **options: Any) -> Engine:
    """It obeys whatever policy the environment names, in its worker as well."""
    target, head = pair
    speculative = speculation(head, LENGTH, method="eagle")
    return make_engine(model=target, speculative_config=speculative, additional_config={"dsde": True}, **options)


@pytest.fixture(scope="module")
def engine(make_engine: MakeEngine, pair: tuple[str, str]) -> Engine:
    return with_head(make_engine, pair, enable_prefix_caching=True, block_size=32)


@pytest.mark.parametrize("policy", ["static:2", "dsde", "goodput", "auto"])
def test_same_output(engine: Engine, expected: list[list[int]], policy: str) -> None:
    engine.obey(policy)
    assert engine.generate(*requests()) == expected
    check_end(engine)


def check_end(engine: Engine) -> None:
    controller = engine.controller
    assert controller.meter["num_draft_tokens"] >= controller.meter["num_accepted_tokens"] > 0
    assert controller.meter["num_catch_up_tokens"] == 0
    assert len(controller.slots) == len(controller.backlog) == 0
    # With asynchronous scheduling the last step, which nobody waits for, is reported with the next request's first.
    assert len(controller._steps) < controller.limits.num_in_flight


def test_lengths_follow_the_heads_logits(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.obey("dsde")
    policy = engine.controller.policy
    plan, observe = policy.plan, policy.observe
    lengths: list[set[int]] = []
    """of each plan, of those who could draft any length"""
    klds: dict[bool, list[float]] = {True: [], False: []}
    """of first tokens, by whether they were accepted"""

    def note_plan(batch: BatchView) -> Plan:
        made = plan(batch)
        lengths.append(set(made.lengths[batch.rooms == LENGTH].tolist()))
        return made

    def note_outcome(outcome: Outcome) -> None:
        assert len(outcome.klds) == outcome.drafted.sum()
        has_any = outcome.drafted > 0
        first = (np.cumsum(outcome.drafted) - outcome.drafted)[has_any]
        for kld, num_accepted in zip(outcome.klds[first], outcome.accepted[has_any], strict=True):
            klds[bool(num_accepted)].append(kld)
        observe(outcome)

    monkeypatch.setattr(policy, "plan", note_plan)
    monkeypatch.setattr(policy, "observe", note_outcome)
    engine.generate(*requests())
    assert any(len(found) > 1 for found in lengths), "no ragged batch was seen"
    assert np.mean(klds[True]) < 0.5 * np.mean(klds[False])


def pause(engine: Engine, expected: list[list[int]]) -> float:
    """The share of drafts whose first token was accepted."""
    engine.controller.policy = policy = Scripted()
    assert engine.generate(*requests()) == expected
    check_end(engine)
    assert engine.controller.meter["num_off_steps"] > 20
    drafted = np.concatenate([outcome.drafted for outcome in policy.outcomes])
    accepted = np.concatenate([outcome.accepted for outcome in policy.outcomes])
    assert np.sum(drafted > 0) > 20
    return float(np.mean(accepted[drafted > 0] > 0))


def test_goes_on_after_pauses(engine: Engine, expected: list[list[int]]) -> None:
    engine.obey("static:4")
    assert pause(engine, expected) > 0.6


def test_it_would_not_if_the_head_were_left_out(engine: Engine, expected: list[list[int]]) -> None:
    """That the test above can fail."""
    runner = engine.core.model_executor.driver_worker.worker.model_runner
    runner.dsde_adapter.can_skip = True
    assert pause(engine, expected) < 0.4
    runner.dsde_adapter.can_skip = False
    engine.llm.reset_prefix_cache()


def test_also_with_asynchronous_scheduling(
    make_engine: MakeEngine, pair: tuple[str, str], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    force_asynchronous(monkeypatch)
    engine = with_head(make_engine, pair, async_scheduling=True)
    assert engine.controller.limits.num_in_flight == 2
    for policy in ("dsde", "auto", "static:4"):
        engine.obey(policy)
        assert engine.generate(*requests()) == expected
        check_end(engine)
    assert pause(engine, expected) > 0.6
