"""`auto` in the plugin while requests come together, end one by one and come again, in virtual time."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from vllm_virtual import MEAN_TOKENS, PAIRS, TOKENS, Costs, VirtualVLLM, tokens_per_s

SEEDS = range(6)


@cache
def speeds(policy: str, pair: str, acceptance: float) -> dict[int, float]:
    # How fast a fixed length is depends on luck alone, and hardly.
    seeds = SEEDS if policy == "auto" else SEEDS[:2]
    engines = [VirtualVLLM(policy, PAIRS[pair], acceptance, 0.05, seed) for seed in seeds]
    return {batch: float(np.mean([tokens_per_s(one, batch, 3) for one in engines])) for batch in TOKENS}


@pytest.mark.parametrize(("pair", "acceptance"), [("8b", 0.8), ("qwen", 0.8), ("qwen", 0.5)])
def test_auto_is_about_as_fast_as_the_best_of_all_fixed_lengths(pair: str, acceptance: float) -> None:
    """Every batch size is new once, and most of what is measured is of a load that is about to change."""
    auto = speeds("auto", pair, acceptance)
    fixed = [speeds(policy, pair, acceptance) for policy in ("off", *(f"static:{length}" for length in range(1, 5)))]
    # A single request's few tokens would want more seeds.
    ratios = {batch: auto[batch] / max(one[batch] for one in fixed) for batch in TOKENS if batch > 1}
    assert min(ratios.values()) > 0.92, ratios
    assert np.mean(list(ratios.values())) > 0.95, ratios


@pytest.mark.parametrize("acceptance", [0.3, 0.8])
def test_auto_is_about_as_fast_as_the_best_where_requests_come_and_go(acceptance: float) -> None:
    """Every other step reads a prompt, in pieces, and drafts in it cost next to nothing."""
    speeds = {}
    for policy in ("off", "static:1", "static:2", "static:3", "auto"):
        engines = [VirtualVLLM(policy, PAIRS["qwen"], acceptance, 0.05, seed) for seed in range(3)]
        for engine in engines:
            engine.serve(64, MEAN_TOKENS, 400)
        speeds[policy] = np.mean([engine.serve(64, MEAN_TOKENS, 800) for engine in engines])
    assert (max(speeds, key=lambda policy: speeds[policy] * (policy != "auto")) == "off") == (acceptance == 0.3)
    assert speeds["auto"] > 0.94 * max(speeds.values())


@pytest.mark.parametrize("pair", PAIRS)
def test_a_machine_that_meets_nothing_but_large_batches_is_no_slower_than_without(pair: str) -> None:
    """Smaller ones are there while requests come and go, and are never measured but beside prompts."""
    speeds = []
    for policy in ("off", "auto"):
        engines = [VirtualVLLM(policy, PAIRS[pair], 0.65, 0.05, seed) for seed in SEEDS]
        for engine in engines:
            engine.generate(256, TOKENS[256])
        seconds = [sum(engine.generate(256, TOKENS[256]) for _ in range(4)) for engine in engines]
        speeds.append(1 / np.mean(seconds))
    assert speeds[1] / speeds[0] > 0.97


def test_steps_that_are_slow_behind_drafts_are_not_what_drafts_are_compared_with() -> None:
    """Where the host is the slower one, it still has to do what drafts left it; so did every check of what a step takes
    without them."""
    speeds = []
    for policy in ("off", "auto"):
        engines = [VirtualVLLM(policy, PAIRS["qwen"], 0.75, 0.05, seed, slow_return=1.5) for seed in range(6)]
        speeds.append(np.mean([[tokens_per_s(one, batch, 3) for batch in (1, 8)][1] for one in engines]))
    assert speeds[1] / speeds[0] > 0.94


def test_prompts_are_read_when_they_come() -> None:
    """Not afterwards: who decides anew for every batch misses what the draft would have read in passing."""
    engine = VirtualVLLM("auto", PAIRS["8b"], 0.8)
    for batch in (8, 64):
        engine.generate(batch, 150)
    before = engine.num_caught_up
    for _ in range(4):
        engine.generate(64, 60)
    assert engine.num_caught_up - before < 4 * 64 * 10


def test_a_draft_that_missed_every_prompt_is_not_made_to_read_them_for_a_look() -> None:
    """At 256 requests that would take as long as many steps without drafts."""
    engine = VirtualVLLM("auto", PAIRS["qwen"], 0.5)
    for batch in (64, 256):
        engine.generate(batch, 60)
    before = engine.num_caught_up
    for _ in range(3):
        engine.generate(256, 60)
    assert engine.num_caught_up - before < 3 * 256 * 64 / 8


def test_a_draft_that_is_much_too_slow_is_hardly_ever_looked_at() -> None:
    """A look takes as long as a whole batch of requests here."""
    costs = Costs(
        verify=([1, 64, 1024], [3.5, 3.6, 60.0]),
        context=([1, 256], [0.0, 0.0]),
        ragged=0.0,
        prompt=(1.0, 0.05),
        start=0.0,
        draft=(100.0, 0.5),
        catch_up=(100.0, 1.0),
        resume=0.0,
    )
    auto, off = (VirtualVLLM(policy, costs, 0.0, 0.05, is_plain=True) for policy in ("auto", "off"))
    for engine in (auto, off):
        engine.generate(64, 200)
    seconds = [sum(engine.generate(64, 200) for _ in range(8)) for engine in (off, auto)]
    assert seconds[0] / seconds[1] > 0.97


def test_all_requests_end_and_nothing_is_left() -> None:
    """Nobody drafts, so all of them are behind."""
    engine = VirtualVLLM("off", PAIRS["8b"], 0.8)
    engine.generate(20, 30)
    engine.generate(3, 5)
    assert len(engine.controller.backlog) == 3
    assert engine.controller.slots.of("another") < 4


def test_what_drafts_are_compared_with_is_measured_again() -> None:
    """As seen on a GPU: the first steps of an engine take half as long again, and they are those without drafts. Beside
    them drafts seem to save a fifth, and cost a tenth; whoever drafts on would never know."""
    off, auto = (VirtualVLLM(policy, PAIRS["qwen"], 0.65, 0.02, slow_start=1.5) for policy in ("off", "auto"))
    for engine in (off, auto):
        engine.generate(64, 128)
    seconds = [sum(engine.generate(64, 128) for _ in range(8)) for engine in (off, auto)]
    assert seconds[0] / seconds[1] > 0.96
