"""A step on parts of a batch: its graph once for each part, and sums of losses and gradients in the order of the parts.

Accumulating gradients over the parts computes the same, with the same bits, as long as each part's loss is its share of
the whole: a sum divided by the number of items of all parts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from disco_accel.capture.captured_step import CapturedStep, InputSource, ValueBinding
from disco_accel.capture.leaving_gradients import dense
from disco_accel.errors import CaptureError
from disco_accel.graph.check import after_gate
from disco_accel.graph.taskgraph import (
    OpCall,
    OpResult,
    Ref,
    RngSite,
    TaskGraph,
    TensorArg,
    TensorSpec,
    Vertex,
    VertexKind,
)
from disco_accel.graph.traits import MADE_FOREIGN


@dataclass(frozen=True)
class StepOnParts:
    """``captured`` works on the whole batch. ``part_of``: vertex → the part whose work it is; sums have none."""

    captured: CapturedStep
    part_of: Mapping[int, int]


def on_parts(
    captured: CapturedStep, count: int, divided: Collection[str], itemsize: Callable[[str], int]
) -> StepOnParts:
    """``captured``, a training step on the first of ``count`` parts of a batch, on all of them. ``divided``: names of
    the batch whose rows are shared out; the parts have the others together, and all weights. ``itemsize``: bytes of an
    element by dtype. Raises CaptureError: the step returns more than a loss, or its backward draws random numbers."""
    made = _Parts(captured, count, divided, itemsize)
    effect = f"the same kernels for each of {count} parts of the batch; sums of losses and gradients"
    graph, bindings = made.graph(), tuple(made.bindings)
    outputs, gradients = made.outputs, made.gradients
    whole = captured.rewritten("parts", effect, graph, bindings=bindings, outputs=outputs, gradients=gradients)
    return StepOnParts(whole, made.part_of)


class _Parts:
    def __init__(
        self, captured: CapturedStep, count: int, divided: Collection[str], itemsize: Callable[[str], int]
    ) -> None:
        self._captured, self._count, self._itemsize = captured, count, itemsize
        self._graph = captured.graph
        if len(captured.outputs) != 1:
            names = ", ".join(output.name for output in captured.outputs)
            raise CaptureError(f"a step on parts of a batch returns its loss alone, this one {names}")
        self._fresh = itertools.count(max(vertex.id for vertex in self._graph.vertices) + 1)
        self._behind = after_gate(self._graph.vertices)
        self._calls = dict(self._graph.ops)
        own = {b.vertex for b in captured.bindings if b.source is InputSource.BATCH and b.name in divided}
        shared = {v.id for v in self._graph.vertices if v.kind is VertexKind.INPUT and v.id not in own}
        self._ids: list[dict[int, int]] = [{vertex.id: vertex.id for vertex in self._graph.vertices}]
        for _ in range(1, count):
            self._ids.append({v.id: v.id if v.id in shared else next(self._fresh) for v in self._graph.vertices})
        self.part_of = {
            ids[v.id]: part for part, ids in enumerate(self._ids) for v in self._graph.vertices if v.id not in shared
        }
        self.bindings = [
            replace(binding, vertex=ids[binding.vertex], part=part, parts=count) if binding.vertex in own else binding
            for part, ids in enumerate(self._ids)
            for binding in captured.bindings
            if not part or binding.vertex in own
        ]
        self._device = next(device.id for device in self._graph.devices if not device.is_host_device)
        self.outputs: tuple[ValueBinding, ...] = ()
        self.gradients: tuple[ValueBinding, ...] = ()

    def graph(self) -> TaskGraph:
        """All parts' forwards, the sum of their losses, then their backwards: no part's backward can begin before the
        sum of all losses has been handed out."""
        loss = self._captured.outputs[0]
        refs = list(dict.fromkeys(gradient.ref for gradient in self._captured.gradients))
        leaving = {v.inputs[0]: v for v in self._graph.vertices if v.traits == MADE_FOREIGN}
        handed_out = {loss.ref[0], *(ref[0] for ref in refs)}
        before, behind = list[Vertex](), list[Vertex]()
        draws: list[int] = []
        for part, ids in enumerate(self._ids):
            for vertex in self._graph.vertices:
                if vertex.traits == MADE_FOREIGN or (part and ids[vertex.id] == vertex.id):
                    continue
                clone = self._clone(vertex, part)
                if vertex.id in handed_out:
                    clone = replace(clone, out=False, keep=False)
                clone = self._in_turn(vertex, clone, part, draws)
                (behind if vertex.id in self._behind else before).append(clone)
        sums, self.outputs = self._sums([loss], out=True)
        before = _placed(before, sums)
        sums, self.gradients = self._sums(self._captured.gradients, out=False, leaving=leaving)
        return replace(self._graph, vertices=tuple(_placed([*before, *behind], sums)), ops=self._calls)

    def _clone(self, vertex: Vertex, part: int) -> Vertex:
        ids = self._ids[part]
        if not part:
            return vertex
        call = self._graph.ops.get(vertex.id)
        if call is not None:
            self._calls[ids[vertex.id]] = self._call(call, part)
        inputs = tuple((ids[producer], output) for producer, output in vertex.inputs)
        return replace(vertex, id=ids[vertex.id], inputs=inputs, after=tuple(ids[other] for other in vertex.after))

    def _call(self, call: OpCall, part: int) -> OpCall:
        if call.rng is None or call.rng.slot < 0:
            return call
        slots = 1 + max(each.rng.slot for each in self._graph.ops.values() if each.rng is not None)
        return replace(call, rng=RngSite(call.rng.slot + part * slots, call.rng.replay))

    def _in_turn(self, vertex: Vertex, clone: Vertex, part: int, draws: list[int]) -> Vertex:
        """``clone`` behind the last draw of the part before: accumulation draws forward by forward."""
        call = self._graph.ops.get(vertex.id)
        if call is None or call.rng is None or call.rng.replay:
            return clone
        if vertex.id in self._behind:
            raise CaptureError(
                f"{call.name} in module {call.module or '?'} draws random numbers in the backward, where parts of a "
                "batch would draw in another order; use parallel: layers with one micro-batch"
            )
        if part and len(draws) and self.part_of[draws[-1]] < part:
            clone = replace(clone, after=(*clone.after, draws[-1]))
        draws.append(clone.id)
        return clone

    def _sums(
        self, values: Sequence[ValueBinding], *, out: bool, leaving: Mapping[Ref, Vertex] | None = None
    ) -> tuple[list[Vertex], tuple[ValueBinding, ...]]:
        """Kernels that add up each of ``values`` over the parts, the first two first, and the bindings of the sums."""
        made, bindings = list[Vertex](), list[ValueBinding]()
        for value in values:
            spec = value.spec
            result = spec if dense(spec) or not spec.shape else _contiguous(spec)
            result = replace(result, offset=0)
            total, total_spec = value.ref, spec
            for part in range(1, self._count):
                producer, output = value.ref
                ref = self._ids[part][producer], output
                size = math.prod(spec.shape) * self._itemsize(spec.dtype)
                kernel = Vertex(next(self._fresh), VertexKind.KERNEL, self._device, _ADD, (total, ref), (size,))
                args = (TensorArg(0, total_spec), TensorArg(1, spec), 1)
                self._calls[kernel.id] = OpCall(_ADD, "Tensor", args, (OpResult(0, result),), module="parts")
                made.append(kernel)
                total, total_spec = (kernel.id, 0), result
            taken = (leaving or {}).get(value.ref)
            if taken is not None:
                made.append(replace(taken, inputs=(total,)))
            else:
                made[-1] = replace(made[-1], out=out, keep=not out)
            bindings.append(replace(value, ref=total, spec=total_spec))
        return made, tuple(bindings)


_ADD = "aten::add"


def _placed(vertices: Sequence[Vertex], sums: Sequence[Vertex]) -> list[Vertex]:
    """``vertices`` with each of ``sums`` right behind the last that it reads: a part's gradients live until then."""
    place = {vertex.id: position for position, vertex in enumerate(vertices)}
    behind: dict[int, list[Vertex]] = {}
    for each in sums:
        place[each.id] = max(place[producer] for producer, _ in each.inputs)
        behind.setdefault(place[each.id], []).append(each)
    return [each for position, vertex in enumerate(vertices) for each in (vertex, *behind.get(position, ()))]


def _contiguous(spec: TensorSpec) -> TensorSpec:
    stride, strides = 1, list[int]()
    for length in reversed(spec.shape):
        strides.insert(0, stride)
        stride *= max(length, 1)
    return TensorSpec(spec.dtype, spec.shape, tuple(strides))
