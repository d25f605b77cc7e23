"""Runs a model over batches on a device, through CUDA graphs where a batch is small enough for launches to matter.

A graph is captured for a bucket of tokens and sequences and serves every mixture of lengths in it: what differs from
step to step is read from the device's own memory, and what a bucket has too many is padding that every kernel skips.
Captured at its second use, so that a shape seen once costs nothing; and where a larger one has been captured that does
as well, only if it is met time and again. A pass can be begun before it is known whether it
is wanted: its first part is then a graph of its own. Knows nothing of drafts, sampling or requests: what is computed is
the caller's body.
"""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any
from weakref import WeakMethod

import numpy as np
import torch
from numpy.typing import NDArray

from dsde.device.program import Work
from dsde.device.staging import Layout, Sheet
from dsde.models.batch import BLOCK_SIZE, Heads, PackedBatch
from dsde.models.buckets import MOST_GRAPH_TOKENS, bucket, context_bucket, power_of_2, ragged_bucket
from dsde.models.kernels import attention

IntArray = NDArray[np.int64]

_BLOCK_BITS = BLOCK_SIZE.bit_length() - 1
_IN_BLOCK = BLOCK_SIZE - 1

_MOST_SHAPES = 8192
"""that need not be worked out again"""
MOST_GRAPHS = 512
"""of one model: enough for any traffic that lasts, and a bound to memory for one that never repeats itself"""
MOST_PADDING = 2
"""times the tokens of a pass, that a larger graph may have which is there already"""
MOST_PADDED = 16
"""passes that such a graph does for one of the right size, before that is captured: to do so takes as long as tens of
passes, and padding up to a third of each"""

_NOBODY = frozenset(
    {"slots", "sources", "items", "modes", "judged", "places", "first_places", "row_sequences", "row_drafts", "ends"}
)
"""arrays in which -1 means that there is nothing to do"""


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A collection that happened to free another engine's graphs would break a capture."""
    was_collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_collecting:
            gc.enable()


class RaggedRows:
    """Rows of several sequences, end to end."""

    __slots__ = ("count", "lengths", "longest", "offsets", "owners", "starts")

    starts: IntArray
    """[sequences] the first row of each"""
    owners: IntArray
    """[rows] the sequence of each"""
    offsets: IntArray
    """[rows] place of each within its sequence"""

    def __init__(self, lengths: IntArray) -> None:
        self.lengths = lengths
        self.longest = int(lengths.max())
        num_seqs = len(lengths)
        if self.longest == 1 and int(lengths.min()) == 1:
            self.count = num_seqs
            self.starts = self.owners = np.arange(num_seqs)
            self.offsets = np.zeros(num_seqs, dtype=np.int64)
            return
        ends = np.cumsum(lengths)
        self.count = int(ends[-1])
        self.starts = ends - lengths
        self.owners = np.repeat(np.arange(num_seqs), lengths)
        self.offsets = np.arange(self.count) - self.starts[self.owners]


def ragged_rows(lengths: IntArray) -> RaggedRows:
    """Those of sequences of these lengths, which are often those of another step."""
    return _known_rows(lengths.tobytes())


@lru_cache(maxsize=256)
def _known_rows(lengths: bytes) -> RaggedRows:
    return RaggedRows(np.frombuffer(lengths, np.int64))


@dataclass(frozen=True, slots=True)
class PassShape:
    """All that a captured graph has fixed."""

    num_tokens: int
    num_seqs: int
    num_rows: int
    """rows of logits"""
    takes_all_rows: bool
    """every token's logits, in order"""
    table_width: int
    """blocks that a sequence has room for"""
    queries_per_item: int
    num_items: int
    num_splits: int
    is_graph: bool
    in_parts: bool = False
    """its first layers are queued by themselves, and so on: the host needs as long to start a pass as the device for
    several layers, for which a device that waits would wait"""
    variant: tuple[Any, ...] = ()
    """whatever else the body was compiled for"""

    def serves(self, other: PassShape) -> bool:
        """Whether a pass of this shape does what is asked of the other one, with more padding."""
        return (
            (self.takes_all_rows, self.is_graph, self.in_parts, self.variant)
            == (other.takes_all_rows, other.is_graph, other.in_parts, other.variant)
            and other.num_tokens <= self.num_tokens <= MOST_PADDING * other.num_tokens
            and other.num_seqs <= self.num_seqs
            and other.num_rows <= self.num_rows
            and other.table_width <= self.table_width
        )


@dataclass(slots=True)
class Pass:
    """A shape's memory on the device, which stays where it is as long as a graph points to it."""

    shape: PassShape
    layout: Layout
    words: torch.Tensor
    arrays: dict[str, torch.Tensor]
    batch: PackedBatch
    sheets: dict[int, Sheet] = field(default_factory=dict)
    """the host's side, by the turns at which the pass comes up in a step"""
    num_runs: int = 0
    graph: torch.cuda.CUDAGraph | None = None
    parts: list[torch.cuda.CUDAGraph] = field(default_factory=list)
    """instead of it, of a pass in parts"""
    underway: Generator[None, None, Any] | None = None
    """of a pass that has been begun and is not captured"""
    result: Any = None

    @property
    def is_captured(self) -> bool:
        return self.graph is not None or bool(self.parts)


@dataclass(slots=True)
class _StandIn:
    """A captured shape for another."""

    shape: PassShape
    num_captured: int
    """graphs, when it was the smallest that would do"""
    num_passes: int
    """it was wanted for"""


Body = Callable[[Pass], Generator[None, None, Any]]


class PassRunner:
    """One model's passes. `body` is called with the pass, and what it returns is handed on; in a graph it must do the
    same work whatever the arrays hold. It yields where a pass in parts may be parted."""

    def __init__(self, heads: Heads, drafted: torch.Tensor, body: Body) -> None:
        self.device = drafted.device
        self.heads = heads
        self.drafted = drafted
        """tokens that only the device knows; `sources` point into it"""
        # Weakly: its owner holds this runner, and a cycle would keep all memory until a garbage collection.
        self._body = WeakMethod(body)
        self.num_captured = 0
        self.num_forgotten = 0
        """times that all graphs were dropped"""
        self.num_cold = 0
        """passes that were not replayed although their size has graphs: some ten times as slow as those that are"""
        self.num_padded = 0
        """times that a larger shape was handed out than the one asked for"""
        self._shapes: dict[tuple[Any, ...], PassShape] = {}
        """of graphs, by all that they follow from"""
        self._passes: OrderedDict[PassShape, Pass] = OrderedDict()
        """those used last at the end"""
        self.makes_do = True
        """whether a larger graph serves where the right one has not been captured"""
        self._stand_ins: dict[PassShape, _StandIn] = {}
        self._pool: Any = None
        self._first_graph: torch.cuda.CUDAGraph | None = None
        """of the pool, which is gone with its last"""
        self._stream: torch.cuda.Stream | None = None

    @property
    def body(self) -> Body:
        body = self._body()
        assert body is not None, "a runner does not outlive its owner"
        return body

    def forget(self) -> None:
        """Drop all graphs: something they point to has moved."""
        self._passes.clear()
        self._stand_ins.clear()
        self._pool = self._first_graph = None
        self.num_forgotten += 1

    def shape(
        self,
        rows: RaggedRows,
        contexts: IntArray,
        num_rows: int | None,
        may_graph: bool = True,
        in_parts: bool = False,
        pad: Callable[[int], int] | None = None,
        variant: tuple[Any, ...] = (),
    ) -> PassShape:
        """The bucket for sequences of these lengths, or where that changes from step to step a larger one that is
        captured. `num_rows` None: all rows have logits; `pad`: to which size, where sizes are different every time, and
        padding is cheaper than graphs for all of them."""
        is_graph = may_graph and rows.count <= MOST_GRAPH_TOKENS and self.device.type == "cuda"
        context = context_bucket(int(contexts.max()))
        # A device may be waiting for the pass, and mostly it is like one before. Without a graph lengths matter, too.
        key = (rows.count, rows.longest, len(contexts), num_rows, context, in_parts, pad, variant)
        changes = rows.longest > 1 or in_parts
        if is_graph and key in self._shapes:
            return self._at_hand(self._shapes[key]) if changes else self._shapes[key]
        shape = self._make_shape(rows, len(contexts), num_rows, context, is_graph, in_parts, pad, variant)
        if not is_graph:
            return shape
        if len(self._shapes) >= _MOST_SHAPES:
            self._shapes.clear()
            self._stand_ins.clear()
        self._shapes[key] = shape
        return self._at_hand(shape) if changes else shape

    def shape_of(
        self,
        num_tokens: int,
        num_seqs: int,
        longest: int,
        context: int,
        takes_all_rows: bool,
        variant: tuple[Any, ...],
        num_items: int | None = None,
    ) -> PassShape:
        """That of a pass for exactly so many tokens and sequences, of about `longest` tokens each; with logits of all
        or of the last ones. `num_items` None: as many as are needed whatever the lengths are."""
        heads = self.heads
        per_item = attention.queries_per_item(longest, heads.per_kv, heads.head_dim, heads.dtype)
        if num_items is None:
            num_items = attention.num_items_bound(num_tokens, num_seqs, per_item)
        room = context_bucket(context)
        return PassShape(
            num_tokens=num_tokens,
            num_seqs=num_seqs,
            num_rows=num_tokens if takes_all_rows else num_seqs,
            takes_all_rows=takes_all_rows,
            table_width=room // BLOCK_SIZE,
            queries_per_item=per_item,
            num_items=num_items,
            num_splits=heads.num_splits(num_seqs if longest <= per_item else num_items, room, longest, self.device),
            is_graph=self.device.type == "cuda",
            variant=variant,
        )

    def _is_captured(self, shape: PassShape) -> bool:
        entry = self._passes.get(shape)
        return entry is not None and entry.is_captured

    def _at_hand(self, shape: PassShape) -> PassShape:
        """That of a graph, or as long as there is none that of a larger one, if there is such."""
        if not self.makes_do or self._is_captured(shape):
            return shape
        stand_in = self._stand_ins.get(shape)
        if stand_in is None or stand_in.num_captured < self.num_captured or not self._is_captured(stand_in.shape):
            serving = [known for known in self._passes if self._is_captured(known) and known.serves(shape)]
            if not serving:
                return shape
            best = min(serving, key=lambda each: (each.num_tokens, each.table_width, each.num_seqs, each.num_rows))
            num_passes = 0 if stand_in is None else stand_in.num_passes
            stand_in = self._stand_ins[shape] = _StandIn(best, self.num_captured, num_passes)
        if stand_in.num_passes >= MOST_PADDED:
            return shape
        stand_in.num_passes += 1
        self.num_padded += 1
        return stand_in.shape

    def _make_shape(
        self,
        rows: RaggedRows,
        num_seqs: int,
        num_rows: int | None,
        context: int,
        is_graph: bool,
        in_parts: bool,
        pad: Callable[[int], int] | None,
        variant: tuple[Any, ...],
    ) -> PassShape:
        num_tokens, longest, num_items = rows.count, rows.longest, None
        if is_graph and longest == 1:
            num_tokens = num_seqs = (pad or bucket)(num_seqs)
        elif is_graph:
            # Sequences cost next to nothing here: fewer graphs. As many tokens of as many sequences always fit.
            num_tokens = (pad or ragged_bucket)(num_tokens)
            num_seqs = min(power_of_2(num_seqs), num_tokens)
            if in_parts:
                # Drafts end anywhere, and graphs for every length would be met while somebody waits: it is made for the
                # mean, and who has more takes several items.
                longest = -(-num_tokens // num_seqs)
        else:
            heads = self.heads
            per_item = attention.queries_per_item(longest, heads.per_kv, heads.head_dim, heads.dtype)
            num_items = int((-(-rows.lengths // per_item)).sum())
        shape = self.shape_of(num_tokens, num_seqs, longest, context, num_rows is None, variant, num_items)
        padded_rows = shape.num_rows
        if num_rows is not None and (num_rows > num_seqs or not is_graph):
            # Mostly the last of every sequence; more where drafts are verified while prompts are read.
            padded_rows = bucket(num_rows) if is_graph else num_rows
        return replace(shape, num_rows=padded_rows, is_graph=is_graph, in_parts=in_parts)

    def prepare(self, shape: PassShape, more: Callable[[], dict[str, int]], turn: int = 0) -> tuple[Pass, Sheet]:
        """The pass and a sheet to write; `more` names arrays of the body's own, of a pass that is new. One that a step
        does several times needs a sheet for each turn, since the device may not have read the last one yet."""
        entry = self._passes.get(shape)
        if entry is None:
            entry = self._make(shape, more())
            if shape.is_graph:
                self._passes[shape] = entry
                if len(self._passes) > MOST_GRAPHS:
                    self._passes.popitem(last=False)
        elif shape.is_graph:
            self._passes.move_to_end(shape)
        sheet = entry.sheets.get(turn)
        if sheet is None:
            sheet = entry.sheets[turn] = Sheet.blank(entry.layout, pinned=self.device.type == "cuda")
        return entry, sheet

    def _make(self, shape: PassShape, more: dict[str, int]) -> Pass:
        layout = layout_of(shape, more)
        return self.over(shape, layout, torch.empty(layout.num_words, dtype=torch.int32, device=self.device))

    def over(self, shape: PassShape, layout: Layout, words: torch.Tensor) -> Pass:
        """A pass whose memory is the caller's."""
        return self._over(shape, layout, words, layout.views(words))

    def smaller(self, entry: Pass, shape: PassShape, sizes: dict[str, int]) -> Pass:
        """A pass of another shape over the beginnings of the same arrays; `sizes` of the body's own that are shorter,
        too. It is done within a program alone."""
        kept = {name: array[: sizes.get(name, len(array))] for name, array in entry.arrays.items()}
        return self._over(
            shape, entry.layout, entry.words, {**kept, **{n: kept[n][:size] for n, size in _sizes(shape).items()}}
        )

    def _over(self, shape: PassShape, layout: Layout, words: torch.Tensor, arrays: dict[str, torch.Tensor]) -> Pass:
        work = attention.AttentionWork(
            starts=arrays["starts"],
            contexts=arrays["contexts"],
            tables=arrays["tables"],
            table_offsets=arrays["table_offsets"],
            items=arrays["items"].view(-1, 2),
            queries_per_item=shape.queries_per_item,
            num_splits=shape.num_splits,
            # Written before the embedding, whose kernel lets none after it begin before all ahead of it have ended.
            settled=True,
        )
        batch = PackedBatch(
            tokens=arrays["tokens"],
            positions=arrays["positions"],
            slots=arrays["slots"],
            logit_rows=None if shape.takes_all_rows else arrays["logit_rows"],
            work=work,
            sources=arrays["sources"],
            drafted=self.drafted,
        )
        return Pass(shape, layout, words, arrays, batch)

    def write(
        self, shape: PassShape, sheet: Sheet, rows: RaggedRows, contexts: IntArray, tables: NDArray[np.int32]
    ) -> None:
        """Everything about the batch but its tokens and logit rows. `tables` [sequences, at least enough blocks]."""
        host = sheet.arrays
        num_seqs, num_tokens = len(contexts), rows.count
        if sheet.is_new("rows", rows.lengths):
            self.write_rows(shape, host, rows)
        firsts = contexts - rows.lengths
        positions = firsts[rows.owners] + rows.offsets
        host["positions"][:num_tokens] = positions
        blocks = tables[rows.owners, positions >> _BLOCK_BITS]
        host["slots"][:num_tokens] = blocks * BLOCK_SIZE + (positions & _IN_BLOCK)
        host["contexts"][:num_seqs] = contexts
        width = min(shape.table_width, tables.shape[1])
        host["tables"].reshape(-1, shape.table_width)[:num_seqs, :width] = tables[:, :width]

    def write_rows(self, shape: PassShape, host: dict[str, NDArray[np.int32]], rows: RaggedRows) -> None:
        """What depends on the lengths alone."""
        num_seqs, num_tokens = len(rows.lengths), rows.count
        host["slots"][num_tokens:] = -1
        host["sources"].fill(-1)
        host["starts"][:num_seqs] = rows.starts
        host["starts"][num_seqs:] = num_tokens
        host["contexts"][num_seqs:] = 0
        host["table_offsets"][:] = np.arange(shape.num_seqs) * shape.table_width
        items = attention.make_items(rows.lengths, shape.queries_per_item)
        host["items"][: items.size] = items.ravel()
        host["items"][items.size :] = -1

    def run(self, entry: Pass, sheet: Sheet) -> Any:
        """Do the pass now, or rather as soon as the device gets to it."""
        self.load(entry, sheet)
        return self.start(entry)

    def load(self, entry: Pass, sheet: Sheet) -> None:
        entry.words.copy_(sheet.words, non_blocking=True)

    def start(self, entry: Pass) -> Any:
        """Do a pass that has been loaded."""
        if entry.shape.in_parts:
            self.begin(entry)
            return self.finish(entry)
        if not self._replays(entry):
            return rest_of(self.body(entry))
        if entry.graph is None:
            self._capture(entry)
        return self.repeat(entry)

    def begin(self, entry: Pass) -> None:
        """Do the first part of a pass in parts that has been loaded."""
        if not self._replays(entry):
            entry.underway = self.body(entry)
            next(entry.underway)
            return
        if not entry.parts:
            self._capture_parts(entry)
        entry.parts[0].replay()

    def _replays(self, entry: Pass) -> bool:
        """Count the pass. The first time it does without a graph: kernels are compiled, and the shape may never come
        again."""
        entry.num_runs += 1
        self.num_cold += entry.shape.is_graph and not entry.is_captured
        return entry.shape.is_graph and entry.num_runs > 1

    def finish(self, entry: Pass) -> Any:
        """Do the rest of a pass that was begun last of all passes."""
        if entry.parts:
            for part in entry.parts[1:]:
                part.replay()
            return entry.result
        body, entry.underway = entry.underway, None
        assert body is not None, "a pass is begun before it is finished"
        return rest_of(body)

    def abandon(self, entry: Pass) -> None:
        """A pass that was begun is not wanted."""
        # What is left of it holds the body's owner, which would not be gone before a garbage collection.
        entry.underway = None

    def work_of(self, entry: Pass) -> Work:
        """The pass as a part of a program, whatever its arrays will hold then. Leaves them as those of nobody."""
        self._do_for_nobody(entry)
        return self.work(lambda: _keep(entry, rest_of(self.body(entry))))

    def _do_for_nobody(self, entry: Pass) -> None:
        """As at a first time: with nothing to do, kernels are compiled."""
        blank = Sheet.blank(entry.layout, pinned=False)
        for name in _NOBODY & blank.arrays.keys():
            blank.arrays[name].fill(-1)
        self.load(entry, blank)
        _keep(entry, rest_of(self.body(entry)))
        self.num_cold += 1

    def rehearse(self, shape: PassShape, more: dict[str, int]) -> None:
        """Have it captured before anybody needs it. Nothing may be under way."""
        entry, _ = self.prepare(shape, lambda: more)
        if not shape.is_graph or entry.is_captured:
            return
        self._do_for_nobody(entry)
        (self._capture_parts if shape.in_parts else self._capture)(entry)
        entry.num_runs = max(entry.num_runs, 1)

    def work(self, do: Callable[[], None]) -> Work:
        """Anything that has been done before, for a program."""
        return self._graph_of(do, keep=True) if self.device.type == "cuda" else _Played(do)

    def can_repeat(self, entry: Pass) -> bool:
        """Whether a pass is done again at no more than the device's own cost."""
        return entry.graph is not None or self.device.type != "cuda"

    def repeat(self, entry: Pass) -> Any:
        """Do the pass again with whatever its arrays hold by now."""
        if entry.graph is None:
            return rest_of(self.body(entry))
        entry.graph.replay()
        return entry.result

    def _capture(self, entry: Pass) -> None:
        body = self.body(entry)
        entry.graph = self._graph_of(lambda: _keep(entry, rest_of(body)))

    def _capture_parts(self, entry: Pass) -> None:
        body = self.body(entry)
        parts: list[torch.cuda.CUDAGraph] = []
        is_over = False

        def go_on() -> None:
            nonlocal is_over
            try:
                next(body)
            except StopIteration as end:
                entry.result, is_over = end.value, True

        while not is_over:
            parts.append(self._graph_of(go_on))
        entry.parts = parts  # all of them or none

    def _graph_of(self, work: Callable[[], None], keep: bool = False) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph(keep_graph=True) if keep else torch.cuda.CUDAGraph()
        if self._stream is None:
            # Always the same: memory of the pool is used again only on the stream it was first used on.
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # Without the collection of garbage that torch.cuda.graph() begins with: it takes longer than the capture.
            if self._pool is None:
                pool, first = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
                _capture_into(first, pool, lambda: torch.zeros(1, device=self.device))
                self._pool, self._first_graph = pool, first
            _capture_into(graph, self._pool, work)
        torch.cuda.current_stream().wait_stream(stream)
        self.num_captured += 1
        return graph


def _capture_into(graph: torch.cuda.CUDAGraph, pool: Any, work: Callable[[], object]) -> None:
    with _no_garbage_collection():
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            work()
        except BaseException:
            with suppress(RuntimeError):  # the first error says why
                graph.capture_end()
            raise
        graph.capture_end()


class _Played:
    """Work where there are no graphs."""

    def __init__(self, do: Callable[[], None]) -> None:
        self.replay = do

    def raw_cuda_graph(self) -> int:
        raise NotImplementedError("there are no graphs here")


def layout_of(shape: PassShape, more: dict[str, int]) -> Layout:
    """Of a pass's memory; `more` are arrays of the body's own."""
    return Layout({**_sizes(shape), **more})


def _sizes(shape: PassShape) -> dict[str, int]:
    """Of the arrays that every pass has."""
    return {
        "tokens": shape.num_tokens,
        "sources": shape.num_tokens,
        "positions": shape.num_tokens,
        "slots": shape.num_tokens,
        "starts": shape.num_seqs + 1,
        "contexts": shape.num_seqs,
        "table_offsets": shape.num_seqs,
        "tables": shape.num_seqs * shape.table_width,
        "items": 2 * shape.num_items,
        "logit_rows": 0 if shape.takes_all_rows else shape.num_rows,
    }


def rest_of(body: Generator[None, None, Any]) -> Any:
    """Go through with it; what it returns."""
    while True:
        try:
            next(body)
        except StopIteration as end:
            return end.value


def _keep(entry: Pass, result: Any) -> None:
    entry.result = result
