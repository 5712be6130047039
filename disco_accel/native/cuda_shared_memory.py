"""Memory of a GPU that processes share: made by one as a file descriptor, mapped by each at an address of its own.

``cuMemCreate`` and its kin (CUDA driver API, "virtual memory management"). The memory is there until the last mapping
and the last descriptor of any process are gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from ctypes import c_size_t, c_ulonglong, c_void_p

from disco_accel.errors import ExecutionError
from disco_accel.native.cuda_driver import (
    FILE_DESCRIPTOR,
    READ,
    READ_WRITE,
    access_description,
    allocation_properties,
    cuda_driver,
    location,
)


def granularity(ordinal: int) -> int:
    """Sizes on that device are whole multiples of so many bytes: 2 MiB on GPUs so far."""
    properties = allocation_properties(ordinal)
    found = cuda_driver().number("cuMemGetAllocationGranularity", ctypes.byref(properties), 0, kind=c_size_t)
    return max(1, found)


class CudaMapping:
    """``nbytes`` of a GPU at ``address``, for all of this process's work there. Not for the host to read."""

    def __init__(self, ordinal: int, address: int, nbytes: int) -> None:
        """See ``create`` and ``imported``."""
        self.ordinal, self.address, self.nbytes = ordinal, address, nbytes

    def allow(self, *, writes: bool) -> None:
        """Let the device read, and write if ``writes``. What it has queued must not need more: it would end with an
        illegal address, and all of this process's work on the device with it.

        Raises:
            ExecutionError: the driver does not do this.
        """
        flags = READ_WRITE if writes else READ
        wanted = access_description(self.ordinal, flags)
        driver = cuda_driver()
        driver.call("cuMemSetAccess", self.address, self.nbytes, ctypes.byref(wanted), 1)
        where = location(self.ordinal)
        found = driver.number("cuMemGetAccess", ctypes.byref(where), self.address, kind=c_ulonglong)
        if found != flags:
            raise ExecutionError(
                f"CUDA: memory was to be mapped with access {flags} and has {found}: this driver does not keep what "
                "is final from being written to; serve the store with --device-kind host"
            )

    def unmap(self) -> None:
        """Let go of it. No queued work may use it. Raises ExecutionError, as the driver does."""
        driver = cuda_driver()
        driver.call("cuMemUnmap", self.address, self.nbytes)
        driver.call("cuMemAddressFree", self.address, self.nbytes)


def create(ordinal: int, nbytes: int) -> tuple[int, CudaMapping]:
    """``nbytes`` new bytes, a multiple of the granularity: the descriptor to share them with, closed in programs that
    this one starts, and their mapping here, to read and write. They hold anything.

    Raises:
        CudaCallFailed: the device has no memory, or the driver refuses.
    """
    driver, properties = cuda_driver(), allocation_properties(ordinal)
    handle = driver.number("cuMemCreate", nbytes, ctypes.byref(properties), 0, kind=c_ulonglong)
    try:
        file = driver.number("cuMemExportToShareableHandle", handle, FILE_DESCRIPTOR, 0)
        try:
            os.set_inheritable(file, False)
            return file, _mapped(ordinal, handle, nbytes, writes=True)
        except BaseException:
            os.close(file)
            raise
    finally:
        # A mapping keeps the memory, and so does the descriptor.
        driver.call("cuMemRelease", handle)


def imported(ordinal: int, file: int, nbytes: int, *, writes: bool) -> CudaMapping:
    """The ``nbytes`` bytes behind the descriptor ``file`` of ``create``, which is not needed any more.

    Raises:
        CudaCallFailed: it is of another device, or of none.
    """
    driver = cuda_driver()
    handle = driver.number("cuMemImportFromShareableHandle", c_void_p(file), FILE_DESCRIPTOR, kind=c_ulonglong)
    try:
        return _mapped(ordinal, handle, nbytes, writes=writes)
    finally:
        driver.call("cuMemRelease", handle)


def _mapped(ordinal: int, handle: int, nbytes: int, *, writes: bool) -> CudaMapping:
    driver = cuda_driver()
    with contextlib.ExitStack() as undo:
        address = driver.number("cuMemAddressReserve", nbytes, 0, 0, 0, kind=c_ulonglong)
        undo.callback(driver.call, "cuMemAddressFree", address, nbytes)
        driver.call("cuMemMap", address, nbytes, 0, handle, 0)
        undo.callback(driver.call, "cuMemUnmap", address, nbytes)
        made = CudaMapping(ordinal, address, nbytes)
        made.allow(writes=writes)
        undo.pop_all()
    return made
