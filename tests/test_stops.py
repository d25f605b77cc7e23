"""Draft stops: each against its rule written out here, through the real drafter, and lossless by distribution."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from dsde import SamplingParams
from dsde.core.sequence import Sequence
from dsde.core.stops import Signal, Stop, StopAfter, StopBefore, StopByWorth, TokenSignal
from dsde.drafting import ModelDrafter
from dsde.drafting.ruling import Ruling
from dsde.models.batch import pack
from dsde.models.decoder import Decoder
from dsde.policies import BatchView, Need, Outcome, Plan, Policy, make_policy
from dsde.policies.adaedl import AdaEDL
from dsde.policies.confidence import Confidence, best_threshold
from dsde.policies.ddd import DDD
from dsde.policies.margin import Margin
from dsde.policies.svip import SVIP
from dsde.sampling import Sampler
from dsde.simulation.costs import Costs, Line
from dsde.simulation.simulator import simulate
from dsde.simulation.streams import Mixed
from test_lossless_distribution import DRAFTS, NUM_REQUESTS, enumerate_outputs, p_value, sample_outputs
from tiny import DEVICE, complete, make_engine, run, tiny_model

DRAFT = tiny_model(seed=5, layers=1, sharpness=1.5)
LONGEST = 9


def distribution(model: Decoder, tokens: list[int]) -> np.ndarray:
    """The model's next-token probabilities, from a forward pass of its own."""
    lengths = np.array([len(tokens)])
    blocks = [list(range(-(-len(tokens) // 16)))]
    batch = pack(np.array(tokens), lengths, lengths, blocks, lengths - 1, DEVICE)
    logits = model.forward(batch, model.new_cache(len(blocks[0])))[0].double().numpy()
    exponentials = np.exp(logits - logits.max())
    return exponentials / exponentials.sum()


def entropy(probs: np.ndarray, _: list[float]) -> float:
    return float(-(probs * np.log(probs)).sum())


def margin(probs: np.ndarray, _: list[float]) -> float:
    first, second = np.sort(probs)[::-1][:2]
    return float(first - second)


def last_prob(_: np.ndarray, drawn: list[float]) -> float:
    return drawn[-1]


def total_log_prob(_: np.ndarray, drawn: list[float]) -> float:
    return sum(map(math.log, drawn))


def greedy_draft(prompt: list[int], ends_before: Callable[[int, np.ndarray], bool], ends_after: Any) -> list[int]:
    """One sequence, one token at a time."""
    draft: list[int] = []
    drawn: list[float] = []
    while len(draft) < LONGEST:
        probs = distribution(DRAFT, prompt + draft)
        if ends_before(len(draft), probs):
            break
        token = int(probs.argmax())
        draft.append(token)
        drawn.append(float(probs[token]))
        if ends_after(probs, drawn):
            break
    return draft


def never(*_: Any) -> bool:
    return False


BEFORE = {
    "entropy": (Signal.ENTROPY, 2.2, True, entropy),
    "top prob": (Signal.TOP_PROB, 0.35, False, lambda probs, _: float(probs.max())),
    "margin": (Signal.MARGIN, 0.2, False, margin),
}
AFTER = BEFORE | {
    "token prob": (TokenSignal.TOKEN_PROB, 0.35, False, last_prob),
    "whole draft": (TokenSignal.TOTAL_LOG_PROB, -2.5, False, total_log_prob),
}


def sequences(count: int) -> list[Sequence]:
    rng = np.random.default_rng(3)
    made = []
    for i in range(count):
        tokens = rng.integers(0, 64, rng.integers(2, 12)).tolist()
        blocks = [2 * i, 2 * i + 1]
        params = SamplingParams(temperature=0, max_tokens=50)
        made.append(Sequence(str(i), 0, params, tokens, len(tokens), 50, frozenset(), i, i, block_table=blocks))
    return made


def beyond(value: float, threshold: float, above: bool) -> bool:
    return value > threshold if above else value < threshold


@pytest.mark.parametrize("first_depth", [0, 1])
@pytest.mark.parametrize("rule", BEFORE)
def test_a_rule_before_a_token_is_drawn(rule: str, first_depth: int) -> None:
    signal, threshold, above, value = BEFORE[rule]
    batch = sequences(12)
    stop = StopBefore(signal, np.full(12, threshold), above, first_depth)
    expected = [
        greedy_draft(s.tokens, lambda depth, p: depth >= first_depth and beyond(value(p, []), threshold, above), never)
        for s in batch
    ]
    check(batch, stop, expected)


@pytest.mark.parametrize("rule", AFTER)
def test_a_rule_after_a_token_is_drawn(rule: str) -> None:
    signal, threshold, above, value = AFTER[rule]
    batch = sequences(12)
    stop = StopAfter(signal, np.full(12, threshold), above)
    expected = [
        greedy_draft(s.tokens, never, lambda p, drawn: beyond(value(p, drawn), threshold, above)) for s in batch
    ]
    check(batch, stop, expected)


WORTH = {
    "kept": StopByWorth(np.array([-1.0, 2.0, 1.0]), np.full(12, 1.5), np.full(12, 0.8), 0.35, 0.0, 0.0),
    "going on": StopByWorth(np.array([-0.5, 2.0, 1.0]), np.linspace(0.5, 2, 12), np.full(12, 0.7), 0.1, 0.3, 0.0),
    "pass": StopByWorth(np.array([-0.5, 2.0, 1.0]), np.full(12, 1.5), np.linspace(0.4, 1, 12), 0.1, 0.1, 2.2),
    "dearer": StopByWorth(
        np.array([-0.5, 2.0, 1.0]), np.full(12, 1.5), np.full(12, 0.9), 0.1, 0.1, 0.5, np.full(12, 2), 0.35
    ),
    "with one of its own length": StopByWorth(
        np.array([-0.5, 2.0, 1.0]), np.array([0.6] * 4 + [np.inf] + [0.6] * 7), np.full(12, 0.8), 0.2, 0.3, 50.0
    ),
}


def drafts_by_worth(batch: list[Sequence], lengths: list[int], stop: StopByWorth) -> tuple[list[list[int]], int]:
    """The rule as it is told, for the whole batch: what is drafted, and in how many passes."""
    drafts: list[list[int]] = [[] for _ in batch]
    longest = math.inf if stop.usual is None else stop.usual.max()
    survival = [1.0] * len(batch)
    active = [i for i, length in enumerate(lengths) if length > 0]
    num_passes = 0
    while active:
        num_passes += 1
        would: list[int] = []
        for i in active:
            probs = distribution(DRAFT, batch[i].tokens + drafts[i])
            sure = min(max(float(probs.max()), 0.05), 0.999)
            looks = [math.sqrt(entropy(probs, [])), math.log(sure / (1 - sure)), margin(probs, [])]
            odds = stop.offsets[i] + sum(w * x for w, x in zip(stop.weights, looks, strict=True))
            survival[i] *= 1 / (1 + math.exp(-odds))
            keep_above = stop.keep_above + (stop.dearer if len(drafts[i]) >= longest else 0)
            if survival[i] < keep_above and odds < math.inf:
                continue
            drafts[i].append(int(probs.argmax()))
            worth = survival[i] * stop.outlooks[i]
            go_on_above = stop.go_on_above + (stop.dearer if num_passes >= longest else 0)
            if len(drafts[i]) < lengths[i] and (worth >= go_on_above or odds == math.inf):
                would.append(i)
        fixed = any(stop.offsets[i] == math.inf for i in would)
        together = sum(survival[i] * stop.outlooks[i] - go_on_above for i in would)
        active = would if fixed or together >= stop.pass_above else []
    return drafts, num_passes


@pytest.mark.parametrize("name", WORTH)
def test_a_rule_by_worth(name: str) -> None:
    batch, stop = sequences(12), WORTH[name]
    lengths = [LONGEST] * 8 + [0, 1, 2, 3]
    expected, num_passes = drafts_by_worth(batch, lengths, stop)
    check(batch, stop, expected, lengths, num_passes)
    if name == "pass":
        assert num_passes < LONGEST
        assert not all(len(draft) < num_passes for draft in expected)
    if name == "with one of its own length":
        assert num_passes == len(expected[4]) == LONGEST > max(map(len, expected[:4] + expected[5:]))


def check(
    batch: list[Sequence],
    stop: Stop,
    expected: list[list[int]],
    lengths: list[int] | None = None,
    num_passes: int | None = None,
) -> None:
    drafter = ModelDrafter(DRAFT, Sampler(), 64, 4096)
    drafter.allocate(2 * len(batch))
    wanted = np.array(lengths or [LONGEST] * len(batch))
    with torch.inference_mode():
        proposals = drafter.propose(batch, wanted, stop, want_token_probs=True, want_signals=True)
    drafts = [row[:length] for row, length in zip(proposals.tokens.tolist(), proposals.lengths, strict=True)]
    assert drafts == expected
    assert len({len(draft) for draft in drafts}) > 2, "the threshold should cut some drafts and not others"
    probs = [
        distribution(DRAFT, s.tokens + draft[:i])[token]
        for s, draft in zip(batch, expected, strict=True)
        for i, token in enumerate(draft)
    ]
    np.testing.assert_allclose(proposals.drafted_only(proposals.token_probs), probs, rtol=1e-4)
    signals = []
    for sequence, draft in zip(batch, expected, strict=True):
        for i in range(len(draft)):
            found = distribution(DRAFT, sequence.tokens + draft[:i])
            signals.append([entropy(found, []), found.max(), margin(found, [])])
    np.testing.assert_allclose(proposals.drafted_only(proposals.signals), signals, rtol=1e-3, atol=1e-5)
    assert num_passes is None or proposals.num_passes == num_passes
    # What the draft has read is what it is taken to have read: it drafts on as if it had never stopped.
    for sequence, draft in zip(batch, expected, strict=True):
        assert sequence.num_draft_computed <= len(sequence.tokens) + max(len(draft) - 1, 0)


class ByWorth(Policy):
    """Six tokens at most, fewer where they are worth less; remembers what it was told."""

    needs = Need.DRAFT_SIGNALS

    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []

    def plan(self, batch: BatchView) -> Plan:
        lengths = np.minimum(6, batch.rooms)
        ones = np.ones(len(lengths))
        stop = StopByWorth(np.array([-1.0, 2.0, 1.0]), 1.2 * ones, 0.7 * ones, 0.3, 0.35, 0.5)
        return Plan(lengths, lengths.astype(float), ones > 0, stop=stop)

    def observe(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)


POLICIES: dict[str, Callable[[], Policy]] = {
    "svip": lambda: SVIP(h=0.4, c=0.15, max=6),
    "adaedl": lambda: AdaEDL(max=5, threshold=0.4),
    "confidence": lambda: Confidence(0.3, max=5),
    "ddd": lambda: DDD(tau=-1.5, max=5),
    "margin": lambda: Margin(0.1, max=5),
    "worth": ByWorth,
}


@pytest.mark.parametrize(("draft", "seeded"), [("close", False), ("far", False), ("far", True)])
@pytest.mark.parametrize("name", POLICIES)
def test_lossless_by_distribution(name: str, draft: str, seeded: bool) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=4)
    counts = sample_outputs(DRAFTS[draft], POLICIES[name](), params, seeded, NUM_REQUESTS)
    assert p_value(enumerate_outputs(params), counts) > 1e-4


@pytest.mark.parametrize("name", POLICIES)
def test_greedy_text_is_that_of_the_target_alone(name: str) -> None:
    target, draft = tiny_model(seed=1), tiny_model(seed=1, noise=0.2)
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9]]
    params = SamplingParams(temperature=0, max_tokens=24)
    plain = complete(make_engine(target, None), prompts, params)
    engine = make_engine(target, draft, POLICIES[name]())
    stopped = complete(engine, prompts, params)
    assert [o.outputs[0].token_ids for o in stopped] == [o.outputs[0].token_ids for o in plain]
    assert engine.metrics.num_stopped > 0
    assert engine.metrics.num_undrafted == 0


def test_a_policy_is_told_the_signals_of_its_own_drafts() -> None:
    """One of three requests fixes its own length: it is never stopped, and what it drafts is nobody else's business."""
    policy = ByWorth()
    target, draft = tiny_model(seed=1), tiny_model(seed=1, noise=0.2)
    engine = make_engine(target, draft, policy)
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9]]
    names = []
    for prompt, speculation in zip(prompts, ("on", 3, "on"), strict=True):
        params = SamplingParams(temperature=0, max_tokens=24, speculation=speculation)  # type: ignore[arg-type]
        names.append(engine.add(prompt, params, trace=True))
    done = run(engine)
    assert len(policy.outcomes) > 5
    first = policy.outcomes[0]
    assert first.num_catch_up_tokens == sum(map(len, prompts))
    assert sum(o.num_catch_up_tokens for o in policy.outcomes) == engine.metrics.num_catch_up_tokens
    for result in policy.outcomes:
        assert result.draft_signals.shape == (result.drafted.sum(), 3)
        assert result.num_draft_passes >= result.drafted.max(initial=0)
    tokens = [done[name].outputs[0].token_ids for name in names]
    # Greedy drafts that stood are the text itself: their distributions can be found again.
    place = 0
    for i, row in ((0, 0), (2, 1)):
        prompt = prompts[i] + tokens[i][:1]
        for k in range(int(first.drafted[row])):
            if k <= first.accepted[row]:
                probs = distribution(draft, prompt + tokens[i][1 : 1 + k])
                np.testing.assert_allclose(
                    first.draft_signals[place + k], [entropy(probs, []), probs.max(), margin(probs, [])], rtol=1e-3
                )
        place += int(first.drafted[row])
    assert place > 0
    trace = done[names[1]].metrics.trace or []
    assert all(record.drafted == record.planned for record in trace)
    assert max(record.drafted for record in trace) == 3


def view(slots: list[int]) -> BatchView:
    count = len(slots)
    return BatchView(np.array(slots), np.full(count, 50), np.zeros(count), count)


def outcome(slots: list[int], drafted: list[int], accepted: list[int], probs: Any = ()) -> Outcome:
    integers = (np.array(values, dtype=np.int64) for values in (slots, drafted, accepted))
    return Outcome(*integers, np.empty(0), np.zeros(len(slots)), np.array(probs, dtype=np.float64))


def test_adaedl_adapts_each_sequence_by_its_own_rounds() -> None:
    policy = AdaEDL(gamma=0.2, max=7, threshold=0.5, alpha=0.9, epsilon=0.01, beta1=0.5, beta2=0.9)
    rng = np.random.default_rng(0)
    lambdas, rates = [0.5] * 3, [0.9] * 3
    for _ in range(200):
        drafted = rng.integers(0, 8, 3)
        accepted = np.array([rng.integers(0, d + 1) for d in drafted])
        policy.observe(outcome([0, 1, 2], drafted.tolist(), accepted.tolist()))
        for i in range(3):
            if drafted[i]:
                rates[i] = 0.5 * rates[i] + 0.5 * accepted[i] / drafted[i]
                moved = lambdas[i]
                if rates[i] < 0.9:
                    moved += 0.01
                elif accepted[i] != 7:
                    moved -= 0.01
                lambdas[i] = 0.9 * lambdas[i] + 0.1 * moved
        plan = policy.plan(view([0, 1, 2]))
        np.testing.assert_allclose(plan.signals["lambda"], lambdas)
        assert isinstance(plan.stop, StopBefore)
        for h in (0.1, 0.7, 2.0):
            stops = [1 - math.sqrt(0.2 * h) < value for value in lambdas]
            assert (h > plan.stop.thresholds).tolist() == stops
    policy.forget(np.array([1]))
    assert policy.plan(view([1])).signals["lambda"] == 0.5


def test_confidence_learns_from_what_was_compared() -> None:
    policy = Confidence(0.4, max=20)
    rng = np.random.default_rng(1)
    seen: list[tuple[float, bool]] = []
    for _ in range(40):
        drafted = rng.integers(0, 6, 4)
        accepted = np.array([rng.integers(0, d + 1) for d in drafted])
        probs = rng.random(drafted.sum()).round(2)
        policy.observe(outcome([0, 1, 2, 3], drafted.tolist(), accepted.tolist(), probs))
        place = 0
        for d, a in zip(drafted, accepted, strict=True):
            seen += [(probs[place + i], i < a) for i in range(min(a + 1, d))]
            place += d
        if len(seen) >= 6 and 0 < sum(good for _, good in seen) < len(seen):
            assert policy.threshold in brute_force([p for p, _ in seen], [good for _, good in seen])


def brute_force(probs: list[float], stood: list[bool]) -> set[float]:
    """All thresholds of least cost."""
    costs = {}
    for threshold in set(probs):
        taken = [p >= threshold for p in probs]
        alarms = sum(t and not s for t, s in zip(taken, stood, strict=True)) / (len(stood) - sum(stood))
        misses = sum(s and not t for t, s in zip(taken, stood, strict=True)) / sum(stood)
        costs[threshold] = alarms + 3 * misses
    return {threshold for threshold, cost in costs.items() if cost <= min(costs.values()) + 1e-9}


def test_best_threshold_keeps_equal_probabilities_together() -> None:
    assert best_threshold(np.array([0.9, 0.5, 0.5, 0.1]), np.array([True, True, False, False])) == 0.5


@pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)
def test_no_longer_than_the_room(make: Callable[[], Policy]) -> None:
    batch = view([0, 1])
    batch.rooms = np.array([0, 2])
    assert make().plan(batch).lengths.tolist() == [0, 2]
    make().observe(outcome([], [], []))


def test_how_far_drafts_go_is_what_caps_are_told() -> None:
    """A moving average of where the rule ended drafts; an end that only the limit made counts as two tokens farther."""
    policy = SVIP(max=10)
    expected: list[float] = []
    for drafted in (3, 5, 10, 2, 4):
        plan = policy.plan(view([7]))
        assert plan.votes.tolist() == [bool(expected)]
        if expected:
            assert plan.predicted[0] == pytest.approx(expected[-1])
        plan.lengths = np.minimum(plan.lengths, 4)  # what a stage would do
        drafted = min(drafted, 4)
        policy.observe(outcome([7], [drafted], [0]))
        reach = drafted + 2 if drafted == 4 else drafted
        expected.append(reach if not expected else 0.7 * expected[-1] + 0.3 * reach)
    policy.forget(np.array([7]))
    assert not policy.plan(view([7])).votes.any()


def test_a_cap_saves_a_batch_from_its_longest_draft() -> None:
    """The batch law: with verification free of the batch, stops of single sequences do not shorten the draft."""
    requests = Mixed(0.95, 0.4).draw(400, 96, seed=0)
    costs = Costs(draft=Line(0.2), verify=Line(1.0))

    def speed(spec: str, batch_size: int) -> float:
        return simulate(make_policy(spec), requests, costs, batch_size).tokens_per_s

    alone = speed("svip", 16)
    assert alone / speed("off", 16) < 0.75 * speed("svip", 1) / speed("off", 1)
    assert speed("svip|meancap", 16) > 1.15 * alone


def test_who_is_expected_to_go_on() -> None:
    """Those whose usual drafts are longer, and whoever is never stopped."""
    stop = StopByWorth(np.zeros(3), np.array([0.0, np.inf, 0.0]), np.ones(3), 0.1, 0.1, 0.5, np.array([3, 0, 1]), 0.1)
    ruling = Ruling(stop)
    everybody = np.arange(3)
    assert [ruling.num_expected(everybody, num_drafted) for num_drafted in (0, 1, 2, 3)] == [3, 2, 2, 1]
    assert ruling.num_expected(np.array([2]), 1) == 0
    assert Ruling(StopAfter(Signal.MARGIN, np.zeros(3), False)).num_expected(everybody, 5) == 3
