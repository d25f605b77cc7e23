"""What one more token costs around the lengths chosen for a batch: the price for everybody, as tokens are looked at.

A verification's seconds bend and jump with its tokens, so the next one costs more than the last one did, and a price
between the two is as right as another. Where looking tells nothing, what is decided token by token has to come out as
what was chosen for all: of all prices between the two, one is taken at which it does. Knows nothing of signals.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dsde.policies.base import FloatArray, IntArray
from dsde.policies.cost import CostModel


@dataclass(slots=True)
class Prices:
    """In seconds."""

    token_s: float
    """of verifying one more"""
    beyond_s: float
    """of verifying one beyond the longest draft chosen, at least as much"""
    each_s: float
    """of one more sequence in a draft pass"""
    pass_s: float
    """of a pass, whoever takes part"""


def find_prices(
    cost: CostModel, rate: float, outlooks: FloatArray, lengths: IntArray, rooms: IntArray, num_plain: int
) -> Prices:
    """Around these lengths, of at most `rooms`, with `num_plain` tokens to verify besides, where a second is worth
    `rate` tokens."""
    num_drafted, longest = int(lengths.sum()), int(lengths.max(initial=0))
    num_tokens, half = num_plain + num_drafted, max(num_drafted // 2, 1)
    num_first = max(int(np.count_nonzero(lengths)), 1)
    first_s, each_s = float(cost.draft_s(num_first)), 0.0
    if num_first > 1:
        each_s = (first_s - float(cost.draft_s(num_first // 2))) / (num_first - num_first // 2)
    pass_s = first_s - num_first * each_s
    here_s = float(cost.verify_s(num_tokens))
    below_s = (here_s - float(cost.verify_s(max(num_tokens - half, 1)))) / min(half, max(num_tokens - 1, 1))
    # Beyond what was measured a guess is no reason to pay more.
    above_s = below_s
    if cost.is_measured(num_tokens + half):
        above_s = max((float(cost.verify_s(num_tokens + half)) - here_s) / half, below_s)
    token_s = (below_s + above_s) / 2
    if not longest:
        return Prices(token_s, token_s, each_s, pass_s)
    # What may be paid for a token of the last pass, and of another one, before nobody makes it; and for anybody's last
    # token, and the one behind it, in passes that are made anyway. Halfway between, neither is in doubt.
    drafts, goes_on = lengths > 0, lengths < rooms
    pays_s = [
        _highest(outlooks[drafts & (rooms >= depth)] ** depth / rate, pass_s) - each_s
        for depth in (longest, longest + 1)
    ]
    turn_s = sum(pays_s) / 2 if np.isfinite(pays_s).all() else pays_s[0]
    last_s = float((outlooks[drafts] ** lengths[drafts]).min()) / rate - each_s
    next_s = float((outlooks ** (lengths + 1))[goes_on & (lengths < longest)].max(initial=0.0)) / rate - each_s
    if not next_s < token_s < last_s:
        token_s = (next_s + last_s) / 2
    token_s = min(max(min(token_s, turn_s), below_s), above_s)
    beyond_s = max(token_s, above_s, turn_s)
    return Prices(max(token_s, 0.0), max(beyond_s, 0.0), each_s, pass_s)


def _highest(worths_s: FloatArray, pass_s: float) -> float:
    """Price at which those who are worth it are together just worth a pass; nobody is worth any."""
    if not worths_s.size:
        return -np.inf
    worths_s = np.sort(worths_s)[::-1]
    return float(((np.add.accumulate(worths_s) - pass_s) / np.arange(1, worths_s.size + 1)).max())
