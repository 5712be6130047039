"""Budgets that a store divides among processes: of device memory (``memory_budget: shared``) and of host memory
(``host_memory: shared``). The one module of the store that other folders import.

Each has a connection of its own. A store that ends leaves the job its memory, with one warning; a store that is back at
the same place is told all that the job holds.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping

import torch

from disco_accel.errors import DiscoError, StoreFull, StoreGone
from disco_accel.sizes import format_size
from disco_accel.store.client import Store
from disco_accel.threads import start_thread

logger = logging.getLogger("disco_accel")

RECONNECT_SECONDS = 2.0
"""Between two looks for a store that is back."""

POLL_SECONDS = 0.25
"""Between two looks whether the store of host memory is there."""

Piece = tuple[str, int]
"""A piece of host memory: its kind, such as ``weights``, and its number."""


class _SharedBudget(ABC):
    """The connection of a budget to its store, which may end and come back. ``_key``: of the config."""

    _key: str

    def __init__(self) -> None:
        """Raises StoreGone where no store listens, StoreError and ConfigError as ``Store.connect``."""
        self._lock = threading.RLock()
        self._store: Store | None = Store.connect()
        self._looked = 0.0
        self._closed = False

    @property
    def connected(self) -> bool:
        """Whether a store counts the memory of this job."""
        return self._store is not None

    @abstractmethod
    def _tell_all(self, store: Store) -> None:
        """Tell a store that is back all that this job holds. Raises DiscoError."""

    @abstractmethod
    def _words(self, back: bool) -> str:
        """For a warning: the memory that this job keeps without a store, or has of one that is ``back``."""

    def _send(self, message: Callable[[Store], None]) -> None:
        """Do ``message`` with the store, if there is one."""
        store = self._store
        if store is None:
            return
        try:
            message(store)
        except StoreGone as error:
            self._lost(store, error)

    def _lost(self, store: Store, error: StoreGone) -> None:
        with self._lock:
            if self._store is not store:
                return
            self._store = None
            store.close()
        logger.warning("%s: shared: %s. %s until a store is back there", self._key, error, self._words(back=False))

    def _look_again(self) -> None:
        """Connect anew, if a store is back."""
        now = time.monotonic()
        if now - self._looked < RECONNECT_SECONDS or not self._lock.acquire(blocking=False):
            return
        try:
            self._looked = now
            if self._store is not None or self._closed:
                return
            store = Store.connect()
            try:
                self._tell_all(store)
            except DiscoError:
                store.close()
                raise
            self._store = store
        except DiscoError:
            return
        finally:
            self._lock.release()
        logger.warning("%s: shared: the store is back, and %s", self._key, self._words(back=True))


class StoreGrants(_SharedBudget):
    """Device memory that a store grants one model of this process: a ``GrantSource``."""

    _key = "memory_budget"

    def __init__(self, devices: Collection[int] = (0,), run: int = 0) -> None:
        """``devices``: the machine's, of each of which the job holds its grant. ``run``: as in ``Store.wanted``.

        Raises StoreGone where no store listens, StoreError and ConfigError as ``Store.connect``."""
        super().__init__()
        self._devices, self._run = tuple(devices), run
        self._minimum, self._max_useful, self._held, self._last = 0, 0, 0, 0

    def granted(self) -> int:
        """Bytes that the job may hold now; without a store those of the last grant."""
        store = self._store
        if store is not None:
            try:
                self._last = store.granted()
                return self._last
            except StoreGone as error:
                self._lost(store, error)
        self._look_again()
        return self._last

    def most(self) -> int | None:
        """Bytes of the store's device, or of this job's quota where that is less; None where the store has ended."""
        store = self._store
        try:
            if store is None:
                return None
            stats = store.stats()
            return min(int(stats["device_bytes"]), int(stats["quota"] or stats["device_bytes"]))
        except StoreGone:
            return None

    def want(self, minimum: int, max_useful: int) -> None:
        """As ``GrantSource.want``."""
        with self._lock:
            self._minimum, self._max_useful = minimum, max_useful
            self._send(self._tell_wanted)

    def hold(self, nbytes: int) -> None:
        """As ``GrantSource.hold``."""
        with self._lock:
            self._held = nbytes
            self._send(self._tell_held)

    def _tell_wanted(self, store: Store) -> None:
        store.wanted(self._minimum, self._max_useful, self._devices, self._run)

    def _tell_held(self, store: Store) -> None:
        store.held(self._held)
        # It has no reply itself; the reply to a later message comes after it was counted.
        store.ping()

    def _tell_all(self, store: Store) -> None:
        # First the bytes held: nobody may be granted them meanwhile.
        self._tell_held(store)
        self._tell_wanted(store)
        self._last = store.granted()

    def _words(self, back: bool) -> str:
        size = format_size(self._last)
        if back:
            return f"grants {size}"
        return f"This job keeps the {size} that it was granted last; other jobs are not told of it"


class HostClaims(_SharedBudget):
    """Host memory that this process holds for one model, counted by a store as it counts objects.

    Each piece has an object of its size in the store's host tier, which nobody maps: it takes capacity in the store's
    ledger, and no pages. So its quota holds, others' copies of objects make room for it, and it is gone when the
    connection ends.
    """

    _key = "host_memory"

    def __init__(self) -> None:
        """Raises StoreGone where no store listens, StoreError and ConfigError as ``Store.connect``."""
        super().__init__()
        self._process = os.getpid()
        assert self._store is not None
        self.most = int(self._store.stats()["host_bytes"])
        """Bytes of the store's host tier."""
        self._pieces: dict[Piece, int] = {}
        self._objects: dict[Piece, int] = {}
        self._told_full = False
        self._stop = threading.Event()
        start_thread(_watch, weakref.ref(self), self._stop, name="disco-host", stop=self._stop.set)

    @property
    def held(self) -> int:
        """Bytes of all pieces."""
        return sum(self._pieces.values())

    def hold(self, pieces: Mapping[Piece, int]) -> None:
        """From now on ``pieces`` are held, in bytes, and no others; those that are new are about to be taken. Does
        nothing in a process that was forked since: its memory is its parent's. Raises StoreFull: the store has no room
        for one that is new, and counts none of those."""
        if os.getpid() != self._process or pieces == self._pieces:
            return
        with self._lock:
            before, self._pieces = self._pieces, dict(pieces)
            try:
                self._send(self._tell_pieces)
            except StoreFull:
                self._pieces = {piece: nbytes for piece, nbytes in before.items() if piece in self._objects}
                raise

    def drop(self, kind: str) -> None:
        """No piece of that kind is held any more."""
        self.hold({piece: nbytes for piece, nbytes in self._pieces.items() if piece[0] != kind})

    def close(self) -> None:
        """The model holds nothing any more."""
        self._stop.set()
        if os.getpid() != self._process:
            return
        with self._lock:
            self._closed = True
            self._pieces, self._objects = {}, {}
            if self._store is not None:
                self._store.close()
                self._store = None

    def look(self) -> None:
        """See whether the store has ended, or is back. From any thread."""
        store = self._store
        if store is None:
            self._look_again()
        elif not store.alive():
            try:
                store.ping()
            except StoreGone as error:
                self._lost(store, error)

    def _tell_pieces(self, store: Store) -> None:
        for piece in [p for p in self._objects if p not in self._pieces]:
            store.free(self._objects.pop(piece))
        made: list[Piece] = []
        try:
            for piece, nbytes in self._pieces.items():
                if piece not in self._objects:
                    self._objects[piece] = store.create((nbytes,), torch.uint8)
                    made.append(piece)
        except StoreFull as error:
            for new in made:
                store.free(self._objects.pop(new))
            raise StoreFull(
                f"host_memory: shared: no room for {format_size(nbytes)} of {piece[0]}: {error}; give the store more "
                "--host, end what holds it, raise memory_budget so that less is offloaded, or set host_memory to a size"
            ) from error

    def _tell_all(self, store: Store) -> None:
        self._objects = {}
        try:
            self._tell_pieces(store)
        except StoreFull as error:
            if not self._told_full:
                self._told_full = True
                logger.warning("%s. It is held all the same, and others are not told of it yet", error)
            raise
        self._told_full = False

    def _words(self, back: bool) -> str:
        size = format_size(self.held)
        if back:
            return f"counts the {size} held"
        return f"This job keeps the {size} of host memory that it holds; other processes are not told of it"


def _watch(claims: weakref.ref[HostClaims], stop: threading.Event) -> None:
    while not stop.wait(POLL_SECONDS):
        own = claims()
        if own is None:
            return
        own.look()
        del own
