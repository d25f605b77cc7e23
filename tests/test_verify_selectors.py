"""vLLM's adaptive verification and AdaServe's selection, against their rules written out in plain Python."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from dsde import SamplingParams
from dsde.core.selection import VerifyBudget
from dsde.core.stops import Signal
from dsde.policies import AdaptiveVerify, AdaServe, BatchView, CostModel, Outcome, Pace, Plan, Static, make_policy
from dsde.simulation.costs import Costs, Line
from dsde.simulation.simulator import simulate
from dsde.simulation.streams import Iid
from test_lossless_distribution import DRAFTS, LENGTH, TOO_UNLIKELY, enumerate_outputs, p_value, sample_outputs
from tiny import complete, make_engine, run, tiny_model


def batch_of(size: int, num_prompt_tokens: int = 0, pace: Pace | None = None) -> BatchView:
    return BatchView(
        slots=np.arange(size),
        rooms=np.full(size, 1000),
        temperatures=np.ones(size),
        num_decoding=size,
        num_prompt_tokens=num_prompt_tokens,
        pace=pace,
    )


def plan_of(lengths: np.ndarray) -> Plan:
    return Plan(lengths.copy(), lengths.astype(float), np.ones(len(lengths), bool))


def scores_of(confidences: np.ndarray, lengths: np.ndarray) -> list[list[float]]:
    """How likely each draft is to stand up to each of its positions."""
    return [[float(np.prod(row[: j + 1])) for j in range(k)] for row, k in zip(confidences, lengths, strict=True)]


def verified(
    kept: np.ndarray, rng: np.random.Generator, draft_s: float, verify_s: float, budget: VerifyBudget
) -> Outcome:
    return Outcome(
        slots=np.arange(len(kept)),
        drafted=kept,
        accepted=rng.integers(0, kept + 1),
        klds=np.empty(0),
        temperatures=np.ones(len(kept)),
        draft_s=draft_s,
        verify_s=verify_s,
        num_decoding=len(kept),
        num_drafted=int(kept.sum()),
        num_cut=budget.num_cut,
        num_draft_passes=3,
    )


def test_adaptive_verification_takes_the_budget_that_paid_best_for_the_scores_before() -> None:
    rng = np.random.default_rng(0)
    stage = AdaptiveVerify()
    seen: list[float] = []
    budgets = set()
    for _ in range(300):
        size = int(rng.integers(1, 9))
        lengths, prompt = rng.integers(0, 4, size), int(rng.integers(0, 20))
        lengths[rng.integers(size)] = 3
        plan = plan_of(lengths)
        stage.apply(plan, batch_of(size, prompt))
        assert plan.budget is not None
        if seen:
            draft_s = 3 * float(stage.cost.draft_s(max(lengths.sum() / 3, 1)))
            goodputs = [
                (size + sum(sorted(seen, reverse=True)[:b])) / (draft_s + float(stage.cost.verify_s(size + prompt + b)))
                for b in range(len(seen) + 1)
            ]
            assert plan.budget.num_tokens == int(np.argmax(goodputs))
        else:
            assert plan.budget.num_tokens == lengths.sum()
        confidences = rng.random((size, 3)) ** 0.5
        kept = plan.budget.select(confidences, lengths, np.arange(size))
        assert kept.sum() == min(plan.budget.num_tokens, lengths.sum())
        budgets.add(plan.budget.num_tokens)
        seen = [score for row in scores_of(confidences, lengths) for score in row]
        stage.observe(verified(kept, rng, 3e-4, 1e-3 + 2e-4 * (size + int(kept.sum())), plan.budget))
    assert len(budgets) > 5


def test_adaptive_verification_verifies_less_where_it_costs_more() -> None:
    """The same confidences, flat and steep costs: all of it, and only what is nearly sure to stand."""
    kept_by_cost = []
    for each_s in (0.0, 0.08):
        rng = np.random.default_rng(1)
        stage = AdaptiveVerify()
        confidences, lengths = np.tile([0.95, 0.5, 0.3], (8, 1)), np.full(8, 3)
        for _ in range(50):
            plan = plan_of(lengths)
            stage.apply(plan, batch_of(8))
            assert plan.budget is not None
            kept = plan.budget.select(confidences, lengths, np.arange(8))
            stage.observe(verified(kept, rng, 0.03, 1.0 + each_s * int(kept.sum()), plan.budget))
        kept_by_cost.append(kept.tolist())
    assert kept_by_cost == [[3] * 8, [1] * 8]


def adaserve_rule(scores: list[list[float]], needs: list[float], budget: int, most: int) -> list[int]:
    """The paper's two phases, token by token."""
    kept = [0] * len(scores)
    for r in sorted(range(len(scores)), key=lambda r: -needs[r]):
        reachable = min(needs[r], len(scores[r]) + 1)
        while sum(kept) < budget and kept[r] < min(len(scores[r]), most) and 1 + sum(scores[r][: kept[r]]) < reachable:
            kept[r] += 1
    while sum(kept) < budget and (open_ := [r for r in range(len(scores)) if kept[r] < len(scores[r])]):
        kept[max(open_, key=lambda r: scores[r][kept[r]])] += 1
    return kept


def test_adaserve_serves_needs_first_then_the_likeliest() -> None:
    rng = np.random.default_rng(2)
    differs = 0
    for _ in range(300):
        size, budget = int(rng.integers(1, 9)), int(rng.integers(0, 25))
        lengths = rng.integers(0, 6, size)
        cost = CostModel()
        cost.observe(verified(lengths, rng, 0.02, 0.05, VerifyBudget(Signal.TOP_PROB, 0)))
        tpot_s = np.where(rng.random(size) < 0.5, rng.uniform(0.02, 0.1, size), np.inf)
        elapsed_s = rng.uniform(0.5, 1, size)
        pace = Pace(tpot_s, elapsed_s, np.maximum(elapsed_s / tpot_s - rng.integers(-2, 4, size), 0).astype(int))
        plan, stage = plan_of(lengths), AdaServe(budget, cost)
        stage.apply(plan, batch_of(size, pace=pace))
        assert plan.budget is not None

        drafting = lengths.max() * float(cost.draft_s(max(lengths.sum() / max(lengths.max(), 1), 1)))
        step_s = 1.05 * (drafting + float(cost.verify_s(size + min(budget, int(lengths.sum())))))
        rows = zip(pace.elapsed_s, pace.tpot_s, pace.num_emitted, strict=True)
        needs = [(elapsed + step_s) / tpot - num if np.isfinite(tpot) else -np.inf for elapsed, tpot, num in rows]
        most = math.ceil(1.2 * budget / size)
        confidences = rng.random((size, 5))
        kept = plan.budget.select(confidences, lengths, np.arange(size))
        assert kept.tolist() == adaserve_rule(scores_of(confidences, lengths), needs, budget, most)
        differs += (
            kept.tolist()
            != VerifyBudget(Signal.TOP_PROB, budget).select(confidences, lengths, np.arange(size)).tolist()
        )
    assert differs > 30


def test_without_a_pace_adaserve_is_tetris() -> None:
    rng = np.random.default_rng(3)
    confidences, lengths = rng.random((6, 4)), np.full(6, 4)
    plan = plan_of(lengths)
    AdaServe(9).apply(plan, batch_of(6, pace=Pace(np.full(6, np.inf), np.ones(6), np.ones(6, np.int64))))
    assert plan.budget is not None
    expected = VerifyBudget(Signal.TOP_PROB, 9).select(confidences, lengths, np.arange(6))
    assert plan.budget.select(confidences, lengths, np.arange(6)).tolist() == expected.tolist()
    assert np.isnan(plan.signals["needed"]).all()


@pytest.mark.parametrize(("size", "depth"), [(1, 8), (8, 8), (10, 6), (16, 4), (64, 2), (1000, 2)])
def test_adaserve_drafts_an_even_share_of_its_budget(size: int, depth: int) -> None:
    assert make_policy("adaserve:64,min=2,max=8").plan(batch_of(size)).lengths.tolist() == [depth] * size


def test_whether_a_token_is_kept_does_not_depend_on_what_follows_it() -> None:
    """The law behind losslessness: signals behind a token know it, and may change nothing for it."""
    rng = np.random.default_rng(4)
    for _ in range(500):
        size, depth = int(rng.integers(1, 6)), int(rng.integers(0, 4))
        lengths, row = rng.integers(0, 5, size), int(rng.integers(size))
        budget = VerifyBudget(
            Signal.TOP_PROB, int(rng.integers(0, 12)), rng.uniform(-1, 6, size), int(rng.integers(1, 5))
        )
        confidences = rng.random((size, 4))
        other = confidences.copy()
        other[row, depth + 1 :] = rng.random(3 - depth)
        kept = [budget.select(signals, lengths, np.arange(size))[row] > depth for signals in (confidences, other)]
        assert kept[0] == kept[1]


@pytest.mark.parametrize("seeded", [False, True], ids=["free", "seeded"])
@pytest.mark.parametrize("policy", ["adaserve:150,min=3,max=3", "adaptiveverify:3"])
def test_lossless_in_a_hurry(policy: str, seeded: bool) -> None:
    """Everybody is behind the pace asked for, so that needs decide what is kept, and whose."""
    params = SamplingParams(max_tokens=LENGTH, ignore_eos=True, slo_tpot_ms=0.01)
    counts = sample_outputs(DRAFTS["close"], policy, params, seeded, 1500)
    assert p_value(enumerate_outputs(params), counts) > TOO_UNLIKELY


def test_a_length_of_ones_own_is_not_cut() -> None:
    engine = make_engine(tiny_model(seed=1), tiny_model(seed=1, noise=0.2), "tetris:0,length=3")
    mine = engine.add([3, 1, 4], SamplingParams(temperature=0, max_tokens=12, speculation=2))
    other = engine.add([1, 5, 9], SamplingParams(temperature=0, max_tokens=12))
    done = run(engine)
    assert done[mine].metrics.num_draft_tokens > 0
    assert done[other].metrics.num_draft_tokens == 0


class Watching(AdaServe):
    def __init__(self) -> None:
        super().__init__(budget=4)
        self.paces: list[Pace] = []

    def apply(self, plan: Plan, batch: BatchView) -> None:
        assert batch.pace is not None
        self.paces.append(batch.pace)
        super().apply(plan, batch)


def test_the_engine_says_how_fast_a_request_should_go_and_has_gone() -> None:
    stage = Watching()
    engine = make_engine(tiny_model(seed=1), tiny_model(seed=1, noise=0.2), Static(2) | stage)
    params = SamplingParams(temperature=0, max_tokens=8)
    fast = engine.add([3, 1, 4], dataclasses.replace(params, slo_tpot_ms=5), trace=True)
    engine.add([1, 5, 9], params)
    done = run(engine)
    trace = done[fast].metrics.trace
    assert trace is not None
    assert stage.paces[0].tpot_s.tolist() == [0.005, np.inf]
    assert [int(pace.num_emitted[0]) for pace in stage.paces[: len(trace)]] == [r.num_tokens - 4 for r in trace]
    elapsed = [float(pace.elapsed_s[0]) for pace in stage.paces[: len(trace)]]
    assert 0 < elapsed[0] < elapsed[-1] < 60
    assert elapsed == sorted(elapsed)
    needed = [record.signals["needed"] for record in trace]
    assert all(isinstance(value, float) for value in needed)


def test_selection_keeps_the_greedy_text() -> None:
    target, draft = tiny_model(seed=1), tiny_model(seed=1, noise=0.2)
    prompts, params = [[3, 1, 4, 1, 5], [9, 2, 6]], SamplingParams(temperature=0, max_tokens=24, slo_tpot_ms=0.5)
    plain = [o.outputs[0].token_ids for o in complete(make_engine(target, None), prompts, params)]
    for policy in ("adaserve:2", "adaptiveverify:4", "svip|adaserve:2", "svip|adaptiveverify", "dsde|tetris:2"):
        engine = make_engine(target, draft, policy)
        assert [o.outputs[0].token_ids for o in complete(engine, prompts, params)] == plain
        assert engine.metrics.num_draft_tokens > 0


@pytest.mark.parametrize(("easy", "tight", "budget", "tpot_ms"), [(0.8, 0.8, 32, 2.0), (0.9, 0.7, 48, 3.2)])
def test_in_a_hurry_requests_keep_their_pace_more_often_than_under_tetris(
    easy: float, tight: float, budget: int, tpot_ms: float
) -> None:
    """Every fourth request is in a hurry; in the second setting it is also the hardest to draft for."""
    requests = Iid(easy).draw(400, 128, seed=0)
    hurries = np.arange(400) % 4 == 0
    requests.agreed[hurries] = Iid(tight).draw(100, 128, seed=1).agreed
    requests.top_probs = np.where(hurries, tight, easy)[:, None] * np.ones((1, 128))
    costs = Costs(draft=Line(0.2e-3, 64, 1e-6), verify=Line(4e-3, 48, 40e-6))
    tpot_s = np.where(hurries, tpot_ms / 1e3, np.inf)
    specs = (f"tetris:{budget},length=6", f"adaserve:{budget},min=6,max=6")
    tetris, adaserve = (simulate(make_policy(spec), requests, costs, 16, tpot_s=tpot_s) for spec in specs)
    assert adaserve.num_on_time / adaserve.num_paced > 0.6
    assert adaserve.num_on_time / adaserve.num_paced > 2 * tetris.num_on_time / tetris.num_paced
    assert adaserve.tokens_per_s > 0.97 * tetris.tokens_per_s
