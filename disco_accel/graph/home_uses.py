"""Values that kernels use at their homes: kernels of a *host device*, whose arena lies in host memory.

A kernel there reads an input that the host has, and the versions of one that changes over steps, where they are: at
home. Its result over such an input is at home too, and a kernel on another device reads that after a swap-in. None of
these values is swapped or given an offset for a host device.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from disco_accel.graph.spaces import Space
from disco_accel.graph.taskgraph import Ref, TaskGraph, Vertex, VertexKind
from disco_accel.graph.values import host_copy_exists, lasting_versions, overwrites


def host_devices(devices: Iterable[Space]) -> frozenset[int]:
    """Ids of the devices whose kernels run on the machine's processors."""
    return frozenset(device.id for device in devices if device.is_host_device)


@dataclass(frozen=True, slots=True)
class HomeUses:
    """``homes``: value of the task graph that lies at a home → the INPUT whose home that is, versions included.
    ``written``: those that kernels of host devices write. ``hosts``: ids of host devices. ``device``: INPUT → its own.
    """

    homes: dict[Ref, Ref]
    written: frozenset[Ref]
    hosts: frozenset[int]
    device: dict[Ref, int]

    @classmethod
    def of(cls, graph: TaskGraph) -> HomeUses:
        """Of ``graph``; without a host device nothing is used at home."""
        hosts = host_devices(graph.devices)
        if not hosts:
            return cls({}, frozenset(), hosts, {})
        inputs = [vertex for vertex in graph.vertices if host_copy_exists(vertex)]
        homes = {(vertex.id, 0): (vertex.id, 0) for vertex in inputs}
        device = {(vertex.id, 0): vertex.space for vertex in inputs}
        for state, versions in lasting_versions(graph.vertices).items():
            homes.update(dict.fromkeys(versions, state))
        written = {
            (vertex.id, output)
            for vertex in graph.vertices
            if vertex.kind is VertexKind.KERNEL and vertex.space in hosts
            for output, _ in overwrites(vertex)
            if (vertex.id, output) in homes
        }
        return cls(homes, frozenset(written), hosts, device)

    def at_home(self, reader: Vertex, value: Ref) -> bool:
        """Whether ``reader``, a vertex of the task graph, uses ``value`` at its home."""
        return reader.space in self.hosts and reader.kind is VertexKind.KERNEL and value in self.homes

    def never_moves(self, vertex: Vertex) -> bool:
        """Whether an INPUT is used at home alone, because it is of a host device: it has no offset, and no copies."""
        return vertex.space in self.hosts and (vertex.id, 0) in self.homes

    def device_of(self, value: Ref, vertex: Vertex) -> int:
        """Where copies of ``value`` are that are not at home; ``vertex`` makes it."""
        home = self.homes.get(value)
        return vertex.space if home is None else self.device[home]
