"""What the device must know to draft on by itself: straight from a verdict that the host has not seen yet, or as far as
a rule lets it.

Knows nothing of how the verdict came about; `DeviceDrafter` says when it is worth it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsde.core.params import LONGEST_DRAFT
from dsde.core.stops import LEAST_TOP_PROB, MOST_TOP_PROB, SMALLEST_PROB
from dsde.device.launch import programmatic_launch
from dsde.drafting.ruling import Decision, Kind
from dsde.drafting.sequence_table import COUNTERS_PER_STEP
from dsde.drafting.solo_kernels import NUM_ENDS, NUM_HEADS, SoloState, has_clock
from dsde.models.batch import BLOCK_SIZE
from dsde.sampling.kernels import MATCH

NUM_REREAD = 2
"""Tokens that every sequence reads: the newest, and the one before it, which is new as well where all drafts stood."""

_BEFORE = tl.constexpr(int(Kind.BEFORE))
_AFTER = tl.constexpr(int(Kind.AFTER))
_WORTH = tl.constexpr(int(Kind.WORTH))
_KEPT = tl.constexpr(int(Decision.KEPT))
_GOES_ON = tl.constexpr(int(Decision.GOES_ON))
_SMALLEST_PROB = tl.constexpr(SMALLEST_PROB)
_LEAST_TOP_PROB = tl.constexpr(LEAST_TOP_PROB)
_MOST_TOP_PROB = tl.constexpr(MOST_TOP_PROB)


def advance(
    arrays: dict[str, torch.Tensor],
    verdict: torch.Tensor,
    state: SoloState,
    table_width: int,
    is_solo: bool = False,
) -> None:
    """Write tokens, positions, slots, contexts and counters of the sequences' last two tokens into a pass's arrays.

    `verdict` holds accepted counts from its beginning and rows of emitted tokens from arrays["emitted_start"] on, each
    arrays["emitted_width"] long. Sequence i is row judged[i] of it (-1: padding) and had num_tokens[i] tokens before,
    the last of them last_tokens[i]. Of the `state` heads are written; and in a step that the device makes alone also
    when it began, whether sequences have ended, by the tokens in their parts of arrays["ends"] or for having
    arrays["totals"] tokens, and how far each of the others may draft: up to its part of arrays["caps"], of
    arrays["memories"] (tokens that it has memory for), and so that another token fits in behind.
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
        state.heads,
        state.began,
        *(arrays[name] if is_solo else state.heads for name in ("ends", "caps", "memories", "totals")),
        state.caps,
        table_width,
        BLOCK=BLOCK_SIZE,
        NUM_HEADS=NUM_HEADS,
        NUM_ENDS=NUM_ENDS if is_solo else 0,
        CLOCK=is_solo and has_clock(),
        MOST=LONGEST_DRAFT + 1,
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


def decide(
    arrays: dict[str, torch.Tensor],
    signals: torch.Tensor,
    standings: torch.Tensor,
    decisions: torch.Tensor,
    solo: SoloState | None = None,
) -> None:
    """Apply the rule in a pass's arrays (`Ruling.write`) to the tokens it drew, whose `signals` are in the draft store.

    `standings` [sequences, 2] is kept from pass to pass: the chance that a draft stands so far (negative: it has ended)
    and its log-probability. `decisions` [2, at least as many as tokens] are words of a `Mailbox`; where the device
    makes the step alone nobody is told, and it is written into its state, whose caps say who may go on.
    """
    pdl = programmatic_launch()
    size = triton.next_power_of_2(len(arrays["places"]))
    _decide_kernel[(1,)](
        signals,
        standings,
        decisions,
        arrays["places"],
        arrays["standings"],
        arrays["may_go_on"],
        arrays["bounds"],
        arrays["outlooks"],
        arrays["rule"],
        arrays["rule_numbers"],
        arrays["depth"] if solo is not None else arrays["rule"],
        solo.lengths if solo is not None else arrays["rule"],
        solo.goes_on if solo is not None else arrays["rule"],
        solo.num_passes if solo is not None else arrays["rule"],
        solo.caps if solo is not None else arrays["rule"],
        len(arrays["places"]),
        decisions.stride(0),
        SIZE=size,
        SOLO=solo is not None,
        PDL=pdl,
        num_warps=min(8, max(1, size // 32)),
        launch_pdl=pdl,
    )


@triton.jit(do_not_specialize=["count", "decisions_stride"])
def _decide_kernel(
    signals: tl.tensor,
    standings: tl.tensor,
    decisions: tl.tensor,
    places: tl.tensor,
    sequences: tl.tensor,
    may_go_on: tl.tensor,
    bounds: tl.tensor,
    outlooks: tl.tensor,
    rule: tl.tensor,
    rule_numbers: tl.tensor,
    depth: tl.tensor,
    lengths: tl.tensor,
    someone_goes_on: tl.tensor,
    num_passes: tl.tensor,
    caps: tl.tensor,
    count: tl.tensor,
    decisions_stride: tl.tensor,
    SIZE: tl.constexpr,
    SOLO: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tokens = tl.arange(0, SIZE)
    place = tl.load(places + tokens, mask=tokens < count, other=-1)
    here = place >= 0
    sequence = tl.load(sequences + tokens, mask=here, other=0)
    kind = tl.load(rule)
    look = tl.load(rule + 1)
    begun = here & (tl.load(rule + 2) == 0)
    stands = tl.load(standings + 2 * sequence, mask=begun, other=1.0)
    log_prob = tl.load(standings + 2 * sequence + 1, mask=begun, other=0.0)
    alive = here & (stands >= 0)
    entropy = tl.load(signals + 4 * place, mask=here, other=0.0)
    top_prob = tl.load(signals + 4 * place + 1, mask=here, other=1.0)
    margin = tl.load(signals + 4 * place + 2, mask=here, other=1.0)
    token_prob = tl.load(signals + 4 * place + 3, mask=here, other=1.0)
    bound = tl.load(bounds + tokens, mask=here, other=0.0)
    log_prob += tl.log(tl.maximum(token_prob, _SMALLEST_PROB))

    value = tl.where(look == 0, entropy, tl.where(look == 1, top_prob, margin))
    value = tl.where(look == 3, token_prob, tl.where(look == 4, log_prob, value))
    sign = tl.load(rule_numbers + 6)
    is_beyond = sign * value > sign * bound
    sure = tl.minimum(tl.maximum(top_prob, _LEAST_TOP_PROB), _MOST_TOP_PROB)
    looks = tl.load(rule_numbers) * tl.sqrt(entropy) + tl.load(rule_numbers + 1) * tl.log(sure / (1.0 - sure))
    looks += tl.load(rule_numbers + 2) * margin
    by_worth = kind == _WORTH
    is_fixed = by_worth & (bound == float("inf"))
    stands = tl.where(by_worth, stands / (1.0 + tl.exp(-(bound + looks))), stands)
    is_worth_it = is_fixed | (stands >= tl.load(rule_numbers + 3))
    kept = alive & tl.where(by_worth, is_worth_it, (kind != _BEFORE) | (is_beyond == 0))
    if SOLO:
        drawn = tl.load(depth)
        cap = tl.load(caps + sequence, mask=here, other=0)
        kept = kept & (drawn < cap)
        may = drawn + 1 < cap
    else:
        may = tl.load(may_go_on + tokens, mask=here, other=0) > 0

    worth = stands * tl.load(outlooks + tokens, mask=here, other=0.0)
    own_cost = tl.load(rule_numbers + 4)
    is_worth_it = is_fixed | (worth >= own_cost)
    would = kept & may
    would = would & tl.where(by_worth, is_worth_it, (kind != _AFTER) | (is_beyond == 0))
    together = tl.sum(tl.where(would, worth - own_cost, 0.0))
    anyway = tl.sum((would & is_fixed).to(tl.int32)) > 0
    goes_on = would & ((by_worth == 0) | anyway | (together >= tl.load(rule_numbers + 5)))

    tl.store(standings + 2 * sequence, tl.where(goes_on, stands, -1.0), mask=here)
    tl.store(standings + 2 * sequence + 1, log_prob, mask=here)
    if SOLO:
        tl.store(lengths + sequence, drawn + kept.to(tl.int32), mask=alive & (goes_on == 0))
        tl.store(someone_goes_on, (tl.sum(goes_on.to(tl.int32)) > 0).to(tl.int32))
        tl.store(num_passes, drawn + 1)
    else:
        decision = tl.where(goes_on, _GOES_ON, tl.where(kept, _KEPT, 0))
        number = tl.load(rule + 3).to(tl.int64)
        decisions += (number % 2) * decisions_stride
        # Write-through: the host is waiting for it.
        tl.store(decisions + tokens, (number << 32) | decision.to(tl.int64), mask=here, cache_modifier=".wt")


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
    heads: tl.tensor,
    began: tl.tensor,
    ends: tl.tensor,
    most: tl.tensor,
    memories: tl.tensor,
    totals: tl.tensor,
    caps: tl.tensor,
    table_width: tl.tensor,
    BLOCK: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_ENDS: tl.constexpr,
    CLOCK: tl.constexpr,
    MOST: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    sequence = tl.program_id(0)
    if CLOCK:
        tl.store(began, tl.extra.cuda.globaltimer(), mask=sequence == 0)
    row = tl.load(judged + sequence)
    newest = tl.arange(0, 2)
    if row < 0:  # the host's sheet says so wherever it matters, and may have no tokens for so many sequences
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
    tl.store(heads + NUM_HEADS * sequence, context)
    tl.store(heads + NUM_HEADS * sequence + 1, tl.load(emitted + accepted))
    tl.store(heads + NUM_HEADS * sequence + 2, accepted + 1)
    if NUM_ENDS > 0:
        every = tl.arange(0, triton.next_power_of_2(MOST))
        said = tl.load(emitted + every, mask=every <= accepted, other=-1)
        num_ends = tl.sum(tl.zeros_like(every))
        for i in tl.static_range(NUM_ENDS):
            end = tl.load(ends + NUM_ENDS * sequence + i)
            num_ends += tl.sum(((said == end) & (said >= 0)).to(tl.int32))
        num_left = tl.load(totals + sequence) - context
        has_ended = (num_ends > 0) | (num_left <= 0)
        tl.store(heads + NUM_HEADS * sequence + 3, has_ended.to(tl.int32))
        room = tl.minimum(tl.load(memories + sequence) - context, num_left - 1)
        cap = tl.maximum(tl.minimum(tl.load(most + sequence), room), 0)
        tl.store(caps + sequence, tl.where(has_ended, 0, cap))
    # A seeded sequence's noise belongs to the position, which only now is known.
    is_seeded = tl.load(modes + sequence) == MATCH
    counter = tl.load(counters + sequence)
    tl.store(counters + sequence, tl.where(is_seeded, counter + accepted + 1, counter))
