"""The Triton kernels of decoder layers against the PyTorch parts they stand in for.

They run on a CUDA device where there is one, else in Triton's interpreter, whose bfloat16 products are wrong: half
precision is float16 there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from dsde.models.attention import write_kv
from dsde.models.config import Rope
from dsde.models.kernels import fragment
from dsde.models.kernels.fragment import FragmentTile
from dsde.models.kernels.gate import Activation, gated
from dsde.models.kernels.matmul import RowTile, Tile, choose_tile, is_skinny, skinny_linear
from dsde.models.kernels.norm import rms_norm
from dsde.models.kernels.rotary import rotate_and_store
from dsde.models.layers import Rotary, rotate

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
HALF = torch.bfloat16 if HAS_GPU else torch.float16
EPS = 1e-5
ACTIVATIONS = {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh")}


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=not HAS_GPU)
def gluon_without_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter knows no Gluon; but without its layouts, Gluon is Triton."""
    for name in ("_index", "_load", "_norm", "_fragment_kernel"):
        monkeypatch.setattr(fragment, name, InterpretedFunction(getattr(fragment, name).fn))

    def drop_layout(name: str):
        return lambda *arguments, layout=None, **options: getattr(tl, name)(*arguments, **options)

    shared = ("arange", "expand_dims", "load", "minimum", "permute", "program_id", "reshape", "split", "static_range")
    language = SimpleNamespace(**{name: drop_layout(name) for name in (*shared, "store", "sum", "zeros")})
    language.float32, language.int64 = tl.float32, tl.int64
    language.convert_layout = lambda value, layout, assert_trivial=False: value
    language.SliceLayout = language.DotOperandLayout = lambda *arguments: None
    monkeypatch.setattr(fragment, "gl", language)
    monkeypatch.setattr(fragment, "mma_v2", drop_layout("dot"))
    for name in ("_product_layout", "_sum_layout"):
        monkeypatch.setattr(fragment, name, lambda *arguments: None)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(device=DEVICE, dtype=dtype)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """`expected` is exact; `actual` may be rounded to `dtype` on the way."""
    tolerance = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance)


def reference_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    gate: Activation | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    x = x.double()
    if norm_weight is not None:
        x = F.rms_norm(x, x.shape[-1:], norm_weight.double(), EPS)
    result = F.linear(x, weight.double(), None if bias is None else bias.double())
    if gate is not None:
        gates, up = result.chunk(2, dim=-1)
        result = ACTIVATIONS[gate](gates) * up
    return result if residual is None else result + residual.double()


def weight_of(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(rows, width, device=DEVICE) / width**0.5).to(dtype)


SHAPES = [(1, 40, 48), (2, 64, 32), (4, 34, 96), (5, 34, 96), (8, 140, 40), (9, 70, 64), (16, 200, 272)]


@pytest.mark.parametrize(
    ("num_tokens", "rows", "width", "dtype"),
    [(*shape, HALF) for shape in SHAPES] + [(*shape, torch.float32) for shape in SHAPES if shape[0] <= 4],
    ids=str,
)
def test_linear(num_tokens: int, rows: int, width: int, dtype: torch.dtype) -> None:
    x, weight, bias = random(num_tokens, width, dtype=dtype), weight_of(rows, width, dtype), random(rows, dtype=dtype)
    assert is_skinny(num_tokens, weight)
    assert_close(skinny_linear(x, weight), reference_linear(x, weight), dtype)
    assert_close(skinny_linear(x, weight, bias), reference_linear(x, weight, bias), dtype)


TILES = [
    RowTile(8, 1, 4),
    RowTile(8, 2, 4),
    FragmentTile(8, columns=64, num_warps=2, depth=1, resident=2),
    FragmentTile(8, columns=64, num_warps=1, depth=3, resident=3, norms=False),
    FragmentTile(16, columns=64, num_warps=1, depth=4, resident=4),
    FragmentTile(16, columns=128, num_warps=1, depth=2, resident=2),
]


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("gate", [None, "silu", "gelu_tanh"])
def test_everything_fused(tile: Tile, gate: Activation | None) -> None:
    x, weight, bias = random(6, 96, dtype=HALF), weight_of(76, 96, HALF), random(76, dtype=HALF)
    norm_weight = random(96)
    residual = random(6, 76 if gate is None else 38, dtype=HALF)
    expected = reference_linear(x, weight, bias, norm_weight, gate, residual)
    actual = skinny_linear(
        x, weight, bias, norm_weight=norm_weight, norm_eps=EPS, gate=gate, residual=residual, tile=tile
    )
    assert actual is residual
    assert_close(actual, expected, HALF)


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_a_norm_alone(tile: Tile) -> None:
    x, weight, norm_weight = random(2, 64, dtype=HALF), weight_of(16, 64, HALF), random(64, dtype=HALF)
    actual = skinny_linear(x, weight, norm_weight=norm_weight, norm_eps=EPS, tile=tile)
    assert_close(actual, reference_linear(x, weight, norm_weight=norm_weight), HALF)


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_a_row_does_not_depend_on_its_neighbours(tile: Tile) -> None:
    x, weight, norm_weight = random(6, 96, dtype=HALF), weight_of(32, 96, HALF), random(96, dtype=HALF)

    def rows(count: int) -> torch.Tensor:
        return skinny_linear(x[:count], weight, norm_weight=norm_weight, norm_eps=EPS, tile=tile)

    assert torch.equal(rows(6)[:2], rows(2))


def test_strided_rows() -> None:
    wide, weight = random(3, 128), weight_of(16, 64, torch.float32)
    out = torch.zeros(3, 40, device=DEVICE)
    assert skinny_linear(wide[:, 64:], weight, out=out[:, :16]).data_ptr() == out.data_ptr()
    assert_close(out[:, :16], reference_linear(wide[:, 64:], weight), torch.float32)
    assert not out[:, 16:].any()


WEIGHTS = [(64, 32), (6144, 4096), (28672, 4096), (4096, 14336), (8192, 28672), (128256, 2048), (896, 4864)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_tokens", range(1, 18))
def test_what_is_skinny_has_a_tile_that_holds_it(num_tokens: int, dtype: torch.dtype) -> None:
    for shape in WEIGHTS:
        weight = torch.empty(shape, dtype=dtype, device="meta")
        if is_skinny(num_tokens, weight):
            for has_gate in (False, True):
                assert choose_tile(num_tokens, weight, has_gate).tokens >= num_tokens


def test_what_is_not_skinny() -> None:
    weight = torch.empty(64, 32, dtype=HALF, device="meta")
    assert is_skinny(16, weight)
    assert not is_skinny(17, weight)
    assert not is_skinny(5, weight.float())
    assert not is_skinny(5, weight.t())
    assert not is_skinny(5, torch.empty(64, 36, dtype=HALF, device="meta"))
    assert not is_skinny(1, torch.empty(64, 1 << 16, dtype=HALF, device="meta"))
    with pytest.raises(ValueError, match="too many rows: 17"):
        choose_tile(17, weight, False)
    with pytest.raises(ValueError, match="too many rows: 5"):
        choose_tile(5, weight.float(), False)
    with pytest.raises(ValueError, match="too wide"):
        choose_tile(1, torch.empty(64, 1 << 16, dtype=HALF, device="meta"), False)


@pytest.mark.parametrize("num_tokens", [2, 8, 9, 16])
@pytest.mark.parametrize("width", [32, 48, 576, 896, 2048, 8192, 14336])
def test_tiles_fit_the_shape(num_tokens: int, width: int) -> None:
    """No warp of a block without columns, and registers for more than the weights that a thread has under way."""
    for rows in (64, 2048, 4096, 6144, 16384, 128256):
        tile = fragment.choose_tile(num_tokens, rows, width, 132)
        assert (tile.num_warps // 2) * tile.columns < width
        registers_of_weights = tile.depth * 16 * tile.columns // 32 // 2
        assert registers_of_weights < fragment.max_registers(tile)


FULL_SIZES: list[tuple[int, int, Activation | None]] = [
    (6144, 4096, None),
    (4096, 14336, None),
    (28672, 4096, "silu"),
    (16384, 2048, "silu"),
    (9728, 896, "silu"),
    (151936, 896, None),
    (960, 576, None),
    (2048, 20480, None),
]
"""Weights of models from 135 million to 8 billion parameters, and one that only the fragment kernel takes."""


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="no CUDA device")
@pytest.mark.parametrize("num_tokens", [1, 2, 5, 8, 16])
@pytest.mark.parametrize(("rows", "width", "gate"), FULL_SIZES)
def test_linear_at_full_size(num_tokens: int, rows: int, width: int, gate: Activation | None) -> None:
    x, weight = random(num_tokens, width, dtype=HALF), weight_of(rows, width, HALF)
    norm_weight = random(width, dtype=HALF)
    expected = reference_linear(x, weight, norm_weight=norm_weight, gate=gate)
    assert_close(skinny_linear(x, weight, norm_weight=norm_weight, norm_eps=EPS, gate=gate), expected, HALF)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="no CUDA device")
@pytest.mark.parametrize("num_tokens", [1, 2, 5, 8, 16])
@pytest.mark.parametrize(("width", "inner"), [(2048, 4096), (4096, 9216), (896, 4864)])
def test_a_layer_in_a_graph(width: int, inner: int, num_tokens: int) -> None:
    """Products that feed each other, replayed: early launch must not let one read what another has yet to write."""
    heads = 3 * width // 2
    shapes = [(heads, width), (width, heads), (2 * inner, width), (width, inner)]
    layers = [[weight_of(*shape, HALF) for shape in shapes] for _ in range(6)]
    norm_weight, start = random(width, dtype=HALF), random(num_tokens, width, dtype=HALF)

    def forward(hidden: torch.Tensor, after_each: Callable[[], None]) -> torch.Tensor:
        for qkv, output, gate_up, down in layers:
            mixed = skinny_linear(hidden, qkv, norm_weight=norm_weight, norm_eps=EPS)
            after_each()
            skinny_linear(mixed, output, residual=hidden)
            after_each()
            mixed = skinny_linear(hidden, gate_up, norm_weight=norm_weight, norm_eps=EPS, gate="silu")
            after_each()
            skinny_linear(mixed, down, residual=hidden)
            after_each()
        return hidden

    expected = forward(start.clone(), torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = forward(start.clone(), lambda: None)
    for _ in range(50):
        graph.replay()
        assert torch.equal(result, expected)


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=["single", "half"])
@pytest.mark.parametrize("norm_dtype", [None, torch.float32, HALF], ids=["plain", "wide norm", "half norm"])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 2, 16), (9, 3, 64), (2, 1, 80)])
def test_rotate_and_store(
    num_heads: int, num_kv_heads: int, head_dim: int, norm_dtype: torch.dtype | None, dtype: torch.dtype
) -> None:
    num_tokens, num_slots = 4, 32
    rotary = Rotary(Rope(theta=10000.0), head_dim, 64, dtype, DEVICE)
    positions = torch.tensor([0, 7, 63, 3], device=DEVICE, dtype=torch.int32)
    slots = torch.tensor([5, 31, -1, 0], device=DEVICE, dtype=torch.int32)
    heads = random(num_tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    num_rotated = num_heads + num_kv_heads
    norm_weight = None if norm_dtype is None else random(num_rotated, head_dim, dtype=norm_dtype)
    caches = [random(num_slots, num_kv_heads, head_dim, dtype=dtype) for _ in range(2)]

    qk = heads[:, :num_rotated].float()
    if norm_weight is not None:
        qk = F.rms_norm(qk, (head_dim,), None, EPS) * norm_weight.float()
    cos, sin = rotary.table[positions.long(), None].float().chunk(2, dim=-1)
    qk = rotate(qk, (torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1))).to(dtype)
    expected_k, expected_v = (cache.clone() for cache in caches)
    stored = slots >= 0
    write_kv(expected_k, expected_v, qk[stored, num_heads:], heads[stored, num_rotated:], slots[stored].long())

    q = rotate_and_store(
        heads.flatten(1), positions, slots, rotary.table, *caches, num_heads, num_kv_heads, head_dim, norm_weight, EPS
    )
    assert q.is_contiguous()
    assert_close(q, qk[:, :num_heads], dtype)
    assert_close(caches[0], expected_k, dtype)
    assert torch.equal(caches[1], expected_v)


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=["single", "half"])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("width", [48, 1030])
def test_gated(width: int, activation: Activation, dtype: torch.dtype) -> None:
    gate_up = random(3, 2 * width, dtype=dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert_close(gated(gate_up, activation), ACTIVATIONS[activation](gate) * up, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=["single", "half"])
@pytest.mark.parametrize("norm_dtype", [torch.float32, HALF], ids=["wide weight", "half weight"])
@pytest.mark.parametrize("width", [48, 1024])
def test_rms_norm(width: int, norm_dtype: torch.dtype, dtype: torch.dtype) -> None:
    x, weight = random(5, width, dtype=dtype), random(width, dtype=norm_dtype)
    expected = F.rms_norm(x.double(), (width,), weight.double(), EPS)
    assert_close(rms_norm(x, weight, EPS), expected, dtype)
