"""Graph files: what is good survives a round trip, what is bad is refused with the vertex and the key named."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from disco_accel.errors import GraphFileError
from disco_accel.graph import files
from disco_accel.graph.files import (
    fingerprint,
    memgraph_from_json,
    read_memgraph,
    read_taskgraph,
    taskgraph_from_json,
    write_memgraph,
    write_taskgraph,
)
from disco_accel.graph.graph_json import memgraph_to_object, taskgraph_to_object
from disco_accel.graph.taskgraph import TaskGraph
from disco_accel.plan import make_plan
from tests.support.graphs.strategies import Shape, taskgraphs

GRAPHS = Path(__file__).parents[1] / "data" / "graphs"
TASKS = sorted(GRAPHS.glob("*.taskgraph.json"))


@pytest.mark.parametrize("path", TASKS, ids=lambda path: path.name)
def test_graphs_and_their_plans_survive_a_round_trip(path: Path, tmp_path: Path) -> None:
    graph = read_taskgraph(path)
    write_taskgraph(graph, tmp_path / "task.json")
    assert read_taskgraph(tmp_path / "task.json") == graph
    plan = make_plan(graph, cyclic=True)
    write_memgraph(plan, tmp_path / "mem.json")
    again = read_memgraph(tmp_path / "mem.json")
    assert again == plan
    write_memgraph(again, tmp_path / "mem2.json")
    assert (tmp_path / "mem.json").read_bytes() == (tmp_path / "mem2.json").read_bytes()


@settings(max_examples=60, deadline=None)
@given(taskgraphs(Shape(vertices=12)))
def test_random_graphs_survive_a_round_trip(graph: TaskGraph) -> None:
    data = json.loads(json.dumps(taskgraph_to_object(graph)))
    assert taskgraph_from_json(data) == graph


def test_vertices_may_come_in_any_order() -> None:
    data = json.loads((GRAPHS / "lora_small.taskgraph.json").read_text())
    random.Random(3).shuffle(data["vertices"])
    graph = taskgraph_from_json(data)
    seen: set[int] = set()
    for vertex in graph.vertices:
        assert {producer for producer, _ in vertex.inputs} <= seen
        seen.add(vertex.id)


def test_a_topological_order_is_kept() -> None:
    data = json.loads((GRAPHS / "lora_small.taskgraph.json").read_text())
    assert [v.id for v in taskgraph_from_json(data).vertices] == [v["id"] for v in data["vertices"]]


def test_ids_may_be_texts_and_a_plan_uses_the_same(tmp_path: Path) -> None:
    data = task(
        vertices=[
            {"id": "x", "kind": "input", "device": 0, "size": 256, "clean": True},
            {"id": "7", "kind": "gemm", "device": 0, "size": 256, "inputs": ["x", ["x", 0]], "after": []},
        ]
    )
    names: dict[int, str] = {}
    graph = taskgraph_from_json(data, names)
    assert sorted(names.values()) == ["7", "x"]
    assert [vertex["id"] for vertex in taskgraph_to_object(graph, names)["vertices"]] == ["x", "7"]
    plan = memgraph_to_object(make_plan(graph), names)
    assert {"x", "7"} <= {vertex["id"] for vertex in plan["vertices"]}
    assert {v.id for v in graph.vertices} <= {v.id for v in memgraph_from_json(plan).vertices}


def test_the_fingerprint_depends_on_content_alone() -> None:
    data = task()
    first = fingerprint(taskgraph_from_json(data))
    assert fingerprint(taskgraph_from_json({**data, "name": "other", "comment": "ignored"})) == first
    data["vertices"][1]["duration"] = 2.0
    assert fingerprint(taskgraph_from_json(data)) != first


def task(**changes: Any) -> dict[str, Any]:
    data: dict[str, Any] = {
        "format": "taskgraph",
        "version": 1,
        "devices": [{"id": 0, "memory": 4096}],
        "vertices": [
            {"id": 0, "kind": "input", "device": 0, "size": 512},
            {"id": 1, "kind": "compute", "device": 0, "size": 256, "inputs": [0], "duration": 1.0},
        ],
    }
    return {**data, **changes}


def vertex(**changes: Any) -> dict[str, Any]:
    """A task whose vertex 1 has other keys; a None takes the key away."""
    data = task()
    data["vertices"][1] = {k: v for k, v in {**data["vertices"][1], **changes}.items() if v is not None}
    return data


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "not an object": ([], "object"),  # type: ignore[dict-item]
    "format": (task(format="memgraph"), "format"),
    "version": (task(version=2), "version: expected 1 or 3"),
    "version 3 has other words": (task(version=3), "vertex 0: space: missing"),
    "version is no bool": (task(version=True), "version"),
    "no devices": (task(devices=[]), "devices"),
    "device twice": (task(devices=[{"id": 0, "memory": 1}] * 2), "devices"),
    "device without memory": (task(devices=[{"id": 0}]), "memory"),
    "alignment 0": (task(devices=[{"id": 0, "memory": 1, "alignment": 0}]), "alignment"),
    "vertices": (task(vertices={}), "vertices"),
    "id twice": (task(vertices=[task()["vertices"][0]] * 2), "vertex 0.*id"),
    "id missing": (vertex(id=None), "id"),
    "id float": (vertex(id=1.5), "vertex 1.5"),
    "kind missing": (vertex(kind=None), "vertex 1: kind"),
    "kind of a plan": (vertex(kind="reload"), "vertex 1: kind"),
    "unknown device": (vertex(device=3), "vertex 1.*device"),
    "dangling input": (vertex(inputs=[9]), r"vertex 1.*inputs\[0\]"),
    "no such output": (vertex(inputs=[[0, 1]]), r"vertex 1.*inputs\[0\]"),
    "negative output": (vertex(inputs=[[0, -1]]), "vertex 1: inputs"),
    "own output": (vertex(inputs=[1]), "vertex 1.*own"),
    "dangling after": (vertex(after=[9]), "vertex 1.*after"),
    "after itself": (vertex(after=[1]), "vertex 1.*after"),
    "negative size": (vertex(size=-1), "vertex 1: size"),
    "huge size": (vertex(size=1 << 80), "vertex 1: size"),
    "size float": (vertex(size=1.0), "vertex 1: size"),
    "size bool": (vertex(size=True), "vertex 1: size"),
    "size and outputs": (vertex(outputs=[{"size": 1}]), "vertex 1: outputs"),
    "negative duration": (vertex(duration=-1.0), "vertex 1: duration"),
    "duration text": (vertex(duration="1"), "vertex 1: duration"),
    "flag": (vertex(keep=1), "vertex 1: keep"),
    "clean kernel": (vertex(clean=True), "vertex 1.*clean"),
    "late kernel": (vertex(late=True), "vertex 1.*late"),
    "inplace position": (vertex(inplace=1), "vertex 1.*inplace"),
    "inplace too large": (vertex(inplace=0, size=1024), "vertex 1.*inplace"),
    "may_inplace position": (vertex(may_inplace=[5]), "vertex 1.*may_inplace"),
    "transfer of nothing": (vertex(kind="transfer", inputs=[]), "vertex 1.*inputs"),
    "transfer grows": (vertex(kind="transfer", size=1024), "vertex 1.*size"),
    "input with inputs": (vertex(kind="input"), "vertex 1.*inputs"),
    "huge duration": (vertex(duration=10**400), "vertex 1: duration"),
}


@pytest.mark.parametrize("name", sorted(BAD))
def test_bad_graphs_are_refused_with_the_vertex_and_the_key(name: str) -> None:
    data, pattern = BAD[name]
    with pytest.raises(GraphFileError, match=pattern):
        taskgraph_from_json(data)


def test_a_cycle_is_named() -> None:
    vertices = [{"id": i, "kind": "compute", "device": 0, "size": 1, "inputs": [(i + 1) % 3]} for i in range(3)]
    with pytest.raises(GraphFileError, match=r"cycle: .*->"):
        taskgraph_from_json(task(vertices=vertices))


def test_an_out_vertex_behind_the_gate_is_refused() -> None:
    data = vertex(out=True)
    data["vertices"][0]["late"] = True
    with pytest.raises(GraphFileError, match=r"vertex 1.*out"):
        taskgraph_from_json(data)


def test_an_external_value_is_not_written_over() -> None:
    data = vertex(inplace=0)
    data["vertices"][0]["external"] = True
    with pytest.raises(GraphFileError, match="inplace"):
        taskgraph_from_json(data)


def test_a_kernel_reads_on_its_own_device() -> None:
    data = vertex(device=1)
    data["devices"].append({"id": 1, "memory": 4096})
    with pytest.raises(GraphFileError, match="add a copy"):
        taskgraph_from_json(data)


TEXTS = {
    "empty": b"",
    "not JSON": b"{",
    "not UTF-8": b"\xff\xfe",
    "NaN": json.dumps(vertex(duration=float("nan"))).encode(),
    "infinity": json.dumps(vertex(duration=float("inf"))).encode(),
    "a number without end": b'{"format": ' + b"9" * 6000 + b"}",
    "nested without end": b"[" * 200_000 + b"]" * 200_000,
    "a key twice": b'{"format": "taskgraph", "format": "memgraph"}',
}


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_bad_texts_are_refused_with_the_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(TEXTS[name])
    with pytest.raises(GraphFileError, match=r"bad\.json"):
        read_taskgraph(path)
    with pytest.raises(GraphFileError, match=r"bad\.json"):
        read_memgraph(path)


def test_a_missing_file_and_a_huge_one_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(GraphFileError, match="cannot be read"):
        read_taskgraph(tmp_path / "absent.json")
    monkeypatch.setattr(files, "MAX_FILE_BYTES", 10)
    with pytest.raises(GraphFileError, match="larger than"):
        read_taskgraph(GRAPHS / "toy.taskgraph.json")


def test_dangling_references_of_a_plan_are_refused() -> None:
    good = json.loads((GRAPHS / "intro_n10.memgraph.json").read_text())
    memgraph_from_json(good)
    with pytest.raises(GraphFileError, match="edges"):
        memgraph_from_json({**good, "edges": {"data": [[0, 999]], "memory": []}})
    with pytest.raises(GraphFileError, match=r"edges\.data"):
        memgraph_from_json({**good, "edges": {"data": [[0]]}})


def test_writing_leaves_the_old_file_if_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "graph.json"
    path.write_text("old")

    def broken(handle: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(files.os, "fsync", broken)
    with pytest.raises(OSError, match="disk full"):
        write_taskgraph(taskgraph_from_json(task()), path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
