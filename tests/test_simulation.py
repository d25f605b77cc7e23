"""The simulator against formulas, against a plain reference that runs one sequence at a time, and as a command."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dsde.cli.simulate import Setting, run_simulate
from dsde.core.errors import InvalidInput
from dsde.core.stops import Signal, StopAfter, StopBefore, TokenSignal
from dsde.policies import BatchView, Need, Outcome, Plan, Policy, Static, make_policy, split_specs
from dsde.policies.base import IntArray
from dsde.simulation import (
    COSTS,
    Costs,
    Iid,
    Line,
    Mixed,
    Phases,
    Recorded,
    Requests,
    Result,
    compare,
    make_costs,
    make_stream,
    simulate,
)

FLAT = Costs(draft=Line(0.2), verify=Line(1.0))
"""a verification costs the same whatever the batch"""
SPECS = ("off", "static:4", "dsde", "dsde:cap=off", "dsde:release|meancap")


class Noting(Policy):
    """Random lengths, some out of range; keeps everything it was shown."""

    needs = Need.KLD

    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.batches: list[BatchView] = []
        self.outcomes: list[Outcome] = []
        self.forgotten: list[tuple[int, list[int]]] = []

    def plan(self, batch: BatchView) -> Plan:
        self.batches.append(batch)
        lengths = self.rng.integers(-2, 12, size=batch.slots.size)
        return Plan(lengths, lengths.astype(np.float64), np.ones(batch.slots.size, np.bool_))

    def observe(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)

    def forget(self, slots: IntArray) -> None:
        self.forgotten.append((len(self.outcomes), slots.tolist()))


class Stopping(Static):
    """Drafts until the entropy rises above a threshold."""

    def __init__(self, length: int, rule: type[StopBefore] | type[StopAfter], above: float, **more: int) -> None:
        super().__init__(length)
        self.rule, self.above, self.more = rule, above, more

    def plan(self, batch: BatchView) -> Plan:
        plan = super().plan(batch)
        plan.stop = self.rule(Signal.ENTROPY, np.full(batch.slots.size, self.above), True, **self.more)
        return plan


def requests_of(agreed: list[list[int]], entropies: list[list[float]] | None = None) -> Requests:
    table = np.array(agreed, np.bool_)
    return Requests(
        num_tokens=np.full(len(table), table.shape[1]),
        num_prompt_tokens=np.zeros(len(table), np.int64),
        agreed=table,
        klds=np.arange(table.size, dtype=np.float64).reshape(table.shape),
        entropies=None if entropies is None else np.array(entropies),
        temperature=0.0,
    )


# Speed and counts against formulas


@pytest.mark.parametrize("rate", [0.3, 0.8, 0.95])
@pytest.mark.parametrize("length", [1, 4, 9])
def test_static_emits_what_the_formula_says(rate: float, length: int) -> None:
    requests = Iid(rate).draw(16, 4000, seed=1)
    result = simulate(Static(length), requests, FLAT, 16)
    expected = (1 - rate ** (length + 1)) / (1 - rate)
    assert result.acceptance_length == pytest.approx(expected, rel=0.02)
    assert result.tokens_per_s == pytest.approx(16 * expected / (1 + 0.2 * length), rel=0.02)
    assert result.mean_length == pytest.approx(length, rel=0.01)


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_off_runs_at_the_speed_of_the_costs(cost: str, batch_size: int) -> None:
    costs = COSTS[cost]
    result = simulate(make_policy("off"), Iid(0.5).draw(64, 20, seed=0), costs, batch_size)
    assert result.tokens_per_s == pytest.approx(batch_size / costs.verify.seconds(batch_size))
    assert (result.num_drafted, result.num_draft_passes, result.draft_s) == (0, 0, 0.0)
    assert result.acceptance_rate is None


def test_without_a_cap_a_large_batch_waits_for_its_longest_draft() -> None:
    for stream in ("mixed:0.95,0.4", "phases"):
        requests = make_stream(stream).draw(32, 128, seed=0)
        capped, free = (simulate(make_policy(spec), requests, FLAT, 16) for spec in ("dsde", "dsde:cap=off"))
        assert capped.tokens_per_s > 1.1 * free.tokens_per_s
        alone = [simulate(make_policy(spec), requests, FLAT, 1).tokens_per_s for spec in ("dsde", "dsde:cap=off")]
        assert alone[0] == alone[1]
        assert free.tokens_per_s / 16 < alone[1]


def test_speculation_pays_for_one_and_not_for_many_where_computing_is_the_limit() -> None:
    requests = Iid(0.8).draw(32, 128, seed=0)
    for batch_size, pays in ((1, True), (16, False)):
        off, static = (
            simulate(make_policy(spec), requests, COSTS["compute-bound"], batch_size).tokens_per_s
            for spec in ("off", "static:4")
        )
        assert (static > off) is pays


def test_ragged_drafting_costs_what_takes_part() -> None:
    costs = Costs(draft=Line(1.0, 2, 0.5), verify=Line(10.0, 4, 1.0))
    lengths = [0, 3, 1, 1, 5]
    passes = [sum(length > j for length in lengths) for j in range(5)]
    assert costs.draft_s(np.array(lengths)) == pytest.approx(sum(1 + 0.5 * max(n - 2, 0) for n in passes))
    assert costs.draft_s(np.array([0, 0])) == 0.0
    assert costs.draft_s(np.empty(0, np.int64)) == 0.0
    assert [costs.verify.seconds(n) for n in (1, 4, 6)] == [10.0, 10.0, 12.0]
    assert costs.verify.seconds_of(np.array([1, 4, 6])).tolist() == [10.0, 10.0, 12.0]


def test_what_the_draft_missed_is_read_in_its_first_pass_or_as_it_was_measured() -> None:
    passes = np.array([2, 0, 1])
    costs = Costs(draft=Line(1.0, 2, 0.5), verify=Line(10.0))
    assert costs.draft_s(passes, num_missed=4) == (1 + 0.5 * 4) + 1
    table = {"draft": [[1, 1.0], [3, 2.0]], "verify": [[1, 1, 10.0]]}
    assert make_costs(json.dumps(table)).draft_s(passes, num_missed=4) == pytest.approx(3.5 + 1.0)
    measured = make_costs(json.dumps(table | {"catch_up": [[2, 0.5], [8, 3.5]]}))
    assert measured.draft_s(passes, num_missed=4) == pytest.approx(1.5 + 1.0 + 1.5)
    assert measured.draft_s(passes) == pytest.approx(1.5 + 1.0)
    near = make_costs(json.dumps(table | {"catch_up": [[2, 0.5], [7, 3.7], [8, 3.5]]}))
    assert near.draft_s(passes, num_missed=20) == pytest.approx(1.5 + 1.0 + 3.5 + 12 * 0.5), "not as from 7 to 8"
    with pytest.raises(InvalidInput, match="the form"):
        make_costs(json.dumps(table | {"catch_up": [[2, -1.0]]}))


def test_small_batches_may_be_as_a_whole_in_every_pass() -> None:
    table = {"draft": [[1, 1.0], [3, 2.0]], "verify": [[1, 1, 10.0]], "whole": 3}
    costs = make_costs(json.dumps(table))
    assert costs.draft_s(np.array([2, 0, 1])) == pytest.approx(2.0 + 2.0)
    assert costs.draft_s(np.array([2, 0, 1, 0])) == pytest.approx(1.5 + 1.0), "not so a larger one"
    with pytest.raises(InvalidInput, match="whole must be a whole number"):
        make_costs(json.dumps(table | {"whole": -1}))


# What the policy is shown


@pytest.mark.parametrize("batch_size", [1, 5, None])
@pytest.mark.parametrize("seed", range(4))
def test_equals_the_reference(batch_size: int | None, seed: int) -> None:
    """Every sequence, followed by its slot through the whole run, one position at a time."""
    requests = Phases(0.9, 0.3, 6).draw(11, 23, seed)
    requests.num_tokens = np.random.default_rng(seed).integers(1, 24, size=11)
    policy, costs = Noting(seed), COSTS["memory-bound"]
    result = simulate(policy, requests, costs, batch_size)

    num_slots = batch_size or 11
    following = list(range(num_slots))
    positions, missed = [0] * num_slots, [0] * num_slots
    num_admitted, num_ended, emitted, total_s = num_slots, 0, 0, 0.0
    forgotten = dict(policy.forgotten)
    for number, (batch, outcome) in enumerate(zip(policy.batches, policy.outcomes, strict=True), start=1):
        assert batch.slots.tolist() == outcome.slots.tolist()
        assert batch.num_decoding == outcome.num_decoding == len(batch.slots)
        assert batch.num_waiting == max(11 - num_admitted, 0)
        klds: list[float] = []
        ended = []
        for slot, room, drafted, accepted in zip(
            batch.slots.tolist(), batch.rooms, outcome.drafted, outcome.accepted, strict=True
        ):
            row, position = following[slot] % 11, positions[slot]
            assert room == requests.num_tokens[row] - position - 1
            assert 0 <= drafted <= room
            agreeing = 0
            while agreeing < drafted and requests.agreed[row, position + agreeing]:
                agreeing += 1
            assert accepted == agreeing
            klds += requests.klds[row, position : position + drafted].tolist()
            positions[slot] += agreeing + 1
            emitted += agreeing + 1
            if positions[slot] == requests.num_tokens[row]:
                ended.append(slot)
        assert outcome.klds.tolist() == klds
        assert outcome.num_drafted == outcome.drafted.sum() == len(klds)
        assert outcome.num_draft_passes == outcome.drafted.max()
        assert outcome.verify_s == costs.verify.seconds(len(klds) + len(batch.slots))
        num_missed = 0
        for slot, drafted in zip(batch.slots.tolist(), outcome.drafted, strict=True):
            num_missed += missed[slot] if drafted else 0
            missed[slot] = 0 if drafted else missed[slot] + 1
        assert outcome.num_catch_up_tokens == num_missed
        sizes = [int((outcome.drafted > j).sum()) for j in range(outcome.num_draft_passes)]
        sizes[:1] = [size + num_missed for size in sizes[:1]]
        assert outcome.draft_s == pytest.approx(sum(map(costs.draft.seconds, sizes)))
        total_s += outcome.draft_s + outcome.verify_s
        assert sorted(forgotten.get(number, [])) == sorted(ended)
        num_ended += len(ended)
        for slot in ended:
            if batch_size is not None:
                following[slot], positions[slot], missed[slot] = num_admitted, 0, 0
                num_admitted += 1
    assert num_ended == result.num_requests >= 11
    assert result.num_emitted == emitted == result.num_turns + result.num_accepted
    assert result.total_s == pytest.approx(total_s)
    assert result.num_steps == len(policy.outcomes)
    if batch_size is None:
        assert emitted == requests.num_tokens.sum()
    else:
        assert all(len(batch.slots) == batch_size for batch in policy.batches)


def test_prompts_are_read_in_the_step_before_the_first_token() -> None:
    requests = requests_of([[1] * 3] * 4)
    requests.num_tokens = np.array([3, 1, 3, 3])
    requests.num_prompt_tokens = np.array([10, 20, 30, 40])
    costs = Costs(draft=Line(1.0), verify=Line(1.0, 0, 1.0))
    result = simulate(Static(1), requests, costs, 2, prompts=True)
    steps = [
        1 + 30,  # two prompts
        1 + 1 + 3,  # three packed tokens, one of them drafted; the second request ends
        1 + 1 + 30,  # the first ends, the third reads
        1 + 1 + 2 + 40,  # the third decodes, the fourth reads
        1 + 1 + 3,  # both decode; the third ends
        1 + 1 + 10,  # the fourth ends; the first has come again, and reads
    ]
    assert result.total_s == sum(steps)
    assert (result.num_steps, result.num_emitted, result.num_turns) == (6, 10, 7)
    result = simulate(Static(1), requests, costs, None, prompts=True)
    assert result.total_s == (1 + 100) + (1 + 1 + 4 + 3) + (1 + 3)


def test_a_policy_is_told_of_prompts() -> None:
    requests = Iid(0.5).draw(9, 12, seed=0)
    requests.num_prompt_tokens[:] = 5
    policy, costs = Noting(), Costs(draft=Line(1.0), verify=Line(1.0, 0, 1.0))
    simulate(policy, requests, costs, 4, prompts=True)
    assert any(batch.num_prompt_tokens for batch in policy.batches)
    assert all(batch.num_prompt_tokens == 5 * batch.num_joining for batch in policy.batches)
    for batch, outcome in zip(policy.batches, policy.outcomes, strict=True):
        assert outcome.num_prompt_tokens == batch.num_prompt_tokens
        assert outcome.verify_s == 1 + batch.num_prompt_tokens + outcome.num_drafted + outcome.num_decoding
        assert len(set(batch.slots.tolist())) == batch.num_decoding


@pytest.mark.parametrize("unread", [False, True])
def test_a_draft_that_has_not_read_a_prompt_does_so_first(unread: bool) -> None:
    requests = Iid(0.5).draw(9, 12, seed=0)
    requests.num_prompt_tokens[:] = 40
    policy, costs = Noting(), Costs(draft=Line(1.0, 0, 1.0), verify=Line(1.0))
    simulate(policy, requests, costs, 4, unread=unread)
    assert policy.batches[0].num_missed is not None
    assert policy.batches[0].num_missed.tolist() == [40 * unread] * 4
    for batch, outcome in zip(policy.batches, policy.outcomes, strict=True):
        assert batch.num_missed is not None
        assert outcome.num_catch_up_tokens == batch.num_missed[outcome.drafted > 0].sum()
    assert any(outcome.num_catch_up_tokens >= 40 for outcome in policy.outcomes) == unread


def test_klds_are_computed_only_where_somebody_needs_them() -> None:
    class Plain(Noting):
        needs = Need.NOTHING

    policy = Plain()
    simulate(policy, Iid(0.8).draw(4, 10, seed=0), FLAT, 2)
    assert all(outcome.klds.size == 0 for outcome in policy.outcomes)


def test_a_rule_that_stops_drafts() -> None:
    entropies = [[0.1, 0.2, 3.0, 0.1, 0.1, 0.1, 0.1, 0.1]]
    requests = requests_of([[1, 1, 1, 1, 0, 1, 1, 1]], entropies)
    before = simulate(Stopping(6, StopBefore, 1.0), requests, FLAT)
    # 2 of 6 drafted in 3 passes, and the bonus; then from the fourth token on 4, of which the first stands
    assert (before.num_drafted, before.num_accepted, before.num_draft_passes) == (2 + 4 + 2, 2 + 1 + 2, 3 + 4 + 2)
    after = simulate(Stopping(6, StopAfter, 1.0), requests, FLAT)
    assert (after.num_drafted, after.num_accepted, after.num_draft_passes) == (3 + 3 + 2, 3 + 0 + 2, 3 + 3 + 2)
    skipping = simulate(Stopping(6, StopBefore, 1.0, first_depth=3), requests, FLAT)
    assert skipping.num_steps == simulate(Static(6), requests, FLAT).num_steps
    with pytest.raises(InvalidInput, match="no draft_entropy"):
        simulate(Stopping(6, StopAfter, 1.0), replace(requests, entropies=None), FLAT)


def test_the_likeliest_token_is_taken_for_the_one_drawn() -> None:
    class Unlikely(Static):
        needs = Need.TOKEN_PROB

        def __init__(self, signal: TokenSignal, threshold: float) -> None:
            super().__init__(6)
            self.signal, self.threshold = signal, threshold
            self.seen: list[list[float]] = []

        def plan(self, batch: BatchView) -> Plan:
            plan = super().plan(batch)
            plan.stop = StopAfter(self.signal, np.full(batch.slots.size, self.threshold), stops_above=False)
            return plan

        def observe(self, outcome: Outcome) -> None:
            self.seen.append(outcome.token_probs.tolist())

    probs = [0.9, 0.8, 0.3, 0.9, 0.9, 0.6, 0.9, 0.9, 0.9, 0.9]
    requests = replace(
        Iid(1.0).draw(1, len(probs), seed=0), entropies=np.ones((1, len(probs))), top_probs=np.array([probs])
    )
    by_token = Unlikely(TokenSignal.TOKEN_PROB, 0.5)
    simulate(by_token, requests, FLAT)
    # Behind 0.3 it stops, then drafts the five that are left but for the last; the token between is the target's.
    assert by_token.seen == [[0.9, 0.8, 0.3], [0.9, 0.6, 0.9, 0.9, 0.9]]
    by_draft = Unlikely(TokenSignal.TOTAL_LOG_PROB, np.log(0.5))
    simulate(by_draft, requests, FLAT)
    assert by_draft.seen == [[0.9, 0.8, 0.3], [0.9, 0.6, 0.9], [0.9]]


@pytest.mark.parametrize("spec", ["ddd", "confidence", "tapout"])
def test_policies_that_look_at_tokens_are_told_of_those_they_drafted(spec: str) -> None:
    requests = make_stream("mixed:0.95,0.4").draw(8, 40, seed=0)
    policy, positions, rows = make_policy(spec), np.zeros(4, np.int64), np.arange(4)
    policy.needs |= Need.TOKEN_PROB
    observe, forget, num_admitted, num_seen = policy.observe, policy.forget, 4, 0

    def check(outcome: Outcome) -> None:
        nonlocal num_seen
        ahead = [np.arange(position, position + n) for position, n in zip(positions, outcome.drafted, strict=True)]
        expected = [requests.token_probs[row, places] for row, places in zip(rows, ahead, strict=True)]
        np.testing.assert_array_equal(outcome.token_probs, np.concatenate(expected))
        positions[:] += outcome.accepted + 1
        num_seen += outcome.token_probs.size
        observe(outcome)

    def replace_by_next(slots: IntArray) -> None:
        nonlocal num_admitted
        rows[slots], positions[slots] = (num_admitted + np.arange(slots.size)) % requests.size, 0
        num_admitted += slots.size
        forget(slots)

    policy.observe, policy.forget = check, replace_by_next  # type: ignore[method-assign]
    simulate(policy, requests, FLAT, 4)
    assert num_seen > 50


# Streams


@pytest.mark.parametrize("spec", SPECS)
def test_the_same_seed_gives_the_same_run(spec: str) -> None:
    def run(seed: int) -> Result:
        return simulate(make_policy(spec), make_stream("phases").draw(24, 64, seed), COSTS["memory-bound"], 8)

    assert run(3) == run(3)
    if spec != "off":
        assert run(3) != run(4)


def test_streams_have_the_rates_they_name() -> None:
    assert Iid(0.7).draw(100, 500, 0).agreed.mean() == pytest.approx(0.7, abs=0.01)
    by_request = Mixed(0.9, 0.3).draw(100, 1000, 0).agreed.mean(axis=1)
    assert sum(by_request > 0.8) == sum(by_request < 0.4) == 50
    assert Iid(1.0).draw(3, 50, 0).agreed.all()
    assert not Iid(0.0).draw(3, 50, 0).agreed.any()
    phases = Phases(1.0, 0.0, 20).draw(200, 1000, 0).agreed
    assert phases.mean() == pytest.approx(0.5, abs=0.03)
    changes = (phases[:, 1:] != phases[:, :-1]).mean()
    assert 1 / changes == pytest.approx(20, rel=0.05)


def test_klds_and_entropies_are_as_in_real_pairs() -> None:
    requests = Mixed(0.99, 0.96, 0.9, 0.75, 0.65).draw(200, 200, 0)
    assert requests.entropies is not None
    agreed, klds, entropies = requests.agreed.ravel(), requests.klds.ravel(), requests.entropies.ravel()
    assert np.isfinite(klds).all()
    assert np.isfinite(entropies).all()
    assert (klds >= 0).all()
    assert -0.75 < np.corrcoef(agreed, klds)[0, 1] < -0.45
    assert -0.75 < np.corrcoef(agreed, entropies)[0, 1] < -0.4
    assert np.corrcoef(np.log(klds[agreed]), np.log(entropies[agreed]))[0, 1] > 0.85
    assert 0.8 < np.median(klds[~agreed]) < 1.2
    means = [Iid(rate).draw(100, 100, 0).klds.mean() for rate in (0.4, 0.6, 0.8, 0.9, 0.99)]
    assert means == sorted(means, reverse=True)


def write_trace(path: Path, records: object) -> Path:
    path.write_text(json.dumps(records))
    return path


RECORDS = [
    {
        "cat": "qa",
        "prompt_tokens": 9,
        "match": [1, 0, 1],
        "kl": [0.1, 2, 0],
        "overlap": [1, 0, 1],
        "draft_entropy": [1, 2, 3],
    },
    {"match": [1, 1, 1, 1, 0], "kl": [0, 0, 0, 0, 1.5], "overlap": [0, 0, 0, 0, 0], "draft_entropy": [0] * 5},
]


def test_recorded_requests_are_replayed_as_they_are(tmp_path: Path) -> None:
    requests = make_stream(str(write_trace(tmp_path / "t.json", RECORDS))).draw(6, 100, seed=0)
    assert sorted(requests.num_tokens.tolist()) == [3, 3, 3, 5, 5, 5]
    assert requests.temperature == 0.0
    for row, num in enumerate(requests.num_tokens):
        record = RECORDS[0 if num == 3 else 1]
        assert requests.agreed[row, :num].astype(int).tolist() == record["match"]
        assert requests.klds[row, :num].tolist() == record["kl"]
        assert requests.num_prompt_tokens[row] == record.get("prompt_tokens", 0)
    alone = simulate(Static(3), requests, FLAT, None)
    # 3 tokens: drafts 2, one stands, then nothing is left to draft; 5 tokens: 3 stand, and again nothing
    assert (alone.num_emitted, alone.num_drafted, alone.num_accepted) == (3 * 8, 3 * (2 + 3), 3 * (1 + 3))
    assert make_stream(str(tmp_path / "t.json")).draw(2, 2, 0).num_tokens.tolist() == [2, 2]


def test_recorded_requests_can_be_sampled(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.json", RECORDS)
    requests = make_stream(f"sampled:{path}").draw(4, 100, seed=0)
    assert requests.temperature == 1.0
    for row, num in enumerate(requests.num_tokens):
        assert requests.agreed[row, :num].tolist() == RECORDS[0 if num == 3 else 1]["overlap"]
    bare = [{"match": [1, 0], "kl": [0, 1]}]
    assert Recorded(write_trace(tmp_path / "bare.json", bare)).draw(2, 9, 0).entropies is None


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ({}, "must hold a JSON list"),
        ([], "must hold a JSON list"),
        ([3], "must hold a JSON list"),
        ([{"kl": [1]}], "request 1 has no field 'match'"),
        ([{"match": [1], "kl": [1]}, {"match": [1]}], "request 2 has no field 'kl'"),
        ([{"match": [1, 0], "kl": [1]}], "'kl' and 'match' of request 1 differ in length"),
        ([{"match": [], "kl": []}], "'match' of request 1 must be a list of numbers"),
        ([{"match": ["x"], "kl": [1]}], "'match' of request 1 must be a list of numbers"),
        ([{"match": [1], "kl": [float("nan")]}], "'kl' of request 1 must be a list of numbers"),
        ([{"match": [1], "kl": [-1]}], "'kl' of request 1 must be a list of numbers"),
        ([{"match": [1], "kl": 1}], "'kl' of request 1 must be a list of numbers"),
        ([{"match": [1], "kl": [1], "prompt_tokens": -1}], "prompt_tokens must be a whole number"),
    ],
)
def test_bad_recordings(tmp_path: Path, records: object, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        make_stream(str(write_trace(tmp_path / "t.json", records)))


def test_a_recording_that_is_no_json(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text("[{")
    with pytest.raises(InvalidInput, match="not valid JSON"):
        make_stream(str(tmp_path / "t.json"))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("iid:1.2", "rate must be a number from 0 to 1, not 1.2"),
        ("iid:x", "iid takes numbers separated by commas, not 'x'"),
        ("iid:nan", "rate must be a number from 0 to 1"),
        ("iid:0.1,0.2", "has 2 numbers, at most 1"),
        ("phases:0.9,0.4,0", "length must be a number of at least 1"),
        ("mixed:0.5", "mixed needs two rates or more"),
        ("nothing.json", "there is no file nothing.json"),
    ],
)
def test_bad_streams(spec: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        make_stream(spec)


def test_bad_sizes() -> None:
    with pytest.raises(InvalidInput, match="must be at least 1"):
        Iid(0.5).draw(0, 4, 0)
    with pytest.raises(InvalidInput, match="at most 20,000,000"):
        Iid(0.5).draw(100_000, 1_000, 0)
    with pytest.raises(InvalidInput, match="batch size must be from 1 to the number of requests, 4, not 5"):
        simulate(Static(2), Iid(0.5).draw(4, 4, 0), FLAT, 5)


# Costs


def test_costs_from_json() -> None:
    costs = make_costs('{"draft": {"flat_s": 1}, "verify": {"flat_s": 5, "num_flat": 8, "each_s": 0.5}, "step_s": 2}')
    assert costs == Costs(Line(1), Line(5, 8, 0.5), 2)
    assert make_costs(json.dumps(costs.to_dict())) == costs
    assert simulate(make_policy("off"), Iid(0.5).draw(2, 5, 0), costs, 1).total_s == 10 * (5 + 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cheap", "cost must be one of memory-bound, compute-bound or a JSON object, not 'cheap'"),
        ("{", "cost is not valid JSON"),
        ('{"draft": {"flat_s": 1}}', "cost lacks verify"),
        ('{"draft": {"flat_s": 1}, "verify": 3}', "verify must be an object"),
        ('{"draft": {"flat_s": 1}, "verify": {"flat": 3}}', "verify has no key 'flat'"),
        ('{"draft": {"flat_s": -1}, "verify": {"flat_s": 3}}', "draft: flat_s must be a number of at least 0, not -1"),
        ('{"draft": {"flat_s": 1}, "verify": {"flat_s": NaN}}', "verify: flat_s must be a number"),
        ('{"draft": {"flat_s": 1}, "verify": {"flat_s": 0}}', "verify must cost something"),
    ],
)
def test_bad_costs(text: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        make_costs(text)


# Comparison and command


def test_comparison_with_off_and_the_best_static_length() -> None:
    requests = Iid(0.8).draw(32, 256, 0)
    comparison = compare(["static:7", "off", "dsde"], requests, FLAT, 4)
    speeds = {
        length: simulate(Static(length), requests, FLAT, 4).tokens_per_s
        for length in (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20)
    }
    best = max(speeds, key=lambda length: speeds[length])
    assert comparison.best_static == f"static:{best}"
    assert [row.policy for row in comparison.rows] == ["static:7", "off", "dsde"]
    off = comparison.rows[1].result.tokens_per_s
    for row in comparison.rows:
        assert row.vs_off == row.result.tokens_per_s / off
        assert row.vs_static == row.result.tokens_per_s / speeds[best]
    assert comparison.rows[0].result.tokens_per_s == speeds[7]


def test_commas_between_and_within_specs() -> None:
    assert split_specs("off, static:4,dsde:release,max=10 , min = 3,dsde|meancap:rounding=ceil") == [
        "off",
        "static:4",
        "dsde:release,max=10 , min = 3",
        "dsde|meancap:rounding=ceil",
    ]
    assert split_specs("table:[[1,4,3],[5,8,1]],off,off") == ["table:[[1,4,3],[5,8,1]]", "off"]


def test_the_command_prints_a_table_and_writes_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report.json"
    setting = Setting(policies="off,static:4,dsde:release,max=10", batch_size="2,all", requests=6, tokens=32)
    run_simulate(setting, out)
    text = capsys.readouterr().out
    for expected in ("batch 2", "all at once", "tokens/s", "vs off", "vs static", "wasted", "dsde:release,max"):
        assert expected in text
    report = json.loads(out.read_text())
    assert [batch["batch_size"] for batch in report["batches"]] == [2, None]
    assert report["seed"] == 0
    assert report["costs"]["verify"]["flat_s"] > 0
    off = report["batches"][0]["policies"][0]
    assert (off["policy"], off["vs_off"], off["acceptance_rate"]) == ("off", 1.0, None)
    again = tmp_path / "again.json"
    run_simulate(setting, again)
    assert again.read_text() == out.read_text()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"policies": "off,fastest"}, "unknown policy 'fastest'"),
        ({"policies": ""}, "a policy is missing"),
        ({"batch_size": "0"}, "batch size must be a whole number of at least 1, or all, not '0'"),
        ({"batch_size": "1,many"}, "not 'many'"),
        ({"batch_size": "65"}, "a batch of 65 needs as many requests; there are 64"),
        ({"requests": 0}, "must be at least 1"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"stream": "slow"}, "there is no file slow"),
        ({"cost": "slow"}, "cost must be one of"),
    ],
)
def test_wrong_use_of_the_command(given: dict[str, object], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InvalidInput, match=message):
        run_simulate(Setting(**given))  # type: ignore[arg-type]
    assert capsys.readouterr().out == ""


def test_a_report_that_cannot_be_written_is_noticed_first(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InvalidInput, match="cannot be written to /no/such/folder"):
        run_simulate(Setting(), Path("/no/such/folder/report.json"))
    assert capsys.readouterr().out == ""


def test_no_torch_is_needed() -> None:
    code = "import sys, dsde.simulation; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_thousands_of_requests_a_second() -> None:
    start = time.perf_counter()
    requests = Iid(0.8).draw(2000, 128, seed=0)
    result = simulate(Static(4), requests, COSTS["memory-bound"], 64)
    seconds = time.perf_counter() - start
    print(f"{result.num_requests / seconds:,.0f} requests of 128 tokens a second at batch 64")
    assert result.num_requests >= 2000
    assert seconds < 10  # far from what it takes: a busy machine must not fail here


def test_what_goes_by_the_targets_probabilities_is_refused() -> None:
    with pytest.raises(InvalidInput, match="what the target gives a token"):
        simulate(make_policy("static:4|consultant"), Iid(0.8).draw(4, 8, seed=0), FLAT, 2)


def test_a_budget_is_spent_on_what_the_draft_is_sure_of() -> None:
    """Two requests that always agree, of which the draft is sure of one: that one goes four times as fast."""
    requests = Iid(1.0).draw(2, 40, seed=0)
    requests.top_probs = np.array([[0.9], [0.1]]) * np.ones((1, 40))
    result = simulate(make_policy("tetris:3,length=3"), requests, FLAT)
    # Four tokens a step against one for 10 steps; then the other has the budget to itself, for its last 30 tokens.
    assert (result.num_steps, result.num_drafted, result.num_draft_passes) == (10 + 8, 30 + 22, 30 + 22)


@pytest.mark.parametrize("prompts", [False, True])
def test_who_kept_the_pace(prompts: bool) -> None:
    """Without speculation everybody takes as long; a request's clock starts when it begins to decode."""
    requests = Iid(0.5).draw(12, 20, seed=0)
    step_s = FLAT.verify.seconds(4)
    tpot_s = np.resize([0.99 * step_s, 1.01 * step_s, np.inf], 12)
    result = simulate(make_policy("off"), requests, FLAT, 4, prompts=prompts, tpot_s=tpot_s)
    assert (result.num_requests, result.num_paced, result.num_on_time) == (12, 8, 4)


@pytest.mark.parametrize(("policy", "is_ruled"), [("static:2", False), ("svip:max=2", True)])
def test_a_rule_that_ends_drafts_may_be_charged_for(policy: str, is_ruled: bool) -> None:
    """Once for every draft: a device waits to be told that it is over."""
    requests = make_stream("iid:0.8").draw(4, 64, 0)
    table = {"draft": [[1, 1e-3]], "verify": [[1, 1, 5e-3], [1, 4, 6e-3]]}
    free, charged = (
        simulate(make_policy(policy), requests, make_costs(json.dumps(table | {"ruled_s": ruled_s})), 1)
        for ruled_s in (0.0, 2e-3)
    )
    assert charged.num_steps == free.num_steps
    extra_s = 2e-3 * free.num_steps if is_ruled else 0.0
    assert charged.total_s - free.total_s == pytest.approx(extra_s, rel=0.05)
