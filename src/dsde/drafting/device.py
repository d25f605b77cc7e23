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
from dsde.drafting.model import ModelDrafter
from dsde.drafting.sequence_table import DRAW_FIELDS, Mode, SequenceTable, draw_sizes
from dsde.models.batch import BLOCK_SIZE
from dsde.models.passes import Pass, PassRunner, RaggedRows, bucket
from dsde.models.staging import Sheet
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

    @property
    def num_drafted(self) -> int:
        return int(self.lengths.sum())


@dataclass(slots=True)
class Drafts:
    """The draft store, which grows with the number of tokens drafted in a step."""

    vocab_size: int
    dtype: torch.dtype
    tokens: torch.Tensor
    """[most drafted tokens of a step] never moves"""
    store: DraftStore = field(init=False)

    def __post_init__(self) -> None:
        self._allocate(_FIRST_STORE_ROWS)

    def make_room(self, num_rows: int) -> bool:
        """Whether the store had to move."""
        capacity = self.store.logits.shape[0]
        if num_rows <= capacity:
            return False
        self._allocate(max(num_rows, 2 * capacity))
        return True

    def _allocate(self, capacity: int) -> None:
        self.store = DraftStore.allocate(capacity, self.vocab_size, self.dtype, self.tokens.device)
        self.store.tokens = self.tokens


class DeviceDrafter:
    """Queues the drafts of a `ModelDrafter` on its device."""

    def __init__(self, host: ModelDrafter, table: SequenceTable, drafts: Drafts) -> None:
        self.host = host
        self.model = host.model
        self.table = table
        self.drafts = drafts
        self.passes = PassRunner(host.model.heads, drafts.tokens, self._body)
        self._logits = torch.empty(0)

    def propose(
        self, sequences: list[Sequence], slots: IntArray, lengths: IntArray, begin: Callable[[], None]
    ) -> DeviceProposals:
        """Queue the draft; `begin` is called right before the device first hears of it."""
        share = self.host.share(sequences, lengths)
        lengths, chunks, order = share.lengths, share.chunks, share.order
        if len(order) == 0:
            return DeviceProposals.nothing(len(sequences))
        longest = int(lengths.max())
        active = [sequences[i] for i in order.tolist()]
        num_tokens = np.array([len(s.tokens) for s in active], dtype=np.int64)
        counts = (lengths[:, None] > np.arange(longest)).sum(0)
        firsts = np.concatenate(([0], np.cumsum(counts)))
        batch = self._batch(active, slots[order], int(num_tokens.max()) + longest)
        first = self._read(active, chunks[order], num_tokens, batch, int(counts[0]) if longest else 0)
        begin()
        self.passes.run(*first)
        # The device is at work: what follows is prepared while it is.
        for depth in range(1, longest):
            contexts = num_tokens[: int(counts[depth])] + depth
            self.passes.run(*self._extend(contexts, batch, depth, int(firsts[depth - 1]), int(firsts[depth])))
        rows = np.full((len(sequences), longest), -1, dtype=np.int64)
        for depth in range(longest):
            rows[order[: counts[depth]], depth] = firsts[depth] + np.arange(counts[depth])
        self.host.settle(sequences, share)
        return DeviceProposals(lengths, rows, share.num_catch_up_tokens)

    def _batch(self, active: list[Sequence], slots: IntArray, longest_context: int) -> _Batch:
        variant = self.table.variant(slots)
        tables = self.table.tables(slots, -(-longest_context // BLOCK_SIZE))
        return _Batch(slots, tables, self.table.counters(active, variant[0]), variant)

    def make_room(self, num_drafted: int, num_seqs: int) -> None:
        """Before a step whose drafts may be so many: graphs point to where they are kept."""
        moved = self.drafts.make_room(num_drafted)
        if self._logits.shape[0] < bucket(num_seqs):
            # Shared by all graphs, which never run at the same time: a copy for each would be gigabytes.
            size = (max(bucket(num_seqs), 2 * self._logits.shape[0]), self.model.config.vocab_size)
            self._logits = torch.empty(size, dtype=self.model.dtype, device=self.model.device)
            moved = True
        if moved:
            self.passes.forget()

    def _read(
        self, active: list[Sequence], chunks: IntArray, num_tokens: IntArray, batch: _Batch, num_drafting: int
    ) -> tuple[Pass, Sheet]:
        """Read what is new, and draw a first token for the first `num_drafting` sequences."""
        rows = RaggedRows(chunks)
        starts = np.array([s.num_draft_computed for s in active], dtype=np.int64)
        entry, sheet = self._step(rows, starts + chunks, batch, rows.longest == 1, 0, 0)
        host = sheet.arrays
        if rows.longest == 1:
            host["tokens"][: rows.count] = [s.tokens[s.num_draft_computed] for s in active]
        else:
            places = zip(active, rows.starts.tolist(), chunks.tolist(), strict=True)
            for sequence, place, chunk in places:
                start = sequence.num_draft_computed
                host["tokens"][place : place + chunk] = sequence.tokens[start : start + chunk]
            host["logit_rows"][: len(active)] = rows.starts + chunks - 1
        if num_drafting < len(active):
            host["modes"][num_drafting:] = Mode.PADDING
            sheet.written.pop("draws")
        return entry, sheet

    def _extend(
        self, contexts: IntArray, batch: _Batch, depth: int, source: int, first_row: int
    ) -> tuple[Pass, Sheet]:
        """Read the tokens drafted last, which begin at `source` in the store, and draw the next."""
        count = len(contexts)
        rows = RaggedRows(np.ones_like(contexts))
        entry, sheet = self._step(rows, contexts, batch.first(count), True, depth, first_row)
        sheet.arrays["sources"][:count] = np.arange(source, source + count)
        return entry, sheet

    def _step(
        self, rows: RaggedRows, contexts: IntArray, batch: _Batch, takes_all_rows: bool, depth: int, first_row: int
    ) -> tuple[Pass, Sheet]:
        num_rows = None if takes_all_rows else len(contexts)
        shape = self.passes.shape(rows, contexts, num_rows, variant=batch.variant)
        more = {**draw_sizes(shape.num_rows), "depth": 1, "first_row": 1}
        entry, sheet = self.passes.prepare(shape, more, turn=depth)
        self.passes.write(shape, sheet, rows, contexts, batch.tables)
        self.table.write_draws(sheet, batch.slots, batch.counters)
        sheet.arrays["depth"][0] = depth
        sheet.arrays["first_row"][0] = first_row
        return entry, sheet

    def _body(self, entry: Pass) -> None:
        shape, arrays = entry.shape, entry.arrays
        hidden = self.model.read(entry.batch, self.host.cache)
        logits = self.model.logits(hidden, entry.batch.logit_rows, out=self._logits[: shape.num_rows])
        draws, store = draws_of(arrays), self.drafts.store
        sample_drafts(logits, draws, arrays["depth"], arrays["first_row"], store, *shape.variant)


@dataclass(slots=True)
class _Batch:
    """Those who draft in a step, the farthest first."""

    slots: IntArray
    tables: NDArray[np.int32]
    counters: IntArray
    variant: tuple[bool, bool]

    def first(self, count: int) -> _Batch:
        return _Batch(self.slots[:count], self.tables[:count], self.counters[:count], self.variant)


def draws_of(arrays: dict[str, torch.Tensor]) -> Draws:
    return Draws(**{name: arrays[name].view(-1, 2) if name == "seeds" else arrays[name] for name in DRAW_FIELDS})
