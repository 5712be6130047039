"""Puts norms of gradients into a step's graph, each made while its gradient is on the device, for clipping."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from disco_accel.graph.taskgraph import OpCall, OpResult, Ref, TaskGraph, TensorArg, TensorSpec, Vertex, VertexKind

NORM_TYPE = 2.0
"""Of the norms that are made in plans."""


@dataclass(frozen=True)
class GraphWithNorms:
    """``graph`` with norms. ``transfers``: those whose gradients' norms ``value`` holds one behind the other, laid out
    as ``spec``. ``kernels``: those that were added."""

    graph: TaskGraph
    transfers: tuple[int, ...]
    value: Ref
    spec: TensorSpec
    kernels: frozenset[int]


def with_norms(graph: TaskGraph, specs: Mapping[int, TensorSpec]) -> GraphWithNorms | None:
    """Return ``graph`` with the norm of what each transfer of ``specs`` takes to the user's memory; None for none, or
    if they have several dtypes. ``specs``: how it lies, filling its value."""
    dtypes = {spec.dtype for spec in specs.values()}
    if len(dtypes) != 1:
        return None
    scalar = TensorSpec(dtypes.pop(), (), ())
    size = _bytes(scalar)
    by_id = {vertex.id: vertex for vertex in graph.vertices}
    fresh = max(by_id) + 1
    calls: dict[int, OpCall] = {}
    norms: dict[int, Vertex] = {}
    vertices: list[Vertex] = []
    for vertex in graph.vertices:
        if vertex.id in specs:
            (taken,) = vertex.inputs
            norm = Vertex(fresh, VertexKind.KERNEL, by_id[taken[0]].space, _NORM, (taken,), (size,))
            calls[fresh] = _norm(specs[vertex.id], scalar)
            norms[vertex.id] = norm
            vertices.append(norm)
            fresh += 1
        vertices.append(vertex)
    device = next(device.id for device in graph.devices if not device.is_host_device)
    together: list[int] = []
    for norm in norms.values():
        together.append(norm.id)
        if norm.space != device:
            together[-1] = fresh
            copy = Vertex(fresh, VertexKind.COPY, device, "to_device", ((norm.id, 0),), (size,), source=norm.space)
            vertices.append(copy)
            fresh += 1
    made = tuple((vertex_id, 0) for vertex_id in together)
    vertices.append(Vertex(fresh, VertexKind.KERNEL, device, _STACK, made, (size * len(made),), keep=True))
    spec = TensorSpec(scalar.dtype, (len(made),), (1,))
    parts = tuple(TensorArg(position, scalar) for position in range(len(made)))
    calls[fresh] = OpCall(_STACK, "default", (parts, 0), (OpResult(0, spec),), module="clipping")
    done = replace(graph, vertices=tuple(vertices), ops={**graph.ops, **calls})
    return GraphWithNorms(done, tuple(norms), (fresh, 0), spec, frozenset(calls))


_NORM, _STACK = "aten::linalg_vector_norm", "aten::stack"


def _norm(spec: TensorSpec, scalar: TensorSpec) -> OpCall:
    """As ``torch.linalg.vector_norm`` calls it, and ``torch._foreach_norm`` for each tensor."""
    args = (TensorArg(0, spec), NORM_TYPE, None, False, None)
    return OpCall(_NORM, "default", args, (OpResult(0, scalar),), module="clipping")


def _bytes(spec: TensorSpec) -> int:
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return math.prod(spec.shape) * dtype.itemsize
