"""A training step that changes its own weights: layers, their gradients, and an update kernel for each layer."""

from __future__ import annotations

from dataclasses import dataclass, replace

from disco_accel.graph.check import check_taskgraph
from disco_accel.graph.spaces import Space, SpaceKind
from disco_accel.graph.taskgraph import Ref, TaskGraph, Vertex, VertexKind
from disco_accel.graph.traits import FOREIGN, FROZEN, STATE, Traits


@dataclass(frozen=True, slots=True)
class UpdateShape:
    """Bytes of a layer's weight and moment, of its frozen weight and of its activation; seconds of a kernel.

    ``updated``: the first so many layers, counted from the loss, are updated; None = all.
    """

    layers: int = 4
    weight: int = 1 << 20
    frozen: int = 1 << 20
    activation: int = 1 << 18
    seconds: float = 1e-3
    updated: int | None = None


def update_graph(shape: UpdateShape, memory: int) -> TaskGraph:
    """Return one step: forward, backward, and after each layer's gradient an update that writes over weight and moment.

    What is updated lives over steps; the loss is kept.
    """
    maker = _Maker()
    x = maker.add("x", (), (shape.activation,), traits=FOREIGN)
    weights = [maker.add(f"w{i}", (), (shape.weight,), traits=STATE) for i in range(shape.layers)]
    moments = [maker.add(f"m{i}", (), (shape.weight,), traits=STATE) for i in range(shape.layers)]
    frozen = [maker.add(f"f{i}", (), (shape.frozen,), traits=FROZEN) for i in range(shape.layers)]
    inputs = []
    for weight, fixed in zip(weights, frozen, strict=True):
        inputs.append(x)
        x = maker.add("layer", (x, weight, fixed), (shape.activation,), shape.seconds)
    maker.add("loss", (x,), (4,), 0.0, keep=True)
    gradient = x
    left = shape.layers if shape.updated is None else shape.updated
    for i in reversed(range(shape.layers)):
        of_weight = maker.add("weight gradient", (gradient, inputs[i]), (shape.weight,), shape.seconds / 2)
        gradient = maker.add("input gradient", (gradient, weights[i], frozen[i]), (shape.activation,), shape.seconds)
        if left:
            left -= 1
            both = (shape.weight, shape.weight)
            state = (weights[i], moments[i], of_weight)
            maker.add("update", state, both, shape.seconds / 4, inplace=((0, 0), (1, 1)))
    return check_taskgraph(TaskGraph("update", (Space(0, memory),), tuple(maker.vertices)))


def host_update_graph(shape: UpdateShape, memory: int, *, at_head: bool, pieces: int = 1) -> TaskGraph:
    """Return the step of ``update_graph`` with updates on the host: weights change at their homes, moments never leave.

    ``at_head``: gradients of the step before are updated with first, and handed out by this one; else each update
    follows its gradient, which a transfer takes to the host. ``pieces``: kernels of one update, each over all of it.
    """
    maker = _Maker()
    x = maker.add("x", (), (shape.activation,), traits=FOREIGN)
    weights = [maker.add(f"w{i}", (), (shape.weight,), traits=STATE) for i in range(shape.layers)]
    moments = [maker.add(f"m{i}", (), (shape.weight,), traits=STATE, device=1) for i in range(shape.layers)]
    before = [maker.add(f"g{i}", (), (shape.weight,), traits=FOREIGN, device=1) for i in range(shape.layers)]
    frozen = [maker.add(f"f{i}", (), (shape.frozen,), traits=FROZEN) for i in range(shape.layers)]

    def update(weight: Ref, moment: Ref, gradient: Ref) -> Ref:
        both = (shape.weight, shape.weight)
        for _ in range(pieces):
            values, seconds = (weight, moment, gradient), shape.seconds / pieces
            weight = maker.add("update", values, both, seconds, inplace=((0, 0), (1, 1)), device=1)
            moment = (weight[0], 1)
        return weight

    if at_head:
        weights = [update(*each) for each in zip(weights, moments, before, strict=True)]
    inputs = []
    for weight, fixed in zip(weights, frozen, strict=True):
        inputs.append(x)
        x = maker.add("layer", (x, weight, fixed), (shape.activation,), shape.seconds)
    maker.add("loss", (x,), (4,), 0.0, keep=True)
    gradient = x
    for i in reversed(range(shape.layers)):
        of_weight = maker.add(
            "weight gradient", (gradient, inputs[i]), (shape.weight,), shape.seconds / 2, keep=at_head
        )
        gradient = maker.add("input gradient", (gradient, weights[i], frozen[i]), (shape.activation,), shape.seconds)
        if not at_head:
            there = maker.add("gradient to host", (of_weight,), (shape.weight,), device=1, kind=VertexKind.COPY)
            update(weights[i], moments[i], there)
    devices = (Space(0, memory), Space(1, 1 << 40, kind=SpaceKind.HOST))
    return check_taskgraph(TaskGraph("host update", devices, tuple(maker.vertices)))


class _Maker:
    def __init__(self) -> None:
        self.vertices: list[Vertex] = []

    def add(
        self,
        op: str,
        inputs: tuple[Ref, ...],
        sizes: tuple[int, ...],
        seconds: float | None = None,
        *,
        traits: Traits | None = None,
        keep: bool = False,
        inplace: tuple[tuple[int, int], ...] = (),
        device: int = 0,
        kind: VertexKind = VertexKind.KERNEL,
    ) -> Ref:
        kind = kind if traits is None else VertexKind.INPUT
        vertex = Vertex(
            len(self.vertices), kind, device, op, inputs, sizes, seconds, traits or Traits(), keep=keep, inplace=inplace
        )
        if kind is VertexKind.COPY:
            vertex = replace(vertex, source=self.vertices[inputs[0][0]].space)
        self.vertices.append(vertex)
        return (vertex.id, 0)
