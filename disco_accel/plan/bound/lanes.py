"""A step's kernels and transfers as the lanes of a machine take them, with the gate as one more vertex."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from disco_accel.graph.check import dependencies
from disco_accel.graph.home_uses import host_devices
from disco_accel.graph.order import serial_order
from disco_accel.graph.taskgraph import TaskGraph, VertexKind
from disco_accel.graph.values import arrives_at_gate, handed_out_at_gate
from disco_accel.plan.bound.lane_times import heads, least_span, near_heads
from disco_accel.simulate.machine import Machine


@dataclass
class Lanes:
    """Kernels, transfers and the ``gate`` by their places in a topological order in which what leads to a vertex stands
    near it. ``share``: of the lane's time that a vertex takes, in seconds; ``depth``: vertices in the longest chain
    before; ``visits``: places looked at so far."""

    gate: int
    place: dict[int, int]
    seconds: list[float]
    share: list[float]
    lane: list[int]
    before: list[list[int]]
    behind: list[list[int]]
    depth: list[int] = field(default_factory=list)
    visits: int = 0

    @classmethod
    def of(cls, graph: TaskGraph, machine: Machine) -> Lanes:
        """Return the lanes that ``machine`` has for ``graph``."""
        order = serial_order(graph)
        hosts, lanes = host_devices(graph.devices), machine.lanes(graph.spaces)
        late = {vertex.id for vertex in order if arrives_at_gate(vertex)}
        rest = [vertex for vertex in order if vertex.kind is not VertexKind.INPUT]
        gate = len(rest)
        index = {vertex.id: i for i, vertex in enumerate(rest)}
        sources: list[list[int]] = []
        for vertex in rest:
            found = {gate if each in late else index.get(each, -1) for each in dependencies(vertex)}
            sources.append(sorted(found - {-1}))
        sources.append([i for i, vertex in enumerate(rest) if handed_out_at_gate(vertex)])
        places = _depth_first(sources)
        count = len(sources)
        made = cls(places[gate], {}, [0.0] * count, [0.0] * count, [-1] * count, [[] for _ in sources], [])
        names: dict[str, int] = {}
        for i, vertex in enumerate(rest):
            at = made.place[vertex.id] = places[i]
            made.lane[at] = names.setdefault(lanes.name(vertex), len(names))
            made.seconds[at] = lanes.seconds(vertex)
            in_streams = vertex.kind is VertexKind.KERNEL and vertex.space not in hosts
            made.share[at] = made.seconds[at] / (machine.compute_streams if in_streams else 1)
        for i, found_at in enumerate(sources):
            made.before[places[i]] = sorted(places[each] for each in found_at)
        made.behind = _reversed(made.before)
        for before in made.before:
            made.depth.append(1 + max((made.depth[each] for each in before), default=-1))
        return made

    def least(self, source: int | None, targets: Sequence[int] | None, *, near: bool = False) -> float | None:
        """Return the seconds from the end of ``source`` (None: from the step's start) to the last of ``targets`` (None:
        to the step's end) at least; None if it leads to none of them. ``near``: a quick look, which may say less."""
        between = self._between(source, targets)
        if not between:
            return None
        find = near_heads if near else heads
        number = {at: i for i, at in enumerate(between)}
        before = [[number[each] for each in self.before[at] if each in number] for at in between]
        lane = [self.lane[at] for at in between]
        seconds, share = ([of[at] for at in between] for of in (self.seconds, self.share))
        starts = find(before, lane, seconds, share)
        last = len(between) - 1
        behind = [[last - each for each in then] for then in reversed(_reversed(before))]
        tails = find(behind, lane[::-1], seconds[::-1], share[::-1])[::-1]
        of_lane: dict[int, list[tuple[float, float, float]]] = defaultdict(list)
        best = 0.0
        for i in range(len(between)):
            of_lane[lane[i]].append((starts[i], share[i], tails[i]))
            best = max(best, starts[i] + seconds[i] + tails[i])
        return max(best, *map(least_span, of_lane.values()))

    def _between(self, source: int | None, targets: Sequence[int] | None) -> list[int]:
        """Return what runs behind ``source`` and must have ended when the last of ``targets`` has, in order."""
        if source is None:
            reached = set(range(len(self.seconds)))
        else:
            deepest = max(self.depth if targets is None else (self.depth[each] for each in targets))
            reached = _all_from([source], self.behind, lambda each: self.depth[each] <= deepest)
            reached.discard(source)
        self.visits += len(reached)
        if targets is not None:
            reached = _all_from([each for each in targets if each in reached], self.before, reached.__contains__)
        return sorted(reached)


def _all_from(begin: Iterable[int], edges: Sequence[Sequence[int]], takes: Callable[[int], bool]) -> set[int]:
    """Return ``begin`` and all that ``edges`` lead to from there, by way of what ``takes`` allows."""
    open_ends = list(begin)
    found = set(open_ends)
    while open_ends:
        for each in edges[open_ends.pop()]:
            if each not in found and takes(each):
                found.add(each)
                open_ends.append(each)
    return found


def _reversed(before: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return what comes behind each, if ``before`` is what comes before."""
    behind: list[list[int]] = [[] for _ in before]
    for at, sources in enumerate(before):
        for each in sources:
            behind[each].append(at)
    return behind


def _depth_first(before: Sequence[Sequence[int]]) -> list[int]:
    """Return the place of each such that all of ``before`` stand before it, and near it what leads to it alone."""
    places = [-1] * len(before)
    count = 0
    needed = {each for sources in before for each in sources}
    for last in reversed(range(len(before))):
        open_ends = [] if last in needed else [last]
        while open_ends:
            at = open_ends[-1]
            missing = [each for each in before[at] if places[each] < 0]
            if places[at] < 0 and not missing:
                places[at] = count
                count += 1
            if not missing:
                open_ends.pop()
            open_ends.extend(reversed(missing))
    return places
