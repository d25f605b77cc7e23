"""A rehearsal before the first request: shapes are met that requests meet later, and nothing else is left of it."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from dsde import SamplingParams
from dsde.core.sequence import Sequence
from dsde.engine import rehearsal
from dsde.engine.block_pool import ROOT
from dsde.engine.engine import Engine
from dsde.engine.metrics import EngineMetrics
from dsde.engine.rehearsal import ACTS, Act, Script, rehearse
from dsde.policies import BatchView, Need, Outcome, Plan, Policy
from test_device_engine import GREEDY, Ruled, Way, model, random_prompt, tokens_of, way
from test_solo import executor_of, rule_of_many_lengths
from tiny import complete, make_engine

__all__ = ["way"]

SEEDED = SamplingParams(temperature=0.9, top_p=0.9, max_tokens=24, seed=3)
UNSEEDED = SamplingParams(temperature=0.9, max_tokens=24)


class Ragged(Policy):
    """Of every sequence another length, and of every step."""

    needs = Need.DRAFT_SIGNALS

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)
        self.was_timed: list[bool] = []

    def plan(self, batch: BatchView) -> Plan:
        return Plan.wanting(self.rng.integers(4, 16, batch.slots.size), batch)

    def observe(self, outcome: Outcome) -> None:
        self.was_timed.append(outcome.verify_s > 0)


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(count)
    return [random_prompt(rng, 10, 40) for _ in range(count)]


def rehearsed_graphs(way: Way, policy: str | Policy) -> Engine:
    """An engine that has rehearsed greedy requests, where there are graphs."""
    if way.name == "plain":
        pytest.skip("without graphs no pass is slower or larger than another")
    way.monkeypatch.setattr(rehearsal, "WAYS", rehearsal.WAYS[:1])
    engine = way.engine("close", policy, max_num_seqs=8)
    rehearse(engine)
    return engine


def num_cold(engine: Engine, count: int, params: SamplingParams) -> int:
    """Slow steps of so many requests."""
    before = engine.metrics.num_cold_steps
    complete(engine, prompts(count), params)
    return engine.metrics.num_cold_steps - before


@pytest.mark.parametrize(("draft", "policy"), [("close", "auto"), ("close", "static:4"), ("none", "off")])
def test_texts_are_as_without(way: Way, draft: str, policy: str) -> None:
    if way.name == "plain" and draft != "none":
        pytest.skip("as with graphs, and takes its time")
    fresh, rehearsed = (way.engine(draft, policy, max_num_seqs=4) for _ in range(2))
    rehearse(rehearsed)
    for params in (UNSEEDED, SEEDED, GREEDY):
        if policy == "auto" and params is UNSEEDED:
            continue  # without a seed a text depends on its drafts, and these on what steps took
        assert tokens_of(complete(rehearsed, prompts(6), params)) == tokens_of(complete(fresh, prompts(6), params))


def test_nothing_else_is_left(way: Way) -> None:
    engine = way.engine("close", "auto", max_num_seqs=2)
    policy, planner, num_blocks = engine.policy, engine.planner, engine.scheduler.pool.num_free
    engine.num_calm = 7
    rehearse(engine)
    assert engine.num_calm == 7
    assert engine.policy is policy
    assert engine.planner is planner
    assert planner.metrics is engine.metrics
    assert engine.metrics == EngineMetrics()
    assert not engine.requests
    assert not engine.has_work
    assert engine.scheduler.pool.num_free == num_blocks
    assert not engine.scheduler.pool._keys, "the prefix cache knows made-up prompts"
    assert policy.cost.num_verified(1) == 0  # type: ignore[attr-defined]
    foresight = engine.executor.drafter.foresight  # type: ignore[attr-defined]
    assert not foresight.is_sure_of_end(0, depth=0)
    assert not foresight.is_sure_of_end(0, depth=1)


def test_fewer_steps_are_slow_afterwards(way: Way) -> None:
    rehearsed, fresh = rehearsed_graphs(way, "static:2"), way.engine("close", "static:2", max_num_seqs=8)
    for count in (1, 2, 4):
        assert num_cold(rehearsed, count, GREEDY) < num_cold(fresh, count, GREEDY) / 2


def test_hardly_any_step_is_slow_whatever_is_drafted(way: Way) -> None:
    """Larger graphs do for what was not rehearsed, but nobody is told what these take; texts are the same."""
    policy = Ragged()
    engine = rehearsed_graphs(way, policy)
    assert num_cold(engine, 8, GREEDY) == 0
    assert {True, False} == set(policy.was_timed)
    expected = tokens_of(complete(way.engine("close", "off", max_num_seqs=8), prompts(8), GREEDY))
    assert tokens_of(complete(engine, prompts(8), GREEDY)) == expected


def test_no_draft_that_a_rule_ends_is_slow_or_padded(way: Way) -> None:
    """Wherever it does, with the host; so that policies are told what every step took."""
    policy = Ruled(rule_of_many_lengths, length=7)
    engine = rehearsed_graphs(way, policy)
    executor_of(engine).makes_solos = False
    assert num_cold(engine, 8, replace(GREEDY, max_tokens=40, ignore_eos=True)) == 0
    drafts = [outcome for outcome in policy.outcomes if outcome.drafted.any()]
    assert len({int(outcome.drafted.sum()) for outcome in drafts}) > 5
    # The last few may be fewer than their drafts began with.
    assert all(outcome.verify_s > 0 for outcome in drafts if len(outcome.drafted) == 8)


@pytest.mark.parametrize(("num_seqs", "max_len"), [(45, 4), (100, 20), (3, 64)])
def test_nothing_that_was_rehearsed_is_given_up(way: Way, num_seqs: int, max_len: int) -> None:
    """However short texts may be, and whoever could draft in it."""
    engine = way.engine("target", Ruled(rule_of_many_lengths), max_num_seqs=num_seqs, max_model_len=max_len)
    executor = executor_of(engine)
    executor.rehearse(num_seqs)
    before = executor._num_changes
    executor.rehearse(num_seqs)
    assert executor._num_changes == before
    if way.name == "graphs":
        num_captured = executor.passes.num_captured
        executor.rehearse(num_seqs)
        assert executor.passes.num_captured == num_captured
        assert len(executor.passes._passes) > 3


def test_no_step_that_the_device_makes_alone_is_slow(way: Way) -> None:
    engine = rehearsed_graphs(way, Ruled(rule_of_many_lengths, length=7))
    executor = executor_of(engine)
    num_programs = len(executor._solo_settings)
    for count in (1, 2, 3, 4):
        before = executor.num_solos
        assert num_cold(engine, count, replace(GREEDY, max_tokens=60, ignore_eos=True)) == 0
        assert executor.num_solos > before
    assert len(executor._solo_settings) == num_programs


def test_nobody_is_missing(way: Way) -> None:
    """In any act, also where every draft stands, and requests are over soon."""
    engine = way.engine("target", "auto", max_num_seqs=4)
    present: dict[tuple[Act, int], int] = {}
    plan, gather, size = Script.plan, rehearsal._gather, 0

    def plan_and_count(script: Script, batch: BatchView) -> Plan:
        if not batch.num_prompt_tokens:
            key = script.act, size
            present[key] = min(present.get(key, size), batch.num_sequences)
        return plan(script, batch)

    def gather_so_many(engine: Engine, script: Script, number: int, params: SamplingParams) -> list[Sequence]:
        nonlocal size
        size = number
        return gather(engine, script, number, params)

    way.monkeypatch.setattr(Script, "plan", plan_and_count)
    way.monkeypatch.setattr(rehearsal, "_gather", gather_so_many)
    way.monkeypatch.setattr(rehearsal, "WAYS", rehearsal.WAYS[:1])
    rehearse(engine)
    acts = {act for act, _ in present}
    assert acts >= set(ACTS)
    assert all(number == wanted for (act, wanted), number in present.items() if act in ACTS[1:] and wanted in (1, 2, 4))


class Resting(Policy):
    """Drafts two tokens twice, then rests for long."""

    needs = Need.DRAFT_SIGNALS

    def __init__(self) -> None:
        self.num_plans = 0
        self.was_timed: list[bool] = []
        """of steps without drafts"""

    def plan(self, batch: BatchView) -> Plan:
        self.num_plans += 1
        rests = self.num_plans % 3 == 0
        return replace(Plan.wanting(0 if rests else 2, batch), num_resting=20 * rests)

    def observe(self, outcome: Outcome) -> None:
        if not outcome.drafted.any():
            self.was_timed.append(outcome.verify_s > 0)


def test_what_a_rest_takes_is_told_whatever_was_read_ahead_before_it(way: Way) -> None:
    policy = Resting()
    engine = rehearsed_graphs(way, policy)
    complete(engine, prompts(3), SamplingParams(temperature=0, max_tokens=150, ignore_eos=True))
    assert engine.executor.drafter.passes.num_padded, "three read ahead by the graph of four"  # type: ignore[attr-defined]
    assert len(policy.was_timed) > 100
    assert all(policy.was_timed)


def test_a_short_context_is_no_obstacle(way: Way) -> None:
    engine = way.engine("short context", "auto", max_num_seqs=2, max_model_len=24)
    rehearse(engine)
    assert len(complete(engine, [[1, 2, 3]], GREEDY)) == 1


def test_little_memory_is_no_obstacle(way: Way) -> None:
    engine = way.engine("close", "auto", kv_cache_bytes=1 << 16)
    rehearse(engine)
    assert len(complete(engine, [[1, 2, 3]], GREEDY)) == 1


def test_there_is_none_without_a_device() -> None:
    engine = make_engine(model("target", torch.device("cpu")), model("close", torch.device("cpu")), "auto")
    assert not engine.executor.is_asynchronous
    rehearse(engine)
    assert engine.scheduler.pool._next_node == ROOT + 1, "made-up prompts were read"


def test_one_that_fails_is_no_reason_not_to_serve(capsys: pytest.CaptureFixture[str]) -> None:
    serve = pytest.importorskip("dsde.cli.serve")

    class Failing:
        def load(self) -> Failing:
            return self

        def warm_up(self) -> None:
            raise RuntimeError("no memory")

    choice = Failing()
    assert serve._load(choice, {}, True, serve.Console(stderr=True)) is choice
    assert "no memory" in capsys.readouterr().err
