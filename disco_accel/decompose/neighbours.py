"""Weights from a neighbour: one of several devices that read a weight loads it, and sends it to the others.

Copies between devices may be far faster than loads, and the links of all devices load side by side: each brings its
share of the weights, in place of all weights for itself.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from disco_accel.decompose.spread import SpreadGraph
from disco_accel.graph.check import after_gate
from disco_accel.graph.copies import is_transfer
from disco_accel.graph.home_uses import host_devices
from disco_accel.graph.spaces import BETWEEN_DEVICES, TO_DEVICE
from disco_accel.graph.taskgraph import Ref, TaskGraph, Vertex, VertexKind
from disco_accel.graph.values import may_leave, never_changes
from disco_accel.simulate.machine import Machine

_AHEAD = 16
"""One part in so many of a device's memory holds copies from neighbours ahead of their first readers, and as much again
holds them between two readers."""

_LATENCIES = 2.0
"""A weight whose load takes fewer times the latency of its link is loaded by each device."""


def from_neighbours(done: SpreadGraph, machine: Machine) -> SpreadGraph | None:
    """``done`` with one home for each frozen weight that several devices read, and transfers from there.

    Homes are shared out so that each device loads as many bytes as the others. Another device gets a weight where its
    first reader needs it, and again once it has read other weights of more than a share of its memory. Each copy waits
    for a kernel shortly before its first reader, or early copies would fill the memory. None where no weight has
    several readers, or where copies between devices are slower than loads.
    """
    shared = _shared_weights(done, machine)
    if not shared or machine.link(BETWEEN_DEVICES).bandwidth < machine.link(TO_DEVICE).bandwidth:
        return None
    return _Sending(done, shared).run()


def weights_fit(graph: TaskGraph) -> bool:
    """Whether each device has memory for all weights that it reads."""
    room = {device.id: device.memory for device in graph.devices if not device.is_host_device}
    for vertex in graph.vertices:
        if never_changes(vertex) and vertex.space in room:
            room[vertex.space] -= vertex.sizes[0]
    return min(room.values()) >= 0


def _shared_weights(done: SpreadGraph, machine: Machine) -> dict[int, dict[int, int]]:
    """First input of a weight that goes from device to device → device → its input there."""
    by_id = {vertex.id: vertex for vertex in done.graph.vertices}
    hosts = host_devices(done.graph.devices)
    found: dict[int, dict[int, int]] = {}
    for copy, of in done.copies.items():
        weight = by_id[of]
        link = machine.link(TO_DEVICE)
        slow = link.seconds(weight.sizes[0], weight.space) > _LATENCIES * link.latency
        if slow and never_changes(weight) and may_leave(weight) and weight.space not in hosts:
            found.setdefault(of, {weight.space: of})[by_id[copy].space] = copy
    sent = {producer for v in done.graph.vertices if is_transfer(v) for producer, _ in v.inputs}
    return {of: there for of, there in found.items() if sent.isdisjoint(there.values())}


@dataclass
class _Copy:
    """``ref``: a value of ``size`` bytes that a device was sent; kernel ``first`` was its first reader. ``at``: bytes
    that the device had been sent, this included, when it was last read."""

    ref: Ref
    size: int
    first: int
    at: int


class _Sending:
    def __init__(self, done: SpreadGraph, shared: Mapping[int, Mapping[int, int]]) -> None:
        self._done, self._graph = done, done.graph
        self._weight_of = {input_: of for of, there in shared.items() for input_ in there.values()}
        self._by_id = {vertex.id: vertex for vertex in done.graph.vertices}
        self._home = self._homes(shared)
        self._behind = after_gate(done.graph.vertices)
        self._fresh = itertools.count(max(self._by_id) + 1)
        self._ahead = {device.id: device.memory // _AHEAD for device in done.graph.devices}
        self._bytes: dict[int, int] = defaultdict(int)
        """Device → bytes that it has been sent."""
        self._copies: dict[int, list[_Copy]] = defaultdict(list)
        self._last: dict[tuple[int, int], _Copy] = {}
        """Weight and device → the newest copy."""
        self._vertices: list[Vertex] = []

    def run(self) -> SpreadGraph:
        """Walk the kernels in order; a transfer comes right before the first that reads it."""
        for vertex in self._graph.vertices:
            weight = self._weight_of.get(vertex.id)
            if weight is None:
                inputs = tuple(self._input(ref, vertex) for ref in vertex.inputs)
                self._vertices.append(replace(vertex, inputs=inputs))
            elif weight == vertex.id:
                self._vertices.append(replace(vertex, space=self._home[weight]))
        copies = {copy: of for copy, of in self._done.copies.items() if copy not in self._weight_of}
        return replace(self._done, graph=replace(self._graph, vertices=tuple(self._vertices)), copies=copies)

    def _input(self, ref: Ref, reader: Vertex) -> Ref:
        weight = self._weight_of.get(ref[0])
        if weight is None:
            return ref
        # Kernels of a device in host memory read it there.
        at_home = reader.space in (self._home[weight], *host_devices(self._graph.devices))
        return (weight, 0) if at_home else self._sent(weight, reader)

    def _homes(self, shared: Mapping[int, Mapping[int, int]]) -> dict[int, int]:
        """Weight → the device that loads it: of those that read it the one with the fewest bytes so far, in the order
        of first use."""
        loaded: dict[int, int] = defaultdict(int)
        for vertex in self._graph.vertices:
            if never_changes(vertex) and vertex.id not in self._weight_of:
                loaded[vertex.space] += vertex.sizes[0]
        homes: dict[int, int] = {}
        for vertex in self._graph.vertices:
            for producer, _ in vertex.inputs:
                weight = self._weight_of.get(producer)
                if weight is not None and weight not in homes:
                    homes[weight] = min(shared[weight], key=lambda device: (loaded[device], device))
                    loaded[homes[weight]] += self._by_id[weight].sizes[0]
        return homes

    def _sent(self, weight: int, reader: Vertex) -> Ref:
        """``weight`` as ``reader`` gets it, with a new transfer if its device has read much since the last."""
        device, size = reader.space, self._by_id[weight].sizes[0]
        known = self._last.get((weight, device))
        if known is not None and self._bytes[device] - known.at <= self._ahead[device]:
            known.at = self._bytes[device]
            return known.ref
        moved = Vertex(next(self._fresh), VertexKind.COPY, device, "to_device", ((weight, 0),), (size,))
        after = self._not_before(reader, size)
        self._vertices.append(replace(moved, after=after, source=self._home[weight]))
        self._bytes[device] += size
        made = self._last[weight, device] = _Copy((moved.id, 0), size, reader.id, self._bytes[device])
        self._copies[device].append(made)
        return made.ref

    def _not_before(self, reader: Vertex, size: int) -> tuple[int, ...]:
        """The dependencies of a copy of ``size`` bytes for ``reader``: the first reader of the last copy that is not
        ahead of it."""
        for copy in reversed(self._copies[reader.space]):
            size += copy.size
            if size > self._ahead[reader.space] and copy.first != reader.id:
                # Nothing that is handed out at the gate may wait for what comes behind.
                return (copy.first,) if reader.id in self._behind or copy.first not in self._behind else ()
        return ()
