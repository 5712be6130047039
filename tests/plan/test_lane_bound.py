"""The bound of several devices: no schedule of kernels and transfers is shorter, and it is met where it should be."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from disco_accel.graph.check import check_taskgraph, dependencies
from disco_accel.graph.spaces import BETWEEN_DEVICES, Space
from disco_accel.graph.taskgraph import Ref, TaskGraph, Vertex, VertexKind
from disco_accel.graph.traits import LATE
from disco_accel.graph.values import arrives_at_gate, handed_out_at_gate
from disco_accel.plan.bound.lane_bound import lane_bound
from disco_accel.plan.bound.lane_times import heads, least_span, near_heads
from disco_accel.simulate.machine import Link, Machine
from tests.support.graphs.strategies import Shape, random_taskgraph

INPUT, KERNEL, COPY = VertexKind


class Schedules:
    """Schedules of a graph without limits of memory. By definition: one vertex after the other, each at its first
    second at which all that it waits for has ended and its lane has a place."""

    def __init__(self, graph: TaskGraph, machine: Machine) -> None:
        late = {v.id for v in graph.vertices if arrives_at_gate(v)}
        outs = {v.id for v in graph.vertices if handed_out_at_gate(v) and v.kind is not INPUT}
        self.work = [v for v in graph.vertices if v.kind is not INPUT]
        own = {v.id for v in self.work}
        self.before = {v.id: {d for d in dependencies(v) if d in own} for v in self.work}
        for v in self.work:
            if late & set(dependencies(v)):
                self.before[v.id] |= outs
        lanes = machine.lanes(graph.spaces)
        self.seconds = {v.id: lanes.seconds(v) for v in self.work}
        self.lane = {v.id: lanes.name(v) for v in self.work}
        self.width = {self.lane[v.id]: machine.compute_streams if v.kind is KERNEL else 1 for v in self.work}

    def length(self, order: Sequence[int]) -> float:
        free = {lane: [0.0] * width for lane, width in self.width.items()}
        ends: dict[int, float] = {}
        for each in order:
            places = free[self.lane[each]]
            place = min(range(len(places)), key=places.__getitem__)
            start = max([places[place], *(ends[b] for b in self.before[each])])
            ends[each] = places[place] = start + self.seconds[each]
        return max(ends.values(), default=0.0)

    def orders(self, done: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
        """All orders; that of the starts of the shortest schedule is one of them."""
        if len(done) == len(self.work):
            yield done
        for v in self.work:
            if v.id not in done and self.before[v.id] <= set(done):
                yield from self.orders((*done, v.id))

    def some_order(self, rng: random.Random) -> list[int]:
        """Any; or now and then one that puts off all that it can of some device."""
        unloved = rng.choice((None, *self.width))
        left, done = {v.id for v in self.work}, list[int]()
        while left:
            ready = [each for each in sorted(left) if self.before[each].isdisjoint(left)]
            ready = [each for each in ready if self.lane[each] != unloved] or ready
            done.append(rng.choice(ready))
            left.remove(done[-1])
        return done


def a_machine(rng: random.Random) -> Machine:
    scope = rng.choice(("device", "device", "pair", "shared"))
    link = Link(rng.choice((1e7, 1e8, 1e9)), rng.choice((0.0, 1e-6)), scope)
    return Machine(compute_streams=rng.choice((1, 1, 2)), links={BETWEEN_DEVICES: link})


def with_durations(rng: random.Random, graph: TaskGraph) -> TaskGraph:
    times = (0.0, 1e-6, 1e-5, 1e-4)
    vertices = (replace(v, duration=rng.choice(times)) if v.kind is KERNEL else v for v in graph.vertices)
    return replace(graph, vertices=tuple(vertices))


def exchanges(rng: random.Random) -> TaskGraph:
    """Rounds in which each device computes some branches, joins them, and sends its result, or slices of it, to most of
    the others. Somewhere in between something is handed out, which a late value waits for."""
    devices = rng.randint(2, 4)
    vertices: list[Vertex] = []

    def add(kind: VertexKind, device: int, reads: Sequence[Ref], **more: object) -> Ref:
        vertex = Vertex(len(vertices), kind, device, "f", tuple(dict.fromkeys(reads)), (rng.choice((0, 1000, 10_000)),))
        vertices.append(replace(vertex, **more))  # type: ignore[arg-type]
        return vertex.id, 0

    late = add(INPUT, 0, (), traits=LATE)
    reads: list[list[Ref]] = [[] for _ in range(devices)]
    for _ in range(rng.randint(1, 3)):
        sent: list[list[Ref]] = [[] for _ in range(devices)]
        for d in range(devices):
            more = [late] if d == 0 and rng.random() < 0.2 else []
            branches = [add(KERNEL, d, [*reads[d], *more]) for _ in range(rng.randint(1, 3))]
            result = add(KERNEL, d, branches)
            sliced = rng.random() < 0.5
            for other in range(devices):
                part = add(KERNEL, d, [result]) if sliced else result
                if rng.random() < 0.9:
                    sent[other].append(part if other == d else add(COPY, other, [part], sizes=(0,), source=d))
        reads = sent
    sizes = {v.id: 1000 for v in vertices}
    made = [replace(v, sizes=(sizes[v.id],)) if v.kind is not INPUT else v for v in vertices]
    behind = {late[0]}
    for v in made:
        behind |= {v.id} if behind & set(dependencies(v)) else set()
    ways = [i for i, v in enumerate(made) if v.kind is KERNEL and v.id not in behind]
    if ways:
        out = rng.choice(ways)
        made[out] = replace(made[out], out=True)
    return check_taskgraph(TaskGraph("exchanges", tuple(Space(d, 1 << 40) for d in range(devices)), tuple(made)))


def test_no_schedule_is_shorter_than_the_bound() -> None:
    """Of random graphs, most of them with exchanges; in many the shortest that was tried comes to the bound."""
    met = tried = 0
    for seed in range(250):
        rng = random.Random(seed)
        shape = Shape(vertices=rng.choice((12, 24, 40)), devices=4, keep=0.0)
        graph = with_durations(rng, random_taskgraph(rng, shape) if seed % 3 == 0 else exchanges(rng))
        machine = a_machine(rng)
        least, schedules = lane_bound(graph, machine), Schedules(graph, machine)
        shortest = min(schedules.length(schedules.some_order(rng)) for _ in range(12))
        assert least <= shortest * (1 + 1e-9), f"seed {seed}"
        tried, met = tried + (shortest > 0), met + (0 < shortest <= least * (1 + 1e-9))
    assert met > tried / 3, (met, tried)


def test_the_shortest_of_all_schedules_of_small_graphs_is_no_shorter() -> None:
    """Every order of up to seven vertices; the bound is the shortest schedule itself in nine of ten."""
    met = tried = 0
    for seed in range(120):
        rng = random.Random(seed)
        graph = with_durations(rng, random_taskgraph(rng, Shape(vertices=7, inputs=3, devices=3, after=0.3, keep=0.0)))
        machine = a_machine(rng)
        schedules = Schedules(graph, machine)
        if len(schedules.work) > 7:
            continue
        shortest = min(map(schedules.length, schedules.orders()))
        least = lane_bound(graph, machine)
        assert least <= shortest * (1 + 1e-9), f"seed {seed}"
        tried, met = tried + (shortest > 0), met + (0 < shortest <= least * (1 + 1e-9))
    assert met > 0.9 * tried > 30, (met, tried)


def kernel(number: int, device: int, reads: Sequence[int] = (), seconds: float = 0.0, size: int = 0) -> Vertex:
    return Vertex(number, KERNEL, device, "f", tuple((each, 0) for each in reads), (size,), seconds)


def sent(number: int, source: int, device: int, value: int, size: int = 0) -> Vertex:
    return Vertex(number, COPY, device, "send", ((value, 0),), (size,), source=source)


def on_devices(count: int, *vertices: Vertex) -> TaskGraph:
    return TaskGraph("by hand", tuple(Space(d, 1 << 40) for d in range(count)), vertices)


SLOW = Machine(links={BETWEEN_DEVICES: Link(1000.0, 0.0)})
"""A second for 1000 bytes."""


def test_what_does_not_lead_to_the_gate_does_not_hold_it_up() -> None:
    """Two devices each compute a second for the other. Meanwhile the loss is known at once, and behind the gate a copy
    takes a second of the link: one after the other that would be two."""
    late = Vertex(6, INPUT, 0, "tangent", sizes=(1000,), traits=LATE)
    loss = [replace(kernel(i, 0, [i - 1] if i else []), out=i == 3) for i in range(4)]
    work = [kernel(4, 0, (), 1.0), kernel(5, 1, (), 1.0), sent(7, 0, 1, 4), sent(8, 1, 0, 5), sent(9, 0, 1, 6, 1000)]
    graph = on_devices(2, late, *loss, *work)
    schedules = Schedules(graph, SLOW)
    assert min(map(schedules.length, schedules.orders())) == pytest.approx(1.0)
    assert lane_bound(graph, SLOW) == pytest.approx(1.0)


def test_branches_of_one_device_come_one_after_the_other_before_what_joins_them() -> None:
    """Two devices in a row, on each three branches of two kernels: no chain is longer than three kernels on each, but
    the second device waits for all seven of the first."""
    vertices = []
    for device in range(2):
        first = 20 * device
        fork = sent(first, 0, device, 7) if device else kernel(first, device, (), 1.0)
        branches = [(first + 2 * b + 1, first + 2 * b + 2) for b in range(3)]
        made = [kernel(i, device, [r], 1.0) for a, b in branches for i, r in ((a, first), (b, a))]
        vertices += [fork, *made, kernel(first + 7, device, [b for _, b in branches], 1.0)]
    assert lane_bound(on_devices(2, *vertices), SLOW) == pytest.approx(8.0 + 7.0)


def test_slices_of_one_result_leave_one_after_the_other() -> None:
    """Whichever of four devices computes last, for a second, has its three slices to send behind that."""
    vertices = [kernel(d, d, (), 1.0) for d in range(4)]
    for d in range(4):
        for other in range(4):
            number = 10 + 10 * d + 2 * other
            vertices.append(kernel(number, d, [d], 0.0, 1000))
            if other != d:
                vertices.append(sent(number + 1, d, other, number, 1000))
    for d in range(4):
        vertices.append(kernel(60 + d, d, [10 + 10 * other + 2 * d + (other != d) for other in range(4)]))
    assert lane_bound(on_devices(4, *vertices), SLOW) == pytest.approx(4.0)


def test_a_lanes_span_is_the_largest_over_all_of_its_sets() -> None:
    rng = random.Random(0)
    for _ in range(200):
        jobs = [(rng.randint(0, 9), rng.randint(0, 5), rng.randint(0, 9)) for _ in range(rng.randint(1, 7))]
        sets = [[job for k, job in enumerate(jobs) if number >> k & 1] for number in range(1, 1 << len(jobs))]
        by_hand = max(min(r for r, _, _ in s) + sum(p for _, p, _ in s) + min(q for _, _, q in s) for s in sets)
        assert least_span(jobs) == by_hand


def test_heads_are_those_of_all_ancestors_and_no_less_than_of_the_next_alone() -> None:
    """By definition, of every set of ancestors of a lane with a head of at least so much."""
    rng = random.Random(1)
    for _ in range(100):
        count = rng.randint(1, 12)
        before = [sorted(rng.sample(range(at), min(at, rng.choice((0, 1, 1, 2, 3))))) for at in range(count)]
        lane, seconds = [rng.randint(0, 2) for _ in range(count)], [float(rng.randint(0, 4)) for _ in range(count)]
        share = [each / (1 + (k == 0)) for each, k in zip(seconds, lane, strict=True)]
        found, quick = heads(before, lane, seconds, share), near_heads(before, lane, seconds, share)
        ancestors: list[set[int]] = []
        for at, sources in enumerate(before):
            ancestors.append(set(sources).union(*(ancestors[each] for each in sources)))
            least = max((found[each] + seconds[each] for each in sources), default=0.0)
            for first in ancestors[at]:
                later = [e for e in ancestors[at] if lane[e] == lane[first] and found[e] >= found[first]]
                least = max(least, found[first] + sum(share[e] for e in later))
            assert found[at] == pytest.approx(least) and quick[at] <= found[at] + 1e-9
