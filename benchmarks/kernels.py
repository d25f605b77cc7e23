"""The kernels of a decoder layer on a CUDA device: matrix products of few tokens, whole models, small kernels.

    python benchmarks/kernels.py [--models 8B,1B] [--tokens 1,2,5,8,16] [--search] [--out results.json]

Every product runs in a CUDA graph over so many copies of its weight that the L2 cache cannot help, ours and with
cuBLAS; `--search` adds other tiles than ours chooses, best first. Models then run with all layers in one graph, without
attention itself. Times are compared with the time it takes to read the weights at `--bandwidth`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
import triton

from dsde.models.kernels import matmul
from dsde.models.kernels.fragment import FEW_TOKENS, FragmentTile
from dsde.models.kernels.gate import gated
from dsde.models.kernels.matmul import MAX_TOKENS, RowTile, Tile, choose_tile, is_skinny, skinny_linear
from dsde.models.kernels.norm import rms_norm
from dsde.models.kernels.rotary import rotate_and_store
from dsde.models.linear import Linear
from dsde.models.norm import RMSNorm

DTYPE = torch.bfloat16
EPS = 1e-5
DISTINCT_BYTES = 600 << 20
VOCABULARY = 128256
Row = dict[str, object]


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


# Tiles to try


def candidates(matrix: Matrix, num_tokens: int) -> Iterator[Tile]:
    if num_tokens <= 2:
        # By KiB of weights and warps of a block.
        row_bytes = triton.next_power_of_2(matrix.width) * DTYPE.itemsize * (2 if matrix.gate else 1)
        for kib, num_warps in ((16, 4), (32, 4), (32, 8), (64, 8), (64, 16)):
            if kib * 1024 >= row_bytes:
                yield RowTile(num_tokens, kib * 1024 // row_bytes, num_warps)
    if num_tokens > 1:
        # By columns, warps, steps ahead and blocks of a multiprocessor.
        shapes = ((128, 16, 1, 2), (64, 16, 2, 2), (64, 16, 3, 1), (128, 8, 2, 2), (64, 8, 4, 2), (64, 8, 3, 3))
        for shape in (*shapes, (64, 8, 2, 4), (64, 4, 4, 4)):
            for norms in (True, False) if matrix.norm else (True,):
                yield FragmentTile(FEW_TOKENS if num_tokens <= FEW_TOKENS else MAX_TOKENS, *shape, norms=norms)


def short(tile: Tile) -> str:
    if isinstance(tile, RowTile):
        return f"row({tile.tokens},{tile.outputs},{tile.num_warps}w)"
    first = "" if tile.norms else "norm+"
    return f"{first}fragment({tile.tokens},{tile.columns}x{tile.num_warps}w,d{tile.depth},r{tile.resident})"


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


class Products:
    """The product of one matrix with some tokens, and what is fused around it, by us and by cuBLAS."""

    def __init__(self, matrix: Matrix, num_tokens: int) -> None:
        self.matrix = matrix
        self.x = torch.randn(num_tokens, matrix.width, device="cuda").to(DTYPE)
        self.norm_weight = torch.ones(matrix.width, device="cuda", dtype=DTYPE)
        self.residual = torch.zeros(num_tokens, matrix.rows, device="cuda", dtype=DTYPE)

    def ours(self, weight: torch.Tensor, tile: Tile) -> torch.Tensor:
        return skinny_linear(
            self.x,
            weight,
            norm_weight=self.norm_weight if self.matrix.norm else None,
            norm_eps=EPS,
            gate="silu" if self.matrix.gate else None,
            residual=self.residual if self.matrix.adds else None,
            tile=tile,
        )

    def library(self, weight: torch.Tensor) -> torch.Tensor:
        if self.matrix.adds:
            return self.residual.addmm_(self.x, weight.t())
        result = F.linear(rms_norm(self.x, self.norm_weight, EPS) if self.matrix.norm else self.x, weight)
        return gated(result, "silu") if self.matrix.gate else result


class Chain:
    """All layers of a model without attention itself, and its head."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.layers = [[Linear(random_weight(matrix)) for matrix in model.layer] for _ in range(model.num_layers)]
        self.head = Linear(random_weight(model.head))
        self.norm = RMSNorm(torch.ones(model.width, device="cuda", dtype=DTYPE), EPS)
        self.table = torch.randn(4096, model.head_dim, device="cuda").to(DTYPE)
        self.cache = torch.zeros(2, 1024, model.num_kv_heads, model.head_dim, device="cuda", dtype=DTYPE)

    def __call__(self, start: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        model = self.model
        hidden = start.clone()
        for qkv, output, gate_up, down in self.layers:
            q = rotate_and_store(
                qkv(hidden, norm=self.norm), positions, positions, self.table, *self.cache, model.num_heads,
                model.num_kv_heads, model.head_dim,
            )  # fmt: skip
            output(q.flatten(1), residual=hidden)
            down(gate_up(hidden, norm=self.norm, gate="silu"), residual=hidden)
        return self.head(hidden, norm=self.norm)


def random_weight(matrix: Matrix) -> torch.Tensor:
    weight = torch.empty(matrix.rows, matrix.width, dtype=DTYPE, device="cuda")
    return weight.normal_(std=0.2 / matrix.width**0.5)


# The three parts


def time_products(models: Sequence[Model], tokens: Sequence[int], search: bool, bandwidth: float) -> list[Row]:
    largest = max(model.head.num_bytes for model in models)
    store = torch.empty(max(DISTINCT_BYTES, largest) // DTYPE.itemsize, dtype=DTYPE, device="cuda").normal_(std=0.02)
    print("model matrix    M |   ours us  GB/s  % | cuBLAS us | tile (* where the engine takes cuBLAS)")
    rows: list[Row] = []
    for model in models:
        for matrix in (*model.layer, model.head):
            num_copies = store.numel() // (matrix.rows * matrix.width)
            weights = list(store[: num_copies * matrix.rows * matrix.width].view(num_copies, matrix.rows, matrix.width))
            for num_tokens in tokens:
                products = Products(matrix, num_tokens)
                default = choose_tile(num_tokens, weights[0], matrix.gate)
                tiles = dict.fromkeys([default, *(candidates(matrix, num_tokens) if search else ())])
                times = {tile: time_over(weights, partial(products.ours, tile=tile)) for tile in tiles}
                us, library_us = times[default], time_over(weights, products.library)
                rate = matrix.num_bytes / us / 1e3
                share = 100 * rate / bandwidth
                ranked = sorted(times, key=times.__getitem__)
                print(
                    f"{model.name:5} {matrix.name:8} {num_tokens:3} | {us:9.2f} {rate:5.0f} {share:3.0f}"
                    f" | {library_us:9.2f} | {short(default)}{'' if is_skinny(num_tokens, weights[0]) else ' *'}"
                    + "".join(f"; {short(tile)} {times[tile]:.2f}" for tile in ranked[:4] if search),
                    flush=True,
                )
                rows.append(
                    {"model": model.name, "matrix": matrix.name, "tokens": num_tokens, "us": us}
                    | {"cublas_us": library_us, "tiles": [[asdict(tile), times[tile]] for tile in ranked]}
                )
    return rows


def time_chains(models: Sequence[Model], tokens: Sequence[int], bandwidth: float) -> list[Row]:
    print("\nmodel  M | floor ms | ours ms (% of floor) | cuBLAS ms")
    rows: list[Row] = []
    for model in models:
        chain = Chain(model)
        floor = model.num_bytes / bandwidth / 1e6
        for num_tokens in tokens:
            start = torch.randn(num_tokens, model.width, device="cuda").to(DTYPE)
            positions = torch.arange(num_tokens, device="cuda", dtype=torch.int32)
            body = partial(chain, start, positions)
            ms = replay_us(graph_of(body), rounds=11) / 1e3
            with mock.patch.object(matmul, "is_skinny", return_value=False):
                library_ms = replay_us(graph_of(body), rounds=11) / 1e3
            share = 100 * floor / ms
            print(
                f"{model.name:4} {num_tokens:3} | {floor:8.3f} | {ms:8.3f} ({share:3.0f} %)     | {library_ms:8.3f}",
                flush=True,
            )
            rows.append({"model": model.name, "tokens": num_tokens, "floor_ms": floor, "ms": ms})
            rows[-1]["cublas_ms"] = library_ms
        del chain, body
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
    parser.add_argument("--tokens", default="1,2,5,8,16", help=f"at most {MAX_TOKENS}")
    parser.add_argument("--bandwidth", type=float, default=4260.0, help="GB/s that a copy on the device reaches")
    parser.add_argument("--search", action="store_true", help="time other tiles as well")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    models = [MODELS[name] for name in options.models.split(",")]
    tokens = [int(text) for text in options.tokens.split(",")]
    begin = time.perf_counter()
    products = time_products(models, tokens, options.search, options.bandwidth)
    chains = time_chains(models, tokens, options.bandwidth)
    time_small_kernels(models[0])
    if options.out:
        options.out.write_text(json.dumps({"products": products, "chains": chains}))
    print(f"\n{time.perf_counter() - begin:.0f} s in all")


if __name__ == "__main__":
    main()
