"""The plan in the making."""

from __future__ import annotations

from collections.abc import Iterable

from disco_accel.graph.memgraph import Slot
from disco_accel.graph.taskgraph import Ref, Vertex, VertexKind
from disco_accel.plan.common.device_copy import DeviceCopy, PlannedVertex, ValueState


class PlanLog:
    """The plan in the making: vertices in order of priority and the memory edges into them."""

    def __init__(self, order: tuple[Vertex, ...]) -> None:
        self.serial = order
        self.planned: list[PlannedVertex] = []
        self.memory_edges: dict[int, tuple[int, ...]] = {}
        self.slots: dict[Ref, Slot] = {}
        self._next_id = max((vertex.id for vertex in order), default=-1) + 1

    def reload(self, value: ValueState, release: tuple[int, ...], addr: int) -> PlannedVertex:
        """Add a reload of ``value`` to ``addr`` that waits for ``release``."""
        assert value.host is not None
        vertex = self._copy("reload", value.host, value.size, source=value.home, target=value.device)
        planned = PlannedVertex(vertex)
        self.planned.append(planned)
        self.memory_edges[vertex.id] = release
        self.slots[vertex.id, 0] = Slot(value.device, addr)
        return planned

    def offload(self, value: ValueState, copy: DeviceCopy) -> int:
        """Add an offload of the copy ``copy`` of ``value`` and return its id."""
        vertex = self._copy("offload", copy.ref, value.size, source=value.device, target=value.home)
        self.planned.append(PlannedVertex(vertex))
        self.memory_edges[vertex.id] = ()
        return vertex.id

    def add(self, vertex: Vertex, release: Iterable[int]) -> None:
        """Add a vertex of the task graph that waits for ``release`` besides its inputs."""
        self.planned.append(PlannedVertex(vertex))
        self.memory_edges[vertex.id] = tuple(dict.fromkeys(release))

    def readers_until(self, value: ValueState, last: int) -> list[int]:
        """Return the ids of the readers of ``value`` from its next use up to position ``last``."""
        return [self.serial[p].id for p in value.uses[value.next :] if p <= last and p < len(self.serial)]

    def _copy(self, op: str, value: Ref, size: int, source: int, target: int) -> Vertex:
        return Vertex(self._new_id(), VertexKind.COPY, target, op, (value,), (size,), source=source)

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1
