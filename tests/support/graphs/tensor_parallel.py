"""A prefill over several devices as a task graph: weights, heads and the sequence are split evenly (tensor and
sequence parallel). With the defaults of 32 layers and 8 devices it has about 15 thousand vertices that are not inputs
and 58 thousand dependencies, as the prefill of Llama 7B in the DISCO paper has.

Kernels work on ``chunks`` of the sequences: while one is computed, the results of another are exchanged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from disco_accel.graph.spaces import Space
from disco_accel.graph.taskgraph import Ref, TaskGraph, Vertex, VertexKind
from disco_accel.graph.traits import FOREIGN, FROZEN


@dataclass(frozen=True, slots=True)
class PrefillShape:
    """``tokens`` of all sequences together, ``context`` of one of them; ``chunks``: at most. ``flops`` per
    second and ``overhead`` in seconds of a kernel; 2 bytes an element."""

    layers: int = 32
    devices: int = 8
    hidden: int = 4096
    ffn: int = 11264
    chunks: int = 4
    tokens: int = 8192
    context: int = 1024
    flops: float = 1.5e14
    overhead: float = 5e-6

    @property
    def pieces(self) -> int:
        """Into how many pieces each kernel's work is cut: each has the slices of as many devices."""
        return math.gcd(self.chunks, self.devices)


def layers_for(vertices: int, shape: PrefillShape | None = None) -> int:
    """Return how many layers give about ``vertices`` vertices, inputs included."""
    shape = shape or PrefillShape()
    one, two = (len(tensor_parallel_prefill(replace(shape, layers=n), 1).vertices) for n in (1, 2))
    return max(1, round((vertices - (one - (two - one))) / (two - one)))


def tensor_parallel_prefill(shape: PrefillShape, memory: int) -> TaskGraph:
    """Return the forward pass of ``shape`` on devices of ``memory`` bytes each, down to the last layer's output."""
    return _Prefill(shape).graph(memory)


@dataclass
class _Prefill:
    shape: PrefillShape
    vertices: list[Vertex] = field(default_factory=list)

    def _add(self, op: str, device: int, inputs: list[Ref], sizes: tuple[int, ...], flops: float = 0.0) -> int:
        seconds = self.shape.overhead + flops / self.shape.flops
        vertex = Vertex(len(self.vertices), VertexKind.KERNEL, device, op, tuple(inputs), sizes, seconds)
        self.vertices.append(vertex)
        return vertex.id

    def _weight(self, op: str, device: int, elements: int) -> Ref:
        vertex = Vertex(len(self.vertices), VertexKind.INPUT, device, op, (), (2 * elements,), traits=FROZEN)
        self.vertices.append(vertex)
        return vertex.id, 0

    def _send(self, op: str, source: Ref, device: int) -> Ref:
        size = self.vertices[source[0]].sizes[source[1]]
        vertex = Vertex(
            len(self.vertices), VertexKind.COPY, device, op, (source,), (size,), source=self.vertices[source[0]].space
        )
        self.vertices.append(vertex)
        return vertex.id, 0

    def _gather(self, op: str, slices: list[Ref], owners: range) -> list[list[Ref]]:
        """Send the owners' slices to all others; return what each device then has, in the order of the sequence."""
        return [
            [ref if owner == device else self._send(op, ref, device) for owner, ref in zip(owners, slices, strict=True)]
            for device in range(self.shape.devices)
        ]

    def _scatter(self, op: str, partial: list[int], owners: range) -> list[Ref]:
        """Add up, on each owner, its slice of all devices' partial results."""
        sums = []
        for k, owner in enumerate(owners):
            parts = [
                (vertex, k) if source == owner else self._send(op, (vertex, k), owner)
                for source, vertex in enumerate(partial)
            ]
            sums.append((self._add(f"{op}.sum", owner, parts, (self._slice,)), 0))
        return sums

    def _weights(self, i: int, device: int) -> dict[str, Ref]:
        """Add the weights of layer ``i`` on ``device``."""
        s = self.shape
        heads, ffn = s.hidden * s.hidden // s.devices, s.hidden * s.ffn // s.devices
        sizes = {"attention.norm": s.hidden} | dict.fromkeys("qkvo", heads)
        sizes |= {"ffn.norm": s.hidden} | dict.fromkeys(("gate", "up", "down"), ffn)
        return {name: self._weight(f"L{i}.{name}", device, elements) for name, elements in sizes.items()}

    def _attention(self, i: int, device: int, x: list[Ref], weights: dict[str, Ref]) -> int:
        """Return the vertex that holds this device's part of the output projection, an output per slice."""
        s = self.shape
        tokens, wide = s.tokens // s.pieces, s.hidden // s.devices
        flops = 2.0 * tokens * s.hidden * wide
        size = (2 * tokens * wide,)
        q, k, v = ((self._add(f"L{i}.{name}", device, [*x, weights[name]], size, flops), 0) for name in "qkv")
        mixed = self._add(f"L{i}.attention", device, [q, k, v], size, 4.0 * tokens * s.context * wide)
        return self._add(f"L{i}.o", device, [(mixed, 0), weights["o"]], self._slices(), flops)

    def _feed_forward(self, i: int, device: int, x: list[Ref], weights: dict[str, Ref]) -> int:
        s = self.shape
        tokens, wide = s.tokens // s.pieces, s.ffn // s.devices
        flops = 2.0 * tokens * s.hidden * wide
        size = (2 * tokens * wide,)
        gate, up = ((self._add(f"L{i}.{name}", device, [*x, weights[name]], size, flops), 0) for name in ("gate", "up"))
        mixed = self._add(f"L{i}.silu_mul", device, [gate, up], size)
        return self._add(f"L{i}.down", device, [(mixed, 0), weights["down"]], self._slices(), flops)

    def _slices(self) -> tuple[int, ...]:
        return (self._slice,) * (self.shape.devices // self.shape.pieces)

    @property
    def _slice(self) -> int:
        return 2 * self.shape.tokens // self.shape.devices * self.shape.hidden

    def graph(self, memory: int) -> TaskGraph:
        """Build all layers, chunk by chunk, each device's kernels of one stage behind each other's."""
        s, every = self.shape, range(self.shape.devices)
        x: list[Ref] = []
        for device in every:
            vertex = Vertex(len(self.vertices), VertexKind.INPUT, device, "x", (), (self._slice,), traits=FOREIGN)
            self.vertices.append(vertex)
            x.append((vertex.id, 0))
        per_chunk = s.devices // s.pieces
        for i in range(s.layers):
            weights = [self._weights(i, device) for device in every]
            for name, part in (("attention", self._attention), ("ffn", self._feed_forward)):
                for chunk in range(s.pieces):
                    owners = range(chunk * per_chunk, (chunk + 1) * per_chunk)
                    normed = [
                        (self._add(f"L{i}.{name}.norm", d, [x[d], weights[d][f"{name}.norm"]], (self._slice,)), 0)
                        for d in owners
                    ]
                    gathered = self._gather(f"L{i}.{name}.gather", normed, owners)
                    partial = [part(i, device, gathered[device], weights[device]) for device in every]
                    sums = self._scatter(f"L{i}.{name}.scatter", partial, owners)
                    for d, ref in zip(owners, sums, strict=True):
                        x[d] = self._add(f"L{i}.{name}.add", d, [x[d], ref], (self._slice,)), 0
        for ref in x:
            self._add("out", self.vertices[ref[0]].space, [ref], (self._slice,))
        kept = len(self.vertices) - s.devices
        self.vertices[kept:] = [replace(vertex, keep=True) for vertex in self.vertices[kept:]]
        devices = tuple(Space(device, memory) for device in every)
        return TaskGraph("tensor-parallel prefill", devices, tuple(self.vertices))
