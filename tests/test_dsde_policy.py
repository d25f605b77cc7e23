"""DSDE and its cap against a plain reference, one sequence at a time, written from the description of the algorithm."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsde.core.errors import InvalidInput
from dsde.policies import DSDE, PAPER, BatchView, MeanCap, Need, Outcome, Plan, Policy

PRESET_NAMES = ("paper", "release")
BOUNDARY = 1e-9
LARGEST = -math.log(1e-8)


@dataclass
class ReferenceSequence:
    """One sequence of DSDE in plain Python. Keeps every KLD it ever saw."""

    preset: str
    warmup: int = 30
    klds: list[float] = field(default_factory=list)
    most_accepted: int = 0
    sl_max: float = math.nan
    wanted: float = math.nan
    near_boundary: bool = False
    """SL_max of the release was rounded so close to .5 that the order of a sum may decide"""

    def __post_init__(self) -> None:
        self.wanted = 4.0 if self.preset == "paper" else 6.0

    @property
    def calibrated(self) -> bool:
        return len(self.klds) >= self.warmup

    def observe(self, accepted: int, klds: list[float], temperature: float) -> None:
        if not klds:
            return
        klds = [LARGEST if not math.isfinite(kld) else min(max(kld, 0.0), LARGEST) for kld in klds]
        calibrating = not self.calibrated
        self.klds += klds
        if calibrating:
            self.most_accepted = max(self.most_accepted, accepted)
            if accepted == len(klds):
                self.wanted = min(2 * self.wanted, 20)
            if self.calibrated:
                self.sl_max = self.longest()
        if self.calibrated:
            self.wanted = self.predict(klds, temperature)

    def longest(self) -> float:
        ratio = (sum(self.klds) / len(self.klds)) / (max(self.klds) + 1e-8)
        if self.preset == "paper":
            return min(max(self.most_accepted * (1 + ratio), 2), 20)
        unrounded = self.most_accepted * (1 + 0.5 * ratio)
        self.near_boundary = abs(unrounded + 0.5 - round(unrounded + 0.5)) < BOUNDARY
        return min(max(math.floor(unrounded + 0.5), 6), 20)

    def predict(self, klds: list[float], temperature: float) -> float:
        mean = sum(klds) / len(klds)
        if self.preset == "release" and temperature > 0:
            mean /= temperature
        scale_factor = math.exp(min(2 * mean, 600)) - 1
        sl_min = 2.0 if self.preset == "paper" else max(6, math.ceil(0.1 * self.sl_max))
        penalty = scale_factor * self.wvir()
        return (1 - penalty) * (self.sl_max - sl_min) + sl_min if penalty <= 1 else sl_min

    def wvir(self) -> float:
        window = self.klds[-(30 if self.preset == "paper" else self.warmup) :]
        if len(window) < 2:
            return 1.0 if self.preset == "paper" else 0.0
        num_short, decay, flat = (10, 0.85, 1.0) if self.preset == "paper" else (len(window) // 3, 0.9, 20.0)
        long = weighted_variance(window, decay)
        short = weighted_variance(window[-max(num_short, 1) :], decay)
        if long < 1e-6 or (self.preset == "paper" and short < 1e-6):
            return flat
        return short / long


def weighted_variance(values: list[float], decay: float) -> float:
    weights = [decay**age for age in reversed(range(len(values)))]
    mean = sum(w * x for w, x in zip(weights, values, strict=True)) / sum(weights)
    return sum(w * (x - mean) ** 2 for w, x in zip(weights, values, strict=True)) / sum(weights)


def reference_lengths(
    sequences: list[ReferenceSequence], rooms: list[int], capped: bool
) -> tuple[list[int], int | None, float]:
    """Lengths, the cap, and the mean that was rounded into it."""
    preset = sequences[0].preset
    voters = [s.wanted if preset == "paper" else math.ceil(s.wanted) for s in sequences if s.calibrated]
    mean = sum(voters) / len(voters) if voters else math.nan
    cap = rounded(mean, preset) if voters and capped else None
    lengths = []
    for sequence, room in zip(sequences, rooms, strict=True):
        length = min(rounded(sequence.wanted, preset), room)
        lengths.append(min(length, cap) if sequence.calibrated and cap is not None else length)
    return lengths, cap, mean


def rounded(value: float, preset: str) -> int:
    return math.floor(value + 0.5) if preset == "paper" else math.ceil(value)


def near_boundary(value: float, preset: str) -> bool:
    """Whether the order of a sum may decide how this value is rounded. Whole numbers come out whole in any order."""
    shifted = value + 0.5 if preset == "paper" else value
    return value != round(value) and abs(shifted - round(shifted)) < BOUNDARY


def batch_of(slots: list[int], rooms: list[int] | None = None, temperatures: list[float] | None = None) -> BatchView:
    return BatchView(
        slots=np.array(slots, np.int64),
        rooms=np.array(rooms if rooms is not None else [1000] * len(slots), np.int64),
        temperatures=np.array(temperatures if temperatures is not None else [1.0] * len(slots)),
        num_decoding=len(slots),
    )


def outcome_of(
    slots: list[int], klds: list[list[float]], accepted: list[int], temperatures: list[float] | None = None
) -> Outcome:
    return Outcome(
        slots=np.array(slots, np.int64),
        drafted=np.array([len(k) for k in klds], np.int64),
        accepted=np.array(accepted, np.int64),
        klds=np.array([kld for k in klds for kld in k], np.float64),
        temperatures=np.array(temperatures if temperatures is not None else [1.0] * len(slots)),
    )


def feed(policy: Policy, klds: list[float], accepted: int, *, slot: int = 0, temperature: float = 1.0) -> None:
    policy.observe(outcome_of([slot], [klds], [accepted], [temperature]))


def plan_one(policy: Policy, slot: int = 0, room: int = 1000) -> Plan:
    return policy.plan(batch_of([slot], [room]))


def draw_klds(rng: np.random.Generator, num: int, scale: float) -> list[float]:
    klds: list[float] = rng.gamma(0.7, scale, size=num).tolist()
    odd = rng.random(num)
    special = {0: math.nan, 1: math.inf, 2: -1e-9, 3: 0.0, 4: 50.0}
    return [special[int(o * 1000)] if o < 0.005 else kld for kld, o in zip(klds, odd, strict=True)]


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**32 - 1),
    preset=st.sampled_from(PRESET_NAMES),
    capped=st.booleans(),
    warmup=st.sampled_from([30, 30, 30, 1, 2, 7, 45]),
    num_slots=st.integers(1, 40),
    num_steps=st.integers(1, 60),
    scale=st.sampled_from([0.0, 0.001, 0.03, 0.1, 0.3, 2.0]),
)
def test_equals_the_reference(
    seed: int, preset: str, capped: bool, warmup: int, num_slots: int, num_steps: int, scale: float
) -> None:
    """Ragged batches whose sequences join, are left out of steps, draft nothing, leave, and have their slots reused."""
    rng = np.random.default_rng(seed)
    bare = DSDE(preset, warmup=warmup)
    policy: Policy = bare | MeanCap(bare.preset.rounding) if capped else bare
    sequences: dict[int, ReferenceSequence] = {}
    scales = scale * rng.uniform(0.2, 2.0, size=num_slots)
    agreements = rng.uniform(0.3, 1.0, size=num_slots)
    for _ in range(num_steps):
        slots = rng.permutation(num_slots)[: rng.integers(1, num_slots + 1)].tolist()
        rooms = rng.choice([0, 1, 3, 40, 40, 40], size=len(slots)).tolist()
        temperatures = rng.choice([0.0, 0.3, 1.0, 1.5], size=len(slots)).tolist()
        batch = [sequences.setdefault(slot, ReferenceSequence(preset, warmup)) for slot in slots]

        plan = policy.plan(batch_of(slots, rooms, temperatures))
        check_plan(plan, batch, rooms, preset, capped)

        klds = [draw_klds(rng, int(length), scales[slot]) for slot, length in zip(slots, plan.lengths, strict=True)]
        accepted = [int(rng.binomial(len(k), agreements[slot])) for slot, k in zip(slots, klds, strict=True)]
        policy.observe(outcome_of(slots, klds, accepted, temperatures))
        for sequence, k, a, temperature in zip(batch, klds, accepted, temperatures, strict=True):
            sequence.observe(a, k, temperature)

        ended = [slot for slot in slots if rng.random() < 0.02]
        policy.forget(np.array(ended, np.int64))
        for slot in ended:
            del sequences[slot]


def check_plan(plan: Plan, batch: list[ReferenceSequence], rooms: list[int], preset: str, capped: bool) -> None:
    lengths, cap, mean = reference_lengths(batch, rooms, capped)
    wanted = np.array([sequence.wanted for sequence in batch])
    comparable = np.array([not sequence.near_boundary for sequence in batch])
    np.testing.assert_allclose(plan.predicted[comparable], wanted[comparable], rtol=0, atol=BOUNDARY)
    assert plan.votes.tolist() == [sequence.calibrated for sequence in batch]
    exact = comparable & [not near_boundary(sequence.wanted, preset) for sequence in batch]
    if cap is None:
        assert plan.cap is None
        assert plan.lengths[exact].tolist() == np.array(lengths)[exact].tolist()
    elif exact.all() and not near_boundary(mean, preset):
        assert plan.cap == cap
        assert plan.lengths.tolist() == lengths
    check_bounds(plan, np.array(rooms), preset)


def check_bounds(plan: Plan, rooms: np.ndarray, preset: str) -> None:
    low, high = (2, 20) if preset == "paper" else (6, 20)
    assert (plan.lengths >= 0).all()
    assert (plan.lengths <= rooms).all()
    assert (plan.lengths <= high).all()
    assert (plan.lengths >= np.minimum(low, rooms)).all()
    if plan.cap is not None:
        assert (plan.lengths[plan.votes] <= plan.cap).all()


# Degenerate streams


@pytest.mark.parametrize("preset", PRESET_NAMES)
def test_constant_zero_gets_sl_max(preset: str) -> None:
    policy = DSDE(preset)
    for _ in range(8):
        feed(policy, [0.0] * 8, 8)
    plan = plan_one(policy)
    assert plan.signals["sl_max"][0] == 8
    assert plan.lengths.tolist() == [8]


@pytest.mark.parametrize("preset", PRESET_NAMES)
@pytest.mark.parametrize("kld", [2.0, 18.0, math.nan, math.inf, -math.inf, 1e300])
def test_constant_large_gets_sl_min(preset: str, kld: float) -> None:
    policy = DSDE(preset)
    for _ in range(8):
        feed(policy, [kld] * 10, 10)
    plan = plan_one(policy)
    assert plan.signals["sl_max"][0] > 10
    assert plan.lengths.tolist() == [policy.preset.min]
    assert np.isfinite(plan.predicted).all()


def test_sudden_constant_disagreement_gets_sl_min_at_once() -> None:
    policy = DSDE()
    for _ in range(4):
        feed(policy, [0.001 * i for i in range(10)], 10)
    assert plan_one(policy).lengths[0] > 10
    feed(policy, [math.nan] * 10, 0)
    assert plan_one(policy).lengths.tolist() == [2]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_kld_that_is_no_number_counts_as_the_largest(bad: float) -> None:
    odd, plain = DSDE(), DSDE()
    for _ in range(8):
        feed(odd, [0.01, bad, 0.02, 0.3], 2)
        feed(plain, [0.01, LARGEST, 0.02, 0.3], 2)
    assert plan_one(odd).predicted == plan_one(plain).predicted
    assert plan_one(odd).signals == plan_one(plain).signals


def test_a_negative_kld_counts_as_zero() -> None:
    policy = DSDE()
    for _ in range(8):
        feed(policy, [-1e-7] * 4, 4)
    assert plan_one(policy).signals["mean_kld"].tolist() == [0.0]


@pytest.mark.parametrize("preset", PRESET_NAMES)
def test_none_accepted_ends_at_sl_min(preset: str) -> None:
    policy = DSDE(preset)
    for _ in range(20):
        feed(policy, [0.1, 0.4, 0.2], 0)
    plan = plan_one(policy)
    assert plan.signals["sl_max"].tolist() == [policy.preset.min]
    assert plan.lengths.tolist() == [policy.preset.min]


@pytest.mark.parametrize(("preset", "expected"), [("paper", [4, 8, 16, 20]), ("release", [6, 12, 20])])
def test_calibration_doubles_while_everything_is_accepted(preset: str, expected: list[int]) -> None:
    policy = DSDE(preset, warmup=60)
    lengths = []
    for _ in expected:
        length = int(plan_one(policy).lengths[0])
        lengths.append(length)
        feed(policy, [0.1] * length, length)
    assert lengths == expected


def test_calibration_keeps_its_length_after_a_rejection_and_clamps_the_initial_one() -> None:
    policy = DSDE(initial=4)
    feed(policy, [0.1] * 4, 3)
    assert plan_one(policy).lengths.tolist() == [4]
    assert plan_one(DSDE(max=3)).lengths.tolist() == [3]


def test_calibration_ends_at_exactly_thirty_tokens() -> None:
    policy = DSDE()
    feed(policy, [0.1] * 29, 10)
    before = plan_one(policy)
    assert not before.votes[0]
    assert all(np.isnan(signal).all() for signal in before.signals.values())
    feed(policy, [0.1], 0)
    after = plan_one(policy)
    assert after.votes[0]
    assert set(after.signals) == {"scale_factor", "wvir", "mean_kld", "sl_max"}
    assert not any(np.isnan(signal).any() for signal in after.signals.values())


def test_sl_max_is_set_once() -> None:
    policy = DSDE()
    feed(policy, [0.0] * 30, 5)
    feed(policy, [0.0] * 12, 12)
    assert plan_one(policy).signals["sl_max"].tolist() == [5.0]


@pytest.mark.parametrize(("preset", "wvir"), [("paper", 1.0), ("release", 0.0)])
def test_one_sample(preset: str, wvir: float) -> None:
    policy = DSDE(preset, warmup=1)
    feed(policy, [0.2], 1)
    plan = plan_one(policy)
    assert plan.signals["wvir"].tolist() == [wvir]
    assert plan.lengths.tolist() == [policy.preset.min]


@pytest.mark.parametrize("preset", PRESET_NAMES)
def test_more_klds_in_a_step_than_are_held(preset: str) -> None:
    rng = np.random.default_rng(1)
    policy, reference = DSDE(preset), ReferenceSequence(preset)
    for num in (7, 75, 31, 30, 4, 64):
        klds = rng.gamma(0.7, 0.1, size=num).tolist()
        feed(policy, klds, 6)
        reference.observe(6, klds, 1.0)
        assert plan_one(policy).predicted[0] == pytest.approx(reference.wanted, abs=1e-9)


def test_by_hand() -> None:
    """Mean KLD ln(1.25)/2 gives SF = 0.25; a constant gives WVIR = 1; SL_max = 6 * (1 + 1) = 12."""
    policy = DSDE()
    for _ in range(5):
        feed(policy, [math.log(1.25) / 2] * 6, 6)
    plan = plan_one(policy)
    assert plan.signals["scale_factor"][0] == pytest.approx(0.25)
    assert plan.signals["wvir"][0] == 1.0
    assert plan.signals["sl_max"][0] == pytest.approx(12.0, abs=1e-5)
    assert plan.predicted[0] == pytest.approx(0.75 * 10 + 2, abs=1e-5)


def test_scale_factor_reaches_one_at_0_3466_nats() -> None:
    policy = DSDE()
    feed(policy, [math.log(2) / 2] * 30, 10)
    assert plan_one(policy).signals["scale_factor"][0] == pytest.approx(1.0)


@pytest.mark.parametrize("temperature", [0.0, 1e-320, 0.5, 2.0])
def test_only_the_release_divides_by_the_temperature(temperature: float) -> None:
    def scale_factor(preset: str, temperature: float) -> float:
        policy = DSDE(preset)
        feed(policy, [0.1] * 30, 10, temperature=temperature)
        return float(plan_one(policy).signals["scale_factor"][0])

    assert scale_factor("paper", temperature) == pytest.approx(math.expm1(0.2))
    mean = min(0.1 / temperature, LARGEST) if temperature else 0.1
    assert scale_factor("release", temperature) == pytest.approx(math.expm1(2 * mean))


# State


def test_a_step_without_drafted_tokens_changes_nothing() -> None:
    policy = DSDE()
    feed(policy, [0.1, 0.2] * 20, 3)
    before = plan_one(policy)
    policy.observe(outcome_of([0, 1], [[], []], [0, 0]))
    after = plan_one(policy)
    assert after.predicted == before.predicted
    assert after.signals == before.signals
    assert plan_one(policy, slot=1).lengths.tolist() == [4]


def test_nothing_leaks_through_a_reused_slot() -> None:
    rng = np.random.default_rng(2)
    used, fresh = DSDE(), DSDE()
    for _ in range(40):
        feed(used, rng.gamma(0.7, 3.0, size=9).tolist(), 9, slot=3)
    used.forget(np.array([3]))
    for _ in range(40):
        klds = rng.gamma(0.7, 0.1, size=5).tolist()
        feed(used, klds, 4, slot=3)
        feed(fresh, klds, 4, slot=3)
        left, right = plan_one(used, slot=3), plan_one(fresh, slot=3)
        assert left.predicted == right.predicted
        for name in left.signals:
            np.testing.assert_array_equal(left.signals[name], right.signals[name])


def test_forgetting_touches_nobody_else_and_may_name_unknown_slots() -> None:
    policy = DSDE()
    policy.forget(np.array([10_000]))
    for slot in (0, 1):
        feed(policy, [0.1, 0.2] * 20, 5, slot=slot)
    before = plan_one(policy, slot=1)
    policy.forget(np.array([0]))
    assert plan_one(policy, slot=1).predicted == before.predicted
    assert not plan_one(policy, slot=0).votes[0]


def test_state_survives_preemption_and_growth() -> None:
    policy = DSDE()
    feed(policy, [0.1, 0.2] * 20, 5, slot=1)
    before = plan_one(policy, slot=1)
    for slot in (2, 40, 5000):
        policy.plan(batch_of([slot]))
        feed(policy, [1.0] * 8, 0, slot=slot)
    after = plan_one(policy, slot=1)
    assert after.predicted == before.predicted
    assert after.signals == before.signals


@pytest.mark.parametrize("preset", PRESET_NAMES)
def test_what_a_sequence_wants_does_not_depend_on_its_batch(preset: str) -> None:
    rng = np.random.default_rng(3)
    alone, together = DSDE(preset), DSDE(preset)
    for _ in range(20):
        klds = [rng.gamma(0.7, 0.1, size=int(num)).tolist() for num in rng.integers(0, 9, size=6)]
        accepted = [len(k) // 2 for k in klds]
        slots = [4, 0, 9, 2, 7, 1]
        together.observe(outcome_of(slots, klds, accepted))
        feed(alone, klds[2], accepted[2], slot=9)
        assert plan_one(alone, slot=9).predicted[0] == pytest.approx(plan_one(together, slot=9).predicted[0], abs=1e-12)


def test_single_precision_klds_are_summed_in_double() -> None:
    policy = DSDE()
    outcome = outcome_of([0], [[0.1] * 30], [5])
    outcome.klds = outcome.klds.astype(np.float32)
    policy.observe(outcome)
    assert plan_one(policy).signals["mean_kld"].dtype == np.float64


def test_an_empty_batch_is_fine() -> None:
    policy = DSDE() | MeanCap()
    plan = policy.plan(batch_of([]))
    policy.observe(outcome_of([], [], []))
    policy.forget(np.array([], np.int64))
    assert plan.lengths.size == 0
    assert plan.cap is None


def test_klds_must_match_the_drafted_tokens() -> None:
    outcome = outcome_of([0, 1], [[0.1], [0.2, 0.3]], [1, 1])
    outcome.klds = outcome.klds[:2]
    with pytest.raises(ValueError, match="2 KLDs came with 3 drafted tokens"):
        DSDE().observe(outcome)


def test_it_asks_for_klds() -> None:
    assert DSDE().needs is Need.KLD
    assert (DSDE() | MeanCap()).needs is Need.KLD


# Configuration


def test_keywords_replace_values_of_the_preset() -> None:
    policy = DSDE("paper", max=10, initial=3)
    assert (policy.preset.max, policy.preset.initial, policy.preset.min) == (10, 3, 2)
    assert (PAPER.max, PAPER.initial) == (20, 4)
    assert DSDE("release", warmup=100).preset.num_held == 100
    assert DSDE("paper", warmup=100).preset.num_held == 30


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"preset": "papr"}, "preset must be one of paper, release, not 'papr'"),
        ({"min": 0}, "min must be a whole number from 1 to 128, not 0"),
        ({"max": 1}, "max must be a whole number from 2 to 128, not 1"),
        ({"max": 2.5}, "max must be a whole number from 2 to 128, not 2.5"),
        ({"initial": 0}, "initial must be a whole number from 1 to 128, not 0"),
        ({"warmup": True}, "warmup must be a whole number from 1 to 500, not True"),
    ],
)
def test_bad_configuration(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInput) as error:
        DSDE(**arguments)  # type: ignore[arg-type]
    assert str(error.value) == message
