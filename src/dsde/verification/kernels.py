"""Verification on the device: which drafted tokens stand, what follows them, and how far the draft was off.

Four kernels over the target's logits. The first goes through every row, cut into chunks: its sums, and the token that
wins it. The second decides, one program per sequence, from those sums alone. The third goes through the drafted rows
again, now that the sums are known: the KLD of each, and where the ratio rule rejected, a race over what p has more
than q. The fourth puts the chunks together. Parameters lie on the device and no grid depends on them, so that a
captured CUDA graph serves any batch of its size. Knows nothing of policies or scheduling;
`dsde.verification.acceptance` is the reference and explains the rules.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from dsde.device.launch import programmatic_launch
from dsde.device.staging import Layout
from dsde.sampling.kernels import (
    ACCEPT_NOISE,
    CHUNK,
    EMIT_NOISE,
    MATCH,
    NUM_PARTIALS,
    RATIO,
    SHARED_NOISE,
    DraftStore,
    Draws,
    chunk_entries,
    combine_chunks,
    exponential,
    first_of,
    load_entries,
    philox,
    scan_chunk,
    truncation_thresholds,
    winners,
)
from dsde.verification.divergence import LOG_FLOOR

_LOG_FLOOR = tl.constexpr(LOG_FLOOR)
_LANES = tl.constexpr(128)
_NUM_WARPS = 4
_NUM_FACTS = 3
"""What the third kernel is told of a row: log-sum-exp, the same of the kept tempered logits, whether it draws."""
_NUM_REVIEWS = 5
"""What it finds in a chunk: divergence, and for p - q and for p the winning weight and its place."""


@dataclass(slots=True)
class Judgement:
    """What is to be judged, on the device. A sequence has one row per drafted token and one beyond."""

    row_sequences: torch.Tensor
    """[rows] int32, -1: padding"""
    row_depths: torch.Tensor
    """[rows] int32, drafted tokens before the row's own"""
    row_drafts: torch.Tensor
    """[rows] int32, store row of the token drafted at this position; -1 for the row after the last one"""
    starts: torch.Tensor
    """[sequences] int32, first row of the sequence"""
    lengths: torch.Tensor
    """[sequences] int32, drafted tokens"""
    draws: Draws
    """of the sequences"""


@dataclass(slots=True)
class Findings:
    """What verification found: views of one buffer, so that a single copy brings all of it to the host."""

    buffer: torch.Tensor
    """int32"""
    accepted: torch.Tensor
    """[sequences] int32, drafted tokens that stood"""
    emitted: torch.Tensor
    """[sequences, max_length + 1] int32, the accepted tokens and the one that follows them, then -1"""
    klds: torch.Tensor
    """[sequences, max_length] float32, of every drafted position, also of those after the first rejection"""
    entropies: torch.Tensor
    """[sequences, max_length] float32, of the draft at temperature 1"""

    @classmethod
    def allocate(cls, num_sequences: int, max_length: int, device: torch.device | str) -> Findings:
        size = cls.num_words(num_sequences, max_length)
        return cls.within(torch.zeros(size, dtype=torch.int32, device=device), num_sequences, max_length)

    @staticmethod
    def num_words(num_sequences: int, max_length: int) -> int:
        return _layout(num_sequences, max_length).num_words

    @classmethod
    def within(cls, buffer: torch.Tensor, num_sequences: int, max_length: int) -> Findings:
        """The views of an existing buffer, say of a copy on the host."""
        parts = _layout(num_sequences, max_length).views(buffer)
        return cls(
            buffer,
            parts["accepted"],
            parts["emitted"].view(num_sequences, max_length + 1),
            parts["klds"].view(num_sequences, max_length),
            parts["entropies"].view(num_sequences, max_length),
        )


def _layout(num_sequences: int, max_length: int) -> Layout:
    widths = {"accepted": 1, "emitted": max_length + 1, "klds": max_length, "entropies": max_length}
    return Layout({name: num_sequences * width for name, width in widths.items()})


def judge(
    logits: torch.Tensor,
    judgement: Judgement,
    store: DraftStore | None,
    findings: Findings,
    sampled: bool,
    truncated: bool,
    point_mass: bool,
    synthetic_rates: torch.Tensor | None = None,
    *,
    chunk: int = CHUNK,
) -> None:
    """Judge drafted tokens by the target's `logits` [rows, vocab] and write what is found; padding is left as it was.

    Without a store nothing was drafted and every sequence just gets its next token. Without `sampled` all sequences
    are greedy, without `truncated` none has min_p, top_k or top_p. With `point_mass` drafted tokens were chosen
    without logits: the store's tokens count alone, and the rule is match. `synthetic_rates` [kinds, depths]
    float32 replaces the acceptance test, not its cost, by a coin per depth (`synthetic.py`).
    """
    num_rows, vocab = logits.shape
    num_sequences, max_length = findings.klds.shape
    has_drafts = store is not None and max_length > 0
    if store is not None and not point_mass and store.logits.shape[1] != vocab:
        raise ValueError(f"the store keeps {store.logits.shape[1]} logits per token, the target has {vocab}")
    device = logits.device
    draws = judgement.draws
    num_chunks = triton.cdiv(vocab, chunk)
    pdl = programmatic_launch()
    thresholds = truncation_thresholds(logits, draws, judgement.row_sequences) if truncated else draws.inv_temperatures
    partials = torch.empty((num_rows, NUM_PARTIALS, num_chunks), dtype=torch.float32, device=device)
    facts = torch.empty((num_rows, _NUM_FACTS), dtype=torch.float32, device=device)
    # Pointers that a kernel compiled for no drafts never follows.
    tokens = store.tokens if store is not None else judgement.lengths
    draft_logits = store.logits if store is not None and not point_mass else logits
    draft_stats = store.stats if store is not None else facts
    draft_thresholds = store.thresholds if store is not None else facts
    _scan_rows[(num_chunks, num_rows)](
        logits,
        logits.stride(0),
        vocab,
        judgement.row_sequences,
        judgement.row_depths,
        judgement.row_drafts,
        draws.seeds,
        draws.counters,
        draws.modes,
        draws.inv_temperatures,
        thresholds,
        partials,
        num_chunks,
        CHUNK=chunk,
        SAMPLED=sampled,
        TRUNCATED=truncated,
        POINT_MASS=point_mass,
        PDL=pdl,
        num_warps=_NUM_WARPS,
        launch_pdl=pdl,
    )
    tile = {
        "CHUNKS": triton.next_power_of_2(num_chunks),
        "ROWS": triton.next_power_of_2(max_length + 1),
        "SAMPLED": sampled,
        "PDL": pdl,
        "num_warps": _NUM_WARPS,
        "launch_pdl": pdl,
    }
    _decide[(num_sequences,)](
        logits,
        logits.stride(0),
        vocab,
        partials,
        num_chunks,
        judgement.row_drafts,
        judgement.starts,
        judgement.lengths,
        draws.seeds,
        draws.counters,
        draws.modes,
        draws.inv_temperatures,
        thresholds,
        tokens,
        draft_logits,
        draft_logits.stride(0),
        draft_stats,
        draws.inv_temperatures if synthetic_rates is None else synthetic_rates,
        *((1, 0) if synthetic_rates is None else synthetic_rates.shape),
        facts,
        findings.accepted,
        findings.emitted,
        findings.entropies,
        max_length,
        TRUNCATED=truncated,
        HAS_DRAFTS=has_drafts,
        POINT_MASS=point_mass,
        SYNTHETIC=synthetic_rates is not None,
        **tile,
    )
    if not has_drafts:
        return
    reviews = torch.empty((num_rows, _NUM_REVIEWS, num_chunks), dtype=torch.float32, device=device)
    _review_rows[(num_chunks, num_rows)](
        logits,
        logits.stride(0),
        vocab,
        judgement.row_sequences,
        judgement.row_depths,
        judgement.row_drafts,
        draws.seeds,
        draws.counters,
        draws.modes,
        draws.inv_temperatures,
        thresholds,
        draft_logits,
        draft_logits.stride(0),
        draft_stats,
        draft_thresholds,
        facts,
        reviews,
        num_chunks,
        CHUNK=chunk,
        SAMPLED=sampled and not point_mass,
        TRUNCATED=truncated,
        POINT_MASS=point_mass,
        PDL=pdl,
        num_warps=_NUM_WARPS,
        launch_pdl=pdl,
    )
    _conclude[(num_sequences,)](
        logits,
        logits.stride(0),
        vocab,
        reviews,
        num_chunks,
        judgement.row_drafts,
        judgement.starts,
        judgement.lengths,
        draws.modes,
        tokens,
        facts,
        findings.accepted,
        findings.emitted,
        findings.klds,
        max_length,
        POINT_MASS=point_mass,
        **tile,
    )


_SMALL = [
    "row_sequences",
    "row_depths",
    "row_drafts",
    "starts",
    "lengths",
    "seeds",
    "counters",
    "modes",
    "inv_temperatures",
    "thresholds",
    "tokens",
    "draft_stats",
    "draft_thresholds",
    "rates",
    "facts",
    "accepted",
    "emitted",
    "klds",
    "entropies",
]
"""Arguments of which a program reads a few elements: their alignment is no reason to compile again."""


@triton.jit(do_not_specialize_on_alignment=_SMALL)
def _scan_rows(
    logits: tl.tensor,
    stride: tl.tensor,
    vocab: tl.tensor,
    row_sequences: tl.tensor,
    row_depths: tl.tensor,
    row_drafts: tl.tensor,
    seeds: tl.tensor,
    counters: tl.tensor,
    modes: tl.tensor,
    inv_temperatures: tl.tensor,
    thresholds: tl.tensor,
    partials: tl.tensor,
    num_chunks: tl.tensor,
    CHUNK: tl.constexpr,
    SAMPLED: tl.constexpr,
    TRUNCATED: tl.constexpr,
    POINT_MASS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Sums and winner of every chunk of every row."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    chunk = tl.program_id(0)
    index = tl.program_id(1)
    sequence = tl.load(row_sequences + index)
    if sequence < 0:
        return
    mode = tl.load(modes + sequence)
    if mode < 0:
        return
    inv_temperature = 1.0
    low = 0
    high = 0
    counter = 0
    purpose = -1
    threshold = float("-inf")
    if SAMPLED:
        inv_temperature = tl.where(mode > 0, tl.load(inv_temperatures + sequence), 1.0)
        low = tl.load(seeds + 2 * sequence)
        high = tl.load(seeds + 2 * sequence + 1)
        counter = tl.load(counters + sequence) + tl.load(row_depths + index)
        # Under the ratio rule a drafted row is drawn from only where its token falls, and then not from p.
        draws_now = POINT_MASS | (tl.load(row_drafts + index) < 0)
        purpose = tl.where(mode == MATCH, SHARED_NOISE, tl.where((mode == RATIO) & draws_now, EMIT_NOISE, -1))
    if TRUNCATED:
        threshold = tl.load(thresholds + index)
    row = logits + index.to(tl.int64) * stride
    scan_chunk(
        row,
        vocab,
        row,
        vocab,
        chunk,
        low,
        high,
        counter,
        purpose,
        inv_temperature,
        threshold,
        partials + index * (6 * num_chunks),
        num_chunks,
        CHUNK,
        SAMPLED,
        TRUNCATED,
        False,
    )


@triton.jit(do_not_specialize=["max_length"], do_not_specialize_on_alignment=_SMALL)
def _decide(
    logits: tl.tensor,
    stride: tl.tensor,
    vocab: tl.tensor,
    partials: tl.tensor,
    num_chunks: tl.tensor,
    row_drafts: tl.tensor,
    starts: tl.tensor,
    lengths: tl.tensor,
    seeds: tl.tensor,
    counters: tl.tensor,
    modes: tl.tensor,
    inv_temperatures: tl.tensor,
    thresholds: tl.tensor,
    tokens: tl.tensor,
    draft_logits: tl.tensor,
    draft_stride: tl.tensor,
    draft_stats: tl.tensor,
    rates: tl.tensor,
    num_kinds: tl.tensor,
    num_rates: tl.tensor,
    facts: tl.tensor,
    accepted: tl.tensor,
    emitted: tl.tensor,
    entropies: tl.tensor,
    max_length: tl.tensor,
    CHUNKS: tl.constexpr,
    ROWS: tl.constexpr,
    SAMPLED: tl.constexpr,
    TRUNCATED: tl.constexpr,
    HAS_DRAFTS: tl.constexpr,
    POINT_MASS: tl.constexpr,
    SYNTHETIC: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Accept a sequence's drafted tokens in order and emit what is known already."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    sequence = tl.program_id(0)
    mode = tl.load(modes + sequence)
    if mode < 0:
        return
    inv_temperature = 1.0
    if SAMPLED:
        inv_temperature = tl.where(mode > 0, tl.load(inv_temperatures + sequence), 1.0)
    start = tl.load(starts + sequence)
    length = tl.load(lengths + sequence)
    depths = tl.arange(0, ROWS)
    rows = start + depths
    _, whole, drawn_from, _, own = combine_chunks(
        partials, rows, depths <= length, num_chunks, vocab, inv_temperature, CHUNKS, SAMPLED, False
    )
    num_accepted = 0
    emitted_tokens = own
    if HAS_DRAFTS:
        is_drafted = depths < length
        drafts = tl.load(row_drafts + rows, mask=is_drafted, other=0)
        drafted = tl.load(tokens + drafts, mask=is_drafted, other=0)
        stands = drafted == own
        if SYNTHETIC or (SAMPLED and not POINT_MASS):
            low = tl.load(seeds + 2 * sequence)
            high = tl.load(seeds + 2 * sequence + 1)
            counter = tl.load(counters + sequence) + depths
            word, _, _, _ = philox(low, high, tl.zeros_like(depths), counter, tl.full((), ACCEPT_NOISE, tl.int32))
            u = tl.minimum(word.to(tl.float32) * (2.0**-32), 1.0 - 2.0**-24)
            if SYNTHETIC:
                own_rates = rates + (low & 0x7FFFFFFF) % num_kinds * num_rates
                stands = u < tl.load(own_rates + depths, mask=is_drafted, other=0.0)
            else:
                by_ratio = is_drafted & (mode == RATIO)
                x = tl.load(logits + rows.to(tl.int64) * stride + drafted, mask=by_ratio, other=0.0).to(tl.float32)
                y = tl.load(draft_logits + drafts.to(tl.int64) * draft_stride + drafted, mask=by_ratio, other=0.0)
                draft_drawn_from = tl.load(draft_stats + 4 * drafts + 2, mask=by_ratio, other=0.0)
                p = tl.exp(tl.where(by_ratio, x * inv_temperature - drawn_from, 0.0))
                q = tl.exp(y.to(tl.float32) * inv_temperature - draft_drawn_from)
                if TRUNCATED:
                    p = tl.where(x >= tl.load(thresholds + rows, mask=by_ratio, other=0.0), p, 0.0)
                stands = tl.where(by_ratio, u * q < p, stands)
        num_accepted = tl.min(tl.where(stands & is_drafted, ROWS, tl.minimum(depths, length)))
        emitted_tokens = tl.where(depths < num_accepted, drafted, own)

        is_redrawn = tl.zeros_like(depths)
        if SAMPLED and not POINT_MASS:
            is_redrawn = ((mode == RATIO) & (depths == num_accepted) & is_drafted).to(tl.int32)
        tl.store(facts + 3 * rows, whole, mask=is_drafted)
        tl.store(facts + 3 * rows + 1, drawn_from, mask=is_drafted)
        tl.store(facts + 3 * rows + 2, is_redrawn.to(tl.float32), mask=is_drafted)
        entropy = tl.zeros_like(whole)
        if not POINT_MASS:
            entropy = tl.load(draft_stats + 4 * drafts + 3, mask=is_drafted, other=0.0)
        tl.store(entropies + sequence * max_length + depths, entropy, mask=depths < max_length)
    tl.store(accepted + sequence, num_accepted)
    out = emitted + sequence * (max_length + 1) + depths
    tl.store(out, tl.where(depths <= num_accepted, emitted_tokens, -1), mask=depths <= max_length)


@triton.jit(do_not_specialize_on_alignment=_SMALL)
def _review_rows(
    logits: tl.tensor,
    stride: tl.tensor,
    vocab: tl.tensor,
    row_sequences: tl.tensor,
    row_depths: tl.tensor,
    row_drafts: tl.tensor,
    seeds: tl.tensor,
    counters: tl.tensor,
    modes: tl.tensor,
    inv_temperatures: tl.tensor,
    thresholds: tl.tensor,
    draft_logits: tl.tensor,
    draft_stride: tl.tensor,
    draft_stats: tl.tensor,
    draft_thresholds: tl.tensor,
    facts: tl.tensor,
    reviews: tl.tensor,
    num_chunks: tl.tensor,
    CHUNK: tl.constexpr,
    SAMPLED: tl.constexpr,
    TRUNCATED: tl.constexpr,
    POINT_MASS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Every chunk's share of the divergence, and of the race for the token in place of a rejected one."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    chunk = tl.program_id(0)
    index = tl.program_id(1)
    sequence = tl.load(row_sequences + index)
    if sequence < 0:
        return
    draft = tl.load(row_drafts + index)
    if (tl.load(modes + sequence) < 0) | (draft < 0):
        return
    row = logits + index.to(tl.int64) * stride
    draft_row = draft_logits + draft.to(tl.int64) * draft_stride
    out = reviews + index * (5 * num_chunks) + chunk
    whole = tl.load(facts + 3 * index)
    draft_whole = 0.0
    if not POINT_MASS:
        draft_whole = tl.load(draft_stats + 4 * draft + 1)
    lanes, entries = chunk_entries(chunk, CHUNK)
    divergence = tl.zeros(entries.shape, tl.float32)
    for word in tl.static_range(4):
        at = entries + word * _LANES
        log_p = load_entries(row, at, vocab) - whole
        difference = tl.maximum(log_p, _LOG_FLOOR)
        if not POINT_MASS:
            difference -= tl.maximum(load_entries(draft_row, at, vocab) - draft_whole, _LOG_FLOOR)
        divergence += tl.exp(log_p) * difference
    tl.store(out, tl.sum(divergence))

    if SAMPLED and tl.load(facts + 3 * index + 2) > 0:
        inv_temperature = tl.load(inv_temperatures + sequence)
        drawn_from = tl.load(facts + 3 * index + 1)
        draft_drawn_from = tl.load(draft_stats + 4 * draft + 2)
        low = tl.load(seeds + 2 * sequence)
        high = tl.load(seeds + 2 * sequence + 1)
        counter = tl.load(counters + sequence) + tl.load(row_depths + index)
        words = philox(low, high, lanes, counter, tl.full((), EMIT_NOISE, tl.int32))
        best = tl.zeros(entries.shape, tl.float32)
        best_p = tl.zeros(entries.shape, tl.float32)
        places = entries
        places_p = entries
        for word in tl.static_range(4):
            at = entries + word * _LANES
            x = load_entries(row, at, vocab)
            y = load_entries(draft_row, at, vocab)
            p = tl.exp(x * inv_temperature - drawn_from)
            q = tl.exp(y * inv_temperature - draft_drawn_from)
            if TRUNCATED:
                p = tl.where(x >= tl.load(thresholds + index), p, 0.0)
                q = tl.where(y >= tl.load(draft_thresholds + draft), q, 0.0)
            rate = 1.0 / exponential(words[word])
            score = (p - q) * rate
            score_p = p * rate
            places = tl.where(score > best, at, places)
            places_p = tl.where(score_p > best_p, at, places_p)
            best = tl.maximum(best, score)
            best_p = tl.maximum(best_p, score_p)
        top = tl.max(best)
        top_p = tl.max(best_p)
        tl.store(out + num_chunks, top)
        tl.store(out + 2 * num_chunks, first_of(best, top, places).to(tl.float32, bitcast=True))
        tl.store(out + 3 * num_chunks, top_p)
        tl.store(out + 4 * num_chunks, first_of(best_p, top_p, places_p).to(tl.float32, bitcast=True))


@triton.jit(do_not_specialize=["max_length"], do_not_specialize_on_alignment=_SMALL)
def _conclude(
    logits: tl.tensor,
    stride: tl.tensor,
    vocab: tl.tensor,
    reviews: tl.tensor,
    num_chunks: tl.tensor,
    row_drafts: tl.tensor,
    starts: tl.tensor,
    lengths: tl.tensor,
    modes: tl.tensor,
    tokens: tl.tensor,
    facts: tl.tensor,
    accepted: tl.tensor,
    emitted: tl.tensor,
    klds: tl.tensor,
    max_length: tl.tensor,
    CHUNKS: tl.constexpr,
    ROWS: tl.constexpr,
    SAMPLED: tl.constexpr,
    POINT_MASS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Put the chunks of a sequence's rows together."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    sequence = tl.program_id(0)
    mode = tl.load(modes + sequence)
    if mode < 0:
        return
    start = tl.load(starts + sequence)
    length = tl.load(lengths + sequence)
    depths = tl.arange(0, ROWS)
    rows = start + depths
    is_drafted = depths < length
    chunks = tl.arange(0, CHUNKS)
    present = chunks < num_chunks
    at = reviews + rows[:, None] * (5 * num_chunks) + chunks[None, :]
    divergence = tl.sum(tl.load(at, mask=is_drafted[:, None] & present[None, :], other=0.0), axis=1)
    if POINT_MASS:
        drafts = tl.load(row_drafts + rows, mask=is_drafted, other=0)
        drafted = tl.load(tokens + drafts, mask=is_drafted, other=0)
        x = tl.load(logits + rows.to(tl.int64) * stride + drafted, mask=is_drafted, other=0.0).to(tl.float32)
        whole = tl.load(facts + 3 * rows, mask=is_drafted, other=0.0)
        divergence -= (1.0 - tl.exp(x - whole)) * _LOG_FLOOR
    divergence = tl.where(is_drafted, tl.maximum(divergence, 0.0), 0.0)
    tl.store(klds + sequence * max_length + depths, divergence, mask=depths < max_length)

    if SAMPLED and not POINT_MASS:
        num_accepted = tl.load(accepted + sequence)
        if (mode == RATIO) & (num_accepted < length):
            one = tl.arange(0, 1)
            race = reviews + (start + num_accepted) * (5 * num_chunks) + one[:, None] + chunks[None, :]
            mask = present[None, :]
            rest = tl.load(race + num_chunks, mask=mask, other=-1.0)
            rest_places = tl.load(race + 2 * num_chunks, mask=mask, other=0.0)
            scores = tl.load(race + 3 * num_chunks, mask=mask, other=-1.0)
            places = tl.load(race + 4 * num_chunks, mask=mask, other=0.0)
            # Rounding can leave nothing of p - q where p and q are equal; p is then right by continuity.
            something_left = tl.max(rest, axis=1) > 0
            token = tl.where(something_left, winners(rest, rest_places, vocab), winners(scores, places, vocab))
            tl.store(emitted + sequence * (max_length + 1) + num_accepted + one, token)
