"""DSDE: speculation lengths from the stability of the KLD between target and draft (arXiv 2509.01083).

Knows, of every sequence, the KLDs of its last verified tokens and how many were accepted. Does not know tokens, models,
load or time, and never stops speculation: that is the business of stages and of other policies. The batch-wide cap of
the paper is a stage of its own, `DSDE() | MeanCap()`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dsde.policies.base import BatchView, BoolArray, FloatArray, IntArray, Need, Outcome, Plan, Policy
from dsde.policies.limits import check_choice
from dsde.policies.presets import PRESETS, Preset
from dsde.policies.rounding import round_values
from dsde.policies.slots import SlotTable

LARGEST_KLD = -float(np.log(1e-8))
"""what a KLD of probabilities clamped at 1e-8 can reach"""
FLAT_VARIANCE = 1e-6
"""a window that varies less than this is constant"""
EPSILON = 1e-8


@dataclass
class _Sequences(SlotTable):
    """What DSDE knows of every sequence."""

    predicted: FloatArray
    """length wanted next: the one being tried while calibrating, SL_hat afterwards"""
    num_verified: IntArray
    """drafted tokens verified so far; also says where the ring of KLDs stands"""
    klds: FloatArray
    """[slot, num_held] ring of the newest KLDs"""
    kld_sum: FloatArray
    """of the calibration, like the next two"""
    kld_max: FloatArray
    most_accepted: IntArray
    sl_max: FloatArray
    """NaN until calibrated, like the next three"""
    mean_kld: FloatArray
    """of the step verified last"""
    scale_factor: FloatArray
    wvir: FloatArray


@dataclass(slots=True)
class _Verified:
    """One verified step, of those sequences that drafted something. Sequences come in the order of `slots`."""

    slots: IntArray
    drafted: IntArray
    accepted: IntArray
    temperatures: FloatArray
    klds: FloatArray
    """[sum(drafted)] cleaned, sequence after sequence"""
    ends: IntArray
    """where the KLDs of the next sequence begin"""
    kld_sums: FloatArray
    kld_maxima: FloatArray


class DSDE(Policy):
    """Lengths from immediate disagreement (scale factor) and its stability (WVIR), per sequence.

    `preset` is "paper", "release" or a `Preset`; the keywords replace single values of it.
    """

    needs = Need.KLD

    def __init__(
        self,
        preset: str | Preset = "paper",
        *,
        min: int | None = None,
        max: int | None = None,
        initial: int | None = None,
        warmup: int | None = None,
        decay: float | None = None,
        short: int | None = None,
        long: int | None = None,
    ) -> None:
        if not isinstance(preset, Preset):
            check_choice("preset", preset, PRESETS)
            preset = PRESETS[preset]
        given: dict[str, Any] = {"min": min, "max": max, "initial": initial, "warmup": warmup}
        given |= {"decay": decay, "short": short, "long": long}
        self.preset = replace(preset, **{name: value for name, value in given.items() if value is not None})
        self._window_weights = _window_weights(self.preset.num_held, self.preset.decay)
        self._newest_first = _newest_first(self.preset.num_held)
        self._sequences = _blank_sequences(self.preset)

    def plan(self, batch: BatchView) -> Plan:
        sequences, slots = self._sequences, batch.slots
        sequences.cover(slots)
        predicted = sequences.predicted[slots]
        rounded = round_values(predicted, self.preset.rounding).astype(np.int64)
        return Plan(
            lengths=np.minimum(rounded, batch.rooms),
            predicted=predicted,
            # A calibrating sequence neither votes nor is capped: under a cap it would measure the cap, not itself.
            votes=self._are_calibrated(slots),
            signals={
                "scale_factor": sequences.scale_factor[slots],
                "wvir": sequences.wvir[slots],
                "mean_kld": sequences.mean_kld[slots],
                "sl_max": sequences.sl_max[slots],
            },
        )

    def observe(self, outcome: Outcome) -> None:
        if outcome.klds.size != outcome.drafted.sum():
            raise ValueError(f"{outcome.klds.size} KLDs came with {outcome.drafted.sum()} drafted tokens")
        if outcome.klds.size == 0:
            return
        step = _summarise(outcome)
        self._sequences.cover(step.slots)
        calibrating = ~self._are_calibrated(step.slots)
        self._remember(step)
        if calibrating.any():
            self._calibrate(step, calibrating)
        calibrated = self._are_calibrated(step.slots)
        if calibrated.any():
            self._predict(step, calibrated)

    def forget(self, slots: IntArray) -> None:
        self._sequences.reset(slots)

    def _are_calibrated(self, slots: IntArray) -> BoolArray:
        return self._sequences.num_verified[slots] >= self.preset.warmup

    def _remember(self, step: _Verified) -> None:
        """Put the newest KLDs into the rings, over the oldest ones."""
        sequences, num_held = self._sequences, self.preset.num_held
        num_verified = sequences.num_verified[step.slots] + step.drafted
        sequences.num_verified[step.slots] = num_verified
        num_later = np.repeat(step.ends, step.drafted) - np.arange(1, step.klds.size + 1)
        rows = np.repeat(step.slots, step.drafted)
        positions = np.repeat(num_verified, step.drafted)
        positions -= 1 + num_later
        positions %= num_held
        if step.drafted.max() > num_held:  # two would claim one place, and NumPy does not promise who wins
            newest = num_later < num_held
            sequences.klds[rows[newest], positions[newest]] = step.klds[newest]
        else:
            sequences.klds[rows, positions] = step.klds

    def _calibrate(self, step: _Verified, calibrating: BoolArray) -> None:
        """Try longer lengths while everything is accepted; set SL_max once the warm-up is over."""
        sequences, slots = self._sequences, step.slots[calibrating]
        accepted = step.accepted[calibrating]
        sequences.kld_sum[slots] += step.kld_sums[calibrating]
        sequences.kld_max[slots] = np.maximum(sequences.kld_max[slots], step.kld_maxima[calibrating])
        sequences.most_accepted[slots] = np.maximum(sequences.most_accepted[slots], accepted)
        doubled = slots[accepted == step.drafted[calibrating]]
        sequences.predicted[doubled] = np.minimum(2 * sequences.predicted[doubled], self.preset.max)
        finished = slots[self._are_calibrated(slots)]
        sequences.sl_max[finished] = self._longest(finished)

    def _longest(self, slots: IntArray) -> FloatArray:
        """SL_max: most tokens accepted in one step, times one plus the mean over the largest KLD of the calibration."""
        sequences, preset = self._sequences, self.preset
        mean = sequences.kld_sum[slots] / sequences.num_verified[slots]
        spread = mean / (sequences.kld_max[slots] + EPSILON)
        longest = sequences.most_accepted[slots] * (1 + preset.kld_weight * spread)
        if preset.round_sl_max:
            longest = round_values(longest, "nearest")
        return np.clip(longest, preset.min, preset.max)

    def _predict(self, step: _Verified, calibrated: BoolArray) -> None:
        """SL_hat falls from SL_max to SL_min in proportion to the penalty, scale factor times WVIR."""
        sequences, preset, slots = self._sequences, self.preset, step.slots[calibrated]
        mean_kld = step.kld_sums[calibrated] / step.drafted[calibrated]
        scale_factor = self._scale_factor(mean_kld, step.temperatures[calibrated])
        wvir = self._wvir(slots)
        sl_max = sequences.sl_max[slots]
        sl_min = np.maximum(preset.min, np.ceil(preset.min_share * sl_max))
        penalty = np.minimum(scale_factor * wvir, 1)
        sequences.predicted[slots] = (1 - penalty) * (sl_max - sl_min) + sl_min
        sequences.mean_kld[slots] = mean_kld
        sequences.scale_factor[slots] = scale_factor
        sequences.wvir[slots] = wvir

    def _scale_factor(self, mean_kld: FloatArray, temperatures: FloatArray) -> FloatArray:
        """SF: e to twice the mean KLD of the step just verified, minus one."""
        if self.preset.divide_by_temperature:
            with np.errstate(over="ignore"):  # a temperature of almost 0
                mean_kld = np.divide(mean_kld, temperatures, out=mean_kld.copy(), where=temperatures > 0)
        scale_factor: FloatArray = np.expm1(2 * np.minimum(mean_kld, LARGEST_KLD))
        return scale_factor

    def _wvir(self, slots: IntArray) -> FloatArray:
        """Weighted variance of the short window over that of the long one."""
        preset, num_verified = self.preset, self._sequences.num_verified[slots]
        places = self._newest_first[(num_verified - 1) % preset.num_held]
        places += slots[:, None] * preset.num_held
        klds = self._sequences.klds.take(places)
        num_long = np.minimum(num_verified, preset.num_held)
        if num_long.min() == preset.num_held:  # as a rule: then one row of weights serves all sequences
            num_long = num_long[:1]
        num_short = np.maximum(num_long // 3, 1) if preset.short is None else np.minimum(num_long, preset.short)
        short = _weighted_variances(klds, self._window_weights[num_short])
        long = _weighted_variances(klds, self._window_weights[num_long])
        varied = (np.minimum(short, long) if preset.flat_short else long) >= FLAT_VARIANCE
        wvir = np.divide(short, long, out=np.full_like(long, preset.flat_wvir), where=varied)
        return np.where(num_long < 2, preset.lone_wvir, wvir)


def _blank_sequences(preset: Preset) -> _Sequences:
    return _Sequences(
        predicted=np.array([float(min(preset.initial, preset.max))]),
        num_verified=np.zeros(1, np.int64),
        klds=np.zeros((1, preset.num_held)),
        kld_sum=np.zeros(1),
        kld_max=np.zeros(1),
        most_accepted=np.zeros(1, np.int64),
        sl_max=np.full(1, np.nan),
        mean_kld=np.full(1, np.nan),
        scale_factor=np.full(1, np.nan),
        wvir=np.full(1, np.nan),
    )


def _newest_first(num_held: int) -> IntArray:
    """[newest, age] places of a ring by age, for every place that the newest KLD may have."""
    ages = np.arange(num_held)
    return (ages[:, None] - ages) % num_held


def _window_weights(num_held: int, decay: float) -> FloatArray:
    """[n, age] weights of a window of n KLDs, newest first; they sum to 1, and older KLDs have none."""
    ages = np.arange(num_held)
    weights = np.where(ages < np.arange(num_held + 1)[:, None], decay**ages, 0.0)
    weights[1:] /= weights[1:].sum(axis=1, keepdims=True)
    return weights


def _weighted_variances(values: FloatArray, weights: FloatArray) -> FloatArray:
    """Of every row; there is a row of weights for each or one for all, and it sums to 1.

    Two passes: mean square less squared mean cancels, and can come out negative.
    """
    means = np.einsum("ij,ij->i", values, weights)
    deviations = values - means[:, None]
    deviations *= deviations
    variances: FloatArray = np.einsum("ij,ij->i", deviations, weights)
    return variances


def _summarise(outcome: Outcome) -> _Verified:
    active = outcome.drafted > 0
    drafted = outcome.drafted[active]
    klds = _clean(outcome.klds)
    # Not drafted.cumsum(): it looks "accumulate" up by a new string each time, and CPython's type cache keeps many.
    ends = np.add.accumulate(drafted)
    starts = ends - drafted
    return _Verified(
        slots=outcome.slots[active],
        drafted=drafted,
        accepted=outcome.accepted[active],
        temperatures=outcome.temperatures[active],
        klds=klds,
        ends=ends,
        kld_sums=np.add.reduceat(klds, starts),
        kld_maxima=np.maximum.reduceat(klds, starts),
    )


def _clean(klds: FloatArray) -> FloatArray:
    """A KLD that is no number says that the two disagree completely; rounding can make one slightly negative."""
    cleaned = np.where(np.isfinite(klds), klds, LARGEST_KLD).astype(np.float64, copy=False)
    return np.clip(cleaned, 0.0, LARGEST_KLD, out=cleaned)
