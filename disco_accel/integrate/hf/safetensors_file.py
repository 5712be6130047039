"""The tensors of a safetensors file: its header, checked before a byte of it is used, and reads without a mapping.

The format: eight bytes with the length of a JSON header, the header (name → dtype, shape, data_offsets), the data.

Pages of a mapped file count as resident memory of the process that has read them, beside the weights made of them. Such
a load has the whole checkpoint twice at its peak, so transformers reads files here too, in one thread and for the time
of one load.
"""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import modeling_utils

from disco_accel.capture.thread_patches import patched
from disco_accel.errors import ConfigError

_OPENER = "safe_open"
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
    """One tensor of a file: ``nbytes`` bytes at ``offset`` from the file's start, contiguous.

    It stands for a slice of safetensors' where transformers loads a model, and is read each time it is indexed.
    """

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

    @property
    def room(self) -> int:
        """Bytes held while it is read: its own."""
        return self.nbytes

    def get_shape(self) -> list[int]:
        """Its sizes."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """Its data type in the file's words, such as ``BF16``."""
        return next(name for name, dtype in _DTYPES.items() if dtype is self.dtype)

    def __getitem__(self, key: Any) -> torch.Tensor:
        """The tensor at ``key``, which PyTorch's indexing takes, aligned and in memory of its own.

        Raises:
            ConfigError: the file ends too early or cannot be read.
            IndexError: ``key`` is outside the tensor.
        """
        read = self.read()
        # A part is copied, because a view would hold the whole.
        return read if key is Ellipsis else read[key].clone()


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


@contextmanager
def files_read_unmapped(stored: Iterable[StoredTensor]) -> Iterator[None]:
    """Inside, the files of ``stored`` are read tensor by tensor where transformers opens them to load a model.

    Other threads, other files and other devices than the CPU get safetensors' own ``safe_open``. Where a later
    transformers opens files by another name, all do: the bits are the same, and the files are mapped.
    """
    if not hasattr(modeling_utils, _OPENER):
        yield
        return
    files: dict[str, dict[str, StoredTensor]] = defaultdict(dict)
    for tensor in stored:
        files[os.path.realpath(tensor.file)][tensor.name] = tensor

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def opened(filename: Any, framework: Any = "pt", device: Any = "cpu", **options: Any) -> Any:
            tensors = files.get(os.path.realpath(filename))
            if tensors is None or framework not in ("pt", "torch", "pytorch") or str(device) != "cpu":
                return original(filename, framework=framework, device=device, **options)
            return _UnmappedFile(tensors, lambda: original(filename, framework=framework, device=device, **options))

        return opened

    with patched(modeling_utils, _OPENER, make):
        yield


class _UnmappedFile:
    """An open file for transformers: its tensors by name; all other attributes are the mapped file's, once it is
    asked."""

    def __init__(self, tensors: Mapping[str, StoredTensor], mapped: Callable[[], Any]) -> None:
        self._tensors = tensors
        self._mapped = mapped

    def __enter__(self) -> _UnmappedFile:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is open between two reads."""

    def keys(self) -> list[str]:
        """Names of the tensors, in safetensors' order."""
        return sorted(self._tensors)

    def get_slice(self, name: str) -> Any:
        """The tensor ``name``, read each time it is indexed. Raises safetensors' error for a name not in the file."""
        return self._tensors[name] if name in self._tensors else self._mapped().get_slice(name)

    def get_tensor(self, name: str) -> Any:
        """The tensor ``name``, read whole. Raises as ``get_slice``, and ConfigError."""
        return self.get_slice(name)[...]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mapped(), name)
