"""Times the Triton attention on a CUDA device for a handful of tiles and splits per kind of work.

    python benchmarks/attention.py [--seconds 25] [--shapes 32x8x128,32x8x64] [--kinds decode,verify,prefill]

Every call of a captured graph reads other blocks of a large cache, scattered at random, so that the L2 cache does not
help. Per case: what `choose_tile` and `choose_splits` take (marked *) and the fastest candidates. GB/s counts keys and
values once; TFLOP/s counts the products of visible keys.
"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
import triton

from dsde.models.batch import BLOCK_SIZE
from dsde.models.kernels import attention
from dsde.models.kernels.attention import AttentionWork, Tile, paged_attention

DEVICE = "cuda"
DTYPE = torch.bfloat16
CACHE_BYTES = 1200 << 20
"""of keys, and as many of values"""
COLD_BYTES = 160 << 20
"""A graph's calls read this much together before they come back to the same blocks."""
MAX_CALLS = 128
NUM_COMPILERS = 16
SHOWN = 4


class Shape(NamedTuple):
    num_heads: int
    num_kv_heads: int
    head_dim: int


class Case(NamedTuple):
    name: str
    batch: int
    query_len: int
    context: int


CASES = [
    *(Case("decode", batch, 1, context) for context in (200, 2048) for batch in (1, 8, 64, 256)),
    Case("decode", 1, 1, 32768),
    *(Case("verify", batch, 5, context) for context in (200, 600) for batch in (1, 8, 64)),
    *(Case("verify", batch, 9, 600) for batch in (1, 8, 64)),
    Case("verify", 8, 5, 2048),
    Case("prefill", 1, 2048, 2048),
    Case("prefill", 16, 128, 128),
]

# By query rows, for head_dim 128; a head of half the size takes twice the keys where registers allow it.
TILES = {
    16: [(64, 4, 3), (64, 4, 2), (64, 4, 4), (32, 4, 4), (32, 2, 4), (128, 4, 2), (128, 8, 3)],
    32: [(64, 4, 3), (64, 4, 2), (32, 4, 4), (128, 8, 3)],
    64: [(64, 4, 3), (64, 4, 2)],
    128: [(64, 8, 3), (64, 8, 2), (128, 8, 2)],
}


def candidates(num_rows: int, shape: Shape) -> list[Tile]:
    most = 256 if num_rows < 64 else 128
    tiles = [Tile(min(most, keys * 128 // shape.head_dim), warps, stages) for keys, warps, stages in TILES[num_rows]]
    default = attention.choose_tile(num_rows, shape.head_dim, DTYPE)
    return list(dict.fromkeys([default, *tiles]))


def num_rows(queries_per_item: int, shape: Shape) -> int:
    return max(attention.MIN_ROWS, triton.next_power_of_2(queries_per_item * shape.num_heads // shape.num_kv_heads))


def tile_heights(case: Case, shape: Shape) -> list[int]:
    """Queries per item to try: the default, and half of it."""
    heads_per_kv = shape.num_heads // shape.num_kv_heads
    default = attention.queries_per_item(case.query_len, heads_per_kv, shape.head_dim, DTYPE)
    return [default, default // 2] if case.query_len > 1 and default > 1 else [default]


class Bench:
    """The cache of one shape, and graphs of calls that walk through it."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        block_bytes = BLOCK_SIZE * shape.num_kv_heads * shape.head_dim * DTYPE.itemsize
        num_blocks = CACHE_BYTES // block_bytes
        slots = (num_blocks * BLOCK_SIZE, shape.num_kv_heads, shape.head_dim)
        self.cache_k = torch.randn(slots, dtype=DTYPE, device=DEVICE)
        self.cache_v = torch.randn(slots, dtype=DTYPE, device=DEVICE)
        self.blocks = torch.randperm(num_blocks, device=DEVICE).to(torch.int32)
        self.scale = shape.head_dim**-0.5

    def works(self, case: Case, queries_per_item: int, num_splits: int) -> list[AttentionWork]:
        """One per call of a graph, each with blocks of its own as far as the cache reaches."""
        blocks_per_seq = -(-case.context // BLOCK_SIZE)
        per_call = blocks_per_seq * case.batch
        num_calls = max(2, min(MAX_CALLS, -(-COLD_BYTES // self.kv_bytes(case))))
        num_places = max(1, len(self.blocks) // per_call)
        query_lens = np.full(case.batch, case.query_len)
        first = AttentionWork(
            starts=torch.arange(case.batch + 1, dtype=torch.int32, device=DEVICE) * case.query_len,
            contexts=torch.full((case.batch,), case.context, dtype=torch.int32, device=DEVICE),
            tables=self.blocks,
            table_offsets=torch.arange(case.batch, dtype=torch.int32, device=DEVICE) * blocks_per_seq,
            items=torch.from_numpy(attention.make_items(query_lens, queries_per_item)).to(DEVICE),
            queries_per_item=queries_per_item,
            num_splits=num_splits,
        )
        return [
            replace(first, table_offsets=first.table_offsets + call % num_places * per_call)
            for call in range(num_calls)
        ]

    def kv_bytes(self, case: Case) -> int:
        return 2 * case.batch * case.context * self.shape.num_kv_heads * self.shape.head_dim * DTYPE.itemsize

    def flops(self, case: Case) -> int:
        seen = sum(range(case.context - case.query_len + 1, case.context + 1))
        return 4 * case.batch * seen * self.shape.num_heads * self.shape.head_dim

    def compile_all(self, cases: list[Case]) -> int:
        """Compile all that the cases need at once, mostly outside the interpreter lock; how many variants there are."""
        jobs = {
            (num_rows(queries, self.shape), tile): (case, queries, tile)
            for case in cases
            for queries in tile_heights(case, self.shape)
            for tile in candidates(num_rows(queries, self.shape), self.shape)
        }
        with ThreadPoolExecutor(NUM_COMPILERS) as pool:
            list(pool.map(lambda job: self.compile(*job), jobs.values()))
        return len(jobs)

    def compile(self, case: Case, queries_per_item: int, tile: Tile) -> None:
        work = self.works(case, queries_per_item, num_splits=1)[0]
        paged_attention(self.queries(case), self.cache_k, self.cache_v, work, self.scale, tile=tile)

    def queries(self, case: Case) -> torch.Tensor:
        num_tokens = case.batch * case.query_len
        return torch.randn(num_tokens, self.shape.num_heads, self.shape.head_dim, dtype=DTYPE, device=DEVICE)

    def time(self, case: Case, works: list[AttentionWork], tile: Tile) -> float:
        """Microseconds per call, best of several replays."""
        q = self.queries(case)

        def calls() -> None:
            for work in works:
                paged_attention(q, self.cache_k, self.cache_v, work, self.scale, tile=tile)

        paged_attention(q, self.cache_k, self.cache_v, works[0], self.scale, tile=tile)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            calls()
        graph.replay()
        times = []
        for _ in range(4):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / len(works))
        return min(times)


def split_candidates(case: Case, num_items: int, shape: Shape) -> list[int]:
    """The default and its neighbours, for short queries."""
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    default = attention.choose_splits(num_items, shape.num_kv_heads, case.context, multiprocessors, case.query_len)
    if case.query_len > 64 or num_items * shape.num_kv_heads > 4 * multiprocessors:
        return [default]
    most = min(attention.MAX_SPLITS, -(-case.context // attention.MIN_SPLIT_KEYS))
    return [default, *sorted({n for n in (1, 2, 4, default // 2, default * 2) if 1 <= n <= most} - {default})]


def run_case(bench: Bench, case: Case) -> None:
    shape = bench.shape
    rows: list[tuple[float, str, list[AttentionWork], Tile]] = []
    for queries in tile_heights(case, shape):
        num_items = case.batch * -(-case.query_len // queries)
        splits = split_candidates(case, num_items, shape)
        for tile in candidates(num_rows(queries, shape), shape):
            for num_splits in splits:
                works = bench.works(case, queries, num_splits)
                label = f"q{queries} tile {tile.num_keys}/{tile.num_warps}/{tile.num_stages} splits {num_splits}"
                rows.append((bench.time(case, works, tile), label, works, tile))
    default = rows[0]
    rows.sort(key=lambda row: row[0])
    if case.batch == 1 and case.query_len <= 64 and case.context < 1000:
        _, label, works, tile = rows[0]
        settled = [replace(work, settled=True) for work in works]
        rows.insert(1, (bench.time(case, settled, tile), label + " settled", settled, tile))
    shown = [row for rank, row in enumerate(rows) if rank < SHOWN or row is default]
    print(f"  {case.name} batch {case.batch} queries {case.query_len} context {case.context}")
    for row in shown:
        if case.query_len > 64:
            rate = f"{bench.flops(case) / row[0] / 1e6:7.0f} TFLOP/s"
        else:
            rate = f"{bench.kv_bytes(case) / row[0] / 1e3:7.0f} GB/s"
        print(f"    {row[0]:9.1f} us {rate}  {'*' if row is default else ' '} {row[1]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=25, help="start no further case after this long")
    parser.add_argument("--shapes", default="32x8x128,32x8x64", help="heads x KV heads x head size")
    parser.add_argument("--kinds", default="decode,verify,prefill", help="of work")
    args = parser.parse_args()
    start = time.perf_counter()
    for text in args.shapes.split(","):
        shape = Shape(*map(int, text.split("x")))
        bench = Bench(shape)
        cases = [case for case in CASES if case.name in args.kinds.split(",")]
        num_variants = bench.compile_all(cases)
        print(f"{text}: {num_variants} variants after {time.perf_counter() - start:.1f} s", flush=True)
        for case in cases:
            if time.perf_counter() - start > args.seconds:
                print("  out of time")
                return
            run_case(bench, case)
        del bench
    print(f"{time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
