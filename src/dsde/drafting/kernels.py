"""What the device must know to draft on by itself, straight from a verdict that the host has not seen yet.

Knows nothing of how the verdict came about; `DeviceDrafter` says when it is worth it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsde.device.launch import programmatic_launch
from dsde.drafting.sequence_table import COUNTERS_PER_STEP
from dsde.models.batch import BLOCK_SIZE
from dsde.sampling.kernels import MATCH

NUM_REREAD = 2
"""Tokens that every sequence reads: the newest, and the one before it, which is new as well where all drafts stood."""


def advance(arrays: dict[str, torch.Tensor], verdict: torch.Tensor, table_width: int) -> None:
    """Write tokens, positions, slots, contexts and counters of the sequences' last two tokens into a pass's arrays.

    `verdict` holds accepted counts from its beginning and rows of emitted tokens from arrays["emitted_start"] on, each
    arrays["emitted_width"] long. Sequence i is row judged[i] of it (-1: padding) and had num_tokens[i] tokens before,
    the last of them last_tokens[i].
    """
    pdl = programmatic_launch()
    _advance_kernel[(len(arrays["judged"]),)](
        verdict,
        arrays["emitted_start"],
        arrays["emitted_width"],
        arrays["judged"],
        arrays["num_tokens"],
        arrays["last_tokens"],
        arrays["modes"],
        arrays["counters"],
        arrays["tables"],
        arrays["tokens"],
        arrays["positions"],
        arrays["slots"],
        arrays["contexts"],
        table_width,
        BLOCK=BLOCK_SIZE,
        PDL=pdl,
        num_warps=1,
        launch_pdl=pdl,
    )


def step_on(arrays: dict[str, torch.Tensor], emitted: torch.Tensor, table_width: int) -> None:
    """Make a decoding pass's arrays those of the next step, in which every sequence reads its row of `emitted`."""
    pdl = programmatic_launch()
    _step_on_kernel[(len(arrays["contexts"]),)](
        emitted,
        emitted.stride(0),
        arrays["modes"],
        arrays["counters"],
        arrays["tables"],
        arrays["tokens"],
        arrays["positions"],
        arrays["slots"],
        arrays["contexts"],
        table_width,
        BLOCK=BLOCK_SIZE,
        SPACING=COUNTERS_PER_STEP,
        PDL=pdl,
        num_warps=1,
        launch_pdl=pdl,
    )


@triton.jit(do_not_specialize=["emitted_stride", "table_width"])
def _step_on_kernel(
    emitted: tl.tensor,
    emitted_stride: tl.tensor,
    modes: tl.tensor,
    counters: tl.tensor,
    tables: tl.tensor,
    tokens: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    contexts: tl.tensor,
    table_width: tl.tensor,
    BLOCK: tl.constexpr,
    SPACING: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    sequence = tl.program_id(0)
    position = tl.load(contexts + sequence)
    if position > 0:
        block = tl.load(tables + sequence * table_width + position // BLOCK)
        tl.store(tokens + sequence, tl.load(emitted + sequence * emitted_stride))
        tl.store(positions + sequence, position)
        tl.store(slots + sequence, block * BLOCK + position % BLOCK)
        tl.store(contexts + sequence, position + 1)
        steps = tl.where(tl.load(modes + sequence) == MATCH, 1, SPACING)
        tl.store(counters + sequence, tl.load(counters + sequence) + steps)


@triton.jit(do_not_specialize=["table_width"])
def _advance_kernel(
    verdict: tl.tensor,
    emitted_start: tl.tensor,
    emitted_width: tl.tensor,
    judged: tl.tensor,
    num_tokens: tl.tensor,
    last_tokens: tl.tensor,
    modes: tl.tensor,
    counters: tl.tensor,
    tables: tl.tensor,
    tokens: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    contexts: tl.tensor,
    table_width: tl.tensor,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    sequence = tl.program_id(0)
    row = tl.load(judged + sequence)
    newest = tl.arange(0, 2)
    if row < 0:
        tl.store(slots + 2 * sequence + newest, tl.full([2], -1, tl.int32))
        tl.store(contexts + sequence, 0)
        return
    accepted = tl.load(verdict + row)
    emitted = verdict + tl.load(emitted_start) + row * tl.load(emitted_width)
    context = tl.load(num_tokens + sequence) + accepted + 1
    place = accepted - 1 + newest
    token = tl.load(emitted + tl.maximum(place, 0))
    token = tl.where(place < 0, tl.load(last_tokens + sequence), token)
    position = context - 2 + newest
    block = tl.load(tables + sequence * table_width + position // BLOCK)
    tl.store(tokens + 2 * sequence + newest, token)
    tl.store(positions + 2 * sequence + newest, position)
    tl.store(slots + 2 * sequence + newest, block * BLOCK + position % BLOCK)
    tl.store(contexts + sequence, context)
    # A seeded sequence's noise belongs to the position, which only now is known.
    is_seeded = tl.load(modes + sequence) == MATCH
    counter = tl.load(counters + sequence)
    tl.store(counters + sequence, tl.where(is_seeded, counter + accepted + 1, counter))
