"""A store of a hundred lines for tests of the interposed library: it adds up what is announced and can make room."""

from __future__ import annotations

import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

REQUEST = struct.Struct("<BBHIqQqBB6x8q")
FIRST_CLASS = 32


class StandInStore:
    """Listens at ``path``. ``on_change``, called in its thread with device and bytes of each announcement."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.on_change: Callable[[int, int], None] = lambda device, nbytes: None
        self.messages = 0
        self.lowest = 0
        self._held: dict[socket.socket, dict[int, int]] = {}
        self._pids: dict[socket.socket, int] = {}
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listening.bind(os.fspath(path))
        self._listening.listen()
        self._wake, self._woken = os.pipe()
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def held(self) -> dict[int, dict[int, int]]:
        """Bytes by device of each process, those that hold some."""
        with self._lock:
            found = {pid: {d: n for d, n in self._held[at].items() if n} for at, pid in self._pids.items()}
            return {pid: held for pid, held in found.items() if held}

    def connections(self) -> int:
        with self._lock:
            return len(self._held)

    def wait_for(self, expected: dict[int, dict[int, int]], seconds: float = 5) -> None:
        """Return when ``held`` is ``expected``; AssertionError after ``seconds``."""
        end = time.monotonic() + seconds
        while self.held() != expected and time.monotonic() < end:
            time.sleep(0.002)
        held = self.held()
        assert held == expected, f"{held} is not {expected}"

    def close(self) -> None:
        os.write(self._woken, b"x")
        self._thread.join()
        for opened in (self._listening, *self._held):
            opened.close()
        self._selector.close()
        os.close(self._wake)
        os.close(self._woken)
        self.path.unlink()

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj == self._wake:
                    return
                if key.fileobj is self._listening:
                    self._accept()
                elif isinstance(key.fileobj, socket.socket):
                    self._receive(key.fileobj)

    def _accept(self) -> None:
        made, _ = self._listening.accept()
        pid = struct.unpack("3i", made.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        self._selector.register(made, selectors.EVENT_READ)
        with self._lock:
            self._held[made], self._pids[made] = {}, pid

    def _receive(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(512)
        except ConnectionError:
            data = b""
        if not data:
            self._selector.unregister(connection)
            connection.close()
            with self._lock:
                del self._held[connection], self._pids[connection]
            return
        version, opcode, device, _, amount, *rest = REQUEST.unpack(data)
        assert (version, opcode) == (1, FIRST_CLASS) and not any(rest)
        with self._lock:
            held = self._held[connection]
            held[device] = held.get(device, 0) + amount
            self.lowest = min(self.lowest, held[device])
            self.messages += 1
        self.on_change(device, amount)


@contextmanager
def stand_in_store(path: Path) -> Iterator[StandInStore]:
    """A store that listens at ``path`` inside the context."""
    store = StandInStore(path)
    try:
        yield store
    finally:
        store.close()
