"""``host_memory: shared``: a tensor store counts what a model's training holds in host memory, as it counts objects.

Each piece of memory that is held has an object of its size in the store's host tier, which nobody maps: it takes room
in the store's books, and no pages. So its quota holds, others' copies of objects make room for it, and it is gone when
the connection ends.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Mapping

import torch

from disco_accel.errors import DiscoError, StoreFull, StoreGone
from disco_accel.sizes import format_size
from disco_accel.store.client import Store
from disco_accel.threads import start_thread

logger = logging.getLogger("disco_accel")

POLL_SECONDS = 0.25
"""Between two looks whether the store is there."""

RECONNECT_SECONDS = 2.0
"""Between two looks for a store that is back."""

Piece = tuple[str, int]
"""What is held, as ``weights``, and which one."""


class HostClaims:
    """What this process holds on the host for one model, told to a store. A store that ends leaves the job its memory,
    told once; one that is back at the same place is told all that is held."""

    def __init__(self) -> None:
        """Raises StoreGone where no store listens, StoreError and ConfigError as ``Store.connect``."""
        self._lock, self._process = threading.RLock(), os.getpid()
        self._store: Store | None = Store.connect()
        self.most = int(self._store.stats()["host_bytes"])
        """Bytes of the store's host tier."""
        self._pieces: dict[Piece, int] = {}
        self._objects: dict[Piece, int] = {}
        self._looked = 0.0
        self._told_full = False
        self._stop = threading.Event()
        start_thread(_watch, weakref.ref(self), self._stop, name="disco-host", stop=self._stop.set)

    @property
    def held(self) -> int:
        """Bytes of all pieces."""
        return sum(self._pieces.values())

    def hold(self, pieces: Mapping[Piece, int]) -> None:
        """From now on ``pieces`` are held, in bytes, and no others; those that are new are about to be taken. Does
        nothing in a process that was forked since: what it has is its parent's.

        Raises:
            StoreFull: the store has no room for one that is new, and counts none of those.
        """
        if os.getpid() != self._process or pieces == self._pieces:
            return
        with self._lock:
            before, self._pieces = self._pieces, dict(pieces)
            store = self._store
            if store is None:
                return
            try:
                self._tell(store)
            except StoreGone as error:
                self._lost(store, error)
            except StoreFull:
                self._pieces = {piece: nbytes for piece, nbytes in before.items() if piece in self._objects}
                raise

    def let_go(self, what: str) -> None:
        """No piece of that name is held any more."""
        self.hold({piece: nbytes for piece, nbytes in self._pieces.items() if piece[0] != what})

    def close(self) -> None:
        """The model holds nothing any more."""
        self._stop.set()
        if os.getpid() != self._process:
            return
        with self._lock:
            self._pieces, self._objects = {}, {}
            if self._store is not None:
                self._store.close()
                self._store = None

    def _tell(self, store: Store) -> None:
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

    def _lost(self, store: Store, error: StoreGone) -> None:
        with self._lock:
            if self._store is not store:
                return
            self._store, self._objects = None, {}
            store.close()
        logger.warning(
            "host_memory: shared: %s. This job keeps the %s of host memory that it holds; other processes are not told "
            "of it until a store is back there",
            error,
            format_size(self.held),
        )

    def look(self) -> None:
        """See whether the store has ended, or is back. From any thread."""
        store = self._store
        if store is not None:
            if not store.alive():
                try:
                    store.ping()
                except StoreGone as error:
                    self._lost(store, error)
            return
        now = time.monotonic()
        if now - self._looked < RECONNECT_SECONDS or not self._lock.acquire(blocking=False):
            return
        try:
            self._looked = now
            if self._store is None and not self._stop.is_set():
                self._return()
        finally:
            self._lock.release()

    def _return(self) -> None:
        try:
            store = Store.connect()
        except DiscoError:
            return
        try:
            self._tell(store)
        except DiscoError as error:
            self._objects = {}
            store.close()
            if isinstance(error, StoreFull) and not self._told_full:
                self._told_full = True
                logger.warning("%s. It is held all the same, and others are not told of it yet", error)
            return
        self._store, self._told_full = store, False
        logger.warning("host_memory: shared: the store is back, and counts the %s held", format_size(self.held))


def _watch(claims: weakref.ref[HostClaims], stop: threading.Event) -> None:
    while not stop.wait(POLL_SECONDS):
        own = claims()
        if own is None:
            return
        own.look()
        del own
