"""The distribution each row of logits stands for, once the request's sampling parameters are applied.

The same function serves target and draft. Raw logits are left untouched: the KLD is measured on them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from dsde.core.sequence import Sequence
from dsde.sampling.penalties import edit_row, is_edited
from dsde.sampling.truncation import truncate

IntArray = NDArray[np.int64]


@dataclass(slots=True)
class Rows:
    """Whose next token each row of logits decides."""

    sequences: list[Sequence]
    owners: IntArray
    """[rows] index into sequences"""
    depths: IntArray
    """[rows] drafted tokens that precede the row's token"""
    drafts: torch.Tensor
    """[sequences, K] drafted tokens; read only where a penalty needs them"""


@dataclass(slots=True)
class Distributions:
    """Greedy rows are a token, all others a row of probabilities."""

    tokens: torch.Tensor
    """[rows] int64; meaningless in sampled rows until somebody draws"""
    sampled: IntArray
    """rows at temperature > 0, ascending"""
    probs: torch.Tensor
    """[len(sampled), vocab] float32"""


def distributions(logits: torch.Tensor, rows: Rows) -> Distributions:
    """What each row's request samples from."""
    greedy = np.array([s.params.greedy for s in rows.sequences], dtype=bool)[rows.owners]
    edited = _edit(logits, rows)
    sampled = np.flatnonzero(~greedy)
    if len(sampled) == 0:
        return Distributions(argmax(edited), sampled, edited[:0])
    tokens = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    if len(sampled) < len(logits):
        index = torch.from_numpy(np.flatnonzero(greedy)).to(logits.device)
        tokens[index] = argmax(edited[index])
    return Distributions(tokens, sampled, _probabilities(edited, rows, sampled))


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """[rows] the likeliest token of each."""
    # On a CPU NumPy uses vector instructions for it where torch does not, which over a vocabulary is worth a lot.
    return torch.from_numpy(logits.numpy().argmax(-1)) if logits.device.type == "cpu" else logits.argmax(-1)


def _edit(logits: torch.Tensor, rows: Rows) -> torch.Tensor:
    flags = np.array([is_edited(s) for s in rows.sequences], dtype=bool)
    if not flags.any():
        return logits
    logits = logits.clone()
    drafts = rows.drafts.tolist()
    for row in np.flatnonzero(flags[rows.owners]):
        owner = rows.owners[row]
        edit_row(logits[row], rows.sequences[owner], drafts[owner][: rows.depths[row]])
    return logits


def _probabilities(logits: torch.Tensor, rows: Rows, sampled: IntArray) -> torch.Tensor:
    params = [rows.sequences[owner].params for owner in rows.owners[sampled]]
    device = logits.device
    chosen = logits if len(sampled) == len(logits) else logits[torch.from_numpy(sampled).to(device)]
    temperatures = torch.tensor([p.temperature for p in params], device=device).unsqueeze(-1)
    probs = torch.softmax(chosen / temperatures, -1)
    truncate(probs, [p.min_p for p in params], [p.top_k for p in params], [p.top_p for p in params])
    return probs
