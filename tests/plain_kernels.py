"""Plain PyTorch in place of the device path's kernels, and CUDA graphs that are only played.

The executor's books (staging, tables, buckets, rows) are then tested on any machine and a hundred times faster than in
Triton's interpreter. Strict where kernels are lenient: rows that nothing covers are NaN, and what must not be read
fails. The kernels themselves have tests of their own.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dsde.core.rng import Purpose
from dsde.device import backend
from dsde.drafting import signals
from dsde.drafting.ruling import Decision, Kind
from dsde.drafting.sequence_table import COUNTERS_PER_STEP
from dsde.drafting.solo_kernels import GONE, NUM_ENDS, SoloState, Told
from dsde.models import passes
from dsde.models.batch import BLOCK_SIZE
from dsde.models.kernels import attention, embedding, rotary
from dsde.models.kernels.attention import AttentionWork
from dsde.sampling import kernels
from dsde.sampling.kernels import DraftStore, DrawMode, Draws
from dsde.sampling.truncation import truncate
from dsde.verification.divergence import kl_divergence
from dsde.verification.kernels import Findings, Judgement

SHARED = 0


def install(monkeypatch: pytest.MonkeyPatch, with_graphs: bool) -> None:
    from dsde.drafting import device, referee
    from dsde.engine import device_executor, solo

    monkeypatch.setattr(embedding, "embed", embed)
    monkeypatch.setattr(rotary, "rotate_and_store", rotate_and_store)
    monkeypatch.setattr(attention, "paged_attention", paged_attention)
    monkeypatch.setattr(device, "sample_drafts", sample_drafts)
    monkeypatch.setattr(device, "advance", advance)
    monkeypatch.setattr(device, "go_deeper", go_deeper)
    monkeypatch.setattr(solo, "lay_out", lay_out)
    monkeypatch.setattr(referee, "decide", decide)
    monkeypatch.setattr(device_executor, "judge", judge)
    monkeypatch.setattr(device_executor, "step_on", step_on)
    monkeypatch.setattr(kernels, "exponentials", exponentials)
    if with_graphs:
        monkeypatch.setattr(backend, "num_multiprocessors", lambda _: 4)
        monkeypatch.setattr(passes.PassRunner, "shape", on_a_device(passes.PassRunner.shape))
        monkeypatch.setattr(passes.PassRunner, "shape_of", on_a_device(passes.PassRunner.shape_of))
        monkeypatch.setattr(passes.PassRunner, "_capture", pretend_to_capture)
        monkeypatch.setattr(passes.PassRunner, "_capture_parts", pretend_to_capture_parts)
        monkeypatch.setattr(passes.PassRunner, "can_repeat", lambda _, entry: entry.graph is not None)


def on_a_device(shape: Callable[..., passes.PassShape]) -> Callable[..., passes.PassShape]:
    def shape_on_a_device(self: passes.PassRunner, *args: Any, **kwargs: Any) -> passes.PassShape:
        device, self.device = self.device, SimpleNamespace(type="cuda")  # type: ignore[assignment]
        try:
            return shape(self, *args, **kwargs)
        finally:
            self.device = device

    return shape_on_a_device


def pretend_to_capture(self: passes.PassRunner, entry: passes.Pass) -> None:
    check = still_good(self, entry)

    def replay() -> None:
        check()
        entry.result = passes.rest_of(self.body(entry))

    entry.graph = SimpleNamespace(replay=replay)  # type: ignore[assignment]
    self.num_captured += 1


def pretend_to_capture_parts(self: passes.PassRunner, entry: passes.Pass) -> None:
    check = still_good(self, entry)
    entry.underway = None

    def replay_first_part() -> None:
        check()
        entry.underway = self.body(entry)
        next(entry.underway)

    def replay_rest() -> None:
        check()
        assert entry.underway is not None, "the rest of a pass that was not begun"
        entry.result, entry.underway = passes.rest_of(entry.underway), None

    entry.parts = [SimpleNamespace(replay=replay) for replay in (replay_first_part, replay_rest)]  # type: ignore[misc]
    self.num_captured += 2


def still_good(runner: passes.PassRunner, entry: passes.Pass) -> Callable[[], None]:
    """What must be so whenever a graph that is captured now is replayed."""
    store = runner.body.__self__.drafts.store  # type: ignore[attr-defined]

    def check() -> None:
        assert runner._passes.get(entry.shape) is entry, "a graph that was to be forgotten"
        assert runner.body.__self__.drafts.store is store, "a graph that points to where drafts were"  # type: ignore[attr-defined]

    return check


def embed(
    tokens: torch.Tensor, sources: torch.Tensor, drafted: torch.Tensor, weight: torch.Tensor, scale: float
) -> torch.Tensor:
    chosen = torch.where(sources >= 0, drafted[sources.clamp(min=0).long()], tokens)
    assert (chosen >= 0).all(), "a token that nobody wrote"
    return weight[chosen.long().clamp(max=len(weight) - 1)] * scale


def rotate_and_store(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    table: torch.Tensor,
    cache_k: torch.Tensor,
    cache_v: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *_: Any,
) -> torch.Tensor:
    heads = qkv.view(len(qkv), -1, head_dim)
    cos, sin = table[positions.long()].unsqueeze(1).chunk(2, dim=-1)
    low, high = heads[:, : num_heads + num_kv_heads].chunk(2, dim=-1)
    rotated = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
    stored = (slots >= 0).nonzero()[:, 0]
    places = slots[stored].long()
    for cache, rows in ((cache_k, rotated[:, num_heads:]), (cache_v, heads[:, num_heads + num_kv_heads :])):
        written = rows[stored]
        cache[places] = written
        # Sequences that share a block may fill it together, but only with the same.
        assert torch.allclose(cache[places], written, atol=1e-4, rtol=1e-4), "two that differ, or no number"
    return rotated[:, :num_heads]


def paged_attention(
    q: torch.Tensor, cache_k: torch.Tensor, cache_v: torch.Tensor, work: AttentionWork, scale: float, *_: Any
) -> torch.Tensor:
    """All items at once, padded to the longest: nothing beyond a sequence's context is looked at."""
    out = torch.full_like(q, torch.nan, memory_format=torch.contiguous_format)
    items = work.items.numpy()
    sequences, firsts = items[items[:, 0] >= 0].T
    if not len(sequences):
        return out
    starts, contexts = work.starts.numpy(), work.contexts.numpy()[sequences]
    num_queries = starts[sequences + 1] - starts[sequences]
    counts = np.minimum(num_queries - firsts, work.queries_per_item)
    queries, places = np.arange(counts.max()), np.arange(contexts.max())
    is_query, is_key = queries < counts[:, None], places < contexts[:, None]
    rows = np.where(is_query, (starts[sequences] + firsts)[:, None] + queries, 0)
    in_table = np.where(is_key, work.table_offsets.numpy()[sequences][:, None] + places // BLOCK_SIZE, 0)
    slots = np.where(is_key, work.tables.numpy()[in_table] * BLOCK_SIZE + places % BLOCK_SIZE, 0)
    positions = (contexts - num_queries + firsts)[:, None] + queries
    is_seen = is_key[:, None] & (places <= positions[:, :, None])
    keys, values = (cache[torch.from_numpy(slots)] for cache in (cache_k, cache_v))
    if not is_key.all():
        for padded in (keys, values):
            padded[torch.from_numpy(~is_key)] = 0.0
    found = torch.nn.functional.scaled_dot_product_attention(
        q[torch.from_numpy(rows)].transpose(1, 2),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        torch.from_numpy(is_seen)[:, None],
        scale=scale,
        enable_gqa=True,
    ).transpose(1, 2)
    out[torch.from_numpy(rows[is_query])] = found[torch.from_numpy(is_query)]
    return out


def exponentials(seeds: torch.Tensor, counters: torch.Tensor, purposes: torch.Tensor, vocab: int) -> torch.Tensor:
    """Any noise will do that is a function of its key."""
    keys = zip(seeds.tolist(), counters.tolist(), purposes.tolist(), strict=True)
    rows = [_exponentials(*seed, counter, purpose, size=vocab) for seed, counter, purpose in keys]
    return torch.from_numpy(np.stack(rows))


def sample_drafts(
    logits: torch.Tensor,
    draws: Draws,
    depth: torch.Tensor,
    first_row: torch.Tensor,
    store: DraftStore,
    sampled: bool,
    truncated: bool,
    watched: bool = False,
) -> None:
    columns = min(store.logits.shape[1], logits.shape[1])
    modes = draws.modes.numpy()
    rows = np.flatnonzero(modes != DrawMode.PADDING)
    places = torch.from_numpy(int(first_row) + rows)
    given = logits[torch.from_numpy(rows)]
    assert torch.isfinite(given).all()
    drawn_from = torch.full((len(rows), store.logits.shape[1]), -torch.inf, dtype=store.logits.dtype)
    drawn_from[:, :columns] = given[:, :columns]
    tokens = drawn_from.argmax(-1)
    for place, row in enumerate(rows.tolist()):
        if modes[row] != DrawMode.GREEDY:
            purpose = Purpose.DRAFT if modes[row] == DrawMode.RATIO else SHARED
            tokens[place] = _race(drawn_from[place], draws, row, int(depth), purpose, sampled, truncated)
    store.logits[places] = drawn_from
    store.tokens[places] = tokens.to(store.tokens.dtype)
    store.signals[places] = torch.nan
    if watched:
        found = drawn_from.float()
        measured = np.column_stack((signals.measure_all(found), signals.token_probs(found, tokens)))
        store.signals[places] = torch.from_numpy(measured).to(store.signals.dtype)


def decide(
    arrays: dict[str, torch.Tensor],
    found: torch.Tensor,
    standings: torch.Tensor,
    decisions: torch.Tensor,
    solo: SoloState | None = None,
) -> None:
    """One token after another."""
    kind, look, is_first, number = arrays["rule"].tolist()
    *weights, keep_above, go_on_above, pass_above, sign = arrays["rule_numbers"].tolist()
    places = arrays["places"].tolist()
    sequences = arrays["standings"].tolist()
    codes = {}
    worths = {}
    are_over = set()
    drawn = 0 if solo is None else int(arrays["depth"])
    caps = [] if solo is None else [int(solo.caps[sequence]) for sequence in sequences]
    for token, place in enumerate(places):
        if place < 0:
            continue
        codes[token] = Decision.DROPPED
        stands, log_prob = (1.0, 0.0) if is_first else standings[sequences[token]].tolist()
        if stands < 0:
            are_over.add(token)
            continue
        entropy, top_prob, margin, token_prob = found[place].tolist()
        assert not math.isnan(entropy), "a signal that nobody measured"
        log_prob += math.log(max(token_prob, 1e-30))
        bound = float(arrays["bounds"][token])
        value = (entropy, top_prob, margin, token_prob, log_prob)[look]
        is_beyond = value > bound if sign > 0 else value < bound
        is_fixed = False
        if kind == Kind.WORTH:
            is_fixed = bound == math.inf
            sure = min(max(top_prob, 0.05), 0.999)
            odds = bound + weights[0] * math.sqrt(entropy) + weights[1] * math.log(sure / (1 - sure))
            odds += weights[2] * margin
            stands *= 1 / (1 + math.exp(-odds)) if odds > -700 else 0.0
            is_kept = is_fixed or stands >= keep_above
        else:
            is_kept = not (kind == Kind.BEFORE and is_beyond)
        is_kept = is_kept and (solo is None or drawn < caps[token])
        standings[sequences[token]] = torch.tensor([stands, log_prob])
        if not is_kept:
            continue
        codes[token] = Decision.KEPT
        worth = stands * float(arrays["outlooks"][token])
        ends = not (is_fixed or worth >= go_on_above) if kind == Kind.WORTH else kind == Kind.AFTER and is_beyond
        if (arrays["may_go_on"][token] if solo is None else drawn + 1 < caps[token]) and not ends:
            worths[token] = math.inf if is_fixed else worth - go_on_above
    if kind != Kind.WORTH or sum(worths.values()) >= pass_above:
        codes |= dict.fromkeys(worths, Decision.GOES_ON)
    for token, code in codes.items():
        if code != Decision.GOES_ON:
            standings[sequences[token], 0] = -1.0
        if solo is None:
            decisions[number % 2, token] = (number << 32) | code
        elif code != Decision.GOES_ON and token not in are_over:
            solo.lengths[sequences[token]] = drawn + code
    if solo is not None:
        solo.goes_on[0] = Decision.GOES_ON in codes.values()
        solo.num_passes[0] = drawn + 1


def judge(
    logits: torch.Tensor,
    judgement: Judgement,
    store: DraftStore | None,
    findings: Findings,
    sampled: bool,
    truncated: bool,
    point_mass: bool,
    synthetic_rates: torch.Tensor | None = None,
) -> None:
    assert synthetic_rates is None
    draws, modes = judgement.draws, judgement.draws.modes.tolist()
    owners, depths, drafts = (
        column.tolist() for column in (judgement.row_sequences, judgement.row_depths, judgement.row_drafts)
    )
    is_finite, greedy = torch.isfinite(logits).all(-1).tolist(), logits.argmax(-1).tolist()
    for sequence, (start, length) in enumerate(zip(judgement.starts.tolist(), judgement.lengths.tolist(), strict=True)):
        mode = modes[sequence]
        if mode == DrawMode.PADDING:
            continue
        rows = slice(start, start + length + 1)
        assert owners[rows] == [sequence] * (length + 1)
        assert depths[rows] == list(range(length + 1))
        assert all(is_finite[rows])
        *places, last = drafts[rows]
        assert min(places, default=0) >= 0 > last
        drafted = [] if store is None else store.tokens[places].tolist()
        emitted: list[int] = []
        for depth in range(length + 1):
            target = logits[start + depth]
            arguments = draws, sequence, depth
            if mode == DrawMode.RATIO and depth < length and not point_mass:
                assert store is not None
                token, stands = _by_ratio(target, store.logits[places[depth]], drafted[depth], *arguments)
            else:
                purpose = Purpose.EMIT if mode == DrawMode.RATIO else SHARED
                is_greedy = mode == DrawMode.GREEDY
                token = greedy[start + depth] if is_greedy else _race(target, *arguments, purpose, sampled, truncated)
                stands = depth < length and token == drafted[depth]
            emitted.append(token)
            if not stands:
                break
        findings.accepted[sequence] = len(emitted) - 1
        beyond = [-1] * (findings.emitted.shape[1] - len(emitted))
        findings.emitted[sequence] = torch.tensor(emitted + beyond, dtype=torch.int32)
        if length and store is not None and not point_mass:
            target_rows = torch.arange(start, start + length)
            findings.klds[sequence, :length] = kl_divergence(logits, target_rows, store.logits[places])


def advance(
    arrays: dict[str, torch.Tensor],
    verdict: torch.Tensor,
    state: SoloState,
    table_width: int,
    is_solo: bool = False,
) -> None:
    heads = state.heads
    if is_solo:
        state.began[0] = time.perf_counter_ns()
    start, width = int(arrays["emitted_start"]), int(arrays["emitted_width"])
    tables = arrays["tables"].view(-1, table_width)
    for sequence, row in enumerate(arrays["judged"].tolist()):
        pair = slice(2 * sequence, 2 * sequence + 2)
        if row < 0:
            continue
        accepted = int(verdict[row])
        emitted = verdict[start + row * width :][:width].tolist()
        assert 0 <= accepted < width
        assert min(emitted[: accepted + 1]) >= 0, "a token that nobody emitted"
        known = [int(arrays["last_tokens"][sequence]), *emitted]
        arrays["tokens"][pair] = torch.tensor(known[accepted : accepted + 2], dtype=torch.int32)
        context = int(arrays["num_tokens"][sequence]) + accepted + 1
        positions = torch.tensor([context - 2, context - 1])
        assert positions[0] >= 0
        arrays["positions"][pair] = positions.int()
        arrays["slots"][pair] = _slots(tables[sequence], positions)
        arrays["contexts"][sequence] = context
        heads[sequence, :3] = torch.tensor([context, known[accepted + 1], accepted + 1], dtype=torch.int32)
        if is_solo:
            ends = set(arrays["ends"].view(-1, NUM_ENDS)[sequence].tolist())
            total = int(arrays["totals"][sequence])
            heads[sequence, 3] = not ends.isdisjoint(emitted[: accepted + 1]) or context >= total
            memory, most = int(arrays["memories"][sequence]), int(arrays["caps"][sequence])
            assert context <= min(memory, total), "a token that there is no room for"
            room = max(min(most, memory - context, total - context - 1), 0)
            state.caps[sequence] = 0 if heads[sequence, 3] else room
        if arrays["modes"][sequence] == DrawMode.MATCH:
            arrays["counters"][sequence] += accepted + 1


def go_deeper(arrays: dict[str, torch.Tensor], state: SoloState, table_width: int) -> None:
    count, depth = int(arrays["count"]), int(arrays["depth"]) + 1
    tables = arrays["tables"].view(-1, table_width)
    for sequence, (head, _, gained, _) in enumerate(state.heads[:count].tolist()):
        has_room = depth < int(state.caps[sequence])
        position = torch.tensor([head + depth - 1 if has_room else 0])
        arrays["positions"][sequence] = position
        arrays["slots"][sequence] = _slots(tables[sequence], position)[0] if has_room else -1
        arrays["contexts"][sequence] = position + 1
        arrays["sources"][sequence] = (depth - 1) * count + sequence
        arrays["places"][sequence] = depth * count + sequence
        assert int(state.caps[sequence]) <= 15
        if depth == 1 and arrays["modes"][sequence] == DrawMode.MATCH:
            arrays["counters"][sequence] += gained
    arrays["rule_numbers"][3:6] = arrays["costs"].view(-1, 3)[depth]
    arrays["depth"][0], arrays["first_row"][0] = depth, depth * count


def lay_out(
    arrays: dict[str, torch.Tensor],
    state: SoloState,
    fits: torch.Tensor,
    found: torch.Tensor,
    told: Told,
    table_width: int,
    longest: int,
) -> None:
    numbers, told_signals = told.numbers[int(arrays["turn"])], told.signals[int(arrays["turn"])]
    count, row = int(arrays["count"]), 0
    for name in ("tokens", "positions", "contexts", "lengths"):
        arrays[name].zero_()
    for name in ("sources", "slots", "row_sequences", "row_drafts"):
        arrays[name].fill_(-1)
    tables = arrays["tables"].view(-1, table_width)
    have_ended = bool(state.heads[:count, 3].all())
    for sequence, length in enumerate(state.lengths[:count].tolist()):
        head, newest, gained, _ = state.heads[sequence].tolist()
        assert 0 <= length <= longest
        arrays["starts"][sequence] = arrays["judged_starts"][sequence] = row
        arrays["contexts"][sequence] = head + length
        arrays["lengths"][sequence] = length
        if arrays["modes"][sequence] == DrawMode.MATCH:
            arrays["counters"][sequence] += gained
        for depth in range(length + 1):
            arrays["tokens"][row] = newest
            arrays["sources"][row] = (depth - 1) * count + sequence if depth else -1
            arrays["positions"][row] = head - 1 + depth
            arrays["slots"][row] = _slots(tables[sequence], torch.tensor([head - 1 + depth]))[0]
            arrays["row_sequences"][row], arrays["row_depths"][row] = sequence, depth
            arrays["row_drafts"][row] = depth * count + sequence if depth < length else -1
            if depth < length:
                told_signals[depth * count + sequence] = found[depth * count + sequence]
            row += 1
        numbers[2 + sequence] = length
    arrays["starts"][count:] = row
    arrays["judged_starts"][count:] = row
    numbers[0] = GONE if have_ended else state.num_passes[0]
    numbers[1] = min(time.perf_counter_ns() - int(state.began), 1 << 30)
    sizes = [0, *arrays["sizes"].tolist()]
    assert row <= sizes[-1] or not count
    for i, (least, most) in enumerate(itertools.pairwise(sizes)):
        fits[i] = least < row <= most and not have_ended


def step_on(arrays: dict[str, torch.Tensor], emitted: torch.Tensor, table_width: int) -> None:
    assert len(arrays["tokens"]) == len(arrays["contexts"]), "a sequence that reads more than its newest token"
    tables = arrays["tables"].view(-1, table_width)
    for sequence, context in enumerate(arrays["contexts"].tolist()):
        if context == 0:
            continue
        assert emitted[sequence, 0] >= 0, "a token that nobody emitted"
        arrays["tokens"][sequence] = emitted[sequence, 0]
        arrays["positions"][sequence] = context
        arrays["slots"][sequence] = _slots(tables[sequence], torch.tensor([context]))[0]
        arrays["contexts"][sequence] = context + 1
        arrays["counters"][sequence] += 1 if arrays["modes"][sequence] == DrawMode.MATCH else COUNTERS_PER_STEP


def _slots(table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions.int() % BLOCK_SIZE


def _by_ratio(
    target: torch.Tensor, draft: torch.Tensor, drafted: int, draws: Draws, row: int, depth: int
) -> tuple[int, bool]:
    p, q = (_distribution(logits, draws, row) for logits in (target, draft))
    key = *draws.seeds[row].tolist(), int(draws.counters[row]) + depth
    if _generator(*key, Purpose.ACCEPT).random() * q[drafted] < p[drafted]:
        return drafted, True
    rest = (p - q).clamp_(min=0)
    rest = rest if rest.sum() > 0 else p
    return int(np.argmax(rest.numpy() / _generator(*key, Purpose.EMIT).exponential(size=len(p)))), False


def _race(
    logits: torch.Tensor, draws: Draws, row: int, depth: int, purpose: int, sampled: bool, truncated: bool
) -> int:
    assert sampled
    assert truncated or not (draws.top_ks[row] > 0 or draws.top_ps[row] < 1 or draws.min_ps[row] > 0)
    key = *draws.seeds[row].tolist(), int(draws.counters[row]) + depth, purpose
    return int((_distribution(logits, draws, row) / torch.from_numpy(_exponentials(*key, size=len(logits)))).argmax())


def _exponentials(*key: int, size: int) -> np.ndarray:
    return _generator(*key).exponential(size=size).astype(np.float32).clip(min=2.0**-33)


def _distribution(logits: torch.Tensor, draws: Draws, row: int) -> torch.Tensor:
    probs = torch.softmax(logits.float() * draws.inv_temperatures[row], -1).unsqueeze(0)
    truncate(probs, [float(draws.min_ps[row])], [int(draws.top_ks[row])], [float(draws.top_ps[row])])
    return probs[0]


def _generator(*key: int) -> np.random.Generator:
    return np.random.default_rng([word & 0xFFFFFFFF for word in key])
