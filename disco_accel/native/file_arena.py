"""An arena of host memory over a file in memory, whose pages processes share until one writes to them."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from disco_accel.errors import ConfigError, ExecutionError
from disco_accel.native.arena import host_arena
from disco_accel.native.cuda_backend import LockingRefused, pin
from disco_accel.native.host_memory import HostMemory, bytes_of
from disco_accel.native.shared_memory import lay_over

PAGE = mmap.PAGESIZE
_MADV_NOHUGEPAGE, _MADV_POPULATE_READ = 15, 22
"""Linux, madvise(2)."""
_PIECE, _MOST_THREADS = 128 << 20, 8
_ATTEMPTS = 3
"""A signal ends one."""
_PRESENT, _OF_FILE = 63, 61
"""Bits of an entry of /proc/self/pagemap."""


def whole_pages(nbytes: int) -> int:
    """``nbytes`` rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


class FileArena(HostMemory):
    """The first ``nbytes`` bytes of ``file``, whole pages, as an arena that hands out the same room for the same
    tensors in each process.

    A page shows the file's content until this process writes to it; from then on the page is this process's own.
    """

    def __init__(self, file: int, nbytes: int) -> None:
        """``file`` is this object's from now on, which keeps it open for others to find, unless this raises
        ExecutionError."""
        assert nbytes % PAGE == 0
        # The file has the memory.
        super().__init__(nbytes, huge_pages=False, watched=False, replaced=nbytes)
        # Whole pages lie between the guard pages of an arena, so that its first byte begins one.
        assert self._arena.data_ptr() % PAGE == 0 or nbytes == 0
        lay_over(self._arena, file)
        self.file = file
        self._identity = _identity(file)
        self._mapped: list[Future[bool]] | None = None
        self.told_written = False
        """Whether the user knows that this process has written to it."""
        weakref.finalize(self, _close, file, self._identity)
        # Small pages alone: the kernel drops a huge page's mapping where part of it is written to, and the mark that
        # tells a written page from one that was read goes with it.
        if nbytes:
            self._advise(_MADV_NOHUGEPAGE, 0, nbytes)

    @property
    def first_byte(self) -> int:
        """Address of the first byte."""
        return self._arena.data_ptr()

    def watch(self) -> None:
        """The content is final: have the kernel tell which pages are written to from now on, if it can."""
        # All pages are mapped before: the first read of one that is not would look like a write. Where that is refused,
        # what lies here is read to know.
        if self.nbytes and self._all_mapped():
            self._watched = True
            torch.ops.disco_accel.watch_arena(self._arena)

    def map_ahead(self) -> None:
        """Begin to map all pages, for ``watch``, while the caller goes on: of a file whose content is there already.

        Each GiB takes 0.08 s of a core, which a process that gives up weights of its own meanwhile does not wait for.
        """
        pieces = range(0, self.nbytes, _PIECE)
        threads = ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1, max(1, len(pieces))))
        # Each call has the arena, so that it is there until they have all ended.
        self._mapped = [threads.submit(self._populate, begin) for begin in pieces]
        threads.shutdown(wait=False)

    def _all_mapped(self) -> bool:
        if self._mapped is None:
            self.map_ahead()
        mapped, self._mapped = self._mapped or [], None
        return all([piece.result() for piece in mapped])

    def _populate(self, begin: int) -> bool:
        nbytes = min(_PIECE, self.nbytes - begin)
        return any(self._advise(_MADV_POPULATE_READ, begin, nbytes) for _ in range(_ATTEMPTS))

    def _advise(self, advice: int, begin: int, nbytes: int) -> bool:
        where = ctypes.c_void_p(self._arena.data_ptr() + begin)
        return bool(ctypes.CDLL(None).madvise(where, ctypes.c_size_t(nbytes), ctypes.c_int(advice)) == 0)

    def _map(self, nbytes: int) -> torch.Tensor:
        return host_arena(nbytes)

    def _lock(self, piece: torch.Tensor, device: torch.device | None) -> object:
        """For devices that only read: registered for writes, each page would become a copy. Raises ConfigError: the
        device cannot read memory that is registered so."""
        try:
            return pin(piece, device, read_only=True)
        except LockingRefused:
            raise
        except ExecutionError as error:
            raise ConfigError(
                f"share_weights: true does not work with this GPU: {error}; leave share_weights out"
            ) from error

    def differs(self, tensors: list[torch.Tensor]) -> list[bool]:
        """Which of ``tensors``, all of this arena, have other bytes than the file: written to by this process. All of
        them where somebody has closed the file, as programs do that become daemons."""
        if _identity(self.file) != self._identity:
            return [True] * len(tensors)
        own = self._own_pages()
        return [self._differs(tensor, own) for tensor in tensors]

    def _own_pages(self) -> torch.Tensor:
        """A flag for each page: whether it may be this process's own."""
        count = self.nbytes // PAGE
        entries = bytearray(8 * count)
        try:
            with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
                pagemap.seek(self._arena.data_ptr() // PAGE * 8)
                if count and pagemap.readinto(entries) != len(entries):
                    return torch.ones(count, dtype=torch.bool)
        except OSError:
            return torch.ones(count, dtype=torch.bool)
        words = torch.frombuffer(entries, dtype=torch.int64) if count else torch.empty(0, dtype=torch.int64)
        return ((words >> _PRESENT) & (words >> _OF_FILE) & 1) == 0

    def _differs(self, tensor: torch.Tensor, own: torch.Tensor) -> bool:
        data = bytes_of(tensor.detach())
        begin = data.data_ptr() - self._arena.data_ptr()
        first, last = begin // PAGE, -(-(begin + data.numel()) // PAGE)
        for page in own[first:last].nonzero().flatten().tolist():
            low = max(begin, (first + page) * PAGE)
            high = min(begin + data.numel(), (first + page + 1) * PAGE)
            there = torch.frombuffer(bytearray(os.pread(self.file, high - low, low)), dtype=torch.uint8)
            if not torch.equal(data[low - begin : high - begin], there):
                return True
        return False


def _identity(file: int) -> tuple[int, int] | None:
    try:
        status = os.fstat(file)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _close(file: int, identity: tuple[int, int] | None) -> None:
    # The number may be another file's by now.
    if _identity(file) == identity:
        os.close(file)
