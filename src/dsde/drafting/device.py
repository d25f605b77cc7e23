"""The same draft as `ModelDrafter`'s, queued on the device: without a rule that stops it, all of its steps at once.

Each step is a pass that ends by drawing its tokens into the draft store, where the next step and the target find them,
so the host never sees a drafted token before the verdict. A rule is applied on the device as well; the host learns what
it decided before it goes through with the next pass, unless it is all but sure of that. Knows nothing of verification.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from dsde.core.sequence import Sequence
from dsde.core.stops import Stop
from dsde.device.staging import Sheet
from dsde.drafting.draft_store import BoolArray, DeviceProposals, Drafts, GrowingDraft, IntArray
from dsde.drafting.foresight import Foresight
from dsde.drafting.kernels import NUM_REREAD, advance
from dsde.drafting.model import DraftShare, ModelDrafter
from dsde.drafting.referee import Call, Referee
from dsde.drafting.ruling import FIRST, RULING_FIELDS, Decision, Ruling, ruling_sizes
from dsde.drafting.sequence_table import DRAW_FIELDS, SequenceTable, draw_sizes
from dsde.drafting.solo_kernels import SoloState, go_deeper, solo_sizes
from dsde.models.batch import BLOCK_SIZE
from dsde.models.buckets import MOST_GRAPH_TOKENS, coarse_bucket, power_of_2, reading_bucket
from dsde.models.passes import Pass, PassRunner, PassShape, RaggedRows, ragged_rows
from dsde.sampling.draw_mode import DrawMode
from dsde.sampling.kernels import Draws, sample_drafts

_HEARD_EVERY = 8
"""Of so many decisions on first tokens that are all but sure one is made."""


class Successor(Protocol):
    """What the device does behind a draft, which may be queued before the draft's end is known to anybody else."""

    def prepare(self, proposals: DeviceProposals) -> None:
        """While the device works: for what will have been proposed if the draft is over now."""

    def begin(self, lengths: IntArray) -> None:
        """The draft is over, with these lengths, and the device waits: go, if this is what was prepared for."""


class NoSuccessor:
    def prepare(self, proposals: DeviceProposals) -> None:
        pass

    def begin(self, lengths: IntArray) -> None:
        pass


class DeviceDrafter:
    """Queues the drafts of a `ModelDrafter` on its device.

    A step's first pass does not depend on how far the draft will go, so it is queued right behind the verdict of the
    step before, ahead of the host (`read_ahead`): while the host learns what stood, decides and prepares, the device
    already reads it and draws the first tokens. Whoever does not draft after all has lost nothing but that pass.
    """

    def __init__(self, host: ModelDrafter, table: SequenceTable, drafts: Drafts, max_num_seqs: int) -> None:
        self.host = host
        self.model = host.model
        self.table = table
        self.drafts = drafts
        self.passes = PassRunner(host.model.heads, drafts.tokens, self._body)
        self._logits = torch.empty(0)
        self._verdict = torch.empty(0, dtype=torch.int32)
        self._ahead: dict[Sequence, int] = {}
        """store rows of first tokens that were drawn ahead, good for the next step alone"""
        self._ahead_turn = 0
        self._watches = False
        """whether somebody has wanted signals before: those of first tokens must be there before anybody asks"""
        self._ahead_is_watched = False
        self.referee = Referee(max_num_seqs, drafts.tokens.device)
        self.state = SoloState.blank(max_num_seqs, drafts.tokens.device)
        self.foresight = Foresight()
        self._unheard: _Unheard | None = None
        self._num_omitted = 0
        """decisions on first tokens, since one of those that were all but sure was made"""

    def propose(
        self,
        sequences: list[Sequence],
        slots: IntArray,
        lengths: IntArray,
        begin: Callable[[], None],
        stop: Stop | None = None,
        watched: bool = False,
        successor: Successor | None = None,
    ) -> DeviceProposals:
        """Queue the draft; `begin` is called right before the device first hears of it.

        With a `stop` the next pass depends on what the device decides on the last. It is made for everybody who may
        still go on, and its first layers are run while the host hears of the decisions; only the rest waits for them,
        and not even that where somebody is all but sure to go on. Whoever ended meanwhile rides along in that one pass.
        Where all drafts are all but sure to be over, they are.
        The `successor` is prepared while the device works, and begun as soon as the host hears that the drafts are
        over: the device would wait for all that the host does in between. `watched` drafts have signals in the store.
        """
        ruling = None if stop is None else Ruling(stop)
        task = _Task(begin, ruling, watched or ruling is not None, successor or NoSuccessor())
        self._watches = self._watches or task.watched
        ahead = self._take_ahead(sequences, lengths, task.watched)
        unread = np.where(ahead < 0, lengths, 0)
        share = self.host.share(sequences, unread) if unread.any() else DraftShare.nothing(len(sequences))
        rooms = self.model.config.max_position_embeddings + 1 - np.array([len(s.tokens) for s in sequences])
        lengths = np.where(ahead < 0, share.lengths, np.minimum(lengths, np.maximum(rooms, 0)))
        draft = GrowingDraft(lengths.copy(), ahead)
        if len(share.order):
            num_drafting = int((share.lengths > 0).sum())
            batch = self._batch([sequences[i] for i in share.order.tolist()], slots[share.order], 0)
            step = self._read(batch, share.chunks[share.order], num_drafting, draft.num_rows, task.watched)
            begin()
            self.passes.run(*step)
            draft.draw(share.order[:num_drafting])
        if draft.longest > 1 or (draft.longest and ruling is not None):
            members = draft.members
            batch = self._batch([sequences[i] for i in members.tolist()], slots[members], draft.longest)
            self._go_on(draft, batch, task)
        self._settle(sequences, draft.lengths, share, ahead)
        proposals = draft.proposals()
        proposals.num_catch_up_tokens = share.num_catch_up_tokens
        proposals.is_caught_up = lengths > 0
        proposals.is_resumed = len(share.order) > 0 and int(ahead.max(initial=-1)) < 0
        proposals.num_passes = draft.depth + 1 if len(share.order) or draft.num_rows else 0
        return proposals

    def _go_on(self, draft: GrowingDraft, batch: _Batch, task: _Task) -> None:
        """The passes after the first."""
        call = unsent = None
        if task.ruling is not None and task.ruling.decides(0, draft.longest == 1):
            call = unsent = self.referee.announce(task.ruling, len(draft.members))
        while True:
            may_go_on = draft.may_go_on
            following, entry, next_call = draft.members[may_go_on], None, None
            num_expected = 0 if call is None else call.ruling.num_expected(following, draft.depth + 1)
            if call is not None and self._is_taken_to_be_over(draft, call, num_expected, is_sent=unsent is None):
                return
            if len(following):
                if len(following) < len(may_go_on):
                    batch = batch.only(may_go_on)
                # A pass may begin with the decision on first tokens, if it is for the same sequences.
                first = unsent if len(following) == len(may_go_on) else None
                (entry, sheet), next_call = self._extend(batch, draft, following, task, first)
                unsent = None if first is not None else unsent
                task.begin()
                self.passes.load(entry, sheet)
                (self.passes.start if call is None else self.passes.begin)(entry)
            is_made = goes_on = entry is not None
            if call is not None:
                if unsent is not None:
                    task.begin()
                    self.referee.decide_now(unsent, draft, self.drafts.signals)
                    unsent = None
                is_made, goes_on = self._hear_out(draft, call, entry, num_expected, task)
            if is_made:
                draft.deepen(following)
            if not is_made or not goes_on:
                return
            call = next_call

    def _is_taken_to_be_over(self, draft: GrowingDraft, call: Call, num_expected: int, is_sent: bool) -> bool:
        """Where it is all but sure that all drafts are, they end, and what is decided on them is heard later. Only of a
        rule that says what it expects: any other one is obeyed to the letter."""
        if call.ruling.usual is None or not self.foresight.is_sure_of_end(num_expected, draft.depth):
            return False
        if is_sent:
            self._hear_of_last()
            self._unheard = _Unheard(call, draft.depth, draft.is_drafting)
        else:  # need not be decided at all; but now and then it is, to know that it would still be the same
            self._num_omitted += 1
            if self._num_omitted == _HEARD_EVERY:
                self._num_omitted = 0
                return False
        draft.end()
        return True

    def _hear_out(
        self, draft: GrowingDraft, call: Call, entry: Pass | None, num_expected: int, task: _Task
    ) -> tuple[bool, bool]:
        """What is decided on the newest tokens. The pass that was begun for the next is gone through with where
        somebody goes on, or is all but sure to. Returns whether it was, and whether somebody does."""
        waits = entry is None or not self.foresight.is_sure(num_expected)
        self._hear_of_last()
        if entry is not None and not waits:
            self.passes.finish(entry)
        is_worth_it = entry is None or self.foresight.is_worth_preparing(num_expected, draft.depth)
        began = time.perf_counter()
        if waits and is_worth_it and not self.referee.has_decided(call):
            task.successor.prepare(draft.proposals_if_over(entry is None or call.ruling.keeps_last))
            took = time.perf_counter() - began
            self.foresight.learn_prepared(took, not self.referee.has_decided(call), draft.depth)
            decisions = self.referee.wait(call)
        else:
            decisions = self.referee.wait(call)
            if waits:
                self.foresight.learn_waited(time.perf_counter() - began, draft.depth)
        # The device waits from here on: what it does next comes before everything else.
        goes_on = bool(decisions.max() == Decision.GOES_ON)
        if entry is not None and waits:
            (self.passes.finish if goes_on else self.passes.abandon)(entry)
        is_drafting = draft.is_drafting
        draft.apply(decisions)
        if not goes_on:
            task.successor.begin(draft.lengths)
        if num_expected == 0:
            self.foresight.learn_end(_is_surprise(decisions[is_drafting]), draft.depth)
        if entry is not None:
            self.foresight.learn(num_expected, goes_on)
        return entry is not None and (goes_on or not waits), goes_on

    def _hear_of_last(self) -> None:
        """Whether the last step's drafts ended as they were taken to: by now the device has said so."""
        unheard, self._unheard = self._unheard, None
        decisions = None if unheard is None else self.referee.peek(unheard.call)
        if unheard is not None and decisions is not None:
            self.foresight.learn_end(_is_surprise(decisions[unheard.is_drafting]), unheard.depth)

    def read_ahead(
        self,
        sequences: list[Sequence],
        slots: IntArray,
        lengths: IntArray,
        is_caught_up: BoolArray,
        verdict: torch.Tensor,
        places: tuple[int, int],
        rows_of_verdict: IntArray,
    ) -> bool:
        """Queue the first pass of the next step's draft for those who are caught up and whose drafts in this one have
        these lengths, at most; False: there is nobody.

        `verdict` is where the device will find what stood (`places`: start and width of its emitted tokens), of each of
        the `sequences` in its row.
        """
        longest = self.model.config.max_position_embeddings
        # Wherever the verdict ends, the newest token must have a block and a position.
        rooms = [min(longest, len(s.block_table) * BLOCK_SIZE) - len(s.tokens) for s in sequences]
        goes = np.flatnonzero(is_caught_up & (lengths < rooms)).tolist()
        if not goes:
            return False
        self.look_for_verdicts(verdict)
        active = [sequences[i] for i in goes]
        batch = self._batch(active, slots[goes], int(lengths.max()) + 1)
        rows = ragged_rows(np.full(len(active), NUM_REREAD, dtype=np.int64))
        contexts = batch.num_tokens + lengths[goes] + 1
        counters = self.table.counters(active, batch.variant[0], num_steps_later=1)
        # Two sheets in turn: the device may not have read the last one yet, since nobody waited for it.
        self._ahead_turn = 1 - self._ahead_turn
        self._ahead_is_watched = self._watches
        variant = Variant(*batch.variant, is_ahead=True, is_watched=self._watches)
        entry, sheet = self._step(rows, contexts, batch, False, 0, 0, variant, counters, self._ahead_turn)
        host, count = sheet.arrays, len(active)
        host["logit_rows"][:count] = rows.starts + NUM_REREAD - 1
        host["judged"].fill(-1)
        host["judged"][:count] = rows_of_verdict[goes]
        host["num_tokens"][:count] = batch.num_tokens
        host["last_tokens"][:count] = [s.tokens[-1] for s in active]
        host["emitted_start"][0], host["emitted_width"][0] = places
        self.passes.run(entry, sheet)
        self._ahead = {sequence: row for row, sequence in enumerate(active)}
        return True

    def look_for_verdicts(self, verdict: torch.Tensor) -> None:
        """Where the device will find what stood."""
        if verdict.data_ptr() != self._verdict.data_ptr():
            self._verdict = verdict
            self.passes.forget()

    def have_read_ahead(self, sequences: list[Sequence], is_caught_up: BoolArray) -> None:
        """First tokens of these have been drawn, into the store's first rows, and looked at; those of who is not caught
        up mean nothing."""
        self._watches = self._ahead_is_watched = True
        self._ahead = {sequences[row]: row for row in np.flatnonzero(is_caught_up).tolist()}

    def rehearse(self, most: int) -> None:
        """Have passes captured in which up to so many sequences draft on while they are looked at, by a rule or not.
        Nothing may be under way."""
        most = min(most, MOST_GRAPH_TOKENS)
        self.make_room(0, power_of_2(most))
        for count in sorted({coarse_bucket(count) for count in range(1, most + 1)}):
            ones = np.ones(count, dtype=np.int64)
            for decides, decides_first in ((False, False), (True, False), (True, True)):
                variant = Variant(False, False, is_watched=True, decides=decides, decides_first=decides_first)
                shape = self.passes.shape(
                    ragged_rows(ones), ones, None, in_parts=True, pad=coarse_bucket, variant=variant
                )
                self.passes.rehearse(shape, more_arrays(shape, variant))

    def forget_ahead(self) -> None:
        """The next step will not follow on the last one."""
        self._ahead = {}

    def needs_room(self, num_drafted: int, num_seqs: int) -> bool:
        """Whether the store must move before a step with so many drafts."""
        # First tokens drawn ahead lie before the others, also those of sequences that have ended.
        return self.drafts.capacity < num_drafted + max(num_seqs, 1 + max(self._ahead.values(), default=-1))

    def make_room(self, num_drafted: int, num_seqs: int) -> None:
        """Before a step whose drafts may be so many: graphs point to where they are kept."""
        is_short = self._logits.shape[0] < num_seqs
        moves = self.needs_room(num_drafted, num_seqs)
        if moves or is_short:
            # Before anything moves: should there be no memory for it, no graph may point to where it was.
            self.passes.forget()
        if moves:
            self.forget_ahead()
            self.drafts.make_room(num_drafted + num_seqs)
        if is_short:
            # Shared by all graphs, which never run at the same time: a copy for each would be gigabytes.
            size = (power_of_2(num_seqs), self.model.config.vocab_size)
            self._logits = torch.empty(0)
            self._logits = torch.empty(size, dtype=self.model.dtype, device=self.model.device)

    def _take_ahead(self, sequences: list[Sequence], lengths: IntArray, watched: bool) -> IntArray:
        """[sequences] store rows of first tokens that are there already; -1: none."""
        ahead, self._ahead = self._ahead, {}
        if not ahead or (watched and not self._ahead_is_watched):
            return np.full(len(sequences), -1, dtype=np.int64)
        rows = np.array([ahead.get(s, -1) for s in sequences], dtype=np.int64)
        return np.where(lengths > 0, rows, -1)

    def _settle(self, sequences: list[Sequence], lengths: IntArray, share: DraftShare, ahead: IntArray) -> None:
        """Note what the draft has read."""
        if len(share.order):
            self.host.settle(sequences, replace(share, lengths=lengths))
        for i in np.flatnonzero(ahead >= 0).tolist():
            sequences[i].num_draft_computed = len(sequences[i].tokens) + max(int(lengths[i]) - 1, 0)

    def _batch(self, active: list[Sequence], slots: IntArray, num_more: int) -> _Batch:
        num_tokens = np.array([len(s.tokens) for s in active], dtype=np.int64)
        variant = self.table.variant(slots)
        tables = self.table.tables(slots, -(-(int(num_tokens.max()) + num_more) // BLOCK_SIZE))
        return _Batch(active, slots, num_tokens, tables, self.table.counters(active, variant[0]), variant)

    def _read(
        self, batch: _Batch, chunks: IntArray, num_drafting: int, first_row: int, watched: bool
    ) -> tuple[Pass, Sheet]:
        """Read what is new, and draw a first token for the first `num_drafting` sequences."""
        rows = RaggedRows(chunks)
        starts = np.array([s.num_draft_computed for s in batch.sequences], dtype=np.int64)
        variant = Variant(*batch.variant, is_watched=watched)
        entry, sheet = self._step(rows, starts + chunks, batch, rows.longest == 1, 0, first_row, variant)
        host = sheet.arrays
        if rows.longest == 1:
            host["tokens"][: rows.count] = [s.tokens[s.num_draft_computed] for s in batch.sequences]
        else:
            places = zip(batch.sequences, rows.starts.tolist(), chunks.tolist(), strict=True)
            for sequence, place, chunk in places:
                start = sequence.num_draft_computed
                host["tokens"][place : place + chunk] = sequence.tokens[start : start + chunk]
            host["logit_rows"][: len(chunks)] = rows.starts + chunks - 1
        if num_drafting < len(chunks):
            host["modes"][num_drafting:] = DrawMode.PADDING
            sheet.written.pop("draws")
        return entry, sheet

    def _extend(
        self, batch: _Batch, draft: GrowingDraft, members: IntArray, task: _Task, first: Call | None
    ) -> tuple[tuple[Pass, Sheet], Call | None]:
        """Read the tokens that these members, which `batch` is of, drafted last, and draw the next; with `first`, once
        it is decided on those."""
        depth, first_row, count = draft.depth + 1, draft.num_rows, len(members)
        if first_row + count > self.drafts.capacity:
            self.passes.forget()
            self.drafts.make_room(first_row + count, num_kept=first_row)
        ruling = task.ruling
        if ruling is not None and not ruling.decides(depth, is_last=int(draft.lengths[members].max()) == depth + 1):
            ruling = None
        variant = Variant(
            *batch.variant, is_watched=task.watched, decides=ruling is not None, decides_first=first is not None
        )
        rows = ragged_rows(np.ones(count, dtype=np.int64))
        entry, sheet = self._step(rows, batch.num_tokens + depth, batch, True, depth, first_row, variant)
        sheet.arrays["sources"][:count] = draft.rows[members, draft.depth]
        call = None
        if first is not None:
            arrays = {name: sheet.arrays[FIRST + name] for name in RULING_FIELDS}
            self.referee.write_first(first, arrays, draft)
        if ruling is not None:
            call = self.referee.announce(ruling, count)
            self.referee.write(call, sheet.arrays, draft, members, depth, np.arange(first_row, first_row + count))
        return (entry, sheet), call

    def _step(
        self,
        rows: RaggedRows,
        contexts: IntArray,
        batch: _Batch,
        takes_all_rows: bool,
        depth: int,
        first_row: int,
        variant: Variant,
        counters: IntArray | None = None,
        ahead_turn: int | None = None,
    ) -> tuple[Pass, Sheet]:
        num_rows = None if takes_all_rows else len(contexts)
        in_parts, pad = depth > 0 and variant.is_watched, None
        if in_parts:  # fewer may take part from pass to pass
            pad = coarse_bucket
        elif depth == 0 and rows.longest > 1 and not variant.is_ahead:
            pad = reading_bucket
        shape = self.passes.shape(rows, contexts, num_rows, in_parts=in_parts, pad=pad, variant=variant)
        turn = depth if ahead_turn is None else ahead_turn
        entry, sheet = self.passes.prepare(shape, lambda: more_arrays(shape, variant), turn)
        self.passes.write(shape, sheet, rows, contexts, batch.tables)
        self.table.write_draws(sheet, batch.slots, batch.counters if counters is None else counters)
        sheet.arrays["depth"][0] = depth
        sheet.arrays["first_row"][0] = first_row
        return entry, sheet

    def _body(self, entry: Pass) -> Generator[None, None, None]:
        shape, arrays, model, cache = entry.shape, entry.arrays, self.model, self.host.cache
        variant = Variant(*shape.variant)
        if variant.is_ahead:
            advance(arrays, self._verdict, self.state, shape.table_width, variant.is_solo)
        elif variant.is_solo:
            go_deeper(arrays, self.state, shape.table_width)
        store = self.drafts.store
        assert store is not None
        if variant.decides_first:
            self.referee.decide({name: arrays[FIRST + name] for name in RULING_FIELDS}, store.signals)
        hidden = yield from model.read_in_parts(entry.batch, cache)
        logits = model.logits(hidden, entry.batch.logit_rows, out=self._logits[: shape.num_rows])
        draws = draws_of(arrays)
        sampling = variant.sampled, variant.truncated, variant.is_watched
        sample_drafts(logits, draws, arrays["depth"], arrays["first_row"], store, *sampling)
        if variant.decides:
            self.referee.decide(arrays, store.signals, self.state if variant.is_solo else None)


class Variant(NamedTuple):
    """What the kernels of a pass are compiled for."""

    sampled: bool
    truncated: bool
    is_ahead: bool = False
    is_watched: bool = False
    decides: bool = False
    decides_first: bool = False
    """on the tokens that it reads"""
    is_solo: bool = False
    """nobody hears what it decides but the device"""


class _Unheard(NamedTuple):
    """Decisions that the host did not wait for."""

    call: Call
    depth: int
    is_drafting: BoolArray
    """[tokens] whether it counts what is decided on it"""


@dataclass(slots=True)
class _Task:
    """How a step's draft is to be made."""

    begin: Callable[[], None]
    ruling: Ruling | None
    watched: bool
    successor: Successor


@dataclass(slots=True)
class _Batch:
    """Those who take part in a pass."""

    sequences: list[Sequence]
    slots: IntArray
    num_tokens: IntArray
    tables: NDArray[np.int32]
    counters: IntArray
    variant: tuple[bool, bool]

    def only(self, kept: BoolArray) -> _Batch:
        return _Batch(
            [sequence for sequence, stays in zip(self.sequences, kept.tolist(), strict=True) if stays],
            self.slots[kept],
            self.num_tokens[kept],
            self.tables[kept],
            self.counters[kept],
            self.variant,
        )


def more_arrays(shape: PassShape, variant: Variant) -> dict[str, int]:
    """What a pass is told beside its batch, and how much room that takes."""
    more = {**draw_sizes(shape.num_rows), "depth": 1, "first_row": 1}
    if variant.decides:
        more |= ruling_sizes(shape.num_rows)
    if variant.decides_first:
        more |= {FIRST + name: size for name, size in ruling_sizes(shape.num_rows).items()}
    if variant.is_solo:
        more |= solo_sizes(shape.num_seqs, variant.is_ahead)
    if variant.is_ahead:
        more |= dict.fromkeys(("judged", "num_tokens", "last_tokens"), shape.num_seqs)
        more |= {"emitted_start": 1, "emitted_width": 1}
    return more


def _is_surprise(decisions: IntArray) -> bool:
    """Whether drafts that were expected to be over are anything else."""
    return bool((decisions != Decision.KEPT).any())


def draws_of(arrays: dict[str, torch.Tensor]) -> Draws:
    return Draws(**{name: arrays[name].view(-1, 2) if name == "seeds" else arrays[name] for name in DRAW_FIELDS})
