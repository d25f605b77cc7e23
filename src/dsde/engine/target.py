"""The target's side of a step: one pass over every token to read, drafted ones included, without padding."""

from __future__ import annotations

import numpy as np
import torch

from dsde.core.sequence import Sequence
from dsde.drafting import Proposals
from dsde.engine.scheduler import Schedule
from dsde.models.batch import KVCache, PackedBatch, pack
from dsde.models.decoder import Decoder


class TargetRunner:
    def __init__(self, model: Decoder, num_blocks: int) -> None:
        self.model = model
        self.cache: KVCache = model.new_cache(num_blocks)

    def run(self, work: Schedule, proposals: Proposals, scored: set[Sequence]) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits to judge, and logits of prompts to score.

        Judged are, in this order, all 1 + length rows of every decoding sequence and the last row of every prompt that
        ends in this step. `scored` prompts bring a row for every token they read.
        """
        batch, num_judged = self._pack(work, proposals, scored)
        logits = self.model.forward(batch, self.cache)
        return logits[:num_judged], logits[num_judged:]

    def _pack(self, work: Schedule, proposals: Proposals, scored: set[Sequence]) -> tuple[PackedBatch, int]:
        sequences = [*work.decodes, *(s for s, _ in work.prefills)]
        drafts = proposals.tokens.tolist()
        parts = [[s.tokens[-1], *drafts[i][: proposals.lengths[i]]] for i, s in enumerate(work.decodes)] + [
            s.tokens[s.num_computed : s.num_computed + chunk] for s, chunk in work.prefills
        ]
        query_lens = np.array([len(part) for part in parts], dtype=np.int64)
        computed = np.array([s.num_computed for s in sequences], dtype=np.int64)
        ends = np.cumsum(query_lens)

        num_decode_rows = int(ends[len(work.decodes) - 1]) if work.decodes else 0
        rows = [np.arange(num_decode_rows)]
        for (s, chunk), end in zip(work.prefills, ends[len(work.decodes) :], strict=True):
            if chunk == s.num_pending:
                rows.append(np.array([end - 1]))
        num_judged = sum(map(len, rows))
        for (s, chunk), end in zip(work.prefills, ends[len(work.decodes) :], strict=True):
            if s in scored:
                rows.append(np.arange(end - chunk, end))
        batch = pack(
            np.fromiter((token for part in parts for token in part), dtype=np.int64, count=int(ends[-1])),
            query_lens,
            computed + query_lens,
            [s.block_table for s in sequences],
            np.concatenate(rows),
            self.model.device,
        )
        return batch, num_judged
