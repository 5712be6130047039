"""Strangers, links, dead stores, damaged messages, clients that do not read, and deaths at any moment."""

from __future__ import annotations

import os
import random
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from benchmarks.store import attacks as store_attacks
from disco_accel.errors import ConfigError, StoreError, StoreGone
from disco_accel.store.client import Store
from disco_accel.store.messages import Opcode, Request
from disco_accel.store.socket_path import listen, socket_path
from tests.store.serving import MIB, command, filled, in_child, serving, until

ROOT = Path(__file__).resolve().parents[2]
AS_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
NOBODY = 65534


def test_the_socket_and_its_folder_are_closed_to_others(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        assert stat.S_IMODE(server.path.parent.stat().st_mode) == 0o700
        assert stat.S_IMODE(server.path.stat().st_mode) == 0o600


@AS_ROOT
def test_another_user_cannot_connect(tmp_path: Path) -> None:
    """Neither past the folder, nor where somebody has opened the folder; the store asks for credentials then."""
    with serving(tmp_path) as server, Store.connect(server.path) as store:
        filled(store, 1000, 1)

        def as_stranger() -> None:
            os.setuid(NOBODY)
            for call in (lambda: Store.connect(server.path), lambda: server_socket(server.path)):
                with pytest.raises((ConfigError, OSError)):
                    call()
            with pytest.raises(OSError):
                os.kill(os.getppid(), 0)

        assert in_child(as_stranger) == 0
        # All doors open, the credentials still are another's.
        for folder in (server.path, *server.path.parents):
            if folder.stat().st_uid == 0 and folder != Path("/"):
                folder.chmod(stat.S_IMODE(folder.stat().st_mode) | 0o077)
            if folder == tmp_path:
                break
        path = os.open(server.path.parent, os.O_PATH)

        def with_doors_open() -> None:
            os.setuid(NOBODY)
            os.fchdir(path)
            made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            made.settimeout(20)
            made.connect("store")
            try:
                made.send(Request(Opcode.PING, 1).pack())
                assert made.recv(1000) == b"", "cut off before the first request"
            except ConnectionError:
                pass

        assert in_child(with_doors_open) == 0
        os.close(path)
        store.ping()
        assert len(store.stats()["clients"]) == 1
        server.path.parent.chmod(0o700)


@AS_ROOT
def test_a_client_refuses_another_users_store(tmp_path: Path) -> None:
    folder = tmp_path / "own"
    folder.mkdir(mode=0o700)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(os.fspath(folder / "store"))
    ready, told = os.pipe()
    child = os.fork()
    if child == 0:
        os.setuid(NOBODY)
        listener.listen(1)
        os.write(told, b"x")
        time.sleep(60)
        os._exit(0)
    try:
        os.read(ready, 1)
        with pytest.raises(StoreError, match=f"user {NOBODY}'s"):
            Store.connect(folder / "store")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        listener.close()
        os.close(ready)
        os.close(told)


def server_socket(path: Path) -> None:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.connect(os.fspath(path))


def test_folders_that_are_not_ones_own_are_refused(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(real)
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "file").write_text("")
    for name, says in (("link", "is a link"), ("open", "chmod 700"), ("file", "cannot be made|is a link or a file")):
        with pytest.raises(ConfigError, match=says):
            listen(tmp_path / name / "store")
    if os.getuid() == 0:
        (tmp_path / "theirs").mkdir(mode=0o700)
        os.chown(tmp_path / "theirs", NOBODY, NOBODY)
        with pytest.raises(ConfigError, match=f"belongs to user {NOBODY}"):
            listen(tmp_path / "theirs" / "store")
    (real / "store").write_text("precious")
    with pytest.raises(ConfigError, match="no socket: name another"):
        listen(real / "store")
    assert (real / "store").read_text() == "precious"
    with pytest.raises(ConfigError, match="longer than"):
        socket_path("x" * 200)


def test_the_path_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISCO_STORE", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert socket_path() == tmp_path / "disco_accel" / "store"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert socket_path() == Path(f"/tmp/disco_accel-{os.getuid()}/store")
    monkeypatch.setenv("DISCO_STORE", str(tmp_path / "a"))
    assert socket_path() == tmp_path / "a" and socket_path(tmp_path / "b") == tmp_path / "b"


def test_a_dead_stores_socket_is_replaced_and_a_live_one_is_not(tmp_path: Path) -> None:
    first = command(tmp_path, "--host", "1MiB", "--device", "1MiB")
    path = tmp_path / "own" / "store"
    with pytest.raises(ConfigError, match="listens at"):
        listen(path)
    store = Store.connect(path)
    kept = store.get(filled(store, 5000, 7))
    first.kill()
    first.wait()
    assert path.exists() and (kept == 7).all()
    with pytest.raises(StoreGone):
        store.ping()
    with pytest.raises(StoreGone, match="start one with"):
        Store.connect(path)
    second = command(tmp_path, "--host", "1MiB", "--device", "1MiB", "--link-bandwidth", "1GB/s")
    with Store.connect(path) as fresh:
        fresh.ping()
    words = [sys.executable, "-m", "disco_accel.cli.main", "store", "stats", "--socket", str(path)]
    told = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    assert told.returncode == 0 and '"link_bandwidth": 1000000000' in told.stdout
    second.terminate()
    assert second.wait() == 0 and not path.exists()
    assert subprocess.run(words, capture_output=True, text=True, cwd=ROOT).returncode == 2
    for process in (first, second):
        assert process.stdout is not None
        process.stdout.close()
    store.close()


def test_a_client_that_does_not_read_is_cut_off_and_no_other_waits(tmp_path: Path) -> None:
    with serving(tmp_path) as server, Store.connect(server.path) as store:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        made.connect(os.fspath(server.path))
        name = filled(store, 1000, 1)
        made.settimeout(20)
        with pytest.raises(OSError):
            for number in range(100_000):
                made.send(Request(Opcode.GET, number + 1, object=name).pack())
        made.close()
        until(lambda: len(store.stats()["clients"]) == 1)
        store.free(name)
        assert store.stats()["device_used"] == 0


def test_the_end_of_a_process_counts_though_its_child_keeps_the_socket(tmp_path: Path) -> None:
    """Also where the fork is not Python's: the child here never runs what Python does after one."""
    with serving(tmp_path) as server, Store.connect(server.path) as store:
        script = (
            "import ctypes, os, sys, torch\n"
            "from disco_accel.store.client import Store\n"
            "store = Store.connect(sys.argv[1])\n"
            "store.create((1000,), torch.uint8)\n"
            "child = ctypes.CDLL(None).fork()\n"
            "if child == 0:\n    ctypes.CDLL(None).sleep(60)\n"
            "print(child, flush=True)\n"
            "os._exit(0)\n"
        )
        words = [sys.executable, "-c", script, str(server.path)]
        done = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert done.stdout is not None
        child = int(done.stdout.readline())
        try:
            assert done.wait() == 0
            until(lambda: len(store.stats()["clients"]) == 1)
            assert store.stats()["host_used"] == 0
        finally:
            os.kill(child, signal.SIGKILL)
            done.stdout.close()


def test_damaged_messages_are_refused_and_nothing_grows() -> None:
    """A seeded sample of ``benchmarks.store.attacks``."""
    found = store_attacks.mutated_messages(3000, random.Random(1))
    assert found.refused > 500 and found.taken > 100 and found.cut_off == 0
    assert found.descriptors_grown <= 0 and found.memory_left == 0


def test_deaths_at_any_moment_leave_no_wrong_byte_and_nothing_behind() -> None:
    found = store_attacks.kills(clients=6, servers=2, rng=random.Random(2))
    assert found.reads > 0 and found.wrong == 0 and found.gone > 0
    assert found.descriptors_grown <= 0 and found.memory_left == 0


def test_an_object_whose_memory_is_waited_for_has_no_name_yet(tmp_path: Path) -> None:
    """Ids can be guessed: a put, get or free of one that is not there does nothing to the store."""
    with serving(tmp_path) as server, Store.connect(server.path) as job, Store.connect(server.path) as store:
        job.wanted(MIB, 8 * MIB)
        job.held(8 * MIB)
        before = store.create((1,), torch.uint8)
        thread = threading.Thread(target=lambda: store.create((MIB,), torch.uint8, "device"))
        thread.start()
        until(lambda: store.stats()["waited_for"] == MIB)
        for call in (store.get, store.put, store.free, store.prefetch):
            with pytest.raises(StoreError, match="no object"):
                call(before + 1)
        job.held(MIB)
        thread.join(20)
        store.put(before + 1)
