"""The acceptance rule: which drafted tokens stand and which token follows them, without changing the distribution.

Two exact rules (section by section of the literature: arXiv 2211.17192, 2302.01318 for the ratio test):

- **match**: draw the target's own token and accept the drafted one if they are equal. For a token that was chosen
  rather than drawn (greedy draft, prompt lookup) this is the point-mass rule: accepted with probability p(x), and what
  is emitted otherwise has the law of p without x. For seeded requests target and draft share their noise, which makes
  equality likely. At temperature 0 it is equality with the argmax.
- **ratio**: for a token drawn from q, accept with probability min(1, p(x) / q(x)), otherwise emit from (p - q)+.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from dsde.core.consultant import Consultant
from dsde.core.rng import Purpose
from dsde.core.sequence import Sequence
from dsde.drafting import DraftStep, Proposals
from dsde.sampling import Distributions, Rows, Sampler, distributions
from dsde.sampling.sampler import invert, keyed_uniforms
from dsde.verification.divergence import kl_divergence, point_mass_divergence
from dsde.verification.leniency import consult
from dsde.verification.synthetic import SyntheticRates, rates_of

IntArray = NDArray[np.int64]


@dataclass(slots=True)
class Verdict:
    """What verification found, sequence by sequence, on the host."""

    accepted: IntArray
    """[sequences] drafted tokens that stood"""
    emitted: list[list[int]]
    """the accepted tokens and the one that follows them"""
    klds: NDArray[np.float64]
    """[sum(drafted)] sequence after sequence; empty unless asked for"""
    entropies: NDArray[np.float64] | None = None
    """[sum(drafted)] of the draft at temperature 1; None: nobody measured them"""


def verify(
    logits: torch.Tensor,
    sequences: list[Sequence],
    proposals: Proposals,
    sampler: Sampler,
    want_klds: bool,
    synthetic_acceptance: SyntheticRates | None = None,
    leniency: tuple[Consultant, NDArray[np.bool_]] | None = None,
) -> Verdict:
    """Judge proposals. `logits` holds 1 + lengths[i] rows for sequence i: one per drafted token and one beyond.

    With a synthetic acceptance, for benchmarks, a coin decides what stands. Leniency is a rule that is not lossless and
    the sequences it is for.
    """
    lengths = proposals.lengths
    starts = np.concatenate(([0], np.cumsum(lengths + 1)[:-1]))
    owners = np.repeat(np.arange(len(sequences)), lengths + 1)
    rows = Rows(sequences, owners, np.arange(len(logits)) - starts[owners], proposals.tokens)
    dist = distributions(logits, rows)

    by_ratio = np.array([proposals.sampled and _uses_ratio(s) for s in sequences], dtype=bool)
    if leniency is not None:
        by_ratio &= ~leniency[1]
    own = _target_tokens(dist, rows, by_ratio, sampler)
    accepts = _matches(own, proposals, starts)
    probs = _ProbRows(dist, len(logits))
    if by_ratio.any():
        _test_ratios(accepts, probs, sequences, proposals, starts, by_ratio)
    if leniency is not None:
        rule, chosen = leniency
        stands = torch.from_numpy(consult(logits, sequences, proposals, starts, chosen, rule)).to(accepts.device)
        accepts = torch.where(torch.from_numpy(chosen).to(accepts.device).unsqueeze(1), stands, accepts)
    if synthetic_acceptance is not None:
        accepts = _toss(sequences, proposals, synthetic_acceptance)
    accepted = accepts.cumprod(1).sum(1)
    following = own[torch.from_numpy(starts).to(own.device) + accepted]

    counts = accepted.cpu().numpy()
    tokens = following.cpu().numpy().copy()
    if by_ratio.any():
        ratio_rows = np.flatnonzero(by_ratio)
        tokens[ratio_rows] = _emit_residual(probs, sequences, proposals, starts, counts, ratio_rows)
    drafted = proposals.tokens.cpu().tolist()
    emitted = [[*drafted[i][:n], int(t)] for i, (n, t) in enumerate(zip(counts, tokens, strict=True))]
    klds = _divergences(logits, proposals, starts) if want_klds else np.empty(0)
    return Verdict(counts, emitted, klds)


def _uses_ratio(sequence: Sequence) -> bool:
    return not sequence.params.greedy and not sequence.coupled


def _toss(sequences: list[Sequence], proposals: Proposals, rates: SyntheticRates) -> torch.Tensor:
    """[sequences, K] whether a token stands by chance alone."""
    num_seqs, longest = proposals.tokens.shape
    owners, depths = np.divmod(np.arange(num_seqs * longest), max(longest, 1))
    u = keyed_uniforms(sequences, owners, depths, Purpose.ACCEPT).view(num_seqs, longest)
    chances = torch.from_numpy(rates_of(sequences, rates, longest)).to(u.dtype)
    valid = np.arange(longest) < proposals.lengths[:, None]
    return ((u < chances) & torch.from_numpy(valid)).to(proposals.tokens.device)


class _ProbRows:
    """Finds the probabilities of a row of logits among the rows that have any."""

    def __init__(self, dist: Distributions, num_rows: int) -> None:
        self.probs = dist.probs
        self.place = np.full(num_rows, -1, dtype=np.int64)
        self.place[dist.sampled] = np.arange(len(dist.sampled))

    def at(self, rows: IntArray) -> torch.Tensor:
        """[rows, vocab] probabilities"""
        return self.probs[torch.from_numpy(self.place[rows]).to(self.probs.device)]

    def of(self, rows: IntArray, tokens: torch.Tensor) -> torch.Tensor:
        """[rows] probability of one token each"""
        return self.probs[torch.from_numpy(self.place[rows]).to(self.probs.device), tokens]


def _target_tokens(dist: Distributions, rows: Rows, by_ratio: NDArray[np.bool_], sampler: Sampler) -> torch.Tensor:
    """[rows] the token the target itself would emit; left undrawn for sequences under the ratio rule."""
    if not by_ratio.any():
        return sampler.draw(dist, rows, Purpose.EMIT)
    keep = np.flatnonzero(~by_ratio[rows.owners[dist.sampled]])
    if len(keep) == 0:
        return dist.tokens
    subset = Distributions(dist.tokens, dist.sampled[keep], dist.probs[torch.from_numpy(keep).to(dist.probs.device)])
    return sampler.draw(subset, rows, Purpose.EMIT)


def _matches(own: torch.Tensor, proposals: Proposals, starts: IntArray) -> torch.Tensor:
    """[sequences, K] whether the drafted token is the target's own."""
    depths = np.arange(proposals.tokens.shape[1])
    valid = depths < proposals.lengths[:, None]
    index = np.where(valid, starts[:, None] + depths, 0)
    device = own.device
    equal = own[torch.from_numpy(index).to(device)] == proposals.tokens
    return equal & torch.from_numpy(valid).to(device)


def _test_ratios(
    accepts: torch.Tensor,
    probs: _ProbRows,
    sequences: list[Sequence],
    proposals: Proposals,
    starts: IntArray,
    by_ratio: NDArray[np.bool_],
) -> None:
    """Overwrite the columns of sequences under the ratio rule with u * q(x) < p(x)."""
    for depth, step in enumerate(proposals.steps):
        owners = step.owners[by_ratio[step.owners]]
        if len(owners) == 0:
            continue
        tokens = proposals.tokens[owners, depth]
        p = probs.of(starts[owners] + depth, tokens)
        q = _draft_rows(step).of(_ranks(step, owners), tokens)
        u = keyed_uniforms(sequences, owners, np.full(len(owners), depth), Purpose.ACCEPT).to(p.device)
        accepts[owners, depth] = u * q < p


def _draft_rows(step: DraftStep) -> _ProbRows:
    return _ProbRows(step.dist, len(step.owners))


def _ranks(step: DraftStep, owners: IntArray) -> IntArray:
    """Rows of a draft step that belong to these sequences, all of which took part in it."""
    order = np.argsort(step.owners)
    return order[np.searchsorted(step.owners, owners, sorter=order)]


def _emit_residual(
    probs: _ProbRows,
    sequences: list[Sequence],
    proposals: Proposals,
    starts: IntArray,
    counts: IntArray,
    chosen: IntArray,
) -> NDArray[np.int64]:
    """The token after the accepted ones: from p where everything stood, from (p - q)+ where something fell."""
    weights = probs.at(starts[chosen] + counts[chosen])
    for depth, step in enumerate(proposals.steps):
        rows = np.flatnonzero((counts[chosen] == depth) & (proposals.lengths[chosen] > depth))
        if len(rows) == 0:
            continue
        q = _draft_rows(step).at(_ranks(step, chosen[rows]))
        residual = (weights[rows] - q).clamp_(min=0.0)
        # Rounding can leave nothing of p - q where p and q are equal; p is then right by continuity.
        nothing_left = (residual.sum(-1, keepdim=True) == 0).float()
        weights[rows] = residual + nothing_left * weights[rows]
    u = keyed_uniforms(sequences, chosen, counts[chosen], Purpose.EMIT)
    return invert(weights, u).cpu().numpy()


def _divergences(logits: torch.Tensor, proposals: Proposals, starts: IntArray) -> NDArray[np.float64]:
    """KLD of every drafted position, also of those after the first rejection."""
    lengths = proposals.lengths
    grid = np.zeros((len(lengths), proposals.tokens.shape[1]))
    valid = np.arange(grid.shape[1]) < lengths[:, None]
    if proposals.sampled:
        for depth, step in enumerate(proposals.steps):
            rows = torch.from_numpy(starts[step.owners] + depth).to(logits.device)
            grid[step.owners, depth] = kl_divergence(logits, rows, step.logits).cpu().numpy()
    elif valid.any():
        index = (starts[:, None] + np.arange(grid.shape[1]))[valid]
        tokens = proposals.tokens[torch.from_numpy(valid).to(proposals.tokens.device)]
        grid[valid] = point_mass_divergence(logits[torch.from_numpy(index).to(logits.device)], tokens).cpu().numpy()
    return grid[valid]
