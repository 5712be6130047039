"""What a step needs of memory, position by position of its serial order, before anything has an address.

Values are of two kinds. *Fixed* ones hold their bytes from their producer to their last reader. *Pages* have a copy on
the host, so that they may leave between two readers: clean inputs, and produced values that are worth an offload.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from disco_accel.graph.order import serial_order
from disco_accel.graph.taskgraph import Ref, TaskGraph, Vertex, VertexKind
from disco_accel.plan.infeasible import Infeasible
from disco_accel.simulate.simulator import Machine

Profile = npt.NDArray[np.int64]
"""Bytes by position."""

GUESSED_BANDWIDTH = 1e12
"""Bytes per second that a kernel of unknown duration is taken to write."""


@dataclass(slots=True, eq=False)
class Storage:
    """A fixed place of ``block`` bytes for one value, or for a chain of values each written over the one before.

    ``first`` is the position of the first writer (-1: there at the start), ``last`` that of the last reader, and the
    number of positions if it is kept.
    """

    device: int
    block: int
    values: list[Ref]
    first: int
    last: int


@dataclass(slots=True, eq=False)
class Page:
    """A value that may leave the device between uses. ``uses``: positions that find it there on their own account.

    A clean input is ``free`` to come and go from position 0. A produced one stays from its producer up to before
    ``free``, by when its offload should have ended; readers in between are no ``uses``.
    """

    ref: Ref
    device: int
    block: int
    size: int
    uses: list[int]
    clean: bool
    producer: int = -1
    free: int = 0


@dataclass(slots=True)
class Demand:
    """``order``: the vertices but for inputs, by position. ``reads[p]``: pages that position p reads.
    ``devices[p]``: where memory changes. ``made[p]``: produced pages of position p. ``fixed``: bytes of storages by
    device and position, the position after the last standing for the end of the step; ``produced``: of produced pages
    that may not leave yet."""

    graph: TaskGraph
    inputs: tuple[Vertex, ...]
    order: tuple[Vertex, ...]
    seconds: list[float]
    align: dict[int, int]
    storages: list[Storage] = field(default_factory=list)
    pages: list[Page] = field(default_factory=list)
    reads: list[list[int]] = field(default_factory=list)
    devices: list[tuple[int, ...]] = field(default_factory=list)
    made: dict[int, list[int]] = field(default_factory=dict)
    fixed: dict[int, Profile] = field(default_factory=dict)
    produced: dict[int, Profile] = field(default_factory=dict)

    def block(self, size: int, device: int) -> int:
        """Return ``size`` rounded up to the alignment of ``device``."""
        align = self.align[device]
        return -(-size // align) * align

    @property
    def end(self) -> int:
        """The position that stands for the end of the step."""
        return len(self.order)


def demand_of(graph: TaskGraph, machine: Machine, worth: float | None) -> Demand:
    """Return what ``graph`` needs. ``worth``: a produced value may leave if its gap is so many times what its copies
    take (None: none may). Raises Infeasible for in-place writes that take a copy of what they overwrite."""
    serial = serial_order(graph)
    inputs = tuple(vertex for vertex in serial if vertex.kind is VertexKind.INPUT)
    order = serial[len(inputs) :]
    found = Demand(graph, inputs, order, [kernel_seconds(v, machine) for v in order], _alignments(graph))
    _Reader(found, machine, worth).read()
    return found


def _alignments(graph: TaskGraph) -> dict[int, int]:
    return {device.id: device.alignment for device in graph.devices}


def kernel_seconds(vertex: Vertex, machine: Machine) -> float:
    """Return how long ``vertex`` takes on ``machine``; a kernel without a duration is guessed from its outputs."""
    if vertex.kind is VertexKind.KERNEL and vertex.duration is None:
        return sum(vertex.sizes) / GUESSED_BANDWIDTH
    return machine.seconds(vertex)


class _Reader:
    def __init__(self, demand: Demand, machine: Machine, worth: float | None) -> None:
        self.demand = demand
        self.machine = machine
        self.worth = worth
        self.vertices = {vertex.id: vertex for vertex in (*demand.inputs, *demand.order)}
        self.readers: dict[Ref, list[int]] = {}
        for position, vertex in enumerate(demand.order):
            for ref in dict.fromkeys(vertex.inputs):
                self.readers.setdefault(ref, []).append(position)
        self.starts = [0.0]
        for seconds in demand.seconds:
            self.starts.append(self.starts[-1] + seconds)
        self.overwritten = {v.inputs[v.inplace] for v in demand.order if v.inplace is not None}
        self.storage: dict[Ref, Storage] = {}
        self.page: dict[Ref, int] = {}

    def read(self) -> None:
        demand = self.demand
        demand.reads = [[] for _ in demand.order]
        demand.devices = [self._touched(vertex) for vertex in demand.order]
        demand.fixed, demand.produced = (
            {device.id: np.zeros(demand.end + 1, np.int64) for device in demand.graph.devices} for _ in range(2)
        )
        for vertex in demand.inputs:
            self._input(vertex)
        for position, vertex in enumerate(demand.order):
            self._outputs(position, vertex)
        for storage in demand.storages:
            demand.fixed[storage.device][max(0, storage.first) : storage.last + 1] += storage.block
        for index, page in enumerate(demand.pages):
            if not page.clean:
                demand.produced[page.device][page.producer : page.free] += page.block
            for position in self.readers.get(page.ref, ()):
                demand.reads[position].append(index)

    def _touched(self, vertex: Vertex) -> tuple[int, ...]:
        if vertex.kind is VertexKind.TRANSFER:
            return tuple(dict.fromkeys((self.vertices[vertex.inputs[0][0]].device, vertex.device)))
        return (vertex.device,)

    def _input(self, vertex: Vertex) -> None:
        demand, ref = self.demand, (vertex.id, 0)
        if vertex.external or not vertex.sizes[0]:
            return
        block = demand.block(vertex.sizes[0], vertex.device)
        readers = self.readers.get(ref, [])
        if vertex.clean:
            if ref in self.overwritten:
                raise Infeasible(0)
            if readers:
                self.page[ref] = len(demand.pages)
                demand.pages.append(Page(ref, vertex.device, block, vertex.sizes[0], list(readers), True))
            return
        last = demand.end if vertex.keep or vertex.late else max(readers, default=0)
        self._store(Storage(vertex.device, block, [ref], -1, last))

    def _outputs(self, position: int, vertex: Vertex) -> None:
        demand = self.demand
        for k, size in enumerate(vertex.sizes):
            ref = (vertex.id, k)
            if not size:
                continue
            block = demand.block(size, vertex.device)
            readers = self.readers.get(ref, [])
            stays = vertex.keep or vertex.out
            last = demand.end if stays else max(readers, default=position)
            forced = k == 0 and vertex.inplace is not None
            if not forced and not vertex.out and self._make_page(position, vertex, ref, block, readers):
                continue
            over = self._overwrites(position, vertex, block) if k == 0 else None
            if over is None:
                self._store(Storage(vertex.device, block, [ref], position, last))
            else:
                over.values.append(ref)
                over.last = max(over.last, last)
                self.storage[ref] = over

    def _store(self, storage: Storage) -> None:
        self.storage[storage.values[0]] = storage
        self.demand.storages.append(storage)

    def _overwrites(self, position: int, vertex: Vertex, block: int) -> Storage | None:
        """Return the storage that output 0 of ``vertex`` is written over, if any."""
        if vertex.inplace is not None:
            ref = vertex.inputs[vertex.inplace]
            if not vertex.sizes[0]:
                return None
            if ref not in self.storage or not self._is_last(position, ref):
                raise Infeasible(position)
            return self.storage[ref]
        for p in vertex.may_inplace:
            ref = vertex.inputs[p]
            storage = self.storage.get(ref)
            everywhere = all(q in vertex.may_inplace for q, other in enumerate(vertex.inputs) if other == ref)
            fits = storage is not None and storage.device == vertex.device and storage.block == block
            if fits and everywhere and self._is_last(position, ref):
                source = self.vertices[ref[0]]
                if not source.late and source.sizes[ref[1]] >= vertex.sizes[0]:
                    return storage
        return None

    def _is_last(self, position: int, ref: Ref) -> bool:
        source = self.vertices[ref[0]]
        return self.readers[ref][-1] == position and not (source.keep or source.out)

    def _make_page(self, position: int, vertex: Vertex, ref: Ref, block: int, readers: list[int]) -> bool:
        """Make the output a page if it has a gap that is worth two copies."""
        if self.worth is None or ref in self.overwritten:
            return False
        size = vertex.sizes[ref[1]]
        out = self.machine.d2h.latency + size / self.machine.d2h.bandwidth
        back = self.machine.h2d.latency + size / self.machine.h2d.bandwidth
        ends = self.starts[position + 1] + out
        free = max(position + 1, min(bisect_left(self.starts, ends), self.demand.end))
        uses = readers[bisect_left(readers, free) :]
        times = [ends, *(self.starts[use] for use in uses), *([self.starts[-1]] if vertex.keep else [])]
        gaps = (after - before for before, after in pairwise(times))
        if not any(gap > self.worth * (out + back) for gap in gaps):
            return False
        page = Page(ref, vertex.device, block, size, uses, False, position, free)
        self.demand.made.setdefault(position, []).append(len(self.demand.pages))
        self.page[ref] = len(self.demand.pages)
        self.demand.pages.append(page)
        return True


def twice(demand: Demand) -> Demand:
    """Return two steps on end. Clean pages are the same in both; produced ones of the second step come last."""
    n, count = demand.end, len(demand.pages)
    pages: list[Page] = []
    again: list[Page] = []
    moved = {}
    for index, page in enumerate(demand.pages):
        later = [use + n for use in page.uses]
        if page.clean:
            pages.append(replace(page, uses=page.uses + later))
        else:
            pages.append(page)
            moved[index] = count + len(again)
            again.append(replace(page, uses=later, producer=page.producer + n, free=page.free + n))
    reads = [[moved.get(page, page) for page in at] for at in demand.reads]
    made = {position + n: [moved[page] for page in at] for position, at in demand.made.items()}
    fixed, produced = (
        {device: np.concatenate([profile[:n], profile]) for device, profile in profiles.items()}
        for profiles in (demand.fixed, demand.produced)
    )
    return replace(
        demand,
        order=demand.order * 2,
        seconds=demand.seconds * 2,
        storages=[],
        pages=pages + again,
        reads=demand.reads + reads,
        devices=demand.devices * 2,
        made={**demand.made, **made},
        fixed=fixed,
        produced=produced,
    )
