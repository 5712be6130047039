"""``disco-accel store run``: a program's device memory is first-class for a real store, whose grants make room."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from disco_accel.errors import ConfigError
from disco_accel.store.client import Store
from disco_accel.store.store_command import counted_environment, interposed_library
from tests.store.fake_cuda import MIB, TOTAL, Program, World

CLI = (sys.executable, "-m", "disco_accel.cli.main")


@contextmanager
def served(socket: Path) -> Iterator[None]:
    command = (*CLI, "store", "serve", "--socket", str(socket), "--device", str(TOTAL), "--host", "1MiB")
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None and "store at" in server.stdout.readline()
        yield
    finally:
        server.terminate()
        server.wait()


def until(holds: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_a_budget_shrinks_for_a_program_that_knows_nothing_of_it(world: World) -> None:
    world.socket.parent.chmod(0o700)
    with served(world.socket), Store.connect(world.socket) as job:
        job.wanted(MIB, TOTAL)
        until(lambda: job.granted() == TOTAL)
        # The job holds all of it, and comes down at the end of its step.
        job.held(TOTAL)
        world.machine.set_used(TOTAL)
        command = (*CLI, "store", "run", "--socket", str(world.socket), "--wait", "60", "--")
        program = Program.of(
            (*command, str(world.binaries / "cuda_program"), "hold", str(8 * MIB)), world, counted=False
        )
        until(lambda: job.granted() == TOTAL - 8 * MIB)
        until(lambda: world.machine.fails() > 0)
        world.machine.set_used(TOTAL - 8 * MIB)
        job.held(TOTAL - 8 * MIB)
        assert program.line() == "parent 0 last 0"
        program.process.kill()
        program.end()
        until(lambda: job.granted() == TOTAL)


def test_the_program_takes_the_place_of_the_command(world: World) -> None:
    """Its words, its exit status, and what was preloaded before."""
    code = "import os, sys; print(sys.argv[1:], os.environ['LD_PRELOAD'].split(':')[1:]); sys.exit(7)"
    command = (*CLI, "store", "run", "--socket", str(world.socket), "--", sys.executable, "-c", code, "--", "--wait")
    environment = world.environment(counted=False, LD_PRELOAD="libc.so.6")
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.stdout, done.stderr, done.returncode) == ("['--', '--wait'] ['libc.so.6']\n", "", 7)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--"], "no program to run"),
        (["--", "./not-there"], "no such program"),
        (["--wait", "soon", "--", "true"], "'soon' is not a number of seconds"),
        (["--wait", "-1", "--", "true"], "not a number of seconds from 0 to 600"),
        (["--wait", "nan", "--", "true"], "not a number of seconds from 0 to 600"),
    ],
)
def test_mistakes_are_named(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    from disco_accel.cli.main import main

    assert main(["store", "run", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_path_that_the_loader_would_split_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("disco_accel.store.store_command.interposed_library", lambda: tmp_path / "two words.so")
    with pytest.raises(ConfigError, match="TORCH_EXTENSIONS_DIR"):
        counted_environment({}, tmp_path / "store")


def test_preloading_twice_is_preloading_once(tmp_path: Path) -> None:
    once = counted_environment({"LD_PRELOAD": "a.so b.so"}, tmp_path / "store", 0.5)
    assert once == counted_environment(once, tmp_path / "store", 0.5)
    assert once["LD_PRELOAD"] == f"{interposed_library()}:a.so:b.so" and once["DISCO_STORE_WAIT"] == "0.5"
