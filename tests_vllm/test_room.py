"""Room for deep calls in vLLM's loops: how deep a program calls vLLM makes no difference with the plugin."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from typing import Any

import pytest

from conftest import Engine, MakeEngine, asking, speculation
from dsde.integrations.vllm import room

NUM_TOKENS = 40
DEPTHS = range(0, 140, 10)
"""more calls than a piece of Python's stack has room for"""
PROMPTS = [{"prompt_token_ids": list(range(10 + place, 30 + place))} for place in range(4)]


pytestmark = pytest.mark.skipif(not hasattr(resource, "RUSAGE_THREAD"), reason="counts as Linux does")


def descend(depth: int, function: Callable[[], Any]) -> Any:
    return descend(depth - 1, function) if depth else function()


def num_faults(engine: Engine, depth: int) -> float:
    """In a step: pages that were mapped and given back since."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    descend(depth, lambda: engine.generate(PROMPTS, params))
    return (resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before) / NUM_TOKENS


def test_steps_are_alike_at_any_depth(
    make_engine: MakeEngine, pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = pair
    engine = make_engine(model=target, speculative_config=speculation(draft, 4), additional_config=asking("off"))
    num_faults(engine, 0)
    with_room = [num_faults(engine, depth) for depth in DEPTHS]
    owner, name = room.find_owner(room.OFFLINE_LOOP), room.OFFLINE_LOOP.name
    assert owner is not None
    monkeypatch.setattr(owner, name, getattr(owner, name).__wrapped__)
    without = [num_faults(engine, depth) for depth in DEPTHS]
    assert max(without) > 5, "as if vLLM needed no room: is the plugin right to make some?"
    assert sorted(with_room)[-2] < 2, "a stray one may be the allocator's"


def test_loops_of_other_processes_have_room(make_engine: MakeEngine, pair: tuple[str, str]) -> None:
    target, draft = pair
    make_engine(model=target, speculative_config=speculation(draft, 4), additional_config=asking("off"))
    loaded = [loop for loop in room.LOOPS if loop.module in sys.modules]
    assert len(loaded) >= 2
    assert all(getattr(loop.holder(), loop.name).is_dsde for loop in loaded)
