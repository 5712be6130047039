"""Plans on disk: what comes back is what was stored, verified, or nothing; no file can make a run fail."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import random
import stat
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from disco_accel.graph.files import read_memgraph, read_taskgraph
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.spaces import TO_DEVICE
from disco_accel.graph.taskgraph import EnumArg, OpCall, TaskGraph
from disco_accel.plan import Machine, make_plan
from disco_accel.plan import plan_cache as module
from disco_accel.plan.cache_folder import MARKER
from disco_accel.plan.plan_cache import PlanCache, plan_fingerprint
from disco_accel.simulate.simulator import Link
from disco_accel.verify.static import verify
from tests.support.faults.range_faults import ranged_plans

GRAPHS = Path(__file__).parent.parent / "data" / "graphs"
ENVIRONMENT = {"torch": "2.13.0", "device": "cpu x86_64"}


def key_of(graph: TaskGraph, **changes: object) -> str:
    given = {"planner": "build", "policy": "belady", "cyclic": True, "machine": None, "environment": ENVIRONMENT}
    return plan_fingerprint(graph, **(given | changes))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def graph() -> TaskGraph:
    found = read_taskgraph(GRAPHS / "chain8.taskgraph.json")
    return replace(found, spaces=tuple(replace(d, memory=found_memory(found)) for d in found.devices))


def found_memory(graph: TaskGraph) -> int:
    """Enough for a plan, too little for all: half of everything."""
    return sum(sum(v.sizes) for v in graph.vertices) // 2 // 256 * 256


@pytest.fixture(scope="module")
def plan(graph: TaskGraph) -> MemGraph:
    return make_plan(graph, cyclic=True)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "_said", set())
    return tmp_path / "cache"


def stored(folder: Path, graph: TaskGraph, plan: MemGraph) -> Path:
    PlanCache(folder).store(key_of(graph), plan)
    (path,) = (folder / "plans").glob("*.json")
    return path


def test_the_same_plan_comes_back(folder: Path, graph: TaskGraph, plan: MemGraph) -> None:
    """To the last edge, with the durations of the graph at hand; the file is a MEMGRAPH that anyone can read."""
    path = stored(folder, graph, plan)
    assert PlanCache(folder).load(key_of(graph), graph, cyclic=True) == plan
    slower = replace(graph, vertices=tuple(replace(v, duration=(v.duration or 0) * 3 + 1) for v in graph.vertices))
    again = PlanCache(folder).load(key_of(slower), slower, cyclic=True)
    assert again is not None and again.slots == plan.slots
    own = {v.id: v for v in slower.vertices}
    assert all(v.duration == own[v.id].duration for v in again.vertices if v.id in own)
    verify(graph, read_memgraph(path))


def test_plans_in_ranges_come_back(folder: Path) -> None:
    cache = PlanCache(folder)
    for number, (graph, plan) in enumerate(ranged_plans(8)):
        key = f"{number:064x}"
        cache.store(key, plan)
        assert cache.load(key, graph, cyclic=plan.cyclic) == plan


def test_durations_are_no_part_of_the_fingerprint_and_all_else_is(graph: TaskGraph) -> None:
    first, *others = graph.vertices
    key = key_of(graph)
    assert key_of(replace(graph, vertices=(replace(first, duration=9.0), *others), name="other")) == key
    call = OpCall("aten::mm", "default", (EnumArg("dtype", "float32"),), ())
    different = [
        key_of(replace(graph, vertices=(replace(first, sizes=(first.sizes[0] + 256,)), *others))),
        key_of(replace(graph, vertices=(replace(first, op="other"), *others))),
        key_of(replace(graph, spaces=tuple(replace(d, memory=d.memory + 256) for d in graph.devices))),
        key_of(replace(graph, spaces=tuple(replace(d, alignment=512) for d in graph.devices))),
        key_of(replace(graph, ops={0: call})),
        key_of(replace(graph, ops={0: replace(call, args=(EnumArg("dtype", "bfloat16"),))})),
        key_of(graph, planner="timed"),
        key_of(graph, policy="lru"),
        key_of(graph, plan_seconds=5.0),
        key_of(graph, plan_seconds=0.0),
        key_of(graph, cyclic=False),
        key_of(graph, machine=Machine(links={TO_DEVICE: Link(1e9, 0.0)})),
        key_of(graph, environment=ENVIRONMENT | {"torch": "2.14.0"}),
    ]
    assert len({key, *different}) == 1 + len(different)


def test_changed_planner_sources_change_the_fingerprint(graph: TaskGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    before = key_of(graph)
    monkeypatch.setattr(module, "_sources", lambda: "other")
    assert key_of(graph) != before


def test_only_the_user_may_read(folder: Path, graph: TaskGraph, plan: MemGraph) -> None:
    """Folder 0700 and file 0600, whatever the umask says."""
    before = os.umask(0)
    try:
        path = stored(folder, graph, plan)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == stat.S_IMODE(folder.stat().st_mode) == 0o700
    finally:
        os.umask(before)


def _edited(change: Callable[[dict[str, object]], object]) -> Callable[[Path], object]:
    def damage(path: Path) -> None:
        data = json.loads(path.read_text())
        change(data)
        path.write_text(json.dumps(data))

    return damage


def _linked(path: Path) -> None:
    target = path.with_name("elsewhere")
    path.rename(target)
    path.symlink_to(target)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "empty": lambda p: p.write_bytes(b""),
    "cut short": lambda p: p.write_bytes(p.read_bytes()[:-100]),
    "not text": lambda p: p.write_bytes(b"\x80\xff" * 100),
    "nested": lambda p: p.write_bytes(b"[" * 100_000),
    "of another key": _edited(lambda d: d.update(plan_cache={"fingerprint": "0" * 64})),
    "without key": _edited(lambda d: d.pop("plan_cache")),
    "a list": lambda p: p.write_text("[]"),
    "no memory edges": _edited(lambda d: d["edges"].update(memory=[])),  # type: ignore[attr-defined]
    "everything at 0": _edited(lambda d: [v.update(offset=0) for v in d["vertices"] if v.get("offset")]),  # type: ignore[attr-defined]
    "a vertex less": _edited(lambda d: d["vertices"].pop()),  # type: ignore[attr-defined]
    "other device": _edited(lambda d: d["spaces"][0].update(memory=1 << 40)),  # type: ignore[index]
    "a large device": _edited(lambda d: d["spaces"][0].update(memory=1 << 60)),  # type: ignore[index]
    "a weaker alignment": _edited(lambda d: d["spaces"][0].update(alignment=1)),  # type: ignore[index]
    "greedy on the host": _edited(lambda d: d["spaces"][-1].update(memory=1 << 50)),  # type: ignore[index]
    "not cyclic": _edited(lambda d: d.pop("cyclic")),
    "writable by all": lambda p: p.chmod(0o666),
    "a link": _linked,
    "a pipe": lambda p: (p.unlink(), os.mkfifo(p)),
    "a folder": lambda p: (p.unlink(), p.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_ignored_and_said_once(
    damage: str, folder: Path, graph: TaskGraph, plan: MemGraph, caplog: pytest.LogCaptureFixture
) -> None:
    path = stored(folder, graph, plan)
    DAMAGE[damage](path)
    with caplog.at_level(logging.WARNING, "disco_accel"):
        assert PlanCache(folder).load(key_of(graph), graph, cyclic=True) is None
        assert PlanCache(folder).load(key_of(graph), graph, cyclic=True) is None
    assert len(caplog.records) == 1 and str(path) in caplog.records[0].getMessage()
    if damage == "a folder":
        return
    stored(folder, graph, plan)
    assert PlanCache(folder).load(key_of(graph), graph, cyclic=True) == plan


def test_foreign_files_are_not_read(
    folder: Path, graph: TaskGraph, plan: MemGraph, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A file of another user, in a folder of another user."""
    stored(folder, graph, plan)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with caplog.at_level(logging.WARNING, "disco_accel"):
        assert PlanCache(folder).load(key_of(graph), graph, cyclic=True) is None
        PlanCache(folder).store(key_of(graph), plan)
    assert [("others" in r.getMessage(), "own" in r.getMessage()) for r in caplog.records] == [(1, 0), (0, 1)]


def test_an_absent_file_is_no_reason_to_talk(folder: Path, graph: TaskGraph, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "disco_accel"):
        assert PlanCache(folder).load(key_of(graph), graph, cyclic=True) is None
    assert not caplog.records and not folder.exists()


def test_a_folder_that_cannot_be_made_stops_nothing(
    tmp_path: Path, graph: TaskGraph, plan: MemGraph, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    cache = PlanCache(tmp_path / "file" / "cache")
    with caplog.at_level(logging.WARNING, "disco_accel"):
        cache.store(key_of(graph), plan)
        cache.store(key_of(graph), plan)
        assert cache.load(key_of(graph), graph, cyclic=True) is None
    assert len(caplog.records) == 1


def test_writers_at_the_same_time_leave_whole_plans(
    folder: Path, graph: TaskGraph, plan: MemGraph, caplog: pytest.LogCaptureFixture
) -> None:
    """A reader beside three writing processes never sees a part, and nothing temporary stays."""
    stored(folder, graph, plan)
    context = multiprocessing.get_context("spawn")
    arguments = (str(folder), key_of(graph), plan, 30)
    writers = [context.Process(target=_store_often, args=arguments) for _ in range(3)]
    for writer in writers:
        writer.start()
    with caplog.at_level(logging.WARNING, "disco_accel"):
        while any(writer.is_alive() for writer in writers):
            assert PlanCache(folder).load(key_of(graph), graph, cyclic=True) == plan
    assert [writer.exitcode for writer in writers] == [0, 0, 0] and not caplog.records
    assert sorted(path.name for path in (folder / "plans").iterdir()) == [MARKER, f"{key_of(graph)}.json"]


def _store_often(folder: str, key: str, plan: MemGraph, times: int) -> None:
    for _ in range(times):
        PlanCache(folder).store(key, plan)


def test_old_plans_make_room(folder: Path, graph: TaskGraph, plan: MemGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_FILES", 3)
    cache = PlanCache(folder)
    for age in range(5):
        cache.store(f"{age:064}", plan)
        os.utime(folder / "plans" / f"{age:064}.json", (1000 + age, 1000 + age))
    cache.store(key_of(graph), plan)
    names = {path.name for path in (folder / "plans").iterdir()} - {MARKER}
    assert names == {f"{key_of(graph)}.json", f"{3:064}.json", f"{4:064}.json"}


def test_what_a_killed_writer_left_is_removed_and_a_writer_at_work_is_left_alone(
    folder: Path, graph: TaskGraph, plan: MemGraph
) -> None:
    """A temporary file of an hour is nobody's any more."""
    cache = PlanCache(folder)
    cache.store(key_of(graph), plan)
    names = (f".{1:064}.json.0123456789abcdef", f".{2:064}.json.a_b0c1d2", f".{3:064}.json.0123456789abcdef")
    files = [folder / "plans" / name for name in names]
    for file, age in zip(files, (3700, 3700, 60), strict=True):
        file.write_text("{")
        os.utime(file, (time.time() - age,) * 2)
    cache.store(key_of(graph), plan)
    assert [file.exists() for file in files] == [False, False, True]


def _mutated(data: object, draw: random.Random) -> object:
    """``data`` with one value somewhere inside replaced, removed or doubled."""
    if isinstance(data, dict) and data and draw.random() < 0.95:
        key = draw.choice(sorted(data))
        if draw.random() < 0.1:
            return {k: v for k, v in data.items() if k != key}
        return data | {key: _mutated(data[key], draw)}
    if isinstance(data, list) and data and draw.random() < 0.95:
        at = draw.randrange(len(data))
        if draw.random() < 0.1:
            return [*data[:at], *data[at + 1 :]]
        if draw.random() < 0.1:
            return [*data, data[at]]
        return [*data[:at], _mutated(data[at], draw), *data[at + 1 :]]
    if isinstance(data, int) and draw.random() < 0.7:
        return data + draw.choice([-1, 1, 256, -256, 1 << 40])
    return draw.choice([None, True, -1, 0, 7, 1.5, "x", [], {}, [[]], 1 << 70])


def test_no_mutation_of_a_file_raises_or_gets_an_unsafe_plan_through(
    folder: Path, graph: TaskGraph, plan: MemGraph
) -> None:
    path = stored(folder, graph, plan)
    whole = json.loads(path.read_text())
    draw = random.Random(5)
    used = 0
    for _ in range(400):
        path.write_text(json.dumps(_mutated(whole, draw)))
        found = PlanCache(folder).load(key_of(graph), graph, cyclic=True)
        if found is not None:
            used += 1
            verify(graph, found)
    assert used < 200
