"""When each swappable buffer is on the device: a step simulated in time (``runtime_ext/plan/swap.cpp``).

Kernels run in serial order. An idle link prefetches the missing buffer with the nearest next use, if from now to that
use the pinned bytes, the buffers promised to readers until then and this one fit together. Buffers that are promised to
nobody stay as long as no bytes are missing; the one with the furthest next use is evicted first. A buffer that is to be
kept through a gap (``kept_gaps.py``) has its bytes reserved from the start.
"""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from disco_accel.graph.check import dependencies
from disco_accel.graph.copies import is_transfer
from disco_accel.graph.spaces import BETWEEN_DEVICES, TO_DEVICE, TO_HOST
from disco_accel.plan.infeasible import Infeasible
from disco_accel.plan.timed.kept_gaps import Kept, in_two_steps
from disco_accel.plan.timed.planner_library import planner_library
from disco_accel.plan.timed.step_buffers import Profile, StepRequirements
from disco_accel.simulate.simulator import Machine

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_KINDS = {TO_DEVICE: 1, TO_HOST: 2, BETWEEN_DEVICES: 3}
"""The number of the lane of a copy between devices by its route; 0: the compute of a device."""

_Int = ctypes.c_int64
_Array = ctypes.c_void_p


class SwapEvent(enum.IntEnum):
    """``RUN`` position; ``RELOAD``, ``EVICT``, ``OFFLOAD`` buffer; ``RELEASE`` device: its last vertex has ended."""

    RUN = 0
    RELOAD = 1
    EVICT = 2
    OFFLOAD = 3
    RELEASE = 4


@dataclass(slots=True)
class SwapSchedule:
    """``events`` in an order that respects all waits; ``seconds`` of the step; ``reloaded`` bytes."""

    events: list[tuple[SwapEvent, int]] = field(default_factory=list)
    seconds: float = 0.0
    reloaded: int = 0


@dataclass(frozen=True, slots=True)
class _Lists:
    """_Lists of numbers one behind the other, list i from ``first[i]`` on."""

    first: Ints
    items: Ints

    @classmethod
    def of(cls, lists: Iterable[Sequence[int]]) -> _Lists:
        """Return ``lists`` in this form."""
        kept = list(lists)
        first = np.zeros(len(kept) + 1, np.int64)
        np.cumsum([len(each) for each in kept], out=first[1:])
        return cls(first, np.array([item for each in kept for item in each], np.int64))

    @classmethod
    def at(cls, table: Mapping[int, Sequence[int]], count: int) -> _Lists:
        """Return the lists of a table by number, empty where it has none."""
        return cls.of(table.get(i, ()) for i in range(count)) if table else cls(np.zeros(count + 1, np.int64), _NONE)

    def then(self, items: Ints) -> _Lists:
        """Return these lists, and behind them as many with ``items`` in place of their items."""
        first = np.concatenate((self.first, self.first[1:] + self.first[-1]))
        return _Lists(first, np.concatenate((self.items, items)))


_NONE = np.zeros(0, np.int64)


@dataclass(frozen=True)
class _SwapTables:
    """By position: ``vertex``, its number among the ``vertices``; ``device``, by number; ``kind`` of lane; ``waits``,
    numbers of vertices; ``touched`` devices; ``reads`` to ``written`` as of ``StepRequirements``. By buffer: as of
    ``SwappableBuffer``, ``home`` being the number of its device, and whether it ``survives`` the step. In seconds:
    of each position, a ``load`` and an ``offload`` of each buffer."""

    devices: tuple[int, ...]
    vertices: int
    vertex: Ints
    device: Ints
    kind: Ints
    waits: _Lists
    touched: _Lists
    reads: _Lists
    read_before: _Lists
    made: _Lists
    changed: _Lists
    written: _Lists
    home: Ints
    block: Ints
    size: Ints
    evictable_from: Ints
    begin: Ints
    starts_on_host: Ints
    may_be_resident: Ints
    survives: Ints
    uses: _Lists
    seconds: Floats
    load: Floats
    offload: Floats

    @classmethod
    def of(cls, requirements: StepRequirements, machine: Machine, devices: Sequence[int]) -> _SwapTables:
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
            waits=_Lists.of([number[each] for each in dependencies(vertex) if each in number] for vertex in order),
            touched=_Lists.of([device_number[each] for each in touched] for touched in requirements.devices),
            reads=_Lists.of(requirements.reads),
            read_before=_Lists.at(requirements.read_before, end),
            made=_Lists.at(requirements.made, end),
            changed=_Lists.at(requirements.changed, end),
            written=_Lists.at(requirements.written, end),
            home=each(device_number[buffer.device] for buffer in buffers),
            block=each(buffer.block for buffer in buffers),
            size=each(buffer.size for buffer in buffers),
            evictable_from=each(buffer.evictable_from for buffer in buffers),
            begin=each(buffer.begin for buffer in buffers),
            starts_on_host=each(buffer.starts_on_host for buffer in buffers),
            may_be_resident=each(buffer.may_be_resident for buffer in buffers),
            survives=each(requirements.outlives(buffer) for buffer in buffers),
            uses=_Lists.of(buffer.uses for buffer in buffers),
            seconds=seconds,
            load=np.array(load, np.float64),
            offload=np.array(offload, np.float64),
        )

    def twice(self) -> _SwapTables:
        """Return those of the step twice in a row. Buffers that may be resident are shared; the others of the second
        step are listed last."""
        count, end = len(self.home), len(self.vertex)
        own = np.flatnonzero(self.may_be_resident == 0)
        second = np.arange(count)
        second[own] = count + np.arange(len(own))

        def with_own(values: Ints, later: int = 0) -> Ints:
            return np.concatenate((values, values[own] + later))

        def doubled(lists: _Lists, second: Ints | None = None) -> _Lists:
            return lists.then(lists.items if second is None else second[lists.items])

        uses = np.split(self.uses.items, self.uses.first[1:-1]) if count else []
        both = [np.concatenate((each, each + end)) if self.may_be_resident[i] else each for i, each in enumerate(uses)]
        behind = [uses[i] + end for i in own]
        lengths = [len(each) for each in (*both, *behind)]
        return _SwapTables(
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
            uses=_Lists(np.cumsum([0, *lengths]), np.concatenate([_NONE, *both, *behind])),
            seconds=np.tile(self.seconds, 2),
            load=np.concatenate((self.load, self.load[own])),
            offload=np.concatenate((self.offload, self.offload[own])),
        )


class _ListPointers(ctypes.Structure):
    _fields_ = [("first", _Array), ("items", _Array)]


class _Items(ctypes.Structure):
    _fields_ = [("count", _Int), ("items", _Array)]


_BY_POSITION = ("vertex", "device", "kind")
_LISTS = ("waits", "touched", "reads", "read_before", "made", "changed", "written")
_BY_BUFFER = ("home", "block", "size", "evictable_from", "begin", "starts_on_host", "may_be_resident", "survives")
_COSTS = ("seconds", "load", "offload")
_GIVEN = ("at_start", "at_end", "permanent", "kept")


class _StepArrays(ctypes.Structure):
    _fields_ = [
        *((name, _Int) for name in ("positions", "vertices", "devices", "buffers")),
        *((name, _Array) for name in _BY_POSITION),
        *((name, _ListPointers) for name in _LISTS),
        *((name, _Array) for name in _BY_BUFFER),
        ("uses", _ListPointers),
    ]


class _Costs(ctypes.Structure):
    _fields_ = [*((name, _Array) for name in _COSTS), ("load_latency", ctypes.c_double)]


class _Question(ctypes.Structure):
    _fields_ = [
        *((name, _Array) for name in ("capacity", "pinned", "unpromised")),
        *((name, _Items) for name in _GIVEN),
        ("boundary", _Int),
        ("repeats", _Int),
    ]


class _Answer(ctypes.Structure):
    _fields_ = [
        ("infeasible", _Int),
        ("seconds", ctypes.c_double),
        *((name, _Int) for name in ("reloaded", "room", "events", "at_boundary")),
        ("event", _Array),
        ("boundary", _Array),
    ]


def schedule_step(
    requirements: StepRequirements,
    machine: Machine,
    capacity: Mapping[int, int],
    *,
    at_start: Sequence[int] = (),
    at_end: Sequence[int] = (),
    permanent: Sequence[int] = (),
    repeats: bool = True,
    kept: Kept | None = None,
) -> SwapSchedule:
    """Return a schedule of ``requirements`` within ``capacity`` bytes by device.

    ``at_start``: buffers that are on the device at the start. ``at_end``: those that have to be there at the end, in
    order of importance. ``permanent``: those that never leave, whose bytes are not part of the capacity. ``repeats``: a
    next step starts with the buffers on the device, so that changed ones which never leave need no write-back.
    ``kept``: buffers that stay between two uses, where every reader in between still has memory. Raises Infeasible, or
    ExtensionError where the library cannot be built.
    """
    memory = capacity, requirements.pinned_bytes, requirements.unevictable_bytes
    call = _SwapCall(_tables(requirements, machine, capacity), machine.link(TO_DEVICE).latency, *memory)
    given = at_start, at_end, permanent, _in_pairs(kept or {})
    events = call.run(given, None, repeats)
    return SwapSchedule(_events(events, call.tables.devices), call.answer.seconds, call.answer.reloaded)


def buffers_at_boundary(
    requirements: StepRequirements,
    machine: Machine,
    capacity: Mapping[int, int],
    *,
    permanent: Sequence[int],
    kept: Kept,
) -> list[int]:
    """Return the buffers that are on the device in the middle of two steps in a row, or on their way, by next use. The
    arguments are as of ``schedule_step``. Raises as that does."""
    end = requirements.end
    twice = "twice", machine, tuple(capacity)
    if twice not in requirements.derived:
        requirements.derived[twice] = _tables(requirements, machine, capacity).twice()
    memory = (bytes_twice(each, end) for each in (requirements.pinned_bytes, requirements.unevictable_bytes))
    call = _SwapCall(requirements.derived[twice], machine.link(TO_DEVICE).latency, capacity, *memory)
    given = (), (), permanent, _in_pairs(in_two_steps(kept, end))
    call.run(given, end, True)
    there: list[int] = call.at_boundary[: call.answer.at_boundary].tolist()
    return there


def bytes_twice(profiles: Mapping[int, Profile], end: int) -> dict[int, Profile]:
    """Return bytes by device and position of two steps of ``end`` positions, with those of the second's end."""
    return {device: np.concatenate([profile[:end], profile]) for device, profile in profiles.items()}


def _tables(requirements: StepRequirements, machine: Machine, devices: Iterable[int]) -> _SwapTables:
    once = "once", machine, tuple(devices)
    if once not in requirements.derived:
        requirements.derived[once] = _SwapTables.of(requirements, machine, tuple(devices))
    tables: _SwapTables = requirements.derived[once]
    return tables


def _in_pairs(kept: Kept) -> list[int]:
    return [each for i, positions in kept.items() for last in sorted(positions) for each in (i, last)]


class _SwapCall:
    """The arguments of the library, with the arrays that they point to, and its ``answer``."""

    def __init__(
        self,
        tables: _SwapTables,
        load_latency: float,
        capacity: Mapping[int, int],
        pinned: Mapping[int, Profile],
        unevictable: Mapping[int, Profile],
    ) -> None:
        self.tables = tables
        self.capacity = np.array([capacity[device] for device in tables.devices], np.int64)
        self.pinned = _rows(pinned, tables)
        self.unpromised = self.capacity[:, None] - self.pinned - _rows(unevictable, tables)
        self.at_boundary = np.empty(len(tables.home), np.int64)
        self.answer = _Answer(boundary=_at(self.at_boundary))
        lists = {name: _lists(getattr(tables, name)) for name in (*_LISTS, "uses")}
        arrays = {name: _at(getattr(tables, name)) for name in (*_BY_POSITION, *_BY_BUFFER)}
        counts = len(tables.vertex), tables.vertices, len(tables.devices), len(tables.home)
        self.step = _StepArrays(*counts, **arrays, **lists)
        self.costs = _Costs(**{name: _at(getattr(tables, name)) for name in _COSTS}, load_latency=load_latency)

    def run(
        self,
        given: tuple[Sequence[int], ...],
        boundary: int | None,
        repeats: bool,
    ) -> Ints:
        """Return the events, two numbers each. Raises Infeasible."""
        arrays = [np.array(each, np.int64) for each in given]
        items = {
            name: _Items(len(array) // (2 if name == "kept" else 1), _at(array))
            for name, array in zip(_GIVEN, arrays, strict=True)
        }
        memory = {name: _at(getattr(self, name)) for name in ("capacity", "pinned", "unpromised")}
        position = -1 if boundary is None else boundary
        question = _Question(**memory, **items, boundary=position, repeats=repeats)
        tables, at_start, at_end = self.tables, *arrays[:2]
        # A use is loaded at most once, and what is loaded, made or there at the start evicted or offloaded once.
        come = len(tables.uses.items) + len(at_end) + len(tables.made.items) + len(tables.changed.items) + len(at_start)
        most = len(tables.vertex) + len(tables.touched.items) + len(self.capacity) + 2 * come
        events = np.empty((most, 2), np.int64)
        self.answer.room, self.answer.event = most, _at(events)
        planner_library().disco_swaps(*(ctypes.byref(each) for each in (self.step, self.costs, question, self.answer)))
        if self.answer.infeasible >= 0:
            raise Infeasible(self.answer.infeasible)
        assert self.answer.events <= most
        return events[: self.answer.events]


def _rows(profiles: Mapping[int, Profile], tables: _SwapTables) -> Ints:
    return np.stack([profiles[device] for device in tables.devices])


def _events(events: Ints, devices: Sequence[int]) -> list[tuple[SwapEvent, int]]:
    kinds, subjects = events.T
    released = kinds == SwapEvent.RELEASE
    subjects[released] = np.array(devices, np.int64)[subjects[released]]
    return list(zip(map(tuple(SwapEvent).__getitem__, kinds.tolist()), subjects.tolist(), strict=True))


def _lists(lists: _Lists) -> _ListPointers:
    return _ListPointers(_at(lists.first), _at(lists.items))


def _at(array: Ints | Floats) -> ctypes.c_void_p:
    assert array.flags.c_contiguous
    return ctypes.c_void_p(array.ctypes.data)
