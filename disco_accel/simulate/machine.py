"""The machine that a plan is judged on: compute streams and links, as in the machine file of docs/schema.md."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from disco_accel.graph.taskgraph import Vertex, VertexKind

LINK_KINDS = ("h2d", "d2h", "p2p")
SCOPES = ("device", "pair", "shared")

_KIND_OF = {VertexKind.RELOAD: "h2d", VertexKind.OFFLOAD: "d2h", VertexKind.TRANSFER: "p2p"}


def copy_kind(vertex: Vertex, source: int, hosts: Collection[int]) -> VertexKind:
    """Return the kind of copy whose link ``vertex`` takes: a transfer to one of ``hosts``, the devices in host memory,
    is an offload from device ``source``, one from there a reload."""
    if vertex.kind is VertexKind.TRANSFER and vertex.device in hosts:
        return VertexKind.OFFLOAD
    if vertex.kind is VertexKind.TRANSFER and source in hosts:
        return VertexKind.RELOAD
    return vertex.kind


@dataclass(frozen=True, slots=True)
class Link:
    """``bandwidth`` in bytes/s and ``latency`` in seconds per copy; one copy at a time per link.

    ``scope``: one link per ``device`` (p2p: per source), per ``pair`` of source and target, or one ``shared`` by all.
    ``groups``: devices of one group share a link; a device in no group has its own. ``bandwidths``: device and bytes/s
    of those whose copies go at another rate; one between two devices goes at that of the slower.
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


@dataclass(frozen=True, slots=True)
class Machine:
    """The defaults are those of the example in docs/schema.md. ``joint``: kinds of copies that take turns on one link,
    such as ``(("h2d", "d2h"),)`` for half duplex; kinds of one tuple have equal links."""

    compute_streams: int = 1
    h2d: Link = Link(2.0e10, 1e-5)
    d2h: Link = Link(2.0e10, 1e-5)
    p2p: Link = Link(2.0e11, 5e-6)
    joint: tuple[tuple[str, ...], ...] = ()

    def seconds(self, vertex: Vertex, copy: VertexKind | None = None, source: int | None = None) -> float:
        """Return how long ``vertex`` takes: kernels their duration (0 if unknown), copies latency and bytes.

        Of a transfer, ``copy``: the kind of copy that it is (``copy_kind``), if that is not between two devices;
        ``source``: the device that its input is on, if not its own."""
        if vertex.kind is VertexKind.KERNEL:
            return vertex.duration or 0.0
        if vertex.kind is VertexKind.INPUT or not vertex.sizes[0]:
            return 0.0
        kind = copy or vertex.kind
        near = vertex.device if source is None else source
        # One from the host goes over the link of its target, one to the host over that of its source.
        ends = {VertexKind.RELOAD: (vertex.device,), VertexKind.OFFLOAD: (near,)}.get(kind, (near, vertex.device))
        return self.link(_KIND_OF[kind]).seconds(vertex.sizes[0], *ends)

    def link(self, kind: str) -> Link:
        """Return the link that copies of ``kind`` use."""
        return self.h2d if kind == "h2d" else self.d2h if kind == "d2h" else self.p2p

    def lane(self, kind: VertexKind, device: int, source: int) -> str:
        """Return the name of the resource that a vertex occupies: ``compute0``, ``h2d0``, ``h2d+d2h`` if shared.

        ``device``: the vertex's; ``source``: where a TRANSFER's input lives.
        """
        copies = _KIND_OF.get(kind)
        if copies is None:
            return f"compute{device}"
        link = self.link(copies)
        name = next(("+".join(kinds) for kinds in self.joint if copies in kinds), copies)
        near = source if copies == "p2p" else device
        if link.scope == "shared":
            return name
        for group in link.groups:
            if near in group:
                return f"{name}[{','.join(map(str, group))}]"
        if link.scope == "pair" and copies == "p2p":
            return f"{name}{source}-{device}"
        return f"{name}{near}"
