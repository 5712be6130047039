"""Copies between the tiers: every byte, at no more than the link's pace, and an error where a file is too short."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest

from disco_accel.native.shared_memory import READ_ONLY, add_seals
from disco_accel.store.tiers import _MOST_DISCARDED, CopyLanes, SharedMemoryTier, new_file
from tests.store.serving import MIB, open_files, until

NBYTES = 3 * MIB + 12345


@pytest.fixture
def source() -> Iterator[int]:
    """A final file of ``NBYTES``, of which the second MiB was never written to."""
    file = new_file("test-source", NBYTES)
    os.pwrite(file, os.urandom(MIB), 0)
    os.pwrite(file, os.urandom(NBYTES - 2 * MIB), 2 * MIB)
    assert add_seals(file, READ_ONLY)
    yield file
    os.close(file)


@pytest.mark.parametrize("way", ["load", "save"])
def test_a_copy_has_every_byte_and_can_be_made_final(source: int, way: str) -> None:
    tier, target = SharedMemoryTier(1e9), new_file("test-target", NBYTES)
    begun = time.monotonic()
    getattr(tier, way)(source, target, NBYTES, threading.Event())
    assert time.monotonic() - begun >= NBYTES / 1e9, "no faster than its link"
    assert os.pread(target, NBYTES + 1, 0) == os.pread(source, NBYTES + 1, 0)
    assert tier.seal(target)
    with pytest.raises(PermissionError):
        os.pwrite(target, b"x", 0)
    os.close(target)


def test_a_file_that_is_too_short_is_an_error_and_a_cancelled_copy_ends(source: int) -> None:
    tier, target, cancelled = SharedMemoryTier(), new_file("test-target", 2 * NBYTES), threading.Event()
    with pytest.raises(OSError, match=f"ends at {NBYTES}"):
        tier.load(source, target, 2 * NBYTES, cancelled)
    os.close(target)
    cancelled.set()
    target = new_file("test-target", NBYTES)
    tier.load(source, target, NBYTES, cancelled)
    assert os.pread(target, NBYTES, 0) == bytes(NBYTES)
    os.close(target)


def test_files_wait_to_be_closed_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the thread that closes them gets no time, they are closed at once, and none stays open."""
    before, may_close = open_files(), threading.Event()
    monkeypatch.setattr(CopyLanes, "_discard", lambda lanes: (may_close.wait(30), _discard(lanes)))
    lanes = CopyLanes(SharedMemoryTier(), lambda: None)
    for _ in range(6):
        lanes.discard(new_file("test-large", 8), _MOST_DISCARDED // 2)
    assert (open_files() - before).total() == 3
    may_close.set()
    until(lambda: not open_files() - before)
    lanes.close()


_discard = CopyLanes._discard
