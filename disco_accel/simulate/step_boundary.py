"""Dependencies from one step of a repeating plan to the next: through results, and through memory that is reused."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from disco_accel.errors import PlanError
from disco_accel.graph.carried_values import carried_values, taskgraph_of
from disco_accel.graph.check import called
from disco_accel.graph.copies import copies_bytes, swaps_in, swaps_out
from disco_accel.graph.home_uses import HomeUses
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.taskgraph import Ref, Vertex, VertexKind
from disco_accel.graph.values import host_copy_exists, is_handed_out, lasting_versions, may_be_resident, outlives_step

_Range = tuple[int, int, Ref]


@dataclass(frozen=True, slots=True)
class CrossStepDependencies:
    """Vertices by their number in the order of the plan.

    ``successors``: vertex of a step → the vertices of the next step that wait for it. ``workers``: kernels and
    transfers, all of which must have ended before any of ``gated`` starts in the next step. ``within``: pairs of one
    step, an input of the user's that nobody reads and a vertex that writes over it, which waits for it.
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
        """Return for each of ``count`` vertices how many dependencies on the step before it has."""
        waits = [0] * count
        for successors in self.successors.values():
            for successor in successors:
                waits[successor] += 1
        if self.work:
            for gated in self.gated:
                waits[gated] += 1
        return waits


def cross_step_dependencies(plan: MemGraph) -> CrossStepDependencies:
    """Return the dependencies of each step of ``plan`` on the step before.

    The first vertex of a step to write some bytes waits for all users of the value that lay there at the end of the
    step before. Kept outputs are overwritten only after all kernels of their step have ended: the caller has copied
    them by then. Values that the host updates between two steps are updated when all kernels, and all their reloads,
    have ended. Raises PlanError naming a resident that is not back at its address when a step ends.
    """
    return _TwoSteps(plan).dependencies()


class _TwoSteps:
    """The last users of each byte in one step against its first users in the next."""

    def __init__(self, plan: MemGraph) -> None:
        self.plan = plan
        self.number = {vertex.id: i for i, vertex in enumerate(plan.vertices)}
        self.carried = carried_values(plan)
        graph = taskgraph_of(plan)
        self.states = lasting_versions(graph.vertices)
        self.home_uses = HomeUses.of(graph)
        self.readers: dict[Ref, list[int]] = {}
        for i, vertex in enumerate(plan.vertices):
            for ref in dict.fromkeys(vertex.inputs):
                if not self.reads_home(vertex, ref):
                    self.readers.setdefault(ref, []).append(i)
        self.workers = {
            i for i, v in enumerate(plan.vertices) if v.kind is not VertexKind.INPUT and not copies_bytes(v)
        }
        self.gated = set(self.workers)
        self.gated |= {i for i, v in enumerate(plan.vertices) if v.kind is VertexKind.INPUT and not may_be_resident(v)}
        self.pairs: set[tuple[int, int]] = set()
        self.within: list[tuple[int, int]] = []

    def vertex(self, ref: Ref) -> Vertex:
        """The vertex that makes ``ref``."""
        return self.plan.vertices[self.number[ref[0]]]

    def origin(self, ref: Ref) -> int:
        """The offset at which the value begins of which ``ref`` holds bytes."""
        return self.plan.slots[ref].offset - self.vertex(ref).begin

    def reads_home(self, vertex: Vertex, ref: Ref) -> bool:
        """Whether ``vertex`` reads the host's copy of an input, or a version that was written there, not a device's."""
        if swaps_in(vertex):
            return self.vertex(ref).kind is VertexKind.INPUT or ref in self.home_uses.written
        return vertex.kind is VertexKind.INPUT or self.home_uses.at_home(vertex, self.carried[ref])

    def dependencies(self) -> CrossStepDependencies:
        """Compare the last user of each byte with its first writer."""
        ranges: dict[int, list[_Range]] = {}
        for ref, slot in self.plan.slots.items():
            if size := self.vertex(ref).sizes[ref[1]]:
                ranges.setdefault(slot.space, []).append((slot.offset, slot.offset + size, ref))
        for each in ranges.values():
            self._compare(each)
            self._order_unread(each)
        for versions in self.states.values():
            self._compare_home(set(versions))
        for i, vertex in enumerate(self.plan.vertices):
            if swaps_in(vertex) and not outlives_step(self.vertex(vertex.inputs[0])):
                self.pairs.add((i, self.number[vertex.inputs[0][0]]))
        successors: dict[int, list[int]] = {}
        for u, v in sorted(self.pairs):
            successors.setdefault(u, []).append(v)
        return CrossStepDependencies(successors, self.workers, sorted(self.gated), self.within)

    def _compare(self, ranges: list[_Range]) -> None:
        def order_written(each: _Range) -> tuple[bool, int, int]:
            ref = each[2]
            return self.vertex(ref).kind is not VertexKind.INPUT, self.number[ref[0]], ref[1]

        # Written one after another they leave the last occupant of each byte, written backward the first.
        ranges.sort(key=order_written)
        last, first = _occupants(ranges), _occupants(reversed(ranges))
        at = 0
        for begin, end, ref in first:
            # Both lists are sorted by address: those of last that end before this range meet no later one either.
            while at < len(last) and last[at][1] <= begin:
                at += 1
            overlap = at
            while overlap < len(last) and last[overlap][0] < end:
                self._follow(last[overlap][2], ref)
                overlap += 1

    def _follow(self, last: Ref, first: Ref) -> None:
        """Make ``first``, which a step writes where the step before left ``last``, wait for all users of ``last``."""
        writer, owner = self.vertex(first), self.vertex(last)
        target = self.number[first[0]]
        if writer.kind is VertexKind.INPUT and host_copy_exists(writer):
            self._check_back(last, first)
            if owner is not writer:
                self.pairs.add((self.number[last[0]], target))
            if first in self.states:
                # A kernel will write over it.
                self.pairs.update((user, target) for user in self.readers.get(last, ()))
            return
        for user in self.readers.get(last, ()):
            self.pairs.add((user, target))
        if owner.kind is not VertexKind.INPUT:
            self.pairs.add((self.number[last[0]], target))
        origin = self.vertex(self.carried[last])
        if is_handed_out(origin):
            self.gated.add(target)

    def _compare_home(self, versions: set[Ref]) -> None:
        """Make the users of a state's home wait for those of the step before, if that step writes it."""
        writes: list[Ref] = []
        reads: dict[Ref, list[int]] = {}
        for vertex in self.plan.vertices:
            for ref in vertex.inputs:
                swapped_in = swaps_in(vertex) and self.carried[ref] in versions
                if swapped_in or (self.carried[ref] in versions and self.reads_home(vertex, ref)):
                    reads.setdefault(ref, []).append(vertex.id)
            for k in range(len(vertex.sizes)):
                goes_home = swaps_out(vertex) and self.carried[vertex.id, k] in versions
                if goes_home or ((vertex.id, k) in versions and (vertex.id, k) in self.home_uses.written):
                    writes.append((vertex.id, k))
        if not writes:
            return
        last = {writes[-1][0], *reads.get(writes[-1], ())}
        at_start = [ref for ref in reads if self.vertex(ref).kind is VertexKind.INPUT]
        first = {writes[0][0], *(reader for ref in at_start for reader in reads[ref])}
        self.pairs.update((self.number[user], self.number[then]) for user in last for then in first)

    def _order_unread(self, ranges: list[_Range]) -> None:
        """Order each vertex that writes over an input of the user's after that input, if nobody reads the input."""
        unread = [
            (begin, end, ref)
            for begin, end, ref in ranges
            if self.vertex(ref).kind is VertexKind.INPUT
            and not host_copy_exists(self.vertex(ref))
            and ref not in self.readers
        ]
        if not unread:
            return
        unread.sort()
        starts = [begin for begin, _, _ in unread]
        for begin, end, ref in ranges:
            at = max(0, bisect_right(starts, begin) - 1)
            while at < len(unread) and unread[at][0] < end:
                if unread[at][1] > begin and unread[at][2] != ref:
                    self.within.append((self.number[unread[at][2][0]], self.number[ref[0]]))
                at += 1

    def _check_back(self, last: Ref, first: Ref) -> None:
        expected = self.states[first][-1] if first in self.states else self.carried[first]
        vertex = self.vertex(first)
        if not outlives_step(vertex):
            raise PlanError(f"{called(vertex)} is on the device when the step starts, but the host renews it")
        if self.carried[last] != expected or self.origin(last) != self.origin(first):
            raise PlanError(
                f"{called(vertex)} is on the device when the step starts, but not when it "
                "ends: several steps need a cyclic plan"
            )


def _occupants(ranges: Iterable[_Range]) -> list[_Range]:
    """Return the occupant of each byte, by address, when ``ranges`` have been written one after another."""
    occupied: list[_Range] = []
    for start, end, ref in ranges:
        at = bisect_right(occupied, start, key=lambda each: each[0])
        low = at - 1 if at and occupied[at - 1][1] > start else at
        high = low
        remaining: list[_Range] = []
        while high < len(occupied) and occupied[high][0] < end:
            begin, stop, occupant = occupied[high]
            if begin < start:
                remaining.append((begin, start, occupant))
            if stop > end:
                remaining.append((end, stop, occupant))
            high += 1
        occupied[low:high] = sorted([*remaining, (start, end, ref)])
    return occupied
