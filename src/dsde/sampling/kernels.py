"""Drafted tokens on the device: drawn from logits, and kept with what their verification will need.

A row of logits is cut into chunks, one program each, and a second kernel puts a row's chunks together. A token is the
winner of an exponential race (the Gumbel trick) whose noise is a function of the request's key, the position and the
vocabulary entry alone: not of the batch, the row or the cut. Parameters of a batch lie on the device and no grid
depends on them, so that a captured CUDA graph serves any batch of its size. Knows nothing of acceptance or of models;
`dsde.sampling.distribution` and `dsde.sampling.truncation` are the reference.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from dsde.core.rng import Purpose
from dsde.device.launch import programmatic_launch
from dsde.sampling.draw_mode import DrawMode

CHUNK = 4096
"""Vocabulary entries per program: few enough that a handful of rows occupies a whole device."""
NUM_STATS = 4
"""Maximum, log-sum-exp at temperature 1, log-sum-exp of what the token was drawn from, entropy."""

DRAFT_NOISE = tl.constexpr(int(Purpose.DRAFT))
ACCEPT_NOISE = tl.constexpr(int(Purpose.ACCEPT))
EMIT_NOISE = tl.constexpr(int(Purpose.EMIT))
SHARED_NOISE = tl.constexpr(0)
"""Noise of a position rather than of a purpose: draft and target race with the same."""

RATIO = tl.constexpr(int(DrawMode.RATIO))
MATCH = tl.constexpr(int(DrawMode.MATCH))

NUM_SIGNALS = 4
"""Entropy, top probability and margin of the raw distribution, and the probability of the token drawn."""

NUM_PARTIALS = 6
"""What a program finds in its chunk: peak, mass, energy, kept mass, winning score and its place."""

_LANES = tl.constexpr(128)
"""Adjacent entries that share a word of their generator's output, so that a word's entries are read together."""
_BLOCK = tl.constexpr(512)
_NOWHERE = tl.constexpr(2**31 - 1)
_FAR = tl.constexpr(-1e4)
"""Stands for minus infinity in differences of logits: its exponential is 0 and products with it are numbers."""
_TINY = tl.constexpr(1e-37)
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

_NUM_WARPS = 4
_SEARCH_TILE = 4096
_SEARCH_WARPS = 16
_HEAD = 16384
"""Candidates per row that the search for a threshold copies out; where there are more, it reads the row itself."""
_REACH = tl.constexpr(14.0)
"""How far below the maximum, in tempered logits, top_k looks first: nearly always far enough for a small k."""


@dataclass(slots=True)
class Draws:
    """Sampling parameters on the device, one per row or sequence."""

    seeds: torch.Tensor
    """[n, 2] int32, low and high word of the key"""
    counters: torch.Tensor
    """[n] int32. A draw is keyed by counter + depth: under the ratio rule, steps whose ranges overlap share noise"""
    modes: torch.Tensor
    """[n] int32, see DrawMode"""
    inv_temperatures: torch.Tensor
    """[n] float32; not read for greedy rows"""
    top_ks: torch.Tensor
    """[n] int32, 0: off"""
    top_ps: torch.Tensor
    """[n] float32, 1: off"""
    min_ps: torch.Tensor
    """[n] float32, 0: off"""


@dataclass(slots=True)
class DraftStore:
    """Where drafted tokens stay until they are verified; a row is a number that the host hands out, one per token."""

    logits: torch.Tensor
    """[capacity, vocab] raw, in the model's type"""
    tokens: torch.Tensor
    """[at least capacity] int32"""
    stats: torch.Tensor
    """[capacity, NUM_STATS] float32; the entropy is that at temperature 1, in nats"""
    thresholds: torch.Tensor
    """[capacity] float32, raw logits below it were not drawn from; -inf: none dropped"""
    signals: torch.Tensor
    """[capacity, NUM_SIGNALS] float32, of tokens whose draft is watched"""

    @classmethod
    def allocate(cls, capacity: int, vocab: int, dtype: torch.dtype, device: torch.device | str) -> DraftStore:
        return cls(
            torch.empty((capacity, vocab), dtype=dtype, device=device),
            torch.zeros(capacity, dtype=torch.int32, device=device),
            torch.zeros((capacity, NUM_STATS), dtype=torch.float32, device=device),
            torch.full((capacity,), -torch.inf, device=device),
            torch.zeros((capacity, NUM_SIGNALS), dtype=torch.float32, device=device),
        )


def sample_drafts(
    logits: torch.Tensor,
    draws: Draws,
    depth: torch.Tensor,
    first_row: torch.Tensor,
    store: DraftStore,
    sampled: bool,
    truncated: bool,
    watched: bool = False,
    *,
    chunk: int = CHUNK,
) -> None:
    """Draw a token from every row of `logits` [n, columns] and keep it in store row first_row + its own number.

    `depth` and `first_row` are device scalars ([1] int32): drafted tokens before these, and where they go.
    Without `sampled` all rows are greedy, without `truncated` no row has min_p, top_k or top_p, without `watched` no
    signals are measured. Columns beyond the store's vocabulary are cut off; entries that have no column are kept as
    -inf.
    """
    num_rows = len(logits)
    vocab = store.logits.shape[1]
    columns = min(logits.shape[1], vocab)
    num_chunks = triton.cdiv(vocab, chunk)
    pdl = programmatic_launch()
    thresholds = truncation_thresholds(logits[:, :columns], draws) if truncated else store.thresholds
    partials = torch.empty((num_rows, NUM_PARTIALS, num_chunks), dtype=torch.float32, device=logits.device)
    seconds = partials.new_empty((num_rows, num_chunks)) if watched else partials
    _scan_drafts[(num_chunks, num_rows)](
        logits,
        logits.stride(0),
        columns,
        store.logits,
        store.logits.stride(0),
        vocab,
        draws.seeds,
        draws.counters,
        draws.modes,
        draws.inv_temperatures,
        thresholds,
        depth,
        first_row,
        partials,
        seconds,
        num_chunks,
        CHUNK=chunk,
        SAMPLED=sampled,
        TRUNCATED=truncated,
        WATCHED=watched,
        PDL=pdl,
        num_warps=_NUM_WARPS,
        launch_pdl=pdl,
    )
    _settle_drafts[(num_rows,)](
        partials,
        seconds,
        num_chunks,
        vocab,
        draws.modes,
        draws.inv_temperatures,
        thresholds,
        first_row,
        store.tokens,
        store.stats,
        store.thresholds,
        store.logits,
        store.logits.stride(0),
        store.signals,
        CHUNKS=triton.next_power_of_2(num_chunks),
        SAMPLED=sampled,
        TRUNCATED=truncated,
        WATCHED=watched,
        PDL=pdl,
        num_warps=1,
        launch_pdl=pdl,
    )


def truncation_thresholds(logits: torch.Tensor, draws: Draws, owners: torch.Tensor | None = None) -> torch.Tensor:
    """[rows] the raw logit below which min_p, top_k and top_p drop a token; -inf where none is set.

    `owners` [rows] int32 names the entry of `draws` that a row belongs to, -1 for padding; without it they are the
    same. Exact by value: equal logits are kept or dropped together. Rows of padding are left undefined.
    """
    num_rows, columns = logits.shape
    thresholds = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    head = min(_HEAD, columns)
    tile = min(_SEARCH_TILE, triton.next_power_of_2(columns))
    heads = torch.empty((num_rows, head), dtype=logits.dtype, device=logits.device)
    pdl = programmatic_launch()
    _find_thresholds[(num_rows,)](
        logits,
        logits.stride(0),
        columns,
        draws.modes if owners is None else owners,
        draws.modes,
        draws.inv_temperatures,
        draws.top_ks,
        draws.top_ps,
        draws.min_ps,
        heads,
        head,
        thresholds,
        TILE=tile,
        HAS_OWNERS=owners is not None,
        PDL=pdl,
        num_warps=min(_SEARCH_WARPS, max(1, tile // 128)),
        num_stages=1,
        launch_pdl=pdl,
    )
    return thresholds


def exponentials(seeds: torch.Tensor, counters: torch.Tensor, purposes: torch.Tensor, vocab: int) -> torch.Tensor:
    """[n, vocab] float32, the noise of n races written out. `seeds` [n, 2], `counters` and `purposes` [n], int32."""
    noise = torch.empty((len(seeds), vocab), dtype=torch.float32, device=seeds.device)
    chunk = min(CHUNK, max(_BLOCK.value, triton.next_power_of_2(vocab)))
    pdl = programmatic_launch()
    _write_noise[(triton.cdiv(vocab, chunk), len(seeds))](
        noise, vocab, seeds, counters, purposes, CHUNK=chunk, PDL=pdl, num_warps=_NUM_WARPS, launch_pdl=pdl
    )
    return noise


@triton.jit
def philox(
    low: tl.tensor, high: tl.tensor, c0: tl.tensor, c1: tl.tensor, c2: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Philox4x32-10 of the counters (c0, c1, c2, 0), blocks or scalars of 32 bits: four random words for each."""
    k0 = low.to(tl.uint32, bitcast=True)
    k1 = high.to(tl.uint32, bitcast=True)
    x0 = c0.to(tl.uint32, bitcast=True)
    x1 = tl.zeros_like(x0) + c1.to(tl.uint32)
    x2 = tl.zeros_like(x0) + c2.to(tl.uint32)
    x3 = tl.zeros_like(x0)
    for _ in tl.static_range(10):
        # Both halves of a product come out of one wide multiplication.
        even = x0.to(tl.uint64) * 0xD2511F53
        odd = x2.to(tl.uint64) * 0xCD9E8D57
        x0 = (odd >> 32).to(tl.uint32) ^ x1 ^ k0
        x2 = (even >> 32).to(tl.uint32) ^ x3 ^ k1
        x1 = odd.to(tl.uint32)
        x3 = even.to(tl.uint32)
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return x0, x1, x2, x3


@triton.jit
def fast_log(x: tl.tensor) -> tl.tensor:
    """One instruction, an error of 2e-7 at most below 2: as good as noise needs. The interpreter does not know it."""
    return tl.log(x) if _INTERPRETED else libdevice.fast_logf(x)


@triton.jit
def exponential(words: tl.tensor) -> tl.tensor:
    """Standard exponentials from random words, all positive and finite."""
    u = words.to(tl.float32) * (2.0**-32)
    # -log(1 - u), by its series where 1 - u would lose the digits that decide a race.
    series = u * (1.0 + u * (0.5 + u * (1.0 / 3.0 + u * (0.25 + u * 0.2))))
    logarithm = -fast_log(tl.maximum(1.0 - u, 1.27e-14))
    return tl.maximum(tl.where(u < 0.03125, series, logarithm), 2.0**-33)


@triton.jit
def chunk_entries(chunk: tl.tensor, CHUNK: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The chunk's noise counters and the entries that their first words belong to; word w's come w * _LANES later."""
    counters = chunk * (CHUNK // 4) + tl.arange(0, CHUNK // 4)
    return counters, counters // _LANES * _BLOCK + counters % _LANES


@triton.jit
def load_entries(row: tl.tensor, entries: tl.tensor, columns: tl.tensor) -> tl.tensor:
    return tl.load(row + entries, mask=entries < columns, other=float("-inf")).to(tl.float32)


@triton.jit
def first_of(values: tl.tensor, best: tl.tensor, places: tl.tensor) -> tl.tensor:
    """The lowest place that holds the best value."""
    return tl.min(tl.where(values == best, places, _NOWHERE))


@triton.jit
def scan_chunk(
    row: tl.tensor,
    columns: tl.tensor,
    copy: tl.tensor,
    copy_columns: tl.tensor,
    chunk: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    counter: tl.tensor,
    purpose: tl.tensor,
    inv_temperature: tl.tensor,
    threshold: tl.tensor,
    partials: tl.tensor,
    num_chunks: tl.tensor,
    CHUNK: tl.constexpr,
    SAMPLED: tl.constexpr,
    TRUNCATED: tl.constexpr,
    COPIES: tl.constexpr,
    seconds: tl.tensor = None,
    WATCHED: tl.constexpr = False,
) -> None:
    """Go through a chunk of a row and write the row's partials; purpose < 0: no race, the maximum wins. With WATCHED
    also the second largest, which may equal the largest."""
    counters, entries = chunk_entries(chunk, CHUNK)
    best = tl.full(entries.shape, float("-inf"), tl.float32)
    second = best
    places = entries
    for word in tl.static_range(4):
        at = entries + word * _LANES
        x = load_entries(row, at, columns)
        if COPIES:
            tl.store(copy + at, x.to(copy.dtype.element_ty), mask=at < copy_columns)
        if WATCHED:
            second = tl.maximum(second, tl.minimum(best, x))
        places = tl.where(x > best, at, places)
        best = tl.maximum(best, x)
    peak = tl.max(best)
    score = peak
    place = first_of(best, peak, places)
    if WATCHED:
        tl.store(seconds + chunk, tl.max(tl.where(places == place, second, best)))

    base = tl.where(peak > float("-inf"), peak, 0.0)
    mass = tl.zeros(entries.shape, tl.float32)
    energy = tl.zeros(entries.shape, tl.float32)
    kept = tl.zeros(entries.shape, tl.float32)
    for word in tl.static_range(4):
        x = load_entries(row, entries + word * _LANES, columns)
        gap = tl.maximum(x - base, _FAR)
        weight = tl.exp(gap)
        mass += weight
        if COPIES:
            energy += weight * gap
        if SAMPLED:
            tempered = tl.exp(gap * inv_temperature)
            kept += tl.where(x >= threshold, tempered, 0.0) if TRUNCATED else tempered

    if SAMPLED and purpose >= 0:
        words = philox(low, high, counters, counter, purpose)
        best = tl.full(entries.shape, float("-inf"), tl.float32)
        places = entries
        for word in tl.static_range(4):
            at = entries + word * _LANES
            x = load_entries(row, at, columns)
            scores = x * inv_temperature - fast_log(exponential(words[word]))
            if TRUNCATED:
                scores = tl.where(x >= threshold, scores, float("-inf"))
            places = tl.where(scores > best, at, places)
            best = tl.maximum(best, scores)
        score = tl.max(best)
        place = first_of(best, score, places)

    tl.store(partials + chunk, peak)
    tl.store(partials + num_chunks + chunk, tl.sum(mass))
    if COPIES:
        tl.store(partials + 2 * num_chunks + chunk, tl.sum(energy))
    if SAMPLED:
        tl.store(partials + 3 * num_chunks + chunk, tl.sum(kept))
    tl.store(partials + 4 * num_chunks + chunk, score)
    tl.store(partials + 5 * num_chunks + chunk, place.to(tl.float32, bitcast=True))


@triton.jit
def winners(scores: tl.tensor, places: tl.tensor, vocab: tl.tensor) -> tl.tensor:
    """[rows] from [rows, chunks]: the place with the best score, the lowest among equals."""
    best = tl.max(scores, axis=1)
    place = tl.min(tl.where(scores == best[:, None], places.to(tl.int32, bitcast=True), _NOWHERE), axis=1)
    return tl.minimum(place, vocab - 1)  # only logits that are no numbers lead elsewhere


@triton.jit
def combine_chunks(
    partials: tl.tensor,
    rows: tl.tensor,
    valid: tl.tensor,
    num_chunks: tl.tensor,
    vocab: tl.tensor,
    inv_temperature: tl.tensor,
    CHUNKS: tl.constexpr,
    SAMPLED: tl.constexpr,
    HAS_ENERGY: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """[rows] maximum, log-sum-exp, log-sum-exp of the kept tempered logits, entropy, and the winner."""
    chunks = tl.arange(0, CHUNKS)
    at = partials + rows[:, None] * (6 * num_chunks) + chunks[None, :]
    present = valid[:, None] & (chunks < num_chunks)[None, :]
    peaks = tl.load(at, mask=present, other=float("-inf"))
    masses = tl.load(at + num_chunks, mask=present, other=0.0)
    scores = tl.load(at + 4 * num_chunks, mask=present, other=float("-inf"))
    places = tl.load(at + 5 * num_chunks, mask=present, other=0.0)
    peak = tl.max(peaks, axis=1)
    base = tl.where(peak > float("-inf"), peak, 0.0)
    gaps = tl.maximum(peaks - base[:, None], _FAR)
    scales = tl.exp(gaps)
    mass = tl.maximum(tl.sum(masses * scales, axis=1), _TINY)
    log_mass = tl.log(mass)
    entropy = log_mass
    if HAS_ENERGY:
        energies = tl.load(at + 2 * num_chunks, mask=present, other=0.0)
        entropy = tl.maximum(log_mass - tl.sum((energies + masses * gaps) * scales, axis=1) / mass, 0.0)
    drawn_from = base + log_mass
    if SAMPLED:
        kepts = tl.load(at + 3 * num_chunks, mask=present, other=0.0)
        kept = tl.maximum(tl.sum(kepts * tl.exp(gaps * inv_temperature), axis=1), _TINY)
        drawn_from = base * inv_temperature + tl.log(kept)
    return peak, base + log_mass, drawn_from, entropy, winners(scores, places, vocab)


_SMALL = ["seeds", "counters", "modes", "inv_temperatures", "thresholds", "depth", "first_row"]
"""Arguments of which a program reads one element: their alignment is no reason to compile again."""


@triton.jit(do_not_specialize_on_alignment=_SMALL)
def _scan_drafts(
    logits: tl.tensor,
    stride: tl.tensor,
    columns: tl.tensor,
    copies: tl.tensor,
    copies_stride: tl.tensor,
    vocab: tl.tensor,
    seeds: tl.tensor,
    counters: tl.tensor,
    modes: tl.tensor,
    inv_temperatures: tl.tensor,
    thresholds: tl.tensor,
    depth: tl.tensor,
    first_row: tl.tensor,
    partials: tl.tensor,
    seconds: tl.tensor,
    num_chunks: tl.tensor,
    CHUNK: tl.constexpr,
    SAMPLED: tl.constexpr,
    TRUNCATED: tl.constexpr,
    WATCHED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    chunk = tl.program_id(0)
    row = tl.program_id(1)
    mode = tl.load(modes + row)
    if mode < 0:
        return
    inv_temperature = 1.0
    low = 0
    high = 0
    counter = 0
    purpose = -1
    threshold = float("-inf")
    if SAMPLED:
        # A greedy row is treated as one at temperature 1 that holds no race.
        inv_temperature = tl.where(mode > 0, tl.load(inv_temperatures + row), 1.0)
        low = tl.load(seeds + 2 * row)
        high = tl.load(seeds + 2 * row + 1)
        counter = tl.load(counters + row) + tl.load(depth)
        purpose = tl.where(mode == RATIO, DRAFT_NOISE, tl.where(mode == MATCH, SHARED_NOISE, -1))
    if TRUNCATED:
        threshold = tl.load(thresholds + row)
    slot = tl.load(first_row) + row
    scan_chunk(
        logits + row.to(tl.int64) * stride,
        columns,
        copies + slot.to(tl.int64) * copies_stride,
        vocab,
        chunk,
        low,
        high,
        counter,
        purpose,
        inv_temperature,
        threshold,
        partials + row * (6 * num_chunks),
        num_chunks,
        CHUNK,
        SAMPLED,
        TRUNCATED,
        True,
        seconds + row * num_chunks,
        WATCHED,
    )


@triton.jit(do_not_specialize_on_alignment=[*_SMALL, "tokens", "stats", "kept_thresholds", "copies", "signals"])
def _settle_drafts(
    partials: tl.tensor,
    seconds: tl.tensor,
    num_chunks: tl.tensor,
    vocab: tl.tensor,
    modes: tl.tensor,
    inv_temperatures: tl.tensor,
    thresholds: tl.tensor,
    first_row: tl.tensor,
    tokens: tl.tensor,
    stats: tl.tensor,
    kept_thresholds: tl.tensor,
    copies: tl.tensor,
    copies_stride: tl.tensor,
    signals: tl.tensor,
    CHUNKS: tl.constexpr,
    SAMPLED: tl.constexpr,
    TRUNCATED: tl.constexpr,
    WATCHED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    mode = tl.load(modes + row)
    if mode < 0:
        return
    inv_temperature = 1.0
    threshold = float("-inf")
    if SAMPLED:
        inv_temperature = tl.where(mode > 0, tl.load(inv_temperatures + row), 1.0)
    if TRUNCATED:
        threshold = tl.load(thresholds + row)
    rows = row + tl.arange(0, 1)
    peak, whole, drawn_from, entropy, token = combine_chunks(
        partials, rows, rows >= 0, num_chunks, vocab, inv_temperature, CHUNKS, SAMPLED, True
    )
    slots = tl.load(first_row) + rows
    tl.store(tokens + slots, token)
    tl.store(stats + 4 * slots, peak)
    tl.store(stats + 4 * slots + 1, whole)
    tl.store(stats + 4 * slots + 2, drawn_from)
    tl.store(stats + 4 * slots + 3, entropy)
    tl.store(kept_thresholds + slots, tl.zeros_like(peak) + threshold)
    if WATCHED:
        chunks = tl.arange(0, CHUNKS)
        present = chunks < num_chunks
        peaks = tl.load(partials + row * (6 * num_chunks) + chunks, mask=present, other=float("-inf"))
        runners_up = tl.load(seconds + row * num_chunks + chunks, mask=present, other=float("-inf"))
        second = tl.max(tl.where(chunks == first_of(peaks, tl.max(peaks), chunks), runners_up, peaks))
        drawn = tl.load(copies + slots.to(tl.int64) * copies_stride + token).to(tl.float32)
        top_prob = tl.exp(peak - whole)
        tl.store(signals + 4 * slots, entropy)
        tl.store(signals + 4 * slots + 1, top_prob)
        tl.store(signals + 4 * slots + 2, top_prob - tl.exp(second - whole))
        tl.store(signals + 4 * slots + 3, tl.exp(drawn - whole))


@triton.jit(do_not_specialize_on_alignment=["seeds", "counters", "purposes"])
def _write_noise(
    noise: tl.tensor,
    vocab: tl.tensor,
    seeds: tl.tensor,
    counters: tl.tensor,
    purposes: tl.tensor,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(1)
    low = tl.load(seeds + 2 * row)
    high = tl.load(seeds + 2 * row + 1)
    lanes, entries = chunk_entries(tl.program_id(0), CHUNK)
    words = philox(low, high, lanes, tl.load(counters + row), tl.load(purposes + row))
    out = noise + row.to(tl.int64) * vocab
    for word in tl.static_range(4):
        at = entries + word * _LANES
        tl.store(out + at, exponential(words[word]), mask=at < vocab)


@triton.jit
def _sortable(x: tl.tensor) -> tl.tensor:
    """Integers in the order of the floats; the same exchange of bits leads back."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # the sum makes a zero of -0.0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _collect(
    row: tl.tensor,
    columns: tl.tensor,
    floor: tl.tensor,
    peak: tl.tensor,
    inv_temperature: tl.tensor,
    head: tl.tensor,
    head_size: tl.tensor,
    TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Copy the logits from the floor up to `head`, as far as they fit; how many there are, and the mass of the row."""
    weights = tl.zeros((TILE,), tl.float32)
    size = 0
    start = 0
    while start < columns:
        x = load_entries(row, tl.multiple_of(start, TILE) + tl.arange(0, TILE), columns)
        weights += tl.exp(tl.maximum((x - peak) * inv_temperature, _FAR))
        inside = ((x >= floor) & (x > float("-inf"))).to(tl.int32)
        ranks = size + tl.cumsum(inside, 0) - 1
        tl.store(head + ranks, x.to(head.dtype.element_ty), mask=(inside > 0) & (ranks < head_size))
        size += tl.sum(inside)
        start += TILE
    tl.debug_barrier()
    return size, tl.sum(weights)


@triton.jit
def _probe(
    source: tl.tensor,
    size: tl.tensor,
    floor: tl.tensor,
    edge: tl.tensor,
    peak: tl.tensor,
    inv_temperature: tl.tensor,
    TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Number and mass of the candidates from an edge up, the lowest of them, and the highest of the others."""
    number = tl.zeros((TILE,), tl.int32)
    weights = tl.zeros((TILE,), tl.float32)
    above = tl.full((TILE,), 2**31 - 1, tl.int32)
    below = tl.full((TILE,), -(2**31), tl.int32)
    start = 0
    while start < size:
        x = load_entries(source, tl.multiple_of(start, TILE) + tl.arange(0, TILE), size)
        keys = _sortable(x)
        candidate = (x >= floor) & (x > float("-inf"))
        inside = candidate & (keys >= edge)
        number += inside.to(tl.int32)
        weights += tl.where(inside, tl.exp(tl.maximum((x - peak) * inv_temperature, _FAR)), 0.0)
        above = tl.minimum(above, tl.where(inside, keys, 2**31 - 1))
        below = tl.maximum(below, tl.where(candidate & (keys < edge), keys, -(2**31)))
        start += TILE
    return tl.sum(number), tl.sum(weights), tl.min(above), tl.max(below)


@triton.jit
def _highest_edge(
    source: tl.tensor,
    size: tl.tensor,
    floor: tl.tensor,
    lowest: tl.tensor,
    peak: tl.tensor,
    inv_temperature: tl.tensor,
    goal: tl.tensor,
    BY_MASS: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """The highest candidate such that those from it up reach the goal; `lowest` if none does. As a sortable integer."""
    lo = lowest
    hi = _sortable(peak)
    while lo < hi:
        # Their mean, rounded up. Both ends then move to candidates, so equal logits end the search at once.
        middle = (lo | hi) - ((lo ^ hi) >> 1)
        number, mass, above, below = _probe(source, size, floor, middle, peak, inv_temperature, TILE)
        enough = (mass if BY_MASS else number) >= goal
        lo = tl.where(enough, above, lo)
        hi = tl.where(enough, hi, below)
    return lo


@triton.jit(do_not_specialize_on_alignment=["owners", "modes", "inv_temperatures", "top_ks", "top_ps", "min_ps"])
def _find_thresholds(
    logits: tl.tensor,
    stride: tl.tensor,
    columns: tl.tensor,
    owners: tl.tensor,
    modes: tl.tensor,
    inv_temperatures: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    min_ps: tl.tensor,
    heads: tl.tensor,
    head_size: tl.tensor,
    thresholds: tl.tensor,
    TILE: tl.constexpr,
    HAS_OWNERS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    index = tl.program_id(0)
    owner = tl.load(owners + index) if HAS_OWNERS else index
    if owner < 0:
        return
    top_k = tl.load(top_ks + owner)
    top_p = tl.load(top_ps + owner)
    min_p = tl.load(min_ps + owner)
    by_number = (top_k > 0) & (top_k < columns)
    by_mass = top_p < 1.0
    by_share = min_p > 0.0
    tl.store(thresholds + index, float("-inf"))
    if (tl.load(modes + owner) <= 0) | (by_number | by_mass | by_share == 0):
        return

    row = logits + index.to(tl.int64) * stride
    inv_temperature = tl.load(inv_temperatures + owner)
    tops = tl.full((TILE,), float("-inf"), tl.float32)
    start = 0
    while start < columns:
        tops = tl.maximum(tops, load_entries(row, tl.multiple_of(start, TILE) + tl.arange(0, TILE), columns))
        start += TILE
    peak = tl.max(tops)
    if (peak > float("-inf")) == 0:
        return
    bottom = tl.where(by_share, peak + tl.log(tl.maximum(min_p, _TINY)) / inv_temperature, float("-inf"))
    if (by_number | by_mass) == 0:
        tl.store(thresholds + index, bottom)
        return

    # Only candidates are searched. Below the reach of top_p alone all tokens together weigh less than it drops.
    spare = tl.log(columns * 1.0) - tl.log(tl.maximum(1.0 - top_p, _TINY)) + 1.0
    reach = tl.where(by_number, _REACH, tl.where(by_share, float("inf"), spare))
    floor = tl.maximum(bottom, peak - reach / inv_temperature)
    head = heads + index.to(tl.int64) * head_size
    size = 0
    total = 0.0
    unfinished = True
    while unfinished:
        size, total = _collect(row, columns, floor, peak, inv_temperature, head, head_size, TILE)
        unfinished = by_number & (size < top_k) & (floor > bottom)
        floor = tl.where(unfinished, bottom, floor)
    source = row
    source_size = columns
    if size <= head_size:
        source = head
        source_size = size

    _, _, edge, _ = _probe(source, source_size, floor, -(2**31), peak, inv_temperature, TILE)
    if by_number:
        edge = _highest_edge(source, source_size, floor, edge, peak, inv_temperature, top_k, False, TILE)
    if by_mass:
        if by_number | by_share:
            _, total, _, _ = _probe(source, source_size, floor, edge, peak, inv_temperature, TILE)
        edge = _highest_edge(source, source_size, floor, edge, peak, inv_temperature, top_p * total, True, TILE)
    tl.store(thresholds + index, (edge ^ ((edge >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True))
