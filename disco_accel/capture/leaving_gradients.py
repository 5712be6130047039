"""Gradients that leave for host memory as soon as they are final, where an optimizer on the host waits for them."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection
from dataclasses import replace

import torch

from disco_accel.capture.captured_step import CapturedStep
from disco_accel.graph.check import after_gate
from disco_accel.graph.copies import is_transfer
from disco_accel.graph.spaces import Space, SpaceKind
from disco_accel.graph.taskgraph import Ref, TaskGraph, TensorSpec, Vertex, VertexKind
from disco_accel.graph.traits import MADE_FOREIGN
from disco_accel.graph.values import arrives_at_gate


def dense(spec: TensorSpec) -> bool:
    """Whether the elements fill their memory from the first to the last one, each a place of its own."""
    expected = 1
    for stride, size in sorted(zip(spec.stride, spec.shape, strict=True)):
        if size == 0:
            return False
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def with_leaving_gradients(captured: CapturedStep) -> CapturedStep:
    """Return ``captured`` with a transfer behind each gradient to the memory that the step is given for it.

    A gradient that shares its storage, or does not fill it, has none: it is a kept value as before.
    """
    leaving = _leaving(captured)
    if not leaving:
        return captured
    held = {value.ref[0] for value in (*captured.outputs, *captured.gradients) if value.ref not in leaving}
    effect = "gradients to host memory as soon as they are final"
    return captured.rewritten("leaving gradients", effect, _with_transfers(captured.graph, leaving, held))


def leaving_by(graph: TaskGraph) -> dict[Ref, int]:
    """Gradient → the transfer that takes it to the user's memory."""
    transfers = (vertex for vertex in graph.vertices if is_transfer(vertex))
    return {vertex.inputs[0]: vertex.id for vertex in transfers if vertex.traits == MADE_FOREIGN}


def _leaving(captured: CapturedStep) -> set[Ref]:
    by_id = {vertex.id: vertex for vertex in captured.graph.vertices}
    uses = Counter(value.ref for value in (*captured.outputs, *captured.gradients))
    return {
        gradient.ref
        for gradient in captured.gradients
        if uses[gradient.ref] == 1 and _is_whole(gradient.spec, by_id[gradient.ref[0]], gradient.ref[1])
    }


def _is_whole(spec: TensorSpec, producer: Vertex, output: int) -> bool:
    """Whether ``spec`` is all of an output of a kernel."""
    nbytes = math.prod(spec.shape) * getattr(torch, spec.dtype).itemsize
    whole = not spec.offset and nbytes == producer.sizes[output]
    return producer.kind is VertexKind.KERNEL and whole and dense(spec)


def _with_transfers(graph: TaskGraph, leaving: Collection[Ref], held: Collection[int]) -> TaskGraph:
    """``held``: vertices of which the user wants another output too, or a gradient that does not leave."""
    host = max(device.id for device in graph.devices) + 1
    fresh = itertools.count(max(vertex.id for vertex in graph.vertices) + 1)
    behind = after_gate(graph.vertices)
    # The memory that a transfer writes to is brought with what arrives late.
    late = tuple(vertex.id for vertex in graph.vertices if arrives_at_gate(vertex))[:1]
    vertices: list[Vertex] = []
    for vertex in graph.vertices:
        refs = [(vertex.id, output) for output in range(len(vertex.sizes)) if (vertex.id, output) in leaving]
        vertices.append(replace(vertex, keep=False) if refs and vertex.id not in held else vertex)
        for ref in refs:
            copy = Vertex(next(fresh), VertexKind.COPY, host, "gradient", (ref,), (vertex.sizes[ref[1]],))
            after = () if vertex.id in behind else late
            vertices.append(replace(copy, source=vertex.space, traits=MADE_FOREIGN, after=after))
    spaces = (*graph.spaces, Space(host, graph.devices[0].alignment, kind=SpaceKind.HOST))
    return replace(graph, spaces=spaces, vertices=tuple(vertices))
