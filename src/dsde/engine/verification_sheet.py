"""What a verification pass on a device is told, and what it answers, as arrays. Knows nothing of when it is made."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from dsde.core.sequence import Sequence
from dsde.device.staging import Sheet
from dsde.drafting.draft_store import DeviceProposals
from dsde.engine.scheduler import Schedule
from dsde.models.passes import RaggedRows
from dsde.verification.kernels import Findings

IntArray = NDArray[np.int64]


@dataclass(slots=True)
class Answer:
    """Findings on the host."""

    buffer: torch.Tensor
    accepted: NDArray[np.int32]
    emitted: NDArray[np.int32]
    klds: NDArray[np.float32]
    entropies: NDArray[np.float32]

    @staticmethod
    def blank(num_sequences: int, max_length: int, pinned: bool) -> Answer:
        size = Findings.num_words(num_sequences, max_length)
        buffer = torch.zeros(size, dtype=torch.int32, pin_memory=pinned)
        views = Findings.within(buffer, num_sequences, max_length)
        return Answer(
            buffer, views.accepted.numpy(), views.emitted.numpy(), views.klds.numpy(), views.entropies.numpy()
        )


def write_tokens(
    host: dict[str, NDArray[np.int32]], work: Schedule, rows: RaggedRows, proposals: DeviceProposals
) -> None:
    num_decodes = len(work.decodes)
    host["tokens"][rows.starts[:num_decodes]] = [s.tokens[-1] for s in work.decodes]
    if proposals.rows.shape[1]:
        is_draft = (rows.offsets > 0) & (rows.owners < num_decodes)
        host["sources"][: rows.count][is_draft] = proposals.rows[proposals.rows >= 0]
    for (sequence, chunk), place in zip(work.prefills, rows.starts[num_decodes:].tolist(), strict=True):
        start = sequence.num_computed
        host["tokens"][place : place + chunk] = sequence.tokens[start : start + chunk]
        # The sheet's last use may have had drafts of the same lengths here.
        host["sources"][place : place + chunk] = -1


def write_judged(sheet: Sheet, rows: RaggedRows, proposals: DeviceProposals) -> None:
    host, count, num_judged = sheet.arrays, rows.count, len(rows.lengths)
    if sheet.is_new("judged", rows.lengths):
        host["row_sequences"][:count] = rows.owners
        host["row_sequences"][count:] = -1
        host["row_depths"][:count] = rows.offsets
        host["row_drafts"].fill(-1)
        host["judged_starts"][:num_judged] = rows.starts
        host["lengths"][:num_judged] = rows.lengths - 1
    if proposals.rows.shape[1]:
        # The token that a row judges; the last row of a sequence judges none.
        judges = rows.offsets < rows.lengths[rows.owners] - 1
        host["row_drafts"][:count][judges] = proposals.rows[proposals.rows >= 0]


def logit_places(work: Schedule, rows: RaggedRows, scored: set[Sequence]) -> IntArray:
    """Rows of the batch that need logits: those to judge, then those of prompts to score."""
    num_decodes = len(work.decodes)
    num_decode_rows = int(rows.starts[num_decodes]) if work.prefills else rows.count
    places = [np.arange(num_decode_rows)]
    prompts = []
    for (sequence, chunk), start in zip(work.prefills, rows.starts[num_decodes:].tolist(), strict=True):
        if chunk == sequence.num_pending:
            places.append(np.array([start + chunk - 1]))
        if sequence in scored:
            prompts.append(np.arange(start, start + chunk))
    return np.concatenate([*places, *prompts])
