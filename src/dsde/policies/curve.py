"""Seconds against size, learnt from measurements of any sizes.

Knows nothing of what is measured, nor of what a size counts.
"""

from __future__ import annotations

import math
from bisect import bisect_right

import numpy as np
from numpy.typing import ArrayLike

from dsde.policies.base import FloatArray, IntArray

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
LEAST_CHANGE = 1.25
"""ratio that is more than sizes taken for one another differ by, and what else varies"""
KNEE = 256.0
"""tokens up to which a verification is taken to cost the same: below it, reading the weights is what takes time"""

_CENTERS: FloatArray = 2.0 ** (np.arange(NUM_BUCKETS) / BUCKETS_PER_OCTAVE)
_KNOTS: list[float] = _CENTERS.tolist()
_FLAT_THEN_LINEAR: FloatArray = np.maximum(_CENTERS, KNEE) / KNEE


class Curve:
    """Seconds against size: flat then linear, times a ratio that is measured per bucket of sizes.

    A bucket holds the ratios of its newest measurements to the prior shape, and stands for their median: a step that
    compiled or was preempted does not move it. Elsewhere seconds are the least that is plausible for a curve that is
    flat first and never bends down: between measured sizes a straight line, or the prior shape where that is lower;
    above them a straight line through the largest and one at most half as large, or the prior shape where there is
    none; below them in proportion to the size, or as another curve says. So one size alone fixes the level.
    Nothing costs more than anything larger: of two buckets that contradict this the smaller size is lowered, because a
    step is slow by accident but hardly ever fast.
    """

    def __init__(self, prior_s: float, is_flat_below: bool = False, may_fall: bool = False, noise: float = 0.0) -> None:
        """With `is_flat_below`, sizes below the smallest measured cost about as much. Beyond the largest a line goes
        up by as much as it does with certainty, if one measurement is off by a share of `noise`.

        With `may_fall` a size stands as it is, whatever larger ones cost, if it was measured more than twice and not
        long ago, and is at least twice the smallest: where the device waits for the host, a verification behind a short
        draft does take longer than one behind a long draft, and only a step without drafts takes less than both. And
        what is smaller than all that was measured costs a little less than that, if larger sizes cost more.
        """
        self.prior_s = prior_s
        self.is_flat_below = is_flat_below
        self.may_fall = may_fall
        self.noise = noise
        self._held = np.zeros((NUM_BUCKETS, NUM_HELD))
        self._num_seen = np.zeros(NUM_BUCKETS, np.int64)
        self._seen_at = np.zeros(NUM_BUCKETS, np.int64)
        self._ratios = np.ones(NUM_BUCKETS)
        self._used = np.ones(NUM_BUCKETS)
        """ratios that the table was made of"""
        self._rebuild_at = 0
        self._largest = 0.0
        self._own = self._table = prior_s * _FLAT_THEN_LINEAR
        """without what others tell, and with it"""
        self._heights: list[float] = self._table.tolist()
        """the same, for single sizes"""
        self._is_stale = False
        self.num_measured = 0
        self._now = 0
        """measurements so far, here and elsewhere"""
        self.is_trusted = False
        """whether any size was measured often enough to count"""
        self.nearest: Curve | None = None
        """that it goes by until then"""
        self._others: list[Curve] = []
        """that tell how much less than the smallest measured size smaller ones cost, if they are not taken to cost so
        in proportion"""

    def observe(self, size: float, seconds: float, num: int = 1) -> None:
        """So many measurements of a size."""
        if not (math.isfinite(seconds) and seconds >= 0 and size >= 1):
            return
        index = bucket_of(size)
        num_seen = int(self._num_seen[index])
        if self._now - int(self._seen_at[index]) > LONGEST_PAUSE:
            num_seen = 0
        for place in range(num_seen, num_seen + min(num, NUM_HELD)):
            self._held[index, place % NUM_HELD] = seconds / (self.prior_s * max(size, KNEE) / KNEE)
        num_seen += min(num, NUM_HELD)
        self.num_measured += num
        self._now += num
        self._num_seen[index], self._seen_at[index] = num_seen, self._now
        self.is_trusted = self.is_trusted or num_seen >= NUM_TRUSTED
        typical, used = self._typical(index), float(self._used[index])
        self._ratios[index] = typical
        # Not for every wobble of a median: working the table out again is what takes time.
        has_moved = abs(typical - used) > WOBBLE * used or num_seen <= NUM_TRUSTED
        self._is_stale = self._is_stale or has_moved or self._now >= self._rebuild_at

    def remember(self, sizes: FloatArray, seconds: FloatArray) -> None:
        """What was measured of these sizes lately took this, oldest first. It counts instead of all that was, unless it
        is too little to count."""
        indices = np.array([bucket_of(size) for size in sizes.tolist()])
        ratios = seconds / (self.prior_s * np.maximum(sizes, KNEE) / KNEE)
        for index in np.unique(indices).tolist():
            newest = ratios[indices == index][-NUM_HELD:]
            if newest.size >= NUM_TRUSTED:
                self._held[index, : newest.size] = newest
                self._num_seen[index] = newest.size
                self._ratios[index] = self._typical(index)
        self._is_stale = True

    def pass_time(self, num: int) -> None:
        """So many measurements were made elsewhere."""
        self._now += num

    def renew(self, size: float, num_kept: int = 1) -> None:
        """What was measured at about this size counts no longer, but for the `num_kept` newest."""
        index = bucket_of(size)
        num_seen = int(self._num_seen[index])
        if num_seen > num_kept:
            newest = np.arange(num_seen - num_kept, num_seen) % NUM_HELD
            self._held[index, :num_kept] = self._held[index, newest]
            self._num_seen[index] = num_kept
            self._is_stale = True
        # They are to join what is measured now, however long ago they were.
        self._seen_at[index] = max(int(self._seen_at[index]), self._now - LONGEST_PAUSE)

    def keep(self, size: float) -> None:
        """Forget all but what was measured at about this size: it takes clearly less than it did, so they may, too."""
        self._num_seen[np.arange(NUM_BUCKETS) != bucket_of(size)] = 0
        self._is_stale = True

    def go_by(self, nearest: Curve | None, others: list[Curve]) -> None:
        """Where nothing, or nothing so small, has been measured here."""
        for other in others:
            other._refresh()
        self._is_stale = self._is_stale or (self.is_flat_below and bool(others) and self.num_measured > 0)
        self.nearest, self._others = nearest, others

    def seconds(self, sizes: ArrayLike) -> FloatArray:
        """What these sizes cost; the last two knots go on as a line, so that nothing is too large."""
        if self.nearest is not None and not self.is_trusted:
            return self.nearest.seconds(sizes)
        self._refresh()
        if isinstance(sizes, int | float):
            return np.asarray(self._seconds_of_one(sizes))
        sizes = np.asarray(sizes, np.float64)
        scale = np.maximum(sizes / _CENTERS[-1], 1.0)
        return np.asarray(np.interp(sizes, _CENTERS, self._table) * scale)

    def _seconds_of_one(self, size: float) -> float:
        """As of many: there are several every step, and NumPy takes as long for one as for hundreds."""
        below = bisect_right(_KNOTS, size) - 1
        if below < 0:
            return self._heights[0]
        if below == NUM_BUCKETS - 1:
            return self._heights[-1] * max(size / _KNOTS[-1], 1.0)
        slope = (self._heights[below + 1] - self._heights[below]) / (_KNOTS[below + 1] - _KNOTS[below])
        return slope * (size - _KNOTS[below]) + self._heights[below]

    def ratio(self, size: float, seconds: float) -> float | None:
        """Of these seconds to those that such a size takes; None: it is not known well enough to tell."""
        index = bucket_of(size)
        known_s = float(self._ratios[index]) * self.prior_s * max(size, KNEE) / KNEE
        return seconds / known_s if self._num_seen[index] >= NUM_TRUSTED and known_s > 0 else None

    def num_near(self, size: float) -> int:
        """Measurements made at about this size."""
        return int(self._num_seen[bucket_of(size)])

    def num_at_most(self, size: float) -> int:
        """Measurements made at about this size, or below it."""
        return int(self._num_seen[: bucket_of(size) + 1].sum())

    def age(self, size: float) -> int:
        """Measurements made since the last one at about this size."""
        return self._now - int(self._seen_at[bucket_of(size)])

    @property
    def sizes(self) -> FloatArray:
        """Those measured."""
        return _CENTERS[self._num_seen > 0]

    @property
    def largest(self) -> float:
        """Of those measured, as the table knows them; 0: none."""
        if self._is_stale and self._num_seen.any():
            self._rebuild()
        return self._largest

    def _typical(self, index: int) -> float:
        num = min(int(self._num_seen[index]), NUM_HELD)
        held = sorted(self._held[index, :num].tolist())
        return float(held[0] if num <= NUM_TRUSTED else held[(num - 1) // 2])

    def _refresh(self) -> None:
        if self._is_stale:
            self._rebuild()

    def _rebuild(self) -> None:
        silent = self._now - self._seen_at > LONGEST_SILENCE
        # What is old is better than nothing.
        silent[int(np.where(self._num_seen > 0, self._seen_at, -1).argmax())] = False
        self._num_seen[silent] = 0
        known = self._num_seen >= NUM_TRUSTED
        if not known.any():
            known = self._num_seen > 0
        places = np.flatnonzero(known)
        ratios = np.interp(np.arange(NUM_BUCKETS), places, self._lowered(places))
        table = self.prior_s * ratios * _FLAT_THEN_LINEAR
        first, last = int(places[0]), int(places[-1])
        self._largest = float(_CENTERS[last])
        between = slice(first, last + 1)
        heights = table[places]
        line = np.interp(_CENTERS[between], _CENTERS[places], heights)
        right = np.searchsorted(places, np.arange(first, last + 1))
        least = np.minimum(heights[np.maximum(right - 1, 0)], heights[right])
        table[between] = np.clip(table[between], least, line)
        table[:first] = table[first] * _CENTERS[:first] / _CENTERS[first]
        if self.is_flat_below:
            table[:first] = np.maximum(table[:first], self._goes_on_below(table, places))
        far = places[places <= last - BUCKETS_PER_OCTAVE]
        if far.size:
            num = min(int(self._num_seen[last]), int(self._num_seen[far[-1]]), NUM_HELD)
            rise = table[last] - (1 + self.noise / math.sqrt(num)) * table[far[-1]]
            slope = rise / (_CENTERS[last] - _CENTERS[far[-1]])
            table[last:] = table[last] + max(slope, 0.0) * (_CENTERS[last:] - _CENTERS[last])
        self._own = table.copy()
        for other in self._others if self.is_flat_below else ():
            table[:first] = np.minimum(table[:first], other._own[:first])
        table[: first + 1] = np.minimum.accumulate(table[first::-1])[::-1]
        self._table, self._heights = table, table.tolist()
        self._used[:] = self._ratios
        self._rebuild_at = self._now + NUM_HELD
        self._is_stale = False

    def _goes_on_below(self, table: FloatArray, places: IntArray) -> FloatArray:
        """Below all that was measured: half as steep as above it, since a curve that never bends down may there be
        anything from flat to as steep."""
        first = int(places[0])
        above = places[places >= first + BUCKETS_PER_OCTAVE]
        rise = max(float(table[above[0]] - table[first]), 0.0) if self.may_fall and above.size else 0.0
        slope = rise / 2 / (_CENTERS[above[0]] - _CENTERS[first]) if rise else 0.0
        return np.asarray(table[first] - slope * (_CENTERS[first] - _CENTERS[:first]))

    def _lowered(self, places: IntArray) -> FloatArray:
        """[places] ratios, where a larger size seems to be cheaper those of that."""
        is_sure = (self._num_seen[places] > NUM_TRUSTED) & (self._now - self._seen_at[places] <= LONGEST_PAUSE)
        is_sure &= self.may_fall & (places >= places[0] + BUCKETS_PER_OCTAVE)
        seconds = self._ratios[places] * _FLAT_THEN_LINEAR[places]
        lowered = np.where(is_sure, seconds, np.minimum.accumulate(seconds[::-1])[::-1])
        return np.asarray(lowered / _FLAT_THEN_LINEAR[places])

    def scale(self, factor: float) -> None:
        """Everything takes so many times as long as it did, sizes that others tell of as well."""
        if not self.num_measured:
            return
        self._held *= factor
        self._ratios *= factor
        self._used *= factor
        # Nothing has to be worked out again: all of it is in proportion to what was measured.
        self._own, self._table = self._own * factor, self._table * factor
        self._heights = self._table.tolist()

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
            self.is_trusted = self.is_trusted or values.size >= NUM_TRUSTED
            self.num_measured += values.size
            self._ratios[index] = self._typical(index)
        self._now = self.num_measured
        self._seen_at[self._num_seen > 0] = self._now
        self._is_stale = bool(held)


def bucket_of(size: float) -> int:
    return min(max(round(BUCKETS_PER_OCTAVE * math.log2(size)), 0), NUM_BUCKETS - 1)
