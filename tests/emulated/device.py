"""What tests ask of the emulated device, and what they order it to do."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

ILLEGAL_ACCESS = 700
"""cudaErrorIllegalAddress, which stays until the process ends."""

EMULATED = os.environ.get("EMULATED_CUDA") == "1"


def _runtime() -> ctypes.CDLL:
    """The library that is preloaded: its functions are the process's own."""
    library = ctypes.CDLL(None)
    for name in ("emuCounts", "emuComplaints", "emuLiveBytes"):
        getattr(library, name).restype = ctypes.c_size_t
    return library


_cuda = _runtime()


def _text(function: str) -> str:
    # Threads of streams may add to it meanwhile.
    room = int(getattr(_cuda, function)(None, ctypes.c_size_t(0))) + 4096
    text = ctypes.create_string_buffer(room)
    getattr(_cuda, function)(text, ctypes.c_size_t(room))
    return text.value.decode()


def counts() -> dict[str, int]:
    """How often what was called since the last reset: ``cudaMalloc 0`` (with the device), ``copy h2d pageable``,
    ``kernels``, ``cudaEventRecord``, ``unemulated kernel NAME``, ``missing NAME``."""
    pairs = (line.rpartition("\t") for line in _text("emuCounts").splitlines())
    return {name: int(number) for name, _, number in pairs}


def complaints() -> list[str]:
    """What no correct program does, since the last reset."""
    return _text("emuComplaints").splitlines()


def unemulated() -> list[str]:
    """Kernels and functions that were called and that nothing here computes."""
    return [name for name in counts() if name.startswith(("unemulated", "missing"))]


def reset() -> None:
    """Forget counts and complaints."""
    _cuda.emuReset()


def live_bytes(device: int = 0, *, peak: bool = False) -> int:
    """Bytes of the device that the driver has given and not got back, now or at most since ``reset_peak``."""
    return int(_cuda.emuLiveBytes(device, int(peak)))


def reset_peak(device: int = 0) -> None:
    """Let the peak start at what is given now."""
    _cuda.emuResetPeak(device)


def has_context(device: int) -> bool:
    """Whether some call of this process has made the device's context: memory of a real GPU, for nothing."""
    return bool(_cuda.emuHasContext(device))


def inject_fault(work: str = "", *, nth: int = 1, code: int = ILLEGAL_ACCESS) -> None:
    """The ``nth`` kernel or copy from now on whose name contains ``work`` fails; all later calls answer ``code``."""
    _cuda.emuArm(work.encode(), ctypes.c_long(nth), code)


def inject_hang(work: str = "", *, nth: int = 1) -> None:
    """The ``nth`` kernel or copy from now on whose name contains ``work`` does not end before ``release``."""
    _cuda.emuArm(work.encode(), ctypes.c_long(nth), 0)


def hang(stream: torch.cuda.Stream | None = None) -> None:
    """The stream, by default the current one, does nothing more before ``release``."""
    _cuda.emuHang(ctypes.c_void_p((stream or torch.cuda.current_stream()).cuda_stream))


def hanging() -> int:
    """How many streams hang now."""
    return int(_cuda.emuHanging())


def release() -> None:
    """End all hangs, forget the fault, also as this thread's last error, and what was injected and has not happened."""
    _cuda.emuRelease()
    _cuda.cudaGetLastError()


@contextmanager
def pin_limit(each: int = 0, *, more: int = 0) -> Iterator[None]:
    """Within, registering more than ``each`` bytes of host memory in one call fails, and so does what would be more
    than ``more`` bytes beside what is pinned now. 0: no limit."""
    _cuda.emuPinLimit(ctypes.c_size_t(each), ctypes.c_size_t(more))
    try:
        yield
    finally:
        _cuda.emuPinLimit(ctypes.c_size_t(0), ctypes.c_size_t(0))


@contextmanager
def expect_complaints(pattern: str) -> Iterator[None]:
    """Within, every complaint must match ``pattern`` and there must be one; they are forgotten then."""
    yield
    torch.cuda.synchronize()
    found = complaints()
    assert found and all(re.search(pattern, one) for one in found), found or f"no complaint about {pattern!r}"
    reset()
