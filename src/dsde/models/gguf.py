"""Reads GGUF files (versions 2 and 3): metadata, and tensors as float32.

Knows the container. Knows nothing of architectures or of Hugging Face names (see `gguf_model`), nor of how
quantised blocks are spelt (see `gguf_quant`).
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dsde.core.errors import ModelError
from dsde.models.gguf_quant import FORMATS, Bytes, Floats, unpack

_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_STRING, _ARRAY = 8, 9

# A tensor is unpacked in parts of this many numbers, so that one large embedding keeps every thread busy.
_PART_ELEMENTS = 1 << 22
_THREADS = 8


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies in its file."""

    type_id: int
    shape: tuple[int, ...]
    """rows first, as PyTorch counts"""
    start: int
    end: int


class _Cursor:
    """Walks through the header; a step past the end raises `struct.error` or `ValueError`."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def scalar(self, type_id: int) -> Any:
        form = _SCALARS[type_id]
        (value,) = form.unpack_from(self.data, self.at)
        self.at += form.size
        return value

    def string(self) -> str:
        start = self.at + 8
        self.at = start + int.from_bytes(self.data[self.at : start], "little")
        if self.at > len(self.data):
            raise ValueError("string beyond the end")
        return str(self.data[start : self.at], "utf-8", "replace")

    def value(self, type_id: int) -> Any:
        if type_id == _STRING:
            return self.string()
        if type_id != _ARRAY:
            return self.scalar(type_id)
        element, count = self.scalar(4), self.scalar(10)
        if count > len(self.data):
            raise ValueError("array beyond the end")
        if element in (_STRING, _ARRAY):
            return [self.value(element) for _ in range(count)]
        form = _SCALARS[element]
        values = np.frombuffer(self.data, np.dtype(form.format), count, self.at)
        self.at += values.nbytes
        return values.tolist()


class GGUFFile:
    """An open GGUF file: `meta` by key, `tensors` by their GGUF name, numbers read on demand."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._data = _map(path)
        cursor = _Cursor(self._data)
        try:
            num_tensors = _read_preamble(cursor, path)
            self.meta = _read_meta(cursor)
            self.tensors = _read_tensor_table(cursor, num_tensors, self.meta.get("general.alignment", 32), path)
        except (struct.error, ValueError, LookupError, ArithmeticError, TypeError, RecursionError) as error:
            raise ModelError(f"{path} is a damaged or truncated GGUF file; download it again.") from error
        if any(info.end > len(self._data) for info in self.tensors.values()):
            raise ModelError(f"{path} is truncated: some of its weights lie past its end; download it again.")

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """The named tensors as float32, unpacked by several threads."""
        results: dict[str, torch.Tensor] = {}
        # NumPy lets go of the interpreter lock, and unlike torch's own threads these need no global setting.
        with ThreadPoolExecutor(_THREADS) as pool:
            jobs = []
            for name in names:
                info = self.tensors[name]
                kind = FORMATS[info.type_id]
                flat = np.empty(int(np.prod(info.shape)), np.float32)
                results[name] = torch.from_numpy(flat).reshape(info.shape)
                for raw, out in self._parts(info, flat):
                    jobs.append(pool.submit(unpack, kind, raw, out))
            for job in jobs:
                job.result()
        return results

    def _parts(self, info: TensorInfo, flat: Floats) -> Iterable[tuple[Bytes, Floats]]:
        kind = FORMATS[info.type_id]
        raw = np.frombuffer(self._data, np.uint8, info.end - info.start, info.start)
        for first in range(0, flat.size, _PART_ELEMENTS):
            last = min(first + _PART_ELEMENTS, flat.size)
            yield (
                raw[first // kind.elements * kind.bytes : last // kind.elements * kind.bytes],
                flat[first:last],
            )


def _map(path: Path) -> mmap.mmap:
    try:
        with open(path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise ModelError(f"{path} is an empty file; download it again.") from error


def _read_preamble(cursor: _Cursor, path: Path) -> int:
    if cursor.data[:4] != b"GGUF":
        raise ModelError(f"{path} is not a GGUF file.")
    cursor.at = 4
    version = cursor.scalar(4)
    if version not in (2, 3):
        raise ModelError(f"{path} is GGUF version {version}; versions 2 and 3 (little-endian) can be read.")
    return int(cursor.scalar(10))


def _read_meta(cursor: _Cursor) -> dict[str, Any]:
    meta = {}
    for _ in range(cursor.scalar(10)):
        key = cursor.string()
        meta[key] = cursor.value(cursor.scalar(4))
    return meta


def _read_tensor_table(cursor: _Cursor, num_tensors: int, alignment: int, path: Path) -> dict[str, TensorInfo]:
    entries = []
    for _ in range(num_tensors):
        name = cursor.string()
        dims = [int(cursor.scalar(10)) for _ in range(cursor.scalar(4))]
        entries.append((name, tuple(reversed(dims)), cursor.scalar(4), cursor.scalar(10)))
    base = -(-cursor.at // alignment) * alignment
    tensors = {}
    for name, shape, type_id, offset in entries:
        if type_id not in FORMATS:
            allowed = ", ".join(kind.name for kind in FORMATS.values())
            raise ModelError(f"{path} holds {name} in GGUF tensor type {type_id}; the types read are {allowed}.")
        kind = FORMATS[type_id]
        if shape[-1] % kind.elements:
            raise ValueError("row does not consist of whole blocks")
        num_bytes = int(np.prod(shape, dtype=object)) // kind.elements * kind.bytes
        tensors[name] = TensorInfo(type_id, shape, base + offset, base + offset + num_bytes)
    return tensors
