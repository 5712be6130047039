"""Large heap allocations of engine threads, counted by a preloaded library.

``LD_PRELOAD=$(python -m tests.support.malloc_watch) python ...`` runs a program under the watch; inside it
``count()`` says how many allocations of 4 KiB or more (malloc, posix_memalign, mmap, ...) engine threads and their
OpenMP workers made since ``reset()``.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

from disco_accel.native.plain_library import build_plain


def library() -> Path:
    """The library to preload, built on first use. Raises ExtensionError."""
    return build_plain("disco_malloc_watch", "torch/malloc_watch.cpp")


def active() -> bool:
    """Whether this process runs under the watch."""
    return hasattr(ctypes.CDLL(None), "disco_malloc_watch_count")


def reset() -> None:
    """Forgets what was counted. Call between steps."""
    ctypes.CDLL(None).disco_malloc_watch_reset()


def count() -> int:
    """Allocations of 4 KiB or more by engine threads since ``reset``. Raises AttributeError when not ``active``."""
    counter = ctypes.CDLL(None).disco_malloc_watch_count
    counter.restype = ctypes.c_long
    return int(counter())


def threads() -> int:
    """Threads that were ever watched: compute threads of engines and the OpenMP workers that belong to them."""
    counter = ctypes.CDLL(None).disco_malloc_watch_threads
    counter.restype = ctypes.c_long
    return int(counter())


def describe(limit: int = 8) -> list[str]:
    """The first allocations counted: size and the functions on the way to it, innermost first."""
    watch = ctypes.CDLL(None)
    watch.disco_malloc_watch_size.restype = ctypes.c_long
    watch.disco_malloc_watch_frame.restype = ctypes.c_void_p
    lines = []
    for index in range(min(count(), limit)):
        size = watch.disco_malloc_watch_size(ctypes.c_long(index))
        addresses: list[int] = []
        while frame := watch.disco_malloc_watch_frame(ctypes.c_long(index), len(addresses)):
            addresses.append(frame)
        names = [_symbol(address) for address in addresses[2:]]
        lines.append(f"{size} bytes: {' < '.join(names)}")
    return lines


class _DlInfo(ctypes.Structure):
    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def _symbol(address: int) -> str:
    info = _DlInfo()
    ctypes.CDLL(None).dladdr(ctypes.c_void_p(address), ctypes.byref(info))
    if not info.name:
        return Path(info.file.decode()).name if info.file else hex(address)
    return _demangled(info.name.decode())


def _demangled(name: str) -> str:
    try:
        done = subprocess.run(["c++filt", "-p", name], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return name
    return done.stdout.strip()


if __name__ == "__main__":
    print(library())
    sys.exit(0)
