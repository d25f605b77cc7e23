"""What the benchmarks of `auto` stand on: measured costs, streams whose signals tell nothing, and the oracle."""

from __future__ import annotations

import json
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from dsde.core.errors import InvalidInput
from dsde.policies import make_policy
from dsde.simulation import Costs, Line, MeasuredCosts, make_costs, make_stream, simulate

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
from oracle import Clairvoyant, Oracle  # noqa: E402
from unsteady import Unsteady  # noqa: E402

TABLE = {
    "draft": [[1, 1.0], [8, 2.0]],
    "verify": [[1, 1, 4.0], [1, 5, 6.0], [9, 9, 8.0], [9, 45, 16.0]],
    "step_s": 0.5,
    "drafting_s": 0.25,
}


def test_measured_costs_are_what_was_measured_and_lines_between() -> None:
    costs = make_costs(json.dumps(TABLE))
    assert isinstance(costs, MeasuredCosts)
    for sequences, tokens, seconds in TABLE["verify"]:  # type: ignore[attr-defined]
        assert costs.verify_s(sequences, tokens) == pytest.approx(seconds)
    assert costs.verify_s(1, 3) == pytest.approx(5.0)
    assert costs.verify_s(5, 5) == pytest.approx(6.0)  # plain steps between plain steps
    assert costs.verify_s(5, 15) == pytest.approx((5.0 + 12.0) / 2)
    assert costs.verify_s(1, 7) == pytest.approx(7.0)  # further along the last line
    assert costs.pass_s(np.array([1, 8, 15])).tolist() == pytest.approx([1.0, 2.0, 3.0])
    assert costs.draft_s(np.array([2, 1])) == pytest.approx(0.25 + (1 + 1 / 7) + 1.0)
    assert costs.draft_s(np.array([0, 0])) == 0.0
    assert make_costs(json.dumps(costs.to_dict())).to_dict() == costs.to_dict()


@pytest.mark.parametrize(
    "change",
    [
        {"draft": []},
        {"draft": [[1, 2, 3]]},
        {"verify": [[1, 1, 0.0]]},
        {"verify": [[1, 1, 1.0], [1, 1, 2.0]]},
        {"verify": [["a", 1, 1.0]]},
        {"step_s": -1},
        {"more": 1},
    ],
)
def test_a_bad_table_gets_one_sentence(change: dict[str, object]) -> None:
    with pytest.raises(InvalidInput) as caught:
        make_costs(json.dumps(TABLE | change))
    assert "\n" not in str(caught.value)


def test_time_is_counted_by_the_table() -> None:
    requests = make_stream("iid:1.0").draw(4, 12, 0)
    costs = make_costs(json.dumps(TABLE))
    result = simulate(make_policy("static:2"), requests, costs, 1)
    step_s = 0.25 + 2 * 1.0 + 5.0 + 0.5
    assert result.total_s == pytest.approx(result.num_steps * step_s)


def test_signals_of_a_blind_stream_tell_nothing() -> None:
    requests = make_stream("blind:mixed:0.95,0.4").draw(200, 100, 1)
    assert requests.entropies is not None
    for values in (requests.entropies, requests.klds):
        assert values[requests.agreed].mean() == pytest.approx(values[~requests.agreed].mean(), rel=0.05)
    assert set(np.unique(requests.rates)) == {0.4, 0.95}
    assert requests.agreed.mean() == pytest.approx(0.675, abs=0.02)
    with pytest.raises(InvalidInput, match="blind"):
        make_stream(f"blind:{BENCHMARKS / 'traces' / 'qwen2.5_coder_1.5b_0.5b.json'}")


@pytest.mark.parametrize("costs", [Costs(Line(0.8e-3, 8, 8e-6), Line(3.9e-3, 8, 22e-6)), Costs(Line(1), Line(4, 4, 1))])
def test_the_oracle_finds_the_best_lengths_of_all(costs: Costs) -> None:
    requests = make_stream("mixed:0.95,0.4").draw(4, 64, 0)
    oracle = Oracle(requests, costs, 4)
    rates, members = np.array([0.4, 0.95]), np.array([2, 2])

    def speed(lengths: tuple[int, ...]) -> float:
        emitted = sum(
            n * (1 + sum(r**d for d in range(1, k + 1))) for n, r, k in zip(members, rates, lengths, strict=True)
        )
        each = np.repeat(lengths, members)
        return float(emitted / (costs.draft_s(each) + costs.verify_s(4, 4 + int(each.sum()))))

    best = max(speed(lengths) for lengths in product(range(13), repeat=2))
    assert speed(oracle.best((2, 2))) >= 0.999 * best


def test_the_oracle_follows_the_requests() -> None:
    """It drafts for those at 1 and not for those at 0, whoever has ended meanwhile."""
    requests = make_stream("mixed:1.0,0.0").draw(12, 20, 3)
    costs = Costs(Line(0.1), Line(1.0, 0, 0.01))
    result = simulate(Oracle(requests, costs, 4), requests, costs, 4)
    assert result.num_drafted == result.num_accepted > 0


def test_who_is_told_what_will_stand_wastes_nothing_and_beats_every_fixed_length() -> None:
    requests = make_stream("phases").draw(12, 64, 4)
    costs = Costs(Line(0.8e-3, 8, 8e-6), Line(3.9e-3, 8, 22e-6))
    result = simulate(Clairvoyant(requests, costs, 4), requests, costs, 4)
    assert result.num_drafted == result.num_accepted
    for length in (1, 2, 4, 8):
        assert result.tokens_per_s > simulate(make_policy(f"static:{length}"), requests, costs, 4).tokens_per_s


def test_an_unsteady_machine_takes_as_long_on_average_and_changes_everything_alike() -> None:
    costs = make_costs(json.dumps(TABLE))
    machine = Unsteady(costs, 0.05, 0.1, 100.0, 0)
    plain, ratios = [], []
    for _ in range(20_000):
        plain.append(machine.verify_s(1, 1) / 4.0)
        ratios.append(machine.draft_s(np.array([1])) / 1.25 / plain[-1])
    assert np.median(plain) == pytest.approx(1.0, abs=0.05)
    assert np.std(np.log(plain)) == pytest.approx(np.hypot(0.05, 0.1), rel=0.15)
    assert np.std(np.log(ratios)) == pytest.approx(np.sqrt(2) * 0.05, rel=0.15), "noise alone"
    assert (machine.step_s, machine.whole) == (costs.step_s, costs.whole)
    requests = make_stream("iid:0.8").draw(8, 64, 0)
    speeds = [simulate(make_policy("static:2"), requests, Unsteady(costs, 0.1, 0.1, 30.0, 1), 4) for _ in range(2)]
    assert speeds[0].total_s == speeds[1].total_s
