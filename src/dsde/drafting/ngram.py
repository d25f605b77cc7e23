"""Prompt lookup: proposes what followed the last time the newest tokens occurred.

No model, no memory, hardly any cost. Its tokens are point masses. Knows nothing of distributions.
"""

from __future__ import annotations

import numpy as np
import torch

from dsde.core.sequence import Sequence
from dsde.drafting.proposals import IntArray, Proposals


class NgramDrafter:
    """Matches the longest suffix of `longest` down to `shortest` tokens, and of several matches the latest."""

    kv_bytes_per_block = 0

    def __init__(self, longest: int = 4, shortest: int = 2, device: torch.device | None = None) -> None:
        self.longest = longest
        self.shortest = shortest
        self.device = device

    def allocate(self, num_blocks: int) -> None:
        pass

    def propose(self, sequences: list[Sequence], lengths: IntArray) -> Proposals:
        found = [self._follow(s.tokens, int(k)) for s, k in zip(sequences, lengths, strict=True)]
        tokens = np.zeros((len(found), max(map(len, found), default=0)), dtype=np.int64)
        for row, continuation in zip(tokens, found, strict=True):
            row[: len(continuation)] = continuation
        return Proposals(
            tokens=torch.from_numpy(tokens).to(self.device or "cpu"),
            lengths=np.array([len(continuation) for continuation in found], dtype=np.int64),
        )

    def _follow(self, tokens: list[int], count: int) -> list[int]:
        """Up to `count` tokens that followed the latest earlier occurrence of the longest matching suffix."""
        if count == 0:
            return []
        text = np.asarray(tokens, dtype=np.int64)
        for size in range(min(self.longest, len(text) - 1), self.shortest - 1, -1):
            windows = np.lib.stride_tricks.sliding_window_view(text[:-1], size)
            matches = np.flatnonzero((windows == text[-size:]).all(axis=1))
            if len(matches):
                start = int(matches[-1]) + size
                return tokens[start : start + count]
        return []
