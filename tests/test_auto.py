"""`auto`: what it learns, what it chooses with that, and what comes of it in virtual time."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from dsde.core.stops import StopByWorth, make_looks
from dsde.policies import Auto, BatchView, CostModel, Outcome, Plan, Policy, make_policy
from dsde.policies.acceptance import AcceptanceModel
from dsde.policies.advice import Advice
from dsde.policies.advisor import LEAST_HOPE, MOST_EARLY
from dsde.policies.auto import MOST_REPEATS, _told_together
from dsde.policies.choice import Choice
from dsde.policies.steadiness import Steadiness
from dsde.simulation import Costs, Line, Requests, make_stream, simulate
from dsde.simulation.measured import MeasuredCosts

MEMORY_BOUND = Costs(Line(0.8e-3, 8, 8e-6), Line(3.9e-3, 8, 22e-6))
COMPUTE_BOUND = Costs(Line(2e-3, 4, 0.5e-3), Line(20e-3, 4, 5e-3))


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def outcome(drafted: list[int], accepted: list[int], signals: np.ndarray | None = None, **more: float) -> Outcome:
    count = len(drafted)
    return Outcome(
        slots=np.arange(count),
        drafted=np.array(drafted),
        accepted=np.array(accepted),
        klds=np.empty(0),
        temperatures=np.zeros(count),
        draft_signals=np.zeros((sum(drafted), 3)) if signals is None else signals,
        num_decoding=count,
        num_drafted=sum(drafted),
        num_draft_passes=max(drafted),
        **more,  # type: ignore[arg-type]
    )


def batch(count: int, room: int = 100) -> BatchView:
    return BatchView(np.arange(count), np.full(count, room), np.zeros(count), count)


def draft_and_test(
    model: AcceptanceModel, rng: np.random.Generator, weights: np.ndarray, own: np.ndarray, steps: int
) -> None:
    """Four tokens for everybody, whose chances follow from the weights and a number of their own."""
    for _ in range(steps):
        signals = np.stack((rng.gamma(1.0, 1.5, 4 * own.size), rng.random(4 * own.size), rng.random(4 * own.size)), 1)
        looks = np.column_stack((np.ones(len(signals)), make_looks(signals)))
        stands = (rng.random(len(signals)) < sigmoid(looks @ weights + np.repeat(own, 4))).reshape(-1, 4)
        accepted = np.minimum.accumulate(stands, axis=1).sum(axis=1)
        model.observe(outcome([4] * own.size, accepted.tolist(), signals))


def test_chances_are_learnt_from_what_was_tested() -> None:
    rng, model = np.random.default_rng(0), AcceptanceModel()
    weights = np.array([2.0, -1.5, 0.5, 1.0])
    draft_and_test(model, rng, weights, np.zeros(16), 300)
    signals = np.stack((rng.gamma(1.0, 1.5, 500), rng.random(500), rng.random(500)), 1)
    looks = make_looks(signals)
    learnt = sigmoid(model.offsets(model.outlooks(np.array([40]))[0]) + looks @ model.weights[2:])
    assert np.abs(learnt - sigmoid(weights[0] + looks @ weights[1:])).mean() < 0.03


def test_a_sequence_of_its_own_kind_is_told_from_others_and_forgotten() -> None:
    rng, model = np.random.default_rng(1), AcceptanceModel()
    own = np.array([2.0, -2.0] * 8)
    draft_and_test(model, rng, np.array([0.5, 0.0, 0.0, 0.0]), own, 60)
    slots = np.arange(16)
    outlooks, doubts = model.outlooks(slots)
    offsets = model.offsets(outlooks)
    assert outlooks[::2].min() > outlooks[1::2].max() + 0.3
    assert offsets[::2].min() > offsets[1::2].max() + 1.0
    assert (doubts < 0.15).all()
    model.forget(slots)
    assert model.outlooks(slots)[0] == pytest.approx(np.full(16, model.rate))


def test_everybodys_rate_is_that_of_sequences_and_not_of_tokens() -> None:
    """Easy ones draft more, and must not speak for those who have just come."""
    rng, model = np.random.default_rng(4), AcceptanceModel()
    for _ in range(200):
        lengths = np.array([8, 1] * 8)
        stands = rng.random((16, 8)) < np.array([0.95, 0.4] * 8)[:, None]
        accepted = np.minimum(np.minimum.accumulate(stands, axis=1).sum(axis=1), lengths)
        model.observe(outcome(lengths.tolist(), accepted.tolist(), rng.random((int(lengths.sum()), 3))))
    assert 0.6 < model.rate < 0.75


def test_where_nobody_looked_history_is_learnt_all_the_same() -> None:
    model, rng = AcceptanceModel(), np.random.default_rng(0)
    draft_and_test(model, rng, np.zeros(4), np.zeros(2), 20)
    weights, rate = model.weights.copy(), model.rate
    for _ in range(50):
        model.observe(outcome([4, 4], [4, 4], np.empty((0, 3))))
    assert np.array_equal(model.weights, weights)
    assert model.rate > rate
    assert (model.outlooks(np.arange(2))[0] > 0.9).all()


def test_signals_that_tell_nothing_are_left_to_history() -> None:
    rng, model = np.random.default_rng(5), AcceptanceModel()
    rates = np.array([0.9, 0.3] * 4)
    for _ in range(400):
        stands = rng.random((8, 4)) < rates[:, None]
        accepted = np.minimum.accumulate(stands, axis=1).sum(axis=1)
        model.observe(outcome([4] * 8, accepted.tolist(), rng.random((32, 3))))
    offsets = model.offsets(model.outlooks(np.arange(8))[0])
    looks = np.column_stack((np.sqrt(rng.random(500)), rng.random((500, 2)))) @ model.weights[2:]
    for offset, rate in zip(offsets, rates, strict=True):
        assert np.abs(sigmoid(offset + looks) - rate).mean() < 0.1


def test_a_request_that_turns_is_another_one_within_a_few_steps() -> None:
    """From prose to code, with signals that do not tell: what is known of sixty steps is outweighed by five."""
    rng, model = np.random.default_rng(2), AcceptanceModel()
    weights = np.array([0.5, 0.0, 0.0, 0.0])
    draft_and_test(model, rng, weights, np.full(8, -2.0), 60)
    before = model.outlooks(np.arange(8))[0].mean()
    draft_and_test(model, rng, weights, np.full(8, 3.0), 5)
    assert before < 0.3
    assert model.outlooks(np.arange(8))[0].mean() > 0.65


def test_after_a_long_pause_a_few_tokens_count_more_than_before_it() -> None:
    """Those who looked at dull requests all day must see at once that the next ones are not."""
    rng, weights = np.random.default_rng(3), np.array([-0.5, 0.0, 0.0, 0.0])
    outlooks = []
    for num_idle in (0, 1000):
        model = AcceptanceModel()
        for _ in range(40):
            draft_and_test(model, rng, weights, np.zeros(4), 4)
            model.forget(np.arange(4))
        for _ in range(num_idle):
            model.observe(outcome([0], [0]))
        model.forget(np.arange(4))
        model.observe(outcome([4], [4]))
        outlooks.append(float(model.outlooks(np.array([0]))[0][0]))
    assert outlooks[0] < 0.55
    assert outlooks[1] > outlooks[0] + 0.1


def test_what_was_behind_a_rejection_teaches_nothing() -> None:
    one, other = AcceptanceModel(), AcceptanceModel()
    rng = np.random.default_rng(3)
    signals = rng.random((4, 3))
    changed = signals.copy()
    changed[2:] = rng.random((2, 3))  # the second token was rejected
    one.observe(outcome([4], [1], signals))
    other.observe(outcome([4], [1], changed))
    assert np.array_equal(one.weights, other.weights)
    assert one.outlooks(np.array([0]))[0] == other.outlooks(np.array([0]))[0]


class Known(CostModel):
    """Costs that need not be learnt."""

    def __init__(self, costs: Costs) -> None:
        super().__init__()
        self.costs = costs

    def verify_s(self, tokens: object) -> np.ndarray:
        return self.costs.verify.seconds_of(np.asarray(tokens, np.float64))  # type: ignore[arg-type]

    def draft_s(self, batch_sizes: object) -> np.ndarray:
        return self.costs.draft.seconds_of(np.asarray(batch_sizes, np.float64))  # type: ignore[arg-type]

    def is_below(self, tokens: float) -> bool:
        return False


def rate_of(lengths: np.ndarray, outlooks: np.ndarray, costs: Costs) -> float:
    """Tokens per second, written out."""
    drafts = zip(outlooks, lengths, strict=True)
    emitted = sum(1 + sum(outlook**d for d in range(1, length + 1)) for outlook, length in drafts)
    return emitted / (costs.draft_s(lengths) + costs.verify.seconds(int(len(lengths) + lengths.sum())))


@pytest.mark.parametrize("costs", [MEMORY_BOUND, COMPUTE_BOUND, Costs(Line(1e-3), Line(4e-3, 4, 4e-4))])
@pytest.mark.parametrize("seed", range(4))
def test_lengths_are_nearly_the_best_of_all(costs: Costs, seed: int) -> None:
    outlooks = np.random.default_rng(seed).uniform(0.2, 0.97, 3)
    choice = Auto(max=6, cost=Known(costs)).advisor._choose(batch(3), outlooks, 0.0)
    best = max(rate_of(np.array(lengths), outlooks, costs) for lengths in product(range(7), repeat=3))
    assert choice.rate == pytest.approx(rate_of(choice.lengths, outlooks, costs), rel=0.03)
    assert rate_of(choice.lengths, outlooks, costs) > 0.99 * best


class Measured(Known):
    def is_measured(self, tokens: float) -> bool:
        return True


def test_a_bend_behind_the_tokens_chosen_is_not_their_price() -> None:
    """Or all would be drafted and none verified, and what lies behind it would never be measured again."""
    plan = Auto(cost=Measured(Costs(Line(0.05e-3), Line(1e-3, 5, 4e-3)))).plan(batch(1))
    assert plan.predicted[0] == 4
    assert plan.stop is not None
    assert plan.stop.keep_above < 0.1


def test_steps_without_drafts_are_measured_before_anything_is_compared_with_them() -> None:
    """Of a pass over 7 tokens nobody can tell what one takes, and whatever is guessed decides whether to draft."""
    policy = Auto()
    lengths = []
    for _ in range(6):
        plan = policy.plan(batch(1))
        lengths.append(int(plan.lengths[0]))
        is_cold = len(lengths) <= 2  # the engine captured graphs, and says nothing of what that took
        seconds = {} if is_cold else {"draft_s": 0.5e-3 * lengths[-1], "verify_s": 1.1e-3 + 0.03e-3 * lengths[-1]}
        policy.observe(outcome(lengths[-1:], lengths[-1:], **seconds))
    assert lengths[:4] == [0, 0, 0, 0]
    assert lengths[5] > 0
    assert policy.plan(batch(1)).signals["rate_off"][0] == pytest.approx(1 / 1.1e-3, rel=0.01)


def test_a_size_that_never_comes_is_not_waited_for() -> None:
    """Prompts are read in every step, which the plan did not know."""
    policy = Auto()
    drafted = False
    for _ in range(20):
        plan = policy.plan(batch(4))
        drafted = drafted or bool(plan.lengths.any())
        length = int(plan.lengths[0])
        seconds = {"draft_s": 0.5e-3 * length, "verify_s": 8e-3}
        policy.observe(outcome([length] * 4, [length] * 4, num_prompt_tokens=512, **seconds))
    assert drafted


def test_an_engine_that_measures_nothing_is_not_waited_for() -> None:
    policy = Auto()
    lengths = []
    for _ in range(12):
        lengths.append(int(policy.plan(batch(1)).lengths[0]))
        policy.observe(outcome(lengths[-1:], lengths[-1:]))
    assert lengths[0] == 0
    assert lengths[-1] > 0


def test_one_length_where_the_engine_favours_it() -> None:
    """The shortest that brings as much as the best, by hand; without being asked for it lengths differ."""
    policy = Auto(cost=Known(MEMORY_BOUND))
    for _ in range(40):
        view = batch(4)
        view.favours_one_length = True
        lengths = policy.plan(view).lengths
        assert len(set(lengths.tolist())) == 1
        drafted = lengths.tolist()
        policy.observe(outcome(drafted, [drafted[0], drafted[1], 0, 0], np.full((sum(drafted), 3), 0.5)))
    outlooks, _ = policy.advisor.acceptance.outlooks(np.arange(4))
    assert outlooks[:2].min() > outlooks[2:].max() + 0.2
    assert len(set(policy.advisor._choose(batch(4), outlooks, 0.0).lengths.tolist())) > 1
    view.favours_one_length = True
    chosen = policy.advisor._choose(view, outlooks, 0.0)
    rates = {
        length: (4 + sum(float((p ** np.arange(1, length + 1)).sum()) for p in outlooks))
        / (length * float(policy.cost.draft_s(4)) + float(policy.cost.verify_s(4 + 4 * length)))
        for length in range(1, 21)
    }
    # Outlooks are rounded to few kinds, so rates may be a little off.
    least = [min(length for length in rates if rates[length] >= share * max(rates.values())) for share in (0.97, 0.99)]
    (length,) = set(chosen.lengths.tolist())
    assert least[0] <= length <= least[1] < max(rates, key=lambda length: rates[length])
    assert chosen.rate == pytest.approx(rates[length], rel=0.02)


@pytest.mark.parametrize("obeys", [True, False])
def test_who_obeys_no_rule_is_given_no_benefit_of_the_doubt(obeys: bool) -> None:
    """Nobody would end a draft that turns out too long."""
    policy = Auto(cost=Known(MEMORY_BOUND))
    rng = np.random.default_rng(3)
    for _ in range(12):
        plan = policy.plan(batch(1))
        drafted = [4 if plan.lengths.any() else 0]
        seen = outcome(drafted, [min(int(rng.geometric(0.3)) - 1, *drafted)], rng.random((drafted[0], 3)))
        policy.observe(replace(seen, is_ruled=obeys and plan.stop is not None))
    assert policy.advisor.is_drafting
    outlooks, doubts = policy.advisor.acceptance.outlooks(np.arange(1))
    assert doubts[0] > 0.03
    hoped = policy.advisor._choose(batch(1), outlooks + doubts, policy.advisor._start_s).lengths
    expected = policy.advisor._choose(batch(1), outlooks, policy.advisor._start_s).lengths
    assert hoped[0] > expected[0]
    assert policy.plan(batch(1)).predicted.tolist() == (hoped if obeys else expected).tolist()


@pytest.mark.parametrize("most", [1, 4])
def test_drafts_of_another_length_are_tried_where_there_may_be_any(most: int) -> None:
    """Where no rule ends drafts, and all were of one token, nobody knows what two take; but they may have no more."""
    policy, wanted = Auto(max=most), []
    for _ in range(60):
        plan = policy.plan(batch(8))
        wanted.append(int(plan.predicted.max()))
        drafted = np.minimum(plan.lengths, 1 if len(wanted) < 30 else most).tolist()
        seen = outcome(drafted, [min(1, each) for each in drafted], np.full((sum(drafted), 3), 0.5), verify_s=8e-3)
        policy.observe(replace(seen, draft_s=5e-3 * max(drafted)))
        policy.settle()
    assert policy.cost.needs_another_length or most > 1
    assert 1 <= max(wanted) <= most


def test_it_says_what_the_last_and_the_next_token_would_bring_and_cost() -> None:
    policy = Auto(cost=Known(MEMORY_BOUND))
    plan = policy.plan(batch(4))
    assert plan.lengths.all()
    assert plan.stop is not None
    signals = plan.signals
    assert (signals["gain_of_last"] > signals["gain_of_next"]).all()
    assert (signals["gain_of_last"] >= signals["cost_of_token"]).all()
    assert np.isfinite(np.stack(list(signals.values()))).all()
    assert (signals["rate"] > signals["rate_off"]).all()


def drive(policy: Policy, rates: list[float], costs: Costs, num_seqs: int, warms_up: bool = False) -> list[int]:
    """How many were drafted in steps whose drafts stand at these rates, whatever they look like.

    With `warms_up` nobody knows what the first two passes of every shape took, as where graphs are captured.
    """
    rng, drafted = np.random.default_rng(0), []
    uses: Counter[object] = Counter()

    def is_known(shape: object) -> bool:
        uses[shape] += 1
        return not warms_up or uses[shape] > 2

    for rate in rates:
        plan = policy.plan(batch(num_seqs))
        lengths = plan.lengths
        stands = rng.random((num_seqs, max(int(lengths.max()), 1))) < rate
        accepted = np.minimum(np.minimum.accumulate(stands, axis=1).sum(axis=1), lengths)
        total = int(lengths.sum())
        is_cold = not is_known(round(4 * np.log2(num_seqs + total))) or (total > 0 and not is_known("draft"))
        policy.observe(
            outcome(
                lengths.tolist(),
                accepted.tolist(),
                rng.random((total, 3)),
                draft_s=0.0 if is_cold else costs.draft_s(lengths),
                verify_s=0.0 if is_cold else costs.verify.seconds(num_seqs + total),
            )
        )
        drafted.append(total)
    return drafted


def test_a_plan_made_ahead_is_the_plan_made_late() -> None:
    """While the device is busy or when it is waited for: what was learnt is the same, so lengths and reasons are."""
    rng, ahead, late = np.random.default_rng(8), Auto(), Auto()
    for _ in range(30):
        plans = [policy.plan(batch(4)) for policy in (ahead, late)]
        assert np.array_equal(plans[0].lengths, plans[1].lengths)
        for name, values in plans[0].signals.items():
            assert np.array_equal(values, plans[1].signals[name]), name
        ahead.settle()
        lengths = plans[0].lengths
        found = outcome(
            lengths.tolist(),
            rng.integers(0, lengths + 1).tolist(),
            rng.random((int(lengths.sum()), 3)),
            draft_s=MEMORY_BOUND.draft_s(lengths),
            verify_s=MEMORY_BOUND.verify.seconds(4 + int(lengths.sum())),
        )
        for policy in (ahead, late):
            policy.observe(found)


def test_it_says_whether_the_next_plan_will_be_by_a_rule() -> None:
    """As soon as that has been thought of."""
    policy, rng = Auto(cost=Known(MEMORY_BOUND)), np.random.default_rng(0)
    assert policy.rules_on()
    said = []
    for _ in range(60):
        plan = policy.plan(batch(4))
        policy.settle()
        said.append((policy.rules_on(), plan.stop is not None))
        drafted = plan.lengths.tolist()
        seen = outcome(drafted, drafted, rng.random((sum(drafted), 3)), verify_s=4e-3)
        policy.observe(replace(seen, is_ruled=plan.stop is not None))
    assert [foretold for foretold, _ in said[:-1]] == [is_ruled for _, is_ruled in said[1:]]
    assert len(set(said)) > 2


def test_a_plan_made_for_others_is_not_used() -> None:
    policy = Auto(cost=Known(MEMORY_BOUND))
    policy.plan(batch(4))
    policy.settle()
    assert policy.plan(batch(6)).lengths.size == 6
    policy.settle()
    short = BatchView(np.arange(6), np.array([0, 1, 100, 100, 100, 100]), np.zeros(6), 6)
    assert (policy.plan(short).lengths <= short.rooms).all()


def test_a_request_without_room_does_not_stop_those_after_it() -> None:
    """Its last token cannot be drafted, which says nothing of whether drafts pay: whoever comes next drafts at once,
    and does not wait until that would have paid for reading its prompt."""
    policy = Auto(cost=Known(MEMORY_BOUND))
    while not policy.plan(batch(1)).lengths.any():
        policy.observe(outcome([0], [0], verify_s=4e-3))
    policy.observe(outcome([1], [1], np.array([[0.1, 0.9, 0.8]]), draft_s=1e-3, verify_s=4e-3))
    assert not policy.plan(batch(1, room=0)).lengths.any()
    policy.observe(outcome([0], [0], verify_s=4e-3))
    policy.forget(np.array([0]))
    coming = replace(batch(1), num_missed=np.array([60]), num_left=np.array([1000]))
    assert policy.cost.catch_up_s(60) > 0
    assert policy.plan(coming).predicted.any()  # not only to look


def test_neither_patience_nor_a_decision_to_stop_is_lost_where_there_is_no_room() -> None:
    advisor = Auto(cost=Known(MEMORY_BOUND)).advisor
    advice = advisor.advise(batch(1, room=0))
    assert advice.is_roomless
    advisor.is_drafting, advisor.num_doubtful = True, 5
    advisor.take(advice)
    advisor.learn(outcome([0], [0], verify_s=4e-3), advice)
    assert advisor.is_drafting
    assert advisor.num_doubtful == 5
    # Thought of while there was room, and followed when there was none left.
    advisor.take(replace(advice, is_roomless=False))
    assert not advisor.is_drafting


class Thinking(Auto):
    """Counts how often it thinks of a plan."""

    def __init__(self, cost: CostModel | None = None) -> None:
        super().__init__(cost=cost)
        self.num_thoughts = 0
        think = self.advisor.advise

        def counted(batch: BatchView) -> Advice:
            self.num_thoughts += 1
            return think(batch)

        self.advisor.advise = counted  # type: ignore[method-assign]


def test_what_follows_on_a_rest_is_thought_of_before_its_end() -> None:
    """With the last of its steps under way: nobody has to wait for it then."""
    policy, rng = Thinking(), np.random.default_rng(0)
    num_rests = 0
    for _ in range(60):
        plan = policy.plan(batch(8))
        num_rests += plan.num_resting > 0
        for number in range(plan.num_resting + 1):
            before = policy.num_thoughts
            policy.settle()
            # Not in the midst of it: nothing that is thought then will still be good.
            assert policy.num_thoughts == before + (number >= plan.num_resting)
            policy.observe(all_rejected(plan, rng))
        before = policy.num_thoughts
        policy.plan(batch(8))
        assert policy.num_thoughts == before
        policy.observe(all_rejected(plan, rng))
    assert num_rests > 10


@pytest.mark.parametrize("is_late", [False, True])
def test_a_plan_is_thought_of_while_prompts_are_read(is_late: bool) -> None:
    """For those who will decode in the next step, with all that their draft has to read first; not for others."""
    policy = Thinking(cost=Known(MEMORY_BOUND))
    coming = batch(4)
    coming.num_missed = np.full(4, 300)
    policy.settle(coming)
    assert policy.num_thoughts == 1
    assert policy.cost.num_behind(coming.slots) == 1200
    view = batch(5 if is_late else 4)
    view.num_missed = np.full(view.slots.size, 301)
    policy.plan(view)
    assert policy.num_thoughts == 1 + is_late


@pytest.mark.parametrize("rate", [0.5, 0.55, 0.6])
def test_it_does_not_thrash_where_drafting_pays_about_as_much_as_not(rate: float) -> None:
    """Near the break-even nothing is lost by either; what would be lost is lost by going to and fro."""
    requests = stream(f"iid:{rate}", telling=False, num_tokens=512)
    costs = Costs(Line(3.2e-3), Line(6e-3, 64, 20e-6))
    policy = Auto()
    simulate(policy, requests, costs, 32)
    policy.forget(np.arange(32))
    speed = simulate(policy, requests, costs, 32).tokens_per_s
    off, one = (simulate(make_policy(spec), requests, costs, 32).tokens_per_s for spec in ("off", "static:1"))
    assert 0.9 < off / one < 1.1
    assert speed > 0.97 * max(off, one)


def test_it_stops_where_drafting_cannot_pay_and_looks_again_at_a_bounded_price() -> None:
    policy = Auto()
    drafted = drive(policy, [0.05] * 600 + [0.95] * 900, MEMORY_BOUND, 8)
    quiet = drafted[200:600]
    assert sum(count > 0 for count in quiet) < 0.1 * len(quiet)
    assert sum(count > 0 for count in drafted[-100:]) > 90


def all_rejected(plan: Plan, rng: np.random.Generator) -> Outcome:
    num_drafted = int(plan.lengths.sum())
    return outcome(
        plan.lengths.tolist(),
        [0] * plan.lengths.size,
        rng.random((num_drafted, 3)),
        draft_s=MEMORY_BOUND.draft_s(plan.lengths),
        verify_s=MEMORY_BOUND.verify.seconds(plan.lengths.size + num_drafted),
    )


def test_while_it_rests_it_says_for_how_long() -> None:
    """Steps that a device may be given ahead: in none of them is it time for a look."""
    policy, rng = Auto(), np.random.default_rng(0)
    rests = []
    for _ in range(200):
        plan = policy.plan(batch(8))
        for _ in range(1 + plan.num_resting):
            policy.observe(all_rejected(plan, rng))
        assert plan.num_resting == 0 or not plan.lengths.any()
        rests.append(plan.num_resting)
        policy.settle()
    assert np.mean(rests[100:]) > 5
    assert sum(rest == 0 for rest in rests[100:]) >= 5  # and looks again


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("spec", ["auto", "goodput"])
def test_looks_come_in_pairs_where_drafts_from_rest_are_told_from_others(spec: str, counts: bool) -> None:
    """One behind the other, the second planned before the first is over; and drafting is begun at the price of drafts
    that go on, though one from rest takes ten times as long."""
    rng, policy = np.random.default_rng(0), make_policy(spec)
    rows, missed = batch(2), np.full(2, 60)
    drafts: list[bool] = []
    for number in range(3000):
        chance = 0.95 if number > 2000 else 0.0
        rows.num_missed = missed.copy() if counts else None
        plan = policy.plan(rows)
        policy.settle()
        lengths = np.minimum(plan.lengths, 4)
        drafts.append(bool(lengths.any()))
        missed = np.where(lengths > 0, 0, missed + 1)
        stands = rng.random((2, 4)) < chance
        accepted = np.minimum(np.minimum.accumulate(stands, axis=1).sum(axis=1), lengths)
        found = outcome(lengths.tolist(), accepted.tolist(), verify_s=4e-3)
        if drafts[-1]:
            found.is_resumed = not (len(drafts) > 1 and drafts[-2])
            found.draft_s = float(lengths.max()) * 0.5e-3 + (4e-3 if found.is_resumed else 0.0)
        policy.observe(found)
    looks = "".join("#" if drafted else "." for drafted in drafts[1000:2000])
    assert looks.count("##") > 2
    assert ".#." not in looks
    assert "###" not in looks
    assert np.mean(drafts[-500:]) > 0.95


def test_it_rests_while_what_it_forgoes_does_not_pay_for_beginning() -> None:
    """Every step in which it is asked is one in which a device may wait for the answer."""
    cost = Known(MEMORY_BOUND)
    policy, rng = Auto(cost=cost), np.random.default_rng(0)
    policy.cost.catch_up_s = lambda tokens: np.asarray(0.05 * (np.asarray(tokens) > 0))  # type: ignore[method-assign]
    policy.cost.num_behind = lambda slots: 4096  # type: ignore[method-assign]
    rests = []
    for _ in range(60):
        plan = policy.plan(batch(8))
        if plan.stop is not None:
            break
        for _ in range(1 + plan.num_resting):
            policy.observe(replace(all_rejected(plan, rng), accepted=plan.lengths))
        rests.append(plan.num_resting)
        policy.settle()
    assert plan.stop is not None, "it begins when enough was foregone"
    assert max(rests) > 2


@pytest.mark.parametrize("has_prompts", [True, False])
def test_what_drafts_would_have_saved_of_others_is_no_reason_to_read_prompts(has_prompts: bool) -> None:
    """Who has ended takes along what was foregone, by as much as there is to read of those who are new."""
    rng, cost = np.random.default_rng(0), Known(MEMORY_BOUND)
    cost.catch_up_s = lambda tokens: 1e-5 * np.asarray(tokens, np.float64)  # type: ignore[method-assign]
    policy, missed = Auto(cost=cost), np.full(8, 700)

    def num_steps_until_it_begins(most: int = 1000) -> int:
        nonlocal missed
        for num_steps in range(most):
            view = batch(8)
            view.num_missed = missed.copy()
            plan = policy.plan(view)
            if plan.stop is not None:
                return num_steps
            missed = np.where(plan.lengths > 0, 0, missed + 1)
            policy.observe(replace(all_rejected(plan, rng), accepted=plan.lengths))
            policy.settle()
        return most

    alone = num_steps_until_it_begins()
    policy, missed = Auto(cost=cost), np.full(8, 700)
    assert num_steps_until_it_begins(alone - 2) == alone - 2
    policy.forget(np.arange(8))
    missed[:] = 700 if has_prompts else 0
    assert (num_steps_until_it_begins() > alone / 2) == has_prompts


@pytest.mark.parametrize(("num_left", "at_once"), [(400, True), (30, False), (None, False)])
def test_it_begins_at_once_where_that_clearly_pays_before_requests_end(num_left: int | None, at_once: bool) -> None:
    """Not where nobody knows when they will."""
    cost = Known(MEMORY_BOUND)
    cost.catch_up_s = lambda tokens: 1e-5 * np.asarray(tokens, np.float64)  # type: ignore[method-assign]
    policy, view = Auto(cost=cost), batch(8)
    view.num_missed, view.num_left = np.full(8, 1000), None if num_left is None else np.full(8, num_left)
    assert (policy.plan(view).stop is not None) == at_once


@pytest.mark.parametrize(("resume_s", "num_left", "pauses"), [(0.0, 20, True), (5e-3, 20, False), (5e-3, 100, True)])
def test_it_does_not_pause_to_measure_where_beginning_again_takes_long(
    resume_s: float, num_left: int, pauses: bool
) -> None:
    """Just before requests end, that is."""
    cost = Known(MEMORY_BOUND)
    cost._resumes_s.append(resume_s)
    advisor, view = Auto(cost=cost).advisor, batch(8)
    view.num_left = np.full(8, num_left)
    advisor.is_drafting = True
    advisor.recheck.is_due = lambda num_sequences: True  # type: ignore[method-assign]
    cost.can_rest = lambda batch: True  # type: ignore[method-assign]
    choice = Choice(np.ones(8, np.int64), rate=1100.0, seconds=0.01, rate_off=1000.0)
    assert advisor._is_blind(view, choice) == pauses


@pytest.mark.parametrize(("num_tokens", "pays"), [(20, False), (400, True)])
def test_a_prompt_is_read_where_drafts_will_have_paid_for_it(num_tokens: int, pays: bool) -> None:
    """Whoever is drafting when short answers to long prompts come reads none of them, and learns that of the first."""
    costs = MeasuredCosts(
        draft=[[1, 0.5e-3], [8, 0.6e-3]],
        verify=[[8, 8, 1.3e-3], [8, 16, 1.45e-3], [8, 40, 2.1e-3]],
        catch_up=[[16, 1.6e-3], [400, 2.6e-3], [1300, 8.5e-3], [2600, 18e-3]],
    )
    policy = Auto()
    simulate(policy, make_stream("iid:0.9").draw(32, 200, 0), costs, 8)
    policy.forget(np.arange(8))
    requests = make_stream("iid:0.9").draw(48, num_tokens, 1)
    requests.num_prompt_tokens[:] = 700
    speeds = []
    for _ in range(6):  # a look now and then
        speeds.append(simulate(policy, requests, costs, 8, unread=True).tokens_per_s)
        policy.forget(np.arange(8))
    off = simulate(make_policy("off"), requests, costs, 8, unread=True).tokens_per_s
    all_along = simulate(make_policy("static:3"), requests, costs, 8, unread=True).tokens_per_s
    assert (all_along > off) == pays, "or it is not what is to be tested"
    assert np.mean(speeds) > 0.97 * max(off, all_along)


@pytest.mark.parametrize("num_missed", [0, 1000])
def test_who_has_nothing_to_read_drafts_however_little_it_brings(num_missed: int) -> None:
    """Drafts that bring less than they are in doubt by are no reason to read much, nor to stop for everybody."""
    advisor, view = Auto(cost=Known(MEMORY_BOUND)).advisor, batch(8)
    view.num_missed = np.array([num_missed] + 7 * [0])
    advisor.cost.see(view)
    advisor.is_drafting = True
    choice = Choice(np.ones(8, np.int64), rate=1020.0, seconds=0.01, rate_off=1000.0)
    advisor._choose_for_next = lambda *_: choice  # type: ignore[method-assign]
    assert advisor._is_worth_reading(view, choice, np.full(8, 0.5)).tolist() == [not num_missed] + 7 * [True]


@pytest.mark.parametrize("num_joining", [0, 3])
@pytest.mark.parametrize("num_others", [0, 2])
def test_reading_is_weighed_beside_requests_that_choose_for_themselves(num_joining: int, num_others: int) -> None:
    """These decode as well, and never draft. What else is asked of costs is about the batch that there is."""
    policy = Auto()
    drive(policy, [0.9] * 60, MEMORY_BOUND, 4)
    advisor, view = policy.advisor, batch(4)
    view.num_decoding, view.num_joining = 4 + num_others, num_joining
    view.num_missed, view.num_left = np.array([0, 0, 0, 60]), np.full(4, 500)
    advisor.cost.see(view)
    chosen: list[tuple[int, int]] = []
    choose = advisor._choose

    def note(batch: BatchView, outlooks: np.ndarray, start_s: float) -> Choice:
        chosen.append((batch.num_sequences, outlooks.size))
        return choose(batch, outlooks, start_s)

    advisor._choose = note  # type: ignore[method-assign]
    turned_to: list[int] = []
    advisor.cost.turn_to = turned_to.append  # type: ignore[method-assign]
    _, is_worth = advisor._choose_readers(view, np.full(4, 0.9), np.full(4, 0.9))
    assert is_worth.all()
    assert chosen[:2] == [(4 + num_others, 4), (4 + num_others + num_joining, 4 + num_joining)]
    assert turned_to == [4 + num_others + num_joining, 4 + num_others]


def test_who_joined_is_not_taken_to_join_again() -> None:
    policy, view = Auto(), batch(4)
    view.num_joining = 3
    policy.plan(view)
    policy.settle()
    assert policy._next is not None
    assert policy._next.batch.num_joining == 0


def test_where_nothing_can_pay_in_the_next_step_nobody_reads() -> None:
    advisor, view = Auto(cost=Known(MEMORY_BOUND)).advisor, batch(2)
    view.num_missed, view.num_left = np.array([0, 60]), np.full(2, 500)
    advisor.is_drafting = True
    advisor.cost.see(view)
    _, is_worth = advisor._choose_readers(view, np.full(2, 0.006), np.full(2, 0.9))
    assert is_worth.tolist() == [True, False]


@pytest.mark.parametrize("num_joining", [0, 15])
def test_what_a_draft_reads_is_read_for_those_who_will_be_there(num_joining: int) -> None:
    """One sequence gains by drafts, sixteen do not, where every token has its price."""
    advisor, view = Auto(cost=Known(COMPUTE_BOUND)).advisor, batch(1)
    advisor.cost.catch_up_s = lambda tokens: 1e-4 * np.asarray(tokens, np.float64)  # type: ignore[method-assign]
    view.num_missed, view.num_left, view.num_joining = np.full(1, 60), np.full(1, 500), num_joining
    advisor.is_drafting = True
    advisor.cost.see(view)
    outlooks = np.full(1, 0.8)
    _, is_worth = advisor._choose_readers(view, outlooks, outlooks)
    assert is_worth.tolist() == [not num_joining]


@pytest.mark.parametrize(("gain", "expected"), [(1.02, False), (1.06, True)])
def test_whoever_leaves_somebody_out_must_bring_more(gain: float, expected: bool) -> None:
    """Those who draft end first, and leave the others in a smaller batch. Nobody is left out who has no room."""
    advisor, view = Auto(cost=Known(MEMORY_BOUND)).advisor, batch(8)
    advisor.is_drafting = True
    for outlooks, leaves_out in ((np.full(8, 0.9), False), (np.repeat([0.9, 0.02], 4), True)):
        choice = advisor._choose(view, outlooks, 0.0)
        assert choice.leaves_out == leaves_out
        choice.rate = gain * choice.rate_off
        assert advisor._seems_to_pay(choice) == (expected or not leaves_out)
    for room in (0, 10):  # and who will have ended before the others is not left behind
        view.rooms[4:] = room
        assert not advisor._choose(view, np.repeat([0.9, 0.02], 4), 0.0).leaves_out


@pytest.mark.parametrize(("num_tokens", "reads"), [(20, False), (600, True)])
def test_how_long_requests_last_is_learnt_from_those_that_ended(num_tokens: int, reads: bool) -> None:
    """They have room for a thousand tokens, and every draft stands. The first ones need not be read."""
    policy, rng = Auto(cost=Known(MEMORY_BOUND)), np.random.default_rng(0)
    policy.cost.catch_up_s = lambda tokens: 2e-4 * np.asarray(tokens, np.float64)  # type: ignore[method-assign]
    for number in range(20):
        missed, emitted = np.full(8, 700 if number else 0), np.zeros(8, np.int64)
        while emitted.mean() < num_tokens:
            view = batch(8, room=1000)
            view.num_missed, view.num_left = missed.copy(), 1000 - emitted
            plan = policy.plan(view)
            missed = np.where(plan.lengths > 0, 0, missed + 1)
            emitted += plan.lengths + 1
            policy.observe(replace(all_rejected(plan, rng), accepted=plan.lengths))
            policy.settle()
        policy.forget(np.arange(8))
    assert (missed < 700).all() == reads


@pytest.mark.parametrize("num_told_at_once", [1, 5])
def test_who_asks_during_a_rest_is_told_what_is_left_of_it(num_told_at_once: int) -> None:
    """Without another thought, as a device may be waiting; unless many have come."""
    policy, rng = Thinking(), np.random.default_rng(0)
    while (plan := policy.plan(batch(8))).num_resting < 40:
        policy.observe(all_rejected(plan, rng))
        policy.settle()
    before, left = policy.num_thoughts, plan.num_resting
    for _ in range(4):
        policy.observe(replace(all_rejected(plan, rng), num_steps=num_told_at_once))
        policy.settle()
        plan = policy.plan(batch(8))
        left -= num_told_at_once
        assert plan.num_resting == left
        assert not plan.lengths.any()
    assert policy.num_thoughts == before
    policy.plan(batch(9))
    assert policy.num_thoughts == before + 1
    while (plan := policy.plan(batch(8))).num_resting < 40:
        policy.observe(all_rejected(plan, rng))
        policy.settle()
    policy.observe(all_rejected(plan, rng))
    policy.forget(np.arange(3))  # others are in their places
    before, left = policy.num_thoughts, plan.num_resting
    plan = policy.plan(batch(8))
    assert policy.num_thoughts == before
    assert np.isnan(plan.signals["outlook"][:3]).all()
    assert np.isfinite(plan.signals["outlook"][3:]).all()
    policy.observe(all_rejected(plan, rng))
    policy.forget(np.array([5, 6]))  # half of them are new by now, and more
    policy.plan(batch(8))
    assert policy.num_thoughts == before + 1


def resting(num_seqs: int) -> tuple[Auto, Plan, list[BatchView]]:
    """A policy whose plan has three steps or more to rest, one of which is over; and what it thinks of from now on."""
    policy, rng = Auto(), np.random.default_rng(0)
    while (plan := policy.plan(batch(num_seqs))).num_resting < 3:
        policy.observe(all_rejected(plan, rng))
        policy.settle()
    policy.observe(all_rejected(plan, rng))
    think, thoughts = policy.advisor.advise, []
    policy.advisor.advise = lambda view: thoughts.append(view) or think(view)  # type: ignore[func-returns-value, method-assign]
    return policy, plan, thoughts


def some_of(places: list[int]) -> BatchView:
    return BatchView(np.array(places), np.full(len(places), 100), np.zeros(len(places)), len(places))


@pytest.mark.parametrize("is_told_first", [False, True])
def test_nobody_waits_for_a_thought_where_few_are_left_of_a_rest(is_told_first: bool) -> None:
    """They are another batch, which is thought of while their last step with the others is under way; whether it is
    known already that these have ended or only that they will."""
    policy, plan, thoughts = resting(8)
    rng, gone = np.random.default_rng(0), np.array([1, 3, 4, 5, 6, 7])
    if is_told_first:
        policy.forget(gone)
    policy.settle(some_of([0, 2]))
    assert [view.slots.tolist() for view in thoughts] == [[0, 2]]
    policy.observe(all_rejected(plan, rng))
    policy.forget(gone)
    num_unlearnt = len(policy._unlearnt)
    policy.plan(some_of([0, 2]))
    assert len(thoughts) == 1
    assert len(policy._unlearnt) == num_unlearnt > 0
    policy.settle()
    assert not policy._unlearnt


def test_what_a_rest_missed_is_not_counted_again_when_it_is_learnt_from_late() -> None:
    policy, plan, _ = resting(8)
    left = replace(some_of([0, 2]), num_missed=np.array([7, 9]))
    policy.settle(left)
    policy.observe(all_rejected(plan, np.random.default_rng(0)))
    policy.plan(left)
    assert policy._unlearnt
    policy.settle()
    assert not policy._unlearnt
    assert policy.cost.behind(left.slots).tolist() == [7, 9]


def test_nobody_waits_for_a_thought_where_somebody_ends_with_a_rest() -> None:
    """Nothing is left of it to go on with."""
    policy, plan, thoughts = resting(8)
    rng = np.random.default_rng(0)
    for _ in range(plan.num_resting - 1):
        policy.observe(all_rejected(plan, rng))
    policy.settle(some_of([0, 1, 2, 4, 5, 6, 7]))
    policy.observe(all_rejected(plan, rng))
    policy.forget(np.array([3]))
    policy.plan(some_of([0, 1, 2, 4, 5, 6, 7]))
    assert [view.slots.size for view in thoughts] == [7]


def test_a_look_behind_an_end_has_a_second_one() -> None:
    """What has ended is forgotten later than it was planned, and must not take that for something that came between."""
    policy, plan, _ = resting(8)
    policy.advisor.probe._in_pairs, policy.advisor.probe._saved_s = True, 1.0
    policy.settle(some_of([0, 2]))
    policy.observe(all_rejected(plan, np.random.default_rng(0)))
    policy.forget(np.array([1, 3, 4, 5, 6, 7]))
    policy.plan(some_of([0, 2]))
    assert policy._current is not None
    assert policy._current.is_probing
    policy.settle()
    assert policy._next is not None
    assert policy._next.is_probing


def test_who_asks_again_during_a_rest_is_not_told_twice_what_it_missed() -> None:
    policy, plan, _ = resting(8)
    policy.observe(all_rejected(plan, np.random.default_rng(0)))
    num_missed = policy.cost.behind(np.arange(8)) + 2  # these two steps are not learnt from yet
    policy.plan(replace(batch(8), num_missed=num_missed))
    policy.settle()
    assert policy.cost.behind(np.arange(8)).tolist() == num_missed.tolist()


def test_nothing_is_kept_of_those_whom_it_never_chose_for() -> None:
    policy = Auto()
    for slot in range(9):
        policy.forget(np.array([slot % 3]))
    assert not policy._gone


def test_where_most_are_left_of_a_rest_nothing_is_thought_of() -> None:
    policy, plan, thoughts = resting(8)
    policy.settle(some_of([0, 1, 2, 4, 5, 6, 7]))
    policy.observe(all_rejected(plan, np.random.default_rng(0)))
    policy.forget(np.array([3]))
    assert policy.plan(some_of([0, 1, 2, 4, 5, 6, 7])).num_resting > 0
    assert not thoughts


def test_whoever_comes_to_the_place_of_another_is_not_taken_for_it() -> None:
    """What is learnt late is forgotten in time."""
    policy, rng = Auto(), np.random.default_rng(0)
    for _ in range(20):
        plan = policy.plan(batch(2))
        policy.settle()
        policy.observe(all_rejected(plan, rng))
    meet, has_met = policy.advisor.meet, []
    policy.advisor.meet = lambda view: has_met.append(meet(view)) or has_met[-1]  # type: ignore[func-returns-value, method-assign]
    policy.forget(np.array([1]))
    policy.forget(np.array([1]))  # seen once more meanwhile
    policy.plan(batch(1))
    assert policy._unlearnt
    policy.plan(batch(2))
    assert [is_new.tolist() for is_new in has_met] == [[False], [False, True]]
    assert not policy._unlearnt
    assert policy.advisor.lifespan._num_ended == 1


@pytest.mark.parametrize("ends_early", [False, True])
def test_steps_of_a_rest_are_learnt_from_together(ends_early: bool) -> None:
    """When it is over, or somebody comes: a short step leaves no time to learn from it."""
    policy, rng = Auto(), np.random.default_rng(0)
    while (plan := policy.plan(batch(4))).num_resting < 20:
        policy.observe(all_rejected(plan, rng))
        policy.settle()
    learn, learnt = policy.advisor.learn, []
    policy.advisor.learn = lambda seen, draft: learnt.append(seen) or learn(seen, draft)  # type: ignore[func-returns-value, method-assign]
    policy.settle()
    learnt.clear()
    num = 12 if ends_early else plan.num_resting + 1
    seconds = [0.02, *np.linspace(0.01, 0.012, num - 1)]
    for verify_s in seconds:
        policy.observe(replace(all_rejected(plan, rng), verify_s=verify_s))
        assert not learnt
    if ends_early:
        policy.plan(batch(5))
    else:
        policy.settle()
    assert [outcome.num_steps for outcome in learnt] == [num]
    assert learnt[0].verify_s == sorted(seconds)[(num - 1) // 2]


def test_what_is_missed_during_a_rest_is_counted_once() -> None:
    """Its steps may not be learnt yet when somebody asks who knows how much the draft has missed."""
    policy, rng = Auto(), np.random.default_rng(0)
    num_missed = 0

    def view(num_seqs: int) -> BatchView:
        return replace(batch(num_seqs), num_missed=np.full(num_seqs, num_missed))

    while (plan := policy.plan(view(4))).num_resting < 20:
        policy.observe(all_rejected(plan, rng))
        policy.settle()
        num_missed = 0 if plan.lengths.any() else num_missed + 1
    num_resting = plan.num_resting
    for _ in range(12):
        policy.observe(all_rejected(plan, rng))
        num_missed += 1
    assert policy.plan(view(4)).num_resting == num_resting - 12  # it goes on
    assert policy.cost.behind(np.arange(4)).tolist() == [num_missed] * 4
    policy.plan(view(5))
    assert policy.cost.behind(np.arange(5)).tolist() == [num_missed] * 5


def test_steps_that_were_not_measured_are_no_measurement() -> None:
    """Of a rest, one of whose steps was, and held up."""
    policy, rng = Auto(), np.random.default_rng(0)
    while (plan := policy.plan(batch(8))).num_resting < 20:
        policy.observe(all_rejected(plan, rng))
        policy.settle()
    policy.settle()
    before_s = float(policy.cost.verify_s(8))
    for number in range(12):
        policy.observe(replace(all_rejected(plan, rng), verify_s=10 * before_s if number == 5 else 0.0))
    policy.plan(batch(9))
    policy.cost.turn_to(8)
    assert policy.cost.verify_s(8) == pytest.approx(before_s)


def test_what_steps_of_a_rest_take_is_told_by_those_that_were_measured() -> None:
    policy, rng = Auto(), np.random.default_rng(0)
    plan = policy.plan(batch(4))
    seconds = [0.0, 0.01, 0.0, 0.012, 0.0, 0.013, 0.014, 0.0, 0.011]
    draft = policy._current
    assert draft is not None
    told = [(replace(all_rejected(plan, rng), verify_s=verify_s), draft) for verify_s in seconds]
    assert [(seen.verify_s, seen.num_steps) for seen, _ in _told_together(told)] == [(0.0, 4), (0.012, 5)]


@pytest.mark.parametrize(("seconds", "together_s"), [([1.0, 2.0, 3.0], 6.0), ([1.0, 0.0, 3.0], 0.0)])
def test_what_steps_of_a_rest_took_in_all_is_known_if_it_is_of_each(seconds: list[float], together_s: float) -> None:
    policy, rng = Auto(), np.random.default_rng(0)
    plan = policy.plan(batch(4))
    assert policy._current is not None
    told = [(replace(all_rejected(plan, rng), verify_s=0.5, step_s=step_s), policy._current) for step_s in seconds]
    assert [seen.step_s for seen, _ in _told_together(told)] == [together_s]


def test_drafts_of_a_plan_that_was_repeated_are_learnt_from_one_by_one() -> None:
    policy = Auto()
    policy.plan(batch(2))
    draft = policy._current
    assert draft is not None
    told = [(outcome([2, 1], [accepted, 0], draft_s=1e-3, verify_s=5e-3), draft) for accepted in (0, 1, 2)]
    assert [seen.accepted[0] for seen, _ in _told_together(told)] == [0, 1, 2]


def test_who_is_left_of_a_rest_goes_on_with_it() -> None:
    """Without another thought, for which a device would wait."""
    policy, plan, thoughts = resting(4)
    num_resting, rate_off = plan.num_resting, plan.signals["rate_off"]
    policy.forget(np.array([1]))
    assert plan.num_resting == 0, "announced for as long as nobody ends"
    after = policy.plan(BatchView(np.array([0, 2, 3]), np.full(3, 100), np.zeros(3), 3))
    assert not thoughts
    assert after.num_resting == num_resting - 1
    assert after.signals["rate_off"].tolist() == rate_off[:3].tolist()
    assert after.lengths.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("num_seqs", "gone", "slots", "num_decoding"),
    [
        pytest.param(4, [1, 2, 3], [0, 1, 2, 3], 4, id="most are new"),
        pytest.param(4, [], [0, 1, 2, 3, 4], 5, id="more than before"),
        pytest.param(64, list(range(1, 64)), [0], 1, id="few of many"),
        pytest.param(4, [3], [0, 1, 2], 4, id="somebody chose a length"),
    ],
)
def test_others_think_anew(num_seqs: int, gone: list[int], slots: list[int], num_decoding: int) -> None:
    policy, _, thoughts = resting(num_seqs)
    policy.forget(np.array(gone))
    policy.plan(BatchView(np.array(slots), np.full(len(slots), 100), np.zeros(len(slots)), num_decoding))
    assert thoughts


@pytest.mark.parametrize("how", ["step is lost", "nobody to plan for"])
def test_a_look_that_came_to_nothing_is_not_the_last(how: str) -> None:
    """A step fails, everybody in it is aborted, or the next one only reads prompts."""
    policy, rng, looks = Auto(), np.random.default_rng(0), []
    for _ in range(4000):
        plan = policy.plan(batch(8))
        looks.append(bool(plan.lengths.any()))
        if how == "step is lost" and looks[-1] and rng.random() < 0.3:
            continue
        policy.observe(all_rejected(plan, rng))
        policy.settle()
        if how == "nobody to plan for":
            policy.settle()
    assert sum(looks[1000:2500]) >= 3
    assert sum(looks[2500:]) >= 3


def test_a_draft_that_never_fails_is_believed_and_no_more() -> None:
    """So many tokens stand that the rate of all is one to the last digit."""
    policy = Auto()
    drafted = drive(policy, [1.0] * 400, MEMORY_BOUND, 64)
    assert np.isfinite(policy.advisor.acceptance.weights).all()
    assert policy.advisor.acceptance.rate < 1
    assert drafted[-1] >= 64 * 4


@pytest.mark.parametrize("was_here_before", [False, True])
def test_another_load_is_another_matter(was_here_before: bool) -> None:
    """Four tokens of 64 sequences take less time than one of 256 each, whose contexts are all read."""
    costs = MeasuredCosts(
        draft=[[64, 1.5e-3], [256, 3.3e-3]],
        verify=[
            *([64, 64, 5.8e-3], [64, 192, 7.3e-3], [64, 256, 8.1e-3], [64, 448, 16e-3]),
            *([256, 256, 11.4e-3], [256, 512, 16.5e-3], [256, 1024, 28e-3]),
        ],
        catch_up=[[256, 2e-3], [4096, 17.6e-3]],
    )

    def speed_of(policy: Policy, num: int, rate: float) -> float:
        speed = simulate(policy, make_stream(f"blind:iid:{rate}").draw(num, 100, num), costs, num).tokens_per_s
        policy.forget(np.arange(num))
        return speed

    policy = Auto()
    if was_here_before:
        speed_of(policy, 64, 0.8)
    speed_of(policy, 256, 0.6)
    best = max(speed_of(make_policy(f"static:{length}"), 64, 0.95) for length in (1, 2, 3, 4))
    assert speed_of(policy, 64, 0.95) > (0.95 if was_here_before else 0.88) * best


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_large_batch_begins_and_goes_on(seed: int) -> None:
    """A step that was slow must not stop all of them: beginning again costs more the later it comes."""
    costs = MeasuredCosts(
        draft=[[256, 3.3e-3]],
        verify=[[256, 256, 11.4e-3], [256, 512, 16.5e-3], [256, 768, 22.4e-3]],
        catch_up=[[256, 2e-3], [4096, 17.6e-3]],
    )
    requests = make_stream("blind:iid:0.9").draw(256, 100, seed)
    off, one, speed = (
        simulate(make_policy(spec), requests, costs, 256).tokens_per_s for spec in ("off", "static:1", "auto")
    )
    assert one > 1.07 * off
    assert speed > 1.03 * off


def test_at_a_new_size_of_batch_it_measures_a_plain_step_and_drafts_on() -> None:
    """It does not have to earn its way back; and it tries at most twice as many tokens as it has seen verified."""
    policy = Auto()
    assert drive(policy, [0.95] * 40, MEMORY_BOUND, 4)[-1] > 4 * 8
    drafted = drive(policy, [0.95] * 30, MEMORY_BOUND, 24)
    assert 0 < sum(count == 0 for count in drafted) <= 3
    sizes = [24 + count for count in drafted]
    assert all(size <= 2.2 * max(before) for before, size in ((sizes[:i], sizes[i]) for i in range(3, 30)))
    assert max(drafted) > 24 * 4


def test_one_step_moves_no_position_far() -> None:
    """However many sequences it tells of at once: far from what was thought the curvature leads anywhere."""
    rng, model = np.random.default_rng(0), AcceptanceModel()
    signals = rng.random((256, 3)) * [4.0, 1.0, 1.0]
    looks = np.column_stack([np.ones(256), np.full(256, 0.85), np.sqrt(signals[:, 0]), signals[:, 1:]])
    for accepted in (0, 1, 0):
        before = looks @ model.weights
        model.observe(outcome([1] * 256, [accepted] * 256, signals))
        assert 0.1 < np.abs(looks @ model.weights - before).max() < 2.0


def test_signals_that_nobody_has_teach_nothing() -> None:
    rng, model = np.random.default_rng(0), AcceptanceModel()
    before = model.weights.copy()
    model.observe(outcome([2, 2], [2, 0], np.full((4, 3), np.nan)))
    assert (model.weights == before).all()
    model.observe(outcome([2, 2], [2, 0], np.vstack((rng.random((2, 3)), np.full((2, 3), np.nan)))))
    assert np.isfinite(model.weights).all()
    assert (model.weights != before).any()


def test_a_large_batch_is_tried_before_it_is_thought_too_dear() -> None:
    """Nothing beyond 256 tokens has been measured: what is thought of it must not decide for good."""
    drafted = drive(Auto(), [0.95] * 80, Costs(Line(1e-3), Line(8e-3, 2048, 1e-5)), 256)
    assert sum(count > 0 for count in drafted[40:]) > 38


@pytest.mark.parametrize("num_seqs", [1, 8])
def test_passes_that_nobody_measured_do_not_put_it_off(num_seqs: int) -> None:
    drafted = drive(Auto(), [0.9] * 400, MEMORY_BOUND, num_seqs, warms_up=True)
    assert sum(count > 0 for count in drafted[100:]) > 0.95 * len(drafted[100:])


def slowed(costs: Costs, factor: float) -> Costs:
    lines = (Line(factor * line.flat_s, line.num_flat, factor * line.each_s) for line in (costs.draft, costs.verify))
    return Costs(*lines)


@pytest.mark.parametrize("factor", [6.0, 2.0])
@pytest.mark.parametrize("num_seqs", [1, 4])
def test_it_drafts_on_after_somebody_else_has_used_the_machine(num_seqs: int, factor: float) -> None:
    """What it does meanwhile is measured slow, what it does not is not, and it would stay with the latter for good."""
    policy = Auto()
    drive(policy, [0.9] * 100, MEMORY_BOUND, num_seqs)
    drive(policy, [0.9] * 40, slowed(MEMORY_BOUND, factor), num_seqs)
    drafted = drive(policy, [0.9] * 100, MEMORY_BOUND, num_seqs)
    assert sum(count > 0 for count in drafted) > 95


def stream(spec: str, telling: bool, num_tokens: int = 128) -> Requests:
    """Requests whose drafts look like what becomes of them, or like nothing at all."""
    requests = make_stream(spec).draw(48, num_tokens, 5)
    if not telling:
        requests.entropies = np.random.default_rng(6).gamma(2.0, 2.0, requests.agreed.shape)
    return requests


def best_static(requests: Requests, costs: Costs, batch_size: int) -> float:
    specs = ("off", "static:1", "static:3", "static:4", "static:6", "static:8")
    return max(simulate(make_policy(spec), requests, costs, batch_size).tokens_per_s for spec in specs)


@pytest.mark.parametrize("telling", [True, False], ids=["telling", "blind"])
@pytest.mark.parametrize("batch_size", [1, 16])
@pytest.mark.parametrize("spec", ["iid:0.3", "iid:0.8", "mixed:0.95,0.4", "phases"])
def test_never_much_slower_than_the_best_length_known_in_advance(spec: str, batch_size: int, telling: bool) -> None:
    requests = stream(spec, telling)
    speed = simulate(Auto(), requests, MEMORY_BOUND, batch_size).tokens_per_s
    assert speed > 0.96 * best_static(requests, MEMORY_BOUND, batch_size)


def test_never_slower_than_off_where_arithmetic_is_the_limit() -> None:
    requests = stream("iid:0.6", telling=False, num_tokens=512)
    speed = simulate(Auto(), requests, COMPUTE_BOUND, 32).tokens_per_s
    assert speed > 0.98 * simulate(make_policy("off"), requests, COMPUTE_BOUND, 32).tokens_per_s


def test_a_draft_that_shows_its_doubts_is_worth_more_than_any_fixed_length() -> None:
    requests = stream("phases", telling=True)
    speed = simulate(Auto(), requests, MEMORY_BOUND, 1).tokens_per_s
    assert speed > 1.08 * best_static(requests, MEMORY_BOUND, 1)


def test_it_begins_again_when_drafts_are_no_longer_dear() -> None:
    """While nobody drafts hardly anything is measured, and what was decides: probes must put it right."""
    policy = Auto()
    drive(policy, [0.8] * 60, MEMORY_BOUND, 8)
    dear = Costs(Line(6e-3, 8, 8e-6), MEMORY_BOUND.verify)
    assert sum(count > 8 for count in drive(policy, [0.8] * 100, dear, 8)[-50:]) == 0
    assert sum(count > 8 for count in drive(policy, [0.8] * 600, MEMORY_BOUND, 8)[-100:]) > 95


@pytest.mark.parametrize("each_s", [4e-6, 8e-6])
def test_what_the_draft_missed_is_not_read_for_nothing(each_s: float) -> None:
    """Near the break-even, in a large batch: whoever begins and ends again pays for the reading every time."""
    requests = make_stream("blind:iid:0.3").draw(64, 1500, 5)
    costs = Costs(Line(1.68e-3, 64, 30e-6), Line(6.6e-3, 64, each_s))
    off, one, speed = (
        simulate(make_policy(spec), requests, costs, 64).tokens_per_s for spec in ("off", "static:1", "auto")
    )
    assert 0.97 < off / one < 1.03
    assert speed > 0.98 * max(off, one)


def learnt(rate: float, num: int, draft_s: float) -> Auto:
    """After steps of so many sequences with drafts of two tokens, and some without."""
    policy, rng = Auto(), np.random.default_rng(0)
    for number in range(60):
        policy.plan(batch(num))
        drafted = [0 if number % 6 == 0 else 2] * num
        stands = rng.random((num, 2)) < rate
        accepted = np.minimum.accumulate(stands, axis=1).sum(axis=1) * (np.array(drafted) > 0)
        seconds = {"draft_s": draft_s * max(drafted), "verify_s": 5e-3 + 4e-6 * sum(drafted)}
        policy.observe(outcome(drafted, accepted.tolist(), **seconds))
    return policy


def test_prompts_that_a_step_reads_anyway_are_no_reason_to_draft_more() -> None:
    """Beside them everything looks cheap, and takes as long as ever."""
    policy = learnt(0.7, 8, 0.8e-3)
    view = batch(8)
    expected = policy.advisor.advise(view).plan.predicted
    assert 0 < expected.max() < 6
    view.num_prompt_tokens = 8192
    assert policy.advisor.advise(view).plan.predicted.tolist() == expected.tolist()


@pytest.mark.parametrize(("draft_s", "stops"), [(4.5e-3, True), (2.4e-3, False)])
def test_a_clear_loss_is_no_accident(draft_s: float, stops: bool) -> None:
    """Drafts that cost a little more than they bring go on for a few steps, others do not."""
    policy = learnt(0.45, 8, draft_s)
    policy.advisor.is_drafting, policy.advisor.num_doubtful, policy.advisor.gains = True, 0, [1.0, 1.0]
    drafted = policy.advisor.advise(batch(8))
    outlooks, _ = policy.advisor.acceptance.outlooks(np.arange(8))
    assert not policy.advisor._seems_to_pay(policy.advisor._choose(batch(8), outlooks, policy.cost.start_s))
    assert (drafted.plan.stop is None) == stops
    assert drafted.is_doubtful != stops


def test_time_that_prompts_take_is_not_held_against_drafts() -> None:
    policy = learnt(0.7, 8, 0.8e-3)
    rng = np.random.default_rng(1)
    for _ in range(200):
        view = batch(8)
        view.num_prompt_tokens = 2048
        plan = policy.plan(view)
        drafted = np.minimum(plan.predicted.astype(int), 3).tolist()
        stands = np.array([np.minimum.accumulate(rng.random(3) < 0.7) for _ in range(8)])
        accepted = [int(stands[i, :length].sum()) for i, length in enumerate(drafted)]
        seconds = {"draft_s": 0.8e-3 * max(drafted), "verify_s": 50e-3 + 4e-6 * sum(drafted), "num_prompt_tokens": 2048}
        policy.observe(outcome(drafted, accepted, **seconds))
    assert 0.9 < policy.advisor._gain < 1.1


def test_beside_prompts_no_step_is_made_to_be_measured() -> None:
    """It would measure them, too. Nor are drafts made in a size of batch that is new, as beside prompts nobody can tell
    what these cost; but in the end they are, or there would be none where prompts are read in every step."""
    policy = learnt(0.7, 8, 0.8e-3)
    view = batch(24)
    view.num_prompt_tokens = 500
    have_drafts = []
    for _ in range(40):
        plan = policy.plan(view)
        assert not plan.num_resting, "the next step may be one without prompts"
        have_drafts.append(bool(plan.lengths.any()))
        drafted = np.minimum(plan.lengths, 2).tolist()
        seconds = {"draft_s": 0.9e-3 * max(drafted), "verify_s": 14e-3, "num_prompt_tokens": 500}
        policy.observe(outcome(drafted, drafted, **seconds))
    assert have_drafts == [False] * MOST_EARLY + [True] * (40 - MOST_EARLY)


def test_what_a_size_of_batch_costs_is_measured_as_soon_as_no_prompt_is_read() -> None:
    policy, view = Auto(), batch(24)
    view.num_prompt_tokens = 500
    for _ in range(3):
        assert not policy.plan(view).lengths.any()
        policy.observe(outcome([0] * 24, [0] * 24, verify_s=14e-3, num_prompt_tokens=500))
    view.num_prompt_tokens = 0
    lengths = []
    for _ in range(6):
        lengths.append(int(policy.plan(view).lengths.max()))
        drafted = [lengths[-1]] * 24
        policy.observe(outcome(drafted, drafted, draft_s=0.5e-3 * lengths[-1], verify_s=5e-3))
    assert lengths[:2] == [0, 0]
    view.num_prompt_tokens = 500
    assert policy.plan(view).lengths.any(), "prompts or not, it is known now"


def test_a_plan_made_without_knowing_what_was_missed_is_made_anew() -> None:
    policy = learnt(0.7, 8, 0.8e-3)
    policy.settle()
    kept = policy._next
    assert kept is not None
    view = batch(8)
    view.num_missed = np.full(8, 500)
    policy.plan(view)
    assert policy._current is not kept
    policy.settle()
    kept, view = policy._next, batch(8)
    view.num_missed = np.full(8, 500)
    policy.plan(view)
    assert policy._current is kept


def test_those_who_stay_long_do_not_speak_for_those_to_come() -> None:
    """Easy requests end soon, and then the hard ones are all that is seen."""
    model = AcceptanceModel()
    for first in range(0, 64, 8):  # eight requests at a time, half of them easy
        slots = np.arange(8)
        model.forget(slots)
        for step in range(60):
            there = slots if step < 15 else slots[4:]
            accepted = np.where(there < 4, 2, (step + there + first) % 3 == 0)
            model.observe(replace(outcome([2] * there.size, accepted.tolist()), slots=there))
    outlooks, _ = model.outlooks(np.arange(100, 104))
    easy, hard = model.outlooks(np.array([0]))[0][0], model.outlooks(np.array([7]))[0][0]
    assert easy > 0.9
    assert hard < 0.4
    assert outlooks == pytest.approx([(easy + hard) / 2] * 4, abs=0.06)


@pytest.mark.parametrize(("rate", "length"), [(0.5, 8), (0.7, 1), (0.7, 8), (0.9, 4)])
def test_everybodys_rate_does_not_depend_on_how_much_is_drafted(rate: float, length: int) -> None:
    rng, model, found = np.random.default_rng(3), AcceptanceModel(), []
    for _ in range(60):
        model.forget(np.arange(16))
        for _ in range(12):
            stands = rng.random((16, length)) < rate
            model.observe(outcome([length] * 16, np.minimum.accumulate(stands, axis=1).sum(axis=1).tolist()))
        found.append(model.rate)
    assert np.mean(found[10:]) == pytest.approx(rate, abs=0.02)


def test_a_check_that_met_a_prompt_has_measured_nothing() -> None:
    policy = Auto()
    policy.plan(batch(4))
    while not policy.advisor.recheck.is_due(4):
        policy.advisor.recheck.count(4)
    policy.advisor.recheck.begin(4)
    for num_prompt_tokens, is_open in ((64, True), (0, False)):
        policy.observe(outcome([0] * 4, [0] * 4, verify_s=0.01, num_prompt_tokens=num_prompt_tokens))
        policy.settle()
        assert bool(policy.advisor.recheck._open) == is_open


@pytest.mark.parametrize(("gain", "expected"), [(0.01, (False, True)), (0.05, (True, True)), (-0.01, (False, False))])
def test_nobody_begins_for_next_to_nothing(gain: float, expected: tuple[bool, bool]) -> None:
    """But whoever drafts goes on for little."""
    policy = Auto()
    choice = Choice(np.ones(4, np.int64), 100 * (1 + gain), 0.05, 100.0)
    for policy.advisor.is_drafting, is_worth in zip((False, True), expected, strict=True):
        assert policy.advisor._seems_to_pay(choice) == is_worth


@pytest.mark.parametrize(("strays", "begins"), [(0.0, True), (0.2, False)])
def test_nobody_begins_for_less_than_steps_vary_by_themselves(strays: float, begins: bool) -> None:
    """Drafts that seem to bring a tenth: measured in a fast time, perhaps, and the steps without them in a slow one."""
    policy = Auto()
    for number in range(40):
        policy.plan(batch(4))
        slow = 1 + strays * (number // 2 % 2)
        policy.observe(outcome([0] * 4, [0] * 4, verify_s=0.01 * slow, num_steps=9))
        policy.settle()
    assert strays / 2 <= policy.advisor.steadiness.spread <= strays
    policy.advisor.is_drafting = False
    choice = policy.advisor._choose(batch(4), np.full(4, 0.5), policy.cost.start_s)
    choice.rate, choice.lengths = 1.1 * choice.rate_off, np.ones(4, np.int64)
    assert policy.advisor._seems_to_pay(choice) == begins
    policy.advisor.is_drafting = True
    assert policy.advisor._seems_to_pay(choice), "whoever drafts goes on"


def test_steps_one_behind_the_other_tell_little_of_how_much_they_vary() -> None:
    steadiness = Steadiness()
    for _ in range(200):
        steadiness.observe(1.0, 1)
    for _ in range(7):
        steadiness.observe(2.0, 1)
    assert steadiness.spread == 0.0
    steadiness.observe(2.0, 1)
    assert 0.1 < steadiness.spread < 0.2
    for _ in range(16):
        steadiness.observe(1.0, 65)
    assert steadiness.spread == 0.0


def test_where_even_much_better_drafts_would_not_pay_it_looks_less_often() -> None:
    """And as often as ever when they would."""

    def num_looks(rate: float, draft_s: float, policy: Auto) -> int:
        return sum(count > 0 for count in drive(policy, [rate] * 2000, Costs(Line(draft_s), MEMORY_BOUND.verify), 8))

    hopeless, hopeful = Auto(), Auto()
    for policy, draft_s in ((hopeless, 20e-3), (hopeful, 1.5e-3)):
        num_looks(0.2, draft_s, policy)
    assert (hopeless.advisor.hope, hopeful.advisor.hope) == (LEAST_HOPE, 1.0)
    # What is set aside pays for twice as many where a look costs as much.
    plain_s = MEMORY_BOUND.verify.seconds(8)
    saved = [policy.advisor.probe._saved_s for policy in (hopeless, hopeful)]
    for policy in (hopeless, hopeful):
        policy.plan(batch(8))
        policy.observe(outcome([0] * 8, [0] * 8, verify_s=plain_s))
        policy.settle()
    more = [policy.advisor.probe._saved_s - before for policy, before in zip((hopeless, hopeful), saved, strict=True)]
    assert more[0] == pytest.approx(LEAST_HOPE * more[1])
    num_looks(0.2, 1e-3, hopeless)
    assert hopeless.advisor.hope == 1.0


def test_under_pressure_a_plan_is_good_for_a_few_steps() -> None:
    """And everything is learnt in the end, as if there had been time: nothing is thought of or learnt between steps."""
    rng = np.random.default_rng(0)
    policy = Thinking(cost=Known(MEMORY_BOUND))
    num_tested = 0
    for number in range(60):
        before, num_learnt = policy.num_thoughts, len(policy._unlearnt)
        plan = policy.plan(batch(2))
        if number > 20:
            assert policy.num_thoughts == before, "nobody waits for a thought"
            assert len(policy._unlearnt) == num_learnt
        before, num_unlearnt = policy.num_thoughts, len(policy._unlearnt)
        policy.settle(is_pressed=number > 20)
        if number > 21:
            is_thought_of, is_learnt = policy.num_thoughts > before, len(policy._unlearnt) < num_unlearnt
            assert is_thought_of != is_learnt, "one thing at a time"
        lengths = plan.lengths
        policy.observe(outcome(lengths.tolist(), lengths.tolist(), rng.random((int(lengths.sum()), 3)), verify_s=4e-3))
        num_tested += int(lengths.sum())
        if number == 20:
            assert plan.stop is not None, "drafts pay here"
            thoughts, tested = policy.num_thoughts, num_tested
    # Every third time there is a new one.
    assert policy.num_thoughts - thoughts == (59 - 20) // (MOST_REPEATS + 1)
    policy.settle()
    assert not policy._unlearnt
    assert num_tested > tested
    # Not for somebody else, nor where somebody has come.
    policy.settle(is_pressed=True)
    before = policy.num_thoughts
    policy.plan(batch(3))
    assert policy.num_thoughts == before + 1


@pytest.mark.parametrize("is_pressed", [True, False])
@pytest.mark.parametrize("ruled", [True, False])
def test_under_pressure_who_is_left_drafts_on(is_pressed: bool, ruled: bool) -> None:
    """As before, without another thought; not so where there is time. Who joins drafts after the next thought."""
    rng = np.random.default_rng(0)
    policy = Thinking(cost=Known(MEMORY_BOUND))
    policy.advisor.sight.is_worth_it = lambda *_: ruled  # type: ignore[method-assign]
    policy.advisor.sight.is_try = lambda *_: False  # type: ignore[method-assign]

    def step(view: BatchView) -> Plan:
        plan = policy.plan(view)
        policy.settle(is_pressed=is_pressed)
        lengths = plan.lengths
        signals = rng.random((int(lengths.sum()), 3))
        seen = outcome(lengths.tolist(), lengths.tolist(), signals, verify_s=4e-3)
        policy.observe(replace(seen, is_ruled=plan.stop is not None))
        return plan

    for _ in range(30):
        plan = step(batch(8))
    assert plan.lengths.all()
    assert (plan.stop is not None) == ruled
    before = policy.num_thoughts
    policy.forget(np.array([2]))
    left = np.array([0, 1, 3, 4, 5, 6, 7])
    after = policy.plan(BatchView(left, np.full(7, 100), np.zeros(7), 7))
    assert (policy.num_thoughts == before) == is_pressed
    if not is_pressed:
        return
    assert after.lengths.tolist() == plan.lengths[left].tolist()
    assert after.signals["outlook"].tolist() == plan.signals["outlook"][left].tolist()
    if ruled:
        assert isinstance(after.stop, StopByWorth)
        assert isinstance(plan.stop, StopByWorth)
        assert after.stop.offsets.tolist() == plan.stop.offsets[left].tolist()
    again = policy.plan(batch(8))
    assert policy.num_thoughts == before
    assert again.lengths.tolist() == np.where(np.arange(8) == 2, 0, plan.lengths).tolist()
    policy.settle(coming=batch(8))
    policy.observe(outcome(again.lengths.tolist(), again.lengths.tolist(), rng.random((int(again.lengths.sum()), 3))))
    assert policy.num_thoughts == before + 1
    assert policy.plan(batch(8)).lengths.all()
    # But not with so many that what pays is another matter.
    policy.forget(np.arange(5))
    policy.plan(batch(8))
    assert policy.num_thoughts == before + 2


def test_under_pressure_many_who_join_one_after_the_other_are_thought_of() -> None:
    rng = np.random.default_rng(0)
    policy = Thinking(cost=Known(MEMORY_BOUND))

    def step() -> Plan:
        plan = policy.plan(batch(8))
        lengths = plan.lengths
        policy.observe(outcome(lengths.tolist(), lengths.tolist(), rng.random((int(lengths.sum()), 3)), verify_s=4e-3))
        return plan

    for _ in range(30):
        assert step() is not None
        policy.settle(is_pressed=True)
    before = policy.num_thoughts
    for slot in range(4):
        policy.forget(np.array([slot]))
        assert not step().lengths[: slot + 1].any()
    assert policy.num_thoughts == before
    policy.forget(np.array([4]))
    assert step().lengths.all()
    assert policy.num_thoughts == before + 1


def test_under_pressure_drafts_that_no_longer_pay_are_stopped() -> None:
    """What was thought of is used, the batch being the same."""
    rng = np.random.default_rng(0)
    policy = Thinking(cost=Known(MEMORY_BOUND))
    lengths = []
    for number in range(130):
        plan = policy.plan(batch(8))
        policy.settle(is_pressed=number >= 30)
        drafted = plan.lengths
        seconds = {"draft_s": 0.8e-3 * int(drafted.max()), "verify_s": 4e-3}
        accepted = drafted if number < 30 else 0 * drafted
        seen = outcome(drafted.tolist(), accepted.tolist(), rng.random((int(drafted.sum()), 3)), **seconds)
        policy.observe(replace(seen, is_ruled=plan.stop is not None))
        lengths.append(int(drafted.sum()))
    assert min(lengths[20:30]) == 160
    assert max(lengths[40:]) < 160
    assert sum(lengths[80:]) < 50 * 40
    assert 0 in lengths[30:50]


def test_who_rests_or_looks_is_not_repeated_under_pressure() -> None:
    policy, rng = Thinking(), np.random.default_rng(0)
    for _ in range(100):
        plan = policy.plan(batch(8))
        before = policy.num_thoughts
        policy.settle(is_pressed=True)
        assert policy.num_thoughts == before + (plan.num_resting == 0) or plan.stop is not None
        for _ in range(1 + plan.num_resting):
            policy.observe(all_rejected(plan, rng))
