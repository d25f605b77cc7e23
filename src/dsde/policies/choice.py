"""Lengths for a whole batch that bring the most tokens per second, if nobody looks at tokens.

Knows what every length would bring (`Menu`) and what it costs (`CostModel`); nothing of what has been decided before.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dsde.policies.base import BatchView, FloatArray, IntArray
from dsde.policies.cost import CostModel
from dsde.policies.menu import Menu

AS_GOOD = 0.02
"""share by which one length for all may seem to bring less than the best, and be taken if it is shorter: seconds are
not known better than that, and the shorter drafts are the less do requests drift apart"""


@dataclass(slots=True)
class Choice:
    """The lengths that pay best, and the rates that follow."""

    lengths: IntArray
    rate: float
    """tokens per second expected of them; what all steps take longer that read prompts, whoever drafts, is left out"""
    seconds: float
    """that draft and verification take, if the step reads no prompts"""
    rate_off: float
    """tokens per second of a step without drafts, likewise"""
    leaves_out: bool = False
    """whether somebody drafts nothing who could, and will not have ended long before the others"""


def choose(
    menu: Menu,
    cost: CostModel,
    batch: BatchView,
    outlooks: FloatArray,
    start_s: float,
    token_s: tuple[float, float] = (0.0, 0.0),
) -> Choice:
    """For sequences of these outlooks, where a draft takes `start_s` once, and every token of a step without drafts and
    of one with them takes `token_s` beside all that is known of these steps."""
    num_base = batch.num_sequences
    kinds = menu.kinds(outlooks)
    one_length = batch.favours_one_length or kinds.size == 1
    counts, drafted, gains = (menu.totals_of_one_length if one_length else menu.totals)(kinds)
    # Hundreds of choices, but never more sequences in a pass than there are.
    pass_s = np.concatenate(([0.0], cost.draft_s(np.arange(1.0, kinds.size + 1))))
    draft_s = pass_s[counts.astype(np.intp)]
    seconds = start_s + np.add.accumulate(draft_s, axis=1) + cost.verify_s(num_base + drafted)
    spared_s = cost.spared_s(num_base, drafted, num_base + gains)
    beyond_s = token_s[1] * (num_base + gains)
    rates = np.where(drafted > 0, (num_base + gains) / (seconds - spared_s + beyond_s), 0.0)
    level, last = divmod(int(rates.argmax()), menu.max_length)
    if batch.favours_one_length:
        last = int((rates[0] >= (1 - AS_GOOD) * rates[0, last]).argmax())
    lengths = np.full(kinds.size, last + 1) if one_length else menu.lengths(kinds, level, last + 1)
    return Choice(
        leaves_out=bool((2 * batch.rooms[lengths == 0] > float(batch.rooms.mean())).any()),
        lengths=np.minimum(lengths, batch.rooms),
        rate=float(rates[level, last]),
        seconds=float(seconds[level, last]),
        rate_off=num_base / (float(cost.verify_s(num_base)) + token_s[0] * num_base),
    )
