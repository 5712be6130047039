"""A page of memory that the store writes and one client reads: its budget, without a message.

Two 8-byte little-endian words, each written whole: the granted bytes; the time at which the store last looked, in
nanoseconds of CLOCK_MONOTONIC.
"""

from __future__ import annotations

import mmap
import os
import time

from disco_accel.native.shared_memory import NO_NEW_WRITERS, add_seals, create_file

GRANT, SEEN = range(2)
"""Places of the words."""
BEAT_SECONDS = 0.25
"""The store renews ``SEEN`` that often."""
SILENT_SECONDS = 2.0
"""A client that has seen no renewal for so long asks whether the store is there at all."""


class GrantPage:
    """The store's side of a page. ``file``: a descriptor for the client, which can only be mapped to read."""

    def __init__(self) -> None:
        self.file = create_file("store-grant", mmap.PAGESIZE)
        self._memory = mmap.mmap(self.file, mmap.PAGESIZE)
        add_seals(self.file, NO_NEW_WRITERS)
        self._words = memoryview(self._memory).cast("q")
        self.beat()

    def write(self, grant: int) -> None:
        """The client has ``grant`` bytes from now on."""
        self._words[GRANT] = grant

    def beat(self) -> None:
        """The store is there."""
        self._words[SEEN] = time.monotonic_ns()

    def close(self) -> None:
        """Free the page; the client's mapping stays as it is."""
        self._words.release()
        self._memory.close()
        os.close(self.file)


class GrantView:
    """A client's side of a page."""

    def __init__(self, file: int) -> None:
        """``file`` is not needed any more afterwards."""
        self._memory = mmap.mmap(file, mmap.PAGESIZE, prot=mmap.PROT_READ)
        self._words = memoryview(self._memory).cast("q")

    @property
    def grant(self) -> int:
        """Bytes that the client may hold now."""
        return self._words[GRANT]

    @property
    def silent(self) -> bool:
        """Whether the store has not looked for a while: it has ended, or is stopped."""
        return time.monotonic_ns() - self._words[SEEN] > SILENT_SECONDS * 1e9
