"""One read-only copy of tensors for all processes of a user: found by its content, made by the first that asks.

A copy is a file in memory (``shared_memory.py``) with a last page that names it. Both are final before another process
hears of it, sealed by the kernel: a maker that dies leaves nothing that anybody could read half. The copy lives as long
as one process has it open.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from disco_accel.errors import ExecutionError
from disco_accel.host_limits import own_bytes, require_left
from disco_accel.native.extension import load_extension
from disco_accel.native.file_arena import PAGE, FileArena, whole_pages
from disco_accel.native.host_memory import ALIGNMENT, bytes_of, footprint, room_for_cuts
from disco_accel.native.rendezvous import Holder, NotSharedError, Rendezvous, this_process
from disco_accel.native.shared_memory import READ_ONLY, add_seals, create_file, seals_of

_NAME = "disco_accel weights"
_LAYOUT = 2
"""Of the bytes of a copy. Another number wherever the same tensors would lie elsewhere."""
_PIECE = 1 << 26
"""Bytes of a write; below the most that the kernel takes at once."""

Tell = Callable[[str], None]


def layout_of(tensors: Iterable[torch.Tensor]) -> str:
    """Where ``HostMemory`` puts each of ``tensors``, as text."""
    rows = [[str(t.dtype), list(t.shape), list(t.stride())] for t in tensors]
    return json.dumps([_LAYOUT, ALIGNMENT, PAGE, rows])


def key_of(tensors: Sequence[torch.Tensor]) -> str:
    """A name for the bytes of ``tensors`` in this order, their dtypes, shapes and strides: 32 hexadecimal digits.

    The bytes are read once, as fast as memory is. Raises NotSharedError for a tensor without bytes of its own.
    """
    load_extension()
    digest = hashlib.blake2b(layout_of(tensors).encode(), digest_size=16)
    plain = [bytes_of(t.detach()) for t in tensors if _is_plain(t)]
    groups = [plain, *([bytes_of(_packed(t))] for t in tensors if not _is_plain(t))]
    for group in groups:
        for half in torch.ops.disco_accel.content_key(group):
            digest.update(half.to_bytes(8, "little", signed=True))
    return digest.hexdigest()


def _is_plain(tensor: torch.Tensor) -> bool:
    if tensor.is_meta or tensor.layout is not torch.strided or tensor.is_quantized:
        raise NotSharedError(f"a frozen weight has no bytes of its own ({tensor.device}, {tensor.layout})")
    return tensor.is_cpu and footprint(tensor) <= tensor.nbytes


def _packed(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` in host memory, zeros in the holes between its elements."""
    span = torch.zeros(footprint(tensor) // tensor.element_size(), dtype=tensor.dtype)
    packed = span.as_strided(tensor.shape, tensor.stride())
    packed.copy_(tensor.detach())
    return packed


class SharedCopy:
    """A copy on its way to its place in this process: ``put`` all tensors, in the order of the key."""

    def __init__(self, arena: FileArena, file: int, *, is_new: bool) -> None:
        self.arena = arena
        self.is_new = is_new
        """Whether ``put`` writes the bytes; else they are there."""
        self.placed: list[torch.Tensor] = []
        self._file = file

    @property
    def origin(self) -> str:
        """Where its bytes come from, in words."""
        return "loaded for all processes of this user" if self.is_new else "loaded before"

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor in the copy that stands for ``tensor``, laid out alike. Raises ExecutionError: the machine has no
        memory for it."""
        placed = self.arena.allocate(tensor.shape, tensor.dtype, tensor.stride())
        if self.is_new and tensor.numel():
            data = bytes_of(tensor.detach() if _is_plain(tensor) else _packed(tensor))
            at = placed.data_ptr() - self.arena.first_byte
            _write(self._file, data.numpy().data, at)
        self.placed.append(placed)
        return placed


def _write(file: int, data: memoryview, at: int) -> None:
    while data:
        try:
            written = os.pwrite(file, data[:_PIECE], at)
        except OSError as error:
            raise ExecutionError(f"no shared memory for frozen weights: {error.strerror}") from error
        data, at = data[written:], at + written


@contextmanager
def shared_copy(
    folder: Path, key: str, room: int, still_right: Callable[[list[torch.Tensor]], bool], tell: Tell, warn: Tell
) -> Iterator[SharedCopy]:
    """The copy ``key`` of tensors that take ``room`` bytes, or the begin of one, which is shared when the block ends.

    ``still_right`` says whether the tensors that were put are those of the key, when nobody can change them any more.
    If not, they stay this process's alone. ``tell`` hears of waiting, ``warn`` of faults of files.

    Raises:
        ConfigError: as ``Rendezvous``.
        NotSharedError: before anything was put, if it cannot be shared here.
        ExecutionError: this process has no memory for it.
    """
    nbytes, rendezvous = whole_pages(room + room_for_cuts(room)), Rendezvous(folder)
    rendezvous.sweep()
    with rendezvous.locked(key, tell):
        try:
            holders = list(rendezvous.holders(key))
        except ValueError as error:
            warn(f"share_weights: the list of processes that share weights in {folder} is damaged ({error}); made anew")
            holders = []
        files = {holder: open_copy(holder, key, nbytes) for holder in holders}
        holders = [holder for holder, file in files.items() if file is not None]
        copy = _of_first([file for file in files.values() if file is not None], nbytes) or _new(nbytes)
        yield copy
        if copy.is_new and not _sealed(copy, key, nbytes, still_right):
            warn("share_weights: weights were written to while they were copied; this process keeps them for itself")
            return
        copy.arena.watch()
        with _as_warning(warn):
            rendezvous.write(key, [*holders, this_process(copy.arena.file)])


@contextmanager
def _as_warning(warn: Tell) -> Iterator[None]:
    try:
        yield
    except NotSharedError as error:
        warn(f"share_weights: other processes will not find this one's weights: {error}")


def _of_first(files: list[int], nbytes: int) -> SharedCopy | None:
    """The copy that the first of ``files`` is; the others, which are the same, are closed. None if there is none."""
    for file in files[1:]:
        os.close(file)
    if not files:
        return None
    try:
        arena = FileArena(files[0], nbytes)
        arena.map_ahead()
        return SharedCopy(arena, files[0], is_new=False)
    except (ExecutionError, RuntimeError) as error:
        os.close(files[0])
        raise NotSharedError(f"{nbytes} bytes cannot be mapped: {error}") from error


def _new(nbytes: int) -> SharedCopy:
    try:
        require_left(nbytes, "a copy of frozen weights that processes share", own_bytes())
        file = create_file(_NAME, nbytes + PAGE)
    except (AttributeError, ExecutionError) as error:
        raise NotSharedError(str(error)) from error
    try:
        # All of it at once: later a page that is not to be had would end the process.
        os.posix_fallocate(file, 0, nbytes + PAGE)
        arena = FileArena(file, nbytes)
    except (OSError, ExecutionError, RuntimeError) as error:
        with contextlib.suppress(OSError):
            os.close(file)
        raise NotSharedError(f"no shared memory of {nbytes} bytes: {error}") from error
    return SharedCopy(arena, file, is_new=True)


def _sealed(copy: SharedCopy, key: str, nbytes: int, still_right: Callable[[list[torch.Tensor]], bool]) -> bool:
    _write(copy.arena.file, memoryview(_last_page(key, nbytes)), nbytes)
    # Nobody has mapped it for writing. What is checked now is what all will read.
    if add_seals(copy.arena.file, READ_ONLY) and still_right(copy.placed):
        return True
    copy.arena.watch()
    return False


def _last_page(key: str, nbytes: int) -> bytes:
    return f"{_NAME} {_LAYOUT} {key} {nbytes}\n".encode().ljust(PAGE, b"\0")


def open_copy(holder: Holder, key: str, nbytes: int) -> int | None:
    """A descriptor of the copy that ``holder`` is said to have open; None if that is not the whole copy ``key``."""
    process, _started, descriptor = holder
    path = f"/proc/{process}/fd/{descriptor}"
    try:
        # Before it is opened, which has effects for other files than those in memory.
        if os.stat(f"/proc/{process}").st_uid != os.geteuid():
            return None
        if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
            return None
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        return None
    status = os.fstat(file)
    whole = stat.S_ISREG(status.st_mode) and status.st_size == nbytes + PAGE and seals_of(file) & READ_ONLY == READ_ONLY
    if whole and os.pread(file, PAGE, nbytes) == _last_page(key, nbytes):
        return file
    os.close(file)
    return None
