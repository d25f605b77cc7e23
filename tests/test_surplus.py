"""What steps take beyond their parts: with drafts and without, and what `auto` makes of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dsde.policies import Auto, BatchView, Outcome, make_policy
from dsde.policies.surplus import LARGEST, NUM_SUPPOSED, Surplus
from dsde.simulation import make_costs, make_stream, simulate

COSTS = Path(__file__).parent.parent / "benchmarks" / "costs_h200_qwen.json"


def test_means_with_drafts_and_without() -> None:
    surplus = Surplus()
    for _ in range(1000):
        surplus.observe(8, has_drafts=False, step_s=1.8, usual_s=1.0, num_emitted=8)
        surplus.observe(8, has_drafts=True, step_s=2.6, usual_s=1.0, num_emitted=16)
    plain_s, drafting_s = surplus.token_s(8)
    assert plain_s == pytest.approx(0.1)
    assert drafting_s == pytest.approx(0.1)
    assert surplus.token_s(64) == (0.0, 0.0), "another size of batch"


def test_rare_ones_count_by_how_often_they_come() -> None:
    surplus = Surplus()
    for number in range(1000):
        surplus.observe(8, False, step_s=3.0 if number % 10 == 0 else 1.0, usual_s=1.0, num_emitted=1)
    assert surplus.token_s(8)[0] == pytest.approx(0.2, rel=0.15)


def test_tokens_of_drafts_are_supposed_to_take_as_much_as_others() -> None:
    surplus = Surplus()
    surplus.observe(8, False, step_s=48.0, usual_s=1.0, num_emitted=8 * 32, num_steps=32)
    assert surplus.token_s(8) == pytest.approx((1 / 16, 1 / 16))
    surplus.observe(8, True, step_s=3.5, usual_s=1.0, num_emitted=16)
    assert surplus.token_s(8)[1] == pytest.approx((2.5 + NUM_SUPPOSED * 8 / 16) / (16 + NUM_SUPPOSED * 8))


def test_what_held_a_machine_up_counts_little() -> None:
    surplus = Surplus()
    surplus.observe(8, False, step_s=1000.0, usual_s=1.0, num_emitted=1)
    assert surplus.token_s(8)[0] == LARGEST


def test_less_than_nothing_is_nothing() -> None:
    surplus = Surplus()
    surplus.observe(8, False, step_s=0.5, usual_s=1.0, num_emitted=8)
    surplus.observe(8, True, step_s=0.5, usual_s=1.0, num_emitted=8)
    assert surplus.token_s(8) == (0.0, 0.0)


def test_without_drafts_what_they_took_fades() -> None:
    surplus = Surplus()
    for _ in range(100):
        surplus.observe(8, True, step_s=2.0, usual_s=1.0, num_emitted=16)
    before = surplus.token_s(8)[1]
    surplus.observe(8, False, step_s=512.0, usual_s=1.0, num_emitted=8 * 512, num_steps=512)
    assert 0.5 * before < surplus.token_s(8)[1] < before
    surplus.observe(8, False, step_s=8192.0, usual_s=1.0, num_emitted=8 * 8192, num_steps=8192)
    assert surplus.token_s(8)[1] < 0.01 * before


def outcome_of(num_drafted: int, step_s: float, num_steps: int = 1) -> Outcome:
    return Outcome(
        slots=np.arange(8),
        drafted=np.full(8, num_drafted),
        accepted=np.zeros(8, np.int64),
        klds=np.empty(0),
        temperatures=np.zeros(8),
        draft_signals=np.full((8 * num_drafted, 3), 0.5),
        draft_s=0.001 * num_drafted,
        verify_s=0.004,
        step_s=step_s,
        num_decoding=8,
        num_drafted=8 * num_drafted,
        num_draft_passes=num_drafted,
        num_steps=num_steps,
    )


def test_a_step_between_drafts_is_no_measure_of_a_rest() -> None:
    """It waits for the host, and whoever took that for what all steps without drafts take would never stop."""
    auto = Auto()
    batch = BatchView(np.arange(8), np.full(8, 100), np.zeros(8), 8)

    def see(outcome: Outcome) -> None:
        auto.advisor.learn(outcome, auto.advisor.advise(batch))

    for _ in range(20):
        see(outcome_of(1, step_s=0.005))
        see(outcome_of(0, step_s=0.006))
    assert auto.advisor.surplus.token_s(8)[0] == 0.0
    see(outcome_of(0, step_s=0.006))
    assert auto.advisor.surplus.token_s(8)[0] == pytest.approx(0.002 / 8), "but the second step of a rest is"
    see(outcome_of(1, step_s=0.005))
    see(outcome_of(0, step_s=64 * 0.005, num_steps=64))
    assert auto.advisor.surplus.token_s(8)[0] < 0.0016 / 8, "and so are many together"


def test_a_step_that_is_made_to_be_measured_is_no_measure_of_a_rest() -> None:
    """It is made by itself, and waits for the host as well: two at the beginning decided for good."""
    auto = Auto()
    batch = BatchView(np.arange(8), np.full(8, 100), np.zeros(8), 8)
    advice = auto.advisor.advise(batch)
    assert advice.is_blind
    for _ in range(3):
        auto.advisor.learn(outcome_of(0, step_s=0.006), advice)
    assert auto.advisor.surplus.token_s(8)[0] == 0.0
    auto.advisor.learn(outcome_of(0, step_s=0.006), replace(advice, is_blind=False))
    assert auto.advisor.surplus.token_s(8)[0] == pytest.approx(0.002 / 8)


@pytest.mark.parametrize("is_resumed", [True, False])
def test_a_draft_that_begins_from_rest_is_no_measure_of_others(is_resumed: bool) -> None:
    auto = Auto()
    batch = BatchView(np.arange(8), np.full(8, 100), np.zeros(8), 8)
    for _ in range(100):
        outcome = outcome_of(1, step_s=0.009)
        outcome.is_resumed = is_resumed
        auto.advisor.learn(outcome, replace(auto.advisor.advise(batch), is_probing=False))
    assert (auto.advisor.surplus.token_s(8)[1] > 0) == (not is_resumed)


@pytest.mark.parametrize("end_ms", [0.0, 2.0])
def test_auto_counts_what_ends_cost_where_requests_are_short(end_ms: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 64 tokens a request and eight at a time somebody ends in every fourth step."""
    costs = make_costs(COSTS.read_text().replace('"ruled_s"', f'"end_s": {end_ms / 1e3}, "ruled_s"'))
    requests = make_stream("iid:0.8").draw(400, 64, seed=5)
    off, one = (simulate(make_policy(spec), requests, costs, 8).tokens_per_s for spec in ("off", "static:1"))
    auto = simulate(Auto(), requests, costs, 8).tokens_per_s
    if not end_ms:
        assert one > 1.04 * off
        assert auto > 0.98 * one
        return
    assert one < 0.94 * off
    assert auto > 0.975 * off
    monkeypatch.setattr(Surplus, "observe", lambda *_, **__: None)
    assert simulate(Auto(), requests, costs, 8).tokens_per_s < 0.94 * off, "else this test would show nothing"
