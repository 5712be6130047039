"""Passes: a task graph in, a task graph out. They have one signature and run from lists that note the changes of
each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from disco_accel.graph.taskgraph import TaskGraph, Vertex, VertexKind, with_memory
from disco_accel.sizes import format_size


@dataclass(frozen=True, slots=True)
class GraphPass:
    """``run`` returns a graph made from the one that it gets, which it leaves as it is. ``effect`` in a line. A pass
    that needs facts, such as measured seconds, is made by a function that is given them. A vertex that the captured
    step names (an input, an output, a gradient) keeps its id, and every kernel its call."""

    name: str
    effect: str
    run: Callable[[TaskGraph], TaskGraph]


@dataclass(frozen=True, slots=True)
class _Totals:
    """``value_bytes`` of all outputs, with or without readers; ``seconds``: the kernels', one after the other."""

    vertices: int
    value_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class AppliedPass:
    """The effect of a pass on one graph. ``changed``: number of vertices that were ``added``, ``removed``, or are at
    another place in the ``order``; of those with another value of a field, under its name; of ``calls`` and ``spaces``
    that differ."""

    name: str
    effect: str
    before: _Totals
    after: _Totals
    changed: Mapping[str, int]

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {**asdict(self), "changed": dict(self.changed)}


def run_passes(graph: TaskGraph, passes: Iterable[GraphPass], applied: list[AppliedPass] | None = None) -> TaskGraph:
    """Run ``passes`` in their order, each on the result of the one before. ``applied`` gets a record of each."""
    for each in passes:
        result = each.run(graph)
        if applied is not None:
            applied.append(applied_pass(each.name, each.effect, graph, result))
        graph = result
    return graph


def applied_pass(name: str, effect: str, before: TaskGraph, after: TaskGraph) -> AppliedPass:
    """The record of a pass of this ``name``."""
    return AppliedPass(name, effect, totals(before), totals(after), changes(before, after))


def totals(graph: TaskGraph) -> _Totals:
    """Count ``graph``."""
    return _Totals(
        len(graph.vertices),
        sum(sum(vertex.sizes) for vertex in graph.vertices),
        sum(vertex.duration or 0.0 for vertex in graph.vertices if vertex.kind is VertexKind.KERNEL),
    )


def changes(before: TaskGraph, after: TaskGraph) -> dict[str, int]:
    """How ``after`` differs from ``before``, as ``AppliedPass.changed``; empty if they are equal."""
    old = {vertex.id: vertex for vertex in before.vertices}
    new = {vertex.id: vertex for vertex in after.vertices}
    orders = zip((i for i in old if i in new), (i for i in new if i in old), strict=True)
    counts = {
        "added": sum(i not in old for i in new),
        "removed": sum(i not in new for i in old),
        "order": sum(a != b for a, b in orders),
    }
    for id_, vertex in new.items():
        if id_ in old and vertex is not old[id_]:
            for name in _differing(old[id_], vertex):
                counts[name] = counts.get(name, 0) + 1
    if before.ops is not after.ops:
        calls = before.ops.keys() | after.ops.keys()
        counts["calls"] = sum(before.ops.get(i) != after.ops.get(i) for i in calls)
    counts["spaces"] = len({space.id for space in {*before.spaces} ^ {*after.spaces}})
    return {name: count for name, count in counts.items() if count}


def _differing(one: Vertex, other: Vertex) -> list[str]:
    return [f.name for f in fields(Vertex) if getattr(one, f.name) != getattr(other, f.name)]


def arena_of(memory: int) -> GraphPass:
    """The pass that gives every device an arena of ``memory`` bytes."""
    return GraphPass("arena", f"memory of {format_size(memory)}", lambda graph: with_memory(graph, lambda _: memory))
