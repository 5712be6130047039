"""A LoRA training step with activation checkpointing as a task graph: forward, then recompute and backward by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from disco_accel.graph.spaces import Space
from disco_accel.graph.taskgraph import Ref, TaskGraph, Vertex, VertexKind
from disco_accel.graph.traits import FOREIGN, FROZEN, LATE_FOREIGN


@dataclass(frozen=True, slots=True)
class LoraShape:
    """``tokens`` per step; ``flops`` per second of a kernel; ``overhead`` in seconds per kernel; 2 bytes an element."""

    layers: int = 32
    hidden: int = 4096
    ffn: int = 11008
    vocabulary: int = 32000
    rank: int = 16
    tokens: int = 4096
    flops: float = 1.5e14
    overhead: float = 5e-6


def lora_graph(shape: LoraShape, memory: int) -> TaskGraph:
    """Return the step of ``shape`` on one device of ``memory`` bytes. Adapters are external, the base is clean."""
    return _Step(shape).graph(memory)


def prefill_graph(shape: LoraShape, memory: int) -> TaskGraph:
    """Return the forward pass of ``shape`` alone, which hands out the logits of the last token of each sequence."""
    return _Step(shape).prefill(memory)


@dataclass
class _Step:
    shape: LoraShape
    vertices: list[Vertex] = field(default_factory=list)
    weights: dict[str, Ref] = field(default_factory=dict)

    def _add(self, op: str, inputs: Sequence[Ref], size: int, flops: float = 0.0, **flags: object) -> Ref:
        kind = VertexKind.KERNEL if inputs else VertexKind.INPUT
        duration = self.shape.overhead + flops / self.shape.flops if inputs else None
        vertex = Vertex(len(self.vertices), kind, 0, op, tuple(inputs), (size,), duration, **flags)  # type: ignore[arg-type]
        self.vertices.append(vertex)
        return vertex.id, 0

    def _weight(self, name: str, rows: int, columns: int) -> Ref:
        if name not in self.weights:
            self.weights[name] = self._add(name, (), 2 * rows * columns, traits=FROZEN)
        return self.weights[name]

    def _adapter(self, name: str, rows: int, columns: int) -> Ref:
        if name not in self.weights:
            self.weights[name] = self._add(name, (), 2 * rows * columns, traits=FOREIGN)
        return self.weights[name]

    def _linear(self, x: Ref, name: str, rows: int, columns: int, tag: str) -> Ref:
        """y = x W + (x A) B with W rows x columns."""
        s, t = self.shape, self.shape.tokens
        low = self._add(f"{tag}{name}.xA", (x, self._adapter(f"{name}.A", rows, s.rank)), 2 * t * s.rank)
        weight = self._weight(name, rows, columns)
        y = self._add(f"{tag}{name}", (x, weight), 2 * t * columns, 2.0 * t * rows * columns)
        delta = self._add(f"{tag}{name}.B", (low, self._adapter(f"{name}.B", s.rank, columns)), 2 * t * columns)
        return self._add(f"{tag}{name}.add", (y, delta), 2 * t * columns, may_inplace=(0,))

    def _layer(self, x: Ref, i: int, tag: str) -> tuple[Ref, dict[str, Ref]]:
        t, h, f = self.shape.tokens, self.shape.hidden, self.shape.ffn
        kept: dict[str, Ref] = {"x": x}
        n1 = self._add(f"{tag}norm1", (x, self._weight(f"L{i}.n1", 1, h)), 2 * t * h)
        q, k, v = (self._linear(n1, f"L{i}.{name}", h, h, tag) for name in "qkv")
        a = self._add(f"{tag}attention", (q, k, v), 2 * t * h, 4.0 * t * 1024 * h)
        o = self._linear(a, f"L{i}.o", h, h, tag)
        x2 = self._add(f"{tag}add1", (x, o), 2 * t * h, may_inplace=(1,))
        n2 = self._add(f"{tag}norm2", (x2, self._weight(f"L{i}.n2", 1, h)), 2 * t * h)
        gate = self._linear(n2, f"L{i}.gate", h, f, tag)
        up = self._linear(n2, f"L{i}.up", h, f, tag)
        m = self._add(f"{tag}silu_mul", (gate, up), 2 * t * f)
        down = self._linear(m, f"L{i}.down", f, h, tag)
        y = self._add(f"{tag}add2", (x2, down), 2 * t * h, may_inplace=(1,))
        kept.update(n1=n1, q=q, k=k, v=v, a=a, x2=x2, n2=n2, gate=gate, up=up, m=m)
        return y, kept

    def _linear_backward(self, x: Ref, dy: Ref, name: str, rows: int, columns: int) -> Ref:
        s, t = self.shape, self.shape.tokens
        a, b = self._adapter(f"{name}.A", rows, s.rank), self._adapter(f"{name}.B", s.rank, columns)
        low = self._add(f"d{name}.xA", (x, a), 2 * t * s.rank)
        dlow = self._add(f"d{name}.low", (dy, b), 2 * t * s.rank)
        self._add(f"d{name}.B", (low, dy), 2 * s.rank * columns, keep=True)
        self._add(f"d{name}.A", (x, dlow), 2 * s.rank * rows, keep=True)
        dx = self._add(f"d{name}", (dy, self._weight(name, rows, columns)), 2 * t * rows, 2.0 * t * rows * columns)
        return self._add(f"d{name}.add", (dx, dlow, a), 2 * t * rows, may_inplace=(0,))

    def _layer_backward(self, dy: Ref, i: int, kept: dict[str, Ref]) -> Ref:
        t, h, f = self.shape.tokens, self.shape.hidden, self.shape.ffn
        dm = self._linear_backward(kept["m"], dy, f"L{i}.down", f, h)
        dgate = self._add("dsilu", (dm, kept["gate"], kept["up"]), 2 * t * f)
        dup = self._add("dmul", (dm, kept["gate"]), 2 * t * f, may_inplace=(0,))
        dn2 = self._linear_backward(kept["n2"], dgate, f"L{i}.gate", h, f)
        dn2b = self._linear_backward(kept["n2"], dup, f"L{i}.up", h, f)
        dn2 = self._add("add", (dn2, dn2b), 2 * t * h, may_inplace=(0, 1))
        dx2 = self._add("dnorm2", (dn2, kept["x2"], self._weight(f"L{i}.n2", 1, h), dy), 2 * t * h)
        da = self._linear_backward(kept["a"], dx2, f"L{i}.o", h, h)
        inputs = (da, kept["q"], kept["k"], kept["v"], kept["a"])
        dq = self._add("dattention", inputs, 6 * t * h, 10.0 * t * 1024 * h)
        parts = [self._add(f"slice{p}", (dq,), 2 * t * h) for p in range(3)]
        grads = [
            self._linear_backward(kept["n1"], part, f"L{i}.{name}", h, h)
            for part, name in zip(parts, "qkv", strict=True)
        ]
        total = self._add("add3", tuple(grads), 2 * t * h, may_inplace=(0, 1, 2))
        return self._add("dnorm1", (total, kept["x"], self._weight(f"L{i}.n1", 1, h), dx2), 2 * t * h)

    def graph(self, memory: int) -> TaskGraph:
        """Build the whole step."""
        s, t, h, vocabulary = self.shape, self.shape.tokens, self.shape.hidden, self.shape.vocabulary
        ids = self._add("ids", (), 8 * t, traits=FOREIGN)
        x = self._add("embedding", (ids, self._weight("embedding", vocabulary, h)), 2 * t * h)
        saved = []
        for i in range(s.layers):
            saved.append(x)
            x, _ = self._layer(x, i, "")
        n = self._add("norm", (x, self._weight("norm", 1, h)), 2 * t * h)
        flops = 2.0 * t * h * vocabulary
        logits = self._add("logits", (n, self._weight("head", h, vocabulary)), 4 * t * vocabulary, flops)
        loss = self._add("loss", (logits, ids), 4, out=True, keep=True)
        tangent = self._add("tangent", (), 4, traits=LATE_FOREIGN)
        dlogits = self._add("dloss", (logits, tangent, loss), 4 * t * vocabulary, may_inplace=(0,))
        dn = self._add("dlogits", (dlogits, self._weight("head", h, vocabulary)), 2 * t * h, flops)
        dy = self._add("dnorm", (dn, x, self._weight("norm", 1, h)), 2 * t * h)
        for i in reversed(range(s.layers)):
            start = len(self.vertices)
            _, kept = self._layer(saved[i], i, "re.")
            for index in range(start, len(self.vertices)):
                vertex = self.vertices[index]
                if saved[i] in vertex.inputs:
                    self.vertices[index] = replace(vertex, after=(dy[0],))
            dy = self._layer_backward(dy, i, kept)
        return TaskGraph("lora", (Space(0, memory),), tuple(self.vertices))

    def prefill(self, memory: int) -> TaskGraph:
        """Build the forward pass."""
        s, t, h, vocabulary = self.shape, self.shape.tokens, self.shape.hidden, self.shape.vocabulary
        ids = self._add("ids", (), 8 * t, traits=FOREIGN)
        x = self._add("embedding", (ids, self._weight("embedding", vocabulary, h)), 2 * t * h)
        for i in range(s.layers):
            x, kept = self._layer(x, i, "")
            for name in "kv":
                self.vertices[kept[name][0]] = replace(self.vertices[kept[name][0]], keep=True)
        last = self._add("last", (x,), 2 * h)
        n = self._add("norm", (last, self._weight("norm", 1, h)), 2 * h)
        self._add("logits", (n, self._weight("head", h, vocabulary)), 4 * vocabulary, 2.0 * h * vocabulary, keep=True)
        return TaskGraph("prefill", (Space(0, memory),), tuple(self.vertices))
