"""Steps that a device makes alone: queued behind a verdict that nobody has seen, and drafted as far as a rule goes.

The device reads what stood, drafts until the rule that the last step was planned with ends all drafts, and has the
target verify them, while the host is still busy with the step before. When it comes to plan this one it has been made,
and counts if it is what is wanted; otherwise it is dropped and made anew. Drafts may end anywhere, whoever says so, so
the text stays the target's. The target's pass is one of a few sizes, of which the device takes the first that does; if
somebody's text has ended it takes none. Knows nothing of policies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from dsde.core.sequence import Sequence
from dsde.core.stops import StopByWorth
from dsde.device.program import Program
from dsde.device.staging import Sheet
from dsde.drafting.draft_store import DeviceProposals
from dsde.drafting.ruling import Ruling
from dsde.drafting.sequence_table import SequenceTable
from dsde.drafting.solo import SoloDraft, SoloNews, SoloRule, write_tables
from dsde.drafting.solo_kernels import GONE, LONGEST_SOLO, SoloState, lay_out
from dsde.engine.executor import MOST_ALONE, DraftWish
from dsde.engine.scheduler import Schedule
from dsde.models.batch import BLOCK_SIZE
from dsde.models.buckets import power_of_2
from dsde.models.kernels import attention
from dsde.models.passes import Pass, PassRunner, PassShape

if TYPE_CHECKING:
    from dsde.engine.device_executor import DeviceFlight

IntArray = NDArray[np.int64]

_SHORT_SOLO = 7
"""tokens drafted at most where drafts are mostly half as long: near its end a request must have room for the longest"""
_FEWEST_ROWS = 4
"""of the target's smallest pass: fewer take as long"""


@dataclass(slots=True)
class SoloSetting:
    """What stays the same from step to step."""

    draft: SoloDraft
    verification: tuple[Pass, Sheet]

    @property
    def room(self) -> int:
        """tokens that a sequence may have"""
        return self.verification[0].shape.table_width * BLOCK_SIZE

    def renew(self, news: SoloNews, table: SequenceTable) -> None:
        self.draft.renew(news, table)
        entry, sheet = self.verification
        table.write_draws(sheet, news.slots, news.counters)
        write_tables(sheet, entry, news.tables)


@dataclass(slots=True)
class Solo:
    """A step that was queued before anybody planned it."""

    flight: DeviceFlight
    caps: IntArray
    """[sequences] as in SoloRule"""
    turn: int
    blocks: list[list[int]]
    """[sequences] that it reads and writes"""
    num_changes: tuple[int, ...]

    def is_wanted(self, work: Schedule, wish: DraftWish, num_changes: tuple[int, ...]) -> bool:
        """Whether the step that has been planned now is like this one: a rule may have moved a little since."""
        return (
            not work.prefills
            and _are_same(work.decodes, self.flight.judged)
            and _is_by_rule(wish)
            and wish.wants_signals == self.flight.wish.wants_signals
            and num_changes == self.num_changes
            and all(s.block_table[: len(held)] == held for s, held in zip(work.decodes, self.blocks, strict=True))
        )

    def proposals(self, told: NDArray[np.int32]) -> DeviceProposals:
        """What was drafted, which by now the device has told: passes and lengths."""
        num_passes, *lengths = told[: 1 + len(self.caps)].tolist()
        if num_passes == GONE:
            raise RuntimeError("The device took a text for ended that goes on.")
        drafted = np.array(lengths, dtype=np.int64)
        count, depths = len(lengths), np.arange(max(lengths))
        rows = np.where(depths < drafted[:, None], depths * count + np.arange(count)[:, None], -1)
        return DeviceProposals(drafted, rows, is_caught_up=np.ones(count, dtype=bool), num_passes=num_passes)


def solo_rule(work: Schedule, wish: DraftWish, num_drafted: IntArray, most: int, max_context: int) -> SoloRule | None:
    """For the step after one that was wished for so and whose drafts have these lengths, at most; None: it must be left
    to the host. `most` tokens can be drafted whatever is wished, behind `max_context`."""
    decodes, stop = work.decodes, wish.stop
    if work.prefills or not wish.is_steady or not 0 < len(decodes) <= MOST_ALONE or not _is_by_rule(wish):
        return None
    assert isinstance(stop, StopByWorth)
    assert stop.usual is not None
    longest = min(most, _SHORT_SOLO if 2 * int(stop.usual.max()) < _SHORT_SOLO else LONGEST_SOLO)
    caps = []
    for sequence, drafted, wished in zip(decodes, num_drafted.tolist(), wish.lengths.tolist(), strict=True):
        # Whatever the verdict on this step, each must have a token to come and memory for all that may be read.
        room = min(len(sequence.block_table) * BLOCK_SIZE, max_context) - len(sequence.tokens) - 1
        caps.append(min(longest, wished, room - drafted, sequence.num_left - 2 - drafted))
    return SoloRule(Ruling(stop), np.array(caps), longest) if min(caps) > 0 else None


def _are_same(sequences: list[Sequence], others: list[Sequence]) -> bool:
    return len(sequences) == len(others) and all(a is b for a, b in zip(sequences, others, strict=True))


def _is_by_rule(wish: DraftWish) -> bool:
    """Whether everybody drafts by a rule that says what it expects: any other one is obeyed to the letter, and in the
    very step that it is for."""
    return (
        isinstance(wish.stop, StopByWorth)
        and wish.stop.usual is not None
        and wish.budget is None
        and wish.consultant is None
        and bool(wish.lengths.all())
    )


class SoloVerifier:
    """The target's part of such steps."""

    def __init__(self, passes: PassRunner, state: SoloState) -> None:
        self.passes = passes
        self.state = state
        is_cuda = passes.device.type == "cuda"
        told = torch.zeros((2, 1 + MOST_ALONE), dtype=torch.int32, pin_memory=is_cuda)
        self._told = told
        self.told: NDArray[np.int32] = told.numpy()
        """by turns, on the host: passes of the draft, and lengths"""
        self.most = _most_alone(passes)

    def prepare(
        self,
        count: int,
        longest: int,
        context: int,
        variant: tuple[object, ...],
        more: Callable[[PassShape], dict[str, int]],
        turn: int,
    ) -> tuple[Pass, Sheet]:
        """The largest of the passes for so many sequences, and the sheet of whichever it will be, but for draws and all
        that is news; `more` names arrays of the body's own. To be run behind drafts."""
        num_seqs = power_of_2(count)
        sizes = _sizes(num_seqs, longest)
        shapes = [self._shape(size, num_seqs, longest, context, variant) for size in sizes]
        own = {"count": 1, "turn": 1, "sizes": len(sizes)}
        entry, sheet = self.passes.prepare(shapes[-1], lambda: {**more(shapes[-1]), **own}, turn)
        if entry.program is None:
            smaller = [self.passes.smaller(entry, shape, more(shape)) for shape in shapes[:-1]]
            entry.program = self._write_program([*smaller, entry], longest)
        host = sheet.arrays
        host["table_offsets"][:] = np.arange(num_seqs) * shapes[-1].table_width
        host["items"].fill(-1)
        host["items"][: 2 * count] = np.stack((np.arange(count), np.zeros(count)), axis=1).ravel()
        host["count"][0], host["turn"][0] = count, turn
        host["sizes"][:] = sizes
        return entry, sheet

    def _write_program(self, passes: list[Pass], longest: int) -> Program:
        largest, width = passes[-1], passes[-1].shape.table_width
        works = [self.passes.work_of(entry) for entry in passes]
        fits = torch.zeros(len(passes), dtype=torch.int32, device=self.passes.device)

        def lay_out_rows() -> None:
            lay_out(largest.arrays, self.state, fits, self._told, width, longest)

        lay_out_rows()  # of nobody, to compile it
        program = Program(self.passes.device)
        program.then(self.passes.work(lay_out_rows))
        program.one_of([(fits[i : i + 1], work) for i, work in enumerate(works)])
        return program

    def _shape(
        self, num_tokens: int, num_seqs: int, longest: int, context: int, variant: tuple[object, ...]
    ) -> PassShape:
        rows_of_one = min(longest + 1, num_tokens - num_seqs + 1)
        return self.passes.shape_of(num_tokens, num_seqs, rows_of_one, context, takes_all_rows=True, variant=variant)


def _most_alone(passes: PassRunner) -> int:
    """Tokens that a sequence may draft, as far as the target is concerned: one item of attention holds them."""
    heads, longest = passes.heads, LONGEST_SOLO
    while attention.queries_per_item(longest + 1, heads.per_kv, heads.head_dim, heads.dtype) <= longest:
        longest //= 2
    return longest


@cache
def most_rows() -> int:
    """That the target's pass may have."""
    return _sizes(power_of_2(MOST_ALONE), LONGEST_SOLO)[-1]


def _sizes(num_seqs: int, longest: int) -> list[int]:
    """Rows of passes for so many sequences whose drafts are up to `longest` tokens."""
    most = num_seqs * (longest + 1)
    sizes = [max(_FEWEST_ROWS, 2 * num_seqs)]
    while sizes[-1] < most:
        sizes.append(2 * sizes[-1])
    return sizes
