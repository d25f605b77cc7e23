"""What a drafter is asked for and what it answers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from dsde.core.sequence import Sequence
from dsde.core.stops import Stop
from dsde.sampling import Distributions

IntArray = NDArray[np.int64]


@dataclass(slots=True)
class DraftStep:
    """One step of an autoregressive draft: the sequences that were still drafting, and what their tokens came from."""

    owners: IntArray
    """indices into the proposed-for sequences"""
    logits: torch.Tensor
    """[owners, vocab] raw, for the KLD"""
    dist: Distributions
    """what the tokens were drawn from, for the acceptance test"""


@dataclass(slots=True)
class Proposals:
    """Drafted tokens of a batch. Without `steps` they are point masses: chosen, not drawn from a distribution."""

    tokens: torch.Tensor
    """[sequences, K] int64, row i valid up to lengths[i]"""
    lengths: IntArray
    steps: list[DraftStep] = field(default_factory=list)
    num_catch_up_tokens: IntArray | None = None
    """[sequences] tokens the draft had to read before its first own one, beyond the newest"""
    token_probs: NDArray[np.float64] | None = None
    """[sum(lengths)] what the draft gave each of its tokens, raw, sequence after sequence; None: nobody asked"""

    @property
    def sampled(self) -> bool:
        return bool(self.steps)

    @staticmethod
    def nothing(num_sequences: int, device: torch.device) -> Proposals:
        tokens = torch.empty((num_sequences, 0), dtype=torch.int64, device=device)
        return Proposals(tokens, np.zeros(num_sequences, dtype=np.int64))

    def followed_by(self, num_sequences: int) -> Proposals:
        """The same, with sequences at the end for which nothing was drafted."""
        tokens = torch.nn.functional.pad(self.tokens, (0, 0, 0, num_sequences))
        return replace(self, tokens=tokens, lengths=np.pad(self.lengths, (0, num_sequences)))


class Drafter(Protocol):
    """Proposes at most `lengths[i]` tokens to follow sequence i, whose KV blocks already have room for them."""

    kv_bytes_per_block: int
    """KV memory it needs for every block of the shared pool"""

    def allocate(self, num_blocks: int) -> None:
        """Make room for that many KV blocks."""

    def propose(
        self, sequences: list[Sequence], lengths: IntArray, stop: Stop | None = None, want_token_probs: bool = False
    ) -> Proposals:
        """`stop` may end a draft early; a drafter whose tokens have no distribution has nothing to look at."""
