"""What requests of a simulation are: at every position of their output, whether the draft would have agreed.

Agreement belongs to the position and not to the step, so that every policy meets the same requests. The position after
the first disagreement is drafted afresh in the next step, as the same position of the same text: what a draft says
beyond its own mistake is taken to be what it would have said without it. Knows nothing of policies, costs and time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from dsde.core.errors import InvalidInput
from dsde.core.stops import SIGNALS, Signal
from dsde.policies.base import BoolArray, FloatArray, IntArray

MOST_POSITIONS = 20_000_000
"""about half a gigabyte"""


@dataclass
class Requests:
    """Arrays over [request, position]; positions beyond `num_tokens` of a request are never read."""

    num_tokens: IntArray
    """[request] what it emits before it ends"""
    num_prompt_tokens: IntArray
    agreed: BoolArray
    """whether the draft's token stands, if everything before it did"""
    klds: FloatArray
    entropies: FloatArray | None
    """of the draft, in nats; None where they were not recorded"""
    temperature: float
    top_probs: FloatArray | None = None
    """of the draft; None: taken to follow from the entropy, as do margins"""
    margins: FloatArray | None = None
    rates: FloatArray | None = None
    """probability of agreement that `agreed` was drawn with, of one column where it is constant; None: not drawn"""

    @property
    def size(self) -> int:
        return int(self.num_tokens.size)

    @cached_property
    def runs(self) -> IntArray:
        """How many positions from this one on agree without a break."""
        places = np.arange(self.agreed.shape[1])
        breaks = np.where(self.agreed, places.size, places)
        return np.minimum.accumulate(breaks[:, ::-1], axis=1)[:, ::-1] - places

    @cached_property
    def draft_signals(self) -> FloatArray:
        """[request, position, 3] entropy, top probability and margin."""
        if self.entropies is None:
            raise InvalidInput("this policy needs the draft's entropy, and the recorded requests have no draft_entropy")
        top_probs = np.exp(-self.entropies) if self.top_probs is None else self.top_probs
        margins = np.maximum(2 * top_probs - 1, 0.0) if self.margins is None else self.margins
        return np.stack((self.entropies, top_probs, margins), axis=-1)

    @property
    def token_probs(self) -> FloatArray:
        """[request, position] what the draft gives the token it drafts: the likeliest, as at temperature 0."""
        if self.top_probs is not None:
            return self.top_probs
        probs: FloatArray = self.draft_signals[..., SIGNALS.index(Signal.TOP_PROB)]
        return probs


class Stream(Protocol):
    """Where requests come from."""

    def draw(self, num_requests: int, num_tokens: int, seed: int) -> Requests:
        """Requests of at most `num_tokens` tokens each; the same for the same arguments."""


def check_size(num_requests: int, num_tokens: int) -> None:
    if num_requests < 1 or num_tokens < 1:
        raise InvalidInput(f"requests and tokens must be at least 1, not {num_requests} and {num_tokens}")
    num_positions = num_requests * num_tokens
    if num_positions > MOST_POSITIONS:
        raise InvalidInput(f"requests times tokens must be at most {MOST_POSITIONS:,}, not {num_positions:,}")
