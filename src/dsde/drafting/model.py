"""A small causal model as drafter: ragged, one token a step, each sequence as far as it was asked.

Sequences are ordered by length, longest first, so that those still drafting are always a prefix of the batch. The
draft's KV never has holes: before its first own token the draft reads whatever the sequence gained since it last
drafted, be it one token, the bonus token besides, a whole pause or the prompt.
"""

from __future__ import annotations

import numpy as np
import torch

from dsde.core.rng import Purpose
from dsde.core.sequence import Sequence
from dsde.drafting.proposals import DraftStep, IntArray, Proposals
from dsde.models.batch import BLOCK_SIZE, KVCache, pack
from dsde.models.decoder import Decoder
from dsde.sampling import Rows, Sampler, distributions


class ModelDrafter:
    """Drafts with a model that shares the target's tokenizer, and with the target's sampling parameters."""

    def __init__(self, model: Decoder, sampler: Sampler, vocab_size: int, max_num_batched_tokens: int) -> None:
        self.model = model
        self.sampler = sampler
        self.vocab_size = vocab_size
        self.max_num_batched_tokens = max_num_batched_tokens
        self.kv_bytes_per_block = model.config.kv_bytes_per_token(model.dtype) * BLOCK_SIZE
        self.cache: KVCache

    def allocate(self, num_blocks: int) -> None:
        self.cache = self.model.new_cache(num_blocks)

    def propose(self, sequences: list[Sequence], lengths: IntArray) -> Proposals:
        longest = int(lengths.max(initial=0))
        if longest == 0:
            return Proposals.nothing(len(sequences), self.model.device)
        order = np.argsort(-lengths, kind="stable")[: int((lengths > 0).sum())]
        num_catch_up = np.zeros(len(sequences), dtype=np.int64)
        num_catch_up[order] = [sequences[i].num_tokens - 1 - sequences[i].num_draft_computed for i in order]
        self._read_backlog([sequences[i] for i in order])

        tokens = torch.zeros((len(sequences), longest), dtype=torch.int64, device=self.model.device)
        steps: list[DraftStep] = []
        for depth in range(longest):
            owners = order[: int((lengths > depth).sum())]
            active = [sequences[i] for i in owners]
            fed = [s.tokens[s.num_draft_computed :] for s in active] if depth == 0 else None
            newest = tokens[owners, depth - 1].cpu().numpy() if depth else None
            logits = self._forward(active, depth, fed, newest)
            rows = Rows(
                active,
                np.arange(len(active)),
                np.full(len(active), depth, dtype=np.int64),
                tokens[owners, :depth],
            )
            dist = distributions(logits, rows)
            tokens[owners, depth] = self.sampler.draw(dist, rows, Purpose.DRAFT)
            steps.append(DraftStep(owners, logits, dist))
        for i in order:
            sequences[i].num_draft_computed = sequences[i].num_tokens + int(lengths[i]) - 1
        return Proposals(tokens, lengths.copy(), steps, num_catch_up)

    def _forward(
        self,
        active: list[Sequence],
        depth: int,
        fed: list[list[int]] | None,
        newest: IntArray | None,
    ) -> torch.Tensor:
        """Logits for the next token of every active sequence, `depth` tokens into its draft."""
        if fed is not None:
            tokens = np.concatenate([np.asarray(part, dtype=np.int64) for part in fed])
            query_lens = np.array([len(part) for part in fed], dtype=np.int64)
        else:
            assert newest is not None
            tokens, query_lens = newest, np.ones(len(active), dtype=np.int64)
        context_lens = np.array([s.num_tokens for s in active], dtype=np.int64) + depth
        tables = [s.block_table for s in active]
        batch = pack(tokens, query_lens, context_lens, tables, np.cumsum(query_lens) - 1, self.model.device)
        return _fit(self.model.forward(batch, self.cache), self.vocab_size)

    def _read_backlog(self, sequences: list[Sequence]) -> None:
        """Read most of what is missing in passes of bounded size, leaving for the first draft step what fits in one."""
        while sum(s.num_tokens - s.num_draft_computed for s in sequences) > self.max_num_batched_tokens:
            room = self.max_num_batched_tokens
            chunks: list[tuple[Sequence, int]] = []
            for s in sequences:
                chunk = min(s.num_tokens - 1 - s.num_draft_computed, room)
                if chunk > 0:
                    chunks.append((s, chunk))
                    room -= chunk
            if not chunks:
                return
            query_lens = np.array([chunk for _, chunk in chunks], dtype=np.int64)
            starts = np.array([s.num_draft_computed for s, _ in chunks], dtype=np.int64)
            tokens = np.concatenate([s.tokens[s.num_draft_computed :][:chunk] for s, chunk in chunks])
            tables = [s.block_table for s, _ in chunks]
            none = np.empty(0, dtype=np.int64)
            self.model.forward(
                pack(tokens, query_lens, starts + query_lens, tables, none, self.model.device), self.cache
            )
            for s, chunk in chunks:
                s.num_draft_computed += chunk


def _fit(logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Models of one family pad the same vocabulary differently; tokens that one side lacks are never proposed."""
    if logits.shape[-1] >= vocab_size:
        return logits[:, :vocab_size]
    return torch.nn.functional.pad(logits, (0, vocab_size - logits.shape[-1]), value=-torch.inf)
