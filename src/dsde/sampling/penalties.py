"""Changes to logits that depend on a request's own tokens: bias, minimum length, penalties.

At a drafted position the tokens drafted before it count as output, so every position sees what it would have seen
without speculation. Knows nothing of temperature or truncation.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from numpy.typing import NDArray

from dsde.core.sequence import Sequence


class TokenCounts:
    """How often each token occurred, kept up to date with the tokens a sequence has for good."""

    def __init__(self, sequence: Sequence, vocab_size: int) -> None:
        self.in_prompt = np.zeros(vocab_size, dtype=bool)
        self.in_prompt[sequence.tokens[: sequence.num_prompt_tokens]] = True
        self.in_output = np.zeros(vocab_size, dtype=np.int32)
        self.num_counted = sequence.num_prompt_tokens

    @staticmethod
    def of(sequence: Sequence, vocab_size: int) -> TokenCounts:
        counts: TokenCounts | None = sequence.penalty_state
        if counts is None:
            counts = sequence.penalty_state = TokenCounts(sequence, vocab_size)
        np.add.at(counts.in_output, sequence.tokens[counts.num_counted :], 1)
        counts.num_counted = sequence.num_tokens
        return counts


def is_edited(sequence: Sequence) -> bool:
    """Whether this sequence's logits are changed by anything but temperature and truncation."""
    params = sequence.params
    return bool(params.logit_bias) or params.has_penalties or sequence.num_output_tokens < params.min_tokens


def edit_row(logits: torch.Tensor, sequence: Sequence, drafted: Seq[int]) -> None:
    """Apply bias, minimum length and penalties to one row in place; `drafted` precedes the row's own token."""
    params = sequence.params
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=logits.device)
        logits[ids] += torch.tensor(list(params.logit_bias.values()), dtype=logits.dtype, device=logits.device)
    if sequence.num_output_tokens + len(drafted) < params.min_tokens:
        logits[list(sequence.stop_token_ids)] = -torch.inf
    if params.has_penalties:
        counts = TokenCounts.of(sequence, len(logits))
        in_output = counts.in_output
        if drafted:
            in_output = in_output.copy()
            np.add.at(in_output, list(drafted), 1)
        _penalise(logits, sequence, counts.in_prompt, in_output)


def _penalise(
    logits: torch.Tensor, sequence: Sequence, in_prompt: NDArray[np.bool_], in_output: NDArray[np.int32]
) -> None:
    params = sequence.params
    if params.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.flatnonzero(in_prompt | (in_output > 0))).to(logits.device)
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if params.frequency_penalty != 0.0 or params.presence_penalty != 0.0:
        written = np.flatnonzero(in_output)
        amounts = params.frequency_penalty * in_output[written] + params.presence_penalty
        ids = torch.from_numpy(written).to(logits.device)
        logits[ids] -= torch.from_numpy(amounts).to(logits.device, logits.dtype)
