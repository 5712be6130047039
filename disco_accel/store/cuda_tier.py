"""The device tier in a GPU's memory: objects are ``cuMemCreate`` allocations, copied over two streams."""

from __future__ import annotations

import os
import threading
import time
from ctypes import c_size_t, c_void_p

from disco_accel.errors import ConfigError, DeviceLost, ExecutionError
from disco_accel.native.cuda_driver import cuda_driver
from disco_accel.native.cuda_shared_memory import CudaMapping, create, granularity
from disco_accel.sizes import format_size
from disco_accel.store.cuda_lane import CudaLane, new_stream
from disco_accel.store.tiers import DeviceKind

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_VIRTUAL_MEMORY, _SHARES_FILES = 102, 103
"""``CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED``, ``..._HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED``."""
_LATENCY = 1e-4
"""Seconds that a copy takes beside its bytes, by estimate: two wake-ups of a thread."""
_FIRST_GUESS = 8e9
"""Bytes/s of a copy until one was timed, by estimate: one thread's copy between a file and page-locked memory."""
_TIMED_BYTES = 1 << 20
"""Copies of fewer bytes say nothing of the link."""


class CudaTier:
    """Memory of the machine's first GPU. ``limit``: bytes that the store may give out there.

    The context is the device's primary one in this process. Any thread may call; each call makes it current.
    """

    kind = DeviceKind.CUDA

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
        driver = cuda_driver()
        ordinal = driver.number("cuDeviceGet", 0)
        self.name, self.identity = driver.device_name(ordinal), driver.device_id(ordinal)
        for attribute in (_VIRTUAL_MEMORY, _SHARES_FILES):
            if not driver.number("cuDeviceGetAttribute", attribute, ordinal):
                raise ConfigError(
                    f"--device-kind cuda: {self.name} or its driver cannot share memory between processes: serve the "
                    "store with --device-kind host"
                )
        total = driver.number("cuDeviceTotalMem_v2", ordinal, kind=c_size_t)
        if limit > total:
            raise ConfigError(f"--device: {format_size(limit)} is more than the {format_size(total)} of {self.name}")
        self._ordinal = ordinal
        self._context = driver.number("cuDevicePrimaryCtxRetain", ordinal, kind=c_void_p)
        self.grain = granularity(ordinal)
        self._mappings: dict[int, CudaMapping] = {}
        self._rate = _FIRST_GUESS
        self._enter()
        self._fresh = new_stream()
        self._loads, self._saves = CudaLane(), CudaLane()
        self._check_read_only()

    def _enter(self) -> None:
        cuda_driver().call("cuCtxSetCurrent", self._context)

    def _check_read_only(self) -> None:
        """What is put is mapped read-only. A driver that cannot do that is found now, not by the first reader."""
        file, probe = create(self._ordinal, self.grain)
        os.close(file)
        try:
            probe.allow(writes=False)
        finally:
            probe.unmap()

    def allocate(self, name: str, nbytes: int) -> int:
        """As ``DeviceTier`` says; zeros."""
        del name
        self._enter()
        size = -(-max(1, nbytes) // self.grain) * self.grain
        file, mapping = create(self._ordinal, size)
        self._mappings[file] = mapping
        try:
            driver = cuda_driver()
            driver.call("cuMemsetD8Async", mapping.address, 0, size, self._fresh)
            # Of this process's stream: other processes see nothing of its order.
            driver.call("cuStreamSynchronize", self._fresh)
        except BaseException:
            self.close(file)
            raise
        return file

    def seal(self, file: int) -> bool:
        """As ``DeviceTier`` says. Clients map what is final read-only; nothing stops a program of this user that calls
        the driver itself."""
        return True

    def load(self, source: int, target: int, nbytes: int, cancelled: threading.Event) -> None:
        """As ``DeviceTier`` says."""
        begun = time.monotonic()
        self._enter()
        self._loads.load(source, self._mappings[target].address, nbytes, cancelled)
        self._note(nbytes, begun, cancelled)

    def save(self, source: int, target: int, nbytes: int, cancelled: threading.Event) -> None:
        """As ``DeviceTier`` says."""
        begun = time.monotonic()
        self._enter()
        self._saves.save(self._mappings[source].address, target, nbytes, cancelled)
        self._note(nbytes, begun, cancelled)

    def _note(self, nbytes: int, begun: float, cancelled: threading.Event) -> None:
        if nbytes >= _TIMED_BYTES and not cancelled.is_set():
            self._rate = (self._rate + nbytes / max(1e-9, time.monotonic() - begun)) / 2

    def seconds(self, nbytes: int) -> float:
        """As ``DeviceTier`` says: of the copies so far, the last counting most."""
        return _LATENCY + nbytes / self._rate

    def close(self, file: int) -> None:
        """As ``DeviceTier`` says. Raises DeviceLost where the driver does not take memory back."""
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
