"""The machine that a plan is judged on: compute streams and links, as in the machine file of docs/schema.md."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from disco_accel.graph.spaces import (
    BETWEEN_DEVICES,
    NAME_OF,
    ROUTE_OF,
    TO_DEVICE,
    TO_HOST,
    Route,
    Space,
    SpaceKind,
    routes,
)
from disco_accel.graph.taskgraph import Vertex, VertexKind

SCOPES = ("device", "pair", "shared")


@dataclass(frozen=True, slots=True)
class Link:
    """``bandwidth`` in bytes/s and ``latency`` in seconds per copy; one copy at a time per link.

    ``scope``: one link per ``device`` (between devices: per source), per ``pair`` of source and target, or one
    ``shared`` by all. ``groups``: devices of one group share a link; a device in no group has its own. ``bandwidths``:
    device and bytes/s of those whose copies go at another rate; one between two devices goes at that of the slower.
    """

    bandwidth: float
    latency: float
    scope: str = "device"
    groups: tuple[tuple[int, ...], ...] = ()
    bandwidths: tuple[tuple[int, float], ...] = ()

    def rate(self, *devices: int) -> float:
        """Return the bytes/s of a copy from, to or between ``devices``."""
        if not self.bandwidths:
            return self.bandwidth
        own = dict(self.bandwidths)
        return min(own.get(device, self.bandwidth) for device in devices)

    def seconds(self, size: int, *devices: int) -> float:
        """Return how long a copy of ``size`` bytes from, to or between ``devices`` takes."""
        return self.latency + size / self.rate(*devices)


_STORAGE = Link(5.0e9, 1e-4)
DEFAULT_LINKS: Mapping[Route, Link] = {
    TO_DEVICE: Link(2.0e10, 1e-5),
    TO_HOST: Link(2.0e10, 1e-5),
    BETWEEN_DEVICES: Link(2.0e11, 5e-6),
    **{route: _STORAGE for route in ROUTE_OF.values() if SpaceKind.STORAGE in route},
}
"""Those of the example in docs/schema.md; storage as fast as an SSD of PCIe 4."""


@dataclass(frozen=True, slots=True)
class Machine:
    """``links`` by route; a route that is left out has the link of ``DEFAULT_LINKS``. ``joint``: names of routes whose
    copies take turns on one link, such as ``(("h2d", "d2h"),)`` for half duplex; routes of one tuple have equal
    links."""

    compute_streams: int = 1
    links: Mapping[Route, Link] = field(default_factory=dict, hash=False)
    joint: tuple[tuple[str, ...], ...] = ()

    def link(self, route: Route) -> Link:
        """Return the link that copies of ``route`` use."""
        return self.links.get(route) or DEFAULT_LINKS[route]

    def with_links(self, changed: Mapping[Route, Link]) -> Machine:
        """Return this machine with other links for the routes of ``changed``."""
        return replace(self, links={**self.links, **changed})

    def lanes(self, spaces: Iterable[Space]) -> _LaneMap:
        """Return where the vertices of a graph with ``spaces`` run on this machine."""
        return _LaneMap(self, spaces)


class _LaneMap:
    """Where the vertices of a graph run on a machine: the kernels of a device in its streams, copies on the link of
    their route."""

    def __init__(self, machine: Machine, spaces: Iterable[Space]) -> None:
        self.route = routes(spaces)
        self._machine = machine
        self._names: dict[tuple[int, int], str] = {}

    def route_name(self, source: int, target: int) -> str:
        """Return the name of a copy's route, such as ``h2d``."""
        return NAME_OF[self.route(source, target)]

    def seconds(self, vertex: Vertex) -> float:
        """Return how long ``vertex`` takes: kernels their duration (0 if unknown), copies latency and bytes."""
        if vertex.kind is VertexKind.KERNEL:
            return vertex.duration or 0.0
        if vertex.kind is VertexKind.INPUT or not vertex.sizes[0]:
            return 0.0
        return self.copy_seconds(vertex.sizes[0], vertex.source, vertex.space)

    def copy_seconds(self, size: int, source: int, target: int) -> float:
        """Return how long a copy of ``size`` bytes takes from one space to another."""
        route = self.route(source, target)
        return self._machine.link(route).seconds(size, *_devices(route, source, target))

    def name(self, vertex: Vertex) -> str:
        """Return the name of the resource that a vertex occupies: ``compute0``, ``h2d0``, ``h2d+d2h`` if shared."""
        if vertex.kind is VertexKind.COPY:
            return self.link_name(vertex.source, vertex.space)
        return f"compute{vertex.space}"

    def link_name(self, source: int, target: int) -> str:
        """Return the name of the link that copies from one space to another take turns on."""
        if (source, target) not in self._names:
            self._names[source, target] = self._name(source, target)
        return self._names[source, target]

    def _name(self, source: int, target: int) -> str:
        route = self.route(source, target)
        link, between = self._machine.link(route), route == BETWEEN_DEVICES
        kind = NAME_OF[route]
        name = next(("+".join(kinds) for kinds in self._machine.joint if kind in kinds), kind)
        if link.scope == "shared":
            return name
        near = _devices(route, source, target)[0]
        for group in link.groups:
            if near in group:
                return f"{name}[{','.join(map(str, group))}]"
        return f"{name}{source}-{target}" if link.scope == "pair" and between else f"{name}{near}"


def _devices(route: Route, source: int, target: int) -> tuple[int, ...]:
    """The ends of a copy that have a link of their own: its devices, or its source where it touches none."""
    ends = tuple(end for kind, end in zip(route, (source, target), strict=True) if kind is SpaceKind.DEVICE)
    return ends or (source,)
