"""How long a step on several devices takes at least with memory for everything: chains of kernels and transfers in
which each stream and each link takes one at a time.

Of vertices that run between two others, one lane's take at least the time until the first can start, all their seconds,
and the time that must follow the last (heads and tails of one-machine problems, Carlier 1982). That holds from the
step's start to its end, on either side of the gate, and between sets of kernels that all devices come to: from the one
of a set that ends last to the end of the next set. Of devices that all compute and then all exchange, the one that is
done last has all of its exchange before it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from disco_accel.graph.check import dependencies
from disco_accel.graph.home_uses import host_devices
from disco_accel.graph.order import serial_order
from disco_accel.graph.taskgraph import TaskGraph, VertexKind
from disco_accel.graph.values import arrives_at_gate, handed_out_at_gate
from disco_accel.simulate.machine import Machine, copy_kind

_AHEAD = 2
"""From each set of kernels to how many of the next ones: one that ends a device's work before an exchange, and one that
ends what the exchange takes."""

_VISITS = 2_000_000
"""Of vertices, some ten seconds, after which no further sets are looked at; what was found until then is a bound."""


def lane_bound(graph: TaskGraph, machine: Machine) -> float:
    """Return the seconds that a step of ``graph`` takes at least, whatever its memory."""
    lanes = _Lanes.of(graph, machine)
    if not lanes.seconds:
        return 0.0
    sets = [[lanes.gate], *_exchanging_kernels(graph, lanes)]
    sets.sort(key=lambda each: lanes.depth[each[0]])
    done = [0.0] * len(sets)
    best = lanes.least(None, None) or 0.0
    for j, each in enumerate(sets):
        if j < _AHEAD or each == [lanes.gate]:
            done[j] = lanes.least(None, each) or 0.0
        for i in range(max(0, j - _AHEAD), j):
            if lanes.visits < _VISITS:
                done[j] = max(done[j], done[i] + lanes.least_from_last(sets[i], each))
    for i, each in enumerate(sets):
        if i >= len(sets) - _AHEAD or each == [lanes.gate]:
            best = max(best, done[i] + lanes.least_from_last(each, None))
    return max(best, *done)


def _exchanging_kernels(graph: TaskGraph, lanes: _Lanes) -> list[list[int]]:
    """Return sets of kernels at one depth, one of each device, the results of which others wait for."""
    devices = {vertex.device for vertex in graph.vertices if vertex.kind is VertexKind.KERNEL}
    devices -= host_devices(graph.devices)
    sent = {vertex.inputs[0][0] for vertex in graph.vertices if vertex.kind is VertexKind.TRANSFER}
    at: dict[int, dict[int, int]] = defaultdict(dict)
    for vertex in graph.vertices:
        if vertex.kind is VertexKind.KERNEL and vertex.id in sent:
            place = lanes.place[vertex.id]
            at[lanes.depth[place]][vertex.device] = place
    return [list(last.values()) for _, last in sorted(at.items()) if len(devices) > 1 and devices <= last.keys()]


@dataclass
class _Lanes:
    """Kernels, transfers and the ``gate`` in a topological order, by position. ``width``: vertices that a lane takes at
    a time; ``depth``: vertices in the longest chain before; ``visits``: positions looked at so far."""

    gate: int
    place: dict[int, int]
    seconds: list[float]
    lane: list[str]
    width: dict[str, int]
    before: list[list[int]]
    behind: list[list[int]]
    depth: list[int] = field(default_factory=list)
    visits: int = 0

    @classmethod
    def of(cls, graph: TaskGraph, machine: Machine) -> _Lanes:
        order = serial_order(graph)
        hosts = host_devices(graph.devices)
        device = {vertex.id: vertex.device for vertex in order}
        late = {vertex.id for vertex in order if arrives_at_gate(vertex)}
        rest = [vertex for vertex in order if vertex.kind is not VertexKind.INPUT]
        gate = max((i + 1 for i, vertex in enumerate(rest) if handed_out_at_gate(vertex)), default=0)
        # All that reads a late value comes behind the last vertex that hands something out.
        place = {vertex.id: i + (i >= gate) for i, vertex in enumerate(rest)}
        count = len(rest) + 1 if rest else 0
        before, behind = [list[int]() for _ in range(count)], [list[int]() for _ in range(count)]
        made = cls(gate, place, [0.0] * count, ["gate"] * count, {"gate": 1}, before, behind)
        for vertex in rest:
            at = place[vertex.id]
            source = device[vertex.inputs[0][0]] if vertex.inputs else vertex.device
            kind = copy_kind(vertex, source, hosts)
            near = source if kind is VertexKind.OFFLOAD else vertex.device
            name = made.lane[at] = machine.lane(kind, near, source)
            on_device = kind is VertexKind.KERNEL and vertex.device not in hosts
            made.width[name] = machine.compute_streams if on_device else 1
            made.seconds[at] = machine.seconds(vertex, kind, source)
            sources = {gate if each in late else place.get(each, -1) for each in dependencies(vertex)}
            made.before[at] = sorted(sources - {-1})
            if handed_out_at_gate(vertex):
                made.before[gate].append(at)
        for at, sources_of in enumerate(made.before):
            made.depth.append(1 + max((made.depth[each] for each in sources_of), default=-1))
            for each in sources_of:
                made.behind[each].append(at)
        return made

    def least_from_last(self, sources: Iterable[int], targets: Sequence[int] | None) -> float:
        """Return the seconds from the end of the last of ``sources`` to that of the last of ``targets`` (None: of the
        step) at least, whichever of the sources it is; 0 if one does not lead to any."""
        return min(self.least(source, targets) or 0.0 for source in sources)

    def least(self, source: int | None, targets: Sequence[int] | None) -> float | None:
        """Return the seconds from the end of ``source`` (None: from the step's start) to the last of ``targets`` (None:
        to the step's end) at least; None if it leads to none of them."""
        between = self._between(source, targets)
        if not between:
            return None
        starts, tails = dict[int, float](), dict[int, float]()
        for at in between:
            starts[at] = self._all_done((each, starts[each]) for each in self.before[at] if each in starts)
        for at in reversed(between):
            tails[at] = self._all_done((each, tails[each]) for each in self.behind[at] if each in tails)
        best = 0.0
        of_lane: dict[str, list[int]] = defaultdict(list)
        for at in between:
            of_lane[self.lane[at]].append(at)
            best = max(best, starts[at] + self.seconds[at] + tails[at])
        for name, members in of_lane.items():
            members.sort(key=starts.__getitem__, reverse=True)
            total, tail = 0.0, float("inf")
            for at in members:
                total, tail = total + self.seconds[at] / self.width[name], min(tail, tails[at])
                best = max(best, starts[at] + total + tail)
        return best

    def _between(self, source: int | None, targets: Sequence[int] | None) -> list[int]:
        """Return what runs behind ``source`` and must have ended when the last of ``targets`` has, in order."""
        end = len(self.seconds) - 1 if targets is None else max(targets)
        reached = set(range(end + 1))
        if source is not None:
            reached, open_ends = set(), [source]
            while open_ends:
                for each in self.behind[open_ends.pop()]:
                    if each <= end and each not in reached:
                        reached.add(each)
                        open_ends.append(each)
        self.visits += len(reached)
        if targets is None:
            return sorted(reached)
        open_ends = [each for each in targets if each in reached]
        needed = set(open_ends)
        while open_ends:
            for each in self.before[open_ends.pop()]:
                if each in reached and each not in needed:
                    needed.add(each)
                    open_ends.append(each)
        return sorted(needed)

    def _all_done(self, others: Iterable[tuple[int, float]]) -> float:
        """Return the seconds after which ``others`` can all have run, each from its own second on at the earliest."""
        first: dict[str, float] = {}
        total: dict[str, float] = {}
        done = 0.0
        for at, second in others:
            name, seconds = self.lane[at], self.seconds[at]
            done = max(done, second + seconds)
            first[name] = min(first.get(name, second), second)
            total[name] = total.get(name, 0.0) + seconds / self.width[name]
        return max([done, *(first[name] + total[name] for name in first)])
