"""What a safetensors file says about itself, checked before a byte of it is used; and its tensors, read in place.

The format: eight bytes with the length of a JSON header, the header (name → dtype, shape, data_offsets), the data.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from disco_accel.errors import ConfigError

_PREFIX = 8
_LARGEST_HEADER = 100_000_000
_CHUNK = 4 << 20
"""Bytes converted at a time where file and model differ in dtype."""
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file: ``nbytes`` bytes at ``offset`` from the file's start, contiguous."""

    file: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    def read(self) -> torch.Tensor:
        """Its values, aligned and in memory of their own. Raises ConfigError: the file ends too early."""
        read = torch.empty(self.shape, dtype=self.dtype)
        with opened(self.file) as descriptor:
            read_into(descriptor, self, read, read)
        return read


def stored_tensors(file: Path) -> list[StoredTensor]:
    """The tensors of one file, in the order of its header.

    Raises:
        ConfigError: the file is missing, cut short or malformed; names the file and, where one is to blame, the tensor.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(_PREFIX), "little")
            if size < _PREFIX or length > min(_LARGEST_HEADER, size - _PREFIX):
                raise ConfigError(f"{file}: not a whole safetensors file: {size} bytes, header of {length}")
            header = json.loads(stream.read(length))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{file}: its header is no JSON ({error}); download it again") from error
    if not isinstance(header, dict):
        raise ConfigError(f"{file}: its header is no JSON object; download it again")
    room = size - _PREFIX - length
    return [
        _stored(file, name, entry, _PREFIX + length, room) for name, entry in header.items() if name != "__metadata__"
    ]


def _stored(file: Path, name: str, entry: Any, start: int, room: int) -> StoredTensor:
    where = f"{file}: tensor {name}"
    if not isinstance(entry, dict) or not all(key in entry for key in ("dtype", "shape", "data_offsets")):
        raise ConfigError(f"{where}: lacks dtype, shape or data_offsets; download the file again")
    dtype = _DTYPES.get(str(entry["dtype"]))
    if dtype is None:
        raise ConfigError(f"{where}: dtype {entry['dtype']!r} is unknown; known are {', '.join(_DTYPES)}")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _whole_numbers(shape) or not _whole_numbers(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ConfigError(f"{where}: shape {shape} with data_offsets {offsets} makes no sense; download the file again")
    nbytes = offsets[1] - offsets[0]
    if nbytes != math.prod(shape) * dtype.itemsize:
        raise ConfigError(
            f"{where}: {entry['dtype']} of shape {shape} has {math.prod(shape) * dtype.itemsize} bytes, "
            f"the header gives it {nbytes}; download the file again"
        )
    if offsets[1] > room:
        raise ConfigError(f"{where}: ends {offsets[1] - room} bytes behind the end of the file; download it again")
    return StoredTensor(file, name, dtype, tuple(shape), start + offsets[0], nbytes)


def _whole_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


@contextmanager
def opened(file: Path) -> Iterator[int]:
    """A descriptor of ``file`` for ``read_into``. Raises ConfigError."""
    try:
        descriptor = os.open(file, os.O_RDONLY)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def conversion_buffer() -> torch.Tensor:
    """For ``read_into``: one for a whole checkpoint, because many of many sizes would leave holes in the heap."""
    return torch.empty(_CHUNK, dtype=torch.uint8)


def read_into(descriptor: int, stored: StoredTensor, target: torch.Tensor, buffer: torch.Tensor) -> None:
    """Read a tensor into ``target``, contiguous and of the same shape, by way of ``buffer`` if the dtypes differ.

    Nothing is mapped, and no other copy is made.

    Raises:
        ConfigError: the file ends too early or cannot be read.
    """
    if target.numel() == 0:
        return
    if target.dtype is stored.dtype:
        _read(descriptor, stored, stored.offset, target.view(-1).view(torch.uint8))
        return
    flat = target.view(-1)
    values = buffer.view(stored.dtype)
    step = values.numel()
    for begin in range(0, flat.numel(), step):
        part = values[: min(step, flat.numel() - begin)]
        _read(descriptor, stored, stored.offset + begin * stored.dtype.itemsize, part.view(torch.uint8))
        flat[begin : begin + part.numel()].copy_(part)


def _read(descriptor: int, stored: StoredTensor, offset: int, target: torch.Tensor) -> None:
    memory = target.numpy().data
    done = 0
    while done < len(memory):
        try:
            got = os.preadv(descriptor, [memory[done:]], offset + done)
        except OSError as error:
            raise ConfigError(f"{stored.file}: tensor {stored.name}: cannot be read: {error.strerror}") from error
        if got == 0:
            raise ConfigError(
                f"{stored.file}: tensor {stored.name}: the file ends {len(memory) - done} bytes too early"
            )
        done += got


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A tensor of a file that is read each time it is indexed: what transformers uses of safetensors' slices.

    Nothing is mapped: pages of a mapped file would stay in memory beside the weights.
    """

    stored: StoredTensor

    def get_shape(self) -> list[int]:
        """Its sizes."""
        return list(self.stored.shape)

    def get_dtype(self) -> str:
        """Its data type in the file's words, such as ``BF16``."""
        return next(name for name, dtype in _DTYPES.items() if dtype is self.stored.dtype)

    def __getitem__(self, key: Any) -> torch.Tensor:
        """The tensor at ``key``, which PyTorch's indexing takes, aligned and in memory of its own.

        Raises:
            ConfigError: the file ends too early or cannot be read.
            IndexError: ``key`` is outside the tensor.
        """
        read = self.stored.read()
        # A part is copied, because a view would hold the whole.
        return read if key is Ellipsis else read[key].clone()
