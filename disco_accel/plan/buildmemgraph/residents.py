"""Which clean inputs are on the device when a step starts, and which of them never leave it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.taskgraph import TaskGraph, Vertex
from disco_accel.graph.values import host_copy_exists, is_foreign
from disco_accel.plan.infeasible import Infeasible
from disco_accel.plan.search_work import WALKED, SearchWork
from disco_accel.simulate.simulator import Machine, simulate

SMALL = 2 << 20
"""Bytes below which a reload costs more latency than transfer, so that such inputs are made resident first."""

SHARES = ((0, 0.8), (0.15, 0.9), (0, 0.9), (0.3, 0.8), (0, 0), (0.5, 0.5), (0.3, 0.3), (0, 0.7), (0.15, 0.7))
"""Shares of the memory: of inputs that never leave, and of all residents at the start. The most promising first."""

GRID = tuple((permanent / 10, present / 10) for present in range(9, -1, -1) for permanent in range(present, -1, -1))
"""All the others, for graphs that are planned so fast that it does not matter."""

FIRST_SHARES = (0.15, 0.9)
"""The shares to try where there is time for one try alone."""

EFFORT = 25_000
"""Vertices planned in all before the search for better shares ends."""

_STEP = 0.06


@dataclass(frozen=True, slots=True)
class Residents:
    """Ids of clean inputs on the device when a step starts: ``permanent`` ones never leave, ``visiting`` ones may."""

    permanent: tuple[int, ...] = ()
    visiting: tuple[int, ...] = ()


Build = Callable[[Residents], MemGraph]
"""Plans with the given residents. Raises Infeasible."""


def plain_choices(graph: TaskGraph) -> list[Residents]:
    """Return the choices that decide whether a plan exists: all inputs resident, small ones only, none."""
    search = _ResidentSearch(graph)
    choices = [search.residents(0, 0), Residents()]
    if sum(vertex.sizes[0] for vertex in search.clean) <= search.memory:
        choices.insert(0, search.everything)
    return list(dict.fromkeys(choices))


def first_choices(graph: TaskGraph) -> list[Residents]:
    """Return the choices for a graph that is planned once: ``plain_choices``, and on one device a share of residents.

    On several devices kernels wait for each other more than for weights, so residents gain little there.
    """
    choices = plain_choices(graph)
    search = _ResidentSearch(graph)
    if len(graph.devices) == 1 and search.everything not in choices:
        choices.insert(0, search.residents(*FIRST_SHARES))
    return choices


def improve(
    graph: TaskGraph, plan: MemGraph, residents: Residents, build: Build, machine: Machine, work: SearchWork
) -> MemGraph:
    """Return the fastest plan, in simulation, that is found from ``plan``, which ``residents`` gave, before the user's
    deadline."""
    search = _ResidentSearch(graph)
    search.work = work
    if residents == search.everything:
        return plan
    search.start(plan, residents, build, machine)
    for shares in (*SHARES, *GRID):
        if shares == GRID[0]:
            search.refine()
        if search.effort > EFFORT or work.late():
            break
        search.attempt(*shares)
    search.refine()
    return search.plan


class _ResidentSearch:
    plan: MemGraph
    build: Build
    machine: Machine
    work: SearchWork

    def __init__(self, graph: TaskGraph) -> None:
        self.graph = graph
        self.clean = _clean_inputs(graph)
        self.everything = Residents(permanent=tuple(vertex.id for vertex in self.clean))
        self.small = tuple(vertex.id for vertex in self.clean if vertex.sizes[0] < SMALL)
        self.large = [vertex for vertex in self.clean if vertex.sizes[0] >= SMALL]
        self.memory = sum(device.memory for device in graph.devices)
        if sum(vertex.sizes[0] for vertex in self.clean if vertex.sizes[0] < SMALL) * 4 > self.memory:
            self.small, self.large = (), list(self.clean)
        self.reloads = _reloads(graph)
        self.effort = 0
        self.tried: set[Residents] = set()
        self.shares = (0.0, 0.0)

    def start(self, plan: MemGraph, residents: Residents, build: Build, machine: Machine) -> None:
        """Begin the search with a plan that works."""
        self.plan, self.build, self.machine = plan, build, machine
        self.tried.add(residents)
        self.makespan = simulate(plan, machine).makespan

    def attempt(self, permanent: float, present: float) -> bool:
        """Plan with these shares of the memory and keep the plan if it is the fastest so far; True if it is."""
        residents = self.residents(permanent, present)
        if residents in self.tried:
            return False
        self.tried.add(residents)
        self.work.add(WALKED, len(self.graph.vertices))
        try:
            plan = self.build(residents)
        except Infeasible:
            self.effort += len(self.graph.vertices) // 2
            return False
        self.effort += len(self.graph.vertices)
        makespan = simulate(plan, self.machine).makespan
        if makespan >= self.makespan:
            return False
        self.plan, self.makespan, self.shares = plan, makespan, (permanent, present)
        return True

    def refine(self) -> None:
        """Walk from the best shares to better ones nearby while effort is left."""
        moved = True
        while moved and self.effort < EFFORT and not self.work.late():
            permanent, present = self.shares
            around = [(permanent, present + d) for d in (-_STEP, _STEP)]
            around += [(permanent + d, present) for d in (-_STEP, _STEP)]
            moved = False
            for shares in around:
                if self.effort < EFFORT and not self.work.late() and 0 <= shares[0] <= shares[1] <= 1:
                    moved = self.attempt(*shares) or moved

    def residents(self, permanent: float, present: float) -> Residents:
        """Return the inputs that make up these shares of the memory, and the small ones."""
        never_leaving = list(_spread(self.large, self.reloads, int(permanent * self.memory)))
        chosen = set(never_leaving)
        budget = int(present * self.memory) - sum(vertex.sizes[0] for vertex in self.large if vertex.id in chosen)
        visiting = []
        for vertex in self.large:
            # In the order of first use: the end of a step reloads the weights that the next step reads first.
            if vertex.id not in chosen and vertex.sizes[0] <= budget:
                budget -= vertex.sizes[0]
                visiting.append(vertex.id)
        return Residents((*self.small, *never_leaving), tuple(visiting))


def _clean_inputs(graph: TaskGraph) -> list[Vertex]:
    """Return the clean inputs that are read, by first reader."""
    first: dict[int, int] = {}
    for position, vertex in enumerate(graph.vertices):
        for producer, _ in vertex.inputs:
            first.setdefault(producer, position)
    # A vertex that writes over a clean input needs a copy of its own each time.
    clean = [v for v in graph.vertices if host_copy_exists(v) and v.sizes[0] and not is_foreign(v)]
    return sorted((v for v in clean if v.id in first), key=lambda v: first[v.id])


def _reloads(graph: TaskGraph) -> dict[int, int]:
    """Return how many reloads a step saves if an input stays: one for each group of readers that are close together."""
    places: dict[int, list[int]] = {}
    for position, vertex in enumerate(graph.vertices):
        for producer in dict.fromkeys(producer for producer, _ in vertex.inputs):
            places.setdefault(producer, []).append(position)
    apart = max(1, len(graph.vertices) // 50)
    return {producer: 1 + sum(b - a > apart for a, b in pairwise(at)) for producer, at in places.items()}


def _spread(vertices: Sequence[Vertex], reloads: dict[int, int], budget: int) -> Iterator[int]:
    """Yield ids of ``vertices`` worth ``budget`` bytes: those that save most reloads, spread evenly over the step.

    Evenly, because then the link loads missing weights while compute uses resident ones.
    """
    for saved in sorted({reloads[vertex.id] for vertex in vertices}, reverse=True):
        group = [vertex for vertex in vertices if reloads[vertex.id] == saved]
        total = sum(vertex.sizes[0] for vertex in group)
        share = min(1.0, budget / total) if total else 0.0
        credit = 0.0
        for vertex in group:
            credit += share * vertex.sizes[0]
            if credit >= vertex.sizes[0] / 2 and vertex.sizes[0] <= budget:
                credit -= vertex.sizes[0]
                budget -= vertex.sizes[0]
                yield vertex.id
