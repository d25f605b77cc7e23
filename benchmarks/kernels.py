"""The kernels of a decoder layer on a CUDA device: matrix products of few tokens, whole layers, small kernels.

    python benchmarks/kernels.py [--models 8B,1B] [--tokens 1,5,8,16,40,64] [--out results.json]

Every product runs in a CUDA graph over so many copies of its weight that the L2 cache cannot help, with every candidate
tile and against cuBLAS. The winners then run as they would in a model, all layers in one graph, weights all distinct.
Times are compared with the time it takes to read the weights at `--bandwidth`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
import triton

from dsde.models.kernels import fragment, gate, matmul, norm, rotary
from dsde.models.kernels.fragment import FragmentTile
from dsde.models.kernels.gate import Activation, gated
from dsde.models.kernels.matmul import DotTile, RowTile, Tile, skinny_linear
from dsde.models.kernels.norm import rms_norm
from dsde.models.kernels.rotary import rotate_and_store

DTYPE = torch.bfloat16
EPS = 1e-5
DISTINCT_BYTES = 600 << 20
VOCABULARY = 128256
CHAIN_TOKENS = (1, 2, 4, 5, 8, 16, 64)
TUNED_UP_TO = 16


@dataclass(frozen=True)
class Matrix:
    """One weight of a model and what is fused around its product."""

    name: str
    rows: int
    width: int
    norm: bool = False
    gate: bool = False
    adds: bool = False

    @property
    def num_bytes(self) -> int:
        return self.rows * self.width * DTYPE.itemsize


@dataclass(frozen=True)
class Model:
    name: str
    num_layers: int
    width: int
    mlp_width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def layer(self) -> tuple[Matrix, ...]:
        qkv_rows = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        return (
            Matrix("qkv", qkv_rows, self.width, norm=True),
            Matrix("o", self.width, self.num_heads * self.head_dim, adds=True),
            Matrix("gate_up", 2 * self.mlp_width, self.width, norm=True, gate=True),
            Matrix("down", self.width, self.mlp_width, adds=True),
        )

    @property
    def head(self) -> Matrix:
        return Matrix("head", VOCABULARY, self.width, norm=True)

    @property
    def num_bytes(self) -> int:
        return self.num_layers * sum(matrix.num_bytes for matrix in self.layer) + self.head.num_bytes


MODELS = {
    "8B": Model("8B", 32, 4096, 14336, 32, 8, 128),
    "1B": Model("1B", 16, 2048, 8192, 32, 8, 64),
}


@dataclass(frozen=True)
class Case:
    """A product to compile or to time."""

    matrix: Matrix
    num_tokens: int
    tile: Tile


# Candidates


def candidates(matrix: Matrix, num_tokens: int) -> list[Tile]:
    tiles: list[Tile] = [*row_candidates(matrix, num_tokens)]
    if 2 <= num_tokens <= 16:
        tiles += fragment_candidates(matrix, num_tokens)
    elif num_tokens > 16:
        tiles += dot_candidates(matrix, num_tokens)
    return list(dict.fromkeys(tiles))


def row_candidates(matrix: Matrix, num_tokens: int) -> Iterable[RowTile]:
    """By bytes of weight and warps of a block."""
    if num_tokens == 1:
        blocks, tokens = ((16, 4), (32, 4), (32, 8), (64, 8), (64, 16)), 1
    elif num_tokens <= 4:
        blocks, tokens = ((16, 4), (32, 8)), num_tokens
    else:
        return
    width = triton.next_power_of_2(matrix.width)
    row_bytes = width * DTYPE.itemsize * (2 if matrix.gate else 1)
    for kib, num_warps in blocks:
        outputs = kib * 1024 // row_bytes
        values_per_thread = kib * 1024 // DTYPE.itemsize // (32 * num_warps)
        # All threads of a block work along a row, 8 values each at a time.
        if outputs >= 1 and values_per_thread <= 128 and 32 * num_warps * 8 <= width:
            yield RowTile(tokens, outputs, num_warps)


def fragment_candidates(matrix: Matrix, num_tokens: int) -> Iterable[FragmentTile]:
    """By columns, warps, steps ahead and blocks of a multiprocessor: 32 to 64 KiB of weights under way in a block."""
    tokens = 8 if num_tokens <= 8 else 16
    shapes = [(128, 16, 1, 2), (64, 16, 2, 2), (64, 16, 4, 1), (128, 8, 2, 2), (64, 8, 4, 2), (64, 8, 3, 3)]
    shapes += [(128, 8, 1, 4), (64, 8, 2, 4), (128, 4, 2, 4), (64, 4, 3, 6)]
    for shape in shapes:
        yield FragmentTile(tokens, 16, *shape)
    yield FragmentTile(tokens, 16, *shapes[0], bypass=True)
    yield FragmentTile(tokens, 16, *shapes[4], bypass=True)
    if matrix.norm:
        for shape in (shapes[0], shapes[1], shapes[4], shapes[7]):
            yield FragmentTile(tokens, 16, *shape, norms=False)
    if matrix.rows * matrix.width >= 1 << 25:
        yield FragmentTile(tokens, 32, 64, 8, 2, 2)
        yield FragmentTile(tokens, 32, 64, 4, 2, 4)


def dot_candidates(matrix: Matrix, num_tokens: int) -> Iterable[DotTile]:
    wide = 16 if matrix.gate else 32
    tokens = triton.next_power_of_2(num_tokens)
    yield DotTile(tokens, 2 * wide, 128, 1, 4, 4, prefetch=256)
    yield DotTile(tokens, 2 * wide, 64, 1, 4, 6, prefetch=256)
    yield DotTile(tokens, 4 * wide, 64, 1, 8, 4, prefetch=256)


# Compiling: each variant takes about a second, so they are compiled by many processes into Triton's cache on disk.


def compile_case(case: Case, programmatic: bool) -> str | None:
    """None, or why the case cannot run."""
    few_rows = 144
    matrix = replace(case.matrix, rows=few_rows)
    weight = random_weight(matrix) * 5
    try:
        with launches(programmatic):
            torch.manual_seed(0)
            actual = product(matrix, case.num_tokens, case.tile)(weight).float()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0][:160]
    torch.manual_seed(0)
    expected = separate_product(matrix, case.num_tokens)(weight).float()
    deviation = ((actual - expected).abs().max() / expected.abs().max()).item()
    return None if deviation < 0.02 else f"off by {100 * deviation:.0f} %"


def compile_all(pool: ProcessPoolExecutor, cases: Sequence[Case], programmatic: bool = True) -> dict[Case, str]:
    """Cases that failed, with the reason."""
    # What is compiled depends on the token tile, not on the number of tokens: the largest case of each kind will do.
    kinds: dict[object, list[Case]] = {}
    for case in cases:
        matrix, tile = case.matrix, case.tile
        groups = triton.cdiv(case.num_tokens, tile.tokens) if isinstance(tile, RowTile) else 0
        kinds.setdefault((matrix.width, matrix.norm, matrix.gate, matrix.adds, tile, groups), []).append(case)
    firsts = [max(group, key=lambda case: case.num_tokens) for group in kinds.values()]
    begin = time.perf_counter()
    reasons = list(pool.map(compile_case, firsts, [programmatic] * len(firsts)))
    print(f"compiled {len(firsts)} variants in {time.perf_counter() - begin:.1f} s", flush=True)
    failed = {case: reason for group, reason in zip(kinds.values(), reasons, strict=True) if reason for case in group}
    for reason in sorted(set(failed.values())):
        first = next(case for case, text in failed.items() if text == reason)
        print(f"  cannot run {first.tile} for {first.matrix.name}: {reason}")
    return failed


@contextmanager
def launches(programmatic: bool) -> Iterator[None]:
    """Programmatic dependent launch on or off in all kernels of a layer."""
    with ExitStack() as stack:
        for module in (matmul, fragment, rotary, gate, norm):
            stack.enter_context(mock.patch.object(module, "programmatic_launch", return_value=programmatic))
        yield


# Timing


def graph_of(body: Callable[[], object]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        body()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return graph


def replay_us(graph: torch.cuda.CUDAGraph, rounds: int = 5) -> float:
    graph.replay()
    times = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


def time_over(weights: Sequence[torch.Tensor], multiply: Callable[[torch.Tensor], object]) -> float:
    """Microseconds a launch, over all weights in turn."""
    num_launches = max(len(weights), 4)

    def body() -> None:
        for launch in range(num_launches):
            multiply(weights[launch % len(weights)])

    return replay_us(graph_of(body)) / num_launches


def product(matrix: Matrix, num_tokens: int, tile: Tile | None) -> Callable[[torch.Tensor], torch.Tensor]:
    x = torch.randn(num_tokens, matrix.width, device="cuda").to(DTYPE)
    norm_weight = torch.ones(matrix.width, device="cuda", dtype=DTYPE) if matrix.norm else None
    residual = torch.zeros(num_tokens, matrix.rows, device="cuda", dtype=DTYPE) if matrix.adds else None
    activation: Activation | None = "silu" if matrix.gate else None

    def multiply(weight: torch.Tensor) -> torch.Tensor:
        return skinny_linear(
            x, weight, norm_weight=norm_weight, norm_eps=EPS, gate=activation, residual=residual, tile=tile
        )

    return multiply


def separate_product(matrix: Matrix, num_tokens: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """The same with cuBLAS and a kernel for each thing around it."""
    x = torch.randn(num_tokens, matrix.width, device="cuda").to(DTYPE)
    norm_weight = torch.ones(matrix.width, device="cuda", dtype=DTYPE)
    residual = torch.zeros(num_tokens, matrix.rows, device="cuda", dtype=DTYPE)

    def multiply(weight: torch.Tensor) -> torch.Tensor:
        if matrix.adds:
            return torch.addmm(residual, x, weight.t(), out=residual)
        result = F.linear(rms_norm(x, norm_weight, EPS) if matrix.norm else x, weight)
        return gated(result, "silu") if matrix.gate else result

    return multiply


# The three parts


def time_products(models: Sequence[Model], tokens: Sequence[int], pool: ProcessPoolExecutor, bandwidth: float) -> Any:
    cases = [
        Case(matrix, num_tokens, tile)
        for model in models
        for matrix in (*model.layer, model.head)
        for num_tokens in tokens
        for tile in candidates(matrix, num_tokens)
    ]
    failed = compile_all(pool, cases)
    store = torch.empty(max(DISTINCT_BYTES, *(m.head.num_bytes for m in models)) // 2, dtype=DTYPE, device="cuda")
    store.normal_(std=0.02)
    print("\nmodel matrix    M |   best us  GB/s  % | cuBLAS us  (product alone) | best tile, next tiles")
    best: dict[tuple[str, str, int], list[Tile]] = {}
    rows = []
    for model in models:
        for matrix in (*model.layer, model.head):
            num_copies = max(store.numel() // (matrix.rows * matrix.width), 1)
            weights = list(store[: num_copies * matrix.rows * matrix.width].view(num_copies, matrix.rows, matrix.width))
            for num_tokens in tokens:
                times = {
                    tile: time_over(weights, product(matrix, num_tokens, tile))
                    for tile in candidates(matrix, num_tokens)
                    if Case(matrix, num_tokens, tile) not in failed
                }
                separate = time_over(weights, separate_product(matrix, num_tokens))
                x = torch.randn(num_tokens, matrix.width, device="cuda").to(DTYPE)
                alone = time_over(weights, lambda weight, x=x: F.linear(x, weight))
                ranked = sorted(times, key=times.__getitem__)
                best[model.name, matrix.name, num_tokens] = ranked
                us = times[ranked[0]]
                rate = matrix.num_bytes / us / 1e3
                share = 100 * rate / bandwidth
                shown = "; ".join(f"{short(tile)} {times[tile]:.1f}" for tile in ranked[:6])
                print(
                    f"{model.name:5} {matrix.name:8} {num_tokens:3} | {us:9.2f} {rate:5.0f} {share:3.0f}"
                    f" | {separate:9.2f} ({alone:9.2f}) | {shown}",
                    flush=True,
                )
                rows.append(
                    {"model": model.name, "matrix": matrix.name, "tokens": num_tokens, "us": us, "cublas_us": separate}
                    | {"cublas_alone_us": alone}
                    | {"tiles": [[type(tile).__name__, asdict(tile), times[tile]] for tile in ranked]}
                )
    return best, rows


def short(tile: Tile) -> str:
    if isinstance(tile, RowTile):
        return f"row({tile.tokens},{tile.outputs},{tile.num_warps}w)"
    if isinstance(tile, FragmentTile):
        return (
            f"{'' if tile.norms else 'norm+'}frag({tile.tokens},{tile.rows},{tile.columns}x{tile.num_warps}w,"
            f"d{tile.depth},r{tile.resident}{',cg' if tile.bypass else ''})"
        )
    return (
        f"dot({tile.tokens},{tile.outputs},{tile.columns}x{tile.splits},{tile.num_warps}w,{tile.num_stages}s,"
        f"p{tile.prefetch})"
    )


class Chain:
    """All layers of a model without attention itself, and its head."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.layers = [[random_weight(matrix) for matrix in model.layer] for _ in range(model.num_layers)]
        self.head = random_weight(model.head)
        self.norm_weight = torch.ones(model.width, device="cuda", dtype=DTYPE)
        self.table = torch.randn(4096, model.head_dim, device="cuda").to(DTYPE)
        self.cache = torch.zeros(2, 1024, model.num_kv_heads, model.head_dim, device="cuda", dtype=DTYPE)

    def __call__(self, start: torch.Tensor, positions: torch.Tensor, tiles: dict[str, Tile] | None) -> torch.Tensor:
        """`tiles` by matrix; None: cuBLAS."""
        model, norm_weight = self.model, self.norm_weight
        cache_k, cache_v = self.cache
        hidden = start.clone()
        for qkv, output, gate_up, down in self.layers:
            if tiles is None:
                heads = F.linear(rms_norm(hidden, norm_weight, EPS), qkv)
            else:
                heads = skinny_linear(hidden, qkv, norm_weight=norm_weight, norm_eps=EPS, tile=tiles["qkv"])
            q = rotate_and_store(
                heads, positions, positions, self.table, cache_k, cache_v, model.num_heads, model.num_kv_heads,
                model.head_dim,
            ).flatten(1)  # fmt: skip
            if tiles is None:
                torch.addmm(hidden, q, output.t(), out=hidden)
                inner = gated(F.linear(rms_norm(hidden, norm_weight, EPS), gate_up), "silu")
                torch.addmm(hidden, inner, down.t(), out=hidden)
            else:
                skinny_linear(q, output, residual=hidden, tile=tiles["o"])
                inner = skinny_linear(
                    hidden, gate_up, norm_weight=norm_weight, norm_eps=EPS, gate="silu", tile=tiles["gate_up"]
                )
                skinny_linear(inner, down, residual=hidden, tile=tiles["down"])
        if tiles is None:
            return F.linear(rms_norm(hidden, norm_weight, EPS), self.head)
        return skinny_linear(hidden, self.head, norm_weight=norm_weight, norm_eps=EPS, tile=tiles["head"])


def time_chain(
    chain: Chain, start: torch.Tensor, positions: torch.Tensor, tiles: dict[str, Tile] | None, rounds: int = 11
) -> float:
    """Milliseconds."""
    return replay_us(graph_of(lambda: chain(start, positions, tiles)), rounds) / 1e3


def tune_chain(
    run: Callable[..., float], tiles: dict[str, Tile], others: dict[str, Sequence[Tile]]
) -> dict[str, Tile]:
    """Exchanges one tile at a time while that makes the chain faster: neighbours compete for registers."""
    best_ms = run(tiles, rounds=5)
    for name, alternatives in others.items():
        for tile in alternatives:
            changed = tiles | {name: tile}
            ms = run(changed, rounds=5)
            if ms < best_ms:
                best_ms, tiles = ms, changed
    return tiles


def random_weight(matrix: Matrix) -> torch.Tensor:
    weight = torch.empty(matrix.rows, matrix.width, dtype=DTYPE, device="cuda")
    return weight.normal_(std=0.2 / matrix.width**0.5)


def time_chains(
    models: Sequence[Model], tokens: Sequence[int], best: dict[tuple[str, str, int], list[Tile]], bandwidth: float
) -> list[dict[str, object]]:
    tokens = [num_tokens for num_tokens in CHAIN_TOKENS if num_tokens in tokens]
    print("\nmodel  M | floor ms | chain ms (% of floor) | tuned as a whole | cuBLAS | gap us per product")
    rows = []
    for model in models:
        chain = Chain(model)
        floor = model.num_bytes / bandwidth / 1e6
        for num_tokens in tokens:
            start = torch.randn(num_tokens, model.width, device="cuda").to(DTYPE)
            positions = torch.arange(num_tokens, device="cuda", dtype=torch.int32)
            ranked = {matrix.name: best[model.name, matrix.name, num_tokens] for matrix in (*model.layer, model.head)}
            tiles = {name: tiles[0] for name, tiles in ranked.items()}
            run = partial(time_chain, chain, start, positions)
            ms = run(tiles)
            tuned_ms = ms
            if num_tokens <= TUNED_UP_TO:
                tiles = tune_chain(run, tiles, {name: tiles[1:5] for name, tiles in ranked.items()})
                tuned_ms = run(tiles)
            cublas = run(None)
            gap = (tuned_ms - floor) * 1e3 / (4 * model.num_layers + 1)
            print(
                f"{model.name:4} {num_tokens:3} | {floor:8.3f} | {ms:8.3f} ({100 * floor / ms:3.0f} %) |"
                f" {tuned_ms:8.3f} ({100 * floor / tuned_ms:3.0f} %) | {cublas:8.3f} | {gap:5.2f} |"
                f" {'; '.join(f'{name} {short(tile)}' for name, tile in tiles.items())}",
                flush=True,
            )
            rows.append({"model": model.name, "tokens": num_tokens, "floor_ms": floor, "ms": ms, "tuned_ms": tuned_ms})
            rows[-1]["cublas_ms"] = cublas
        del chain, run
        torch.cuda.empty_cache()
    return rows


def time_small_kernels(model: Model) -> None:
    print("\nus               T |   ours  torch")
    for num_tokens in (1, 64, 256, 2048):
        x = torch.randn(num_tokens, model.width, device="cuda").to(DTYPE)
        weight = torch.ones(model.width, device="cuda", dtype=DTYPE)
        wide = torch.randn(num_tokens, 2 * model.mlp_width, device="cuda").to(DTYPE)
        heads = torch.randn(num_tokens, model.layer[0].rows, device="cuda").to(DTYPE)
        positions = torch.arange(num_tokens, device="cuda", dtype=torch.int32)
        table = torch.randn(4096, model.head_dim, device="cuda").to(DTYPE)
        cache = torch.zeros(2, 4096, model.num_kv_heads, model.head_dim, device="cuda", dtype=DTYPE)

        def many(body: Callable[[], object]) -> float:
            return replay_us(graph_of(lambda: [body() for _ in range(20)])) / 20

        def torch_gated(wide: torch.Tensor = wide) -> torch.Tensor:
            gate, up = wide.chunk(2, dim=-1)
            return F.silu(gate).mul_(up)

        ours = many(lambda x=x, weight=weight: rms_norm(x, weight, EPS))
        theirs = many(lambda x=x, weight=weight: F.rms_norm(x, weight.shape, weight, EPS))
        print(f"rms_norm      {num_tokens:5} | {ours:6.2f} {theirs:6.2f}")
        ours = many(lambda wide=wide: gated(wide, "silu"))
        print(f"gated         {num_tokens:5} | {ours:6.2f} {many(torch_gated):6.2f}")
        rotate = many(
            lambda heads=heads, positions=positions, table=table, cache=cache: rotate_and_store(
                heads, positions, positions, table, *cache, model.num_heads, model.num_kv_heads, model.head_dim
            )
        )
        print(f"rotate, store {num_tokens:5} | {rotate:6.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="8B,1B")
    parser.add_argument("--tokens", default="1,5,8,16,40,64")
    parser.add_argument("--bandwidth", type=float, default=4260.0, help="GB/s that a copy on the device reaches")
    parser.add_argument("--parts", default="products,chains,small", help="chains need products")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    models = [MODELS[name] for name in options.models.split(",")]
    tokens = [int(text) for text in options.tokens.split(",")]
    results: dict[str, object] = {}
    begin = time.perf_counter()
    num_workers = min(os.cpu_count() or 1, 16)
    with ProcessPoolExecutor(num_workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        if "products" in options.parts:
            best, results["products"] = time_products(models, tokens, pool, options.bandwidth)
            if options.out:
                options.out.write_text(json.dumps(results))
            if "chains" in options.parts:
                results["chains"] = time_chains(models, tokens, best, options.bandwidth)
    if "small" in options.parts:
        time_small_kernels(models[0])
    if options.out:
        options.out.write_text(json.dumps(results))
    print(f"\n{time.perf_counter() - begin:.0f} s in all")


if __name__ == "__main__":
    main()
