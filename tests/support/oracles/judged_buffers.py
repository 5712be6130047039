"""What all checks of the judge of version-2 plans look at: a plan in buffers beside its graph."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from disco_accel.graph.schema2 import Buffer, Graph, Plan, Planned, Value, Vertex
from disco_accel.graph.traits import Access, Arrival

Memory = tuple[str, int]
"""A space by its id, or the home of a value by the value's id."""


@dataclass
class JudgedBuffers:
    graph: Graph
    plan: Plan
    buffers: dict[int, Buffer] = field(init=False)
    planned: dict[int, Planned] = field(init=False)
    vertices: dict[int, Vertex] = field(init=False)
    writer: dict[int, int] = field(init=False)
    """Buffer → the id that writes it."""
    readers: dict[int, list[int]] = field(init=False)
    waits: dict[int, set[int]] = field(init=False)
    """Id → what it waits for by an edge, the gate included."""
    claims: list[tuple[int, int, Callable[[], str]]] = field(init=False, default_factory=list)
    has_gate: bool = field(init=False)

    def __post_init__(self) -> None:
        self.buffers = {buffer.id: buffer for buffer in self.plan.buffers}
        self.planned = {planned.id: planned for planned in self.plan.order}
        self.vertices = {vertex.id: vertex for vertex in self.graph.vertices}
        self.writer, self.readers = {}, defaultdict(list)
        self.waits = {number: set() for number in self.planned}
        self.has_gate = any(value.traits.arrival is Arrival.GATE for value in self.graph.values)

    def name(self, number: int) -> str:
        """How messages call a vertex or a copy."""
        vertex = self.vertices.get(number)
        return f"vertex {number} ({vertex.op or vertex.work})" if vertex else f"copy {number}"

    def value(self, buffer: Buffer) -> Value:
        return self.graph.value[buffer.version[0]]

    def memory(self, buffer: Buffer) -> Memory | None:
        """The memory that ``buffer`` shares with others; None for foreign memory and for no bytes at all."""
        value = self.value(buffer)
        if not value.bytes or value.traits.access is Access.FOREIGN:
            return None
        return ("home", value.id) if buffer.offset is None else ("space", buffer.space)

    def extent(self, buffer: Buffer) -> tuple[int, int]:
        begin, end = buffer.range(self.value(buffer))
        return buffer.offset or 0, (buffer.offset or 0) + end - begin

    def place(self, buffer: Buffer) -> tuple[int, int]:
        """The space and where in it the value begins, of which ``buffer``, which has an offset, holds bytes."""
        return buffer.space, (buffer.offset or 0) - buffer.begin

    def is_whole(self, buffer: Buffer) -> bool:
        """Whether it holds all bytes of its value."""
        return buffer.range(self.value(buffer)) == (0, self.value(buffer).bytes)
