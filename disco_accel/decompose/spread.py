"""The last step of every decomposition: vertices have got their devices, values get to the devices that read them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from disco_accel.errors import CaptureError
from disco_accel.graph.check import called
from disco_accel.graph.copies import is_transfer
from disco_accel.graph.home_uses import host_devices
from disco_accel.graph.spaces import Space, SpaceKind
from disco_accel.graph.taskgraph import Ref, TaskGraph, Vertex, VertexKind
from disco_accel.graph.values import changes_over_steps, host_copy_exists, is_foreign, overwrites


@dataclass(frozen=True)
class SpreadGraph:
    """``graph`` runs on several devices. ``copies``: an INPUT that was added for another device → the INPUT whose bytes
    on the host it has too. ``home``: a value that is handed out → where the first device has it."""

    graph: TaskGraph
    copies: Mapping[int, int]
    home: Mapping[Ref, Ref]


def spread(
    graph: TaskGraph, device_of: Mapping[int, int], devices: Sequence[Space], handed_out: Collection[Ref]
) -> SpreadGraph:
    """Return ``graph`` with each kernel of ``device_of`` on its device, and transfers where a value crosses.

    ``devices``: those of the result that do not lie in host memory, the first with the id that ``graph`` has; those in
    host memory stay. All inputs from the user and values for the user are on the first. A weight that the host has
    is an input of each device that reads it, so that each loads it over its own link. ``handed_out``: outputs and
    gradients; those that a transfer takes to the user's memory leave from the device that made them.

    Raises:
        CaptureError: kernels of two devices change one value that lives over steps.
    """
    return _Spreading(graph, device_of, devices, set(handed_out)).run()


@dataclass
class _Spreading:
    graph: TaskGraph
    device_of: Mapping[int, int]
    devices: Sequence[Space]
    handed_out: set[Ref]
    vertices: list[Vertex] = field(default_factory=list)
    inputs: list[Vertex] = field(default_factory=list)
    copies: dict[int, int] = field(default_factory=dict)
    home: dict[Ref, Ref] = field(default_factory=dict)
    there: dict[tuple[Ref, int], Ref] = field(default_factory=dict)
    """Value and another device → its copy there."""

    def __post_init__(self) -> None:
        self.hosts = host_devices(self.graph.devices)
        self.first = self.devices[0].id
        self.fresh = max((vertex.id for vertex in self.graph.vertices), default=-1) + 1
        self.by_id = {vertex.id: vertex for vertex in self.graph.vertices}
        self.placed = self._placed()

    def run(self) -> SpreadGraph:
        for vertex in self.graph.vertices:
            device = self.placed[vertex.id]
            if vertex.kind is VertexKind.KERNEL or (is_transfer(vertex) and device not in self.hosts):
                vertex = replace(vertex, inputs=tuple(self._on(ref, device) for ref in vertex.inputs))
            source = vertex.source
            if vertex.kind is VertexKind.COPY:
                source = self.placed[vertex.inputs[0][0]] if device in self.hosts else device
            self._add(replace(vertex, space=device, source=source))
        others = tuple(space for space in self.graph.spaces if space.kind is not SpaceKind.DEVICE)
        graph = replace(self.graph, spaces=(*self.devices, *others), vertices=(*self.inputs, *self.vertices))
        return SpreadGraph(graph, self.copies, self.home)

    def _placed(self) -> dict[int, int]:
        """Vertex → device. A value that changes over steps lies where its kernels write it, a weight on the first
        device that reads it."""
        placed = {vertex.id: self._own(vertex) for vertex in self.graph.vertices}
        state: dict[Ref, int] = {}
        written_on: dict[int, int] = {}
        for vertex in self.graph.vertices:
            if changes_over_steps(vertex):
                state[vertex.id, 0] = vertex.id
            for output, ref in overwrites(vertex):
                if ref not in state:
                    continue
                of = state[vertex.id, output] = state[ref]
                writer = placed[vertex.id]
                if writer not in self.hosts and written_on.setdefault(of, writer) != writer:
                    what = called(self.by_id[of])
                    raise CaptureError(f"{what} is changed on two devices; use one device for this step")
        read_on: dict[int, int] = {}
        for vertex in self.graph.vertices:
            if vertex.kind is VertexKind.KERNEL and placed[vertex.id] not in self.hosts:
                for producer, _ in vertex.inputs:
                    read_on.setdefault(producer, placed[vertex.id])
        for vertex in self.graph.vertices:
            if host_copy_exists(vertex) and vertex.space not in self.hosts:
                where = (written_on if changes_over_steps(vertex) else read_on).get(vertex.id)
                placed[vertex.id] = read_on.get(vertex.id, self.first) if where is None else where
        return placed

    def _own(self, vertex: Vertex) -> int:
        if vertex.space in self.hosts:
            return vertex.space
        return self.device_of.get(vertex.id, self.first) if vertex.kind is VertexKind.KERNEL else self.first

    def _add(self, vertex: Vertex) -> None:
        """Put ``vertex`` at the end. Values for the user follow to the first device, with the flags."""
        gets = [(vertex.id, k) for k in range(len(vertex.sizes)) if (vertex.id, k) in self.handed_out]
        flagged = vertex.out or vertex.keep
        away = flagged and gets and vertex.space not in (self.first, *self.hosts)
        self.vertices.append(replace(vertex, out=False, keep=False) if away else vertex)
        for ref in gets:
            self.home[ref] = self._moved(ref, self.first, vertex) if away else ref

    def _moved(self, ref: Ref, device: int, flags: Vertex | None = None) -> Ref:
        """A transfer of ``ref``, whose vertex is there already, to ``device``."""
        size, source = self.by_id[ref[0]].sizes[ref[1]], self.placed[ref[0]]
        moved = Vertex(self._next(), VertexKind.COPY, device, "to_device", (ref,), (size,), source=source)
        if flags is not None:
            moved = replace(moved, out=flags.out, keep=flags.keep)
        self.vertices.append(moved)
        self.there[ref, device] = moved.id, 0
        return moved.id, 0

    def _next(self) -> int:
        self.fresh += 1
        return self.fresh - 1

    def _on(self, ref: Ref, device: int) -> Ref:
        """``ref`` as ``device`` reads it. Kernels of host devices read values at their homes."""
        vertex = self.by_id[ref[0]]
        if self.placed[vertex.id] == device or (device in self.hosts and host_copy_exists(vertex)):
            return ref
        known = self.there.get((ref, device))
        if known is not None:
            return known
        if not host_copy_exists(vertex) or changes_over_steps(vertex) or is_foreign(vertex):
            return self._moved(ref, device)
        copy = replace(vertex, id=self._next(), space=device)
        self.inputs.append(copy)
        self.copies[copy.id] = vertex.id
        self.there[ref, device] = copy.id, 0
        return copy.id, 0
