"""What a step costs on this machine: seconds of a draft pass and of a verification, learnt while serving.

Knows sizes and seconds; knows no model, no device, no context length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from dsde.core.errors import InvalidInput
from dsde.policies.base import FloatArray, IntArray, Outcome
from dsde.policies.slots import SlotTable

BUCKETS_PER_OCTAVE = 4
"""sizes 1 to 9 have a bucket each; above, a bucket spans 19 %"""
NUM_BUCKETS = 1 + 17 * BUCKETS_PER_OCTAVE
NUM_HELD = 31
"""newest measurements of every bucket: their median is off by about a fifth of the noise of one"""
NUM_TRUSTED = 2
"""measurements before a bucket counts beside others: the first of a shape may have compiled something"""
LONGEST_SILENCE = 4096
"""measurements elsewhere after which a bucket is forgotten: the load, and the machine, may have changed"""
LONGEST_PAUSE = 512
"""measurements elsewhere after which a new one of a bucket replaces the old ones instead of joining them"""
WOBBLE = 0.005
"""share by which a bucket may have moved before seconds are worked out again"""
VERIFY_S = 0.01
KNEE = 256.0
"""tokens up to which a verification is taken to cost the same: below it, reading the weights is what takes time"""
DRAFT_SHARE = 0.1
"""of a verification, that a draft pass is taken to cost until one has been measured"""
LARGEST_EXCESS = 10.0
"""a part of a step that took longer than this many times the model's estimate is counted as that many"""
MOST_UNCLEAN = 32
"""drafting steps in which somebody was behind, one after the other, until such steps count as normal"""
NUM_STARTS = 32
"""newest drafts, by which what a draft costs beside its passes is told from what the passes cost"""
MOST_UNLIKE = 0.2
"""share by which sizes may differ whose passes are taken to cost the same"""

_CENTERS: FloatArray = 2.0 ** (np.arange(NUM_BUCKETS) / BUCKETS_PER_OCTAVE)
_FLAT_THEN_LINEAR: FloatArray = np.maximum(_CENTERS, KNEE) / KNEE


class Curve:
    """Seconds against size: flat then linear, times a ratio that is measured per bucket of sizes.

    A bucket holds the ratios of its newest measurements to the prior shape, and stands for their median: a step that
    compiled or was preempted does not move it. Elsewhere seconds are the least that is plausible for a curve that is
    flat first and never bends down: between measured sizes a straight line, or the prior shape where that is lower;
    above them the prior shape, or a straight line from the size half as large where that is higher; below them in
    proportion to the size. So one size alone fixes the level. Nothing costs more than anything larger: of two buckets
    that contradict this the smaller size is lowered, because a step is slow by accident but hardly ever fast.
    """

    def __init__(self, prior_s: float, is_flat_below: bool = False) -> None:
        """With `is_flat_below`, sizes below the smallest measured cost as much as that."""
        self.prior_s = prior_s
        self.is_flat_below = is_flat_below
        self._held = np.zeros((NUM_BUCKETS, NUM_HELD))
        self._num_seen = np.zeros(NUM_BUCKETS, np.int64)
        self._seen_at = np.zeros(NUM_BUCKETS, np.int64)
        self._ratios = np.ones(NUM_BUCKETS)
        self._used = np.ones(NUM_BUCKETS)
        """ratios that the table was made of"""
        self._rebuild_at = 0
        self._largest = 0.0
        self._table = prior_s * _FLAT_THEN_LINEAR
        self._is_stale = False
        self.num_measured = 0

    def observe(self, size: float, seconds: float) -> None:
        if not (math.isfinite(seconds) and seconds >= 0 and size >= 1):
            return
        index = _bucket(size)
        if self.num_measured - self._seen_at[index] > LONGEST_PAUSE:
            self._num_seen[index] = 0
        self._held[index, self._num_seen[index] % NUM_HELD] = seconds / (self.prior_s * max(size, KNEE) / KNEE)
        self._num_seen[index] += 1
        self.num_measured += 1
        self._seen_at[index] = self.num_measured
        self._ratios[index] = self._typical(index)
        # Not for every wobble of a median: working the table out again is what takes time.
        used = self._used[index]
        has_moved = abs(self._ratios[index] - used) > WOBBLE * used or self._num_seen[index] <= NUM_TRUSTED
        self._is_stale |= bool(has_moved) or self.num_measured >= self._rebuild_at

    def seconds(self, sizes: ArrayLike) -> FloatArray:
        """What these sizes cost; the last two knots go on as a line, so that nothing is too large."""
        if self._is_stale:
            self._rebuild()
        sizes = np.asarray(sizes, np.float64)
        scale = np.maximum(sizes / _CENTERS[-1], 1.0)
        return np.asarray(np.interp(sizes, _CENTERS, self._table) * scale)

    def num_near(self, size: float) -> int:
        """Measurements made at about this size."""
        return int(self._num_seen[_bucket(size)])

    def num_at_most(self, size: float) -> int:
        """Measurements made at about this size, or below it."""
        return int(self._num_seen[: _bucket(size) + 1].sum())

    def age(self, size: float) -> int:
        """Measurements made since the last one at about this size."""
        return self.num_measured - int(self._seen_at[_bucket(size)])

    @property
    def sizes(self) -> FloatArray:
        """Those measured."""
        return _CENTERS[self._num_seen > 0]

    @property
    def largest(self) -> float:
        """Of those measured, as the table knows them; 0: none."""
        return self._largest

    def _typical(self, index: int) -> float:
        num = min(int(self._num_seen[index]), NUM_HELD)
        held = sorted(self._held[index, :num].tolist())
        return float(held[0] if num <= NUM_TRUSTED else held[(num - 1) // 2])

    def _rebuild(self) -> None:
        silent = self.num_measured - self._seen_at > LONGEST_SILENCE
        self._num_seen[silent] = 0
        known = self._num_seen >= NUM_TRUSTED
        if not known.any():
            known = self._num_seen > 0
        places = np.flatnonzero(known)
        ratios = np.interp(np.arange(NUM_BUCKETS), places, self._ratios[places])
        table = self.prior_s * ratios * _FLAT_THEN_LINEAR
        first, last = int(places[0]), int(places[-1])
        self._largest = float(_CENTERS[last])
        between = slice(first, last + 1)
        table[between] = np.minimum(table[between], np.interp(_CENTERS[between], _CENTERS[places], table[places]))
        table[:first] = table[first] * (1.0 if self.is_flat_below else _CENTERS[:first] / _CENTERS[first])
        far = places[places <= last - BUCKETS_PER_OCTAVE]
        if far.size:
            slope = (table[last] - table[far[-1]]) / (_CENTERS[last] - _CENTERS[far[-1]])
            table[last:] = np.maximum(table[last:], table[last] + slope * (_CENTERS[last:] - _CENTERS[last]))
        self._table = np.minimum.accumulate(table[::-1])[::-1]
        self._used[:] = self._ratios
        self._rebuild_at = self.num_measured + NUM_HELD
        self._is_stale = False

    def to_dict(self) -> dict[str, list[float]]:
        """Measured ratios by bucket, oldest first."""
        held = {}
        for index in np.flatnonzero(self._num_seen):
            num_seen = int(self._num_seen[index])
            num = min(num_seen, NUM_HELD)
            held[str(index)] = self._held[index, np.arange(num_seen - num, num_seen) % NUM_HELD].tolist()
        return held

    def restore(self, held: dict[str, list[float]]) -> None:
        for name, ratios in held.items():
            index, values = int(name), np.array(ratios, np.float64)
            if not (0 <= index < NUM_BUCKETS and 0 < values.size <= NUM_HELD and np.isfinite(values).all()):
                raise ValueError(name)
            if (values < 0).any():
                raise ValueError(name)
            self._held[index, : values.size] = values
            self._num_seen[index] = values.size
            self.num_measured += values.size
            self._ratios[index] = self._typical(index)
        self._seen_at[self._num_seen > 0] = self.num_measured
        self._is_stale = bool(held)


class Start:
    """Seconds that a draft takes once, whatever its length: the host decides, and the device waits.

    Told from its passes as soon as drafts of about the same size differ in length: a straight line through the newest
    of them, by the medians of its slopes and heights, which a few steps that were held up do not move. Never more than
    half of a draft just seen: under another load what was learnt is wrong, and the passes would cost nothing.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._held = np.zeros((NUM_STARTS, 3))
        self._num_seen = 0

    def observe(self, num_passes: int, size: float, seconds: float) -> None:
        """A draft took this, with passes of so many sequences."""
        self._held[self._num_seen % NUM_STARTS] = num_passes, size, seconds
        self._num_seen += 1
        if self._num_seen % 4 == 0:
            self._fit(size)
        self.seconds = min(self.seconds, seconds / 2)

    def _fit(self, size: float) -> None:
        held = self._held[: min(self._num_seen, NUM_STARTS)]
        num_passes, _, seconds = held[np.abs(held[:, 1] - size) <= MOST_UNLIKE * size].T
        ones, others = np.triu_indices(seconds.size, 1)
        apart = num_passes[others] - num_passes[ones]
        tells = apart != 0
        if np.count_nonzero(tells) < NUM_STARTS // 2:
            return
        slope = max(float(np.median((seconds[others] - seconds[ones])[tells] / apart[tells])), 0.0)
        self.seconds = max(float(np.median(seconds - slope * num_passes)), 0.0)


@dataclass(slots=True)
class StepCost:
    """The seconds of one step, by what they were for. Those of a step that compiled or was held up are limited."""

    draft_s: float
    """catching up left out"""
    catch_up_s: float
    """reading what the sequences gained while they did not draft; a new sequence's prompt, too"""
    verify_s: float


@dataclass
class _Sequences(SlotTable):
    num_behind: IntArray
    """tokens gained since the sequence last drafted"""


class CostModel:
    """Seconds of a draft pass against the sequences in it, and of a verification against its packed tokens.

    Assumptions. A step takes `start_s + passes * draft_s(sequences) + verify_s(tokens)`, tokens being one for every
    decoding sequence, all drafted ones and those of prompts read in the same pass. A pass in which fewer sequences
    still draft is taken at the mean number of them. What drafting costs once a step is spread over the passes until
    drafts of different lengths were seen. The length of the context is not looked at: it changes slowly, and the
    measurements follow. Before the first measurement a verification takes 10 ms up to 256 tokens and grows in
    proportion above, and a draft pass takes a tenth of a verification of as many tokens: only the ratio matters, and
    only until there is evidence.

    Identifiable from one batch size alone are the level of the draft and, as soon as lengths vary, the verification
    at as many sizes as there were lengths. What was never measured is taken to cost as little as is plausible (see
    `Curve`). A policy misled by that tries it, and then it has been measured; a guess on the dear side would never be
    put right.

    Steps in which a sequence had to catch up (after a pause, or because it is new) say nothing of a draft pass, and are
    used for `catch_up_s`. Under a load where there is always somebody new they count after all.

    One model belongs to one policy or stage, which hands every outcome to `observe`.
    """

    def __init__(self, num_tried: int = 1, is_flat_below: bool = False) -> None:
        """A draft pass is believed to cost what it does once `num_tried` steps have drafted, and not before.

        With `is_flat_below` sizes below all that were measured cost no less. That is for a policy which would otherwise
        make many small passes, and which measures a step without drafts before it compares anything with it.
        """
        self._num_tried = num_tried
        self._verify = Curve(VERIFY_S, is_flat_below)
        self._draft = Curve(VERIFY_S * DRAFT_SHARE, is_flat_below)
        self._catch_up = Curve(VERIFY_S * DRAFT_SHARE)
        self._start = Start()
        self._sequences = _Sequences(num_behind=np.zeros(1, np.int64))
        self._num_unclean = 0

    @property
    def num_measured(self) -> int:
        """Verifications seen, of any size."""
        return self._verify.num_measured

    def draft_s(self, batch_sizes: ArrayLike) -> FloatArray:
        """Of one draft pass with so many sequences in it."""
        if self._draft.num_measured >= self._num_tried:
            return self._draft.seconds(batch_sizes)
        return DRAFT_SHARE * self._verify.seconds(batch_sizes)

    @property
    def start_s(self) -> float:
        """Of a draft, beside its passes."""
        return self._start.seconds

    def drafting_s(self, num_tokens: int, num_passes: int) -> float:
        """Of drafting so many tokens in so many passes, nobody having to catch up."""
        if not num_passes:
            return 0.0
        return self.start_s + num_passes * float(self.draft_s(max(num_tokens / num_passes, 1.0)))

    def verify_s(self, tokens: ArrayLike) -> FloatArray:
        """Of one verification of so many packed tokens."""
        return self._verify.seconds(tokens)

    def catch_up_s(self, tokens: ArrayLike) -> FloatArray:
        """Of reading so many tokens before the draft can draft again; an ordinary pass over them until measured."""
        tokens = np.asarray(tokens, np.float64)
        seconds = self._catch_up.seconds(tokens) if self._catch_up.num_measured else self.draft_s(tokens)
        return np.where(tokens > 0, seconds, 0.0)

    def num_behind(self, slots: IntArray) -> int:
        """Tokens that the draft would have to read before these could draft; prompts of new ones are not known."""
        self._sequences.cover(slots)
        return int(self._sequences.num_behind[slots].sum())

    def num_verified(self, tokens: float) -> int:
        """Verifications measured at about so many tokens."""
        return self._verify.num_near(tokens)

    def is_measured(self, tokens: float) -> bool:
        """Whether verifications of so many tokens, or more, have been."""
        return self._verify.largest >= tokens

    def is_below(self, tokens: float) -> bool:
        """Whether verifications of so many tokens, or fewer, have hardly been measured."""
        return self._verify.num_at_most(tokens) < self._num_tried

    def age(self, tokens: float) -> int:
        """Verifications since the last one of about so many tokens."""
        return self._verify.age(tokens)

    def observe(self, outcome: Outcome) -> StepCost:
        """Learn from a step, and say what its seconds were for."""
        num_drafted = max(outcome.num_drafted, int(outcome.drafted.sum()))
        tokens = outcome.num_plain_tokens + num_drafted
        if outcome.verify_s > 0:
            self._verify.observe(tokens, outcome.verify_s)
        verify_s = limit(outcome.verify_s, float(self.verify_s(tokens)))
        draft_s, catch_up_s = self._observe_draft(outcome, num_drafted + outcome.num_cut)
        self._follow(outcome)
        return StepCost(draft_s, catch_up_s, verify_s)

    def forget(self, slots: IntArray) -> None:
        """These sequences have ended."""
        self._sequences.reset(slots)

    def _observe_draft(self, outcome: Outcome, num_drafted: int) -> tuple[float, float]:
        """Seconds of passes and of catching up."""
        if not outcome.draft_s > 0:
            return 0.0, 0.0
        passes = max(outcome.num_draft_passes, int(outcome.drafted.max(initial=0)))
        if passes == 0 or num_drafted == 0:  # the draft read, and nobody was ready to draft
            return 0.0, self._limited_catch_up_s(outcome.draft_s, outcome)
        batch_size = max(num_drafted / passes, 1.0)
        # One token a sequence is what a draft that was accepted whole leaves unread.
        is_clean = outcome.num_catch_up_tokens <= outcome.num_sequences
        self._num_unclean = 0 if is_clean else self._num_unclean + 1
        if is_clean or self._num_unclean > MOST_UNCLEAN:
            self._draft.observe(batch_size, max(outcome.draft_s - self.start_s, 0.0) / passes)
            self._start.observe(passes, batch_size, outcome.draft_s)
            return limit(outcome.draft_s, self.drafting_s(num_drafted, passes)), 0.0
        draft_s = min(outcome.draft_s, self.drafting_s(num_drafted, passes))
        if self._draft.num_measured:
            self._catch_up.observe(outcome.num_catch_up_tokens, outcome.draft_s - draft_s)
        return draft_s, self._limited_catch_up_s(outcome.draft_s - draft_s, outcome)

    def _limited_catch_up_s(self, seconds: float, outcome: Outcome) -> float:
        """A draft without a model reads nothing, and may look for long, so a verification is the least to allow."""
        expected_s = self.catch_up_s(outcome.num_catch_up_tokens) + self.verify_s(max(outcome.slots.size, 1))
        return limit(seconds, float(expected_s))

    def _follow(self, outcome: Outcome) -> None:
        self._sequences.cover(outcome.slots)
        behind = self._sequences.num_behind[outcome.slots] + 1
        has_drafted = (outcome.drafted > 0) | (outcome.num_cut > 0)
        self._sequences.num_behind[outcome.slots] = np.where(has_drafted, 0, behind)

    def describe(self) -> dict[str, float]:
        """A few numbers for a trace: how much was measured, and what the smallest and largest sizes cost."""
        numbers: dict[str, float] = {}
        for name, curve in (("verify", self._verify), ("draft", self._draft), ("catch_up", self._catch_up)):
            numbers[f"num_{name}_measured"] = float(curve.num_measured)
            if curve.sizes.size:
                numbers[f"{name}_least_size"], numbers[f"{name}_most_size"] = curve.sizes[[0, -1]].tolist()
                numbers[f"{name}_least_s"], numbers[f"{name}_most_s"] = curve.seconds(curve.sizes[[0, -1]]).tolist()
        return numbers

    def to_dict(self) -> dict[str, Any]:
        """What was learnt, for JSON."""
        return {
            "version": 1,
            "start_s": self._start.seconds,
            "verify": self._verify.to_dict(),
            "draft": self._draft.to_dict(),
            "catch_up": self._catch_up.to_dict(),
        }

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> CostModel:
        """The model that `to_dict` saved. Raises InvalidInput where it is none."""
        model = cls()
        model.restore(saved)
        return model

    def restore(self, saved: dict[str, Any]) -> None:
        """Take over what `to_dict` saved, nothing having been measured yet. Raises InvalidInput where it is none."""
        try:
            if saved["version"] != 1:
                raise ValueError("version")
            self._verify.restore(saved["verify"])
            self._draft.restore(saved["draft"])
            self._catch_up.restore(saved["catch_up"])
            # Of an older file it is spread over the passes.
            self._start.seconds = _seconds(saved.get("start_s", 0.0))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidInput(f"this is no saved cost model ({error}); measure again without it") from None


def limit(seconds: float, expected: float) -> float:
    """Seconds as measured, unless something out of the ordinary held the step up."""
    return min(seconds, LARGEST_EXCESS * expected)


def _seconds(value: object) -> float:
    if not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError("start_s")
    return float(value)


def _bucket(size: float) -> int:
    return min(max(round(BUCKETS_PER_OCTAVE * math.log2(size)), 0), NUM_BUCKETS - 1)
