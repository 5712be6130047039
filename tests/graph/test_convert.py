"""Graphs and plans go from version 1 to version 2 and back without a loss; version 2 is read strictly."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from disco_accel.cli.main import main
from disco_accel.errors import GraphFileError, PlanError, VerifyError
from disco_accel.graph.check import check_taskgraph
from disco_accel.graph.convert import plan_in_buffers, plan_in_vertices
from disco_accel.graph.convert_graphs import graph_in_values, graph_in_vertices
from disco_accel.graph.files import read_memgraph, read_taskgraph, write_memgraph, write_taskgraph
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.schema2 import GATE, SpaceKind, handed_out_at_gate, overwrites
from disco_accel.graph.schema2_files import graph_from_json, graph_to_json, plan_from_json, plan_to_json
from disco_accel.graph.taskgraph import Device, TaskGraph, Vertex, VertexKind
from disco_accel.graph.traits import FOREIGN, FROZEN
from disco_accel.graph.values import arrives_at_gate, changes_over_steps
from disco_accel.plan import make_plan
from disco_accel.verify.static import verify
from tests.support.faults.state_faults import home_with_an_offset
from tests.support.graphs.strategies import Shape, random_taskgraph, with_room
from tests.support.oracles.buffers import verify_buffers
from tests.support.plans.state_plans import state_plans

UPDATE: dict[str, Any] = {
    "format": "taskgraph",
    "version": 2,
    "name": "update",
    "spaces": [{"id": 0, "kind": "device", "bytes": 4096}, {"id": 1, "kind": "host"}],
    "outputs": {"gate": [3], "end": [4]},
    "values": [
        {"id": 0, "name": "w", "bytes": 512, "space": 0, "lifetime": "steps", "home": 1, "arrival": "start"},
        {"id": 1, "name": "x", "bytes": 256, "space": 0, "lifetime": "steps", "access": "foreign", "arrival": "start"},
        {"id": 2, "name": "t", "bytes": 256, "space": 0, "arrival": "gate"},
        {"id": 3, "bytes": 256, "space": 0},
        {"id": 4, "bytes": 512, "space": 0},
    ],
    "vertices": [
        {"id": 5, "kind": "kernel", "space": 0, "op": "mm", "reads": [0, 1], "writes": [3], "duration": 0.5},
        {"id": 6, "kind": "kernel", "space": 0, "op": "grad", "reads": [3, 2], "writes": [4], "may_overwrite": [1]},
        {"id": 7, "kind": "kernel", "space": 0, "op": "sgd", "reads": [0, 4], "writes": [[0, 1]], "after": ["gate", 6]},
    ],
}
"""A weight that each step changes: y = w x; the gate; g = grad(y, t); w' = sgd(w, g)."""


def normal(vertices: tuple[Vertex, ...]) -> tuple[Vertex, ...]:
    """``vertices`` without what says nothing, as version 2 has them: inputs first, by id and without durations, no
    waiting for inputs that are there from the start, and one name for the gate."""
    inputs = [replace(v, duration=None) for v in vertices if v.kind is VertexKind.INPUT]
    inputs.sort(key=lambda v: v.id)
    late = [v.id for v in inputs if arrives_at_gate(v)]
    silent = {v.id for v in inputs if not arrives_at_gate(v)}
    others = []
    for v in vertices:
        if v.kind is not VertexKind.INPUT:
            after = [late[0] if other in late else other for other in v.after if other not in silent]
            others.append(replace(v, after=tuple(dict.fromkeys(after))))
    return (*inputs, *others)


def normal_graph(graph: TaskGraph) -> TaskGraph:
    return check_taskgraph(replace(graph, vertices=normal(graph.vertices)))


def convertible(seed: int, shape: Shape | None = None) -> TaskGraph | None:
    graph = random_taskgraph(random.Random(seed), shape)
    try:
        graph_in_values(graph)
    except GraphFileError as error:
        assert "inplace: over" in str(error), error
        return None
    return graph


@pytest.mark.parametrize(("graphs", "shape"), [(300, Shape()), (150, Shape(states=0.5, old_versions=True))])
def test_random_graphs_come_back_as_they_were_also_through_a_file(graphs: int, shape: Shape) -> None:
    converted = 0
    for seed in range(graphs):
        graph = convertible(seed, shape)
        if graph is not None:
            converted += 1
            second = graph_in_values(graph)
            assert graph_in_vertices(second) == normal_graph(graph), seed
            assert graph_from_json(json.loads(json.dumps(graph_to_json(second)))) == second
    assert converted > 0.6 * graphs


def planned(planner: str, count: int, shape: Shape) -> list[tuple[TaskGraph, MemGraph]]:
    made = []
    for seed in range(count):
        graph = convertible(seed, shape)
        if graph is not None:
            sized = normal_graph(with_room(graph, 1.1))
            with contextlib.suppress(PlanError):
                made.append((sized, make_plan(sized, planner=planner, cyclic=seed % 2 == 0)))
    return made


def drawn() -> list[tuple[TaskGraph, MemGraph]]:
    """Graphs whose values change over steps, with plans as no planner makes them."""
    made = []
    for graph, plan in state_plans(60):
        with contextlib.suppress(GraphFileError):
            plan_in_buffers(plan)
            made.append((normal_graph(graph), plan))
    return made


PLANS: dict[str, Callable[[], list[tuple[TaskGraph, MemGraph]]]] = {
    "build": lambda: planned("build", 80, Shape()),
    "timed": lambda: planned("timed", 80, Shape()),
    "timed, changing over steps": lambda: planned("timed", 60, Shape(vertices=12, states=0.5, inplace=0.0)),
    "drawn by lot, changing over steps": drawn,
}


@pytest.mark.parametrize("made", PLANS)
def test_plans_come_back_as_good_as_they_were(made: str, tmp_path: Path) -> None:
    tried = 0
    for graph, plan in PLANS[made]():
        write_memgraph(plan, tmp_path / "plan.json", version=2)
        back = read_memgraph(tmp_path / "plan.json")
        verify(graph, back)
        for name in ("devices", "slots", "host_offsets", "host_memory", "host_alignment", "cyclic"):
            assert getattr(back, name) == getattr(plan, name), name
        assert back.vertices == normal(plan.vertices)
        assert waits(back) == waits(plan)
        if any(changes_over_steps(v) for v in plan.vertices):
            with pytest.raises(GraphFileError, match=r"version 1 has no word for .*--schema 2"):
                write_memgraph(plan, tmp_path / "plan.json")
        tried += 1
    assert tried > 30


def waits(plan: MemGraph) -> set[tuple[int, int]]:
    """Edges but those from inputs that are there at the start; one late input stands for all."""
    late = sorted(v.id for v in plan.vertices if arrives_at_gate(v))
    inputs = {v.id for v in plan.vertices if v.kind is VertexKind.INPUT}
    edges = (*plan.data_edges, *plan.memory_edges)
    return {(late[0] if u in late else u, v) for u, v in edges if u not in inputs or u in late}


def test_what_is_asked_of_values_is_answered_in_one_place() -> None:
    graph = graph_from_json(UPDATE)
    traits = [graph.value[v].traits for v in (0, 1, 2, 3)]
    assert [each.host_has_it for each in traits] == [True, False, False, False]
    assert [each.changes_over_steps for each in traits] == [True, False, False, False]
    assert [handed_out_at_gate(graph, (n, 0)) for n in (3, 4)] == [True, False]
    assert [list(overwrites(v)) for v in graph.vertices] == [[], [], [((0, 0), (0, 1))]]
    assert graph.vertices[2].after == (GATE, 6)
    assert graph_from_json(json.loads(json.dumps(graph_to_json(graph)))) == graph


def test_a_graph_whose_values_change_has_no_words_in_files_of_version_1(tmp_path: Path) -> None:
    graph = graph_in_vertices(graph_from_json(UPDATE))
    assert changes_over_steps(graph.vertices[0])
    several = replace(graph.vertices[-1], sizes=(4, 512), inplace=((1, 0),))
    frozen = replace(graph.vertices[0], traits=FROZEN)
    for vertices, message in (
        (
            graph.vertices,
            r"vertex 0 \(w\): version 1 has no word for .* read-write: .*--schema 2",
        ),
        (
            (frozen, *graph.vertices[1:-1], several),
            r"vertex 7 \(sgd\): inplace: .* changes output 0 .*--schema 2",
        ),
    ):
        with pytest.raises(GraphFileError, match=message):
            write_taskgraph(replace(graph, vertices=vertices), tmp_path / "one.json")


def spoilt_plan(change: Callable[[dict[str, Any]], None]) -> None:
    """Read a plan of UPDATE (w loaded, changed and written home, its buffers 0 to 3) with ``change`` made."""
    buffers = [
        {"id": 0, "version": 0, "space": 1},
        {"id": 1, "version": 0, "space": 0, "offset": 0},
        {"id": 2, "version": [0, 1], "space": 0, "offset": 0},
        {"id": 3, "version": [0, 1], "space": 1},
        {"id": 4, "version": 1, "space": 0},
        {"id": 5, "version": 2, "space": 0, "offset": 512},
        {"id": 6, "version": 3, "space": 0, "offset": 768},
        {"id": 7, "version": 4, "space": 0, "offset": 1024},
    ]
    order = [
        {"id": 8, "reads": [0], "writes": [1]},
        {"id": 5, "reads": [1, 4], "writes": [6]},
        {"id": 6, "reads": [6, 5], "writes": [7]},
        {"id": 7, "reads": [1, 7], "writes": [2]},
        {"id": 9, "reads": [2], "writes": [3]},
    ]
    data = [[8, 5], [8, 7], [5, 6], [6, 7], [7, 9], ["gate", 6]]
    top = json.loads(json.dumps(UPDATE)) | {"format": "memgraph", "edges": {"data": data, "memory": []}}
    top |= {"buffers": buffers, "order": order, "cyclic": True}
    change(top)
    verify(graph_in_vertices(graph_from_json(UPDATE)), plan_in_vertices(plan_from_json(top)))


def buffer(number: int, **changes: object) -> Callable[[dict[str, Any]], None]:
    return lambda top: top["buffers"][number].update(changes)


def entry(number: int, **changes: object) -> Callable[[dict[str, Any]], None]:
    return lambda top: top["order"][number].update(changes)


NAMELESS = {
    r"vertex 9: writes: expected buffers of \[0, 1\]": buffer(3, version=0),
    r"vertex 5: writes: expected buffers of \[3, 0\]": buffer(6, version=2),
    r"buffer 8: version: \[0, 0\] arrives in another one too": lambda top: (
        top["order"].pop(0),
        top["buffers"].append({"id": 8, "version": 0, "space": 0, "offset": 2048}),
        top["edges"].update(data=top["edges"]["data"][2:]),
    ),
    r"buffer 3: version: nothing writes \[0, 1\]": lambda top: (
        top["order"].pop(4),
        top["edges"]["data"].remove([7, 9]),
    ),
    r"buffer 4: space: value 1 is in space 0": buffer(4, space=1),
    r"vertex 7: reads: buffer 0 is a home, which only copies read": entry(3, reads=[0, 7]),
    r"vertex 9: on the host value 0 lies at its home alone": buffer(3, offset=0),
    r"spaces: planners and the engine know one memory of the host": lambda top: top["spaces"].append(
        {"id": 2, "kind": "host"}
    ),
}


@pytest.mark.parametrize("message", NAMELESS)
def test_a_plan_whose_buffers_would_share_a_name_is_refused(message: str) -> None:
    """So that no wrong plan of version 2 becomes a right one of version 1."""
    spoilt_plan(lambda top: None)
    with pytest.raises(GraphFileError, match=message):
        spoilt_plan(NAMELESS[message])


def test_a_host_without_a_size_is_as_large_as_its_plan_needs() -> None:
    made = [(graph, plan) for graph, plan in planned("timed", 80, Shape()) if plan.host_offsets]
    for graph, plan in made:
        second = plan_in_buffers(plan)
        spaces = tuple(replace(s, bytes=None) if s.kind is SpaceKind.HOST else s for s in second.graph.spaces)
        back = plan_in_vertices(replace(second, graph=replace(second.graph, spaces=spaces)))
        verify(graph, back)
        assert 0 < back.host_memory <= plan.host_memory
    assert len(made) > 3


def test_what_goes_home_has_no_offset() -> None:
    [(_, plan)] = state_plans(1)
    bad = home_with_an_offset(plan, random.Random(0))
    assert bad is not None
    with pytest.raises(GraphFileError, match=r"vertex \d+ \(offload\): host_offset: it goes to the home of value \d+"):
        plan_in_buffers(bad)


def value(number: int, **changes: object) -> Callable[[dict[str, Any]], None]:
    return lambda top: next(v for v in top["values"] if v["id"] == number).update(changes)


def vertex(number: int, **changes: object) -> Callable[[dict[str, Any]], None]:
    return lambda top: next(v for v in top["vertices"] if v["id"] == number).update(changes)


REFUSED = {
    r"spaces: there is no device": lambda top: top["spaces"].pop(0),
    r"spaces: two have the same id": lambda top: top["spaces"][1].update(id=0),
    r"spaces\[1\]: kind: expected one of device, host, storage": lambda top: top["spaces"][1].update(kind="disk"),
    r"space 0: bytes: a device's memory has a size": lambda top: top["spaces"][0].pop("bytes"),
    r"value 0 \(w\): home: 0 is not a space of the host": value(0, home=0),
    r"value 0 \(w\): home: missing": value(0, home=None),
    r"value 0 \(w\): arrival: .*is there when one starts": value(0, arrival="gate"),
    r"value 3: home: a value of one step has none": value(3, home=1),
    r"value 1 \(x\): home: foreign memory has no home": value(1, home=1),
    r"value 3: bytes: expected an integer": value(3, bytes=-1),
    r"value 3: space: 1 is not one of the devices": value(3, space=1),
    r"value 3: lifetime: expected one of step, steps, got 'ever'": value(3, lifetime="ever"),
    r"value 3: arrival: made, but no vertex writes it": vertex(5, writes=[]),
    r"vertex 5 \(mm\): writes: value 1 arrives at start; write its version 1": vertex(5, writes=[3, 1]),
    r"vertex 7 \(sgd\): writes: value 1 is foreign: no vertex may change it": vertex(7, reads=[1], writes=[[1, 1]]),
    r"vertex 7 \(sgd\): writes: \[0, 1\] takes the place of \[0, 0\], which must be in reads": vertex(7, reads=[4]),
    r"vertex 7 \(sgd\): writes: .*nothing writes|vertex 7 \(sgd\): writes: \[0, 2\]": vertex(7, writes=[[0, 2]]),
    r"vertex 6 \(grad\): writes: \[3, 0\] is written by vertex 5 too": vertex(6, writes=[4, 3]),
    r"vertex 6 \(grad\): reads: nothing writes \[0, 5\]": vertex(6, reads=[[0, 5]], may_overwrite=[]),
    r"vertex 6 \(grad\): reads: there is no version \[9, 0\]": vertex(6, reads=[9]),
    r"vertex 6 \(grad\): may_overwrite: there is no position 2": vertex(6, may_overwrite=[2]),
    r"vertex 7 \(sgd\): after: there is no vertex 99": vertex(7, after=[99]),
    r"reads/writes/after: .*in a cycle": vertex(5, after=[6]),
    r"at_gate: \[4, 0\] comes after the gate": lambda top: top.update(outputs={"gate": [4]}),
    r"at_end: nothing writes \[8, 0\]": lambda top: top.update(outputs={"end": [8]}),
    r"vertex 5 \(mm\): writes: a copy reads one version": vertex(5, kind="copy"),
    r"vertex 5: duration: expected 0 or more seconds": vertex(5, duration=float("nan")),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_wrong_with_a_version_2_graph_is_named(message: str) -> None:
    top = json.loads(json.dumps(UPDATE))
    REFUSED[message](top)
    with pytest.raises(GraphFileError, match=message):
        graph_from_json(top)


def damaged(rng: random.Random, data: object) -> object:
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


def test_damaged_plans_are_refused_by_name_or_mean_something() -> None:
    """What the judge of version 1 accepts of them, in its words, the judge of version 2 accepts."""
    graph = convertible(3) or convertible(4)
    assert graph is not None
    graph = normal_graph(with_room(graph, 1.1))
    cases = [(graph, make_plan(graph, cyclic=True)), *drawn()[:8]]
    plans = [(graph, graph_in_values(graph), json.dumps(plan_to_json(plan_in_buffers(plan)))) for graph, plan in cases]
    rng, refused, accepted, agreed = random.Random(0), 0, 0, 0
    for turn in range(1500):
        graph, second, text = plans[turn % len(plans)]
        try:
            plan = plan_from_json(damaged(rng, json.loads(text)))  # type: ignore[arg-type]
            back = plan_in_vertices(plan)
        except GraphFileError as error:
            refused += 1
            assert len(str(error)) < 400
            continue
        # Version 1 has no words for some of what a plan can say wrongly of its graph.
        if any(getattr(plan.graph, key) != getattr(second, key) for key in ("values", "vertices", "at_gate", "at_end")):
            continue
        if plan.graph.space.keys() != second.space.keys():
            continue
        with contextlib.suppress(VerifyError):
            verify(graph, back)
            accepted += 1
            verify_buffers(second, plan)
            agreed += 1
    assert refused > 700 and agreed == accepted > 100


def test_the_command_line_reads_both_versions_and_writes_the_one_that_it_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vertices = (
        Vertex(0, VertexKind.INPUT, 0, "w", sizes=(512,), traits=FROZEN),
        Vertex(1, VertexKind.INPUT, 0, "x", sizes=(512,), traits=FOREIGN),
        Vertex(2, VertexKind.KERNEL, 0, "mm", ((0, 0), (1, 0)), (512,), 0.001, keep=True),
    )
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    write_taskgraph(TaskGraph("g", (Device(0, 2048),), vertices), one)
    assert main(["convert", str(one), "-o", str(two)]) == 0
    assert json.loads(capsys.readouterr().out) == {"format": "taskgraph", "from": 1, "to": 2, "vertices": 3}
    assert read_taskgraph(two) == read_taskgraph(one)
    for source, asked, written in (
        (one, [], 1),
        (two, [], 2),
        (one, ["--schema", "2"], 2),
        (two, ["--schema", "1"], 1),
    ):
        plan = tmp_path / "plan.json"
        assert main(["compile", str(source), "-o", str(plan), *asked]) == 0
        assert json.loads(plan.read_text())["version"] == written
        for graph in (one, two):
            assert main(["verify", str(graph), str(plan)]) == 0
        back = tmp_path / "back.json"
        assert main(["convert", str(plan), "-o", str(back)]) == 0
        assert read_memgraph(back) == read_memgraph(plan)
    capsys.readouterr()
    changing = tmp_path / "changing.json"
    changing.write_text(json.dumps(UPDATE))
    assert main(["convert", str(changing), "-o", str(back)]) == 2
    assert "vertex 0 (w): version 1 has no word" in capsys.readouterr().err
    for schema in ([], ["--schema", "2"]):
        assert main(["compile", str(changing), "-o", str(plan), *schema]) == 0
        assert main(["verify", str(changing), str(plan)]) == 0
    assert main(["compile", str(changing), "-o", str(plan), "--schema", "1"]) == 2
