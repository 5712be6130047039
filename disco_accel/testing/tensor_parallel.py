"""A prefill over several devices as a task graph: weights, heads and the sequence are split evenly (tensor and
sequence parallel). With the defaults of 32 layers and 8 devices it has about 15 thousand vertices that are not inputs
and 58 thousand dependencies, as the prefill of Llama 7B in the DISCO paper has."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from disco_accel.taskgraph import Device, Ref, TaskGraph, Vertex, VertexKind


@dataclass(frozen=True, slots=True)
class PrefillShape:
    """``tokens`` of all sequences together, ``context`` of one of them; ``heads`` counts attention groups per device
    and ``columns`` pieces of the feed-forward per device. ``flops`` per second and ``overhead`` in seconds of a
    kernel; 2 bytes an element."""

    layers: int = 32
    devices: int = 8
    hidden: int = 4096
    ffn: int = 11264
    heads: int = 4
    columns: int = 2
    tokens: int = 8192
    context: int = 1024
    flops: float = 1.5e14
    overhead: float = 5e-6


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
        vertex = Vertex(len(self.vertices), VertexKind.INPUT, device, op, (), (2 * elements,), clean=True)
        self.vertices.append(vertex)
        return vertex.id, 0

    def _send(self, op: str, source: Ref, device: int) -> Ref:
        size = self.vertices[source[0]].sizes[source[1]]
        vertex = Vertex(len(self.vertices), VertexKind.TRANSFER, device, op, (source,), (size,))
        self.vertices.append(vertex)
        return vertex.id, 0

    def _gather(self, op: str, slices: list[Ref]) -> list[list[Ref]]:
        """Send each device's slice to all others; return what each device then has, in the order of the sequence."""
        return [
            [ref if source == device else self._send(op, ref, device) for source, ref in enumerate(slices)]
            for device in range(self.shape.devices)
        ]

    def _scatter(self, op: str, partial: list[int], size: int) -> list[Ref]:
        """Add up, on each device, its slice of all devices' partial results."""
        sums = []
        for device in range(self.shape.devices):
            parts = [
                (vertex, device) if source == device else self._send(op, (vertex, device), device)
                for source, vertex in enumerate(partial)
            ]
            sums.append((self._add(f"{op}.sum", device, parts, (size,)), 0))
        return sums

    def _attention(self, i: int, device: int, x: list[Ref]) -> int:
        """Return the vertex that holds this device's part of the output projection, an output per slice."""
        s = self.shape
        wide = s.hidden // s.devices
        narrow = wide // s.heads
        weights = [self._weight(f"L{i}.{name}", device, s.hidden * wide) for name in "qkv"]
        flops = 2.0 * s.tokens * s.hidden * narrow
        mixed: list[Ref] = []
        for head in range(s.heads):
            q, k, v = (
                (self._add(f"L{i}.{name}{head}", device, [*x, weight], (2 * s.tokens * narrow,), flops), 0)
                for name, weight in zip("qkv", weights, strict=True)
            )
            work = 4.0 * s.tokens * s.context * narrow
            mixed.append((self._add(f"L{i}.attention{head}", device, [q, k, v], (2 * s.tokens * narrow,), work), 0))
        weight = self._weight(f"L{i}.o", device, wide * s.hidden)
        return self._add(f"L{i}.o", device, [*mixed, weight], self._slices(), 2.0 * s.tokens * s.hidden * wide)

    def _feed_forward(self, i: int, device: int, x: list[Ref]) -> int:
        s = self.shape
        wide = s.ffn // s.devices
        narrow = wide // s.columns
        gate, up = (self._weight(f"L{i}.{name}", device, s.hidden * wide) for name in ("gate", "up"))
        flops = 2.0 * s.tokens * s.hidden * narrow
        size = (2 * s.tokens * narrow,)
        mixed: list[Ref] = []
        for column in range(s.columns):
            g = (self._add(f"L{i}.gate{column}", device, [*x, gate], size, flops), 0)
            u = (self._add(f"L{i}.up{column}", device, [*x, up], size, flops), 0)
            mixed.append((self._add(f"L{i}.silu_mul{column}", device, [g, u], size), 0))
        weight = self._weight(f"L{i}.down", device, wide * s.hidden)
        return self._add(f"L{i}.down", device, [*mixed, weight], self._slices(), 2.0 * s.tokens * s.hidden * wide)

    def _slices(self) -> tuple[int, ...]:
        return (self._slice,) * self.shape.devices

    @property
    def _slice(self) -> int:
        return 2 * self.shape.tokens // self.shape.devices * self.shape.hidden

    def graph(self, memory: int) -> TaskGraph:
        """Build all layers, each device's kernels of one stage behind each other's."""
        s, every = self.shape, range(self.shape.devices)
        x: list[Ref] = []
        for device in every:
            vertex = Vertex(len(self.vertices), VertexKind.INPUT, device, "x", (), (self._slice,), external=True)
            self.vertices.append(vertex)
            x.append((vertex.id, 0))
        for i in range(s.layers):
            for name, part in (("attention", self._attention), ("ffn", self._feed_forward)):
                scales = [self._weight(f"L{i}.{name}.norm", device, s.hidden) for device in every]
                normed = [
                    (self._add(f"L{i}.{name}.norm", device, [x[device], scales[device]], (self._slice,)), 0)
                    for device in every
                ]
                gathered = self._gather(f"L{i}.{name}.gather", normed)
                partial = [part(i, device, gathered[device]) for device in every]
                sums = self._scatter(f"L{i}.{name}.scatter", partial, self._slice)
                x = [
                    (self._add(f"L{i}.{name}.add", device, [x[device], sums[device]], (self._slice,)), 0)
                    for device in every
                ]
        for ref in x:
            self._add("out", self.vertices[ref[0]].device, [ref], (self._slice,))
        kept = len(self.vertices) - s.devices
        self.vertices[kept:] = [replace(vertex, keep=True) for vertex in self.vertices[kept:]]
        devices = tuple(Device(device, memory) for device in every)
        return TaskGraph("tensor-parallel prefill", devices, tuple(self.vertices))
