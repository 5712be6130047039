"""The device tier, memory that objects are used from behind a link of limited speed, and the copies over that link.

On the host device it is shared memory, and the link a pace that copies keep to. ``cuda_tier`` has that of a GPU.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

from disco_accel.errors import DeviceLost, ExecutionError
from disco_accel.native.shared_memory import READ_ONLY, WHOLE, add_seals, create_file
from disco_accel.store.messages import HOST_MEMORY
from disco_accel.store.objects import Move
from disco_accel.threads import start_thread

_PIECE = 1 << 18
"""Bytes that are copied at once: a pace is kept, and a needless copy ends, to within that many."""
LATENCY = 1e-4
"""Seconds that a copy takes beside its bytes, by estimate: two wake-ups of a thread."""
_UNTHROTTLED = 2e9
"""Bytes/s of a copy without a pace, by estimate."""
_SMALL = 1 << 20
"""A file of fewer bytes is closed at once."""
_DISCARD_NICENESS = 10
"""Of the thread that closes files: a tenth of a core that one other thread wants, which frees a GiB in 3 s."""
_MOST_DISCARDED = 1 << 28
"""Bytes of files that wait to be closed; with more, each is closed at once: on a machine where nothing is left for that
thread they would be memory that nobody accounts for."""


class DeviceTier(Protocol):
    """Memory of one device as files that other processes can be given. Any thread may call."""

    kind: int
    """``HOST_MEMORY`` or ``GPU_MEMORY``."""
    name: str
    """Of the GPU; empty for host memory."""
    identity: bytes
    """16 bytes by which a client finds the device; zeros for host memory."""
    grain: int
    """An object takes a whole multiple of so many bytes."""
    bandwidth: float | None
    """Bytes/s to which copies are throttled, each way; None: they are not."""

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
        """Close ``file``, of this tier or of host memory, which nothing copies now."""


class SharedMemoryTier:
    """A device tier in host memory; see ``DeviceTier``."""

    kind = HOST_MEMORY
    name = ""
    identity = bytes(16)
    grain = mmap.PAGESIZE

    def __init__(self, bandwidth: float | None = None) -> None:
        self.bandwidth = bandwidth

    def allocate(self, name: str, nbytes: int) -> int:
        return new_file(name, nbytes)

    def seal(self, file: int) -> bool:
        return add_seals(file, READ_ONLY)

    def load(self, source: int, target: int, nbytes: int, cancelled: threading.Event) -> None:
        _copy(source, target, nbytes, self.bandwidth, cancelled)

    save = load

    def seconds(self, nbytes: int) -> float:
        return LATENCY + nbytes / (self.bandwidth or _UNTHROTTLED)

    def close(self, file: int) -> None:
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


class CopyLanes:
    """Workers that copy between the tiers while the store's loop goes on: one for each direction of the link, and one
    that closes files. Copies run in the order in which they were asked for, loads beside saves.

    ``wake`` is called in a worker's thread when a move has ended; the loop then takes it from ``ended``.
    """

    def __init__(self, tier: DeviceTier, wake: Callable[[], None]) -> None:
        self.tier = tier
        self._wake = wake
        self._ended: deque[Move] = deque()
        self._queues: dict[bool, queue.SimpleQueue[Move | None]] = {load: queue.SimpleQueue() for load in (True, False)}
        self.queued = {True: 0, False: 0}
        """Bytes that are under way to the device (True) and from it (False)."""
        self.lost: DeviceLost | None = None
        self._closed = False
        self._discarded: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
        # Bytes, each counted by one thread: given to be closed, and closed.
        self._discards = self._discards_done = 0
        end = partial(self._discarded.put, None)
        self._threads = [start_thread(self._discard, name="store-free", stop=end)]
        for load, waiting in self._queues.items():
            name = "store-load" if load else "store-save"
            self._threads.append(start_thread(self._work, load, name=name, stop=partial(waiting.put, None)))

    def submit(self, move: Move) -> None:
        """Start ``move`` when those before it have ended."""
        self.queued[move.load] += move.object.footprint
        self._queues[move.load].put(move)

    def ended(self) -> Move | None:
        """A move that has ended, each once; None where there is no other. Raises DeviceLost: there will be none any
        more, and the memory of the device is gone."""
        if self.lost is not None:
            raise self.lost
        if not self._ended:
            return None
        move = self._ended.popleft()
        self.queued[move.load] -= move.object.footprint
        return move

    def discard(self, file: int, nbytes: int) -> None:
        """Close ``file``: a large one in a worker, because the operating system takes 0.2 to 0.4 ms for each MiB of it
        (on two busy cores), which a copy that follows need not wait for. Until then both are there."""
        if nbytes < _SMALL or self._closed or self._discards - self._discards_done > _MOST_DISCARDED:
            self.tier.close(file)
        else:
            self._discards += nbytes
            self._discarded.put((file, nbytes))

    def close(self) -> None:
        """End the workers once they have done all that they were given."""
        self._closed = True
        self._discarded.put(None)
        for waiting in self._queues.values():
            waiting.put(None)
        for thread in filter(None, self._threads):
            thread.join(timeout=5)

    def _lose(self, error: DeviceLost) -> None:
        self.lost = error
        self._wake()

    def _discard(self) -> None:
        # Of this thread alone. It wakes up as a load does that room was made for, and would keep that one waiting.
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _DISCARD_NICENESS)
        while (given := self._discarded.get()) is not None:
            file, nbytes = given
            try:
                self.tier.close(file)
            except DeviceLost as error:
                self._lose(error)
            self._discards_done += nbytes

    def _work(self, load: bool) -> None:
        copy = self.tier.load if load else self.tier.save
        while (move := self._queues[load].get()) is not None:
            try:
                copy(move.source, move.target, move.object.nbytes, move.cancelled)
            except OSError as error:
                move.error = os.strerror(error.errno or 0)
            except DeviceLost as error:
                self._lose(error)
                continue
            except (ValueError, MemoryError, ExecutionError) as error:
                move.error = str(error)
            self._ended.append(move)
            self._wake()
