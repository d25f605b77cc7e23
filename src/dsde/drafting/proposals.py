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

    def only(self, kept: NDArray[np.bool_]) -> DraftStep:
        """The same for some of its sequences."""
        if kept.all():
            return self
        rows = torch.from_numpy(kept).to(self.logits.device)
        is_sampled = kept[self.dist.sampled]
        sampled = (np.cumsum(kept) - 1)[self.dist.sampled[is_sampled]]
        probs = self.dist.probs[torch.from_numpy(is_sampled).to(self.logits.device)]
        dist = Distributions(self.dist.tokens[rows], sampled, probs)
        return DraftStep(self.owners[kept], self.logits[rows], dist)


@dataclass(slots=True)
class Proposals:
    """Drafted tokens of a batch. Without `steps` they are point masses: chosen, not drawn from a distribution."""

    tokens: torch.Tensor
    """[sequences, K] int64, row i valid up to lengths[i]"""
    lengths: IntArray
    steps: list[DraftStep] = field(default_factory=list)
    num_catch_up_tokens: IntArray | None = None
    """[sequences] tokens the draft had missed, and read before its first own one"""
    num_passes: int = 0
    """steps that the draft took, one whose tokens were all dropped included"""
    signals: NDArray[np.float64] | None = None
    """[sequences, K, 3] entropy, top probability and margin; None: nobody asked"""
    token_probs: NDArray[np.float64] | None = None
    """[sequences, K] what the draft gave each of its tokens, raw; None: nobody asked"""

    @property
    def sampled(self) -> bool:
        return bool(self.steps)

    @staticmethod
    def nothing(num_sequences: int, device: torch.device) -> Proposals:
        tokens = torch.empty((num_sequences, 0), dtype=torch.int64, device=device)
        return Proposals(tokens, np.zeros(num_sequences, dtype=np.int64))

    def cut(self, lengths: IntArray) -> Proposals:
        """The beginnings of the drafts, so much of each; what is cut off was never proposed."""
        steps = [step.only(lengths[step.owners] > depth) for depth, step in enumerate(self.steps)]
        longest = int(lengths.max(initial=0))
        return replace(
            self,
            lengths=lengths,
            tokens=self.tokens[:, :longest],
            steps=[step for step in steps if len(step.owners)],
            signals=None if self.signals is None else self.signals[:, :longest],
            token_probs=None if self.token_probs is None else self.token_probs[:, :longest],
        )

    def drafted_only(self, values: NDArray[np.float64] | None) -> NDArray[np.float64] | None:
        """[sum(lengths), ...] of signals or token_probs, sequence after sequence."""
        return None if values is None else values[np.arange(values.shape[1]) < self.lengths[: len(values), None]]

    def followed_by(self, num_sequences: int) -> Proposals:
        """The same, with sequences at the end for which nothing was drafted."""
        tokens = torch.nn.functional.pad(self.tokens, (0, 0, 0, num_sequences))
        return replace(self, tokens=tokens, lengths=np.pad(self.lengths, (0, num_sequences)))


class Drafter(Protocol):
    """Proposes at most `lengths[i]` tokens to follow sequence i, whose KV blocks already have room for them."""

    kv_bytes_per_block: int
    """KV memory it needs for every block of the shared pool"""
    longest_text: int
    """tokens behind which it can still propose one, at most"""

    def allocate(self, num_blocks: int) -> None:
        """Make room for that many KV blocks."""

    def propose(
        self,
        sequences: list[Sequence],
        lengths: IntArray,
        stop: Stop | None = None,
        want_token_probs: bool = False,
        want_signals: bool = False,
    ) -> Proposals:
        """`stop` may end a draft early. A drafter whose tokens have no distribution has nothing to look at, and is sure
        of them."""
