"""Prompt lookup: proposes what followed the last time the newest tokens occurred.

No model, no memory, hardly any cost. Its tokens are point masses. Knows nothing of distributions.
"""

from __future__ import annotations

import sys

import numpy as np
import torch

from dsde.core.sequence import Sequence
from dsde.core.stops import Stop
from dsde.drafting.proposals import IntArray, Proposals
from dsde.drafting.signals import SURE


class NgramDrafter:
    """Matches the longest suffix of `longest` down to `shortest` tokens, and of several matches the latest."""

    kv_bytes_per_block = 0
    longest_text = sys.maxsize

    def __init__(self, longest: int = 4, shortest: int = 2, device: torch.device | None = None) -> None:
        self.longest = longest
        self.shortest = shortest
        self.device = device

    def allocate(self, num_blocks: int) -> None:
        pass

    def propose(
        self,
        sequences: list[Sequence],
        lengths: IntArray,
        stop: Stop | None = None,
        want_token_probs: bool = False,
        want_signals: bool = False,
    ) -> Proposals:
        found = [self._follow(s, int(k)) for s, k in zip(sequences, lengths, strict=True)]
        tokens = np.zeros((len(found), max(map(len, found), default=0)), dtype=np.int64)
        for row, continuation in zip(tokens, found, strict=True):
            row[: len(continuation)] = continuation
        counts = np.array([len(continuation) for continuation in found], dtype=np.int64)
        return Proposals(
            tokens=torch.from_numpy(tokens).to(self.device or "cpu"),
            lengths=counts,
            num_passes=tokens.shape[1],
            signals=np.tile(SURE, (*tokens.shape, 1)) if want_signals else None,
            token_probs=np.ones(tokens.shape) if want_token_probs else None,
        )

    def _follow(self, sequence: Sequence, count: int) -> list[int]:
        """Up to `count` tokens that followed the latest earlier occurrence of the longest matching suffix."""
        if count == 0:
            return []
        if sequence.draft_state is None:
            sequence.draft_state = _Occurrences(self.shortest, self.longest)
        start = sequence.draft_state.find(sequence.tokens)
        return [] if start is None else sequence.tokens[start : start + count]


class _Occurrences:
    """Where every run of tokens ended last, kept up to date with the tokens a sequence has for good."""

    def __init__(self, shortest: int, longest: int) -> None:
        self.ends: dict[int, dict[tuple[int, ...], int]] = {size: {} for size in range(longest, shortest - 1, -1)}
        self.num_indexed = 0

    def find(self, tokens: list[int]) -> int | None:
        """The place after the latest earlier occurrence of the longest known suffix."""
        for end in range(self.num_indexed + 1, len(tokens)):
            for size, ends in self.ends.items():
                if size <= end:
                    ends[tuple(tokens[end - size : end])] = end
        self.num_indexed = max(self.num_indexed, len(tokens) - 1)
        for size, ends in self.ends.items():
            place = ends.get(tuple(tokens[-size:])) if size < len(tokens) else None
            if place is not None:
                return place
        return None
