"""Which values left the device or came back in a step, how often, and why: the values that got their room meanwhile,
and the vertex that needs them next."""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from disco_accel.graph.carried_values import carried_values
from disco_accel.graph.copies import swaps, swaps_in, swaps_out
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.taskgraph import Ref, Vertex, VertexKind
from disco_accel.graph.values import outlives_step
from disco_accel.observe.timeline import TracedEvent, _Stay


class _Reason(enum.StrEnum):
    """Why a value is loaded."""

    ROOM = "room"
    """Others got its place since it was last on the device."""
    UPDATED = "updated"
    """The host changes it between two steps."""
    FIRST = "first"
    """A step of a plan that does not repeat loads it for the first time."""
    UNUSED = "unused"
    """Its place was free meanwhile, but the plan has no use for it there."""


@dataclass(frozen=True, slots=True)
class _Load:
    """``copy`` brings a value, or ``size`` bytes of it, that was away from second ``left`` on; ``left`` is before 0 if
    it left in the step before. ``room``: values that took its place meanwhile, with the bytes that they took of it, the
    most first. ``reader``: the vertex that needs it next, from second ``needed`` on; behind the end if that is in the
    next step. -1: none."""

    copy: int
    size: int
    left: float
    reason: _Reason
    room: tuple[tuple[Ref, int], ...]
    reader: int
    needed: float


@dataclass(frozen=True, slots=True)
class _Moved:
    """The copies of one value in a step: ``loads``, and the vertices of ``saves`` with their bytes."""

    value: Ref
    loads: tuple[_Load, ...]
    saves: tuple[tuple[int, int], ...]

    @property
    def loaded(self) -> int:
        """Bytes."""
        return sum(load.size for load in self.loads)

    @property
    def saved(self) -> int:
        """Bytes."""
        return sum(size for _, size in self.saves)


MOST_NAMED = 4
"""Values that are named as the ones that took a place."""


def moved_values(plan: MemGraph, events: Sequence[TracedEvent], there: Sequence[_Stay]) -> list[_Moved]:
    """The values that ``plan`` copies from or to a backing space, those of the most bytes first. ``there``: ``stays``
    of the step that ``events`` traced."""
    carried = carried_values(plan)
    loads, saves = defaultdict[Ref, list[Vertex]](list), defaultdict[Ref, list[tuple[int, int]]](list)
    for vertex in plan.vertices:
        value = carried.get((vertex.id, 0))
        if value is not None and swaps_in(vertex):
            loads[value].append(vertex)
        elif value is not None and swaps_out(vertex):
            saves[value].append((vertex.id, vertex.sizes[0]))
    reasons = _Reasons(plan, events, there, carried)
    found = [
        _Moved(value, tuple(map(reasons.of, loads.get(value, ()))), tuple(saves.get(value, ())))
        for value in {**loads, **saves}
    ]
    return sorted(found, key=lambda moved: (-moved.loaded - moved.saved, moved.value))


def first_readers(plan: MemGraph, events: Sequence[TracedEvent]) -> dict[Ref, TracedEvent]:
    """By value and copy of ``plan``: the kernel or transfer that reads it first."""
    ran = {event.vertex: event for event in events}
    first: dict[Ref, TracedEvent] = {}
    for vertex in plan.vertices:
        event = ran.get(vertex.id)
        if event is None or swaps(vertex):
            continue
        for ref in vertex.inputs:
            if ref not in first or event.start < first[ref].start:
                first[ref] = event
    return first


class _Reasons:
    """Finds the reasons of loads in one traced step."""

    def __init__(
        self, plan: MemGraph, events: Sequence[TracedEvent], there: Sequence[_Stay], carried: Mapping[Ref, Ref]
    ) -> None:
        self._by_id = {vertex.id: vertex for vertex in plan.vertices}
        self._cyclic = plan.cyclic
        self._starts = {event.vertex: event.start for event in events}
        self._finish = max((event.end for event in events), default=0.0)
        self._carried = carried
        self._places = _Places(there)
        self._of: dict[Ref, list[_Stay]] = defaultdict(list)
        for stay in there:
            self._of[carried[stay.ref]].append(stay)
        self._readers = first_readers(plan, events)
        self._in_a_step: dict[Ref, TracedEvent] = {}
        for ref, reader in self._readers.items():
            value = carried[ref]
            if value not in self._in_a_step or reader.start < self._in_a_step[value].start:
                self._in_a_step[value] = reader

    def of(self, copy: Vertex) -> _Load:
        """The load ``copy``."""
        value, start = self._carried[copy.id, 0], self._starts.get(copy.id, 0.0)
        reader = self._readers.get((copy.id, 0))
        needed = reader.start if reader is not None else 0.0
        if reader is None and (reader := self._in_a_step.get(value)) is not None:
            needed = self._finish + reader.start
        before = self._before(copy, value, start)
        owner = self._by_id[value[0]]
        updated = owner.kind is VertexKind.INPUT and not outlives_step(owner)
        left, room = 0.0, list[tuple[Ref, int]]()
        if before is not None:
            left = before.end if before.end <= start else before.end - self._finish
            room = self._took(before, value, left, start)
        reason = _Reason.ROOM if room else _Reason.UNUSED
        if before is None or left < 0:
            reason = _Reason.UPDATED if updated else reason if self._cyclic else _Reason.FIRST
        next_one = -1 if reader is None else reader.vertex
        return _Load(copy.id, copy.sizes[0], left, reason, tuple(room[:MOST_NAMED]), next_one, needed)

    def _before(self, copy: Vertex, value: Ref, start: float) -> _Stay | None:
        """When the bytes of ``copy`` were last on the device, or will be in this step: they were in the one before."""
        same = [stay for stay in self._of[value] if self._share(stay, copy)]
        earlier = [stay for stay in same if stay.end <= start and stay.ref != (copy.id, 0)]
        if earlier:
            return max(earlier, key=lambda stay: stay.end)
        return max(same, key=lambda stay: stay.end, default=None) if self._cyclic else None

    def _share(self, stay: _Stay, copy: Vertex) -> bool:
        begin = self._by_id[stay.ref[0]].begin
        return begin < copy.begin + copy.sizes[0] and copy.begin < begin + stay.size

    def _took(self, before: _Stay, value: Ref, left: float, start: float) -> list[tuple[Ref, int]]:
        """The values that used the place of ``before`` from second ``left`` to ``start``, with their bytes there."""
        taken: dict[Ref, int] = {}
        for stay in self._places.on(before):
            other = self._carried[stay.ref]
            begins = stay.start if stay.start < start or left >= 0 else stay.start - self._finish
            if other != value and left <= begins < start:
                bytes_there = min(stay.addr + stay.size, before.addr + before.size) - max(stay.addr, before.addr)
                taken[other] = max(taken.get(other, 0), bytes_there)
        return sorted(taken.items(), key=lambda item: (-item[1], item[0]))


class _Places:
    """Stays by address, for the question which ones share a place."""

    _BUCKETS = 1024

    def __init__(self, there: Iterable[_Stay]) -> None:
        every = list(there)
        self._width = max((stay.addr + stay.size for stay in every), default=0) // self._BUCKETS + 1
        self._buckets: dict[tuple[int, int], list[_Stay]] = defaultdict(list)
        for stay in every:
            for bucket in self._of(stay):
                self._buckets[bucket].append(stay)

    def _of(self, stay: _Stay) -> list[tuple[int, int]]:
        first, last = stay.addr // self._width, (stay.addr + max(stay.size, 1) - 1) // self._width
        return [(stay.device, bucket) for bucket in range(first, last + 1)]

    def on(self, place: _Stay) -> Iterable[_Stay]:
        """Those that share bytes with ``place``, each once, in the order of their starts within a bucket."""
        found = {stay.ref: stay for bucket in self._of(place) for stay in self._buckets[bucket]}
        return (s for s in found.values() if s.addr < place.addr + place.size and place.addr < s.addr + s.size)
