"""Drafts that a device makes alone: from a verdict that nobody has seen to the end that a rule makes.

The first pass reads what stood, draws and decides; one more follows, by itself, as long as somebody drafts on. From one
step to the next hardly anything changes of what the device must be told, and a host in a hurry writes no more than
that. Knows nothing of verification.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from dsde.core.sequence import Sequence
from dsde.device.program import Program
from dsde.device.staging import Sheet
from dsde.drafting.device import DeviceDrafter, Variant, more_arrays
from dsde.drafting.draft_store import IntArray
from dsde.drafting.kernels import NUM_REREAD
from dsde.drafting.ruling import Ruling
from dsde.drafting.solo_kernels import LONGEST_SOLO, NUM_ENDS
from dsde.models.passes import PassShape, layout_of, ragged_rows


@dataclass(slots=True)
class SoloRule:
    """How far to draft."""

    ruling: Ruling
    caps: IntArray
    """[sequences] tokens of each, at most; 0: it only reads on"""
    memories: IntArray
    """[sequences] tokens that each has memory and positions for: fewer are drafted where these are short"""
    longest: int
    """that there is room for in a draft, whatever the caps are"""


@dataclass(slots=True)
class SoloNews:
    """What is different in every step, or may be."""

    rule: SoloRule
    sequences: list[Sequence]
    slots: IntArray
    counters: IntArray
    """where the sequences will be in their random numbers, but for what the verdict brings that is yet to come"""
    tables: NDArray[np.int32]
    """[sequences, blocks]"""
    places: tuple[int, int]
    """where in a verdict the emitted tokens are, and how far from one sequence's to the next's"""


class SoloDraft:
    """The passes: the first, and the one that is made over and over."""

    def __init__(self, drafter: DeviceDrafter, size: int, sampling: tuple[bool, bool], context: int) -> None:
        """For up to so many sequences, none of which gets beyond `context`."""
        self._drafter = drafter
        self._shapes, self.layouts = [], []
        for num_read in (NUM_REREAD, 1):
            is_first = num_read > 1
            variant = Variant(*sampling, is_ahead=is_first, is_watched=True, decides=True, is_solo=True)
            shape = drafter.passes.shape_of(num_read * size, size, num_read, context, not is_first, variant)
            self._shapes.append(shape)
            self.layouts.append(layout_of(shape, more_arrays(shape, variant)))

    def write_program(self, program: Program, memory: list[torch.Tensor]) -> None:
        passes = self._drafter.passes
        parts = zip(self._shapes, self.layouts, memory, strict=True)
        first, rest = (passes.work_of(passes.over(*part)) for part in parts)
        program.then(first)
        program.as_long_as(self._drafter.state.goes_on, rest)

    def begin(self, sheets: list[Sheet], ruling: Ruling, count: int) -> None:
        """Write what is the same for any so many sequences."""
        everybody = np.arange(count)
        for depth, (shape, sheet) in enumerate(zip(self._shapes, sheets, strict=True)):
            host = sheet.arrays
            num_read = shape.num_tokens // shape.num_seqs
            self._drafter.passes.write_rows(shape, host, ragged_rows(np.full(count, num_read, dtype=np.int64)))
            ruling.write(host, everybody, everybody, everybody >= 0, depth, number=0)
            host["depth"][0] = host["first_row"][0] = 0
            host["count"][0] = count
        host = sheets[0].arrays
        host["logit_rows"][:count] = NUM_REREAD * everybody + NUM_REREAD - 1
        host["judged"].fill(-1)
        host["judged"][:count] = everybody

    def renew(self, sheets: list[Sheet], news: SoloNews) -> None:
        rule, count, table = news.rule, len(news.sequences), self._drafter.table
        costs = rule.ruling.costs(LONGEST_SOLO + 1)
        for depth, (shape, sheet) in enumerate(zip(self._shapes, sheets, strict=True)):
            host = sheet.arrays
            table.write_draws(sheet, news.slots, news.counters)
            write_tables(sheet, shape, news.tables)
            host["bounds"][:count] = rule.ruling.bounds
            host["outlooks"][:count] = rule.ruling.outlooks
            host["rule_numbers"][:] = rule.ruling.numbers
            host["rule_numbers"][3:6] = costs[depth]
        first, rest = sheets
        host = first.arrays
        ends = np.full((count, NUM_ENDS), -1, dtype=np.int64)
        for row, sequence in zip(ends, news.sequences, strict=True):
            known = sorted(sequence.stop_token_ids)[:NUM_ENDS]
            row[: len(known)] = known
        if first.is_new("ends", ends):
            host["ends"][: ends.size] = ends.ravel()
        host["caps"][:count] = rule.caps
        host["memories"][:count] = rule.memories
        host["totals"][:count] = [len(sequence.tokens) + sequence.num_left for sequence in news.sequences]
        host["num_tokens"][:count] = [len(sequence.tokens) for sequence in news.sequences]
        host["last_tokens"][:count] = [sequence.tokens[-1] for sequence in news.sequences]
        host["emitted_start"][0], host["emitted_width"][0] = news.places
        rest.arrays["costs"][:] = costs.ravel()


def write_tables(sheet: Sheet, shape: PassShape, tables: NDArray[np.int32]) -> None:
    if sheet.is_new("tables", np.array(tables.shape), tables):
        width = shape.table_width
        sheet.arrays["tables"].reshape(-1, width)[: len(tables), : tables.shape[1]] = tables[:, :width]
