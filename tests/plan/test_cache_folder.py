"""The plan cache touches files of its own naming alone, in a folder that it made or took over."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from disco_accel.graph.files import read_taskgraph
from disco_accel.graph.memgraph import MemGraph
from disco_accel.plan import cache_folder, make_plan
from disco_accel.plan import plan_cache as module
from disco_accel.plan.cache_folder import MARKER
from disco_accel.plan.plan_cache import PlanCache

GRAPHS = Path(__file__).parent.parent / "data" / "graphs"
KEY = "5" * 64
OLD = (time.time() - 100_000,) * 2
NOBODY = 65534


@pytest.fixture(scope="module")
def plan() -> MemGraph:
    return make_plan(read_taskgraph(GRAPHS / "toy.taskgraph.json"), cyclic=True)


@pytest.fixture(autouse=True)
def silent_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_said", set())


def named(folder: Path, *names: str) -> None:
    """Make ``folder`` with old files of these names."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text("mine")
        os.utime(folder / name, OLD)


def left(folder: Path) -> dict[str, tuple[bytes, float]]:
    return {path.name: (path.read_bytes(), path.stat().st_mtime) for path in folder.iterdir()}


FOREIGN = {
    "hidden files": (".notes", ".cache.json.abc", f".{KEY}.json", f".{KEY[:-1]}.json.0123456789abcdef"),
    "other JSON files": tuple(f"plan{i}.json" for i in range(300)),
    "nearly a plan": (f"{KEY}.JSON",),
    "a plan and a file": (f"{KEY}.json", "read.me"),
    "upper case": (f"{'A' * 64}.json",),
    "a name of two lines": (f"{KEY}.json\nx",),
}


@pytest.mark.parametrize("names", FOREIGN)
def test_a_folder_of_somebody_elses_is_left_alone(
    names: str, tmp_path: Path, plan: MemGraph, caplog: pytest.LogCaptureFixture
) -> None:
    """``plan_cache: .`` beside an own folder ``plans``: no file removed, no mode changed, one line said."""
    folder = tmp_path / "plans"
    named(folder, *FOREIGN[names])
    folder.chmod(0o755)
    before = left(folder)
    cache = PlanCache(tmp_path)
    with caplog.at_level(logging.WARNING, "disco_accel"):
        cache.store(KEY, plan)
        cache.store(KEY, plan)
    assert left(folder) == before and stat.S_IMODE(folder.stat().st_mode) == 0o755
    (record,) = caplog.records
    message = record.getMessage()
    assert str(folder) in message and "set plan_cache to another" in message and "\n" not in message


def test_files_that_others_put_into_the_caches_folder_stay(
    tmp_path: Path, plan: MemGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_FILES", 1)
    PlanCache(tmp_path).store(KEY, plan)
    folder = tmp_path / "plans"
    others = [name for names in FOREIGN.values() for name in names if name != f"{KEY}.json"]
    named(folder, *others)
    (folder / f"{6:064}.json").mkdir()
    (folder / f"{7:064}.json").symlink_to(folder / "read.me")
    folder.chmod(0o755)
    for key in range(3):
        PlanCache(tmp_path).store(f"{key:064}", plan)
    names = {path.name for path in folder.iterdir()}
    assert names == {MARKER, f"{2:064}.json", f"{6:064}.json", f"{7:064}.json", *others}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755


@pytest.mark.parametrize("names", [(), (f"{KEY}.json",), (f"{1:064}.json", f".{KEY}.json.abc_0123")])
def test_a_folder_of_plans_alone_is_taken_over(
    names: tuple[str, ...], tmp_path: Path, plan: MemGraph, caplog: pytest.LogCaptureFixture
) -> None:
    """That of a version without a marker, or of a process killed before it set it."""
    folder = tmp_path / "plans"
    named(folder, *names)
    with caplog.at_level(logging.WARNING, "disco_accel"):
        PlanCache(tmp_path).store(KEY, plan)
    kept = {name for name in names if not name.startswith(".")}
    assert {path.name for path in folder.iterdir()} == {MARKER, f"{KEY}.json", *kept} and not caplog.records


def _linked(folder: Path) -> None:
    (folder.parent / "elsewhere").mkdir()
    folder.symlink_to(folder.parent / "elsewhere")


def _open_to_all(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)


def _marker_is_a_link(folder: Path) -> None:
    folder.mkdir()
    (folder / MARKER).symlink_to("/etc/passwd")


UNUSABLE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a link": (_linked, "own"),
    "a file": (lambda folder: folder.write_text("x"), "own"),
    "a pipe": (os.mkfifo, "own"),
    "writable by others": (_open_to_all, "chmod go-w"),
    "a marker that is a link": (_marker_is_a_link, MARKER),
    "a marker that is a folder": (lambda folder: (folder / MARKER).mkdir(parents=True), MARKER),
}


@pytest.mark.parametrize("what", UNUSABLE)
def test_nothing_is_written_through_what_is_no_folder_of_ones_own(
    what: str, tmp_path: Path, plan: MemGraph, caplog: pytest.LogCaptureFixture
) -> None:
    make, message = UNUSABLE[what]
    make(tmp_path / "plans")
    before = sorted(path.name for path in tmp_path.rglob("*"))
    with caplog.at_level(logging.WARNING, "disco_accel"):
        PlanCache(tmp_path).store(KEY, plan)
    assert sorted(path.name for path in tmp_path.rglob("*")) == before
    assert [message in record.getMessage() for record in caplog.records] == [True]


def _store_as_nobody(folder: str, plan: MemGraph, said: Any) -> None:
    if os.getuid() == 0:
        os.setuid(NOBODY)
    lines: list[str] = []
    logging.getLogger("disco_accel").addFilter(lambda record: lines.append(record.getMessage()) or False)
    PlanCache(folder).store(KEY, plan)
    said.put(lines)


@pytest.mark.parametrize("owner", ["nobody", "root"])
def test_a_folder_that_one_may_not_write_is_told(owner: str, plan: MemGraph, tmp_path_factory: Any) -> None:
    """In a process without privileges: its own read-only folder, and one of another user."""
    if os.getuid() != 0:
        pytest.skip("needs root to give a folder to another user")
    base = tmp_path_factory.mktemp("shared")
    for parent in (base, *base.parents):
        if parent.stat().st_uid == os.getuid() and parent not in (Path("/"), Path("/tmp")):
            parent.chmod(parent.stat().st_mode | 0o055)
    folder = base / "plans"
    folder.mkdir(mode=0o755)
    folder.chmod(0o555 if owner == "nobody" else 0o755)
    if owner == "nobody":
        os.chown(folder, NOBODY, NOBODY)
    context = multiprocessing.get_context("fork")
    said = context.Queue()
    child = context.Process(target=_store_as_nobody, args=(str(base), plan, said))
    child.start()
    (line,) = said.get(timeout=600)
    child.join()
    assert ("Permission denied" if owner == "nobody" else "own") in line and not list(folder.iterdir())


def _store_when_told(folder: str, plan: MemGraph, start: Any, said: Any) -> None:
    lines: list[str] = []
    logging.getLogger("disco_accel").addFilter(lambda record: lines.append(record.getMessage()) or False)
    start.wait()
    PlanCache(folder).store(KEY, plan)
    said.put(lines)


def test_processes_that_make_the_folder_together_all_use_it(tmp_path: Path, plan: MemGraph) -> None:
    context = multiprocessing.get_context("fork")
    for turn in range(10):
        folder = tmp_path / str(turn)
        start, said = context.Barrier(4), context.Queue()
        children = [context.Process(target=_store_when_told, args=(str(folder), plan, start, said)) for _ in range(4)]
        for child in children:
            child.start()
        assert [said.get(timeout=600) for _ in children] == [[]] * 4
        for child in children:
            child.join()
        assert {path.name for path in (folder / "plans").iterdir()} == {MARKER, f"{KEY}.json"}


def _killed_at(folder: str, plan: MemGraph, call: int) -> None:
    """Store a plan and be killed at the ``call``-th system call that changes the folder, before it happens."""
    seen = 0

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal seen
            seen += 1
            if seen == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return wrapped

    for name in ("mkdir", "open", "fchmod", "fsync", "replace", "unlink"):
        setattr(cache_folder.os, name, counted(getattr(os, name)))
    PlanCache(folder).store(KEY, plan)


def test_a_kill_at_any_point_leaves_a_folder_that_the_next_one_uses(
    tmp_path: Path, plan: MemGraph, caplog: pytest.LogCaptureFixture
) -> None:
    context = multiprocessing.get_context("fork")
    killed = 0
    for call in range(1, 40):
        folder = tmp_path / str(call)
        child = context.Process(target=_killed_at, args=(str(folder), plan, call))
        child.start()
        child.join()
        killed += child.exitcode == -signal.SIGKILL
        with caplog.at_level(logging.WARNING, "disco_accel"):
            PlanCache(folder).store(KEY, plan)
        assert not caplog.records and (folder / "plans" / f"{KEY}.json").stat().st_size > 100
        assert (folder / "plans" / MARKER).is_file()
        if child.exitcode == 0:
            break
    assert killed >= 8 and child.exitcode == 0
