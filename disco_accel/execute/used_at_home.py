"""Which values of a plan the kernels of host devices use at homes, in host memory that is not the plan's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from disco_accel.graph.carried_values import taskgraph_of
from disco_accel.graph.home_uses import HomeUses
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.taskgraph import Ref, TaskGraph, Vertex


@dataclass(frozen=True, slots=True)
class UsedAtHome:
    """``uses`` and the vertices of the task graph, by id."""

    uses: HomeUses
    task: Mapping[int, Vertex]

    @classmethod
    def of(cls, plan: MemGraph) -> UsedAtHome:
        """Of the task graph that ``plan`` plans; without a host device nothing is used at home."""
        on_host = any(device.is_host_device for device in plan.devices)
        graph = taskgraph_of(plan) if on_host else TaskGraph(plan.name, (), ())
        return cls(HomeUses.of(graph), {vertex.id: vertex for vertex in graph.vertices})

    def on_host(self, vertex: Vertex) -> bool:
        """Whether its device lies in host memory."""
        return vertex.space in self.uses.hosts

    def read(self, vertex: int, position: int) -> int | None:
        """The INPUT at whose home a kernel uses its input at ``position``; None if it does so in its device's arena."""
        reader = self.task.get(vertex)
        if reader is None or position >= len(reader.inputs) or not self.uses.at_home(reader, reader.inputs[position]):
            return None
        return self.uses.homes[reader.inputs[position]][0]

    def written(self, ref: Ref) -> int | None:
        """The INPUT at whose home a kernel writes its output ``ref``; None if it does so in its device's arena."""
        return self.uses.homes[ref][0] if ref in self.uses.written else None
