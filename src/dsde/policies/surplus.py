"""What steps take beyond their drafts and verifications, by the token: with drafts, and without.

Where somebody ends or joins, a step that was made ahead may have been in vain, and a device waits for its host. None of
it is the price of a pass, and it is not told as one. Requests end after so many tokens, in however few steps they get
them, so it goes by tokens; and with drafts an end may cost more than without. Knows seconds; knows nothing of what they
went to.
"""

from __future__ import annotations

import math

from dsde.policies.verifications import size_of_batch

MEMORY = 64.0
"""steps after which one counts about a third"""
LONG_MEMORY = 1024.0
"""steps without drafts after which one with drafts does: it may be another load"""
LARGEST = 3.0
"""times what a step was to take, that it counts for beyond that at most: a machine that was held up says nothing"""
NUM_SUPPOSED = 16.0
"""steps with drafts that those without stand for, until there are others"""


class Surplus:
    """By size of batch, each up to twice as large as the one before."""

    def __init__(self) -> None:
        self._sums: dict[tuple[int, bool], tuple[float, float]] = {}
        """of a size, with drafts or without: seconds, and tokens that were emitted in them, fading"""

    def observe(
        self, num_sequences: int, has_drafts: bool, step_s: float, usual_s: float, num_emitted: int, num_steps: int = 1
    ) -> None:
        """So many steps took `step_s` together, of which each was to take `usual_s`, and emitted so many tokens."""
        beyond_s = min(step_s - num_steps * usual_s, num_steps * LARGEST * usual_s)
        size = size_of_batch(num_sequences)
        self._fade((size, has_drafts), math.exp(-num_steps / MEMORY))
        seconds, tokens = self._sums[size, has_drafts]
        self._sums[size, has_drafts] = seconds + beyond_s, tokens + num_emitted
        if not has_drafts:
            self._fade((size, True), math.exp(-num_steps / LONG_MEMORY))

    def _fade(self, key: tuple[int, bool], kept: float) -> None:
        seconds, tokens = self._sums.get(key, (0.0, 0.0))
        self._sums[key] = kept * seconds, kept * tokens

    def token_s(self, num_sequences: int) -> tuple[float, float]:
        """Of one token, without drafts and with. Never less than nothing: what passes take is known better."""
        size = size_of_batch(num_sequences)
        seconds, tokens = self._sums.get((size, False), (0.0, 0.0))
        plain_s = max(seconds / max(tokens, 1.0), 0.0)
        seconds, tokens = self._sums.get((size, True), (0.0, 0.0))
        num_supposed = NUM_SUPPOSED * num_sequences
        return plain_s, max((seconds + num_supposed * plain_s) / (tokens + num_supposed), 0.0)
