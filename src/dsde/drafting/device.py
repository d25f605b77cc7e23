"""The same draft as `ModelDrafter`'s, without the host in the loop: all of its steps are queued on the device at once.

Each step is a pass that ends by drawing its tokens into the draft store, where the next step and the target find them,
so the host never sees a drafted token before the verdict. At every depth the sequences still drafting are a prefix of
the batch, longest first, and a step's graph serves any such prefix of its bucket. Knows nothing of verification.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from dsde.core.sequence import Sequence
from dsde.device.staging import Sheet
from dsde.drafting.kernels import NUM_REREAD, advance
from dsde.drafting.model import DraftShare, ModelDrafter
from dsde.drafting.sequence_table import DRAW_FIELDS, SequenceTable, draw_sizes
from dsde.models.batch import BLOCK_SIZE
from dsde.models.passes import Pass, PassRunner, RaggedRows, power_of_2
from dsde.sampling.draw_mode import DrawMode
from dsde.sampling.kernels import DraftStore, Draws, sample_drafts

IntArray = NDArray[np.int64]

_FIRST_STORE_ROWS = 64


@dataclass(slots=True)
class DeviceProposals:
    """Drafted tokens that only the device knows."""

    lengths: IntArray
    """[sequences]"""
    rows: IntArray
    """[sequences, K] where in the draft store a token lies; -1 beyond a sequence's length"""
    num_catch_up_tokens: IntArray | None = None
    """[sequences] tokens the draft had to read before its first own one, beyond the newest"""
    point_mass: bool = False
    """chosen rather than drawn from a distribution: nothing but the tokens is in the store"""

    @staticmethod
    def nothing(num_sequences: int) -> DeviceProposals:
        return DeviceProposals(np.zeros(num_sequences, dtype=np.int64), np.empty((num_sequences, 0), dtype=np.int64))


@dataclass(slots=True)
class Drafts:
    """The draft store, which grows with the number of tokens drafted in a step."""

    vocab_size: int
    dtype: torch.dtype
    tokens: torch.Tensor
    """[most drafted tokens of a step] never moves"""
    store: DraftStore | None = field(init=False, default=None)
    """None: there was no memory for it"""

    def __post_init__(self) -> None:
        self._allocate(_FIRST_STORE_ROWS)

    @property
    def capacity(self) -> int:
        return self.store.logits.shape[0] if self.store is not None else 0

    def make_room(self, num_rows: int) -> None:
        """Move the store to where there is room for that many rows; whatever it held is lost."""
        capacity = max(num_rows, 2 * self.capacity)
        # The old one goes first: both at once would need half as much again.
        self.store = None
        self._allocate(capacity)

    def _allocate(self, capacity: int) -> None:
        self.store = DraftStore.allocate(capacity, self.vocab_size, self.dtype, self.tokens.device)
        self.store.tokens = self.tokens


class DeviceDrafter:
    """Queues the drafts of a `ModelDrafter` on its device.

    A step's first pass does not depend on how far the draft will go, so it is queued right behind the verdict of the
    step before, ahead of the host (`read_ahead`): while the host learns what stood, decides and prepares, the device
    already reads it and draws the first tokens. Whoever does not draft after all has lost nothing but that pass.
    """

    def __init__(self, host: ModelDrafter, table: SequenceTable, drafts: Drafts) -> None:
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

    def propose(
        self, sequences: list[Sequence], slots: IntArray, lengths: IntArray, begin: Callable[[], None]
    ) -> DeviceProposals:
        """Queue the draft; `begin` is called right before the device first hears of it."""
        ahead = self._take_ahead(sequences, lengths)
        share = self.host.share(sequences, np.where(ahead < 0, lengths, 0))
        rooms = self.model.config.max_position_embeddings + 1 - np.array([len(s.tokens) for s in sequences])
        lengths = np.where(ahead < 0, share.lengths, np.minimum(lengths, np.maximum(rooms, 0)))
        longest = int(lengths.max())
        rows = np.full((len(sequences), longest), -1, dtype=np.int64)
        if longest:
            rows[:, 0] = ahead
        num_rows = int(ahead.max()) + 1
        if len(share.order):
            num_drafting = int((share.lengths > 0).sum())
            batch = self._batch([sequences[i] for i in share.order.tolist()], slots[share.order], 0)
            step = self._read(batch, share.chunks[share.order], num_drafting, num_rows)
            begin()
            self.passes.run(*step)
            if longest:
                rows[share.order[:num_drafting], 0] = np.arange(num_rows, num_rows + num_drafting)
            num_rows += num_drafting
        order = np.argsort(-lengths, kind="stable")[: int((lengths > 0).sum())]
        if longest > 1:
            batch = self._batch([sequences[i] for i in order.tolist()], slots[order], longest)
        for depth in range(1, longest):
            active = order[: int((lengths > depth).sum())]
            step = self._extend(batch.first(len(active)), depth, rows[active, depth - 1], num_rows)
            begin()
            self.passes.run(*step)
            rows[active, depth] = np.arange(num_rows, num_rows + len(active))
            num_rows += len(active)
        self._settle(sequences, lengths, share, ahead)
        return DeviceProposals(lengths, rows, share.num_catch_up_tokens)

    def read_ahead(
        self,
        sequences: list[Sequence],
        slots: IntArray,
        lengths: IntArray,
        verdict: torch.Tensor,
        places: tuple[int, int],
    ) -> bool:
        """Queue the first pass of the next step's draft for those who draft in this one; False: there is nobody.

        `verdict` is where the device will find what stood (`places`: start and width of its emitted tokens), in the
        order of `sequences`.
        """
        longest = self.model.config.max_position_embeddings
        # Wherever the verdict ends, the newest token must have a block and a position.
        rooms = [min(longest, len(s.block_table) * BLOCK_SIZE) - len(s.tokens) for s in sequences]
        goes = np.flatnonzero((lengths > 0) & (lengths < rooms)).tolist()
        if not goes:
            return False
        if verdict.data_ptr() != self._verdict.data_ptr():
            self._verdict = verdict
            self.passes.forget()
        active = [sequences[i] for i in goes]
        batch = self._batch(active, slots[goes], int(lengths.max()) + 1)
        rows = RaggedRows(np.full(len(active), NUM_REREAD, dtype=np.int64))
        contexts = batch.num_tokens + lengths[goes] + 1
        counters = self.table.counters(active, batch.variant[0], num_steps_later=1)
        # Two sheets in turn: the device may not have read the last one yet, since nobody waited for it.
        self._ahead_turn = 1 - self._ahead_turn
        entry, sheet = self._step(rows, contexts, batch, False, 0, 0, counters, self._ahead_turn)
        host, count = sheet.arrays, len(active)
        host["logit_rows"][:count] = rows.starts + NUM_REREAD - 1
        host["judged"].fill(-1)
        host["judged"][:count] = goes
        host["num_tokens"][:count] = batch.num_tokens
        host["last_tokens"][:count] = [s.tokens[-1] for s in active]
        host["emitted_start"][0], host["emitted_width"][0] = places
        self.passes.run(entry, sheet)
        self._ahead = {sequence: row for row, sequence in enumerate(active)}
        return True

    def forget_ahead(self) -> None:
        """The next step will not follow on the last one."""
        self._ahead = {}

    def needs_room(self, num_drafted: int, num_seqs: int) -> bool:
        """Whether the store must move before a step with so many drafts."""
        # First tokens drawn ahead lie before the others, also those of sequences that have ended.
        return self.drafts.capacity < num_drafted + max(num_seqs, len(self._ahead))

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

    def _take_ahead(self, sequences: list[Sequence], lengths: IntArray) -> IntArray:
        """[sequences] store rows of first tokens that are there already; -1: none."""
        ahead, self._ahead = self._ahead, {}
        if not ahead:
            return np.full(len(sequences), -1, dtype=np.int64)
        rows = np.array([ahead.get(s, -1) for s in sequences], dtype=np.int64)
        return np.where(lengths > 0, rows, -1)

    def _settle(self, sequences: list[Sequence], lengths: IntArray, share: DraftShare, ahead: IntArray) -> None:
        """Note what the draft has read."""
        self.host.settle(sequences, share)
        for i in np.flatnonzero(ahead >= 0).tolist():
            sequences[i].num_draft_computed = len(sequences[i].tokens) + int(lengths[i]) - 1

    def _batch(self, active: list[Sequence], slots: IntArray, num_more: int) -> _Batch:
        num_tokens = np.array([len(s.tokens) for s in active], dtype=np.int64)
        variant = self.table.variant(slots)
        tables = self.table.tables(slots, -(-(int(num_tokens.max()) + num_more) // BLOCK_SIZE))
        return _Batch(active, slots, num_tokens, tables, self.table.counters(active, variant[0]), variant)

    def _read(self, batch: _Batch, chunks: IntArray, num_drafting: int, first_row: int) -> tuple[Pass, Sheet]:
        """Read what is new, and draw a first token for the first `num_drafting` sequences."""
        rows = RaggedRows(chunks)
        starts = np.array([s.num_draft_computed for s in batch.sequences], dtype=np.int64)
        entry, sheet = self._step(rows, starts + chunks, batch, rows.longest == 1, 0, first_row)
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

    def _extend(self, batch: _Batch, depth: int, sources: IntArray, first_row: int) -> tuple[Pass, Sheet]:
        """Read the tokens drafted last, which lie at `sources` in the store, and draw the next."""
        count = len(sources)
        rows = RaggedRows(np.ones(count, dtype=np.int64))
        entry, sheet = self._step(rows, batch.num_tokens + depth, batch, True, depth, first_row)
        sheet.arrays["sources"][:count] = sources
        return entry, sheet

    def _step(
        self,
        rows: RaggedRows,
        contexts: IntArray,
        batch: _Batch,
        takes_all_rows: bool,
        depth: int,
        first_row: int,
        counters: IntArray | None = None,
        ahead_turn: int | None = None,
    ) -> tuple[Pass, Sheet]:
        is_ahead = ahead_turn is not None
        num_rows = None if takes_all_rows else len(contexts)
        shape = self.passes.shape(rows, contexts, num_rows, variant=(*batch.variant, is_ahead))
        more = {**draw_sizes(shape.num_rows), "depth": 1, "first_row": 1}
        if is_ahead:
            more |= dict.fromkeys(("judged", "num_tokens", "last_tokens"), shape.num_seqs)
            more |= {"emitted_start": 1, "emitted_width": 1}
        entry, sheet = self.passes.prepare(shape, more, turn=depth if ahead_turn is None else ahead_turn)
        self.passes.write(shape, sheet, rows, contexts, batch.tables)
        self.table.write_draws(sheet, batch.slots, batch.counters if counters is None else counters)
        sheet.arrays["depth"][0] = depth
        sheet.arrays["first_row"][0] = first_row
        return entry, sheet

    def _body(self, entry: Pass) -> None:
        shape, arrays = entry.shape, entry.arrays
        *variant, is_ahead = shape.variant
        if is_ahead:
            advance(arrays, self._verdict, shape.table_width)
        hidden = self.model.read(entry.batch, self.host.cache)
        logits = self.model.logits(hidden, entry.batch.logit_rows, out=self._logits[: shape.num_rows])
        draws, store = draws_of(arrays), self.drafts.store
        assert store is not None
        sample_drafts(logits, draws, arrays["depth"], arrays["first_row"], store, *variant)


@dataclass(slots=True)
class _Batch:
    """Those who take part in a pass."""

    sequences: list[Sequence]
    slots: IntArray
    num_tokens: IntArray
    tables: NDArray[np.int32]
    counters: IntArray
    variant: tuple[bool, bool]

    def first(self, count: int) -> _Batch:
        if count == len(self.sequences):
            return self
        return _Batch(
            self.sequences[:count],
            self.slots[:count],
            self.num_tokens[:count],
            self.tables[:count],
            self.counters[:count],
            self.variant,
        )


def draws_of(arrays: dict[str, torch.Tensor]) -> Draws:
    return Draws(**{name: arrays[name].view(-1, 2) if name == "seeds" else arrays[name] for name in DRAW_FIELDS})
