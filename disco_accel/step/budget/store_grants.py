"""``memory_budget: shared``: what a tensor store grants this process's model of the device, through a connection of its
own, and what happens when the store ends."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection

from disco_accel.errors import DiscoError, StoreGone
from disco_accel.sizes import format_size
from disco_accel.store.client import Store

logger = logging.getLogger("disco_accel")

_Message = Callable[[Store], None]

RECONNECT_SECONDS = 2.0
"""Between two looks for a store that is back."""


class StoreGrants:
    """A ``GrantSource``. A store that ends leaves the job the bytes that it granted last, told once; one that is back
    at the same place is told what the job holds, and grants anew."""

    def __init__(self, devices: Collection[int] = (0,), run: int = 0) -> None:
        """``devices``: the machine's, of each of which the job holds what is granted. ``run``: as in ``Store.wanted``.

        Raises StoreGone where no store listens, StoreError and ConfigError as ``Store.connect``."""
        self._devices, self._run = tuple(devices), run
        self._lock = threading.RLock()
        self._store: Store | None = Store.connect()
        self._least, self._wish, self._held, self._last = 0, 0, 0, 0
        self._looked = 0.0

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

    @property
    def connected(self) -> bool:
        """Whether a store counts what this job holds."""
        return self._store is not None

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

    def want(self, least: int, wish: int) -> None:
        """As ``GrantSource.want``."""
        with self._lock:
            self._least, self._wish = least, wish
            self._tell(lambda store: store.wanted(least, wish, self._devices, self._run))

    def hold(self, nbytes: int) -> None:
        """As ``GrantSource.hold``."""
        with self._lock:
            self._held = nbytes
            self._tell(_holding(nbytes))

    def _tell(self, message: _Message) -> None:
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
        logger.warning(
            "memory_budget: shared: %s. This job keeps the %s that it was granted last; other jobs are not told of it "
            "until a store is back there",
            error,
            format_size(self._last),
        )

    def _look_again(self) -> None:
        now = time.monotonic()
        if now - self._looked < RECONNECT_SECONDS or not self._lock.acquire(blocking=False):
            return
        try:
            self._looked = now
            if self._store is not None:
                return
            store = Store.connect()
            # First what is held: nobody may be granted it meanwhile.
            _holding(self._held)(store)
            store.wanted(self._least, self._wish, self._devices, self._run)
            self._last, self._store = store.granted(), store
        except DiscoError:
            return
        finally:
            self._lock.release()
        logger.warning("memory_budget: shared: the store is back, and grants %s", format_size(self._last))


def _holding(nbytes: int) -> _Message:
    def tell(store: Store) -> None:
        store.held(nbytes)
        # It needs no answer itself; what comes behind it is answered after it was counted.
        store.ping()

    return tell
