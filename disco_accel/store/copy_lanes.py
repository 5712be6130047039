"""Workers that copy between tiers, one for each direction of the link, while the store's loop goes on."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from functools import partial

from disco_accel.errors import DeviceLost, ExecutionError
from disco_accel.store.objects import Move
from disco_accel.store.tiers import DeviceTier
from disco_accel.threads import start_thread

_SMALL = 1 << 20
"""A file of fewer bytes is closed at once."""
_DISCARD_NICENESS = 10
"""Of the thread that closes files: a tenth of a core that one other thread wants, which frees a GiB in 3 s."""
_MOST_DISCARDED = 1 << 28
"""Bytes of files that wait to be closed; with more, each is closed at once: on a machine where nothing is left for that
thread they would be memory that nobody accounts for."""


class Lanes:
    """Copies in the order in which they were asked for, loads beside saves.

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
        self.queued[move.load] += move.object.room
        self._queues[move.load].put(move)

    def ended(self) -> Move | None:
        """A move that has ended, each once; None where there is no other.

        Raises:
            DeviceLost: there will be none any more, and what the device had is gone.
        """
        if self.lost is not None:
            raise self.lost
        if not self._ended:
            return None
        move = self._ended.popleft()
        self.queued[move.load] -= move.object.room
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
