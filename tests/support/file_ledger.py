"""Memory divided among jobs of one machine by a page that they all map: grants for tests and benchmarks, no server."""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from disco_accel.store.grants import Job, divide

MOST_JOBS = 16
_TOTAL = struct.Struct("<q")
_JOB = struct.Struct("<qqqqqq")
"""Whether it is there, minimum, max_useful, quota (-1: none), held, granted: bytes."""


class FileLedger:
    """A ``GrantSource`` of one job: the one that joined as number ``job``. Jobs may be in several processes."""

    def __init__(self, path: Path, quota: int | None = None) -> None:
        """Join the ledger in the file ``path``, that ``create`` has made. Raises ValueError if it is full."""
        self._file = os.open(path, os.O_RDWR)
        # One file description, which all threads of this job share, keeps out other jobs alone.
        self._threads = threading.Lock()
        self._page = mmap.mmap(self._file, mmap.PAGESIZE)
        with self._locked():
            free = [number for number in range(MOST_JOBS) if not self._fields(number)[0]]
            if not free:
                raise ValueError(f"{path}: has {MOST_JOBS} jobs already")
            self.job = free[0]
            self._put(self.job, 1, 0, 0, -1 if quota is None else quota, 0, 0)
        self._offset = self._at(self.job) + 5 * 8

    @staticmethod
    def create(path: Path, total: int) -> None:
        """A ledger of ``total`` bytes, without jobs."""
        path.write_bytes(_TOTAL.pack(total) + bytes(mmap.PAGESIZE - _TOTAL.size))

    def granted(self) -> int:
        """As ``GrantSource.granted``."""
        value: int
        (value,) = _TOTAL.unpack_from(self._page, self._offset)
        return value

    def most(self) -> None:
        """As ``GrantSource.most``: not told."""

    def want(self, minimum: int, max_useful: int) -> None:
        """As ``GrantSource.want``."""
        with self._locked():
            _, _, _, quota, held, granted = self._fields(self.job)
            self._put(self.job, 1, minimum, max_useful, quota, held, granted)

    def hold(self, nbytes: int) -> None:
        """As ``GrantSource.hold``."""
        with self._locked():
            there, minimum, max_useful, quota, _, granted = self._fields(self.job)
            self._put(self.job, there, minimum, max_useful, quota, nbytes, granted)

    def set_total(self, total: int) -> None:
        """From now on so many bytes are divided."""
        with self._locked():
            _TOTAL.pack_into(self._page, 0, total)

    def held(self) -> list[int]:
        """Of all jobs that are there."""
        with self._locked():
            return [fields[4] for fields in map(self._fields, range(MOST_JOBS)) if fields[0]]

    def leave(self) -> None:
        """The job is over."""
        with self._locked():
            self._put(self.job, 0, 0, 0, -1, 0, 0)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Alone with the page; what it grants follows from the rest afterwards."""
        self._threads.acquire()
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
            there = [number for number in range(MOST_JOBS) if self._fields(number)[0]]
            rows = [self._fields(number) for number in there]
            jobs = [Job(row[1], row[2], None if row[3] < 0 else row[3], row[4]) for row in rows]
            (total,) = _TOTAL.unpack_from(self._page, 0)
            for number, row, grant in zip(there, rows, divide(total, jobs), strict=True):
                self._put(number, *row[:5], grant)
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)
            self._threads.release()

    def _at(self, number: int) -> int:
        return _TOTAL.size + number * _JOB.size

    def _fields(self, number: int) -> tuple[int, ...]:
        return _JOB.unpack_from(self._page, self._at(number))

    def _put(self, number: int, *fields: int) -> None:
        _JOB.pack_into(self._page, self._at(number), *fields)
