"""A small causal model as drafter: ragged, one token a step, each sequence as far as it was asked.

Sequences are ordered by length, longest first, so that those still drafting are always a prefix of the batch. The
draft's KV never has holes: before its first own token the draft reads whatever the sequence gained since it last
drafted, be it one token, the bonus token besides, a whole pause or the prompt; while that is more than one pass may
read, it reads a part of it in every step and does not draft yet.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from dsde.core.rng import Purpose
from dsde.core.sequence import Sequence
from dsde.core.stops import Stop
from dsde.drafting.proposals import DraftStep, IntArray, Proposals
from dsde.drafting.watch import Watch
from dsde.models.batch import BLOCK_SIZE, KVCache, pack
from dsde.models.decoder import Decoder
from dsde.sampling import Rows, Sampler, distributions


@dataclass(slots=True)
class DraftShare:
    """What each sequence gets of a draft step's work."""

    lengths: IntArray
    """[sequences] tokens to draft"""
    chunks: IntArray
    """[sequences] tokens to read first"""
    order: IntArray
    """the sequences that take part, those that draft farthest first"""

    @staticmethod
    def nothing(num_sequences: int) -> DraftShare:
        zeros = np.zeros(num_sequences, np.int64)
        return DraftShare(zeros, zeros, zeros[:0])

    @property
    def num_catch_up_tokens(self) -> IntArray:
        """tokens read beyond the newest, without which nothing can be drafted anyway"""
        counts: IntArray = self.chunks - (self.lengths > 0)
        return counts


class ModelDrafter:
    """Drafts with a model that shares the target's tokenizer, and with the target's sampling parameters."""

    def __init__(self, model: Decoder, sampler: Sampler, vocab_size: int, max_num_batched_tokens: int) -> None:
        self.model = model
        self.sampler = sampler
        self.vocab_size = vocab_size
        self.max_num_batched_tokens = max_num_batched_tokens
        self.kv_bytes_per_block = model.config.kv_bytes_per_token(model.dtype) * BLOCK_SIZE
        self.longest_text = model.config.max_position_embeddings
        self._proposable = model.head_tokens
        """tokens; None: all of them"""
        if model.head_tokens is not None:
            self._proposable = model.head_tokens[model.head_tokens < vocab_size]
        self.cache: KVCache

    def allocate(self, num_blocks: int) -> None:
        self.cache = self.model.new_cache(num_blocks)

    def propose(
        self,
        sequences: list[Sequence],
        lengths: IntArray,
        stop: Stop | None = None,
        want_token_probs: bool = False,
        want_signals: bool = False,
    ) -> Proposals:
        share = self.share(sequences, lengths)
        if len(share.order) == 0:
            return Proposals.nothing(len(sequences), self.model.device)
        lengths, order = share.lengths.copy(), share.order
        tokens = torch.zeros((len(sequences), int(lengths.max())), dtype=torch.int64, device=self.model.device)
        watch = Watch(stop, len(sequences), tokens.shape[1], want_token_probs, want_signals, self._proposable)
        steps: list[DraftStep] = []
        logits = self._read(sequences, order, share.chunks, int((lengths > 0).sum()))
        num_passes = 1
        for depth in range(tokens.shape[1]):
            owners = order[lengths[order] > depth]
            if len(owners) == 0:
                break
            if depth > 0:
                newest = tokens[owners, depth - 1].cpu().numpy()
                logits = self._extend([sequences[i] for i in owners], newest, depth)
                num_passes += 1
            kept = watch.keeps(depth, owners, logits)
            if not kept.all():
                lengths[owners[~kept]] = depth
                owners, logits = owners[kept], logits[torch.from_numpy(kept).to(logits.device)]
                if len(owners) == 0:
                    break
            active = [sequences[i] for i in owners]
            rows = Rows(active, np.arange(len(active)), np.full(len(active), depth), tokens[owners, :depth])
            dist = distributions(logits, rows)
            drawn = self.sampler.draw(dist, rows, Purpose.DRAFT)
            tokens[owners, depth] = drawn
            steps.append(DraftStep(owners, logits, dist))
            goes_on = watch.goes_on(depth, owners, logits, drawn, lengths[owners] > depth + 1)
            lengths[owners[~goes_on]] = depth + 1
        done = replace(share, lengths=lengths)
        self.settle(sequences, done)
        longest = int(lengths.max())
        # The one token that a draft accepted whole leaves is read in passing.
        num_catch_up_tokens = np.where((share.lengths > 0) & (share.chunks == 2), 0, share.num_catch_up_tokens)
        return Proposals(
            tokens[:, :longest],
            lengths,
            steps,
            num_catch_up_tokens,
            num_passes,
            watch.signals[:, :longest] if want_signals else None,
            watch.token_probs[:, :longest] if want_token_probs else None,
        )

    def share(self, sequences: list[Sequence], lengths: IntArray) -> DraftShare:
        """Who reads how much and drafts how far in this step."""
        num_tokens = np.array([len(s.tokens) for s in sequences], dtype=np.int64)
        num_unread = num_tokens - np.array([s.num_draft_computed for s in sequences], dtype=np.int64)
        # No farther than the draft's own context.
        rooms = self.longest_text + 1 - num_tokens
        lengths = np.minimum(lengths, np.maximum(rooms, 0))
        chunks = self._share_budget(num_unread, lengths)
        lengths = np.where(chunks == num_unread, lengths, 0)
        reading = np.flatnonzero(chunks)
        # Longest first, so that those still drafting are a prefix; those that only read come last.
        order = reading[np.argsort(-lengths[reading], kind="stable")]
        return DraftShare(lengths, chunks, order)

    def settle(self, sequences: list[Sequence], share: DraftShare) -> None:
        """Note what the draft has read once a step is done."""
        gains = share.chunks + np.maximum(share.lengths - 1, 0)
        for i, gain in zip(share.order.tolist(), gains[share.order].tolist(), strict=True):
            sequences[i].num_draft_computed += gain

    def _share_budget(self, num_unread: IntArray, lengths: IntArray) -> IntArray:
        """How much each sequence reads now. A backlog larger than the budget is spread over steps, as prompts are."""
        wanted = np.where(lengths > 0, num_unread, 0)
        before = np.cumsum(wanted) - wanted
        chunks: IntArray = np.minimum(np.maximum(self.max_num_batched_tokens - before, 0), wanted)
        return chunks

    def _read(self, sequences: list[Sequence], order: IntArray, chunks: IntArray, num_drafting: int) -> torch.Tensor:
        """Read what is new; returns logits for the first `num_drafting` sequences in `order`."""
        active = [sequences[i] for i in order]
        parts = [s.tokens[s.num_draft_computed :][: chunks[i]] for s, i in zip(active, order, strict=True)]
        starts = np.array([s.num_draft_computed for s in active], dtype=np.int64)
        ends = np.cumsum(chunks[order])
        tokens = np.fromiter((token for part in parts for token in part), dtype=np.int64, count=int(ends[-1]))
        return self._forward(active, tokens, chunks[order], starts + chunks[order], ends[:num_drafting] - 1)

    def _extend(self, active: list[Sequence], newest: IntArray, depth: int) -> torch.Tensor:
        """Read one drafted token of every active sequence, `depth` tokens into its draft."""
        ones = np.ones(len(active), dtype=np.int64)
        contexts = np.array([s.num_tokens for s in active], dtype=np.int64) + depth
        return self._forward(active, newest, ones, contexts, np.arange(len(active)))

    def _forward(
        self,
        active: list[Sequence],
        tokens: IntArray,
        query_lens: IntArray,
        context_lens: IntArray,
        logit_rows: IntArray,
    ) -> torch.Tensor:
        # A target may know tokens that its draft does not; whatever is drafted after one of those, it stays lossless.
        known = np.minimum(tokens, self.model.config.vocab_size - 1)
        tables = [s.block_table for s in active]
        batch = pack(known, query_lens, context_lens, tables, logit_rows, self.model.device)
        return _fit(self.model.forward(batch, self.cache), self.vocab_size)


def _fit(logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Models of one family pad the same vocabulary differently; tokens that one side lacks are never proposed."""
    if logits.shape[-1] >= vocab_size:
        return logits[:, :vocab_size]
    return torch.nn.functional.pad(logits, (0, vocab_size - logits.shape[-1]), value=-torch.inf)
