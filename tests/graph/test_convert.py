"""Files of version 1 and 3: they mean the same, give back what was written, and are read strictly."""

from __future__ import annotations

import contextlib
import functools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from disco_accel.cli.main import main
from disco_accel.errors import GraphFileError, PlanError, VerifyError
from disco_accel.graph.files import (
    memgraph_from_json,
    read_memgraph,
    read_taskgraph,
    taskgraph_from_json,
    write_memgraph,
    write_taskgraph,
)
from disco_accel.graph.graph_json import memgraph_to_object
from disco_accel.graph.memgraph import MemGraph, Slot
from disco_accel.graph.spaces import HOST, Space, SpaceKind
from disco_accel.graph.taskgraph import TaskGraph
from disco_accel.plan import make_plan
from disco_accel.verify.static import verify
from tests.support.faults.range_faults import ranged_plans
from tests.support.graphs.strategies import Shape, random_taskgraph, with_room
from tests.support.oracles.adversary import run_reference
from tests.support.plans.home_plans import home_plans
from tests.support.plans.host_updated_plans import host_updated_plans
from tests.support.plans.state_plans import state_plans

GRAPHS = Path(__file__).parents[1] / "data" / "graphs"

GRAPH_1: dict[str, Any] = {
    "format": "taskgraph",
    "version": 1,
    "name": "words",
    "devices": [{"id": 0, "memory": 4096}, {"id": 1, "memory": 4096, "alignment": 512}],
    "vertices": [
        {"id": "w", "kind": "input", "device": 0, "size": 512, "clean": True},
        {"id": "x", "kind": "input", "device": 0, "size": 256, "external": True},
        {"id": "t", "kind": "input", "device": 1, "size": 256, "late": True},
        {"id": "u", "kind": "input", "device": 1, "size": 256, "late": True, "external": True},
        {"id": "mm", "kind": "gemm", "device": 0, "op": "mm", "inputs": ["w", "x"], "duration": 0.5}
        | {"outputs": [{"size": 256}, {"size": 512}], "out": True},
        {"id": "c", "kind": "transfer", "device": 1, "inputs": ["mm"], "size": 256},
        {"id": "g", "kind": "compute", "device": 1, "inputs": ["c", "t", "u"], "size": 256, "inplace": 0}
        | {"after": ["mm"], "keep": True},
        {"id": "h", "kind": "compute", "device": 0, "inputs": [["mm", 1]], "size": 512, "may_inplace": [0]},
        {"id": "i", "kind": "compute", "device": 0, "inputs": [["mm", 1]], "size": 8, "keep": True},
    ],
}
"""A graph in the words of version 1, with all marks of inputs."""

GRAPH_3: dict[str, Any] = {
    "format": "taskgraph",
    "version": 3,
    "name": "words",
    "spaces": [
        {"id": 0, "kind": "device", "memory": 4096},
        {"id": 1, "kind": "device", "memory": 4096, "alignment": 512},
    ],
    "vertices": [
        {"id": "w", "kind": "input", "space": 0, "size": 512, "lifetime": "steps", "access": "read"},
        {"id": "x", "kind": "input", "space": 0, "size": 256, "lifetime": "steps", "access": "foreign"},
        {"id": "t", "kind": "input", "space": 1, "size": 256, "arrival": "gate"},
        {"id": "u", "kind": "input", "space": 1, "size": 256, "arrival": "gate", "access": "foreign"},
        {"id": "mm", "kind": "kernel", "space": 0, "op": "mm", "inputs": ["w", "x"], "duration": 0.5}
        | {"outputs": [{"size": 256}, {"size": 512}], "out": True},
        {"id": "c", "kind": "copy", "space": 1, "source": 0, "inputs": ["mm"], "size": 256},
        {"id": "g", "kind": "kernel", "space": 1, "inputs": ["c", "t", "u"], "size": 256, "inplace": [[0, 0]]}
        | {"after": ["mm"], "keep": True},
        {"id": "h", "kind": "kernel", "space": 0, "inputs": [["mm", 1]], "size": 512, "may_inplace": [0]},
        {"id": "i", "kind": "kernel", "space": 0, "inputs": [["mm", 1]], "size": 8, "keep": True},
    ],
}
"""The same graph in the words of version 3."""

OWN = {"w": 0, "t": 0, "mm": 0, "c": 512, "g": 512, "h": 1280, "i": 3584}
"""Offset of each value of the plan below; of mm the first."""


def plan_of(graph: dict[str, Any]) -> dict[str, Any]:
    """A plan of ``graph``, in its version: the second output of mm leaves and comes back in two ranges, and w has a
    resident range besides."""
    first = graph["version"] == 1
    place, space = ("addr", "device") if first else ("offset", "space")
    top = json.loads(json.dumps(graph)) | {"format": "memgraph"}
    vertices = {v["id"]: v for v in top["vertices"]}
    for name, offset in OWN.items():
        if name == "mm":
            for output, each in zip(vertices[name]["outputs"], (offset + 512, offset + 768), strict=True):
                output[place] = each
        else:
            vertices[name][place] = offset
    vertices["i"]["inputs"] = ["b1", "b2"]
    ends = {"o": ("offload", 0), "b1": ("reload", 0), "b2": ("reload", 0)}
    added = [
        {"id": "o", "inputs": [["mm", 1]], "size": 512, ("host_offset" if first else "offset"): 128},
        {"id": "b1", "inputs": ["o"], "size": 256, place: 2048},
        {"id": "b2", "inputs": ["o"], "size": 256, place: 2304, "begin": 256},
    ]
    for copy in added:
        kind, device = ends[copy["id"]]
        if first:
            copy |= {"kind": kind, space: device}
        else:
            out = kind == "offload"
            copy |= {"kind": "copy", "space": -1 if out else device, "source": device if out else -1}
    part = {"id": "r", "kind": "input", space: 0, "inputs": ["w"], "size": 256, "begin": 256, place: 3072}
    part |= {"clean": True} if first else {"lifetime": "steps", "access": "read"}
    top["vertices"] += [*added, part]
    host = {"memory": 1024, "alignment": 128}
    if first:
        top["host"] = host
    else:
        top["spaces"].append({"id": -1, "kind": "host"} | host)
    reads = [["mm", "c"], ["c", "g"], ["mm", "g"], ["t", "g"], ["u", "g"], ["mm", "h"], ["mm", "o"]]
    reads += [["o", "b1"], ["o", "b2"], ["b1", "i"], ["b2", "i"]]
    top["edges"] = {"data": reads, "memory": [["h", "b1"]]}
    return top | {"cyclic": True}


def test_both_versions_say_the_same() -> None:
    graph = taskgraph_from_json(GRAPH_1)
    assert taskgraph_from_json(GRAPH_3) == graph
    plan = memgraph_from_json(plan_of(GRAPH_1))
    assert memgraph_from_json(plan_of(GRAPH_3)) == plan
    verify(graph, plan)
    assert plan.host == Space(HOST, 1024, 128, SpaceKind.HOST)


@pytest.mark.parametrize("path", sorted(GRAPHS.glob("*graph.json")), ids=lambda path: path.name)
def test_files_of_version_1_mean_the_same_as_version_3(path: Path, tmp_path: Path) -> None:
    assert json.loads(path.read_text())["version"] == 1
    names: dict[int, str] = {}
    written = tmp_path / "three.json"
    if path.name.endswith("memgraph.json"):
        plan = read_memgraph(path, names)
        write_memgraph(plan, written, names)
        assert read_memgraph(written) == plan
    else:
        graph = read_taskgraph(path, names)
        write_taskgraph(graph, written, names)
        assert read_taskgraph(written) == graph
    assert json.loads(written.read_text())["version"] == 3


def test_an_offload_of_version_1_without_an_offset_gets_one_of_its_own() -> None:
    """Behind all others, in a host's memory that is as large as that takes."""
    top = plan_of(GRAPH_1)
    offload = next(v for v in top["vertices"] if v["id"] == "o")
    del offload["host_offset"]
    for host, offset in ({"memory": 1000, "alignment": 128}, 1024), (None, 0):
        top.pop("host")
        if host is not None:
            top["host"] = host
        names: dict[int, str] = {}
        plan = memgraph_from_json(top, names)
        verify(taskgraph_from_json(GRAPH_1), plan)
        (ref,) = (ref for ref, slot in plan.slots.items() if slot.space == HOST)
        assert (names[ref[0]], plan.slots[ref], plan.host.memory) == ("o", Slot(HOST, offset), offset + 512)
        top["host"] = {}


def planned(planner: str, count: int, shape: Shape) -> list[tuple[TaskGraph, MemGraph]]:
    made = []
    for seed in range(count):
        graph = with_room(random_taskgraph(random.Random(seed), shape), 1.1)
        with contextlib.suppress(PlanError):
            made.append((graph, make_plan(graph, planner=planner, cyclic=seed % 2 == 0)))
    return made


PLANS: dict[str, Callable[[], list[tuple[TaskGraph, MemGraph]]]] = {
    "build": lambda: planned("build", 60, Shape()),
    "timed": lambda: planned("timed", 60, Shape()),
    "changing over steps": lambda: state_plans(60),
    "host_updated": lambda: host_updated_plans(40),
    "at homes": lambda: home_plans(60),
    "in ranges": lambda: ranged_plans(30),
}


@functools.cache
def plans(made: str) -> list[tuple[TaskGraph, MemGraph]]:
    return PLANS[made]()


@pytest.mark.parametrize("made", PLANS)
def test_files_give_back_the_same_graphs_and_plans(made: str, tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    for graph, plan in plans(made):
        write_taskgraph(graph, path)
        assert read_taskgraph(path) == graph
        write_memgraph(plan, path)
        assert read_memgraph(path) == plan
    assert len(plans(made)) >= 30


def vertex(number: int, **changes: object) -> Callable[[dict[str, Any]], object]:
    return lambda top: top["vertices"][number].update(changes)


def space(number: int, **changes: object) -> Callable[[dict[str, Any]], object]:
    return lambda top: top["spaces"][number].update(changes)


def one_more(**entry: object) -> Callable[[dict[str, Any]], object]:
    return lambda top: top["spaces"].append(entry)


STATE = {"lifetime": "steps", "access": "read-write"}
REFUSED: list[tuple[str, Callable[[dict[str, Any]], object]]] = [
    (r"version: expected 1 or 3, got 2", lambda top: top.update(version=2)),
    (r"spaces: expected a list", lambda top: top.pop("spaces")),
    (r"spaces: there is no device", lambda top: top.update(spaces=[{"id": -1, "kind": "host"}])),
    (r"spaces: two spaces have the same id", space(1, id=0)),
    (r"spaces\[1\]: kind: expected one of device, host, storage, got 'disk'", space(1, kind="disk")),
    (r"spaces\[1\]: kind: expected one of .*, got None", lambda top: top["spaces"][1].pop("kind")),
    (r"spaces\[0\]: memory: missing", lambda top: top["spaces"][0].pop("memory")),
    (r"spaces\[0\]: memory: expected an integer", space(0, memory=-1)),
    (r"spaces\[0\]: alignment: expected an integer from 1", space(0, alignment=0)),
    (r"spaces\[1\]: id: 1: kernels run in spaces from 0 on, and in no storage", space(1, kind="storage")),
    (r"spaces\[1\]: id: -3: kernels run in spaces from 0 on", space(1, id=-3)),
    (r"spaces\[2\]: id: -2: the host's memory, where no kernels run, is space -1", one_more(id=-2, kind="host")),
    (r"spaces\[2\]: id: -1: the host's memory", one_more(id=-1, kind="storage")),
    (r"devices: all are the host's", lambda top: [each.update(kind="host") for each in top["spaces"]]),
    (r"vertex w: space: missing", lambda top: top["vertices"][0].pop("space")),
    (r"vertex w: kind: expected one of input, kernel, copy, got 'reload'", vertex(0, kind="reload")),
    (r"vertex w \(input\): space: there is no space 7", vertex(0, space=7)),
    (r"vertex w \(input\): space: -1 is not one of the devices", vertex(0, space=-1)),
    (r"vertex w: size: expected an integer", vertex(0, size=-1)),
    (r"vertex w: lifetime: expected one of step, steps, got 'ever'", vertex(0, lifetime="ever")),
    (r"vertex w: access: expected one of read, read-write, foreign, got 1", vertex(0, access=1)),
    (r"vertex w: arrival: expected one of start, gate, made, got None", vertex(0, arrival=None)),
    (r"vertex w: stays: expected true or false", vertex(0, stays=1)),
    (r"vertex w \(input\): arrival: .*is there when one starts", vertex(0, arrival="gate")),
    (r"vertex x \(input\): stays: only a value that lives over steps", vertex(1, stays=True)),
    (r"vertex t \(input\): host_updated: only a value that lives over steps", vertex(2, host_updated=True)),
    (r"vertex w: home: expected an integer", vertex(0, home="disk")),
    (r"vertex w \(input\): home: there is no space -2", vertex(0, home=-2)),
    (r"vertex w \(input\): home: 1 is not a space of the graph in which no kernels run", vertex(0, home=1)),
    (r"vertex x \(input\): home: only an input that lives over steps", vertex(1, home=0)),
    (r"vertex c: source: missing", lambda top: top["vertices"][5].pop("source")),
    (r"vertex c \(copy\): source: 1, but vertex mm lives on device 0", vertex(5, source=1)),
    (r"vertex c \(copy\): source: there is no space -2", vertex(5, source=-2)),
    (r"vertex c \(copy\): source: copies from and to spaces where no kernels run", vertex(5, source=-1)),
    (r"vertex c \(copy\): inputs: a copy has exactly one value", vertex(5, inputs=["mm", "w"])),
    (r"vertex c \(copy\): inputs\[0\]: there is no vertex z", vertex(5, inputs=["z"])),
    (r"vertex mm \(mm\): traits: only an input can have any", vertex(4, **STATE)),
    (r"vertex mm: duration: expected 0 or more seconds", vertex(4, duration=float("nan"))),
    (r"vertex mm \(mm\): out: depends on a late input", vertex(4, after=["t"])),
    (r"vertex g: inplace: expected a list, got 0", vertex(6, inplace=0)),
    (r"vertex g: inplace: expected \[output, input position\]", vertex(6, inplace=[0])),
    (r"vertex g \(kernel\): inplace: there is no output 1", vertex(6, inplace=[[1, 0]])),
    (r"vertex g \(kernel\): inplace: vertex u is external", vertex(6, inplace=[[0, 2]])),
    (r"vertex g \(kernel\): after: there is no vertex z", vertex(6, after=["z"])),
    (r"vertex h \(kernel\): may_inplace: there is no input position 2", vertex(7, may_inplace=[2])),
    (r"inputs/after: .*in a cycle: mm -> i -> mm", vertex(4, after=["i"])),
]


@pytest.mark.parametrize(("message", "change"), REFUSED, ids=[message for message, _ in REFUSED])
def test_what_is_wrong_with_a_graph_is_named(
    message: str, change: Callable[[dict[str, Any]], object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the words of its file."""
    top = json.loads(json.dumps(GRAPH_3))
    change(top)
    path = tmp_path / "task.json"
    path.write_text(json.dumps(top))
    assert main(["bound", str(path)]) == 2
    printed = capsys.readouterr().err
    with pytest.raises(GraphFileError, match=message):
        raise GraphFileError(printed)


REFUSED_PLANS: list[tuple[str, Callable[[dict[str, Any]], object]]] = [
    (r"vertex \d+ \(copy\): source: there is no space -2", vertex(10, source=-2)),
    (r"vertex o: offset: expected an integer", vertex(9, offset=0.5)),
    (r"vertex b2: begin: expected an integer", vertex(11, begin=-1)),
    (r"vertex \d+ \(input\): begin: bytes from 512 on are not of", vertex(12, begin=512)),
    (r"vertex \d+ \(input\): inputs: an input has none, but for a range", vertex(12, **STATE)),
    (r"graph: cyclic: expected true or false", lambda top: top.update(cyclic=1)),
]


@pytest.mark.parametrize(("message", "change"), REFUSED_PLANS, ids=[message for message, _ in REFUSED_PLANS])
def test_what_is_wrong_with_a_plan_is_named(message: str, change: Callable[[dict[str, Any]], object]) -> None:
    top = plan_of(GRAPH_3)
    change(top)
    with pytest.raises(GraphFileError, match=message):
        memgraph_from_json(top)


def damaged(rng: random.Random, data: Any) -> object:
    """``data`` with one entry, anywhere, removed or replaced."""
    at = data
    while isinstance(at, dict | list) and at:
        key = rng.choice(list(at) if isinstance(at, dict) else range(len(at)))
        if not isinstance(at[key], dict | list) or not at[key] or rng.random() < 0.15:
            if rng.random() < 0.3:
                del at[key]
            else:
                at[key] = rng.choice([None, -1, 0, 1, 3, 1 << 70, 0.5, "", "gate", True, [], {}, [0, 1], [[0, 1]]])
            return data
        at = at[key]
    return data


def test_damaged_plans_are_refused_by_name_or_mean_something(tmp_path: Path) -> None:
    """What can be read comes back from a file; what the judge accepts of it runs as the graph says."""
    cases = [case for made in ("timed", "changing over steps", "at homes", "in ranges") for case in plans(made)[:5]]
    texts = [json.dumps(memgraph_to_object(plan)) for _, plan in cases]
    rng, refused, read, accepted = random.Random(0), 0, 0, 0
    for turn in range(1500):
        graph, _ = cases[turn % len(cases)]
        try:
            plan = memgraph_from_json(damaged(rng, json.loads(texts[turn % len(cases)])))
        except GraphFileError as error:
            refused += 1
            assert len(str(error)) < 400
            continue
        read += 1
        assert memgraph_from_json(json.loads(json.dumps(memgraph_to_object(plan)))) == plan
        with contextlib.suppress(VerifyError):
            verify(graph, plan)
            accepted += 1
            run_reference(graph, plan, turn)
    assert refused > 700 and read - accepted > 60 and accepted > 100, (refused, read, accepted)


def test_the_commands_read_both_versions_and_write_the_third(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, three, old_plan = tmp_path / "one.json", tmp_path / "three.json", tmp_path / "old_plan.json"
    one.write_text(json.dumps(GRAPH_1))
    old_plan.write_text(json.dumps(plan_of(GRAPH_1)))
    assert main(["convert", str(one), "-o", str(three)]) == 0
    assert json.loads(capsys.readouterr().out) == {"format": "taskgraph", "from": 1, "to": 3, "vertices": 9}
    assert read_taskgraph(three) == read_taskgraph(one)
    assert [v["id"] for v in json.loads(three.read_text())["vertices"]] == [v["id"] for v in GRAPH_1["vertices"]]
    again = tmp_path / "again.json"
    assert main(["convert", str(three), "-o", str(again)]) == 0
    assert json.loads(capsys.readouterr().out)["from"] == 3 and again.read_bytes() == three.read_bytes()
    plan = tmp_path / "plan.json"
    for source in (one, three):
        assert main(["compile", str(source), "-o", str(plan), "--cyclic"]) == 0
        assert json.loads(plan.read_text())["version"] == 3
        for graph in (one, three):
            assert main(["verify", str(graph), str(plan)]) == main(["verify", str(graph), str(old_plan)]) == 0
    assert main(["convert", str(old_plan), "-o", str(again)]) == 0
    assert read_memgraph(again) == read_memgraph(old_plan)
    assert main(["simulate", str(again), "--steps", "2"]) == 0
