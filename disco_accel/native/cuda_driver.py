"""CUDA's driver without PyTorch: its calls, with typed errors and advice, and memory of a GPU that processes share.

Functions and numbers are those of ``cuda.h`` (CUDA 11.2 and later; signatures are the same in 13). Shared memory comes
from ``cuMemCreate`` and its kin ("virtual memory management"): one process makes it as a file descriptor, each maps it
at an address of its own. It is there until the last mapping and the last descriptor of any process are gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_ulonglong, c_void_p
from typing import Any

from disco_accel.errors import DeviceLost, ExecutionError

_LOST = frozenset({214, 215, 220, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 910})
"""Results after which nothing works on the device in this process: memory errors, faults and asserts of kernels."""
_ADVICE = {
    1: "this driver takes other arguments; update it, or report its version",
    2: "the GPU has no memory left: give the store a smaller --device, or end other programs there",
    3: "a process that was forked after CUDA was used cannot use it: start a process of its own",
    46: "another process has the GPU to itself: set its compute mode to default",
    100: "no GPU is visible: look at nvidia-smi and CUDA_VISIBLE_DEVICES",
    101: "there is no such GPU here: look at nvidia-smi and CUDA_VISIBLE_DEVICES",
    304: "the operating system refuses: raise the limit of open files (ulimit -n), or let the container share them",
    800: "the process may not do this: start it as the user that owns the store, outside a sandbox",
    801: "this driver or GPU does not have it: serve the store with --device-kind host",
    803: "the driver's library and kernel module differ: restart the machine, or reinstall the driver",
}
_HANDLE = _ADDRESS = c_ulonglong


class _Location(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class _AllocationFlags(ctypes.Structure):
    _fields_ = (("compression", c_ubyte), ("rdma", c_ubyte), ("usage", ctypes.c_ushort), ("reserved", c_ubyte * 4))


class _AllocationProperties(ctypes.Structure):
    """``CUmemAllocationProp``."""

    _fields_ = (
        *(("type", c_int), ("handle_types", c_int), ("location", _Location), ("windows", c_void_p)),
        ("flags", _AllocationFlags),
    )


class _AccessDescription(ctypes.Structure):
    """``CUmemAccessDesc``."""

    _fields_ = (("location", _Location), ("flags", c_int))


_DEVICE, _PINNED, _FILE_DESCRIPTOR = 1, 1, 1
"""``CU_MEM_LOCATION_TYPE_DEVICE``, ``CU_MEM_ALLOCATION_TYPE_PINNED``, ``CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR``."""
_READ, _READ_WRITE = 1, 3
"""``CU_MEM_ACCESS_FLAGS_PROT_...``."""

_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGetName": (c_char_p, c_int, c_int),
    "cuDeviceGetUuid_v2": (c_void_p, c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDeviceTotalMem_v2": (POINTER(c_size_t), c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxSetCurrent": (c_void_p,),
    "cuMemGetAllocationGranularity": (POINTER(c_size_t), POINTER(_AllocationProperties), c_int),
    "cuMemCreate": (POINTER(_HANDLE), c_size_t, POINTER(_AllocationProperties), c_ulonglong),
    "cuMemRelease": (_HANDLE,),
    "cuMemExportToShareableHandle": (POINTER(c_int), _HANDLE, c_int, c_ulonglong),
    "cuMemImportFromShareableHandle": (POINTER(_HANDLE), c_void_p, c_int),
    "cuMemAddressReserve": (POINTER(_ADDRESS), c_size_t, c_size_t, _ADDRESS, c_ulonglong),
    "cuMemAddressFree": (_ADDRESS, c_size_t),
    "cuMemMap": (_ADDRESS, c_size_t, c_size_t, _HANDLE, c_ulonglong),
    "cuMemUnmap": (_ADDRESS, c_size_t),
    "cuMemSetAccess": (_ADDRESS, c_size_t, POINTER(_AccessDescription), c_size_t),
    "cuMemGetAccess": (POINTER(c_ulonglong), POINTER(_Location), _ADDRESS),
    "cuMemHostAlloc": (POINTER(c_void_p), c_size_t, c_uint),
    "cuMemFreeHost": (c_void_p,),
    "cuMemcpyHtoDAsync_v2": (_ADDRESS, c_void_p, c_size_t, c_void_p),
    "cuMemcpyDtoHAsync_v2": (c_void_p, _ADDRESS, c_size_t, c_void_p),
    "cuMemsetD8Async": (_ADDRESS, c_ubyte, c_size_t, c_void_p),
    "cuStreamCreate": (POINTER(c_void_p), c_uint),
    "cuStreamSynchronize": (c_void_p,),
    "cuEventCreate": (POINTER(c_void_p), c_uint),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventSynchronize": (c_void_p,),
}


@functools.cache
def _driver() -> ctypes.CDLL:
    """``libcuda.so.1``, initialised. Raises ExecutionError: it is not there, too old, or does not start."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        for name, types in _FUNCTIONS.items():
            function = getattr(library, name)
            function.restype, function.argtypes = c_int, types
    except OSError as error:
        raise ExecutionError(
            f"CUDA: no driver here ({error}): install NVIDIA's, or serve the store with --device-kind host"
        ) from error
    except AttributeError as error:
        raise ExecutionError(f"CUDA: the driver is too old ({error}): update it to one of CUDA 11.4") from error
    _call(library, "cuInit", 0)
    return library


def _call(library: ctypes.CDLL, name: str, *arguments: Any) -> None:
    code = getattr(library, name)(*arguments)
    if code == 0:
        return
    text = c_char_p()
    found = library.cuGetErrorName(c_int(code), ctypes.byref(text)) == 0 and text.value is not None
    said = (text.value or b"").decode(errors="replace") if found else "an unknown error"
    head = f"CUDA: {name}: {said} ({code})"
    if code in _LOST:
        raise DeviceLost(f"{head}: the GPU does nothing more in this process: end it and start it again")
    raise ExecutionError(f"{head}: {_ADVICE.get(code, 'look at dmesg and nvidia-smi for its reason')}")


def call_driver(name: str, *arguments: Any) -> None:
    """Call a function of the driver, from any thread.

    Raises:
        DeviceLost: nothing works on the device in this process any more.
        ExecutionError: it failed otherwise, or there is no driver.
    """
    _call(_driver(), name, *arguments)


def ask_driver(name: str, *arguments: Any, kind: Any = c_int) -> int:
    """The number that ``name`` writes to its first argument, a pointer to a ``kind``. Raises as ``call_driver``."""
    found = kind()
    call_driver(name, ctypes.byref(found), *arguments)
    return int(found.value or 0)


def device_id(ordinal: int) -> bytes:
    """The 16 bytes that are the same for this device in every process. Raises as ``call_driver``."""
    found = (c_ubyte * 16)()
    call_driver("cuDeviceGetUuid_v2", found, ordinal)
    return bytes(found)


def device_name(ordinal: int) -> str:
    """The maker's name for it. Raises as ``call_driver``."""
    room = ctypes.create_string_buffer(256)
    call_driver("cuDeviceGetName", room, len(room), ordinal)
    return room.value.decode(errors="replace")


def _properties(ordinal: int) -> Any:
    """A reference to those of memory on that device that processes can share as a file."""
    place = _Location(_DEVICE, ordinal)
    return ctypes.byref(_AllocationProperties(_PINNED, _FILE_DESCRIPTOR, place, None, _AllocationFlags()))


def granularity(ordinal: int) -> int:
    """Sizes on that device are whole multiples of so many bytes: 2 MiB on GPUs so far."""
    return max(1, ask_driver("cuMemGetAllocationGranularity", _properties(ordinal), 0, kind=c_size_t))


class CudaMapping:
    """``nbytes`` of a GPU at ``address``, for all of this process's work there. Not for the host to read."""

    def __init__(self, ordinal: int, address: int, nbytes: int) -> None:
        """See ``create_mapping`` and ``import_mapping``."""
        self.ordinal, self.address, self.nbytes = ordinal, address, nbytes

    def allow(self, *, writes: bool) -> None:
        """Let the device read, and write if ``writes``. Queued work must not need more: it would end with an illegal
        address, and all of this process's work on the device with it. Raises ExecutionError: the driver does not do
        this."""
        flags, place = _READ_WRITE if writes else _READ, _Location(_DEVICE, self.ordinal)
        wanted = _AccessDescription(place, flags)
        call_driver("cuMemSetAccess", self.address, self.nbytes, ctypes.byref(wanted), 1)
        found = ask_driver("cuMemGetAccess", ctypes.byref(place), self.address, kind=c_ulonglong)
        if found != flags:
            raise ExecutionError(
                f"CUDA: memory was to be mapped with access {flags} and has {found}: this driver does not keep what "
                "is final from being written to; serve the store with --device-kind host"
            )

    def unmap(self) -> None:
        """End it. No queued work may use it. Raises as ``call_driver``."""
        call_driver("cuMemUnmap", self.address, self.nbytes)
        call_driver("cuMemAddressFree", self.address, self.nbytes)


def create_mapping(ordinal: int, nbytes: int) -> tuple[int, CudaMapping]:
    """``nbytes`` new bytes, a multiple of the granularity: the descriptor to share them with, closed in programs that
    this one starts, and their mapping here, to read and write. They hold anything. Raises ExecutionError: the device
    has no memory, or the driver refuses."""
    handle = ask_driver("cuMemCreate", nbytes, _properties(ordinal), 0, kind=c_ulonglong)
    try:
        file = ask_driver("cuMemExportToShareableHandle", handle, _FILE_DESCRIPTOR, 0)
        try:
            os.set_inheritable(file, False)
            return file, _mapped(ordinal, handle, nbytes, writes=True)
        except BaseException:
            os.close(file)
            raise
    finally:
        # A mapping keeps the memory, and so does the descriptor.
        call_driver("cuMemRelease", handle)


def import_mapping(ordinal: int, file: int, nbytes: int, *, writes: bool) -> CudaMapping:
    """The ``nbytes`` bytes behind the descriptor ``file`` of ``create_mapping``, which is not needed any more. Raises
    ExecutionError: it is of another device, or of none."""
    handle = ask_driver("cuMemImportFromShareableHandle", c_void_p(file), _FILE_DESCRIPTOR, kind=c_ulonglong)
    try:
        return _mapped(ordinal, handle, nbytes, writes=writes)
    finally:
        call_driver("cuMemRelease", handle)


def _mapped(ordinal: int, handle: int, nbytes: int, *, writes: bool) -> CudaMapping:
    with contextlib.ExitStack() as undo:
        address = ask_driver("cuMemAddressReserve", nbytes, 0, 0, 0, kind=c_ulonglong)
        undo.callback(call_driver, "cuMemAddressFree", address, nbytes)
        call_driver("cuMemMap", address, nbytes, 0, handle, 0)
        undo.callback(call_driver, "cuMemUnmap", address, nbytes)
        made = CudaMapping(ordinal, address, nbytes)
        made.allow(writes=writes)
        undo.pop_all()
    return made
