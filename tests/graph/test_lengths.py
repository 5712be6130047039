"""Numbers that depend on a length: between two graphs all are affine, and anything else is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from disco_accel.graph.lengths import _Between, _NotAffine, varying_calls
from disco_accel.graph.spaces import Space
from disco_accel.graph.taskgraph import Arg, OpCall, OpResult, TaskGraph, TensorArg, TensorSpec, Vertex, VertexKind
from disco_accel.graph.traits import FOREIGN


def spec(*shape: int, dtype: str = "float32", stride: tuple[int, ...] | None = None) -> TensorSpec:
    dense = [1]
    for size in reversed(shape[1:]):
        dense.insert(0, dense[0] * size)
    return TensorSpec(dtype, shape, stride or tuple(dense))


def graph(length: int, *, wide: int = 8, **changes: Any) -> TaskGraph:
    """Keys of ``length - 1`` tokens, one more, their sum times a number, and two masks."""
    past, new, joined = spec(2, length - 1, wide), spec(2, 1, wide), spec(2, length, wide)
    vertices = [
        Vertex(0, VertexKind.INPUT, 0, traits=FOREIGN, sizes=(8 * (length - 1) * wide,)),
        Vertex(1, VertexKind.INPUT, 0, traits=FOREIGN, sizes=(8 * wide,)),
        Vertex(2, VertexKind.KERNEL, 0, "aten::cat", ((0, 0), (1, 0)), (8 * length * wide,)),
        Vertex(3, VertexKind.KERNEL, 0, "aten::mul", ((2, 0),), (8 * length * wide,)),
        Vertex(4, VertexKind.KERNEL, 0, "aten::arange", (), (8 * length,)),
        Vertex(5, VertexKind.KERNEL, 0, "aten::arange", (), (8 * changes.get("other", length),)),
    ]
    args: dict[int, tuple[str, tuple[Arg, ...], TensorSpec]] = {
        2: ("aten::cat", ((TensorArg(0, past), TensorArg(1, new)), 1), joined),
        3: ("aten::mul", (TensorArg(0, joined), changes.get("factor", 0.5)), joined),
        4: ("aten::arange", (length,), spec(length, dtype="int64")),
        5: ("aten::arange", (changes.get("other", length),), spec(changes.get("other", length), dtype="int64")),
    }
    ops = {n: OpCall(name, "default", given, (OpResult(0, made),), "m") for n, (name, given, made) in args.items()}
    return TaskGraph("token", (Space(0, 1 << 20),), tuple(vertices), ops)


def test_a_graph_between_two_lengths_is_that_of_the_length() -> None:
    graphs = {n: graph(n) for n in (64, 33, 40)}
    varying = varying_calls(graphs)
    assert sorted(varying) == [2, 3, 4, 5]
    between = _Between(64, 33)
    for length in range(33, 65):
        assert between.graph_at(length, graphs[64], graphs[33]) == graph(length)
    steady = {n: replace(g, ops={k: c for k, c in g.ops.items() if k == 9}) for n, g in graphs.items()}
    assert varying_calls(steady) == {}


def _with_call(made: TaskGraph, vertex: int, **fields: Any) -> TaskGraph:
    return replace(made, ops={**made.ops, vertex: replace(made.ops[vertex], **fields)})


def _with_vertex(made: TaskGraph, index: int, **fields: Any) -> TaskGraph:
    vertices = list(made.vertices)
    vertices[index] = replace(vertices[index], **fields)
    return replace(made, vertices=tuple(vertices))


@pytest.mark.parametrize(
    ("longest", "shortest", "further"),
    [
        (graph(64), graph(33, factor=0.25), graph(40)),
        (graph(64), graph(33), graph(40, factor=0.25)),
        (graph(64), graph(33), graph(40, other=41)),
        (graph(64, other=40), graph(33, other=50), graph(40)),
        (graph(64, other=70), graph(33, other=69), graph(40)),
        (graph(64, other=64), graph(33, other=64), graph(40, other=64)),
        (_with_call(graph(64), 3, overload="Scalar"), graph(33), graph(40)),
        (graph(64), _with_vertex(graph(33), 3, inputs=((1, 0),)), graph(40)),
        (graph(64), graph(33), _with_vertex(graph(40), 3, out=True)),
        (_with_call(graph(64), 4, args=(64, True)), _with_call(graph(33), 4, args=(33, 1)), graph(40)),
        (graph(64), replace(graph(33), vertices=graph(33).vertices[:-1]), graph(40)),
    ],
    ids=[
        *("a number that is no size", "the same between", "a size that jumps", "a size that falls", "no whole step"),
        *("alike at one length", "another overload", "another input", "another flag", "a switch", "a kernel less"),
    ],
)
def test_all_else_is_refused(longest: TaskGraph, shortest: TaskGraph, further: TaskGraph) -> None:
    with pytest.raises((_NotAffine, ValueError)):
        varying_calls({64: longest, 33: shortest, 40: further})
