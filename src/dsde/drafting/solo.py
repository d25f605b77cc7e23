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
from dsde.drafting.sequence_table import SequenceTable
from dsde.drafting.solo_kernels import LONGEST_SOLO, NUM_ENDS
from dsde.models.buckets import power_of_2
from dsde.models.passes import Pass, ragged_rows


@dataclass(slots=True)
class SoloRule:
    """How far to draft."""

    ruling: Ruling
    caps: IntArray
    """[sequences] tokens of each, at most"""
    longest: int
    """that there is room for, whatever the caps are"""


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


@dataclass(slots=True)
class SoloDraft:
    """The passes: the first, and the one that is made over and over."""

    first: tuple[Pass, Sheet]
    rest: tuple[Pass, Sheet]

    def renew(self, news: SoloNews, table: SequenceTable) -> None:
        rule, count = news.rule, len(news.sequences)
        costs = rule.ruling.costs(LONGEST_SOLO + 1)
        for depth, (entry, sheet) in enumerate((self.first, self.rest)):
            host = sheet.arrays
            table.write_draws(sheet, news.slots, news.counters)
            write_tables(sheet, entry, news.tables)
            host["bounds"][:count] = rule.ruling.bounds
            host["outlooks"][:count] = rule.ruling.outlooks
            host["rule_numbers"][:] = rule.ruling.numbers
            host["rule_numbers"][3:6] = costs[depth]
        sheet = self.first[1]
        host = sheet.arrays
        ends = np.full((count, NUM_ENDS), -1, dtype=np.int64)
        for row, sequence in zip(ends, news.sequences, strict=True):
            known = sorted(sequence.stop_token_ids)[:NUM_ENDS]
            row[: len(known)] = known
        if sheet.is_new("ends", ends):
            host["ends"][: ends.size] = ends.ravel()
        host["may_go_on"][:count] = rule.caps > 1
        host["num_tokens"][:count] = [len(sequence.tokens) for sequence in news.sequences]
        host["last_tokens"][:count] = [sequence.tokens[-1] for sequence in news.sequences]
        host["emitted_start"][0], host["emitted_width"][0] = news.places
        host = self.rest[1].arrays
        host["costs"][:] = costs.ravel()
        host["caps"][:count] = rule.caps


class SoloDrafter:
    def __init__(self, drafter: DeviceDrafter) -> None:
        self.drafter = drafter

    def prepare(
        self, count: int, sampling: tuple[bool, bool], ruling: Ruling, context: int, verdict: torch.Tensor, turn: int
    ) -> SoloDraft:
        """For so many sequences, none of which gets beyond `context`; `verdict` is where the device will find what
        stood. Whatever is not news is written."""
        drafter = self.drafter
        drafter.look_for_verdicts(verdict)
        passes, size = drafter.passes, power_of_2(count)
        parts = []
        for num_read in (NUM_REREAD, 1):
            is_first = num_read > 1
            variant = Variant(*sampling, is_ahead=is_first, is_watched=True, decides=True, is_solo=True)
            shape = passes.shape_of(num_read * size, size, num_read, context, not is_first, variant)
            entry, sheet = passes.prepare(shape, lambda s=shape, v=variant: more_arrays(s, v), turn)  # type: ignore[misc]
            host, rows = sheet.arrays, ragged_rows(np.full(count, num_read, dtype=np.int64))
            passes.write_rows(shape, host, rows)
            ruling.write(host, np.arange(count), np.arange(count), np.ones(count, dtype=bool), 0 if is_first else 1, 0)
            host["depth"][0] = host["first_row"][0] = 0
            host["count"][0] = count
            parts.append((entry, sheet))
        first, rest = parts
        host = first[1].arrays
        host["logit_rows"][:count] = NUM_REREAD * np.arange(count) + NUM_REREAD - 1
        host["judged"].fill(-1)
        host["judged"][:count] = np.arange(count)
        if rest[0].program is None:
            rest[0].program = Program(passes.device)
            rest[0].program.as_long_as(drafter.state.goes_on, passes.work_of(rest[0]))
        return SoloDraft(first, rest)

    def load(self, draft: SoloDraft) -> None:
        for entry, sheet in (draft.first, draft.rest):
            self.drafter.passes.load(entry, sheet)

    def begin(self, draft: SoloDraft, sequences: list[Sequence]) -> None:
        """The first pass."""
        self.drafter.passes.start(draft.first[0])
        self.drafter.have_read_ahead(sequences)

    def go_on(self, draft: SoloDraft) -> None:
        """All others."""
        program = draft.rest[0].program
        assert program is not None
        program.run()


def write_tables(sheet: Sheet, entry: Pass, tables: NDArray[np.int32]) -> None:
    if sheet.is_new("tables", tables):
        width = entry.shape.table_width
        sheet.arrays["tables"].reshape(-1, width)[: len(tables), : tables.shape[1]] = tables[:, :width]
