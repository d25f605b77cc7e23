"""Passes by themselves: what is left of one that was begun. Whole steps are in test_device_engine.py."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dsde.models.batch import Heads
from dsde.models.buckets import (
    MOST_GRAPH_TOKENS,
    bucket,
    coarse_bucket,
    context_bucket,
    power_of_2,
    ragged_bucket,
    reading_bucket,
)
from dsde.models.kernels import attention
from dsde.models.passes import MOST_PADDED, MOST_PADDING, Pass, PassRunner, PassShape, RaggedRows

SHAPE = PassShape(1, 1, 1, True, 8, 1, 1, 1, is_graph=True)


class Owner:
    def __init__(self) -> None:
        self.done: list[str] = []
        self.num_more_parts = 0
        self.passes = PassRunner(Heads(1, 1, 16, torch.float32), torch.zeros(1, dtype=torch.int32), self._body)
        self.entry = Pass(SHAPE, None, None, {}, None)  # type: ignore[arg-type]
        self.passes._passes[SHAPE] = self.entry

    def _body(self, entry: Pass) -> Generator[None, None, str]:
        self.done.append("first part")
        for number in range(self.num_more_parts):
            yield
            self.done.append(f"part {number}")
        yield
        self.done.append("rest")
        return "result"


@pytest.fixture
def without_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def test_a_pass_in_parts_is_queued_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured at its second run, as many graphs as parts; whoever wants all of it need not know."""
    owner = Owner()
    owner.num_more_parts = 1
    shape = replace(SHAPE, in_parts=True)
    owner.entry = owner.passes._passes[shape] = Pass(shape, None, None, {}, None)  # type: ignore[arg-type]

    def graph_of(work: Callable[[], None]) -> object:
        before = len(owner.done)
        work()
        done = owner.done[before:]
        return SimpleNamespace(replay=lambda: owner.done.extend(done))

    monkeypatch.setattr(owner.passes, "_graph_of", graph_of)
    assert owner.passes.start(owner.entry) == "result"
    assert not owner.entry.is_captured
    owner.passes.begin(owner.entry)
    assert len(owner.entry.parts) == 3
    owner.done.clear()
    owner.passes.begin(owner.entry)
    assert owner.done == ["first part"]
    assert owner.passes.finish(owner.entry) == "result"
    assert owner.passes.start(owner.entry) == "result"
    assert owner.done == 2 * ["first part", "part 0", "rest"]
    assert owner.passes.num_cold == 2
    assert owner.entry.graph is None


def test_a_pass_in_two_parts() -> None:
    owner = Owner()
    owner.passes.begin(owner.entry)
    assert owner.done == ["first part"]
    assert owner.passes.finish(owner.entry) == "result"
    assert owner.done == ["first part", "rest"]
    assert owner.passes.num_cold == 1


@pytest.mark.parametrize("is_wanted", [True, False])
def test_a_pass_that_was_begun_holds_nobody(without_collection: None, is_wanted: bool) -> None:
    """Caches and graphs of an engine that nobody has any more are gigabytes that the next one needs."""
    owner = Owner()
    owner.passes.begin(owner.entry)
    if is_wanted:
        owner.passes.finish(owner.entry)
    else:
        owner.passes.abandon(owner.entry)
    gone = weakref.ref(owner)
    del owner
    assert gone() is None


def test_buckets() -> None:
    for count in range(1, MOST_GRAPH_TOKENS + 1):
        size = bucket(count)
        assert count <= size <= MOST_GRAPH_TOKENS
        assert size <= 4 / 3 * count or count == 1
        assert count <= 16 or size < 1.25 * count


def test_sums_of_different_lengths_have_fewer_buckets_in_the_middle() -> None:
    sizes = {ragged_bucket(count) for count in range(1, 129)}
    assert sizes == {1, 2, 3, 4, 6, 8, 16, 32, 64, 80, 96, 112, 128}
    assert all(count <= ragged_bucket(count) < 2 * count or count == 1 for count in range(1, MOST_GRAPH_TOKENS + 1))


def test_sizes_that_are_different_every_time_have_few_buckets() -> None:
    sizes = {coarse_bucket(count) for count in range(1, 129)}
    assert sizes == {1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128}
    for count in range(1, MOST_GRAPH_TOKENS + 1):
        assert count <= coarse_bucket(count) <= power_of_2(count)
        assert coarse_bucket(count) < 1.5 * count or count < 8


def test_what_is_read_now_and_then_has_hardly_any() -> None:
    assert {reading_bucket(count) for count in range(1, MOST_GRAPH_TOKENS + 1)} == {1, 4, 16, 64, 256, 512, 1024}
    assert all(count <= reading_bucket(count) < max(4 * count, 2) for count in range(1, MOST_GRAPH_TOKENS + 1))


@pytest.mark.parametrize("num_tokens", [1, 2048, 2049, 8192, 8193, 100_000])
def test_context_buckets(num_tokens: int) -> None:
    room = context_bucket(num_tokens)
    assert num_tokens <= room <= max(2048, 4 * num_tokens)
    assert num_tokens <= 8192 or room < 2 * num_tokens
    assert context_bucket(room) == room


def test_a_shape_that_was_worked_out_before_is_that_of_a_batch_like_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """And of no other: it is what a runner says that has not met any."""
    monkeypatch.setattr(Heads, "num_splits", lambda _, num_items, context, longest, device: num_items + context)

    def runner() -> PassRunner:
        passes = owners[-1].passes
        passes.device = SimpleNamespace(type="cuda")  # type: ignore[assignment]
        passes.heads = Heads(8, 1, 64, torch.bfloat16)  # of which an item covers few queries, or more
        return passes

    owners = [Owner()]
    known = runner()
    batches = [([1, 1, 6], 40), ([2, 3, 3], 40), ([2, 3, 3], 5000), ([4, 4], 40), ([1, 1, 1], 40), ([8], 40)]
    kinds = [(None, None, False), (None, coarse_bucket, False), (None, coarse_bucket, True), (2, None, False)]
    for (lengths, context), (num_rows, pad, in_parts) in itertools.product(batches, kinds):
        rows, contexts = RaggedRows(np.array(lengths)), np.full(len(lengths), context)
        owners.append(Owner())
        shape = known.shape(rows, contexts, num_rows, True, in_parts, pad)
        assert shape == runner().shape(rows, contexts, num_rows, True, in_parts, pad)
        assert shape is known.shape(rows, contexts, num_rows, True, in_parts, pad)


# Larger graphs for what has not been captured


def on_a_device(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> PassRunner:
    monkeypatch.setattr(Heads, "num_splits", lambda *_: 1)
    owner.passes.device = SimpleNamespace(type="cuda")  # type: ignore[assignment]
    owner.passes.heads = Heads(8, 1, 64, torch.bfloat16)
    owner.passes._passes.clear()
    return owner.passes


def shape_of(runner: PassRunner, lengths: list[int], context: int = 40, **kind: object) -> PassShape:
    rows = RaggedRows(np.array(lengths))
    return runner.shape(rows, np.full(len(lengths), context), None, **kind)  # type: ignore[arg-type]


def capture(runner: PassRunner, lengths: list[int], context: int = 40, **kind: object) -> PassShape:
    """As if it had been met twice."""
    runner.makes_do = False
    shape = shape_of(runner, lengths, context, **kind)
    runner.makes_do = True
    entry = runner._passes[shape] = Pass(shape, None, None, {}, None)  # type: ignore[arg-type]
    entry.graph = SimpleNamespace()  # type: ignore[assignment]
    runner.num_captured += 1
    return shape


def test_a_larger_graph_does_until_it_was_wanted_often(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = Owner()
    runner = on_a_device(owner, monkeypatch)
    small = shape_of(runner, [3, 2])
    assert small.num_tokens == 6, "there is nothing else"
    large = capture(runner, [6, 2])
    assert shape_of(runner, [3, 2]) is large
    larger = capture(runner, [6, 6])
    assert shape_of(runner, [3, 2]) is large, "the smallest that does"
    assert shape_of(runner, [7, 2]) == larger
    for _ in range(MOST_PADDED - 2):
        assert shape_of(runner, [3, 2]) is large
    assert shape_of(runner, [3, 2]) == small, "by now it is worth a graph of its own"
    capture(runner, [3, 2])
    assert shape_of(runner, [3, 2]) == small
    runner.forget()
    assert shape_of(runner, [2, 2]).num_tokens == 4


def test_a_step_like_most_has_its_own_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """One token of everybody, time and again; but not where fewer take part from pass to pass."""
    owner = Owner()
    runner = on_a_device(owner, monkeypatch)
    capture(runner, [1] * 8)
    large = capture(runner, [1] * 8, in_parts=True)
    assert shape_of(runner, [1] * 5).num_tokens == 6
    assert runner.num_padded == 0
    assert shape_of(runner, [1] * 5, in_parts=True) is large
    assert runner.num_padded == 1


def test_a_graph_that_was_dropped_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = Owner()
    runner = on_a_device(owner, monkeypatch)
    large = capture(runner, [6, 2])
    assert shape_of(runner, [3, 2]) is large
    del runner._passes[large]  # many others were used since
    assert shape_of(runner, [3, 2]).num_tokens == 6
    runner._passes[large] = Pass(large, None, None, {}, None)  # type: ignore[arg-type]
    assert shape_of(runner, [3, 2]).num_tokens == 6, "it is not captured"


@pytest.mark.parametrize(
    ("lengths", "context", "kind"),
    [
        ([4] * 8, 40, {"in_parts": True}),
        ([4] * 8, 40, {"variant": (True,)}),
        ([4, 2], 40, {}),
        ([4] * 4, 40, {}),
        ([16] * 8, 40, {}),
        ([4] * 8, 5000, {}),
    ],
    ids=[
        "in parts",
        "another variant",
        "fewer sequences",
        "as many tokens of fewer",
        "far too many tokens",
        "longer contexts",
    ],
)
def test_not_every_graph_does(
    monkeypatch: pytest.MonkeyPatch, lengths: list[int], context: int, kind: dict[str, object]
) -> None:
    owner = Owner()
    runner = on_a_device(owner, monkeypatch)
    large = capture(runner, lengths, context, **kind)
    asked = shape_of(runner, [3, 2, 2, 2, 2, 2, 2, 2])
    assert (asked is large) == (context == 5000), "a longer table is no obstacle"


def test_a_verification_in_parts_is_made_for_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its drafts end anywhere, and the same graph serves them all; short ones do not take what the longest would."""
    owner = Owner()
    runner = on_a_device(owner, monkeypatch)
    shape = shape_of(runner, [13, 1, 1, 1], in_parts=True)
    assert shape == shape_of(runner, [4, 4, 4, 4], in_parts=True)
    assert shape.queries_per_item < shape_of(runner, [13, 1, 1, 1]).queries_per_item
    for lengths in ([13, 1, 1, 1], [4, 4, 4, 4], [10, 2, 2, 2]):
        assert len(attention.make_items(np.array(lengths), shape.queries_per_item)) <= shape.num_items


def test_what_serves_has_room_for_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tokens, sequences, tables and the items of the attention, whatever the lengths."""
    rng = np.random.default_rng(0)
    num_served = 0
    owner = Owner()
    runner = on_a_device(owner, monkeypatch)
    for _ in range(3000):
        large, small = (rng.integers(1, rng.integers(2, 24), rng.integers(1, 24)).tolist() for _ in range(2))
        runner.forget()
        shape = capture(runner, large, int(rng.integers(1, 3000)))
        context = int(rng.integers(1, 3000))
        asked = shape_of(runner, small, context)
        if asked != shape:
            continue
        num_served += 1
        assert sum(small) <= asked.num_tokens
        assert len(small) <= asked.num_seqs
        assert context <= 16 * asked.table_width
        assert len(attention.make_items(np.array(small), asked.queries_per_item)) <= asked.num_items
        assert asked.num_tokens <= 2 * MOST_PADDING * sum(small)
    assert num_served > 100
