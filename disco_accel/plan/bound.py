"""A lower bound of the step time over all cyclic plans of a graph, in its order, on a given machine.

The largest of four bounds: compute, the critical path, the link (a linear program on the bytes that must be loaded),
and the phases (stretches of the step in which the link is the bottleneck although it idles in others). They depend on
the machine and the graph, not on a plan.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from disco_accel.graph.check import dependencies
from disco_accel.graph.home_uses import HomeUses, host_devices
from disco_accel.graph.order import serial_order
from disco_accel.graph.taskgraph import Ref, TaskGraph, Vertex, VertexKind, with_memory
from disco_accel.graph.values import (
    arrives_at_gate,
    handed_out_at_gate,
    host_copy_exists,
    is_foreign,
    outlives_step,
    overwrites,
)
from disco_accel.plan.lane_bound import lane_bound
from disco_accel.plan.phases import OneDevice, phases
from disco_accel.simulate.machine import copy_kind
from disco_accel.simulate.simulator import Machine


@dataclass(frozen=True, slots=True)
class Bound:
    """Seconds, but for ``lp_reload_bytes``: the least bytes that a step must load, of all devices together."""

    compute: float
    link: float
    critical_path: float
    phases: float
    lp_reload_bytes: int

    @property
    def bound(self) -> float:
        """The lower bound of a step, in seconds."""
        return max(self.compute, self.link, self.critical_path, self.phases)


def bound_of(graph: TaskGraph, machine: Machine | None = None, memory: int | None = None) -> Bound:
    """Return the bound of ``graph`` with ``memory`` bytes on every device but the host's (None: those of its own)."""
    machine = machine or Machine()
    graph = graph if memory is None else with_memory(graph, lambda _: memory)
    facts = [_Facts(graph, machine, device.id, device.memory) for device in graph.devices]
    # Devices that share a link, and kinds of copies that do, take turns on it.
    links: dict[str, float] = defaultdict(float)
    reloaded = 0.0
    for device, each in zip(graph.devices, facts, strict=True):
        loads, backs = (machine.lane(kind, device.id, device.id) for kind in (VertexKind.RELOAD, VertexKind.OFFLOAD))
        seconds, nbytes = _least_copies(each, (VertexKind.RELOAD,))
        reloaded += nbytes
        if any(value.changed for value in each.each_value):
            both = (VertexKind.RELOAD, VertexKind.OFFLOAD)
            written_back, _ = _least_copies(each, both if loads == backs else (VertexKind.OFFLOAD,))
            links[backs] += written_back
            seconds = 0.0 if loads == backs else seconds
        links[loads] += seconds
    where = {vertex.id: vertex.device for vertex in graph.vertices}
    hosts = host_devices(graph.devices)
    for vertex in graph.vertices:
        if vertex.kind is VertexKind.TRANSFER:
            source = where[vertex.inputs[0][0]]
            kind = copy_kind(vertex, source, hosts)
            near = source if kind is VertexKind.OFFLOAD else vertex.device
            links[machine.lane(kind, near, source)] += machine.seconds(vertex, kind, source)
    return Bound(
        compute=max((sum(each.seconds) / each.streams for each in facts), default=0.0),
        link=max(links.values(), default=0.0),
        critical_path=max(_critical_path(graph, machine), lane_bound(graph, machine)),
        phases=max((_phases(each) for each in facts), default=0.0),
        lp_reload_bytes=int(reloaded),
    )


def _critical_path(graph: TaskGraph, machine: Machine) -> float:
    """Return the longest chain of kernels and transfers; a late input waits for everything that is handed out, and then
    the kernels of each device that follow late inputs run one after the other."""
    ends: dict[int, float] = {}
    home_uses = HomeUses.of(graph)
    device = {vertex.id: vertex.device for vertex in graph.vertices}
    written = ((ref, size) for vertex in graph.vertices for ref, size in _outputs(vertex) if ref in home_uses.written)
    sizes = {ref: size for ref, size in written if size}
    late = {vertex.id for vertex in graph.vertices if arrives_at_gate(vertex)}
    gate = 0.0
    behind_gate: set[int] = set()
    loads: dict[int, float] = defaultdict(float)
    for vertex in serial_order(graph):
        sources = dependencies(vertex)
        if vertex.id in late or not behind_gate.isdisjoint(sources):
            behind_gate.add(vertex.id)
            if vertex.kind is VertexKind.KERNEL:
                streams = 1 if vertex.device in home_uses.hosts else machine.compute_streams
                loads[vertex.device] += machine.seconds(vertex) / streams
        begin = max((ends[source] for source in sources), default=0.0)
        for ref in vertex.inputs:
            if ref in sizes and not home_uses.at_home(vertex, ref):
                # A reload takes it from its home to the device.
                begin = max(begin, ends[ref[0]] + machine.h2d.seconds(sizes[ref], vertex.device))
        if not late.isdisjoint(sources):
            begin = max(begin, gate)
        source = device[vertex.inputs[0][0]] if vertex.inputs else vertex.device
        ends[vertex.id] = begin + machine.seconds(vertex, copy_kind(vertex, source, home_uses.hosts), source)
        if handed_out_at_gate(vertex):
            gate = max(gate, ends[vertex.id])
    return max([*ends.values(), gate + max(loads.values(), default=0.0)])


def _outputs(vertex: Vertex) -> Iterator[tuple[Ref, int]]:
    return (((vertex.id, k), size) for k, size in enumerate(vertex.sizes))


@dataclass(slots=True)
class _Value:
    """``uses``: positions that read it, ascending; ``made``: the position that writes it, -1 for an input.

    ``starts_on_host``: the host has it when a step starts; ``changed``: kernels change it, so that the next step starts
    with another content; ``renewed``: the host does between two steps, so that each step loads it; ``at_home``: kernels
    of a host device do, so that each step loads it too, maybe before it starts.
    """

    size: int
    made: int
    starts_on_host: bool
    changed: bool = False
    renewed: bool = False
    at_home: bool = False
    uses: list[int] = field(default_factory=list)


class _Facts:
    """One device by position: ``seconds`` of compute, bytes ``needed`` for inputs and outputs, ``outputs`` alone."""

    def __init__(self, graph: TaskGraph, machine: Machine, device: int, memory: int) -> None:
        self.machine = machine
        self.loads, self.backs = (replace(link, bandwidth=link.rate(device)) for link in (machine.h2d, machine.d2h))
        self.memory = memory
        order = [vertex for vertex in serial_order(graph) if vertex.kind is not VertexKind.INPUT]
        self.end = len(order)
        self.values: dict[Ref, _Value] = {}
        """By every name; the versions of a value that changes over steps are one value."""
        self.home_uses = HomeUses.of(graph)
        self.streams = 1 if device in self.home_uses.hosts else machine.compute_streams
        written = {self.home_uses.homes[version] for version in self.home_uses.written}
        inputs = (v for v in graph.vertices if v.kind is VertexKind.INPUT and v.device == device)
        for vertex in inputs:
            ref = (vertex.id, 0)
            if vertex.sizes[0] and not is_foreign(vertex) and not self.home_uses.never_moves(vertex):
                self.values[ref] = _Value(vertex.sizes[0], -1, host_copy_exists(vertex))
                self.values[ref].renewed, self.values[ref].at_home = not outlives_step(vertex), ref in written
        # What the host changes in a step is loaded once a step, in whichever version.
        for version in self.home_uses.written:
            if self.home_uses.homes[version] in self.values:
                self.values[version] = self.values[self.home_uses.homes[version]]
        self.seconds = [0.0] * self.end
        self.needed = np.zeros(self.end, np.int64)
        self.outputs = np.zeros(self.end, np.int64)
        for position, vertex in enumerate(order):
            if vertex.kind is VertexKind.KERNEL and vertex.device == device:
                self.seconds[position] = machine.seconds(vertex)
            self._count(position, vertex, device)

    def _count(self, position: int, vertex: Vertex, device: int) -> None:
        refs = [ref for ref in dict.fromkeys(vertex.inputs) if not self.home_uses.at_home(vertex, ref)]
        read = [self.values[ref] for ref in refs if ref in self.values]
        for value in read:
            value.uses.append(position)
        written = sum(vertex.sizes) if vertex.device == device and not is_foreign(vertex) else 0
        if written:
            # An output costs nothing of its own where it is, or may be, written over an input.
            over = {k for k, ref in overwrites(vertex) if ref in self.values}
            over |= {0 for p in vertex.may_inplace if vertex.inputs[p] in self.values}
            over |= {k for ref, _ in _outputs(vertex) for k in ref[1:] if ref in self.home_uses.written}
            written -= sum(vertex.sizes[k] for k in over)
        self.needed[position] = sum(value.size for value in read) + written
        self.outputs[position] = written
        if vertex.device == device and not is_foreign(vertex):
            over_input = dict(overwrites(vertex))
            for k, size in enumerate(vertex.sizes):
                if (vertex.id, k) in self.home_uses.written:
                    continue
                former = self.values.get(over_input[k]) if k in over_input else None
                if former is not None and former.starts_on_host:
                    former.changed = True
                    self.values[vertex.id, k] = former
                elif size:
                    self.values[vertex.id, k] = _Value(size, position, False)

    @property
    def each_value(self) -> list[_Value]:
        """Every value once."""
        return list({id(value): value for value in self.values.values()}.values())

    @property
    def renewed(self) -> list[int]:
        """The bytes of each value that every step loads at least once."""
        return [value.size for value in self.each_value if (value.renewed or value.at_home) and value.uses]


@dataclass(frozen=True, slots=True)
class _Gap:
    """``size`` bytes that nobody reads in ``[begin, end)``, which crosses the step boundary if ``begin > end``.

    ``changed``: by then the host's copy is out of date, so that leaving takes a write-back.
    """

    begin: int
    end: int
    size: int
    changed: bool = False


def _gaps(facts: _Facts, least: int) -> list[_Gap]:
    """Return the gaps between two uses in which keeping a value saves a reload, of values from ``least`` bytes on."""
    gaps = []
    for value in facts.each_value:
        if value.size < least or not value.uses:
            continue
        stops = value.uses if value.made < 0 else [value.made, *value.uses]
        gaps += [_Gap(a + 1, b, value.size) for a, b in pairwise(stops) if b > a + 1]
        stays = value.starts_on_host and not value.renewed and not value.at_home
        if stays and (value.uses[-1] + 1 < facts.end or value.uses[0] > 0):
            gaps.append(_Gap(value.uses[-1] + 1, value.uses[0], value.size, value.changed))
    return gaps


def _rows(facts: _Facts, gaps: Sequence[_Gap]) -> list[int]:
    """Return the positions that can bind: those where not everything fits, thinned out to ``_MAX_ROWS``."""
    load = facts.needed.astype(np.int64)
    for gap in gaps:
        if gap.begin <= gap.end:
            load[gap.begin : gap.end] += gap.size
        else:
            load[gap.begin :] += gap.size
            load[: gap.end] += gap.size
    pressed = np.flatnonzero(load > facts.memory)
    if len(pressed) <= _MAX_ROWS:
        return [int(p) for p in pressed]
    parts = np.array_split(pressed, _MAX_ROWS)
    return [int(part[np.argmax(facts.needed[part])]) for part in parts]


_MAX_ROWS = 20_000
"""Beyond so many some are left out, which keeps the program small, and its optimum a bound."""


def _least_copies(facts: _Facts, directions: Collection[VertexKind]) -> tuple[float, float]:
    """Return seconds and bytes that copies in ``directions`` (RELOAD, OFFLOAD) take at least in a step, by linear
    programming; what the host renews is loaded once besides.

    The variables are the bytes of each value kept through each gap; at no position may more be kept than fits beside
    the inputs and outputs of its vertex. Bytes that are not kept are reloaded, and written back before where a kernel
    has changed them; of several gaps behind one change only that around the step boundary is counted, since one
    write-back serves all. The step is a ring: values on the device at its end are there at its start. Bytes that are
    written back and reloaded count twice.
    """
    from scipy.optimize import linprog
    from scipy.sparse import csc_array

    link = facts.loads
    renewed = facts.renewed if VertexKind.RELOAD in directions else []
    always = sum(renewed) / link.bandwidth + len(renewed) * link.latency
    gaps = _gaps(facts, max(1, facts.memory // 2000))
    rows = _rows(facts, gaps)
    if not rows:
        return always, sum(renewed)
    spans: dict[tuple[int, int, int, bool], list[_Gap]] = defaultdict(list)
    at = np.array(rows)
    for gap in gaps:
        first, last = int(np.searchsorted(at, gap.begin)), int(np.searchsorted(at, gap.end))
        around = gap.begin > gap.end
        if around or last > first:
            # Gaps over the same rows and of equal size are one variable.
            spans[first, last, gap.size, gap.changed].append(gap)
    free = facts.memory - facts.needed[at]
    if (free < 0).any():
        free = np.maximum(free, 0)
    row, column, entry, upper, gain = [], [], [], [], []
    times: list[int] = []

    def put(r: int, c: int, value: float) -> None:
        if r < len(rows):
            row.append(r)
            column.append(c)
            entry.append(value)

    # Each row is the difference to the one before: a gap has one entry where it begins and one where it ends.
    for c, ((first, last, size, changed), same) in enumerate(spans.items()):
        around = same[0].begin > same[0].end
        if around:
            put(0, c, 1.0)
        put(last if around else first, c, -1.0 if around else 1.0)
        put(first if around else last, c, 1.0 if around else -1.0)
        upper.append(size * len(same) / facts.memory)
        written_back = changed and VertexKind.OFFLOAD in directions
        gain.append(-(VertexKind.RELOAD in directions) * (1.0 + link.latency * link.bandwidth / size))
        if written_back:
            back = facts.backs
            gain[-1] -= (1.0 + back.latency * back.bandwidth / size) * link.bandwidth / back.bandwidth
        times.append((VertexKind.RELOAD in directions) + written_back)
    count = len(spans)
    for r in range(len(rows)):
        put(r, count + r, 1.0)
        put(r + 1, count + r, -1.0)
        upper.append(np.inf)
        gain.append(0.0)
    matrix = csc_array((entry, (row, column)), shape=(len(rows), count + len(rows)))
    right = np.diff(free, prepend=0) / facts.memory
    solved = linprog(gain, A_eq=matrix, b_eq=right, bounds=[(0.0, u) for u in upper], method="highs")
    if solved.x is None:
        return always, sum(renewed)
    missing = [(u - x) * facts.memory for u, x in zip(upper[:count], solved.x[:count], strict=True)]
    cost = sum(m * -g for m, g in zip(missing, gain[:count], strict=True))
    nbytes = sum(m * n for m, n in zip(missing, times, strict=True))
    return always + max(0.0, cost / link.bandwidth), sum(renewed) + max(0.0, nbytes)


def _phases(facts: _Facts) -> float:
    """Return what ``phases`` does. Kernels on several streams start in no one order, so that there are none."""
    if facts.streams > 1:
        return 0.0
    return phases(OneDevice(facts.seconds, facts.outputs, facts.memory, facts.loads.bandwidth, facts.each_value))
