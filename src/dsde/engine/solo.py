"""Steps that a device makes alone: queued behind a verdict that nobody has seen, and drafted as far as a rule goes.

The device reads what stood, drafts until the rule that the last step was planned with ends all drafts, and has the
target verify them, while the host is still busy with the step before. When it comes to plan this one it has been made,
and counts if it is what is wanted; otherwise it is dropped and made anew. Drafts may end anywhere, whoever says so, so
the text stays the target's. The target's pass is one of a few sizes, of which the device takes the first that does.
Knows nothing of policies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from dsde.core.sequence import Sequence
from dsde.core.stops import StopByWorth
from dsde.device.program import Program
from dsde.device.staging import Sheet
from dsde.drafting.device import LONGEST_SOLO, SoloRule
from dsde.drafting.draft_store import DeviceProposals
from dsde.drafting.ruling import Ruling
from dsde.drafting.solo_kernels import SoloState, lay_out
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
class Solo:
    """A step that was queued before anybody planned it."""

    flight: DeviceFlight
    caps: IntArray
    """[sequences] as in SoloRule"""
    turn: int
    blocks: list[list[int]]
    """[sequences] that it writes to, and those before them"""
    num_moves: int
    """of the draft store, before it was queued"""

    def is_wanted(self, work: Schedule, wish: DraftWish, num_moves: int) -> bool:
        """Whether the step that has been planned now is this one."""
        judged = self.flight.judged
        return (
            not work.prefills
            and len(work.decodes) == len(judged)
            and all(now is before for now, before in zip(work.decodes, judged, strict=True))
            and _is_by_rule(wish)
            and wish.wants_signals == self.flight.wish.wants_signals
            and bool((wish.lengths >= self.caps).all())
            and num_moves == self.num_moves
            and all(s.block_table[: len(held)] == held for s, held in zip(judged, self.blocks, strict=True))
        )

    def proposals(self, told: NDArray[np.int32]) -> DeviceProposals:
        """What was drafted, which by now the device has told: passes and lengths."""
        num_passes, *lengths = told[: 1 + len(self.caps)].tolist()
        drafted = np.array(lengths, dtype=np.int64)
        count, longest = len(drafted), int(drafted.max())
        rows = np.arange(longest) * count + np.arange(count)[:, None]
        rows[np.arange(longest) >= drafted[:, None]] = -1
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
    # Whatever the verdict on this step, each must have a token to come and memory for all that may be read.
    lefts = [sequence.num_left - 2 for sequence in decodes]
    rooms = [min(len(s.block_table) * BLOCK_SIZE, max_context) - len(s.tokens) - 1 for s in decodes]
    caps = np.minimum(np.minimum(lefts, rooms) - num_drafted, np.minimum(wish.lengths, longest))
    return SoloRule(Ruling(stop), caps, longest) if int(caps.min()) > 0 else None


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


def most_alone(passes: PassRunner) -> int:
    """Tokens that a sequence may draft alone, as far as the target is concerned: one item of attention holds them."""
    heads = passes.heads
    longest = LONGEST_SOLO
    while longest > 0:
        if attention.queries_per_item(longest + 1, heads.per_kv, heads.head_dim, heads.dtype) > longest:
            return longest
        longest //= 2
    return 0


class SoloVerifier:
    """The target's part of such steps."""

    def __init__(self, passes: PassRunner, state: SoloState) -> None:
        self.passes = passes
        self.state = state
        is_cuda = passes.device.type == "cuda"
        self.told = torch.zeros((2, 1 + MOST_ALONE), dtype=torch.int32, pin_memory=is_cuda)
        """by turns, on the host: passes of the draft, and lengths"""
        self._turn = 0

    def next_turn(self) -> int:
        self._turn = 1 - self._turn
        return self._turn

    def prepare(
        self,
        sequences: list[Sequence],
        tables: NDArray[np.int32],
        longest: int,
        context: int,
        variant: tuple[object, ...],
        more: Callable[[PassShape], dict[str, int]],
        turn: int,
    ) -> tuple[Pass, Sheet]:
        """The largest of the passes, and the sheet of whichever it will be, but for draws; `more` names arrays of the
        body's own. To be run behind drafts."""
        num_seqs = power_of_2(len(sequences))
        sizes = _sizes(num_seqs, longest)
        shapes = [self._shape(size, num_seqs, longest, context, variant) for size in sizes]
        own = {"count": 1, "turn": 1, "sizes": len(sizes)}
        entry, sheet = self.passes.prepare(shapes[-1], lambda: {**more(shapes[-1]), **own}, turn)
        if entry.program is None:
            smaller = [self.passes.smaller(entry, shape, more(shape)) for shape in shapes[:-1]]
            entry.program = self._write_program([*smaller, entry], longest)
        host = sheet.arrays
        count, width = len(sequences), shapes[-1].table_width
        host["table_offsets"][:] = np.arange(num_seqs) * width
        host["tables"].reshape(-1, width)[:count, : tables.shape[1]] = tables[:, :width]
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
            lay_out(largest.arrays, self.state, fits, self.told, width, longest)

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
