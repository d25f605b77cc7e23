"""What a step costs by a table that was measured on a machine, in seconds. Knows counts of sequences and tokens only.

Between measured sizes seconds are taken on straight lines, below the smallest as there, above the largest further along
the last line. A verification is looked up by the sequences in it and by its tokens a sequence: as many tokens cost
more where they belong to fewer sequences, which a line over tokens alone cannot say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dsde.core.errors import InvalidInput
from dsde.policies.base import FloatArray, IntArray

FORM = '{"draft": [[sequences, seconds], ...], "verify": [[sequences, tokens, seconds], ...]}'


class MeasuredCosts:
    """The same questions as `Costs` answers. Plain steps are those with one token a sequence."""

    def __init__(
        self,
        draft: Sequence[Sequence[float]],
        verify: Sequence[Sequence[float]],
        catch_up: Sequence[Sequence[float]] | None = None,
        step_s: float = 0.0,
        drafting_s: float = 0.0,
        ruled_s: float = 0.0,
        end_s: float = 0.0,
        whole: int = 0,
    ) -> None:
        """`catch_up`: [tokens, seconds] that reading what the draft missed takes beyond an ordinary pass; without it,
        as of a pass with so many more sequences. `drafting_s`: once in every step that drafts, beside the passes;
        `ruled_s`: likewise where a rule ends drafts, as a device waits to be told. `step_s`, and `end_s` in steps that
        draft behind one in which somebody ended: beside all that, and told to nobody as the price of either. `whole`:
        batches of up to so many have everybody in every pass of a draft, whoever still drafts."""
        overheads = {"step_s": step_s, "drafting_s": drafting_s, "ruled_s": ruled_s, "end_s": end_s}
        self._given = {"draft": draft, "verify": verify, **overheads, "whole": whole}
        self.whole = int(whole)
        if catch_up is not None:
            self._given["catch_up"] = catch_up
        passes, verifications = _rows(draft, 2), _rows(verify, 3)
        self.step_s, self.end_s = float(step_s), float(end_s)
        self.drafting_s, self.ruled_s = float(drafting_s), float(ruled_s)
        self._draft = _Knots(passes[:, 0], passes[:, 1])
        self._catch_up = None
        if catch_up is not None:
            readings = _rows(catch_up, 2)
            # Sizes may lie close to each other, and more than was ever read at once is read in pieces.
            self._catch_up = _Knots(np.append(0.0, readings[:, 0]), np.append(0.0, readings[:, 1]), is_even=True)
        self._batch_sizes = np.unique(verifications[:, 0])
        self._verify = []
        for size in self._batch_sizes:
            chosen = verifications[verifications[:, 0] == size]
            self._verify.append(_Knots(chosen[:, 1] / size, chosen[:, 2]))

    def pass_s(self, num_sequences: IntArray | int) -> FloatArray:
        """Of one pass of the draft."""
        return self._draft.seconds(np.asarray(num_sequences, np.float64))

    def draft_s(self, passes: IntArray, num_missed: int = 0, is_ruled: bool = False) -> float:
        if not passes.any():
            return 0.0
        once_s = self.drafting_s + (self.ruled_s if is_ruled else 0.0)
        if passes.size <= self.whole:
            passes = np.full_like(passes, passes.max())
        if self._catch_up is None:
            return once_s + float(self.pass_s(sizes_of_passes(passes, num_missed)).sum())
        catch_up_s = float(self._catch_up.seconds(np.asarray(float(num_missed))))
        return once_s + float(self.pass_s(sizes_of_passes(passes, 0)).sum()) + catch_up_s

    def verify_s(self, num_sequences: int, num_tokens: IntArray | int) -> FloatArray:
        """Of packed tokens that belong to so many sequences."""
        each = np.asarray(num_tokens, np.float64) / max(num_sequences, 1)
        by_size = np.stack([knots.seconds(each) for knots in self._verify])
        place = np.interp(num_sequences, self._batch_sizes, np.arange(self._batch_sizes.size))
        low = int(min(place, self._batch_sizes.size - 1))
        high, share = min(low + 1, self._batch_sizes.size - 1), place - low
        seconds: FloatArray = (1 - share) * by_size[low] + share * by_size[high]
        return seconds

    def to_dict(self) -> dict[str, Any]:
        return self._given


def sizes_of_passes(passes: IntArray, num_missed: int) -> IntArray:
    """[passes] tokens in each, by how many every sequence takes part in."""
    sizes: IntArray = passes.size - np.add.accumulate(np.bincount(passes))[:-1]
    sizes[0] += num_missed
    return sizes


class _Knots:
    def __init__(self, sizes: FloatArray, seconds: FloatArray, is_even: bool = False) -> None:
        """Beyond the largest they go on as between the last two; `is_even`: as from the largest that is at most half as
        large, or from the smallest."""
        order = np.argsort(sizes)
        self.sizes, self._seconds = sizes[order], seconds[order]
        before = max(int(np.count_nonzero(self.sizes <= self.sizes[-1] / 2)), 1) - 1 if is_even else sizes.size - 2
        rise = self._seconds[-1] - self._seconds[before]
        self._slope = float(rise / (self.sizes[-1] - self.sizes[before])) if sizes.size > 1 else 0.0

    def seconds(self, sizes: FloatArray) -> FloatArray:
        beyond = np.maximum(sizes - self.sizes[-1], 0.0)
        seconds: FloatArray = np.interp(sizes, self.sizes, self._seconds) + max(self._slope, 0.0) * beyond
        return seconds


def _rows(given: object, width: int) -> FloatArray:
    try:
        rows = np.array(given, np.float64)
    except (TypeError, ValueError):
        rows = np.empty(0)
    if rows.ndim != 2 or rows.shape[1] != width or not np.isfinite(rows).all() or (rows <= 0).any():
        raise InvalidInput(f"measured costs must have the form {FORM} with numbers above 0")
    if len(np.unique(rows[:, :-1], axis=0)) < len(rows):
        raise InvalidInput("measured costs must hold every size once")
    return rows
