"""``make_plan``: planner and policy by name, more modest attempts when one fails, and the budget that would do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from disco_accel.errors import BudgetTooSmall, ConfigError
from disco_accel.graphcheck import check_taskgraph
from disco_accel.memgraph import MemGraph
from disco_accel.plan.build import build, buildable
from disco_accel.plan.evict import Policy, policy_named
from disco_accel.plan.resident import Residents, improve, plain_choices
from disco_accel.plan.sim_malloc import Infeasible, Repairs
from disco_accel.plan.simulate import Machine, simulate
from disco_accel.plan.timed import build_timed
from disco_accel.taskgraph import Device, TaskGraph, VertexKind

_SHORTER = (16, 0)

_GOOD = 1.002
"""A plan that takes at most so many times what its kernels take is not compared with another planner's."""

_BOTH_UP_TO = 12_000
"""Vertices of a graph for which both planners are tried."""


def make_plan(
    graph: TaskGraph,
    *,
    memory: int | None = None,
    policy: str = "belady",
    planner: str = "build",
    cyclic: bool = False,
    lookahead: int | None = None,
    machine: Machine | None = None,
) -> MemGraph:
    """Return a plan of ``graph``.

    ``memory``: bytes of every device's arena (None: what the graph's devices say). ``planner``: ``build``, the paper's,
    or ``timed``, which plans in simulated time and leaves to ``build`` what it cannot plan. ``cyclic``: the plan is run
    step after step. ``machine``: what candidates are compared on. For ``build`` alone: ``policy``, who is evicted
    first, and ``lookahead``, vertices ahead of execution for which copies may be placed (None: as many as fit).
    Raises ConfigError for unknown names, GraphFileError for a graph that makes no sense, BudgetTooSmall.
    """
    if planner not in PLANNERS:
        raise ConfigError(f"planner: {planner!r} is unknown; known planners: {', '.join(sorted(PLANNERS))}")
    chosen = policy_named(policy)
    if lookahead is not None and lookahead < 0:
        raise ConfigError(f"lookahead: {lookahead} is negative; 0 turns it off")
    graph = check_taskgraph(graph)
    if memory is not None:
        graph = _with_memory(graph, lambda device: memory)
    return PLANNERS[planner](graph, chosen, cyclic, lookahead, machine or Machine())


def plan_build(
    graph: TaskGraph,
    policy: Policy,
    cyclic: bool,
    lookahead: int | None,
    machine: Machine,
    repairs: Repairs | None = None,
) -> MemGraph:
    """Plan with BUILDMEMGRAPH: as much look-ahead as fits, less if it must be. Raises BudgetTooSmall."""
    repairs = repairs or Repairs()
    for ahead in _attempts(lookahead, repairs):

        def planned(residents: Residents, ahead: int | None = ahead) -> MemGraph:
            return build(graph, policy, lookahead=ahead, residents=residents, cyclic=cyclic, repairs=repairs)

        for residents in plain_choices(graph):
            try:
                plan = planned(residents)
            except Infeasible:
                continue
            return improve(graph, plan, residents, planned, machine)
    if not repairs.shorten_lookahead:
        raise Infeasible(0)
    given = max(device.memory for device in graph.devices)
    raise BudgetTooSmall(_smallest(graph, policy, cyclic, lookahead), given, f"the plan of {graph.name!r}")


def plan_timed(graph: TaskGraph, policy: Policy, cyclic: bool, lookahead: int | None, machine: Machine) -> MemGraph:
    """Plan in simulated time; where that finds no plan or a slower one, with BUILDMEMGRAPH. Raises BudgetTooSmall."""
    try:
        plan = build_timed(graph, machine, cyclic=cyclic)
    except Infeasible:
        pass
    else:
        return _faster(graph, plan, policy, cyclic, lookahead, machine)
    try:
        return plan_build(graph, policy, cyclic, lookahead, machine)
    except BudgetTooSmall as error:
        needed = _smaller(graph, error.needed, lambda smaller: _plannable(smaller, machine, cyclic))
        raise BudgetTooSmall(needed, error.given, f"the plan of {graph.name!r}") from None


def _faster(
    graph: TaskGraph, plan: MemGraph, policy: Policy, cyclic: bool, lookahead: int | None, machine: Machine
) -> MemGraph:
    """Return ``plan``, or that of BUILDMEMGRAPH if there is time to make it and it is faster in simulation."""
    makespan = simulate(plan, machine).makespan
    if makespan <= _GOOD * _compute(graph, machine) or len(graph.vertices) > _BOTH_UP_TO:
        return plan
    try:
        other = plan_build(graph, policy, cyclic, lookahead, machine, Repairs(shorten_lookahead=False))
    except Infeasible:
        return plan
    return other if simulate(other, machine).makespan < makespan else plan


def _compute(graph: TaskGraph, machine: Machine) -> float:
    """Return the seconds that the busiest device's kernels take."""
    busy: dict[int, float] = {}
    for vertex in graph.vertices:
        if vertex.kind is VertexKind.KERNEL:
            busy[vertex.device] = busy.get(vertex.device, 0.0) + machine.seconds(vertex)
    return max(busy.values(), default=0.0) / machine.compute_streams


def _plannable(graph: TaskGraph, machine: Machine, cyclic: bool) -> bool:
    try:
        build_timed(graph, machine, cyclic=cyclic, hurry=True)
    except Infeasible:
        return False
    return True


def _smaller(graph: TaskGraph, needed: int, fits: Callable[[TaskGraph], bool]) -> int:
    """Return a size, the same for every device and at most ``needed``, that fits although one unit less does not.

    ``needed`` is a size that works while a unit less fails by other means than ``fits``.
    """
    unit = max(device.alignment for device in graph.devices)
    low = min(device.memory for device in graph.devices) // unit
    if needed // unit - 1 <= low or not fits(_with_memory(graph, lambda _: needed - unit)):
        return needed
    return unit * _boundary(low, needed // unit - 1, lambda units: fits(_with_memory(graph, lambda _: units * unit)))


PLANNERS: dict[str, Callable[[TaskGraph, Policy, bool, int | None, Machine], MemGraph]] = {
    "build": plan_build,
    "timed": plan_timed,
}


def _attempts(lookahead: int | None, repairs: Repairs) -> Iterator[int | None]:
    yield lookahead
    if repairs.shorten_lookahead:
        yield from (ahead for ahead in _SHORTER if lookahead is None or ahead < lookahead)


def _with_memory(graph: TaskGraph, size: Callable[[Device], int]) -> TaskGraph:
    return replace(graph, devices=tuple(replace(device, memory=size(device)) for device in graph.devices))


def _smallest(graph: TaskGraph, policy: Policy, cyclic: bool, lookahead: int | None) -> int:
    """Return the smallest size, the same for every device, at which a plan is found; one alignment unit less fails.

    The most modest attempt, cheap to repeat, comes close; all attempts together decide from there.
    """
    unit = max(device.alignment for device in graph.devices)

    def attempts(units: int) -> Iterator[Callable[[], bool]]:
        smaller = _with_memory(graph, lambda _: units * unit)
        for ahead in reversed(list(_attempts(lookahead, Repairs()))):
            for residents in reversed(plain_choices(smaller)):
                yield partial(buildable, smaller, policy, lookahead=ahead, residents=residents, cyclic=cyclic)

    def modest_fits(units: int) -> bool:
        return next(attempts(units))()

    def fits(units: int) -> bool:
        return any(attempt() for attempt in attempts(units))

    failing = min(device.memory for device in graph.devices) // unit
    working = max(1, failing)
    while not modest_fits(working):
        failing, working = working, working * 2
    working = _boundary(failing, working, modest_fits)
    low = min(device.memory for device in graph.devices) // unit
    if working - 1 > low and fits(working - 1):
        working = _boundary(low, working - 1, fits)
    return working * unit


def _boundary(failing: int, working: int, fits: Callable[[int], bool]) -> int:
    """Return a number that fits although the one before does not, given one that fails and a larger one that fits."""
    while working - failing > 1:
        middle = (failing + working) // 2
        if fits(middle):
            working = middle
        else:
            failing = middle
    return working
