"""How long a step on several devices takes at least with memory for everything: chains of kernels and transfers in
which each stream and each link takes one at a time (``lane_times.py`` has the reasons).

That is asked of the whole step, and of its two sides of the gate one after the other, since all on the far side start
when all that is handed out has ended. Between sets of kernels that all devices come to it is asked once more:

- ``done`` of a set: a second before which not all of it have ended.
- One of the set before ends last. Any of them may, so the least time that must follow one of them is added to that
  set's ``done``. Of devices that all compute and then all exchange, the one that is done last has all of its exchange
  before it.
- If one of a set leads to none of the next, the next may have ended before it, and nothing is added.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from disco_accel.graph.check import dependencies
from disco_accel.graph.copies import is_transfer
from disco_accel.graph.home_uses import host_devices
from disco_accel.graph.order import serial_order
from disco_accel.graph.taskgraph import TaskGraph, VertexKind
from disco_accel.graph.values import arrives_at_gate, handed_out_at_gate
from disco_accel.plan.bound.lane_times import heads, least_span, near_heads
from disco_accel.simulate.machine import Machine

_AHEAD = 2
"""From each set of kernels to how many of the next ones: one that ends a device's work before an exchange, and one that
ends the exchange."""

_VISITS = 2_000_000
"""Of vertices, some ten seconds, after which no further sets are looked at; the largest time until then is a bound."""


def lane_bound(graph: TaskGraph, machine: Machine) -> float:
    """Return the seconds that a step of ``graph`` takes at least in any memory."""
    lanes = _Lanes.of(graph, machine)
    gate = [lanes.gate]
    until_gate, behind_gate = lanes.least(None, gate), lanes.least(lanes.gate, None)
    whole = lanes.least(None, None, near=behind_gate is not None)
    assert until_gate is not None and whole is not None, "the gate is in each step"
    best = max(whole, until_gate + (behind_gate or 0.0))
    sets = [gate, *_exchanging_kernels(graph, lanes)]
    if len(sets) == 1:
        return best
    sets.sort(key=lambda each: lanes.depth[each[0]])
    done = [0.0] * len(sets)
    for j, each in enumerate(sets):
        if each == gate:
            done[j] = until_gate
        elif j < _AHEAD:
            done[j] = lanes.least(None, each, near=True) or 0.0
        for i in range(max(0, j - _AHEAD), j):
            if lanes.visits < _VISITS:
                follows = _least_from_last(lanes, sets[i], each)
                done[j] = max(done[j], 0.0 if follows is None else done[i] + follows)
    for i, each in enumerate(sets):
        if i >= len(sets) - _AHEAD or each == gate:
            best = max(best, done[i] + (_least_from_last(lanes, each, None) or 0.0))
    return max(best, *done)


def _least_from_last(lanes: _Lanes, sources: Sequence[int], targets: Sequence[int] | None) -> float | None:
    """Return the least seconds from the end of the last of ``sources`` to that of the last of ``targets`` (None: of the
    step). Any of the sources may be the last; None if one of them leads to none of the targets."""
    least = 0.0
    for number, source in enumerate(sources):
        seconds = lanes.least(source, targets, near=True)
        if seconds is None:
            return None
        least = seconds if not number else min(least, seconds)
    return least


def _exchanging_kernels(graph: TaskGraph, lanes: _Lanes) -> list[list[int]]:
    """Return sets of kernels at one depth, one of each device, the results of which others wait for.

    Where these are slices of one result, the kernel that made it stands for them: all of their copies follow it."""
    devices = {vertex.space for vertex in graph.vertices if vertex.kind is VertexKind.KERNEL}
    devices -= host_devices(graph.devices)
    if len(devices) < 2:
        return []
    kernels = {lanes.place[v.id]: v.space for v in graph.vertices if v.kind is VertexKind.KERNEL}
    read = (vertex.inputs[0][0] for vertex in graph.vertices if is_transfer(vertex))
    sent = {lanes.place[each] for each in read if each in lanes.place} & kernels.keys()
    at: dict[int, dict[int, int]] = defaultdict(dict)
    for place in sorted(sent):
        makers = lanes.before[place]
        slices = len(makers) == 1 and sum(
            each in sent and len(lanes.before[each]) == 1 for each in lanes.behind[makers[0]]
        )
        made = makers[0] if slices > 1 and makers[0] in kernels else place
        at[lanes.depth[made]][kernels[made]] = made
    return [list(last.values()) for _, last in sorted(at.items()) if devices <= last.keys()]


@dataclass
class _Lanes:
    """Kernels, transfers and the ``gate`` by their places in a topological order, in which predecessors stand near each
    other. ``share``: of the lane's time that a vertex takes, in seconds; ``depth``: vertices in the longest chain
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
    def of(cls, graph: TaskGraph, machine: Machine) -> _Lanes:
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
        """Return the vertices behind ``source`` that must have ended when the last of ``targets`` has, in order."""
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
    """Return ``begin`` and all vertices that ``edges`` lead to from there, if ``takes`` allows them."""
    open_ends = list(begin)
    found = set(open_ends)
    while open_ends:
        for each in edges[open_ends.pop()]:
            if each not in found and takes(each):
                found.add(each)
                open_ends.append(each)
    return found


def _reversed(before: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the successors of each vertex from the predecessors."""
    behind: list[list[int]] = [[] for _ in before]
    for at, sources in enumerate(before):
        for each in sources:
            behind[each].append(at)
    return behind


def _depth_first(before: Sequence[Sequence[int]]) -> list[int]:
    """Return the place of each, such that all of ``before`` stand before it, and near it those that lead to it
    alone."""
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
