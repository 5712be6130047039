"""The device tier in a GPU's memory: objects are ``cuMemCreate`` allocations, copied over two streams."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from ctypes import c_size_t, c_void_p
from dataclasses import dataclass

from disco_accel.errors import ConfigError, DeviceLost, ExecutionError
from disco_accel.native.cuda_driver import (
    CudaMapping,
    ask_driver,
    call_driver,
    create_mapping,
    device_id,
    device_name,
    granularity,
)
from disco_accel.sizes import format_size
from disco_accel.store.messages import GPU_MEMORY
from disco_accel.store.objects import footprint_of
from disco_accel.store.tiers import LATENCY

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_VIRTUAL_MEMORY, _SHARES_FILES = 102, 103
"""``CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED``, ``..._HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED``."""
_FIRST_GUESS = 8e9
"""Bytes/s of a copy until one was timed, by estimate: one thread's copy between a file and page-locked memory."""
_TIMED_BYTES = 1 << 20
"""Copies of fewer bytes say nothing of the link."""
_PIECE = 4 << 20
"""Bytes that are copied at once: a needless copy ends to within that many, and four such pieces are page-locked in
all. Not tuned on a GPU yet."""
_NON_BLOCKING, _DISABLE_TIMING, _PORTABLE = 1, 2, 1
"""``CU_STREAM_NON_BLOCKING``, ``CU_EVENT_DISABLE_TIMING``, ``CU_MEMHOSTALLOC_PORTABLE``."""


class CudaTier:
    """Memory of the machine's first GPU; see ``DeviceTier``. ``limit``: bytes that the store may give out there.

    The context is the device's primary one in this process. Any thread may call; each call makes it current.
    """

    kind = GPU_MEMORY
    bandwidth: float | None = None

    def __init__(self, limit: int) -> None:
        """Raises ConfigError where there is no such GPU, it is too small, or its driver cannot do this."""
        visible = os.environ.get(_VISIBLE, "0").strip()
        if visible.split(",")[0].strip() != "0":
            raise ConfigError(
                f"--device-kind cuda: a store serves the machine's first GPU alone so far, and {_VISIBLE} is "
                f"{visible!r}: unset it for disco-accel store serve"
            )
        try:
            self._start(limit)
        except ConfigError:
            raise
        except ExecutionError as error:
            raise ConfigError(f"--device-kind cuda: {error}") from error

    def _start(self, limit: int) -> None:
        ordinal = ask_driver("cuDeviceGet", 0)
        self.name, self.identity = device_name(ordinal), device_id(ordinal)
        for attribute in (_VIRTUAL_MEMORY, _SHARES_FILES):
            if not ask_driver("cuDeviceGetAttribute", attribute, ordinal):
                raise ConfigError(
                    f"--device-kind cuda: {self.name} or its driver cannot share memory between processes: serve the "
                    "store with --device-kind host"
                )
        total = ask_driver("cuDeviceTotalMem_v2", ordinal, kind=c_size_t)
        if limit > total:
            raise ConfigError(f"--device: {format_size(limit)} is more than the {format_size(total)} of {self.name}")
        self._ordinal = ordinal
        self._context = ask_driver("cuDevicePrimaryCtxRetain", ordinal, kind=c_void_p)
        self.grain = granularity(ordinal)
        self._mappings: dict[int, CudaMapping] = {}
        self._rate = _FIRST_GUESS
        self._enter()
        self._fresh = new_stream()
        self._loads, self._saves = _CudaLane(), _CudaLane()
        self._check_read_only()

    def _enter(self) -> None:
        call_driver("cuCtxSetCurrent", self._context)

    def _check_read_only(self) -> None:
        """Final objects are mapped read-only. A driver that cannot do that is found now, not by the first reader."""
        file, probe = create_mapping(self._ordinal, self.grain)
        os.close(file)
        try:
            probe.allow(writes=False)
        finally:
            probe.unmap()

    def allocate(self, name: str, nbytes: int) -> int:
        del name
        self._enter()
        size = footprint_of(max(1, nbytes), self.grain)
        file, mapping = create_mapping(self._ordinal, size)
        self._mappings[file] = mapping
        try:
            call_driver("cuMemsetD8Async", mapping.address, 0, size, self._fresh)
            # Of this process's stream: other processes see nothing of its order.
            call_driver("cuStreamSynchronize", self._fresh)
        except BaseException:
            self.close(file)
            raise
        return file

    def seal(self, file: int) -> bool:
        """Clients map final objects read-only; nothing stops a program of this user that calls
        the driver itself."""
        return True

    def load(self, source: int, target: int, nbytes: int, cancelled: threading.Event) -> None:
        begun = time.monotonic()
        self._enter()
        self._loads.load(source, self._mappings[target].address, nbytes, cancelled)
        self._note(nbytes, begun, cancelled)

    def save(self, source: int, target: int, nbytes: int, cancelled: threading.Event) -> None:
        begun = time.monotonic()
        self._enter()
        self._saves.save(self._mappings[source].address, target, nbytes, cancelled)
        self._note(nbytes, begun, cancelled)

    def _note(self, nbytes: int, begun: float, cancelled: threading.Event) -> None:
        if nbytes >= _TIMED_BYTES and not cancelled.is_set():
            self._rate = (self._rate + nbytes / max(1e-9, time.monotonic() - begun)) / 2

    def seconds(self, nbytes: int) -> float:
        """Of the copies so far, the last counting most."""
        return LATENCY + nbytes / self._rate

    def close(self, file: int) -> None:
        """Raises DeviceLost where the driver does not take memory back."""
        # Before the descriptor's number can be another's.
        mapping = self._mappings.pop(file, None)
        try:
            if mapping is not None:
                mapping.unmap()
        except DeviceLost:
            raise
        except ExecutionError as error:
            raise DeviceLost(str(error)) from error
        finally:
            os.close(file)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Page-locked memory. ``copied``: an event after the GPU's last copy from it or to it."""

    address: int
    view: memoryview
    copied: int


class _CudaLane:
    """Copies between files in host memory and a GPU in one direction: a stream, and two page-locked pieces that a copy
    of the host's and one of the GPU's use in turn. Used by one thread at a time, in which the device's context is
    current.

    The host's part runs at the speed of one thread's copy. Registering the files' own pages instead takes the driver
    about as long as that copy, for each file anew.
    """

    def __init__(self) -> None:
        """Raises ExecutionError where there is no page-locked memory."""
        self._stream = new_stream()
        self._pieces = (_new_piece(), _new_piece())

    def load(self, source: int, address: int, nbytes: int, cancelled: threading.Event) -> None:
        """Copy the file ``source`` to ``address``; done when it returns. Raises OSError, ExecutionError."""
        with self._all_done():
            for n, (begin, size) in enumerate(_parts(nbytes)):
                if cancelled.is_set():
                    return
                piece = self._pieces[n % 2]
                if n >= 2:
                    call_driver("cuEventSynchronize", piece.copied)
                _read(source, piece.view[:size], begin)
                call_driver("cuMemcpyHtoDAsync_v2", address + begin, piece.address, size, self._stream)
                call_driver("cuEventRecord", piece.copied, self._stream)

    def save(self, address: int, target: int, nbytes: int, cancelled: threading.Event) -> None:
        """Copy ``address`` to the file ``target``; done when it returns. Raises OSError, ExecutionError."""
        under_way: deque[tuple[_Piece, int, int]] = deque()
        with self._all_done():
            for n, (begin, size) in enumerate(_parts(nbytes)):
                if cancelled.is_set():
                    return
                if len(under_way) == 2:
                    _arrived(target, *under_way.popleft())
                piece = self._pieces[n % 2]
                call_driver("cuMemcpyDtoHAsync_v2", piece.address, address + begin, size, self._stream)
                call_driver("cuEventRecord", piece.copied, self._stream)
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
                call_driver("cuStreamSynchronize", self._stream)
            raise
        call_driver("cuStreamSynchronize", self._stream)


def new_stream() -> int:
    """Of the current context, ordered with no other by itself. Raises ExecutionError."""
    return ask_driver("cuStreamCreate", _NON_BLOCKING, kind=c_void_p)


def _new_piece() -> _Piece:
    address = ask_driver("cuMemHostAlloc", _PIECE, _PORTABLE, kind=c_void_p)
    view = memoryview((ctypes.c_ubyte * _PIECE).from_address(address)).cast("B")
    return _Piece(address, view, ask_driver("cuEventCreate", _DISABLE_TIMING, kind=c_void_p))


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
    call_driver("cuEventSynchronize", piece.copied)
    left = piece.view[:size]
    while left:
        count = os.pwrite(file, left, begin)
        left, begin = left[count:], begin + count
