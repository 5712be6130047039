"""A forward captured at several lengths, such as those of a cache that grows: one plan is for all between them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from disco_accel.capture.captured_step import CapturedStep, InputSource
from disco_accel.errors import CaptureError
from disco_accel.graph.lengths import _Between, _NotAffine, _VaryingCall, varying_calls
from disco_accel.graph.taskgraph import TaskGraph, TensorSpec, VertexKind
from disco_accel.graph.value_numbering import value_numbers


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
                'chunks: 1, or pass cache_implementation="static" to generate'
            )
        return found


def lengths_of(captures: Mapping[int, CapturedStep]) -> _Lengths:
    """``captures``: one forward, by length.

    Raises:
        CaptureError: it does not depend on the length by numbers that are affine in it, or a result does at all.
    """
    between = _Between(max(captures), min(captures))
    longest, shortest = captures[between.longest], captures[between.shortest]
    graphs = {length: captured.graph for length, captured in captures.items()}
    try:
        if len({len(graph.vertices) for graph in graphs.values()}) > 1:
            raise _NotAffine("the number of kernels")
        calls = varying_calls(graphs)
        for captured in captures.values():
            _require_same_inputs(longest, captured)
    except _NotAffine as error:
        raise CaptureError(
            f"past_key_values: the forward does not depend on the cache's length by sizes alone ({error}); pass "
            'cache_implementation="static" to generate'
        ) from error
    inputs: dict[str, tuple[TensorSpec, TensorSpec]] = {}
    for one, other in zip(longest.bindings, shortest.bindings, strict=True):
        if one.spec == other.spec:
            continue
        if one.source is not InputSource.BATCH:
            raise CaptureError(f"{one.name}: its size depends on the length of a cache that grows; leave it out")
        inputs[one.name] = one.spec, other.spec
    vertices = frozenset(binding.vertex for binding in longest.bindings if binding.name in inputs)
    _require_kernels_read(longest, vertices)
    return _Lengths(between, graphs, calls, inputs, vertices)


def _require_same_inputs(one: CapturedStep, other: CapturedStep) -> None:
    for a, b in zip(one.bindings, other.bindings, strict=True):
        if (a.vertex, a.source, a.name) != (b.vertex, b.source, b.name):
            raise _NotAffine(a.name)
    for name, constant in one.constants.items():
        again = other.constants[name]
        if constant is not again and not torch.equal(constant, again):
            raise _NotAffine(name)
    if one.structure != other.structure:
        raise _NotAffine("the result")


def _require_kernels_read(captured: CapturedStep, inputs: Collection[int]) -> None:
    """A copy would have as many bytes at each length."""
    for vertex in captured.graph.vertices:
        if vertex.kind is VertexKind.COPY and any(producer in inputs for producer, _ in vertex.inputs):
            raise CaptureError(f"past_key_values: {vertex.op or 'a copy'} copies a tensor that grows with the cache")
