"""Memory that processes of one machine share: anonymous files in memory (Linux memfd), passed on as descriptors."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import mmap
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from disco_accel.errors import ExecutionError

if TYPE_CHECKING:
    import torch

WHOLE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
"""Seals (Linux, ``fcntl(2)``): no mapping of the file can lose its pages, at which a reader's process would end."""
READ_ONLY = WHOLE | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
"""The content is final."""
NO_NEW_WRITERS = WHOLE | 16 | fcntl.F_SEAL_SEAL
"""Mappings from now on are to read alone (``F_SEAL_FUTURE_WRITE``)."""


def create_file(name: str, nbytes: int) -> int:
    """The descriptor of a new file of ``nbytes`` zeros in memory, closed in programs that this one starts. It is gone
    when the last descriptor and mapping are. ``name`` is for those who look into ``/proc``. Raises ExecutionError: the
    machine has no memory or no descriptors for it."""
    try:
        file = os.memfd_create(name[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise ExecutionError(f"no shared memory for '{name}': {error.strerror}") from error
    try:
        os.ftruncate(file, nbytes)
    except OSError as error:
        os.close(file)
        raise ExecutionError(f"no shared memory of {nbytes} bytes for '{name}': {error.strerror}") from error
    return file


def add_seals(file: int, seals: int) -> bool:
    """Seal ``file``, or return False where it can't be: for ``WRITE``, somebody still has it mapped to write there."""
    try:
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    except OSError:
        return seals_of(file) & seals == seals
    return True


def seals_of(file: int) -> int:
    """The seals of ``file``; none for one that is not in memory."""
    try:
        return fcntl.fcntl(file, fcntl.F_GET_SEALS)
    except OSError:
        return 0


class _Mapping(ctypes.c_ubyte * (1 << 46)):  # type: ignore[misc]
    """A mapping, of which it is longer: a type of its own for each length would never be freed.

    It ends with its last tensor, in any thread, and also in an interpreter that ends: so it has the functions that it
    then calls. Tensors that outlive the interpreter keep it, and the kernel unmaps.
    """

    nbytes: int
    freed: Callable[[], None] | None = None
    munmap: Callable[[int, int], int] | None = None
    """None where Ctrl-C came before anything was set: the mapping stays then."""

    def __del__(self, addressof: Callable[[Any], int] = ctypes.addressof) -> None:
        if self.munmap is not None:
            self.munmap(addressof(self), self.nbytes)
        if self.freed is not None:
            self.freed()


def map_file(
    file: int,
    nbytes: int,
    *,
    shared_writes: bool,
    offset: int = 0,
    freed: Callable[[], None] | None = None,
    dtype: torch.dtype | None = None,
    count: int | None = None,
) -> torch.Tensor:
    """``nbytes`` bytes of ``file`` from ``offset`` on, a whole number of pages, as a 1-d tensor of ``dtype`` (default:
    uint8), of the first ``count`` elements (default: all).

    With ``shared_writes`` all mappings of the file show its writes. Without, it shows the file's content until this
    process writes to a page: from then on that page is this process's own. The mapping lives as long as a tensor of its
    storage; then ``freed`` is called, in any thread. The descriptor is not needed any more. Raises ExecutionError: the
    file cannot be mapped so, such as a sealed one with ``shared_writes``.
    """
    # Here, so that a process which makes and seals files, and maps none, starts without it.
    import torch

    kind = torch.uint8 if dtype is None else dtype
    if nbytes == 0:
        return torch.empty(0, dtype=kind)
    count = nbytes // kind.itemsize if count is None else count
    assert count > 0 and count * kind.itemsize <= nbytes
    libc = _libc()
    flags = mmap.MAP_SHARED if shared_writes else mmap.MAP_PRIVATE | _MAP_NORESERVE
    address = libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, file, offset)
    if address == _FAILED:
        raise ExecutionError(f"{nbytes} bytes of shared memory cannot be mapped: {os.strerror(ctypes.get_errno())}")
    span = _Mapping.from_address(address)
    span.nbytes, span.freed, span.munmap = nbytes, freed, libc.munmap
    return torch.frombuffer(span, dtype=kind, count=count)


_FAILED = ctypes.c_void_p(-1).value
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000


def lay_over(memory: torch.Tensor, file: int, *, shared_writes: bool = False) -> None:
    """Map the begin of ``file`` in the place of ``memory``, whole pages of a mapping of the caller's, with or without
    shared writes as in ``map_file``. It ends with that mapping. Raises ExecutionError: the file cannot be mapped."""
    if memory.nbytes == 0:
        return
    assert memory.data_ptr() % mmap.PAGESIZE == 0 and memory.nbytes % mmap.PAGESIZE == 0
    flags = (mmap.MAP_SHARED if shared_writes else mmap.MAP_PRIVATE | _MAP_NORESERVE) | _MAP_FIXED
    access = mmap.PROT_READ | mmap.PROT_WRITE
    if _libc().mmap(memory.data_ptr(), memory.nbytes, access, flags, file, 0) != memory.data_ptr():
        reason = os.strerror(ctypes.get_errno())
        raise ExecutionError(f"{memory.nbytes} bytes of shared memory cannot be mapped: {reason}")


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc
