"""Numbers of a graph that depend on a length, such as that of a cache: each is affine in it.

Two graphs of one forward, at its longest and at its shortest length, tell all numbers between. Sizes and strides of
tensors may differ, and numbers among the arguments of calls. All else has to be equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from disco_accel.errors import CaptureError
from disco_accel.graph.taskgraph import OpCall, OpResult, RngSite, TaskGraph, TensorArg, TensorSpec, VertexKind
from disco_accel.graph.value_numbering import value_numbers

STATIC = 'pass cache_implementation="static" to generate'
"""A remedy that messages name."""


class _NotAffine(Exception):
    """Something in a graph does not depend on the length as ``_Between`` knows it. Its argument names the place."""


@dataclass(frozen=True, slots=True)
class _Between:
    """Numbers at any length from ``shortest`` to ``longest``, by those at these two."""

    longest: int
    shortest: int

    def at(self, length: int, longest: Any, shortest: Any) -> Any:
        """The value at ``length`` of what has these values at the two ends: a number, or a tuple of such values."""
        if isinstance(longest, tuple):
            if longest == shortest:
                return longest
            return tuple([self.at(length, one, other) for one, other in zip(longest, shortest, strict=True)])
        if longest == shortest:
            return longest
        return longest - (longest - shortest) // (self.longest - self.shortest) * (self.longest - length)

    def graph_at(self, length: int, longest: TaskGraph, shortest: TaskGraph) -> TaskGraph:
        """The graph at ``length`` of what has these at the two ends."""
        vertices = tuple(
            replace(one, sizes=self.at(length, one.sizes, other.sizes))
            for one, other in zip(longest.vertices, shortest.vertices, strict=True)
        )
        ops = {vertex: self._call_at(length, call, shortest.ops[vertex]) for vertex, call in longest.ops.items()}
        return replace(longest, vertices=vertices, ops=ops)

    def _call_at(self, length: int, one: Any, other: Any) -> Any:
        """The same of a call, or of a part of one."""
        if isinstance(one, tuple):
            return tuple([self._call_at(length, a, b) for a, b in zip(one, other, strict=True)])
        if isinstance(one, (OpCall, OpResult, TensorArg)):
            names = [each.name for each in fields(one)]
            return replace(one, **{n: self._call_at(length, getattr(one, n), getattr(other, n)) for n in names})
        if isinstance(one, TensorSpec):
            return self.spec_at(length, one, other)
        return one if one == other else self.at(length, one, other)

    def spec_at(self, length: int, longest: TensorSpec, shortest: TensorSpec) -> TensorSpec:
        """The same of the layout of a tensor."""
        ends = [(spec.shape, spec.stride, spec.offset) for spec in (longest, shortest)]
        return TensorSpec(longest.dtype, *self.at(length, *ends))

    def require_affine(self, longest: Any, shortest: Any) -> None:
        """Raise _NotAffine unless ``at`` can tell the values between these."""
        if type(longest) is not type(shortest):
            raise _NotAffine
        if isinstance(longest, tuple):
            if len(longest) != len(shortest):
                raise _NotAffine
            for one, other in zip(longest, shortest, strict=True):
                self.require_affine(one, other)
        elif type(longest) is int:
            # Sizes are largest at the longest length: the memory that a plan has for them is enough for all.
            if longest < shortest or (longest - shortest) % (self.longest - self.shortest):
                raise _NotAffine
        elif longest != shortest:
            raise _NotAffine


@dataclass(frozen=True, slots=True)
class _VaryingCall:
    """The call of a kernel at the longest length, and at the shortest."""

    longest: OpCall
    shortest: OpCall


def varying_calls(graphs: Mapping[int, TaskGraph]) -> dict[int, _VaryingCall]:
    """The calls that depend on the length, by kernel, of one forward's ``graphs`` by length: those at both ends tell
    how, and all others have to agree.

    Raises:
        _NotAffine: they do not, or the graphs differ in more than numbers.
    """
    between = _Between(max(graphs), min(graphs))
    longest, shortest = graphs[between.longest], graphs[between.shortest]
    rows = [_rows(longest), _rows(shortest)]
    for (place, one), (_, other) in zip(*rows, strict=True):
        try:
            between.require_affine(one, other)
        except _NotAffine:
            raise _NotAffine(place) from None
    for length, graph in graphs.items():
        for (place, one), (_, other), (_, here) in zip(*rows, _rows(graph), strict=True):
            if between.at(length, one, other) != here:
                raise _NotAffine(place)
    alike = value_numbers(longest)
    for graph in graphs.values():
        pairs_of_numbers = {(alike[vertex], number) for vertex, number in value_numbers(graph).items()}
        if len(pairs_of_numbers) > len(set(alike.values())):
            # A plan computes once what several kernels compute alike at the longest.
            raise _NotAffine("kernels that are alike at one length")
    pairs = ((vertex, call, shortest.ops[vertex]) for vertex, call in longest.ops.items())
    return {vertex: _VaryingCall(one, other) for vertex, one, other in pairs if one != other}


def _rows(graph: TaskGraph) -> list[tuple[str, tuple[Any, ...]]]:
    """For each vertex the module that issued it, and all that is in it. Numbers that must not vary are strings."""
    rows = []
    for vertex in graph.vertices:
        call = graph.ops.get(vertex.id)
        place = vertex.op if call is None else call.module or call.name
        rows.append((place, (repr(replace(vertex, sizes=())), vertex.sizes, _plain(call))))
    return rows


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple([_plain(item) for item in value])
    if isinstance(value, TensorArg):
        return str(value.input), _plain(value.spec)
    if isinstance(value, OpResult):
        return str(value.output), _plain(value.spec)
    if isinstance(value, RngSite):
        return repr(value)
    if isinstance(value, (OpCall, TensorSpec)) or hasattr(value, "__dataclass_fields__"):
        return tuple([_plain(getattr(value, each.name)) for each in fields(value)])
    return value


@dataclass(frozen=True)
class _Lengths:
    """The part of a captured forward that depends on a length.

    ``graphs``: the forward by length. ``calls``: by kernel of these. ``inputs``: layouts at the longest and at the
    shortest length of tensors of the batch, by name; ``vertices``: their INPUTs.
    """

    between: _Between
    graphs: Mapping[int, TaskGraph]
    calls: Mapping[int, _VaryingCall]
    inputs: Mapping[str, tuple[TensorSpec, TensorSpec]]
    vertices: frozenset[int]

    def found_in(self, graph: TaskGraph) -> dict[int, int]:
        """Kernel of ``graph``, which passes have made of that at the longest → the kernel of ``calls`` that it is, or
        repeats.

        Raises:
            CaptureError: a pass has cut, joined or dropped one of them: what it made may depend on the length.
        """
        known = {id(call.longest): kernel for kernel, call in self.calls.items()}
        found = {kernel: known[id(call)] for kernel, call in graph.ops.items() if id(call) in known}
        first = self.graphs[self.between.longest]
        as_captured = {id(call) for call in first.ops.values()}
        varying = found.keys() | self.vertices
        changed = [v for v in graph.vertices if v.id in graph.ops and id(graph.ops[v.id]) not in as_captured]
        reads_them = any(producer in varying for vertex in changed for producer, _ in vertex.inputs)
        # A plan leaves out kernels that compute what others have.
        numbers = value_numbers(first)
        missing = {numbers[kernel] for kernel in known.values()} - {numbers[kernel] for kernel in found.values()}
        if missing or reads_them:
            raise CaptureError(
                "past_key_values: kernels that depend on the length of a cache that grows would be cut or joined; set "
                f"chunks: 1, or {STATIC}"
            )
        copies = (vertex for vertex in graph.vertices if vertex.kind is VertexKind.COPY)
        if any(producer in self.vertices for vertex in copies for producer, _ in vertex.inputs):
            # It would have as many bytes at each length.
            raise CaptureError(f"past_key_values: a cache that grows would be copied to another device; {STATIC}")
        return found
