"""Copies between files in host memory and a GPU in one direction: a stream, and two page-locked pieces that a copy of
the host's and one of the GPU's use in turn.

The host's part runs at the speed of one thread's copy. Registering the files' own pages instead takes the driver about
as long as that copy, for each file anew.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections import deque
from collections.abc import Iterator
from ctypes import c_void_p
from dataclasses import dataclass

from disco_accel.errors import ExecutionError
from disco_accel.native.cuda_driver import cuda_driver

_PIECE = 4 << 20
"""Bytes that are copied at once: a needless copy ends to within that many, and four such pieces are page-locked in
all. Not tuned on a GPU yet."""
_NON_BLOCKING, _DISABLE_TIMING, _PORTABLE = 1, 2, 1
"""``CU_STREAM_NON_BLOCKING``, ``CU_EVENT_DISABLE_TIMING``, ``CU_MEMHOSTALLOC_PORTABLE``."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Page-locked memory. ``copied``: an event after the GPU's last copy from it or to it."""

    address: int
    view: memoryview
    copied: int


class CudaLane:
    """One direction. Used by one thread at a time, in which the device's context is current."""

    def __init__(self) -> None:
        """Raises ExecutionError where there is no page-locked memory."""
        self._stream = new_stream()
        self._pieces = (_new_piece(), _new_piece())

    def load(self, source: int, address: int, nbytes: int, cancelled: threading.Event) -> None:
        """Copy the file ``source`` to ``address``; done when it returns. Raises OSError, ExecutionError."""
        driver = cuda_driver()
        with self._all_done():
            for n, (begin, size) in enumerate(_parts(nbytes)):
                if cancelled.is_set():
                    return
                piece = self._pieces[n % 2]
                if n >= 2:
                    driver.call("cuEventSynchronize", piece.copied)
                _read(source, piece.view[:size], begin)
                driver.call("cuMemcpyHtoDAsync_v2", address + begin, piece.address, size, self._stream)
                driver.call("cuEventRecord", piece.copied, self._stream)

    def save(self, address: int, target: int, nbytes: int, cancelled: threading.Event) -> None:
        """Copy ``address`` to the file ``target``; done when it returns. Raises OSError, ExecutionError."""
        driver = cuda_driver()
        under_way: deque[tuple[_Piece, int, int]] = deque()
        with self._all_done():
            for n, (begin, size) in enumerate(_parts(nbytes)):
                if cancelled.is_set():
                    return
                if len(under_way) == 2:
                    _arrived(target, *under_way.popleft())
                piece = self._pieces[n % 2]
                driver.call("cuMemcpyDtoHAsync_v2", piece.address, address + begin, size, self._stream)
                driver.call("cuEventRecord", piece.copied, self._stream)
                under_way.append((piece, begin, size))
            while under_way:
                _arrived(target, *under_way.popleft())

    @contextlib.contextmanager
    def _all_done(self) -> Iterator[None]:
        """At its end nothing is under way, also where the host's part failed."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(ExecutionError):
                cuda_driver().call("cuStreamSynchronize", self._stream)
            raise
        cuda_driver().call("cuStreamSynchronize", self._stream)


def new_stream() -> int:
    """Of the current context, ordered with no other by itself. Raises ExecutionError."""
    return cuda_driver().number("cuStreamCreate", _NON_BLOCKING, kind=c_void_p)


def _new_piece() -> _Piece:
    driver = cuda_driver()
    address = driver.number("cuMemHostAlloc", _PIECE, _PORTABLE, kind=c_void_p)
    view = memoryview((ctypes.c_ubyte * _PIECE).from_address(address)).cast("B")
    return _Piece(address, view, driver.number("cuEventCreate", _DISABLE_TIMING, kind=c_void_p))


def _parts(nbytes: int) -> list[tuple[int, int]]:
    """Begin and size of each piece."""
    return [(begin, min(_PIECE, nbytes - begin)) for begin in range(0, nbytes, _PIECE)]


def _read(file: int, into: memoryview, begin: int) -> None:
    while into:
        count = os.preadv(file, [into], begin)
        if count == 0:
            raise OSError(5, "a file of the host tier is shorter than its object")
        into, begin = into[count:], begin + count


def _arrived(file: int, piece: _Piece, begin: int, size: int) -> None:
    """Write a piece to ``file`` once the GPU has filled it."""
    cuda_driver().call("cuEventSynchronize", piece.copied)
    left = piece.view[:size]
    while left:
        count = os.pwrite(file, left, begin)
        left, begin = left[count:], begin + count
