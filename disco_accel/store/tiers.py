"""The device tier: memory that objects are used from, behind a link of limited speed.

On the host device it is shared memory, and the link a pace that copies keep to. ``cuda_tier`` has that of a GPU.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
from enum import IntEnum
from typing import Protocol

from disco_accel.native.shared_memory import READ_ONLY, WHOLE, add_seals, create_file

_PIECE = 1 << 18
"""Bytes that are copied at once: a pace is kept, and a needless copy ends, to within that many."""
_LATENCY = 1e-4
"""Seconds that a copy takes beside its bytes, by estimate: two wake-ups of a thread."""
_UNTHROTTLED = 2e9
"""Bytes/s of a copy without a pace, by estimate."""


class DeviceKind(IntEnum):
    """What a tier's descriptors are of; a figure of the store (``device_kind``)."""

    HOST = 0
    """Files in memory."""
    CUDA = 1
    """Memory of a GPU."""


class DeviceTier(Protocol):
    """Memory of one device as files that other processes can be given. Any thread may call."""

    kind: DeviceKind
    identity: bytes
    """16 bytes by which a client finds the device; zeros for host memory."""
    grain: int
    """An object takes a whole multiple of so many bytes."""

    def allocate(self, name: str, nbytes: int) -> int:
        """The descriptor of ``nbytes`` zeros. Raises ExecutionError where there is no memory."""

    def seal(self, file: int) -> bool:
        """Make the content of ``file`` final, or return False where a process can still write to it."""

    def load(self, source: int, target: int, nbytes: int, cancelled: threading.Event) -> None:
        """Copy a file of host memory to one of this tier, in the caller's thread. Raises OSError, ExecutionError."""

    def save(self, source: int, target: int, nbytes: int, cancelled: threading.Event) -> None:
        """Copy a file of this tier to one of host memory, in the caller's thread. Raises OSError, ExecutionError."""

    def seconds(self, nbytes: int) -> float:
        """How long a copy of so many bytes takes, either way, by estimate."""

    def close(self, file: int) -> None:
        """Let go of ``file``, of this tier or of host memory, which nothing copies now."""


class SharedMemoryTier:
    """A device tier in host memory. ``bandwidth``: bytes/s of its link, each way by itself; None: as fast as it
    goes."""

    kind = DeviceKind.HOST
    identity = bytes(16)
    grain = mmap.PAGESIZE

    def __init__(self, bandwidth: float | None = None) -> None:
        self.bandwidth = bandwidth

    def allocate(self, name: str, nbytes: int) -> int:
        """As ``DeviceTier`` says."""
        return new_file(name, nbytes)

    def seal(self, file: int) -> bool:
        """As ``DeviceTier`` says."""
        return add_seals(file, READ_ONLY)

    def load(self, source: int, target: int, nbytes: int, cancelled: threading.Event) -> None:
        """As ``DeviceTier`` says."""
        _copy(source, target, nbytes, self.bandwidth, cancelled)

    def save(self, source: int, target: int, nbytes: int, cancelled: threading.Event) -> None:
        """As ``DeviceTier`` says."""
        _copy(source, target, nbytes, self.bandwidth, cancelled)

    def seconds(self, nbytes: int) -> float:
        """As ``DeviceTier`` says."""
        return _LATENCY + nbytes / (self.bandwidth or _UNTHROTTLED)

    def close(self, file: int) -> None:
        """As ``DeviceTier`` says."""
        os.close(file)


def new_file(name: str, nbytes: int) -> int:
    """A file in host memory whose length is final. Raises ExecutionError where there is no memory."""
    file = create_file(name, nbytes)
    add_seals(file, WHOLE)
    return file


def _copy(source: int, target: int, nbytes: int, bandwidth: float | None, cancelled: threading.Event) -> None:
    """``nbytes`` from file to file at ``bandwidth`` bytes/s, in the kernel: other threads run meanwhile, and no page of
    either is mapped, which would take 0.1 ms for each MiB once the link is done. Raises OSError."""
    begun = time.monotonic()
    done = 0
    while done < nbytes and not cancelled.is_set():
        copied = os.copy_file_range(source, target, min(_PIECE, nbytes - done), done, done)
        if copied == 0:
            raise OSError(errno.EIO, f"a file of {nbytes} bytes ends at {done}")
        done += copied
        if bandwidth is not None:
            ahead = begun + done / bandwidth - time.monotonic()
            if ahead > 0:
                time.sleep(ahead)
