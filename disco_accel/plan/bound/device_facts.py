"""One device of a step for a bound: the values that its kernels read and write, by positions in the serial order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from disco_accel.graph.home_uses import HomeUses
from disco_accel.graph.order import serial_order
from disco_accel.graph.spaces import HOST, TO_DEVICE, TO_HOST, SpaceKind
from disco_accel.graph.taskgraph import Ref, TaskGraph, Vertex, VertexKind
from disco_accel.graph.values import host_copy_exists, is_foreign, outlives_step, overwrites
from disco_accel.simulate.simulator import Link, Machine


def outputs_of(vertex: Vertex) -> Iterator[tuple[Ref, int]]:
    """Yield each value that ``vertex`` writes with its bytes."""
    return (((vertex.id, k), size) for k, size in enumerate(vertex.sizes))


@dataclass(slots=True)
class DeviceValue:
    """``uses``: positions that read it, ascending; ``made``: the position that writes it, -1 for an input.

    ``starts_on_host``: the host has it when a step starts. ``changed``: kernels change it, so that the next step starts
    with another content. ``host_updated``: the host does between two steps, so that each step loads it. ``at_home``:
    kernels of a host device do, so that each step loads it too, maybe before it starts.
    """

    size: int
    made: int
    starts_on_host: bool
    changed: bool = False
    host_updated: bool = False
    at_home: bool = False
    uses: list[int] = field(default_factory=list)


def _at_once(links: Sequence[Link], device: int) -> Link:
    """Return a link of ``device`` that is no slower than ``links`` together."""
    rate, latency = sum(link.rate(device) for link in links), min(link.latency for link in links)
    return replace(links[0], bandwidth=rate, latency=latency)


class DeviceFacts:
    """One device by position: ``seconds`` of compute, bytes ``needed`` for inputs and outputs, ``outputs`` alone.

    ``loads`` and ``backs``: the links of its copies from and to homes. ``stored``: some of its values have their homes
    in storage; each of the two then stands for two links at once.
    """

    def __init__(self, graph: TaskGraph, machine: Machine, device: int, memory: int) -> None:
        self.machine = machine
        self.stored = any(v.space == device and v.source != HOST and host_copy_exists(v) for v in graph.vertices)
        loads, backs = [machine.link(TO_DEVICE)], [machine.link(TO_HOST)]
        if self.stored:
            loads.append(machine.link((SpaceKind.STORAGE, SpaceKind.DEVICE)))
            backs.append(machine.link((SpaceKind.DEVICE, SpaceKind.STORAGE)))
        self.loads, self.backs = _at_once(loads, device), _at_once(backs, device)
        self.memory = memory
        order = [vertex for vertex in serial_order(graph) if vertex.kind is not VertexKind.INPUT]
        self.end = len(order)
        self.values: dict[Ref, DeviceValue] = {}
        """By every name; the versions of a value that changes over steps are one value."""
        self.home_uses = HomeUses.of(graph)
        self.streams = 1 if device in self.home_uses.hosts else machine.compute_streams
        written = {self.home_uses.homes[version] for version in self.home_uses.written}
        inputs = (v for v in graph.vertices if v.kind is VertexKind.INPUT and v.space == device)
        for vertex in inputs:
            ref = (vertex.id, 0)
            if vertex.sizes[0] and not is_foreign(vertex) and not self.home_uses.never_moves(vertex):
                self.values[ref] = DeviceValue(vertex.sizes[0], -1, host_copy_exists(vertex))
                self.values[ref].host_updated, self.values[ref].at_home = not outlives_step(vertex), ref in written
        # What the host changes in a step is loaded once a step, in whichever version.
        for version in self.home_uses.written:
            if self.home_uses.homes[version] in self.values:
                self.values[version] = self.values[self.home_uses.homes[version]]
        self.seconds = [0.0] * self.end
        self.needed = np.zeros(self.end, np.int64)
        self.outputs = np.zeros(self.end, np.int64)
        for position, vertex in enumerate(order):
            if vertex.kind is VertexKind.KERNEL and vertex.space == device:
                self.seconds[position] = vertex.duration or 0.0
            self._count(position, vertex, device)

    def _count(self, position: int, vertex: Vertex, device: int) -> None:
        refs = [ref for ref in dict.fromkeys(vertex.inputs) if not self.home_uses.at_home(vertex, ref)]
        read = [self.values[ref] for ref in refs if ref in self.values]
        for value in read:
            value.uses.append(position)
        written = sum(vertex.sizes) if vertex.space == device and not is_foreign(vertex) else 0
        if written:
            # An output costs nothing of its own where it is, or may be, written over an input.
            over = {k for k, ref in overwrites(vertex) if ref in self.values}
            over |= {0 for p in vertex.may_inplace if vertex.inputs[p] in self.values}
            over |= {k for ref, _ in outputs_of(vertex) for k in ref[1:] if ref in self.home_uses.written}
            written -= sum(vertex.sizes[k] for k in over)
        self.needed[position] = sum(value.size for value in read) + written
        self.outputs[position] = written
        if vertex.space == device and not is_foreign(vertex):
            over_input = dict(overwrites(vertex))
            for k, size in enumerate(vertex.sizes):
                if (vertex.id, k) in self.home_uses.written:
                    continue
                former = self.values.get(over_input[k]) if k in over_input else None
                if former is not None and former.starts_on_host:
                    former.changed = True
                    self.values[vertex.id, k] = former
                elif size:
                    self.values[vertex.id, k] = DeviceValue(size, position, False)

    @property
    def each_value(self) -> list[DeviceValue]:
        """Every value once."""
        return list({id(value): value for value in self.values.values()}.values())

    @property
    def host_updated(self) -> list[int]:
        """The bytes of each value that every step loads at least once."""
        return [value.size for value in self.each_value if (value.host_updated or value.at_home) and value.uses]
