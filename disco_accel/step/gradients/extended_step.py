"""Puts sums and norms of gradients into a captured step's graph, with its kernels' seconds: input of another plan.

Sums: the gradient in ``.grad`` arrives at the gate as memory of the user's, the new one is added, and the sum is
written over it. It comes while the gradient before is made, so that no kernel waits for it on a link that has time.
Norms: each is made while its gradient is on the device, for clipping.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from disco_accel.capture.captured_step import CapturedStep
from disco_accel.graph.taskgraph import OpCall, OpResult, Ref, TaskGraph, TensorArg, TensorSpec, Vertex, VertexKind
from disco_accel.graph.traits import LATE_FOREIGN
from disco_accel.graph.values import handed_out_at_gate
from disco_accel.measure.record import OpRecord, measurements, record
from disco_accel.step.compile.compiled_step import CompiledStep, PlannedNorms
from disco_accel.step.compile.pipeline import PlannedStep

NORM_TYPE = 2.0
"""Of the norms that are made in plans."""

_ADD, _NORM, _STACK = "aten::add_", "aten::linalg_vector_norm", "aten::stack"


@dataclass(frozen=True)
class ExtendedStep:
    """``captured``, to be planned. ``old``: by transfer to the user's memory, the INPUT of the sum so far. ``norms``:
    where they are when a step has ended, None if it has none."""

    captured: CapturedStep
    records: Mapping[int, OpRecord]
    old: Mapping[int, int] = field(default_factory=dict)
    norms: PlannedNorms | None = None

    def step_fields(self, plain: CompiledStep, planned: PlannedStep, began: float, recorded: float) -> dict[str, Any]:
        """Fields of a step with the budget of ``plain`` that runs this one as ``planned``: made from ``began`` on, by
        ``time.perf_counter``, and planned from ``recorded`` on."""
        seconds = {"record": recorded - began, "plan": time.perf_counter() - recorded}
        own = {"captured": self.captured, "records": self.records, "norms": self.norms, "budget": plain.budget}
        step = plain.with_plan(planned, seconds=seconds, **own)
        return {field.name: getattr(step, field.name) for field in fields(CompiledStep)}


def leaving_specs(step: CompiledStep) -> dict[int, tuple[str, TensorSpec]]:
    """Name and layout of the gradients that a plan takes to the user's memory, by transfer."""
    transfers = step.transfers
    return {transfers[g.ref]: (g.name, g.spec) for g in step.captured.gradients if g.ref in transfers}


def extended(step: CompiledStep, *, accumulate: bool, norms: bool) -> ExtendedStep:
    """``step``, whose gradients leave, as it was captured, with accumulation or norms. Raises as ``record``."""
    leaving = leaving_specs(step)
    specs = {transfer: spec for transfer, (_, spec) in leaving.items()}
    plain = step.captured
    graph, old = _with_accumulation(plain.graph, specs) if accumulate else (plain.graph, {})
    planned = None
    if norms and len({spec.dtype for spec in specs.values()}) == 1:
        graph, transfers, value, spec = _with_norms(graph, specs)
        planned = tuple(leaving[t][0] for t in transfers), value, spec
    kernels = frozenset(graph.ops.keys() - plain.graph.ops.keys())
    if not kernels:
        return ExtendedStep(plain, step.records)
    engine = step.engine
    own, host = engine.compute_threads, engine.host_threads
    measured = record(graph, device=engine.device, compute_threads=own, host_threads=host, only=kernels)
    captured = plain.rewritten("gradients", "their sums and norms", measurements(measured).run(graph))
    return ExtendedStep(captured, {**step.records, **measured}, old, planned)


def _with_accumulation(graph: TaskGraph, specs: Mapping[int, TensorSpec]) -> tuple[TaskGraph, dict[int, int]]:
    """Return ``graph`` where the transfers of ``specs``, to the user's memory, take sums; by transfer, the INPUT of the
    sum so far.

    ``specs``: how the gradient of each of them lies, which fills its value.
    """
    by_id = {vertex.id: vertex for vertex in graph.vertices}
    position = {vertex.id: place for place, vertex in enumerate(graph.vertices)}
    # Nothing behind the gate may stand before what is handed out there.
    first = max((position[v.id] + 1 for v in graph.vertices if handed_out_at_gate(v)), default=0)
    fresh = max(by_id, default=-1) + 1
    calls: dict[int, OpCall] = {}
    inputs: dict[int, int] = {}
    sums: dict[int, Ref] = {}
    before: dict[int, list[Vertex]] = {}
    at_begin: list[Vertex] = []
    behind: dict[int, list[Vertex]] = {}
    previous = first
    for transfer in sorted(specs, key=lambda transfer: position[by_id[transfer].inputs[0][0]]):
        gradient = by_id[transfer].inputs[0]
        device, home, size = by_id[gradient[0]].space, by_id[transfer].space, by_id[transfer].sizes
        old = Vertex(fresh, VertexKind.INPUT, home, "accumulated", (), size, traits=LATE_FOREIGN)
        loaded = Vertex(fresh + 1, VertexKind.COPY, device, "to_device", ((old.id, 0),), size, source=home)
        taken = ((loaded.id, 0), gradient)
        added = Vertex(fresh + 2, VertexKind.KERNEL, device, _ADD, taken, size, inplace=((0, 0),))
        fresh += 3
        at_begin.append(old)
        before.setdefault(previous, []).append(loaded)
        behind.setdefault(gradient[0], []).append(added)
        # As autograd adds to ``.grad``: the sum so far, input 0, gets a gradient, input 1.
        args = (TensorArg(0, specs[transfer]), TensorArg(1, specs[transfer]), 1)
        calls[added.id] = OpCall(_ADD, "Tensor", args, (None,), module="accumulation")
        inputs[transfer] = old.id
        sums[transfer] = (added.id, 0)
        previous = max(first, position[gradient[0]])
    vertices: list[Vertex] = at_begin
    for place, vertex in enumerate(graph.vertices):
        vertices += before.get(place, ())
        total = sums.get(vertex.id)
        vertices.append(vertex if total is None else replace(vertex, inputs=(total,)))
        vertices += behind.get(vertex.id, ())
    return replace(graph, vertices=tuple(vertices), ops={**graph.ops, **calls}), inputs


def _with_norms(
    graph: TaskGraph, specs: Mapping[int, TensorSpec]
) -> tuple[TaskGraph, tuple[int, ...], Ref, TensorSpec]:
    """Return ``graph`` with the norm of the gradient that each transfer of ``specs`` takes to the user's memory; those
    transfers, and the value that holds their norms one behind the other, with its layout.

    ``specs``: how each gradient, all of one dtype, lies and fills its value.
    """
    scalar = TensorSpec(next(iter(specs.values())).dtype, (), ())
    size = int(getattr(torch, scalar.dtype).itemsize)
    by_id = {vertex.id: vertex for vertex in graph.vertices}
    fresh = max(by_id) + 1
    calls: dict[int, OpCall] = {}
    norms: dict[int, Vertex] = {}
    vertices: list[Vertex] = []
    for vertex in graph.vertices:
        if vertex.id in specs:
            (taken,) = vertex.inputs
            norm = Vertex(fresh, VertexKind.KERNEL, by_id[taken[0]].space, _NORM, (taken,), (size,))
            # As ``torch.linalg.vector_norm`` calls it, and ``torch._foreach_norm`` for each tensor.
            args = (TensorArg(0, specs[vertex.id]), NORM_TYPE, None, False, None)
            calls[fresh] = OpCall(_NORM, "default", args, (OpResult(0, scalar),), module="clipping")
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
    return done, tuple(norms), (fresh, 0), spec
