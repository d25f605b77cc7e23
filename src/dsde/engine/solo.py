"""Steps that a device makes alone: queued behind a verdict that nobody has seen, and drafted as far as a rule goes.

The device reads what stood, drafts until the rule that the last step was planned with ends all drafts, and has the
target verify them, while the host is still busy with the step before. When it comes to plan this one it has been made,
and counts if it is what is wanted; otherwise it is dropped and made anew. Drafts may end anywhere, whoever says so, so
the text stays the target's. Near the end of a request, or of its memory, they are as long as there is room, if only it
reads on. Whose text has ended rides along, and the step counts for the others. The target's pass is one of a few sizes,
of which the device takes the first that does. Knows nothing of policies.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from dsde.core.sequence import Sequence, Status
from dsde.core.stops import StopByWorth
from dsde.device.program import Program
from dsde.device.staging import Sheet
from dsde.drafting.draft_store import DeviceProposals
from dsde.drafting.ruling import Ruling
from dsde.drafting.sequence_table import SequenceTable
from dsde.drafting.solo import SoloDraft, SoloNews, SoloRule, write_tables
from dsde.drafting.solo_kernels import GONE, LONGEST_SOLO, SoloState, Told, lay_out
from dsde.engine.executor import MOST_ALONE, DraftWish
from dsde.engine.scheduler import Schedule
from dsde.models.batch import BLOCK_SIZE
from dsde.models.buckets import power_of_2
from dsde.models.passes import PassRunner, PassShape, layout_of

if TYPE_CHECKING:
    from dsde.engine.device_executor import DeviceFlight

BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.int64]

_SHORT_SOLO = 7
"""tokens drafted at most where drafts are mostly half as long: the fewer there may be the smaller are the sizes"""
_FEWEST_ROWS = 4
"""of the target's smallest pass: fewer take as long"""


@dataclass(slots=True)
class Solo:
    """A step that was queued before anybody planned it."""

    flight: DeviceFlight
    caps: IntArray
    """[sequences] as in SoloRule"""
    blocks: list[list[int]]
    """[sequences] that it reads and writes"""
    num_changes: tuple[int, ...]
    """of all that graphs point to, before it was queued"""

    def rows_of(self, sequences: list[Sequence]) -> IntArray | None:
        """[sequences] where they are in it, if they are all that it was made for and that have not ended since."""
        judged = self.flight.judged
        left = [row for row, sequence in enumerate(judged) if sequence.status is not Status.FINISHED]
        is_same = len(sequences) == len(left) and all(a is judged[row] for a, row in zip(sequences, left, strict=True))
        return np.array(left, dtype=np.int64) if left and is_same else None

    def is_wanted(self, work: Schedule, wish: DraftWish, num_changes: tuple[int, ...]) -> bool:
        """Whether the step that has been planned now is like this one: a rule may have moved a little since."""
        # Where nobody has room for a draft any more the device has made none.
        is_alike = _is_by_rule(wish) or all(sequence.num_left == 1 for sequence in work.decodes)
        rows = self.rows_of(work.decodes)
        if work.prefills or rows is None or not is_alike or num_changes != self.num_changes:
            return False
        held = [self.blocks[row] for row in rows.tolist()]
        return all(s.block_table[: len(mine)] == mine for s, mine in zip(work.decodes, held, strict=True))


def told_proposals(told: Told, turn: int, count: int, kept: IntArray) -> tuple[DeviceProposals, float]:
    """What was drafted for the `kept` of so many sequences, which by now the device has told, and how many seconds that
    took."""
    num_passes, draft_ns, *lengths = told.numbers[turn, : 2 + count].tolist()
    if num_passes == GONE:
        raise RuntimeError("The device took texts for ended that go on.")
    drafted, depths = np.array(lengths, dtype=np.int64)[kept], np.arange(max(lengths))
    rows = np.where(depths < drafted[:, None], depths * count + kept[:, None], -1)
    num_passes = min(num_passes, int(drafted.max()) + 1)  # others are for those who have ended
    proposals = DeviceProposals(drafted, rows, num_passes=num_passes)
    proposals.signals = told.signals[turn].numpy()
    return proposals, 1e-9 * draft_ns


def solo_rule(
    work: Schedule, wish: DraftWish, num_drafted: IntArray, is_caught_up: BoolArray, max_context: int
) -> SoloRule | None:
    """For the step after one that was wished for so and whose drafts have these lengths, at most; None: it must be left
    to the host. Who is not caught up cannot draft, nor anybody beyond `max_context`."""
    decodes, stop = work.decodes, wish.stop
    if work.prefills or not wish.is_steady or not 0 < len(decodes) <= MOST_ALONE or not _is_by_rule(wish):
        return None
    assert isinstance(stop, StopByWorth)
    assert stop.usual is not None
    are_fixed = np.isposinf(stop.offsets)
    is_short = 2 * int(stop.usual.max()) < _SHORT_SOLO and not are_fixed.any()
    longest = _SHORT_SOLO if is_short else LONGEST_SOLO
    wishes = wish.lengths.tolist()
    if are_fixed.any() and max(wishes[i] for i in np.flatnonzero(are_fixed).tolist()) > longest:
        return None  # who is never stopped gets what was asked for
    caps = np.minimum(wish.lengths, longest)
    if (caps[~is_caught_up] > 0).any():
        return None
    memories = [min(len(sequence.block_table) * BLOCK_SIZE, max_context) for sequence in decodes]
    for sequence, memory, drafted in zip(decodes, memories, num_drafted.tolist(), strict=True):
        # Wherever the verdict on this step ends, the newest token must have a position and memory.
        if len(sequence.tokens) + min(drafted + 1, sequence.num_left) > memory:
            return None
    return SoloRule(Ruling(stop), caps, np.array(memories), longest)


def _is_by_rule(wish: DraftWish) -> bool:
    """Whether all drafts are by a rule that says what it expects: any other one is obeyed to the letter, and in the
    very step that it is for."""
    return (
        isinstance(wish.stop, StopByWorth)
        and wish.stop.usual is not None
        and wish.budget is None
        and wish.consultant is None
        and bool(wish.lengths.any())
    )


def can_go_by_heart(wish: DraftWish) -> bool:
    """Whether a rule says of everybody what it expects, of as few as a device serves alone."""
    is_few = len(wish.lengths) <= MOST_ALONE
    return is_few and _is_by_rule(wish) and not np.isposinf(wish.stop.offsets).any()  # type: ignore[union-attr]


def expected_lengths(wish: DraftWish) -> IntArray:
    """[sequences] what a rule expects that everybody drafts, and at least a token: whose draft does not read on cannot
    be in a step that the device makes alone."""
    assert isinstance(wish.stop, StopByWorth)
    assert wish.stop.usual is not None
    return np.minimum(wish.lengths, np.maximum(wish.stop.usual, 1))


class SoloSetting:
    """Steps of up to so many sequences, drafted up to so far: memory, and the program that the device goes through."""

    def __init__(
        self,
        draft: SoloDraft,
        passes: PassRunner,
        num_seqs: int,
        longest: int,
        context: int,
        variant: tuple[object, ...],
        more: Callable[[PassShape], dict[str, int]],
    ) -> None:
        """`passes` are the target's; `more` names arrays of its body's own."""
        self._draft, self._longest = draft, longest
        self._sizes = _sizes(num_seqs, longest)
        # Most drafts are short: attention goes by the smallest items, and a sequence has as many as it may need.
        self._per_item = passes.shape_of(num_seqs, num_seqs, 1, context, True, variant).queries_per_item
        items_of_sizes = [num_items(size, num_seqs, longest, self._per_item) for size in self._sizes]
        self._shapes = [
            passes.shape_of(size, num_seqs, 1, context, True, variant, items)
            for size, items in zip(self._sizes, items_of_sizes, strict=True)
        ]
        own = {"count": 1, "turn": 1, "sizes": len(self._sizes)}
        layout = layout_of(self._shapes[-1], {**more(self._shapes[-1]), **own})
        self._layouts = [*draft.layouts, layout]
        self._passes, self._more = passes, more
        self._device_words = torch.zeros(self._num_words, dtype=torch.int32, device=passes.device)
        is_cuda = passes.device.type == "cuda"
        # The device may not have read one step's yet when the next one's are written.
        self._host_words = torch.zeros((2, self._num_words), dtype=torch.int32, pin_memory=is_cuda)
        self._sheets = [
            [Sheet.over(layout, words) for layout, words in zip(self._layouts, self._parts(half), strict=True)]
            for half in self._host_words
        ]
        self.result: Any = None
        """what the body of the target's pass leaves"""
        self._program: Program | None = None

    @property
    def _num_words(self) -> int:
        return sum(layout.num_words for layout in self._layouts)

    def _parts(self, words: torch.Tensor) -> list[torch.Tensor]:
        ends = np.cumsum([layout.num_words for layout in self._layouts]).tolist()
        return [words[start:end] for start, end in itertools.pairwise([0, *ends])]

    @property
    def room(self) -> int:
        """tokens that a sequence may have"""
        return self._shapes[-1].table_width * BLOCK_SIZE

    def prepare(self, state: SoloState, signals: torch.Tensor, told: Told) -> None:
        """Compile and capture everything. Before anything is queued: it leaves its marks on what the device keeps."""
        *draft_words, words = self._parts(self._device_words)
        program = Program(self._passes.device)
        self._draft.write_program(program, draft_words)
        largest = self._passes.over(self._shapes[-1], self._layouts[-1], words)
        smaller = [self._passes.smaller(largest, shape, self._more(shape)) for shape in self._shapes[:-1]]
        works = [self._passes.work_of(entry) for entry in (*smaller, largest)]
        self.result = largest.result
        fits = torch.zeros(len(works), dtype=torch.int32, device=self._passes.device)
        width = self._shapes[-1].table_width

        def lay_out_rows(told: Told) -> None:
            lay_out(largest.arrays, state, fits, signals, told, width, self._longest)

        # Of nobody, to compile it; what another step has told may not have been read yet. Kept, since nobody else knows
        # when the device has written to it.
        self._unread = Told.blank(MOST_ALONE, pinned=self._passes.device.type == "cuda")
        lay_out_rows(self._unread)
        program.then(self._passes.work(lambda: lay_out_rows(told)))
        program.one_of([(fits[i : i + 1], work) for i, work in enumerate(works)])
        program.finish()
        self._program = program
        for turn, (*_, sheet) in enumerate(self._sheets):
            sheet.arrays["table_offsets"][:] = np.arange(self._shapes[-1].num_seqs) * width
            sheet.arrays["turn"][0] = turn
            sheet.arrays["sizes"][:] = self._sizes

    def run(self, news: SoloNews, table: SequenceTable, turn: int) -> None:
        """One copy there, and all of it is queued."""
        *draft_sheets, sheet = self._sheets[turn]
        count = len(news.sequences)
        if sheet.is_new("count", np.array([count])):
            self._draft.begin(draft_sheets, news.rule.ruling, count)
            sheet.arrays["items"].fill(-1)
            num_seqs = self._shapes[-1].num_seqs
            items = sheet.arrays["items"].reshape(-1, num_seqs, 2)[:, :count]
            items[..., 0] = np.arange(count)
            items[..., 1] = self._per_item * np.arange(len(items))[:, None]
            sheet.arrays["count"][0] = count
        self._draft.renew(draft_sheets, news)
        table.write_draws(sheet, news.slots, news.counters)
        write_tables(sheet, self._shapes[-1], news.tables)
        self._device_words.copy_(self._host_words[turn], non_blocking=True)
        assert self._program is not None
        self._program.run()


@cache
def most_rows() -> int:
    """That the target's pass may have."""
    return _sizes(power_of_2(MOST_ALONE), LONGEST_SOLO)[-1]


def num_items(num_rows: int, num_seqs: int, longest: int, per_item: int) -> int:
    """Of attention, in a program for more than half of so many sequences, each of which may have all rows that the
    others leave it."""
    return num_seqs * -(-min(longest + 1, num_rows - num_seqs // 2) // per_item)


def _sizes(num_seqs: int, longest: int) -> list[int]:
    """Rows of passes for so many sequences whose drafts are up to `longest` tokens."""
    most = num_seqs * (longest + 1)
    sizes = [max(_FEWEST_ROWS, 2 * num_seqs)]
    while sizes[-1] < most:
        sizes.append(2 * sizes[-1])
    return sizes
