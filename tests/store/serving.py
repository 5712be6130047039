"""Stores for tests: in a thread of this process, or as the command that users start."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from disco_accel.store.capacity_ledger import CapacityLedger
from disco_accel.store.client import Store
from disco_accel.store.server import Server
from disco_accel.store.stored_object import wait_for_frees
from disco_accel.store.tiers import SharedMemoryTier

MIB = 1 << 20


@contextlib.contextmanager
def serving(
    folder: Path,
    host: int = 64 * MIB,
    device: int = 8 * MIB,
    quota: int | None = None,
    policy: str = "lru",
    rate: float | None = None,
    quotas: Mapping[str, int] | None = None,
) -> Iterator[Server]:
    """A store in a thread. Nothing of it is left afterwards: no socket, no descriptor."""
    ledger = CapacityLedger(host, device, quota, quotas or {})
    server = Server(folder / "own" / "store", ledger, policy, SharedMemoryTier(rate))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(30)
        assert not thread.is_alive()
        assert not server.path.exists()


def command(folder: Path, *options: str) -> subprocess.Popen[str]:
    """``disco-accel store serve`` as a process that listens at ``folder / "own" / "store"``."""
    path = folder / "own" / "store"
    words = [sys.executable, "-m", "disco_accel.cli.main", "store", "serve", "--socket", str(path), *options]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert str(path) in line, line
    return process


def filled(store: Store, nbytes: int, value: int, device: str = "device", next_use: float | None = None) -> int:
    """A put object of ``nbytes`` bytes, all ``value``."""
    made = store.create((nbytes,), torch.uint8, device)
    store.get(made).fill_(value)
    store.put(made, next_use)
    return made


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait for ``condition``; AssertionError if it does not come."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.005)


def in_child(work: Callable[[], None]) -> int:
    """Fork, do ``work`` there, and return the child's status: 0 if it raised nothing."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException as error:
            print(f"child: {type(error).__name__}: {error}", file=sys.stderr)
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def open_files() -> Counter[str]:
    """What the descriptors of this process lead to, but for pipes: other tests' workers may start meanwhile."""
    found: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found[os.readlink(f"/proc/self/fd/{name}")] += 1
    return Counter({name: count for name, count in found.items() if not name.startswith(("pipe:", "/proc/"))})


def objects(store: Store) -> int:
    """Objects of the store, once all that was let go of is freed."""
    gc.collect()
    wait_for_frees(store)
    count: int = store.stats()["objects"]
    return count


def nothing_left(store: Store) -> None:
    """No object is in the store, and none takes memory."""
    assert objects(store) == 0
    until(lambda: store.stats()["device_used"] == 0)
    assert store.stats()["host_used"] == 0
