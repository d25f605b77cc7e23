"""Draws tokens from distributions with random numbers that depend on the request alone.

Two ways of drawing. A request without a seed inverts the cumulative distribution with a fresh uniform for every step.
A request with a seed runs an exponential race whose noise belongs to the position (the Gumbel trick): target and draft
use the same noise at the same position, so the draft's token often equals the target's (arXiv 2408.07978), and the
target's token is a function of seed, position and target distribution alone, whoever drafted and however far.
"""

from __future__ import annotations

import numpy as np
import torch

from dsde.core.rng import Purpose, random_bits, uniforms
from dsde.core.sequence import Sequence
from dsde.device import backend
from dsde.sampling.distribution import Distributions, IntArray, Rows


class Sampler:
    """Draws for one engine. Holds a step's noise, which draft and target share, and nothing else."""

    def __init__(self) -> None:
        self._noise: dict[tuple[int, int], torch.Tensor] = {}

    def begin_step(self) -> None:
        self._noise.clear()

    def draw(self, dist: Distributions, rows: Rows, purpose: Purpose) -> torch.Tensor:
        """[rows] the token of every row: the greedy one, or one drawn."""
        if len(dist.sampled) == 0:
            return dist.tokens
        tokens = dist.tokens.clone()
        tokens[torch.from_numpy(dist.sampled).to(tokens.device)] = self.draw_sampled(dist, rows, purpose)
        return tokens

    def draw_sampled(self, dist: Distributions, rows: Rows, purpose: Purpose) -> torch.Tensor:
        """[len(dist.sampled)] one token for every row of probabilities."""
        owners = rows.owners[dist.sampled]
        depths = rows.depths[dist.sampled]
        drawn = torch.empty(len(owners), dtype=torch.int64, device=dist.probs.device)
        coupled = np.array([s.coupled for s in rows.sequences], dtype=bool)[owners]
        free = np.flatnonzero(~coupled)
        if len(free):
            u = keyed_uniforms(rows.sequences, owners[free], depths[free], purpose)
            drawn[torch.from_numpy(free).to(drawn.device)] = invert(_select(dist.probs, free), u)
        for row in np.flatnonzero(coupled):
            sequence = rows.sequences[owners[row]]
            noise = self._position_noise(sequence, int(depths[row]), dist.probs)
            drawn[row] = (dist.probs[row] / noise).argmax()
        return drawn

    def _position_noise(self, sequence: Sequence, depth: int, like: torch.Tensor) -> torch.Tensor:
        key = (sequence.stream, sequence.num_output_tokens + depth)
        noise = self._noise.get(key)
        if noise is None:
            # A device has its own noise, and a request must meet the same whichever way a step goes there.
            make = device_exponentials if backend.has_kernels(like.device) else exponentials
            noise = self._noise[key] = make(*key, like.shape[-1], like.device)
        return noise


def keyed_uniforms(sequences: list[Sequence], owners: IntArray, depths: IntArray, purpose: Purpose) -> torch.Tensor:
    """One uniform per row. Keyed by the sequence's step: a position that is drafted again gets fresh numbers, since
    the length chosen meanwhile may depend on what the old ones led to."""
    streams = np.array([s.stream for s in sequences], dtype=np.uint64)[owners]
    steps = np.array([s.num_steps for s in sequences], dtype=np.int64)[owners]
    return torch.from_numpy(uniforms(streams, steps, depths, purpose))


def exponentials(stream: int, position: int, size: int, device: torch.device | None = None) -> torch.Tensor:
    """`size` standard exponentials for one position of one stream, all positive and finite."""
    words = torch.from_numpy(random_bits(stream, position, size).astype(np.float32))
    # -log(1 - u): the race is decided by the smallest values, and those come out finest this way round.
    return words.mul_(-(2.0**-32)).log1p_().neg_().clamp_(min=2.0**-33, max=32.0).to(device or "cpu")


def device_exponentials(stream: int, position: int, size: int, device: torch.device) -> torch.Tensor:
    """The noise that kernels use for the same position."""
    from dsde.sampling import kernels

    words = np.array([[stream]], dtype=np.uint64).view(np.int32)
    counters, purposes = torch.tensor([[position], [0]], dtype=torch.int32, device=device)
    return kernels.exponentials(torch.from_numpy(words).to(device), counters, purposes, size)[0]


_PIECE = 256


def invert(weights: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Draw from each row of non-negative weights (any positive sum) by inverting its cumulative sum at u.

    In two levels, first which piece of the row, then where in it: running sums over a vocabulary are slow.
    """
    padding = -weights.shape[-1] % _PIECE
    padded = torch.nn.functional.pad(weights, (0, padding)) if padding else weights
    pieces = padded.view(len(weights), -1, _PIECE)
    sums = pieces.sum(-1, dtype=torch.float64).cumsum(-1)
    goal = u.to(weights.device) * sums[:, -1]
    piece = _first_above(sums, goal)
    before = torch.nn.functional.pad(sums, (1, 0)).gather(-1, piece.unsqueeze(-1)).squeeze(-1)
    rows = torch.arange(len(weights), device=weights.device)
    within = pieces[rows, piece].cumsum(-1, dtype=torch.float64)
    drawn = piece * _PIECE + _first_above(within, goal - before)
    return drawn.clamp_(max=weights.shape[-1] - 1)  # only weights that are no numbers lead into the padding


def _first_above(cumulative: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
    """The first place of each row whose running sum exceeds the goal: never one of weight 0, however sums round."""
    below_all = torch.nextafter(cumulative[:, -1], torch.zeros_like(goal))
    goal = torch.minimum(goal, below_all).clamp_(min=0.0).unsqueeze(-1)
    return torch.searchsorted(cumulative, goal, right=True).squeeze(-1).clamp_(max=cumulative.shape[-1] - 1)


def _select(probs: torch.Tensor, index: IntArray) -> torch.Tensor:
    return probs if len(index) == len(probs) else probs[torch.from_numpy(index).to(probs.device)]
