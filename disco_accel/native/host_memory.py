"""Host memory of the frozen weights: one anonymous arena that the parameters are moved into."""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch

from disco_accel.errors import ExecutionError
from disco_accel.graph.taskgraph import TensorSpec
from disco_accel.host_limits import require_left
from disco_accel.native.arena import alias, host_arena, touched_bytes
from disco_accel.native.cuda_backend import LockingRefused, pin, tell_of_refusal
from disco_accel.native.device_types import DEVICE_TYPES
from disco_accel.native.extension import load_extension
from disco_accel.native.numa import prefer_node_of

ALIGNMENT = 64
"""Bytes. ATen's CPU kernels give other bits for less aligned fp32 operands."""


_HUGE_PAGE = 2 << 20
_MADV_HUGEPAGE = 14
"""Linux, madvise(2)."""
_MOST_LOCKED_AT_ONCE = 1 << 30
"""Bytes. Drivers refuse to lock some gigabytes at once that they lock in pieces."""


def place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for tensors that are the same view of the same bytes."""
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def footprint(tensor: torch.Tensor) -> int:
    """Bytes from the first to the last element of ``tensor``, holes of a strided layout included."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def copied_from(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A new tensor in host memory that copies to and from ``device`` are fast with: page-locked for a GPU."""
    locked = DEVICE_TYPES[device.type].separate_memory
    return torch.empty_strided(shape, stride, dtype=dtype, pin_memory=locked)


class HostMemory:
    """An arena of ``nbytes`` bytes that hands out room for tensors from the bottom up and never takes it back."""

    def __init__(
        self,
        nbytes: int,
        *,
        huge_pages: bool = True,
        watched: bool = True,
        replaced: int = 0,
        gpu: torch.device | None = None,
    ) -> None:
        """``huge_pages`` asks the kernel for them; where it has none to give, pages are small as usual. ``watched``:
        the kernel tells which pages are written to, if it can; else tensors here are read to know. ``replaced``: bytes
        that are given up for tensors that move here. ``gpu``: its NUMA node is asked for pages first. Raises
        ExecutionError: the machine, or a limit of this process's, has less memory left."""
        require_left(nbytes, "an arena for weights or gradients", replaced)
        self._arena = self._map(nbytes)
        place_pages(self._arena, gpu, huge=huge_pages)
        # Nothing is protected yet: weights are loaded at full speed, before the first look at them.
        self._watched = watched
        if watched:
            torch.ops.disco_accel.watch_arena(self._arena)
        self._next = 0
        self._cuts: list[int] = []
        """Offsets at which a page and a tensor begin: none lies on both sides."""
        self._pinned: list[object] | None = None

    def _map(self, nbytes: int) -> torch.Tensor:
        return host_arena(nbytes + room_for_cuts(nbytes))

    def __deepcopy__(self, memo: dict[int, Any]) -> HostMemory:
        # A copied model's weights are ordinary tensors; the arena itself is never copied.
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return HostMemory, (0,)

    @staticmethod
    def room_for(tensors: Iterable[torch.Tensor]) -> int:
        """Bytes that an arena needs to adopt all of ``tensors``."""
        return sum(-(-footprint(t) // ALIGNMENT) * ALIGNMENT for t in tensors)

    @property
    def nbytes(self) -> int:
        """Size of the arena in bytes."""
        return self._arena.numel()

    @property
    def used(self) -> int:
        """Bytes handed out."""
        return self._next

    def touched(self) -> int:
        """Bytes of the arena that are in memory."""
        return touched_bytes(self._arena)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's first byte lies in the part that this arena has handed out."""
        begin = self._arena.data_ptr()
        # A class without memory of its own may refuse to be asked; the base class says 0 for it.
        return tensor.is_cpu and begin <= torch.Tensor.data_ptr(tensor) < begin + self._next

    def pin(self, device: torch.device | None = None) -> None:
        """Register the arena with CUDA piece by piece, once: copies from it are then asynchronous. ``device`` as in
        ``pin``. Where a piece is refused, it and all behind it stay as they are, which is told once. Raises
        ExecutionError: there is no CUDA."""
        if self._pinned is not None or not self.nbytes:
            return
        pinned: list[object] = []
        for begin, end in pairwise((0, *self._cuts, self.nbytes)):
            try:
                pinned.append(self._lock(self._arena[begin:end], device))
            except LockingRefused as error:
                tell_of_refusal(begin, self.nbytes, error)
                break
        self._pinned = pinned
        if self._watched:
            # A device's copies go by the pages' protection. Its reads are none of its business either.
            torch.ops.disco_accel.expect_device_writes_to(self._arena)

    def _lock(self, piece: torch.Tensor, device: torch.device | None) -> object:
        return pin(piece, device)

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, stride: Sequence[int] | None = None) -> torch.Tensor:
        """A tensor with any content in a storage of its own inside the arena; contiguous unless ``stride`` is given.

        It needs no gradient and keeps the arena alive. Raises ExecutionError when the arena is full.
        """
        like = torch.empty(tuple(shape), dtype=dtype, device="meta")
        if stride is not None:
            like = torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype, device="meta")
        nbytes = footprint(like)
        self._cut_before(nbytes)
        if self._next + nbytes > self.nbytes:
            raise ExecutionError(
                f"the host arena of {self.nbytes} bytes has {self.nbytes - self._next} left, a tensor needs {nbytes}"
            )
        spec = TensorSpec(str(dtype).removeprefix("torch."), tuple(like.shape), tuple(like.stride()))
        made = alias(self._arena, self._next, nbytes, spec)
        self._next += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return made

    def _cut_before(self, nbytes: int) -> None:
        """Begin another piece if this one becomes too large to be locked at once. A copy may not go from memory that is
        locked to memory that is not."""
        if self._next + nbytes - (self._cuts[-1] if self._cuts else 0) <= _MOST_LOCKED_AT_ONCE:
            return
        cut = self._next + -(self._arena.data_ptr() + self._next) % mmap.PAGESIZE
        if cut > 0 and cut + nbytes <= self.nbytes:
            self._cuts.append(cut)
            self._next = cut

    def adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor with the bits, shape, strides and dtype of ``tensor`` in a storage of its own inside the arena.

        The result needs no gradient and keeps the arena alive. Raises ExecutionError when the arena is full or the
        tensor has no bits (``meta``).
        """
        moved = self.place_for(tensor)
        with torch.no_grad():
            moved.copy_(tensor)
        return moved

    def place_for(self, tensor: torch.Tensor) -> torch.Tensor:
        """As ``adopt``, with any content."""
        if tensor.is_meta:
            raise ExecutionError("only tensors with bits can move into host memory, this one is on meta; load it first")
        return self.allocate(tensor.shape, tensor.dtype, tensor.stride())


def room_for_cuts(nbytes: int) -> int:
    """Bytes that an arena for tensors of ``nbytes`` bytes needs beside: two pieces that follow each other hold more
    than one may."""
    return 2 * -(-nbytes // _MOST_LOCKED_AT_ONCE) * mmap.PAGESIZE if nbytes > _MOST_LOCKED_AT_ONCE else 0


def glibc(name: str, *arguments: int) -> None:
    """Call a function about the heap; musl and others have none, and another heap."""
    function = getattr(ctypes.CDLL(None), name, None)
    if function is not None:
        function(*arguments)


def give_back_freed() -> None:
    """Give memory of freed tensors back to the operating system. Where glibc has once freed a large one, others of its
    size lie in the heap, whose holes stay in memory until then."""
    glibc("malloc_trim", 0)


def place_pages(arena: torch.Tensor, gpu: torch.device | None, *, huge: bool = True) -> None:
    """Ask for huge pages, which a driver locks faster, and for those of the NUMA node of ``gpu``, for ``arena``, of
    which nothing was touched yet."""
    if gpu is not None:
        prefer_node_of(gpu, arena)
    if not huge or arena.numel() < _HUGE_PAGE:
        return
    begin = -(-arena.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (arena.data_ptr() + arena.numel()) // mmap.PAGESIZE * mmap.PAGESIZE
    # An advice only: a kernel without huge pages refuses it and nothing is lost.
    ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), ctypes.c_int(_MADV_HUGEPAGE))


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A 1-d uint8 view of the memory from the first to the last element of ``tensor``, which it keeps alive."""
    load_extension()
    memory: torch.Tensor = torch.ops.disco_accel.own_view_of(tensor.detach(), footprint(tensor))
    return memory


def first_held_elsewhere(tensors: Sequence[torch.Tensor]) -> int:
    """Which of these host tensors is the first whose memory something else holds too, or -1: another tensor over it, a
    NumPy array, a storage. Tensors of ``bytes_of`` and ``WatchedTensors`` do not count; holders of a bare address are
    not known."""
    others = torch.ops.disco_accel.other_holders(list(tensors))
    # An object of Python's for the storage may be left of somebody who has asked for it once.
    asked = [place for place, count in enumerate(others) if count]
    for place, holders in zip(asked, _holders([tensors[place] for place in asked]), strict=True):
        if holders != _usual_holders():
            return place
    return -1


def _holders(tensors: list[torch.Tensor]) -> list[tuple[int, int]]:
    """Of each tensor's storage: all other holders, and Python's references to the object that stands for it."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    others = torch.ops.disco_accel.other_holders(tensors)
    return [(others[i], sys.getrefcount(storages[i])) for i in range(len(storages))]


@functools.cache
def _usual_holders() -> tuple[int, int]:
    # Another PyTorch may count otherwise, so it is asked: for a tensor that nobody else has.
    return _holders([torch.zeros(1, device="cpu")])[0]


class WatchedTensors:
    """CPU tensors as they were when this was made.

    Of those in a ``HostMemory`` whose pages the kernel watches for writes, nothing is read: asking costs tens of
    microseconds for each GiB. All others are read whole, each time.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._library = _library()
        self._native = torch.classes.disco_accel.WatchedTensors(list(tensors))
        self._address = self._native.address()

    def moved(self) -> bool:
        """Whether one of them lies elsewhere now."""
        return bool(self._native.moved())

    def changed(self) -> bool:
        """Whether one of them was moved or written to, were it one bit, in any way.

        A page that was written to counts as changed even where it was given the bits that it had. In a process forked
        since, and where the kernel has stopped watching, all count as changed. Not noticed are writes of devices and,
        through memory that they share with it, of other processes, unless the tensors are read.
        """
        return self.begin_check() or self.finish_check()

    def begin_check(self) -> bool:
        """Whether a change shows at once. If none does, threads read large tensors where they must be read, until
        ``finish_check`` or the next ``begin_check``."""
        answer = self._library.disco_begin_check(self._address)
        return bool(self._native.begin_check()) if answer < 0 else bool(answer)

    def finish_check(self) -> bool:
        """Whether the reading that ``begin_check`` began shows a change from before ``begin_check``."""
        answer = self._library.disco_finish_check(self._address)
        return bool(self._native.finish_check()) if answer < 0 else bool(answer)

    @property
    def hashed_bytes(self) -> int:
        """Bytes that ``changed`` reads."""
        return int(self._native.hashed_bytes())


@functools.cache
def _library() -> ctypes.CDLL:
    # Releases the GIL, as torchbind does; a call by way of TorchScript takes longer than most answers.
    library = ctypes.CDLL(str(load_extension()))
    library.disco_begin_check.argtypes = library.disco_finish_check.argtypes = [ctypes.c_int64]
    return library


def expect_rewrite(tensors: Sequence[torch.Tensor]) -> None:
    """All of ``tensors`` are about to be rewritten: those that watch them see a change from now on, and the writes are
    as fast as elsewhere. Does nothing for tensors that the kernel does not watch."""
    torch.ops.disco_accel.expect_rewrite_of(list(tensors))


def writes_are_watched() -> bool:
    """Whether this kernel tells which pages of new arenas are written to (Linux 6.7, and the right to userfaultfd)."""
    load_extension()
    return bool(torch.ops.disco_accel.can_watch_writes())
