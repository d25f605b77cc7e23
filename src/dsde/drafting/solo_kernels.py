"""What a device must know to make a whole step alone: where the next draft pass reads, and what the target is to read
behind the last.

`verification_sheet` and `DeviceDrafter` write the same from the host, for drafts whose lengths it knows. Token j of
sequence i lies in row j * count + i of the draft store. Knows nothing of rules.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from dsde.device.launch import programmatic_launch
from dsde.models.batch import BLOCK_SIZE
from dsde.sampling.kernels import MATCH, NUM_SIGNALS

NUM_HEADS = 4
NUM_ENDS = 4
"""tokens that are looked for by which a sequence ends, of each: whoever has more may end unnoticed"""
LONGEST_SOLO = 15
"""Tokens that a device drafts without the host, at most."""
GONE = -1
"""what is told instead of a number of passes if all had ended before"""


@dataclass(slots=True)
class SoloState:
    """What the device keeps of a step that it makes alone, from pass to pass."""

    heads: torch.Tensor
    """[sequences, 4] int32: tokens of each behind the verdict, the newest of them, how many the verdict brought, and
    whether one of these ends it"""
    caps: torch.Tensor
    """[sequences] int32, tokens that each may draft"""
    lengths: torch.Tensor
    """[sequences] int32, of drafts that are over"""
    goes_on: torch.Tensor
    """[1] int32, whether somebody drafts on"""
    num_passes: torch.Tensor
    """[1] int32, of the draft so far"""
    began: torch.Tensor
    """[1] int64, when the step did, in nanoseconds"""

    @classmethod
    def blank(cls, num_seqs: int, device: torch.device) -> SoloState:
        def words(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        began = words(2).view(torch.int64)
        return cls(words(num_seqs, NUM_HEADS), words(num_seqs), words(num_seqs), words(1), words(1), began)


@dataclass(slots=True)
class Told:
    """What the device tells of a step that it has made alone: page-locked, for two steps in turn."""

    numbers: torch.Tensor
    """[2, 2 + sequences] int32: passes of the draft, nanoseconds that it took, and lengths"""
    signals: torch.Tensor
    """[2, rows, NUM_SIGNALS] float32, as in the draft store"""

    @classmethod
    def blank(cls, num_seqs: int, pinned: bool) -> Told:
        numbers = torch.zeros((2, 2 + num_seqs), dtype=torch.int32, pin_memory=pinned)
        return cls(numbers, torch.zeros((2, num_seqs * LONGEST_SOLO, NUM_SIGNALS), pin_memory=pinned))


def has_clock() -> bool:
    """Whether kernels can read the time."""
    return not triton.knobs.runtime.interpret


def solo_sizes(num_seqs: int, is_first: bool) -> dict[str, int]:
    """What a draft pass is told beside all others, the first of a step and those behind it."""
    if is_first:
        return {"ends": NUM_ENDS * num_seqs, **dict.fromkeys(("caps", "memories", "totals"), num_seqs), "count": 1}
    return {"costs": 3 * (LONGEST_SOLO + 1), "count": 1}


def go_deeper(arrays: dict[str, torch.Tensor], state: SoloState, table_width: int) -> None:
    """Make a draft pass's arrays those of the next depth: arrays["count"] sequences read the tokens that they drew
    last. Nobody goes beyond its cap; arrays["costs"] [depths, 3] are the rule's."""
    pdl = programmatic_launch()
    _go_deeper_kernel[(1,)](
        state.heads,
        state.caps,
        arrays["count"],
        arrays["costs"],
        arrays["depth"],
        arrays["first_row"],
        arrays["modes"],
        arrays["counters"],
        arrays["tables"],
        arrays["sources"],
        arrays["positions"],
        arrays["slots"],
        arrays["contexts"],
        arrays["places"],
        arrays["rule_numbers"],
        table_width,
        BLOCK=BLOCK_SIZE,
        NUM_HEADS=NUM_HEADS,
        SIZE=triton.next_power_of_2(len(arrays["contexts"])),
        PDL=pdl,
        num_warps=1,
        launch_pdl=pdl,
    )


def lay_out(
    arrays: dict[str, torch.Tensor],
    state: SoloState,
    fits: torch.Tensor,
    signals: torch.Tensor,
    told: Told,
    table_width: int,
    longest: int,
) -> None:
    """Write what the target reads and what is judged, of drafts of up to `longest` tokens that are over, into the
    arrays of a verification; and into `fits` [sizes] which of arrays["sizes"], ascending, is the first that does.
    It is `told` in row arrays["turn"], with the draft store's `signals`. If all have ended none fits, and there are
    GONE passes."""
    pdl = programmatic_launch()
    num_seqs, num_rows = len(arrays["contexts"]), len(arrays["tokens"])
    _lay_out_kernel[(1,)](
        state.heads,
        state.lengths,
        state.num_passes,
        arrays["count"],
        arrays["turn"],
        arrays["sizes"],
        fits,
        state.began,
        signals,
        told.numbers,
        told.numbers.stride(0),
        told.signals,
        told.signals.stride(0),
        arrays["modes"],
        arrays["counters"],
        arrays["tables"],
        arrays["tokens"],
        arrays["sources"],
        arrays["positions"],
        arrays["slots"],
        arrays["starts"],
        arrays["contexts"],
        arrays["row_sequences"],
        arrays["row_depths"],
        arrays["row_drafts"],
        arrays["judged_starts"],
        arrays["lengths"],
        num_seqs,
        num_rows,
        len(fits),
        table_width,
        BLOCK=BLOCK_SIZE,
        NUM_HEADS=NUM_HEADS,
        SEQS=triton.next_power_of_2(num_seqs),
        DEPTHS=triton.next_power_of_2(longest + 1),
        ROWS=triton.next_power_of_2(num_rows),
        SIZES=triton.next_power_of_2(len(fits)),
        NOBODY=GONE,
        NUM_SIGNALS=NUM_SIGNALS,
        CLOCK=has_clock(),
        PDL=pdl,
        num_warps=1,
        launch_pdl=pdl,
    )


# One warp: what it reads and writes again, no other one may read in between.
@triton.jit(do_not_specialize=["table_width"])
def _go_deeper_kernel(
    heads: tl.tensor,
    caps: tl.tensor,
    count: tl.tensor,
    costs: tl.tensor,
    depth: tl.tensor,
    first_row: tl.tensor,
    modes: tl.tensor,
    counters: tl.tensor,
    tables: tl.tensor,
    sources: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    contexts: tl.tensor,
    places: tl.tensor,
    rule_numbers: tl.tensor,
    table_width: tl.tensor,
    BLOCK: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    num = tl.load(count)
    here = tl.load(depth) + 1
    sequence = tl.arange(0, SIZE)
    active = sequence < num
    cap = tl.load(caps + sequence, mask=active, other=0)
    # Beyond its cap a sequence may have neither memory nor positions: then it reads on at its beginning, for nobody.
    has_room = active & (here < cap)
    context = tl.load(heads + NUM_HEADS * sequence, mask=has_room, other=1) + tl.where(has_room, here, 0)
    position = context - 1
    block = tl.load(tables + sequence * table_width + position // BLOCK, mask=has_room, other=0)
    tl.store(positions + sequence, position, mask=active)
    tl.store(slots + sequence, tl.where(has_room, block * BLOCK + position % BLOCK, -1), mask=active)
    tl.store(contexts + sequence, context, mask=active)
    tl.store(sources + sequence, (here - 1) * num + sequence, mask=active)
    tl.store(places + sequence, here * num + sequence, mask=active)
    # A seeded sequence's noise belongs to the position, which the verdict has moved.
    is_seeded = active & (tl.load(modes + sequence, mask=active, other=0) == MATCH) & (here == 1)
    counter = tl.load(counters + sequence, mask=is_seeded, other=0)
    gained = tl.load(heads + NUM_HEADS * sequence + 2, mask=is_seeded, other=0)
    tl.store(counters + sequence, counter + gained, mask=is_seeded)
    tl.store(rule_numbers + 3, tl.load(costs + 3 * here))
    tl.store(rule_numbers + 4, tl.load(costs + 3 * here + 1))
    tl.store(rule_numbers + 5, tl.load(costs + 3 * here + 2))
    tl.store(depth, here)
    tl.store(first_row, here * num)


@triton.jit(
    do_not_specialize=["told_stride", "told_signals_stride", "num_seqs", "num_rows", "num_sizes", "table_width"]
)
def _lay_out_kernel(
    heads: tl.tensor,
    drafted: tl.tensor,
    num_passes: tl.tensor,
    count: tl.tensor,
    turn: tl.tensor,
    sizes: tl.tensor,
    fits: tl.tensor,
    began: tl.tensor,
    signals: tl.tensor,
    told: tl.tensor,
    told_stride: tl.tensor,
    told_signals: tl.tensor,
    told_signals_stride: tl.tensor,
    modes: tl.tensor,
    counters: tl.tensor,
    tables: tl.tensor,
    tokens: tl.tensor,
    sources: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    starts: tl.tensor,
    contexts: tl.tensor,
    row_sequences: tl.tensor,
    row_depths: tl.tensor,
    row_drafts: tl.tensor,
    judged_starts: tl.tensor,
    lengths: tl.tensor,
    num_seqs: tl.tensor,
    num_rows: tl.tensor,
    num_sizes: tl.tensor,
    table_width: tl.tensor,
    BLOCK: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    SEQS: tl.constexpr,
    DEPTHS: tl.constexpr,
    ROWS: tl.constexpr,
    SIZES: tl.constexpr,
    NOBODY: tl.constexpr,
    NUM_SIGNALS: tl.constexpr,
    CLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if CLOCK:
        now = tl.extra.cuda.globaltimer()
    num = tl.load(count)
    sequence = tl.arange(0, SEQS)
    active = sequence < num
    # Who has ended drafts nothing and rides along; if nobody is left there is no need for this step.
    has_somebody = tl.sum(tl.load(heads + NUM_HEADS * sequence + 3, mask=active, other=0)) < num
    length = tl.load(drafted + sequence, mask=active, other=0)
    head = tl.load(heads + NUM_HEADS * sequence, mask=active, other=0)
    newest = tl.load(heads + NUM_HEADS * sequence + 1, mask=active, other=0)
    count_of = tl.where(active, length + 1, 0)
    start = tl.cumsum(count_of) - count_of
    total = tl.sum(count_of)
    is_listed = sequence < num_seqs
    tl.store(starts + sequence, start, mask=is_listed)
    tl.store(starts + num_seqs, total)
    tl.store(contexts + sequence, tl.where(active, head + length, 0), mask=is_listed)
    tl.store(judged_starts + sequence, start, mask=is_listed)
    tl.store(lengths + sequence, length, mask=is_listed)
    is_seeded = active & (tl.load(modes + sequence, mask=active, other=0) == MATCH)
    counter = tl.load(counters + sequence, mask=is_seeded, other=0)
    gained = tl.load(heads + NUM_HEADS * sequence + 2, mask=is_seeded, other=0)
    tl.store(counters + sequence, counter + gained, mask=is_seeded)

    padding = tl.arange(0, ROWS)
    is_padding = (padding >= total) & (padding < num_rows)
    tl.store(tokens + padding, 0, mask=is_padding)
    tl.store(sources + padding, -1, mask=is_padding)
    tl.store(positions + padding, 0, mask=is_padding)
    tl.store(slots + padding, -1, mask=is_padding)
    tl.store(row_sequences + padding, -1, mask=is_padding)
    tl.store(row_drafts + padding, -1, mask=is_padding)

    place = tl.arange(0, DEPTHS)[None, :]
    owner = sequence[:, None]
    used = active[:, None] & (place <= length[:, None])
    row = start[:, None] + place
    position = head[:, None] - 1 + place
    block = tl.load(tables + owner * table_width + position // BLOCK, mask=used, other=0)
    tl.store(tokens + row, newest[:, None] + 0 * place, mask=used)
    tl.store(sources + row, tl.where(place > 0, (place - 1) * num + owner, -1), mask=used)
    tl.store(positions + row, position, mask=used)
    tl.store(slots + row, block * BLOCK + position % BLOCK, mask=used)
    tl.store(row_sequences + row, owner + 0 * place, mask=used)
    tl.store(row_depths + row, place + 0 * owner, mask=used)
    tl.store(row_drafts + row, tl.where(place < length[:, None], place * num + owner, -1), mask=used)

    size = tl.arange(0, SIZES)
    known = size < num_sizes
    most = tl.load(sizes + size, mask=known, other=0)
    least = tl.load(sizes + size - 1, mask=known & (size > 0), other=-1)
    tl.store(fits + size, ((total <= most) & (total > least) & has_somebody).to(tl.int32), mask=known)
    told += tl.load(turn) * told_stride
    tl.store(told, tl.where(has_somebody, tl.load(num_passes), NOBODY))
    if CLOCK:
        tl.store(told + 1, tl.minimum(now - tl.load(began), (1 << 31) - 1).to(tl.int32))
    tl.store(told + 2 + sequence, length, mask=active)
    told_signals += tl.load(turn) * told_signals_stride
    drawn = place * num + owner
    for signal in tl.static_range(NUM_SIGNALS):
        value = tl.load(signals + NUM_SIGNALS * drawn + signal, mask=used & (place < length[:, None]), other=0.0)
        tl.store(told_signals + NUM_SIGNALS * drawn + signal, value, mask=used & (place < length[:, None]))
