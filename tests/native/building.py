"""Processes that build one tiny library at once, or are killed while they do: ``python -m tests.native.building
SCENARIO KIND FOLDER [COUNT]``. KIND: ``plain`` as the planner's library is built, ``torch`` as the engine's.

Ends with 0 when every process that lived got the right library. Processes are forked, so PyTorch is imported once.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from disco_accel.native import plain_library

ANSWER = 42
COMPILER = """#!/bin/sh
# Links as slowly as the test says: half of the library is there, the rest comes, or the build is killed.
out=; previous=; link=
for word in "$@"; do
  [ "$previous" = -o ] && out=$word
  [ "$word" = -shared ] && link=1
  previous=$word
done
c++ "$@" || exit 1
if [ -n "$link" ] && [ -e "$DISCO_TEST/kill" ]; then
  truncate -s 4096 "$out"; rm "$DISCO_TEST/kill"; kill -9 "$DISCO_BUILDER"; kill -9 0
fi
if [ -n "$link" ] && mkdir "$DISCO_TEST/linking" 2>/dev/null; then
  cp "$out" "$DISCO_TEST/whole"; truncate -s 4096 "$out"
  while [ ! -e "$DISCO_TEST/go" ]; do sleep 0.01; done
  cat "$DISCO_TEST/whole" > "$out"
fi
"""


class Builder:
    """Builds the tiny library of ``kind`` below ``folder`` and loads it."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.folder, self.root = kind, folder, folder / "sources"
        self.root.mkdir(exist_ok=True)
        self.source = self.root / "tiny.cpp"
        self.source.write_text(f'extern "C" int disco_tiny() {{ return {ANSWER}; }}\n')
        os.environ["TORCH_EXTENSIONS_DIR"] = str(folder / "cache")
        if kind == "torch":
            from disco_accel.native import extension

            extension.ROOT = self.root
            self.build: Callable[[], Path] = lambda: extension.build("tiny", [self.source])
        else:
            self.build = lambda: plain_library.build_plain("tiny", "tiny.cpp", self.root)

    def attempt(self) -> None:
        """Raises AssertionError where the library gives another answer than the source."""
        assert ctypes.CDLL(str(self.build())).disco_tiny() == ANSWER

    def fork(self, work: Callable[[], None] | None = None) -> int:
        """A process in a group of its own that makes one attempt."""
        child = os.fork()
        if child:
            return child
        try:
            os.setsid()
            os.environ["DISCO_BUILDER"] = str(os.getpid())
            (work or self.attempt)()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)

    @property
    def directory(self) -> Path:
        """The library's folder. Raises ValueError before the first build has begun."""
        (directory,) = (self.folder / "cache").glob("tiny-*")
        return directory


def status(child: int) -> int:
    """The exit status of ``child``, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def race(builder: Builder, count: int) -> None:
    """All at once."""
    ready, start = os.pipe()

    def after_start() -> None:
        os.close(start)
        os.read(ready, 1)
        builder.attempt()

    children = [builder.fork(after_start) for _ in range(count)]
    os.close(start)
    assert [status(child) for child in children] == [0] * count


def wait_for(what: Callable[[], bool], child: int) -> None:
    """Until ``what`` holds; AssertionError if ``child`` ends before."""
    while not what():
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "ended without having linked"
        time.sleep(0.01)


def half_linked(builder: Builder, _: int) -> None:
    """A second process comes while the first has linked one half."""
    slow_compiler(builder)
    first = builder.fork()
    wait_for((builder.folder / "whole").exists, first)
    second = builder.fork()
    # It waits for the first, or has already loaded what is there.
    while (
        not _opened(second, ".building") and os.waitid(os.P_PID, second, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    ):
        time.sleep(0.01)
    (builder.folder / "go").touch()
    assert (status(first), status(second)) == (0, 0)


def killed_while_linking(builder: Builder, _: int) -> None:
    """The build dies with half of a library linked."""
    slow_compiler(builder)
    (builder.folder / "kill").touch()
    (builder.folder / "linking").mkdir()
    assert status(builder.fork()) == -signal.SIGKILL
    assert status(builder.fork()) == 0
    leftovers(builder)


def kills(builder: Builder, count: int) -> None:
    """Killed at any point: what is there afterwards is whole, or known not to be, and the next build works."""
    began = time.monotonic()
    assert status(builder.fork()) == 0
    whole = time.monotonic() - began
    rng = random.Random(count)
    for attempt in range(count):
        # Every other time over a whole library that has no record, which must not pass for one of another build.
        next(builder.directory.glob("tiny.so" if attempt % 2 else "*.sha256"), builder.source).unlink(missing_ok=True)
        Builder(builder.kind, builder.folder)
        child = builder.fork()
        time.sleep(rng.uniform(0, 1.1 * whole))
        # The whole group, or the builder alone: its compilers then go on for a while.
        os.kill(child, signal.SIGKILL) if attempt % 3 == 2 else os.killpg(child, signal.SIGKILL)
        status(child)
        assert status(builder.fork(lambda: never_broken(builder))) == 0
    assert status(builder.fork()) == 0
    leftovers(builder)


def never_broken(builder: Builder) -> None:
    """Without building: the right library, or a typed error."""
    os.environ["DISCO_BUILD_EXT"] = "0"
    try:
        builder.attempt()
    except plain_library.ExtensionError:
        return


def leftovers(builder: Builder) -> None:
    """AssertionError if a killed build has left anything behind."""
    assert sorted(p.name for p in builder.directory.iterdir()) == [".building", "tiny.sha256", "tiny.so"]


def slow_compiler(builder: Builder) -> None:
    """Compile with ``COMPILER`` from now on."""
    compiler = builder.folder / "slow-c++"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    os.environ |= {"CXX": str(compiler), "DISCO_TEST": str(builder.folder)}


def _opened(process: int, name: str) -> bool:
    try:
        return any(os.readlink(link).endswith(name) for link in Path(f"/proc/{process}/fd").iterdir())
    except OSError:
        return False


SCENARIOS = {s.__name__: s for s in (race, half_linked, killed_while_linking, kills)}

if __name__ == "__main__":
    SCENARIOS[sys.argv[1]](Builder(sys.argv[2], Path(sys.argv[3])), int(sys.argv[4]) if sys.argv[4:] else 1)
