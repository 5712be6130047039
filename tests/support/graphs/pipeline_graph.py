"""A training step with its layers in a row over several devices and its batch in parts, activations checkpointed.

The loss is the sum of the parts', so that all forwards come before the gate and all backwards behind it: each device
computes the parts' forwards one after the other, waits for the loss, and computes their backwards.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from disco_accel.graph.check import check_taskgraph
from disco_accel.graph.spaces import Space
from disco_accel.graph.taskgraph import Ref, TaskGraph, Vertex, VertexKind
from disco_accel.graph.traits import FOREIGN, FROZEN, LATE, PER_STEP, Traits


@dataclass(frozen=True, slots=True)
class PipelineShape:
    """``layers`` of each of ``stages`` devices, ``parts`` of the batch. Bytes of a layer's ``weight``, of the
    ``activation`` of one part between two layers, and of a layer's ``gradient``. ``forward`` and ``backward``: seconds
    that a stage takes for one part."""

    stages: int = 4
    parts: int = 8
    layers: int = 4
    weight: int = 64 << 20
    activation: int = 4 << 20
    gradient: int = 1 << 18
    forward: float = 8e-3
    backward: float = 24e-3

    @property
    def ideal(self) -> float:
        """Seconds of a step in which no device waits for anything but the parts' way through the stages."""
        return (self.parts + self.stages - 1) * (self.forward + self.backward)

    @property
    def held(self) -> int:
        """Bytes of one stage's weights and of what its forwards keep for its backwards."""
        kept = (self.layers + 1) * self.parts * self.activation
        return self.layers * self.weight + kept


def pipeline_graph(shape: PipelineShape, memory: int) -> TaskGraph:
    """Return the step of ``shape`` on devices of ``memory`` bytes each, its serial order part by part.

    Weights are in host memory when the step begins, gradients are summed over the parts in their order and kept.
    """
    return _Pipeline(shape).graph(memory)


@dataclass
class _Pipeline:
    shape: PipelineShape
    vertices: list[Vertex] = field(default_factory=list)

    def graph(self, memory: int) -> TaskGraph:
        s = self.shape
        weights = [self._input(f"w{i}", i // s.layers, s.weight, FROZEN) for i in range(s.stages * s.layers)]
        kept: list[list[Ref]] = []
        losses: list[Ref] = []
        for part in range(s.parts):
            x = self._input(f"x{part}", 0, s.activation, FOREIGN)
            kept.append([])
            for i, weight in enumerate(weights):
                x = self._on(x, i // s.layers)
                kept[part].append(x)
                x = self._kernel("forward", i // s.layers, (x, weight), (s.activation,), s.forward / s.layers)
            losses.append(self._kernel("loss", s.stages - 1, (x,), (4,)))
            kept[part].append(x)
        total = self._kernel("sum", s.stages - 1, tuple(losses), (4,))
        self.vertices[-1] = replace(self.vertices[-1], out=True)
        tangent = self._input("tangent", s.stages - 1, 4, LATE)
        sums: dict[int, Ref] = {}
        for part in range(s.parts):
            seed = (tangent, kept[part][-1], total)
            gradient = self._kernel("loss backward", s.stages - 1, seed, (s.activation,))
            for i in reversed(range(len(weights))):
                gradient = self._on(gradient, i // s.layers)
                read = gradient, kept[part][i], weights[i]
                sizes = s.activation, s.gradient
                gradient = self._kernel("backward", i // s.layers, read, sizes, s.backward / s.layers)
                of_weight = gradient[0], 1
                if part:
                    of_weight = self._kernel("add", i // s.layers, (sums[i], of_weight), (s.gradient,))
                sums[i] = of_weight
        for ref in sums.values():
            self.vertices[ref[0]] = replace(self.vertices[ref[0]], keep=True)
        return check_taskgraph(
            TaskGraph("pipeline", tuple(Space(i, memory) for i in range(s.stages)), tuple(self.vertices))
        )

    def _input(self, op: str, device: int, size: int, traits: Traits) -> Ref:
        return self._add(VertexKind.INPUT, op, device, (), (size,), traits=traits)

    def _kernel(
        self, op: str, device: int, inputs: tuple[Ref, ...], sizes: tuple[int, ...], seconds: float = 0.0
    ) -> Ref:
        return self._add(VertexKind.KERNEL, op, device, inputs, sizes, seconds)

    def _on(self, ref: Ref, device: int) -> Ref:
        """``ref``, or a transfer of it to ``device``."""
        source = self.vertices[ref[0]]
        if source.space == device:
            return ref
        sent = self._add(VertexKind.COPY, "send", device, (ref,), (source.sizes[ref[1]],))
        self.vertices[sent[0]] = replace(self.vertices[sent[0]], source=source.space)
        return sent

    def _add(
        self,
        kind: VertexKind,
        op: str,
        device: int,
        inputs: tuple[Ref, ...],
        sizes: tuple[int, ...],
        seconds: float | None = None,
        traits: Traits = PER_STEP,
    ) -> Ref:
        vertex = Vertex(len(self.vertices), kind, device, op, inputs, sizes, seconds, traits)
        self.vertices.append(vertex)
        return vertex.id, 0
