"""CUDA's driver, called without PyTorch: each failure is a typed error that says what to do.

Functions and numbers are those of ``cuda.h`` (CUDA 11.2 and later; signatures are the same in 13).
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_ulonglong, c_void_p
from typing import Any

from disco_accel.errors import DeviceLost, ExecutionError

_OUT_OF_MEMORY = 2
_LOST = frozenset({214, 215, 220, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 910})
"""Results after which nothing works on the device in this process: memory errors, faults and asserts of kernels."""
_ADVICE = {
    1: "this driver takes other arguments; update it, or report its version",
    _OUT_OF_MEMORY: "the GPU has no memory left: give the store a smaller --device, or end other programs there",
    3: "a process that was forked after CUDA was used cannot use it: start a process of its own",
    46: "another process has the GPU to itself: set its compute mode to default",
    100: "no GPU is visible: look at nvidia-smi and CUDA_VISIBLE_DEVICES",
    101: "there is no such GPU here: look at nvidia-smi and CUDA_VISIBLE_DEVICES",
    304: "the operating system refuses: raise the limit of open files (ulimit -n), or let the container share them",
    800: "the process may not do this: start it as the user that owns the store, outside a sandbox",
    801: "this driver or GPU does not have it: serve the store with --device-kind host",
    803: "the driver's library and kernel module differ: restart the machine, or reinstall the driver",
}
_HANDLE = c_ulonglong
_ADDRESS = c_ulonglong


class _Location(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class _AllocationFlags(ctypes.Structure):
    _fields_ = (("compression", c_ubyte), ("rdma", c_ubyte), ("usage", ctypes.c_ushort), ("reserved", c_ubyte * 4))


class AllocationProperties(ctypes.Structure):
    """``CUmemAllocationProp``."""

    _fields_ = (
        *(("type", c_int), ("handle_types", c_int), ("location", _Location), ("windows", c_void_p)),
        ("flags", _AllocationFlags),
    )


class AccessDescription(ctypes.Structure):
    """``CUmemAccessDesc``."""

    _fields_ = (("location", _Location), ("flags", c_int))


_DEVICE, _PINNED, FILE_DESCRIPTOR = 1, 1, 1
"""``CU_MEM_LOCATION_TYPE_DEVICE``, ``CU_MEM_ALLOCATION_TYPE_PINNED``, ``CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR``."""
READ, READ_WRITE = 1, 3
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
    "cuMemGetAllocationGranularity": (POINTER(c_size_t), POINTER(AllocationProperties), c_int),
    "cuMemCreate": (POINTER(_HANDLE), c_size_t, POINTER(AllocationProperties), c_ulonglong),
    "cuMemRelease": (_HANDLE,),
    "cuMemExportToShareableHandle": (POINTER(c_int), _HANDLE, c_int, c_ulonglong),
    "cuMemImportFromShareableHandle": (POINTER(_HANDLE), c_void_p, c_int),
    "cuMemAddressReserve": (POINTER(_ADDRESS), c_size_t, c_size_t, _ADDRESS, c_ulonglong),
    "cuMemAddressFree": (_ADDRESS, c_size_t),
    "cuMemMap": (_ADDRESS, c_size_t, c_size_t, _HANDLE, c_ulonglong),
    "cuMemUnmap": (_ADDRESS, c_size_t),
    "cuMemSetAccess": (_ADDRESS, c_size_t, POINTER(AccessDescription), c_size_t),
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


class CudaCallFailed(ExecutionError):
    """A call of the driver failed. ``code``: its CUresult."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code

    @property
    def full(self) -> bool:
        """Whether the device has no memory for it."""
        return self.code == _OUT_OF_MEMORY


class CudaDriver:
    """``libcuda.so.1``. All threads may call it."""

    def __init__(self) -> None:
        """Load and initialise it.

        Raises:
            ExecutionError: it is not there, or too old.
            CudaCallFailed: it does not start.
        """
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
            self._functions = {name: self._function(name, types) for name, types in _FUNCTIONS.items()}
        except OSError as error:
            raise ExecutionError(
                f"CUDA: no driver here ({error}): install NVIDIA's, or serve the store with --device-kind host"
            ) from error
        except AttributeError as error:
            raise ExecutionError(f"CUDA: the driver is too old ({error}): update it to one of CUDA 11.4") from error
        self.call("cuInit", 0)

    def _function(self, name: str, types: tuple[Any, ...]) -> Any:
        function = getattr(self._library, name)
        function.restype, function.argtypes = c_int, types
        return function

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the driver.

        Raises:
            DeviceLost: nothing works on the device in this process any more.
            CudaCallFailed: it failed otherwise.
        """
        code = self._functions[name](*arguments)
        if code != 0:
            raise self._error(name, code)

    def _error(self, name: str, code: int) -> ExecutionError:
        text = c_char_p()
        found = self._library.cuGetErrorName(c_int(code), ctypes.byref(text)) == 0 and text.value is not None
        said = (text.value or b"").decode(errors="replace") if found else "an unknown error"
        head = f"CUDA: {name}: {said} ({code})"
        if code in _LOST:
            return DeviceLost(f"{head}: the GPU does nothing more in this process: end it and start it again")
        return CudaCallFailed(f"{head}: {_ADVICE.get(code, 'look at dmesg and nvidia-smi for its reason')}", code)

    def number(self, name: str, *arguments: Any, kind: Any = c_int) -> int:
        """What ``name`` writes to its first argument, a pointer to a ``kind``. Raises as ``call``."""
        found = kind()
        self.call(name, ctypes.byref(found), *arguments)
        return int(found.value or 0)

    def device_id(self, ordinal: int) -> bytes:
        """The 16 bytes that are the same for this device in every process. Raises as ``call``."""
        found = (c_ubyte * 16)()
        self.call("cuDeviceGetUuid_v2", found, ordinal)
        return bytes(found)

    def device_name(self, ordinal: int) -> str:
        """What its maker calls it. Raises as ``call``."""
        room = ctypes.create_string_buffer(256)
        self.call("cuDeviceGetName", room, len(room), ordinal)
        return room.value.decode(errors="replace")


@functools.cache
def cuda_driver() -> CudaDriver:
    """The driver, loaded once. Raises as its construction."""
    return CudaDriver()


def allocation_properties(ordinal: int) -> AllocationProperties:
    """Of memory on that device that processes can share as a file."""
    return AllocationProperties(_PINNED, FILE_DESCRIPTOR, _Location(_DEVICE, ordinal), None, _AllocationFlags())


def access_description(ordinal: int, flags: int) -> AccessDescription:
    """That the device may do so much."""
    return AccessDescription(_Location(_DEVICE, ordinal), flags)


def location(ordinal: int) -> Any:
    """Of that device."""
    return _Location(_DEVICE, ordinal)
