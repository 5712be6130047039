"""What a step of a repeating plan waits for of the step before: results, and the memory that it writes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from disco_accel.errors import PlanError
from disco_accel.graph.carried_values import carried_values
from disco_accel.graph.check import called
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.taskgraph import Ref, Vertex, VertexKind

_COPIES = (VertexKind.OFFLOAD, VertexKind.RELOAD)

_Range = tuple[int, int, Ref]


@dataclass(frozen=True, slots=True)
class Border:
    """Numbers of vertices in the order of the plan.

    ``successors``: vertex of a step → those of the next step that wait for it; ``workers``: kernels and transfers, all
    of which must have ended before any of ``gated`` starts in the next step; ``within``: pairs of one step, what the
    user brings and nobody reads before what is put in its place.
    """

    successors: Mapping[int, Sequence[int]] = field(default_factory=dict)
    workers: Collection[int] = ()
    gated: Sequence[int] = ()
    within: Sequence[tuple[int, int]] = ()

    @property
    def work(self) -> int:
        """How many ``workers`` there are."""
        return len(self.workers)

    def waiting(self, count: int) -> list[int]:
        """Return for each of ``count`` vertices how many things of the step before it waits for."""
        waits = [0] * count
        for successors in self.successors.values():
            for successor in successors:
                waits[successor] += 1
        if self.work:
            for gated in self.gated:
                waits[gated] += 1
        return waits


def border_of(plan: MemGraph) -> Border:
    """Return what each step of ``plan`` waits for of the one before.

    A vertex that is the first of its step to write some bytes waits for all who used what lay there last. What the user
    keeps may go once all kernels have ended. Raises PlanError naming a resident that is not back when a step ends.
    """
    return _Chain(plan).border()


class _Chain:
    def __init__(self, plan: MemGraph) -> None:
        self.plan = plan
        self.number = {vertex.id: i for i, vertex in enumerate(plan.vertices)}
        self.carried = carried_values(plan)
        self.readers: dict[Ref, list[int]] = {}
        for i, vertex in enumerate(plan.vertices):
            for ref in dict.fromkeys(vertex.inputs):
                source = self.vertex(ref)
                # A reload of an input reads the host's copy.
                if vertex.kind is not VertexKind.RELOAD or source.kind is VertexKind.OFFLOAD:
                    self.readers.setdefault(ref, []).append(i)
        work = (VertexKind.KERNEL, VertexKind.TRANSFER)
        self.workers = {i for i, vertex in enumerate(plan.vertices) if vertex.kind in work}
        self.gated = set(self.workers)
        self.gated |= {i for i, v in enumerate(plan.vertices) if v.kind is VertexKind.INPUT and not v.clean}
        self.pairs: set[tuple[int, int]] = set()
        self.within: list[tuple[int, int]] = []

    def vertex(self, ref: Ref) -> Vertex:
        """The vertex that makes ``ref``."""
        return self.plan.vertices[self.number[ref[0]]]

    def border(self) -> Border:
        """Compare who uses each byte last with who writes it first."""
        for device in self.plan.devices:
            places = [
                (slot.addr, slot.addr + slot.size, ref)
                for ref, slot in self.plan.slots.items()
                if slot.device == device.id and slot.size
            ]
            self._compare(places)
            self._unread(places)
        host = self.plan.host_offsets
        sizes = {offload: self.vertex((offload, 0)).sizes[0] for offload in host}
        self._compare([(at, at + sizes[offload], (offload, 0)) for offload, at in host.items() if sizes[offload]])
        successors: dict[int, list[int]] = {}
        for u, v in sorted(self.pairs):
            successors.setdefault(u, []).append(v)
        return Border(successors, self.workers, sorted(self.gated), self.within)

    def _compare(self, places: list[_Range]) -> None:
        def turn(place: _Range) -> tuple[bool, int, int]:
            ref = place[2]
            return self.vertex(ref).kind is not VertexKind.INPUT, self.number[ref[0]], ref[1]

        places.sort(key=turn)
        last, first = _occupants(places), _occupants(reversed(places))
        at = 0
        for begin, end, ref in first:
            while at < len(last) and last[at][1] <= begin:
                at += 1
            here = at
            while here < len(last) and last[here][0] < end:
                self._follow(last[here][2], ref)
                here += 1

    def _follow(self, last: Ref, first: Ref) -> None:
        """Make ``first``, which a step puts where the step before left ``last``, wait for all that use ``last``."""
        writer, owner = self.vertex(first), self.vertex(last)
        target = self.number[first[0]]
        if writer.kind is VertexKind.INPUT and writer.clean:
            self._check_back(last, first)
            if owner is not writer:
                self.pairs.add((self.number[last[0]], target))
            return
        for user in self.readers.get(last, ()):
            self.pairs.add((user, target))
        if owner.kind is not VertexKind.INPUT:
            self.pairs.add((self.number[last[0]], target))
        kept = self.vertex(self.carried[last])
        if kept.keep or kept.out:
            self.gated.add(target)

    def _unread(self, places: list[_Range]) -> None:
        """Order what is put over an input that the user brings behind it, if no reader does that."""
        unread = [
            (begin, end, ref)
            for begin, end, ref in places
            if self.vertex(ref).kind is VertexKind.INPUT and not self.vertex(ref).clean and ref not in self.readers
        ]
        if not unread:
            return
        unread.sort()
        starts = [begin for begin, _, _ in unread]
        for begin, end, ref in places:
            at = max(0, bisect_right(starts, begin) - 1)
            while at < len(unread) and unread[at][0] < end:
                if unread[at][1] > begin and unread[at][2] != ref:
                    self.within.append((self.number[unread[at][2][0]], self.number[ref[0]]))
                at += 1

    def _check_back(self, last: Ref, first: Ref) -> None:
        slots = self.plan.slots
        if self.carried[last] != first or slots[last].addr != slots[first].addr:
            vertex = self.vertex(first)
            raise PlanError(
                f"{called(vertex)} is on the device when the step starts, but not when it "
                "ends: several steps need a cyclic plan"
            )


def _occupants(places: Iterable[_Range]) -> list[_Range]:
    """Return who holds each byte when ``places`` have been taken one after another, by address."""
    ranges: list[_Range] = []
    for start, end, ref in places:
        at = bisect_right(ranges, start, key=lambda each: each[0])
        low = at - 1 if at and ranges[at - 1][1] > start else at
        high = low
        kept: list[_Range] = []
        while high < len(ranges) and ranges[high][0] < end:
            begin, stop, occupant = ranges[high]
            if begin < start:
                kept.append((begin, start, occupant))
            if stop > end:
                kept.append((end, stop, occupant))
            high += 1
        ranges[low:high] = sorted([*kept, (start, end, ref)])
    return ranges
