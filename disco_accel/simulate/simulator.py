"""Discrete-event simulation of a plan on a machine: kernels in streams, copies on links."""

from __future__ import annotations

import heapq
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from disco_accel.errors import ConfigError, Stalled
from disco_accel.graph.home_uses import host_devices
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.taskgraph import VertexKind
from disco_accel.graph.values import arrives_at_gate, handed_out_at_gate
from disco_accel.simulate.machine import Link, Machine
from disco_accel.simulate.step_boundary import CrossStepDependencies, cross_step_dependencies

__all__ = ["DISPATCHES", "Link", "Machine", "Simulation", "Simulator", "lower_bound", "simulate"]

DISPATCHES = ("priority", "fifo", "random", "fixed")
"""``priority``: the ready vertex that the plan lists first; ``fifo``: the one that has been ready longest; ``random``:
any; ``fixed``: level by level. A level is the set of vertices at equal depth (see ``Simulator.levels``), and starts
when all of the level before has ended."""

MAX_RUNS = 20_000_000
"""Vertices times steps of one simulation: more would not fit the memory."""


@dataclass(frozen=True, slots=True)
class Simulation:
    """``makespan`` in seconds; ``busy``: seconds of work per lane, such as ``compute0`` or ``h2d0`` (device 0);
    ``starts``: vertex id → second at which it starts in the first step."""

    makespan: float
    busy: Mapping[str, float]
    starts: Mapping[int, float]


def simulate(
    memgraph: MemGraph,
    machine: Machine | None = None,
    *,
    dispatch: str = "priority",
    seed: int = 0,
    jitter: float = 0.0,
    steps: int = 1,
) -> Simulation:
    """Run ``memgraph`` in simulated time, ``steps`` times (see ``Simulator``).

    Late values arrive when every ``out`` vertex has finished. Raises Stalled if the plan cannot run to its end.
    """
    return Simulator(memgraph, machine).run(dispatch=dispatch, seed=seed, jitter=jitter, steps=steps)


def lower_bound(memgraph: MemGraph, machine: Machine | None = None) -> float:
    """Return a lower bound, in seconds, of every execution of ``memgraph``: the work of the busiest lane."""
    machine = machine or Machine()
    lanes = machine.lanes(memgraph.spaces)
    work: dict[str, float] = defaultdict(float)
    for vertex in memgraph.vertices:
        name = lanes.name(vertex)
        work[name] += lanes.seconds(vertex) / (machine.compute_streams if name.startswith("compute") else 1)
    return max(work.values(), default=0.0)


class Simulator:
    """A plan on a machine, made ready to be simulated several times. Vertices are numbered in the order of the plan."""

    def __init__(self, memgraph: MemGraph, machine: Machine | None = None) -> None:
        machine = machine or Machine()
        self.memgraph = memgraph
        self.ids = [vertex.id for vertex in memgraph.vertices]
        index = {vertex: i for i, vertex in enumerate(self.ids)}
        self.inputs = [vertex.kind is VertexKind.INPUT for vertex in memgraph.vertices]
        self.late = [i for i, vertex in enumerate(memgraph.vertices) if arrives_at_gate(vertex)]
        self.out = [handed_out_at_gate(vertex) and vertex.kind is not VertexKind.INPUT for vertex in memgraph.vertices]
        lanes = machine.lanes(memgraph.spaces)
        self.seconds = [lanes.seconds(vertex) for vertex in memgraph.vertices]
        names = [lanes.name(vertex) for vertex in memgraph.vertices]
        self.lane_names = sorted({name for name, is_input in zip(names, self.inputs, strict=True) if not is_input})
        number = {name: lane for lane, name in enumerate(self.lane_names)}
        self.lanes = [-1 if is_input else number[name] for name, is_input in zip(names, self.inputs, strict=True)]
        # A kernel of a host device has all of the processors that there are.
        hosts = {f"compute{device}" for device in host_devices(memgraph.devices)}
        self.width = [
            machine.compute_streams if name.startswith("compute") and name not in hosts else 1
            for name in self.lane_names
        ]
        self.successors: list[list[int]] = [[] for _ in self.ids]
        self.waiting = [0] * len(self.ids)
        # A duplicate edge is counted twice on both sides.
        for edges in (memgraph.data_edges, memgraph.memory_edges):
            for u, v in edges:
                self.successors[index[u]].append(index[v])
                self.waiting[index[v]] += 1
        for i, vertex in enumerate(memgraph.vertices):
            for producer, _ in vertex.inputs:
                if self.inputs[index[producer]]:
                    self.successors[index[producer]].append(i)
                    self.waiting[i] += 1
        if any(self.out):
            for i in self.late:
                self.waiting[i] += 1
        self._cross_step: CrossStepDependencies | None = None

    def run(self, *, dispatch: str = "priority", seed: int = 0, jitter: float = 0.0, steps: int = 1) -> Simulation:
        """Simulate ``steps`` consecutive steps, each vertex as soon as its dependencies on the step before allow.

        Kernels and transfers of a step wait for all those of the step before, since the caller starts it with their
        results. Copies wait only for the memory that they write, so the end of a step reloads values for the next one.
        ``jitter``: each vertex's seconds are multiplied by a random number from 1 - jitter to 1 + jitter; it and
        ``random`` depend on ``seed`` alone. Raises ConfigError for an argument out of range, PlanError for several
        steps of a plan that does not end as it began, Stalled.
        """
        if dispatch not in DISPATCHES:
            raise ConfigError(f"dispatch: {dispatch!r} is unknown; known ones: {', '.join(DISPATCHES)}")
        if not 0 <= jitter <= 1:
            raise ConfigError(f"jitter: {jitter!r} does not work; use a number from 0 to 1")
        if steps < 1 or steps * len(self.ids) > MAX_RUNS:
            most = MAX_RUNS // max(1, len(self.ids))
            raise ConfigError(f"steps: {steps} does not work; use a number from 1 to {most}")
        if steps > 1 and self._cross_step is None:
            self._cross_step = cross_step_dependencies(self.memgraph)
        return _Run(
            self, dispatch, random.Random(seed), jitter, steps, self._cross_step or CrossStepDependencies()
        ).to_end()

    def levels(self) -> list[int]:
        """Return the depth of each vertex: vertices in the longest chain before it. Late values follow all ``out``."""
        level = [0] * len(self.ids)
        for gate in (False, True):
            if gate:
                behind = 1 + max((level[i] for i, out in enumerate(self.out) if out), default=-1)
                for i in self.late:
                    level[i] = behind
            for i, successors in enumerate(self.successors):
                then = level[i] + (not self.inputs[i])
                for successor in successors:
                    level[successor] = max(level[successor], then)
        return level


class _LaneQueues:
    """Vertices that are ready or run on the lanes of a plan: those of lane ``l`` are in ``queues[l]`` by their key."""

    def __init__(self, plan: Simulator, seconds: Sequence[float], dispatch: str, rng: random.Random) -> None:
        self.lanes = plan.lanes
        self.seconds = seconds
        self.dispatch = dispatch
        self.rng = rng
        self.free = list(plan.width)
        self.queues: list[list[tuple[float, int]]] = [[] for _ in plan.lane_names]
        self.stirred: set[int] = set()
        """Lanes with a new vertex in their queue, or with one more free, since the last launch: no other can start."""
        self.running: list[tuple[float, int]] = []
        self.busy = [0.0] * len(plan.lane_names)

    def add(self, i: int, now: float) -> None:
        """Put vertex ``i``, which is ready, in the queue of its lane."""
        key = float(i)
        if self.dispatch == "fifo":
            key = now
        elif self.dispatch == "random":
            key = self.rng.random()
        lane = self.lanes[i % len(self.lanes)]
        heapq.heappush(self.queues[lane], (key, i))
        self.stirred.add(lane)

    def launch(self, now: float, starts: list[float]) -> None:
        """Start the vertices that can run, and note the time in ``starts``."""
        free, seconds = self.free, self.seconds
        for lane in self.stirred:
            queue = self.queues[lane]
            while queue and free[lane]:
                _, i = heapq.heappop(queue)
                free[lane] -= 1
                self.busy[lane] += seconds[i]
                starts[i] = now
                heapq.heappush(self.running, (now + seconds[i], i))
        self.stirred.clear()


class _Run:
    """One simulation. Vertex i of step s has the number ``s * count + i``."""

    def __init__(
        self,
        plan: Simulator,
        dispatch: str,
        rng: random.Random,
        jitter: float,
        steps: int,
        cross_step: CrossStepDependencies,
    ) -> None:
        self.plan = plan
        self.steps = steps
        self.cross_step = cross_step
        self.count = count = len(plan.ids)
        seconds: Sequence[float] = plan.seconds * steps
        if jitter:
            seconds = [each * rng.uniform(1 - jitter, 1 + jitter) for each in seconds]
        self.queues = _LaneQueues(plan, seconds, dispatch, rng)
        later = [waits + more for waits, more in zip(plan.waiting, cross_step.waiting(count), strict=True)]
        self.waiting = plan.waiting + later * (steps - 1)
        self.successors = plan.successors
        if cross_step.within:
            self.successors = [list(each) for each in plan.successors]
            for before, then in cross_step.within:
                self.successors[before].append(then)
                for step in range(steps):
                    self.waiting[step * count + then] += 1
        self.outs_left = [sum(plan.out)] * steps
        self.work_left = [cross_step.work] * steps
        self.starts = [-1.0] * (count * steps)
        self.left = count * steps
        self.now = 0.0
        self.level = _Levels(plan.levels(), plan.inputs, steps) if dispatch == "fixed" else None

    def to_end(self) -> Simulation:
        """Run until nothing is left."""
        ready = [i for i, waits in enumerate(self.waiting) if not waits]
        for i in ready:
            self._ready(i)
        queues, lanes, count, starts = self.queues, self.plan.lanes, self.count, self.starts
        running, free, stirred = queues.running, queues.free, queues.stirred
        queues.launch(0.0, starts)
        while running:
            self.now = now = running[0][0]
            while running and running[0][0] <= now:
                _, i = heapq.heappop(running)
                lane = lanes[i % count]
                free[lane] += 1
                stirred.add(lane)
                self._done(i)
            queues.launch(now, starts)
        if self.left:
            stuck = [str(self.plan.ids[i % self.count]) for i, start in enumerate(self.starts) if start < 0]
            raise Stalled(
                f"the plan cannot run to its end: {self.left} vertices never start, among them {', '.join(stuck[:3])}"
            )
        busy = {name: busy for name, busy in zip(self.plan.lane_names, queues.busy, strict=True) if busy}
        return Simulation(
            self.now, busy, {vertex: starts[i] for i, vertex in enumerate(self.plan.ids) if not self.plan.inputs[i]}
        )

    def _ready(self, i: int) -> None:
        if self.plan.inputs[i % self.count]:
            self.starts[i] = self.now
            self._done(i)
        elif self.level is None or self.level.admits(i):
            self.queues.add(i, self.now)

    def _done(self, i: int) -> None:
        self.left -= 1
        step, place = divmod(i, self.count)
        first = i - place
        for successor in self.successors[place]:
            self._release(first + successor)
        if self.plan.out[place]:
            self.outs_left[step] -= 1
            if not self.outs_left[step]:
                for late in self.plan.late:
                    self._release(first + late)
        if step + 1 < self.steps:
            self._release_next(step, place)
        if self.level is not None and not self.plan.inputs[place]:
            for waiting in self.level.finish(i):
                self.queues.add(waiting, self.now)

    def _release_next(self, step: int, place: int) -> None:
        first = (step + 1) * self.count
        for successor in self.cross_step.successors.get(place, ()):
            self._release(first + successor)
        if place in self.cross_step.workers:
            self.work_left[step] -= 1
            if not self.work_left[step]:
                for gated in self.cross_step.gated:
                    self._release(first + gated)

    def _release(self, i: int) -> None:
        self.waiting[i] -= 1
        if not self.waiting[i]:
            self._ready(i)


class _Levels:
    """Holds ready vertices back until all of the level before have ended."""

    def __init__(self, levels: Sequence[int], inputs: Sequence[bool], steps: int) -> None:
        self.levels = levels
        self.count = len(levels)
        self.depth = max(levels, default=0) + 1
        work = [0] * self.depth
        for level, is_input in zip(levels, inputs, strict=True):
            work[level] += not is_input
        self.left = work * steps
        self.held: dict[int, list[int]] = {}
        self.current = 0
        self._advance()

    def admits(self, i: int) -> bool:
        """Whether ``i``, which is ready, may start; if not it is kept for later."""
        level = self._level(i)
        if level > self.current:
            self.held.setdefault(level, []).append(i)
        return level <= self.current

    def finish(self, i: int) -> list[int]:
        """Note that ``i`` has ended; return those that may start now."""
        self.left[self._level(i)] -= 1
        before = self.current
        self._advance()
        return [each for level in range(before + 1, self.current + 1) for each in self.held.pop(level, ())]

    def _advance(self) -> None:
        while self.current + 1 < len(self.left) and not self.left[self.current]:
            self.current += 1

    def _level(self, i: int) -> int:
        step, place = divmod(i, self.count)
        return step * self.depth + self.levels[place]
