"""Programs over several devices with a random maker of such programs, and a plan that reloads every weight."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from disco_accel.errors import BudgetTooSmall
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.spaces import Space
from disco_accel.graph.taskgraph import TaskGraph, Vertex, VertexKind
from disco_accel.graph.values import host_copy_exists
from disco_accel.native.host_memory import footprint
from disco_accel.plan import make_plan
from tests.execute.programs import Builder, Value, bump_plan

ROWS = 12
"""Of every matrix in a random program."""


RELOAD = 1000
"""The reload of weight ``w`` in a ``reloading_plan`` is vertex RELOAD + w."""


def reloading_plan(graph: TaskGraph) -> MemGraph:
    """A ``bump_plan`` of one device in which no weight is resident: each is reloaded as soon as the step begins."""
    plan = bump_plan(graph)
    clean = {v.id: v for v in plan.vertices if host_copy_exists(v)}
    reloads = [Vertex(RELOAD + w, VertexKind.COPY, 0, inputs=((w, 0),), sizes=v.sizes) for w, v in clean.items()]
    inputs = [v for v in plan.vertices if v.kind is VertexKind.INPUT]
    others = [
        replace(v, inputs=tuple((RELOAD + r[0], 0) if r[0] in clean else r for r in v.inputs))
        for v in plan.vertices
        if v.kind is not VertexKind.INPUT
    ]
    slots = {((RELOAD + ref[0], 0) if ref[0] in clean else ref): slot for ref, slot in plan.slots.items()}
    edges = tuple(((RELOAD + u if u in clean else u), v) for u, v in plan.data_edges)
    return replace(plan, vertices=(*inputs, *reloads, *others), slots=slots, data_edges=edges)


def bump_on_devices(graph: TaskGraph) -> MemGraph:
    """``bump_plan`` with every value on its own device; addresses stay as they are."""
    plan = bump_plan(graph)
    by_id = {v.id: v for v in graph.vertices}
    slots = {ref: replace(slot, space=by_id[ref[0]].space) for ref, slot in plan.slots.items()}
    memory = plan.devices[0].memory
    return replace(plan, slots=slots, spaces=tuple(replace(d, memory=memory) for d in graph.devices))


def smallest_memory(graph: TaskGraph) -> int:
    """Bytes of each device with which there is a plan."""
    try:
        make_plan(graph, memory=256, cyclic=True)
    except BudgetTooSmall as error:
        return error.needed
    return 256


@dataclass
class DeviceBuilder(Builder):
    """A builder that puts each vertex on the device that ``at`` names."""

    count: int = 2
    at: int = 0

    def _input(self, tensor: torch.Tensor, **flags: bool) -> int:
        vertex = super()._input(tensor, **flags)
        self._move_last()
        return vertex

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        values = super().call(name, *args, **kwargs)
        self._move_last()
        return values

    def _move_last(self) -> None:
        self.vertices[-1] = replace(self.vertices[-1], space=self.at)

    def device_of(self, value: Value) -> int:
        return self.vertices[value.ref[0]].space

    def transfer(self, value: Value, device: int, elements: int | None = None, keep: str = "") -> Value:
        """A copy on ``device``; with ``elements`` only the first of them, as one row."""
        source = value.tensor
        if elements is None:
            size = self.vertices[value.ref[0]].sizes[value.ref[1]]
            copy = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device=source.device)
            copy.copy_(source)
            assert footprint(source) == size, "a whole transfer is of a whole value"
        else:
            size = elements * source.element_size()
            copy = source.flatten()[:elements].clone()
        vertex = Vertex(
            len(self.vertices), VertexKind.COPY, device, inputs=(value.ref,), sizes=(size,), keep=bool(keep)
        )
        vertex = replace(vertex, source=self.device_of(value))
        self.vertices.append(vertex)
        made = Value((vertex.id, 0), copy)
        if keep:
            self.results[keep] = made
        return made

    def graph(self, name: str = "devices") -> TaskGraph:
        return TaskGraph(name, tuple(Space(i, 1 << 40) for i in range(self.count)), tuple(self.vertices), self.ops)


@dataclass
class RandomProgram:
    """A program of ``length`` ops drawn from ``seed``; calling ``build`` fills its inputs from another seed.

    Values are float matrices of ROWS rows. Whatever an op needs on its device is transferred there first. Eager
    execution is on ``where`` alone.
    """

    seed: int
    length: int = 24
    count: int = 2
    where: torch.device = field(default_factory=lambda: torch.device("cpu"))
    _pool: list[Value] = field(default_factory=list)

    def build(self, data: int) -> DeviceBuilder:
        self._rng = random.Random(self.seed)
        self._data = torch.Generator().manual_seed(data)
        self._b = DeviceBuilder(device=self.where, count=self.count)
        self._pool = []
        self._fresh: set[tuple[int, int]] = set()
        for device in range(self.count):
            self._b.at = device
            self._pool.append(self._b.input(self._matrix()))
            for i in range(2):
                fixed = torch.Generator().manual_seed(100 * device + i)
                self._pool.append(self._b.weight(torch.randn(ROWS, ROWS, generator=fixed) / 4))
        for i in range(self.length // 2):
            self._append(f"early{i}", out=self._rng.random() < 0.2)
        self._b.at = self._rng.randrange(self.count)
        self._pool.append(self._b.input(self._matrix(), late=True))
        for i in range(self.length - self.length // 2):
            self._append(f"late{i}")
        if not self._b.results:
            self._append("end", force_keep=True)
        return self._b

    def _matrix(self) -> torch.Tensor:
        return torch.randn(ROWS, ROWS, generator=self._data)

    def _append(self, name: str, out: bool = False, force_keep: bool = False) -> None:
        rng, b = self._rng, self._b
        b.at = rng.randrange(b.count)
        keep = name if force_keep or rng.random() < 0.2 else ""
        marks = {"out": name} if out and self._gate_free() else {"keep": keep}
        make = rng.choice(self._OPS)
        made = make(self, **marks)
        self._pool.append(made)
        if not any(marks.values()):
            self._fresh.add(made.ref)

    def _gate_free(self) -> bool:
        return not self._b.late

    def _take(self) -> Value:
        """A value on the current device, transferred if it lives elsewhere."""
        recent = self._pool[-8:] if self._rng.random() < 0.6 else self._pool
        value = self._rng.choice(recent)
        if self._b.device_of(value) == self._b.at:
            return value
        moved = self._b.transfer(value, self._b.at)
        self._pool.append(moved)
        return moved

    def _mm(self, **marks: str) -> Value:
        left, right = self._take(), self._take()
        transposed = right.view(lambda t: t.t()) if self._rng.random() < 0.5 else right
        return self._b.call("mm", left, transposed, **marks)  # type: ignore[no-any-return]

    def _add(self, **marks: str) -> Value:
        return self._b.call("add.Tensor", self._take(), self._take(), **marks)  # type: ignore[no-any-return]

    def _tanh(self, **marks: str) -> Value:
        return self._b.call("tanh", self._take(), **marks)  # type: ignore[no-any-return]

    def _softmax(self, **marks: str) -> Value:
        return self._b.call("_softmax", self._take(), -1, False, **marks)  # type: ignore[no-any-return]

    def _norm(self, **marks: str) -> Value:
        outputs = self._b.call("native_layer_norm", self._take(), [ROWS], None, None, 1e-5, **marks)
        return outputs[0]  # type: ignore[no-any-return]

    def _half(self, **marks: str) -> Value:
        low = self._b.call("_to_copy", self._take(), dtype=torch.bfloat16)
        return self._b.call("_to_copy", low, dtype=torch.float32, **marks)  # type: ignore[no-any-return]

    def _rows(self, **marks: str) -> Value:
        """The first rows come from another device in a partial transfer, the rest from here."""
        rng = self._rng
        value, here = rng.choice(self._pool), self._take()
        rows = rng.randint(1, ROWS - 1)
        device = self._b.device_of(value)
        head = value if device == self._b.at else self._b.transfer(value, self._b.at, rows * ROWS)
        head = head.view(lambda t: t.reshape(-1)[: rows * ROWS].view(rows, ROWS))
        tail = here.view(lambda t: t[rows:])
        return self._b.call("cat", [head, tail], **marks)  # type: ignore[no-any-return]

    def _in_place(self, **marks: str) -> Value:
        """Writes over a value that nobody has kept; it is never read again."""
        mine = [v for v in self._pool if v.ref in self._fresh and self._b.device_of(v) == self._b.at]
        if not mine:
            return self._add(**marks)
        target = self._rng.choice(mine)
        self._pool.remove(target)
        self._fresh.remove(target.ref)
        other = self._take()
        return self._b.call("add_.Tensor", target, other, inplace=True, **marks)  # type: ignore[no-any-return]

    _OPS: ClassVar[tuple[Callable[..., Value], ...]] = (
        _mm,
        _mm,
        _add,
        _tanh,
        _softmax,
        _norm,
        _half,
        _rows,
        _rows,
        _in_place,
    )
