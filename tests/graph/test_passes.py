"""Passes from graph to graph: run in order, each noted with what it changed; one more is one more entry of a list."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from disco_accel import DiscoConfig, prepare, stats
from disco_accel.cli.main import main
from disco_accel.graph.files import read_memgraph, read_taskgraph
from disco_accel.graph.passes import GraphPass, arena_of, changes, run_passes, totals
from disco_accel.graph.spaces import HOST, Space, SpaceKind
from disco_accel.graph.taskgraph import OpCall, TaskGraph, Vertex, VertexKind
from disco_accel.graph.traits import FOREIGN
from disco_accel.step.compile import pipeline
from disco_accel.verify.static import verify
from tests.cli.test_cli_recipe import write_recipe
from tests.support.models import random_batch, tiny_lora


def one_after_the_other(graph: TaskGraph) -> TaskGraph:
    """Each kernel waits for the kernel before it."""
    vertices, last = [], -1
    for vertex in graph.vertices:
        if vertex.kind is VertexKind.KERNEL:
            if last >= 0 and last not in vertex.after:
                vertex = replace(vertex, after=(*vertex.after, last))
            last = vertex.id
        vertices.append(vertex)
    return replace(graph, vertices=tuple(vertices))


OWN = GraphPass("one queue", "each kernel waits for the one before", one_after_the_other)


def small() -> TaskGraph:
    vertices = (
        Vertex(0, VertexKind.INPUT, 0, "x", (), (256,), traits=FOREIGN),
        Vertex(1, VertexKind.KERNEL, 0, "a", ((0, 0),), (512,), 1.0),
        Vertex(2, VertexKind.KERNEL, 0, "b", ((0, 0),), (512,), 2.0),
        Vertex(3, VertexKind.KERNEL, 0, "c", ((1, 0), (2, 0)), (512,), keep=True),
    )
    return TaskGraph("small", (Space(0, 4096),), vertices, {3: OpCall("aten::add", "Tensor", (), ())})


def test_passes_run_in_their_order_and_each_says_what_it_changed() -> None:
    def swapped(graph: TaskGraph) -> TaskGraph:
        x, a, b, c = graph.vertices
        return replace(graph, vertices=(x, b, a, replace(c, sizes=(512, 64), duration=0.5)))

    applied: list[Any] = []
    before = small()
    after = run_passes(before, [GraphPass("swap", "b first", swapped), OWN, arena_of(2048)], applied)
    assert before == small(), "a pass leaves the graph that it gets as it is"
    assert [v.id for v in after.vertices] == [0, 2, 1, 3] and after.devices[0].memory == 2048
    assert [v.after for v in after.vertices] == [(), (), (2,), (1,)]
    swap, queue, arena = applied
    assert swap.changed == {"order": 2, "sizes": 1, "duration": 1}
    assert (swap.before, swap.after) == (totals(small()), totals(after))
    assert (swap.before.seconds, swap.after.seconds) == (3.0, 3.5)
    assert (swap.before.value_bytes, swap.after.value_bytes) == (1792, 1856)
    assert queue.changed == {"after": 2} and arena.changed == {"spaces": 1}
    assert json.loads(json.dumps(arena.as_dict()))["changed"] == {"spaces": 1}


def test_every_kind_of_change_is_counted() -> None:
    graph = small()
    without = replace(graph, vertices=graph.vertices[:2], ops={})
    assert changes(graph, without) == {"removed": 2, "calls": 1}
    assert changes(without, graph) == {"added": 2, "calls": 1}
    assert changes(graph, replace(graph, vertices=tuple(replace(v) for v in graph.vertices), ops=dict(graph.ops))) == {}
    limited = replace(graph, spaces=(*graph.spaces, Space(HOST, 1 << 20, 1, SpaceKind.HOST)))
    assert changes(graph, limited) == changes(limited, graph) == {"spaces": 1}


def test_one_more_pass_is_applied_and_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Between the passes of the capture and those of costs; the plan is one of the graph that it made."""
    monkeypatch.setattr(pipeline, "STEP_PASSES", (OWN,))
    folder = tmp_path / "plan"
    assert (
        main(
            [
                "plan",
                "--json",
                write_recipe(tmp_path),
                "--memory",
                "1MiB",
                "--passes",
                "-o",
                str(folder),
                "--recompute",
                "as-written",
            ]
        )
        == 0
    )
    told = capsys.readouterr()
    passes = json.loads(told.out)["passes"]
    names = [each["name"] for each in passes]
    assert names[:6] == ["hold back", "chain draws", "one queue", "estimates", "scratch", "arena"]
    assert names[6] == "inputs by use" and set(names[7:]) <= {"low-peak order"}
    kernels = json.loads(told.out)["kernels"]
    assert passes[2]["changed"]["after"] > kernels / 2
    assert passes[3]["changed"] == {"duration": kernels} and passes[3]["before"] == passes[2]["after"]
    (row,) = [line for line in told.err.splitlines() if line.startswith("one queue: each kernel waits")]
    assert row.endswith(f"after {passes[2]['changed']['after']}")
    graph = read_taskgraph(folder / "task.json")
    assert one_after_the_other(graph) == graph
    verify(graph, read_memgraph(folder / "plan.json"))


def test_a_prepared_model_s_step_goes_through_the_same_list(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[TaskGraph] = []

    def noted(graph: TaskGraph) -> TaskGraph:
        seen.append(graph)
        return one_after_the_other(graph)

    monkeypatch.setattr(pipeline, "STEP_PASSES", (replace(OWN, run=noted),))
    losses = []
    for model in (tiny_lora(layers=1, hidden=32), prepare(tiny_lora(layers=1, hidden=32), CONFIG)):
        losses.append(model(**random_batch()).loss.item())
    assert len(seen) == 1 and stats(model)["steps_compiled"] == 1 and losses[0] == losses[1]


CONFIG = DiscoConfig(memory_budget="1MiB", device="cpu", plan_cache=None)
