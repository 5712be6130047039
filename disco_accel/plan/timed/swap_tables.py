"""A step's requirements as arrays, which the compiled scheduler of swaps reads (``runtime_ext/plan/swap.cpp``).

Drafts of one set of requirements differ in bytes by position alone, so these are not part of the tables, which are made
once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from disco_accel.graph.check import dependencies
from disco_accel.graph.copies import is_transfer
from disco_accel.graph.spaces import BETWEEN_DEVICES, TO_DEVICE, TO_HOST
from disco_accel.plan.timed.step_buffers import StepRequirements
from disco_accel.simulate.simulator import Machine

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_KINDS = {TO_DEVICE: 1, TO_HOST: 2, BETWEEN_DEVICES: 3}
"""The number of the lane of a copy between devices by its route; 0: the compute of a device."""


@dataclass(frozen=True, slots=True)
class Lists:
    """Lists of numbers one behind the other, list i from ``first[i]`` on."""

    first: Ints
    items: Ints

    @classmethod
    def of(cls, lists: Iterable[Sequence[int]]) -> Lists:
        """Return ``lists`` in this form."""
        kept = list(lists)
        first = np.zeros(len(kept) + 1, np.int64)
        np.cumsum([len(each) for each in kept], out=first[1:])
        return cls(first, np.array([item for each in kept for item in each], np.int64))

    @classmethod
    def at(cls, table: Mapping[int, Sequence[int]], count: int) -> Lists:
        """Return the lists of a table by number, empty where it has none."""
        return cls.of(table.get(i, ()) for i in range(count)) if table else cls(np.zeros(count + 1, np.int64), _NONE)

    def then(self, items: Ints) -> Lists:
        """Return these lists, and behind them as many with ``items`` in place of their items."""
        first = np.concatenate((self.first, self.first[1:] + self.first[-1]))
        return Lists(first, np.concatenate((self.items, items)))


_NONE = np.zeros(0, np.int64)


@dataclass(frozen=True)
class SwapTables:
    """By position: ``vertex``, its number among the ``vertices``; ``device``, by number; ``kind`` of lane; ``waits``,
    numbers of vertices; ``touched`` devices; ``reads`` to ``written`` as of ``StepRequirements``. By buffer: as of
    ``SwappableBuffer``, ``home`` being the number of its device, and whether it ``survives`` the step. In seconds:
    of each position, a ``load`` and an ``offload`` of each buffer."""

    devices: tuple[int, ...]
    vertices: int
    vertex: Ints
    device: Ints
    kind: Ints
    waits: Lists
    touched: Lists
    reads: Lists
    read_before: Lists
    made: Lists
    changed: Lists
    written: Lists
    home: Ints
    block: Ints
    size: Ints
    evictable_from: Ints
    begin: Ints
    starts_on_host: Ints
    may_be_resident: Ints
    survives: Ints
    uses: Lists
    seconds: Floats
    load: Floats
    offload: Floats

    @classmethod
    def of(cls, requirements: StepRequirements, machine: Machine, devices: Sequence[int]) -> SwapTables:
        """Return those of one step on ``machine``."""
        order, buffers, end = requirements.order, requirements.swappable, requirements.end
        number = {vertex.id: i for i, vertex in enumerate(order)}
        device_number = {device: i for i, device in enumerate(devices)}
        on_links = machine.lanes(requirements.graph.spaces)
        lanes = [_KINDS[on_links.route(vertex.source, vertex.space)] if is_transfer(vertex) else 0 for vertex in order]
        seconds = np.array(requirements.seconds, np.float64)
        device = np.array([device_number[vertex.space] for vertex in order], np.int64)
        load = [on_links.copy_seconds(buffer.size, buffer.home, buffer.device) for buffer in buffers]
        offload = [on_links.copy_seconds(buffer.size, buffer.device, buffer.home) for buffer in buffers]

        def each(values: Iterable[int]) -> Ints:
            return np.fromiter(values, np.int64, len(buffers))

        return cls(
            devices=tuple(devices),
            vertices=end,
            vertex=np.arange(end),
            device=device,
            kind=np.array(lanes, np.int64),
            waits=Lists.of([number[each] for each in dependencies(vertex) if each in number] for vertex in order),
            touched=Lists.of([device_number[each] for each in touched] for touched in requirements.devices),
            reads=Lists.of(requirements.reads),
            read_before=Lists.at(requirements.read_before, end),
            made=Lists.at(requirements.made, end),
            changed=Lists.at(requirements.changed, end),
            written=Lists.at(requirements.written, end),
            home=each(device_number[buffer.device] for buffer in buffers),
            block=each(buffer.block for buffer in buffers),
            size=each(buffer.size for buffer in buffers),
            evictable_from=each(buffer.evictable_from for buffer in buffers),
            begin=each(buffer.begin for buffer in buffers),
            starts_on_host=each(buffer.starts_on_host for buffer in buffers),
            may_be_resident=each(buffer.may_be_resident for buffer in buffers),
            survives=each(requirements.outlives(buffer) for buffer in buffers),
            uses=Lists.of(buffer.uses for buffer in buffers),
            seconds=seconds,
            load=np.array(load, np.float64),
            offload=np.array(offload, np.float64),
        )

    def twice(self) -> SwapTables:
        """Return those of the step twice in a row. Buffers that may be resident are shared; the others of the second
        step are listed last."""
        count, end = len(self.home), len(self.vertex)
        own = np.flatnonzero(self.may_be_resident == 0)
        second = np.arange(count)
        second[own] = count + np.arange(len(own))

        def with_own(values: Ints, later: int = 0) -> Ints:
            return np.concatenate((values, values[own] + later))

        def doubled(lists: Lists, second: Ints | None = None) -> Lists:
            return lists.then(lists.items if second is None else second[lists.items])

        uses = np.split(self.uses.items, self.uses.first[1:-1]) if count else []
        both = [np.concatenate((each, each + end)) if self.may_be_resident[i] else each for i, each in enumerate(uses)]
        behind = [uses[i] + end for i in own]
        lengths = [len(each) for each in (*both, *behind)]
        return SwapTables(
            devices=self.devices,
            vertices=self.vertices,
            vertex=np.tile(self.vertex, 2),
            device=np.tile(self.device, 2),
            kind=np.tile(self.kind, 2),
            waits=doubled(self.waits),
            touched=doubled(self.touched),
            reads=doubled(self.reads, second),
            read_before=doubled(self.read_before, second),
            made=doubled(self.made, second),
            changed=doubled(self.changed),
            written=doubled(self.written, second),
            home=with_own(self.home),
            block=with_own(self.block),
            size=with_own(self.size),
            evictable_from=with_own(self.evictable_from, end),
            begin=with_own(self.begin),
            starts_on_host=with_own(self.starts_on_host),
            may_be_resident=with_own(self.may_be_resident),
            survives=with_own(self.survives),
            uses=Lists(np.cumsum([0, *lengths]), np.concatenate([_NONE, *both, *behind])),
            seconds=np.tile(self.seconds, 2),
            load=np.concatenate((self.load, self.load[own])),
            offload=np.concatenate((self.offload, self.offload[own])),
        )
