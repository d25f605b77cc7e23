"""Policies that look at acceptance only, against their rules written out for one sequence at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsde.core.errors import InvalidInput
from dsde.core.stops import Signal, StopBefore
from dsde.policies import BatchView, MeanCap, Need, Outcome, Plan, Policy
from dsde.policies.banditspec import BanditSpec, EXP3Spec, UCBSpec
from dsde.policies.batchtable import BatchTable
from dsde.policies.gammatune import GammaTune
from dsde.policies.gammatuneplus import GammaTunePlus
from dsde.policies.heuristic import Heuristic

TABLE = [[1, 2, 6], [4, 8, 3], [20, 30, 0]]
MAKERS: dict[str, Callable[[], Policy]] = {
    "heuristic": Heuristic,
    "heuristic, persistent": lambda: Heuristic(schedule="heuristic"),
    "gammatune": GammaTune,
    "ucbspec": UCBSpec,
    "ucbspec, accepted": lambda: UCBSpec(reward="accepted"),
    "exp3spec": EXP3Spec,
    "exp3spec, accepted": lambda: EXP3Spec(reward="accepted"),
    "batchtable": lambda: BatchTable(TABLE),
}
every_policy = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
per_sequence = pytest.mark.parametrize("make", [Heuristic, GammaTune])


def batch_of(slots: list[int], rooms: list[int] | None = None, num_decoding: int | None = None) -> BatchView:
    return BatchView(
        slots=np.array(slots, np.int64),
        rooms=np.array(rooms if rooms is not None else [1000] * len(slots), np.int64),
        temperatures=np.ones(len(slots)),
        num_decoding=len(slots) if num_decoding is None else num_decoding,
    )


def outcome_of(slots: list[int], drafted: list[int], accepted: list[int], seconds: float = 0.01) -> Outcome:
    return Outcome(
        slots=np.array(slots, np.int64),
        drafted=np.array(drafted, np.int64),
        accepted=np.array(accepted, np.int64),
        klds=np.empty(0),
        temperatures=np.ones(len(slots)),
        draft_s=0.25 * seconds,
        verify_s=0.75 * seconds,
    )


def feed(policy: Policy, drafted: int, accepted: int, slot: int = 0) -> None:
    policy.observe(outcome_of([slot], [drafted], [accepted]))


def length_of(policy: Policy, slot: int = 0, room: int = 1000) -> int:
    return int(policy.plan(batch_of([slot], [room])).lengths[0])


# The heuristic schedule and GammaTune: one sequence at a time


@dataclass
class ReferenceHeuristic:
    wanted: int = 5
    most: int = 128

    def observe(self, drafted: int, accepted: int) -> None:
        if drafted == 0:
            return
        if accepted < drafted:
            self.wanted = max(1, self.wanted - 1)
        elif drafted == self.wanted:
            self.wanted = min(self.wanted + 2, self.most)
        elif drafted + 2 > self.wanted:  # cut short by one: as if one longer had been wanted
            self.wanted = min(drafted + 2, self.most)

    def is_near_boundary(self) -> bool:
        return False


@dataclass
class ReferenceGammaTune:
    wanted: int = 4
    average: float = 4.0
    eta: float = 0.3
    delta: int = 2
    least: int = 1
    most: int = 10

    def observe(self, drafted: int, accepted: int) -> None:
        if drafted == 0:
            return
        if accepted == drafted:
            self.wanted = max(self.wanted, min(accepted + self.delta, self.most))
        else:
            self.average = (1 - self.eta) * self.average + self.eta * accepted
            self.average = min(max(self.average, self.least), self.most)
            self.wanted = math.ceil(self.average)

    def is_near_boundary(self) -> bool:
        """Whether the order of a sum decides how the average is rounded."""
        return abs(self.average - round(self.average)) < 1e-9


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    name=st.sampled_from(["heuristic", "gammatune"]),
    num_slots=st.integers(1, 40),
    num_steps=st.integers(1, 60),
    agreement=st.sampled_from([0.0, 0.5, 0.8, 0.95, 1.0]),
)
def test_equals_the_reference(seed: int, name: str, num_slots: int, num_steps: int, agreement: float) -> None:
    """Ragged batches whose sequences join, are left out of steps, draft less than planned, leave and are replaced."""
    rng = np.random.default_rng(seed)
    policy, blank = (Heuristic(), ReferenceHeuristic) if name == "heuristic" else (GammaTune(), ReferenceGammaTune)
    sequences: dict[int, ReferenceHeuristic | ReferenceGammaTune] = {}
    for _ in range(num_steps):
        slots = rng.permutation(num_slots)[: rng.integers(1, num_slots + 1)].tolist()
        rooms = rng.choice([0, 1, 3, 200, 200, 200], size=len(slots)).tolist()
        batch = [sequences.setdefault(slot, blank()) for slot in slots]

        plan = policy.plan(batch_of(slots, rooms))
        clear = np.array([not sequence.is_near_boundary() for sequence in batch])
        wanted = np.array([sequence.wanted for sequence in batch])
        assert plan.predicted[clear].tolist() == wanted[clear].tolist()
        assert plan.lengths[clear].tolist() == np.minimum(wanted, rooms)[clear].tolist()
        assert (plan.lengths <= rooms).all()
        assert plan.votes.all()

        trimmed = rng.random(len(slots)) < 0.1
        drafted = np.where(trimmed, rng.integers(0, plan.lengths + 1), plan.lengths)
        accepted = rng.binomial(drafted, agreement)
        policy.observe(outcome_of(slots, drafted.tolist(), accepted.tolist()))
        for sequence, d, a in zip(batch, drafted.tolist(), accepted.tolist(), strict=True):
            sequence.observe(d, a)

        ended = [slot for slot in slots if rng.random() < 0.05]
        policy.forget(np.array(ended, np.int64))
        for slot in ended:
            del sequences[slot]
        for slot, sequence in sequences.items():
            if sequence.is_near_boundary():  # whole numbers come out whole in both; anything else may have parted here
                policy.forget(np.array([slot]))
                sequences[slot] = blank()


def test_heuristic_by_hand() -> None:
    policy = Heuristic()
    lengths = [length_of(policy)]
    for drafted, accepted in ((5, 5), (7, 7), (9, 8), (8, 0), (7, 7)):
        feed(policy, drafted, accepted)
        lengths.append(length_of(policy))
    assert lengths == [5, 7, 9, 8, 7, 9]
    assert policy.plan(batch_of([0])).signals["acceptance_rate"].tolist() == [1.0]
    for _ in range(20):
        feed(policy, length_of(policy), 0)
    assert length_of(policy) == 1


def test_heuristic_persists_over_requests_only_where_asked() -> None:
    transient, persistent = Heuristic(), Heuristic(schedule="heuristic")
    for policy in (transient, persistent):
        feed(policy, 5, 5, slot=2)
        length_of(policy, slot=3)
        policy.forget(np.array([2]))
        policy.forget(np.array([2, 9, 10_000]))  # none of which runs
    assert length_of(transient, slot=2) == 5
    assert length_of(persistent, slot=2) == 7
    assert length_of(persistent, slot=3) == 5  # began before


def test_gammatune_by_hand() -> None:
    policy = GammaTune(eta=0.5)
    feed(policy, 4, 4)
    assert length_of(policy) == 6
    feed(policy, 6, 1)  # from 4 halfway to 1
    plan = policy.plan(batch_of([0]))
    assert plan.signals["gamma_bar"].tolist() == [2.5]
    assert plan.lengths.tolist() == [3]
    feed(policy, 3, 3)
    assert length_of(policy) == 5
    assert policy.plan(batch_of([0])).signals["gamma_bar"].tolist() == [2.5]


def test_gammatune_stays_within_its_range() -> None:
    policy = GammaTune(min=2, max=7)
    for _ in range(10):
        feed(policy, length_of(policy), length_of(policy))
    assert length_of(policy) == 7
    for _ in range(40):
        feed(policy, length_of(policy), 0)
    assert length_of(policy) == 2
    assert length_of(GammaTune(initial=50)) == 10
    assert length_of(GammaTune(min=6)) == 6


def test_gammatune_does_not_round_up_an_average_that_is_met() -> None:
    for accepted in range(1, 10):
        policy = GammaTune(initial=accepted)
        feed(policy, 10, accepted)
        assert length_of(policy) == accepted


@per_sequence
def test_a_draft_that_was_cut_short_neither_winds_up_nor_lowers(make: Callable[[], Policy]) -> None:
    policy = make()
    before = length_of(policy)
    for _ in range(50):
        feed(policy, 1, 1)
    assert length_of(policy) == before
    feed(policy, before - 1, before - 1)
    assert length_of(policy) == before + 1
    capped = make() | MeanCap()
    for _ in range(50):
        plan = capped.plan(batch_of([0, 1, 2, 3]))
        drafted = plan.lengths.tolist()
        capped.observe(outcome_of([0, 1, 2, 3], drafted, [drafted[0], 0, 0, 0]))
    assert capped.plan(batch_of([0, 1, 2, 3])).predicted.tolist() == [before + 2, 1, 1, 1]


@per_sequence
def test_nothing_leaks_through_a_reused_slot(make: Callable[[], Policy]) -> None:
    used, fresh = make(), make()
    for _ in range(9):
        feed(used, length_of(used, slot=3), length_of(used, slot=3), slot=3)
    feed(used, 2, 0, slot=3)
    used.forget(np.array([3]))
    rng = np.random.default_rng(0)
    for _ in range(30):
        left, right = used.plan(batch_of([3])), fresh.plan(batch_of([3]))
        assert left.lengths == right.lengths
        for name in left.signals:
            np.testing.assert_array_equal(left.signals[name], right.signals[name])
        drafted = int(left.lengths[0])
        accepted = int(rng.integers(0, drafted + 1))
        feed(used, drafted, accepted, slot=3)
        feed(fresh, drafted, accepted, slot=3)


@per_sequence
def test_forgetting_touches_nobody_else_and_may_name_unknown_slots(make: Callable[[], Policy]) -> None:
    policy = make()
    policy.forget(np.array([10_000]))
    first = length_of(policy)
    for slot in (0, 1, 5000):
        feed(policy, first, first, slot=slot)
    policy.forget(np.array([0]))
    assert length_of(policy, slot=0) == first
    assert length_of(policy, slot=1) == length_of(policy, slot=5000) == first + 2


@per_sequence
def test_what_a_sequence_wants_does_not_depend_on_its_batch(make: Callable[[], Policy]) -> None:
    alone, together = make(), make()
    rng = np.random.default_rng(3)
    slots = [4, 0, 9, 2]
    for _ in range(30):
        drafted = rng.integers(0, 9, size=4)
        accepted = rng.binomial(drafted, 0.8)
        together.observe(outcome_of(slots, drafted.tolist(), accepted.tolist()))
        feed(alone, int(drafted[2]), int(accepted[2]), slot=9)
        assert length_of(alone, slot=9) == length_of(together, slot=9)


# BanditSpec


@dataclass
class ReferenceBandit:
    """Rewards of every arm in the paper's unit: y = accepted + 1, or tokens per second and sequence."""

    lengths: list[int]
    reward: str
    rewards: dict[int, list[float]] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    num_rewards: int = 0
    largest: float = 0.0

    def __post_init__(self) -> None:
        self.rewards = {arm: [] for arm in range(len(self.lengths))}
        self.losses = [0.0] * len(self.lengths)

    def ucb_scores(self, delta: float, exploration: float) -> list[float]:
        longest, num_arms, t = max(self.lengths), len(self.lengths), self.num_rewards + 1
        scores = []
        for rewards in self.rewards.values():
            n = len(rewards)
            spread = (1 + n) / n**2 * (1 + 2 * math.log(num_arms * t**2 * math.sqrt(1 + n) / delta))
            span = longest if self.reward == "accepted" else self.largest
            scores.append(sum(rewards) / n + exploration * span / 2 * math.sqrt(spread))
        return scores

    def exp3_probabilities(self) -> list[float]:
        num_arms = len(self.lengths)
        rate = math.sqrt(math.log(num_arms) / ((self.num_rewards + 1) * num_arms))
        weights = [math.exp(-rate * (loss - min(self.losses))) for loss in self.losses]
        return [weight / sum(weights) for weight in weights]

    def observe(self, arm: int, accepted: list[int], seconds: float, probability: float = 1.0) -> None:
        emitted = sum(a + 1 for a in accepted)
        y = emitted / len(accepted)
        if self.reward == "rate":
            y /= seconds
            self.largest = max(self.largest, y)
            loss = 1 - y / self.largest
        else:
            longest = max(self.lengths)
            loss = (longest + 1 - y) / longest
        self.rewards[arm].append(y)
        self.losses[arm] += loss / probability
        self.num_rewards += 1


def play(policy: Policy, rng: np.random.Generator, num_sequences: int, agreement: float) -> tuple[Plan, Outcome]:
    """One step of sequences that accept a geometric number of tokens, at a draft pass of a fifth of a target pass."""
    plan = policy.plan(batch_of(list(range(num_sequences))))
    streaks = rng.geometric(1 - agreement, size=num_sequences) - 1
    accepted = np.minimum(streaks, plan.lengths)
    seconds = (1 + 0.2 * int(plan.lengths.max())) * float(rng.uniform(0.9, 1.1))
    return plan, outcome_of(list(range(num_sequences)), plan.lengths.tolist(), accepted.tolist(), seconds)


def seconds_of(outcome: Outcome) -> float:
    return outcome.draft_s + outcome.verify_s


@pytest.mark.parametrize("reward", ["rate", "accepted"])
@pytest.mark.parametrize("exploration", [1.0, 0.1, 0.0])
@pytest.mark.parametrize("lengths", [[0, 1, 2, 3, 4], [6, 2], [3]])
def test_ucbspec_equals_the_reference(reward: str, exploration: float, lengths: list[int]) -> None:
    rng = np.random.default_rng(5)
    policy = UCBSpec(lengths, reward=reward, delta=0.2, exploration=exploration)  # type: ignore[arg-type]
    reference = ReferenceBandit(lengths, reward)
    for step in range(300):
        plan, outcome = play(policy, rng, int(rng.integers(1, 6)), 0.7)
        arm = lengths.index(int(plan.predicted[0]))
        if step < len(lengths):
            assert arm == step
            assert np.isnan(plan.signals["mean_reward"]).all()
        else:
            scores = reference.ucb_scores(0.2, exploration)
            assert scores[arm] == pytest.approx(max(scores), rel=1e-12)
            span = max(lengths) if reward == "accepted" else reference.largest
            lowest = 1 if reward == "accepted" else 0
            score = plan.signals["mean_reward"][0] + plan.signals["radius"][0]
            assert score * span + lowest == pytest.approx(max(scores))
        policy.observe(outcome)
        reference.observe(arm, outcome.accepted.tolist(), seconds_of(outcome))


@pytest.mark.parametrize("reward", ["rate", "accepted"])
@pytest.mark.parametrize("lengths", [[0, 1, 2, 3, 4], [6, 2], [3]])
def test_exp3spec_equals_the_reference(reward: str, lengths: list[int]) -> None:
    rng = np.random.default_rng(6)
    policy = EXP3Spec(lengths, reward=reward)  # type: ignore[arg-type]
    reference = ReferenceBandit(lengths, reward)
    for _ in range(300):
        expected = reference.exp3_probabilities()
        np.testing.assert_allclose(policy.probabilities(), expected, rtol=1e-9)
        plan, outcome = play(policy, rng, int(rng.integers(1, 6)), 0.7)
        arm = lengths.index(int(plan.predicted[0]))
        assert plan.signals["probability"][0] == pytest.approx(expected[arm])
        policy.observe(outcome)
        reference.observe(arm, outcome.accepted.tolist(), seconds_of(outcome), expected[arm])


def test_exp3spec_draws_as_often_as_it_says() -> None:
    policy = EXP3Spec([0, 2, 5])
    policy._losses[:] = [0.0, 0.5, 900.0]
    expected = policy.probabilities()
    num_draws = 4000
    drawn = [int(policy.plan(batch_of([0])).predicted[0]) for _ in range(num_draws)]
    for length, probability in zip((0, 2, 5), expected, strict=True):
        error = 4 * math.sqrt(probability * (1 - probability) / num_draws)
        assert abs(drawn.count(length) / num_draws - probability) <= error


def test_exp3spec_repeats_by_seed() -> None:
    def lengths(seed: int) -> list[int]:
        policy, rng = EXP3Spec(seed=seed), np.random.default_rng(0)
        played = []
        for _ in range(50):
            plan, outcome = play(policy, rng, 2, 0.7)
            policy.observe(outcome)
            played.append(int(plan.predicted[0]))
        return played

    assert lengths(1) == lengths(1)
    assert lengths(1) != lengths(2)


@pytest.mark.parametrize(
    ("policy", "share"), [(lambda: UCBSpec(exploration=0.1), 0.97), (UCBSpec, 0.9), (EXP3Spec, 0.85)]
)
@pytest.mark.parametrize(("agreement", "best"), [(0.05, 0), (0.8, 4)])
def test_bandits_find_a_good_length(
    policy: Callable[[], BanditSpec], share: float, agreement: float, best: int
) -> None:
    """Emitted (1 - a^(k+1)) / (1 - a) over 1 + 0.2 k seconds: by far the best at 0.05 is 0; at 0.8 it is 4, closely."""
    rates = [(1 - agreement ** (k + 1)) / (1 - agreement) / (1 + 0.2 * k) for k in range(9)]
    assert rates.index(max(rates)) == best
    bandit, rng = policy(), np.random.default_rng(7)
    earned = []
    for _ in range(6000):
        plan, outcome = play(bandit, rng, 4, agreement)
        bandit.observe(outcome)
        earned.append(rates[int(plan.predicted[0])])
    assert sum(earned[4000:]) / 2000 > share * max(rates)


def test_accepted_tokens_as_reward_end_at_the_longest_arm() -> None:
    policy, rng = UCBSpec([0, 2, 8], reward="accepted"), np.random.default_rng(8)
    for _ in range(2000):
        plan, outcome = play(policy, rng, 8, 0.7)
        policy.observe(outcome)
    assert plan.predicted[0] == 8


@pytest.mark.parametrize("make", [UCBSpec, EXP3Spec])
def test_one_arm_a_step_for_everybody_within_rooms(make: Callable[[], BanditSpec]) -> None:
    policy, rng = make(), np.random.default_rng(9)
    for _ in range(50):
        rooms = rng.integers(0, 6, size=8).tolist()
        plan = policy.plan(batch_of(list(range(8)), rooms))
        assert len(set(plan.predicted.tolist())) == 1
        assert plan.lengths.tolist() == [min(int(plan.predicted[0]), room) for room in rooms]
        policy.observe(outcome_of(list(range(8)), plan.lengths.tolist(), [0] * 8))


@pytest.mark.parametrize("make", [UCBSpec, EXP3Spec])
def test_bandits_learn_once_from_a_step_and_over_requests(make: Callable[[], BanditSpec]) -> None:
    policy = make()
    feed(policy, 3, 3)  # never planned
    assert policy.num_rewards == 0
    policy.plan(batch_of([0, 1]))
    policy.observe(outcome_of([0, 1], [2, 2], [1, 0]))
    policy.observe(outcome_of([0, 1], [2, 2], [1, 0]))
    assert policy.num_rewards == 1
    policy.forget(np.array([0, 1]))
    assert policy.num_rewards == 1
    policy.plan(batch_of([0]))
    policy.plan(batch_of([0]))  # the step before it was lost
    feed(policy, 1, 1)
    assert policy.num_rewards == 2
    policy.plan(batch_of([]))
    feed(policy, 1, 1)
    assert policy.num_rewards == 2


@pytest.mark.parametrize("make", [UCBSpec, EXP3Spec])
def test_a_step_nobody_timed_teaches_no_rate(make: Callable[..., BanditSpec]) -> None:
    for reward, expected in (("rate", 0), ("accepted", 1)):
        policy = make(reward=reward)
        policy.plan(batch_of([0]))
        policy.observe(outcome_of([0], [2], [1], seconds=0.0))
        assert policy.num_rewards == expected


def test_a_discount_brings_back_arms_that_were_bad() -> None:
    """Only plain decoding pays for long; then everything is accepted."""
    policy, rng = UCBSpec([0, 4], exploration=0.1, discount=0.99), np.random.default_rng(10)
    for agreement, best in ((0.02, 0), (0.98, 4), (0.02, 0)):
        played = []
        for _ in range(1000):
            plan, outcome = play(policy, rng, 4, agreement)
            policy.observe(outcome)
            played.append(int(plan.predicted[0]))
        assert played[-200:].count(best) > 180


def test_a_strong_discount_keeps_numbers_finite() -> None:
    policy, rng = UCBSpec([0, 8], exploration=0.0, discount=0.5), np.random.default_rng(12)
    for _ in range(3000):
        plan, outcome = play(policy, rng, 1, 0.01)
        policy.observe(outcome)
        assert not any(np.isinf(signal).any() for signal in plan.signals.values())


# Dynamic SD


def reference_length(table: list[list[int]], most: int, batch_size: int) -> int:
    """Through a list of every batch size, as the rows are read."""
    lengths: dict[int, int] = {}
    for lo, hi, k in table:
        for size in range(lo, hi + 1):
            lengths[size] = min(k, most)
    last = 0
    for size in range(1, batch_size + 1):
        last = lengths.get(size, last)
    return last


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 20)), min_size=1, max_size=8),
    st.integers(0, 20),
    st.booleans(),
)
def test_table_equals_the_reference(steps: list[tuple[int, int, int]], most: int, as_text: bool) -> None:
    table: list[list[int]] = []
    for gap, width, k in steps:
        lo = table[-1][1] + 1 + gap if table else 1
        table.append([lo, lo + width, k])
    policy = BatchTable(json.dumps(table) if as_text else table, max=most)
    for batch_size in range(1, table[-1][1] + 5):
        plan = policy.plan(batch_of([0, 1], [1, 1000], num_decoding=batch_size))
        expected = reference_length(table, most, batch_size)
        assert plan.predicted.tolist() == [expected] * 2
        assert plan.lengths.tolist() == [min(expected, 1), expected]


def test_table_by_hand() -> None:
    policy = BatchTable(TABLE)
    lengths = {
        size: policy.plan(batch_of([0], num_decoding=size)).lengths[0] for size in (1, 2, 3, 4, 8, 9, 19, 20, 99)
    }
    assert lengths == {1: 6, 2: 6, 3: 6, 4: 3, 8: 3, 9: 3, 19: 3, 20: 0, 99: 0}
    assert BatchTable([[5, 6, 1], (1, 4, 2)]).table == [(1, 4, 2), (5, 6, 1)]


def test_table_counts_everybody_who_decodes() -> None:
    """Also those whose request fixed its own length."""
    assert BatchTable([[1, 4, 5], [5, 64, 1]]).plan(batch_of([0], num_decoding=5)).lengths.tolist() == [1]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("[[1,4", "table must be rows of [lo, hi, k] as in [[1,8,4],[9,64,2]], not '[[1,4'"),
        ([], "table must be rows of [lo, hi, k] as in [[1,8,4],[9,64,2]], not []"),
        ("7", "table must be rows of [lo, hi, k] as in [[1,8,4],[9,64,2]], not 7"),
        (None, "table must be rows of [lo, hi, k] as in [[1,8,4],[9,64,2]], not None"),
        ([1, 4, 2], "a row of the table must be [lo, hi, k] as in [[1,8,4],[9,64,2]], not 1"),
        ([[1, 4]], "a row of the table must be [lo, hi, k] as in [[1,8,4],[9,64,2]], not [1, 4]"),
        ([[0, 4, 2]], "lo of the table must be a whole number from 1 to 1000000, not 0"),
        ([[3, 2, 2]], "hi of the table must be a whole number from 3 to 1000000, not 2"),
        ([[1, 4, -1]], "k of the table must be a whole number from 0 to 128, not -1"),
        ([[1, 4, 2.0]], "k of the table must be a whole number from 0 to 128, not 2.0"),
        ([[2, 4, 2]], "the first row of the table must start at 1, not at 2"),
        ([[1, 4, 2], [4, 8, 1]], "rows of the table must not overlap, as [1, 4, 2] and [4, 8, 1] do"),
    ],
)
def test_bad_tables(table: object, message: str) -> None:
    with pytest.raises(InvalidInput) as error:
        BatchTable(table)  # type: ignore[arg-type]
    assert str(error.value) == message


# All of them


@every_policy
def test_an_empty_batch_is_fine(make: Callable[[], Policy]) -> None:
    policy = make()
    plan = policy.plan(batch_of([]))
    policy.observe(outcome_of([], [], []))
    policy.forget(np.array([], np.int64))
    assert plan.lengths.size == plan.predicted.size == plan.votes.size == 0
    assert all(signal.size == 0 for signal in plan.signals.values())


@every_policy
def test_plans_are_whole_and_within_rooms(make: Callable[[], Policy]) -> None:
    policy, rng = make(), np.random.default_rng(11)
    for _ in range(100):
        slots = rng.permutation(20)[: rng.integers(1, 21)].tolist()
        rooms = rng.integers(0, 12, size=len(slots))
        plan = policy.plan(batch_of(slots, rooms.tolist()))
        assert plan.lengths.dtype == np.int64
        assert ((plan.lengths >= 0) & (plan.lengths <= rooms)).all()
        assert all(signal.shape == (len(slots),) for signal in plan.signals.values())
        assert all(signal.dtype == np.float64 for signal in (plan.predicted, *plan.signals.values()))
        policy.observe(outcome_of(slots, plan.lengths.tolist(), rng.binomial(plan.lengths, 0.8).tolist()))


@every_policy
def test_a_stage_may_lower_what_was_planned(make: Callable[[], Policy]) -> None:
    """The plan is the caller's: changing it changes nothing within the policy."""
    changed, kept = make(), make()
    for _ in range(30):
        left, right = changed.plan(batch_of([0, 1])), kept.plan(batch_of([0, 1]))
        assert left.lengths.tolist() == right.lengths.tolist()
        drafted = right.lengths.tolist()
        left.lengths[:] = 0
        left.predicted[:] = -1
        for signal in left.signals.values():
            signal[:] = -1
        for policy in (changed, kept):
            policy.observe(outcome_of([0, 1], drafted, [drafted[0], 0]))


@pytest.mark.parametrize("make", [Heuristic, GammaTune, UCBSpec, EXP3Spec])
def test_a_step_without_drafted_tokens(make: Callable[[], Policy]) -> None:
    policy = make()
    feed(policy, 4, 4)
    before = length_of(policy)
    policy.observe(outcome_of([0, 1], [0, 0], [0, 0]))
    if not isinstance(policy, BanditSpec):
        assert length_of(policy) == before


@every_policy
def test_they_ask_for_no_signals(make: Callable[[], Policy]) -> None:
    assert make().needs is Need.NOTHING


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (Heuristic, {"initial": 0}, "initial must be a whole number from 1 to 128, not 0"),
        (Heuristic, {"max": 129}, "max must be a whole number from 1 to 128, not 129"),
        (
            Heuristic,
            {"schedule": "constant"},
            "schedule must be one of heuristic, heuristic_transient, not 'constant'",
        ),
        (GammaTune, {"initial": 0}, "initial must be a whole number from 1 to 128, not 0"),
        (GammaTune, {"eta": 1.5}, "eta must be a number from 0 to 1, not 1.5"),
        (GammaTune, {"eta": math.nan}, "eta must be a number from 0 to 1, not nan"),
        (GammaTune, {"eta": "a"}, "eta must be a number from 0 to 1, not 'a'"),
        (GammaTune, {"delta": 0}, "delta must be a whole number from 1 to 128, not 0"),
        (GammaTune, {"min": 0}, "min must be a whole number from 1 to 128, not 0"),
        (GammaTune, {"min": 5, "max": 4}, "max must be a whole number from 5 to 128, not 4"),
        (UCBSpec, {"lengths": "0..8"}, "lengths must be a list as in [0,2,4,8], not '0..8'"),
        (UCBSpec, {"lengths": []}, "lengths must be a list as in [0,2,4,8], not []"),
        (UCBSpec, {"lengths": [1, -1]}, "a length must be a whole number from 0 to 128, not -1"),
        (UCBSpec, {"lengths": [1, 1]}, "lengths must differ from each other, not [1, 1]"),
        (UCBSpec, {"reward": "time"}, "reward must be one of rate, accepted, not 'time'"),
        (UCBSpec, {"delta": 0}, "delta must be a number from 1e-09 to 1, not 0"),
        (UCBSpec, {"exploration": -1.0}, "exploration must be a number from 0 to 1000, not -1.0"),
        (UCBSpec, {"discount": 1.1}, "discount must be a number from 0.5 to 1, not 1.1"),
        (EXP3Spec, {"seed": -1}, f"seed must be a whole number from 0 to {2**63 - 1}, not -1"),
        (BatchTable, {"table": [[1, 1, 1]], "max": 129}, "max must be a whole number from 0 to 128, not 129"),
    ],
)
def test_bad_configuration(make: Callable[..., Policy], arguments: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInput) as error:
        make(**arguments)
    assert str(error.value) == message


def test_lengths_of_bandits_may_be_text() -> None:
    assert UCBSpec("[0,2,4,8]").lengths == (0, 2, 4, 8)
    assert EXP3Spec(range(3)).lengths == (0, 1, 2)


def test_only_plain_decoding_as_an_arm() -> None:
    for policy in (UCBSpec([0], reward="accepted"), EXP3Spec([0], reward="accepted")):
        for _ in range(3):
            assert length_of(policy) == 0
            feed(policy, 0, 0)


def test_gammatune_plus_is_gammatune_with_a_stop() -> None:
    plain, plus = GammaTune(4, eta=0.3, delta=2, max=10), GammaTunePlus(0.25, initial=4, eta=0.3, delta=2, max=10)
    rng = np.random.default_rng(0)
    view = BatchView(np.arange(5), np.full(5, 50), np.zeros(5), 5)
    for _ in range(100):
        first, second = plain.plan(view), plus.plan(view)
        np.testing.assert_array_equal(first.lengths, second.lengths)
        stop = second.stop
        assert isinstance(stop, StopBefore)
        assert (stop.signal, stop.first_depth, stop.stops_above) == (Signal.TOP_PROB, 1, False)
        np.testing.assert_array_equal(stop.thresholds, np.full(5, 0.25))
        drafted = rng.integers(0, first.lengths + 1)
        told = Outcome(view.slots, drafted, rng.integers(0, drafted + 1), np.empty(0), np.zeros(5))
        plain.observe(told)
        plus.observe(told)
