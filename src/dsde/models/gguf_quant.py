"""Block formats of GGUF tensors, unpacked to float32 with NumPy.

Knows how the bytes of one block spell its numbers. Knows nothing of files, tensor names or models.
Every `_unpack_*` takes blocks [n, block bytes] uint8 and fills out [n, block elements] float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

# 128 K numbers: large enough to hide NumPy's call overhead, small enough that every pass over them stays in cache.
CHUNK_ELEMENTS = 1 << 17


def _half(raw: Bytes) -> Floats:
    return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes, out: NDArray[np.uint8] | Floats) -> None:
    """Low nibbles fill the first half of each row, high nibbles the second."""
    half = packed.shape[-1]
    out[..., :half] = packed & 15
    out[..., half:] = packed >> 4


def _unpack_f32(blocks: Bytes, out: Floats) -> None:
    out[:] = blocks.view(np.float32)


def _unpack_f16(blocks: Bytes, out: Floats) -> None:
    out[:] = blocks.view(np.float16)


def _unpack_bf16(blocks: Bytes, out: Floats) -> None:
    np.left_shift(blocks.view(np.uint16), np.uint32(16), out=out.view(np.uint32), dtype=np.uint32)


def _unpack_q4_0(blocks: Bytes, out: Floats) -> None:
    _nibbles(blocks[:, 2:], out)
    out -= 8
    out *= _half(blocks[:, :2])


def _unpack_q4_1(blocks: Bytes, out: Floats) -> None:
    scale_min = _half(blocks[:, :4])
    _nibbles(blocks[:, 4:], out)
    out *= scale_min[:, :1]
    out += scale_min[:, 1:]


def _five_bits(high_bits: Bytes, packed: Bytes, out: Floats) -> None:
    fifth = np.unpackbits(high_bits, axis=1, bitorder="little")
    fifth <<= 4
    _nibbles(packed, out)
    out += fifth


def _unpack_q5_0(blocks: Bytes, out: Floats) -> None:
    _five_bits(blocks[:, 2:6], blocks[:, 6:], out)
    out -= 16
    out *= _half(blocks[:, :2])


def _unpack_q5_1(blocks: Bytes, out: Floats) -> None:
    scale_min = _half(blocks[:, :4])
    _five_bits(blocks[:, 4:8], blocks[:, 8:], out)
    out *= scale_min[:, :1]
    out += scale_min[:, 1:]


def _unpack_q8_0(blocks: Bytes, out: Floats) -> None:
    out[:] = blocks[:, 2:].view(np.int8)
    out *= _half(blocks[:, :2])


def _scales_and_mins(blocks: Bytes) -> tuple[Floats, Floats]:
    """The eight 6-bit scales and minima of a Q4_K or Q5_K block, times the block's own scale and minimum."""
    block_scale_min = _half(blocks[:, :4])
    first, second, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([first & 63, (rest & 15) | ((first >> 6) << 4)], axis=1)
    mins = np.concatenate([second & 63, (rest >> 4) | ((second >> 6) << 4)], axis=1)
    return block_scale_min[:, :1] * scales, block_scale_min[:, 1:] * mins


def _unpack_q4_k(blocks: Bytes, out: Floats) -> None:
    scales, mins = _scales_and_mins(blocks)
    _nibbles(blocks[:, 16:].reshape(-1, 4, 32), out.reshape(-1, 4, 64))
    groups = out.reshape(-1, 8, 32)
    groups *= scales[:, :, None]
    groups -= mins[:, :, None]


def _unpack_q5_k(blocks: Bytes, out: Floats) -> None:
    scales, mins = _scales_and_mins(blocks)
    _nibbles(blocks[:, 48:].reshape(-1, 4, 32), out.reshape(-1, 4, 64))
    groups = out.reshape(-1, 8, 32)
    # Bit g of the 32 high-bit bytes belongs to group g.
    shifts = np.arange(8, dtype=np.uint8)[None, :, None]
    groups += ((blocks[:, None, 16:48] >> shifts) & 1) << 4
    groups *= scales[:, :, None]
    groups -= mins[:, :, None]


def _unpack_q6_k(blocks: Bytes, out: Floats) -> None:
    scales = _half(blocks[:, 208:]) * blocks[:, 192:208].view(np.int8)
    _nibbles(blocks[:, :128].reshape(-1, 2, 64), out.reshape(-1, 2, 128))
    # Each half block has 32 bytes of high bits; bits 2i and 2i+1 of them belong to its i-th run of 32 numbers.
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[None, None, :, None]
    quarters = out.reshape(-1, 2, 4, 32)
    quarters += ((blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3) << 4
    out -= 32
    groups = out.reshape(-1, 16, 16)
    groups *= scales[:, :, None]


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """How a GGUF tensor type lays out its numbers."""

    name: str
    elements: int
    bytes: int
    unpack: Callable[[Bytes, Floats], None]


FORMATS = {
    0: BlockFormat("F32", 1, 4, _unpack_f32),
    1: BlockFormat("F16", 1, 2, _unpack_f16),
    2: BlockFormat("Q4_0", 32, 18, _unpack_q4_0),
    3: BlockFormat("Q4_1", 32, 20, _unpack_q4_1),
    6: BlockFormat("Q5_0", 32, 22, _unpack_q5_0),
    7: BlockFormat("Q5_1", 32, 24, _unpack_q5_1),
    8: BlockFormat("Q8_0", 32, 34, _unpack_q8_0),
    12: BlockFormat("Q4_K", 256, 144, _unpack_q4_k),
    13: BlockFormat("Q5_K", 256, 176, _unpack_q5_k),
    14: BlockFormat("Q6_K", 256, 210, _unpack_q6_k),
    30: BlockFormat("BF16", 1, 2, _unpack_bf16),
}
"""Supported tensor types by the id that GGUF files use."""


def unpack(kind: BlockFormat, raw: Bytes, out: Floats) -> None:
    """Unpack `raw` (whole blocks) into the flat array `out`, a cache-sized chunk at a time."""
    blocks, numbers = raw.reshape(-1, kind.bytes), out.reshape(-1, kind.elements)
    step = CHUNK_ELEMENTS // kind.elements
    for start in range(0, len(blocks), step):
        kind.unpack(blocks[start : start + step], numbers[start : start + step])
