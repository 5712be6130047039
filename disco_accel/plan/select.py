"""``make_plan``: planner and policy by name, more modest attempts when one fails, and the budget that would do."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from disco_accel.errors import BudgetTooSmall, ConfigError, PlanError
from disco_accel.eviction import AUTO, Policy, policy_named
from disco_accel.gc_pause import collector_paused
from disco_accel.graph.check import called, check_taskgraph
from disco_accel.graph.home_uses import host_devices
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.order import serial_order
from disco_accel.graph.passes import GraphPass, arena_of, run_passes
from disco_accel.graph.spaces import TO_DEVICE, TO_HOST
from disco_accel.graph.taskgraph import TaskGraph, Vertex, VertexKind
from disco_accel.graph.values import (
    changes_over_steps,
    handed_out_at_gate,
    is_foreign,
    lasting_versions,
    outlives_step,
)
from disco_accel.plan.buildmemgraph.builder import build
from disco_accel.plan.buildmemgraph.min_memory import (
    Attempt,
    first_fitting,
    has_ample_memory,
    smallest_feasible_memory,
)
from disco_accel.plan.buildmemgraph.residents import Residents, first_choices, improve, plain_choices
from disco_accel.plan.buildmemgraph.sim_malloc import Repairs
from disco_accel.plan.candidates import Candidates, order_choices
from disco_accel.plan.common.serial_orders import LOW_PEAK_ORDER
from disco_accel.plan.infeasible import Infeasible
from disco_accel.plan.refusal import too_small
from disco_accel.plan.search_work import SearchWork
from disco_accel.plan.timed.requirements import check_overwrites
from disco_accel.plan.timed.search import build_timed
from disco_accel.plan.timed.smallest_memory import plan_frugally, smallest_timed_memory
from disco_accel.simulate.simulator import Machine

_SHORTER = (16, 0)

_GOOD = 1.002
"""A plan that takes at most so many times as long as its kernels is not compared with another planner's."""

_NEAR = 1.02
"""On several devices the timed planner takes far longer than BUILDMEMGRAPH. It is not asked to better a step that takes
at most so many times as long as one with memory for everything."""

_SLACK = 0.3
"""Share of the memory that look-ahead leaves free where devices work side by side: with it, outputs of one of them
seldom wait for another."""

_PATIENCE = 10.0
"""How often kernels could copy their outputs to the host and back where only the memory of a plan counts."""

_ORDERS_UP_TO = 1_000
"""Vertices of a graph on several devices that the timed planner plans in each of its orders, not in the most promising
alone."""

_SEARCH_UP_TO = 12_000
"""Vertices of a graph for which BUILDMEMGRAPH tries several sets of residents."""


Planned = tuple[MemGraph, tuple[GraphPass, ...]]
"""A plan, and the passes that its graph went through on the way to it."""

Planner = Callable[[TaskGraph, Policy, bool, int | None, Machine, SearchWork, Collection[int]], Planned]
"""Its arguments: those of ``plan_timed``. Its passes are those behind the graph that it gets. It raises BudgetTooSmall;
Infeasible, where the work has no search for the memory that is needed."""


def make_plan(
    graph: TaskGraph,
    *,
    memory: int | None = None,
    policy: str = AUTO,
    planner: str = "build",
    cyclic: bool = False,
    lookahead: int | None = None,
    machine: Machine | None = None,
    work: SearchWork | None = None,
) -> MemGraph:
    """Return a plan of ``graph``.

    ``memory``: bytes of every device's arena (None: those of the graph's devices). ``planner``: ``build``, the paper's,
    or ``timed``, which plans in simulated time, or with ``build`` if that fails. ``cyclic``: the plan is run step
    after step. ``machine``: the one that candidates are compared on. ``work``: the limits of the search, and its cost.
    ``policy``, for ``build`` alone: the order of evictions (auto: belady). ``lookahead``, for ``build`` alone: vertices
    ahead of execution for which copies may be placed (None: as many as fit).
    Raises ConfigError for unknown names, GraphFileError for a graph that makes no sense, BudgetTooSmall; in its place
    Infeasible, where ``work`` has no search for the memory that is needed, or does not name it.
    """
    passes = () if memory is None else (arena_of(memory),)
    plan, _ = planned_with(
        graph, passes, policy=policy, planner=planner, cyclic=cyclic, lookahead=lookahead, machine=machine, work=work
    )
    return plan


@collector_paused()
def planned_with(
    graph: TaskGraph,
    passes: Sequence[GraphPass],
    *,
    policy: str = AUTO,
    planner: str,
    cyclic: bool,
    lookahead: int | None = None,
    machine: Machine | None = None,
    work: SearchWork | None = None,
    not_offloaded: Collection[int] = (),
) -> Planned:
    """As ``make_plan``, of ``graph`` behind ``passes``; with all passes between ``graph`` and the plan.

    ``not_offloaded``: kernels whose outputs ``timed`` keeps on their device.
    """
    if planner not in PLANNERS:
        raise ConfigError(f"planner: {planner!r} is unknown; known planners: {', '.join(sorted(PLANNERS))}")
    chosen = policy_named(policy)
    if lookahead is not None and lookahead < 0:
        raise ConfigError(f"lookahead: {lookahead} is negative; 0 turns it off")
    passes = planning_passes(*passes)
    graph = run_passes(check_taskgraph(graph), passes)
    machine, work = machine or Machine(), work or SearchWork()
    plan, orders = PLANNERS[planner](graph, chosen, cyclic, lookahead, machine, work, not_offloaded)
    if plan.host.memory > graph.host.memory:
        raise PlanError(
            f"host: offloads take {plan.host.memory} bytes, the graph gives {graph.host.memory}: give the host "
            "more, or the device, so that less is offloaded"
        )
    return plan, (*passes, *orders)


def planning_passes(*passes: GraphPass) -> tuple[GraphPass, ...]:
    """Return all passes in front of a planner: ``passes``, and those that every planner's graph goes through."""
    return *passes, INPUTS_BY_USE


def inputs_by_use(graph: TaskGraph) -> TaskGraph:
    """Return ``graph`` with its inputs in front, by first reader: where a file lists them makes no difference then."""
    rest = [vertex for vertex in graph.vertices if vertex.kind is not VertexKind.INPUT]
    first: dict[int, int] = {}
    for position, vertex in enumerate(rest):
        for producer, _ in vertex.inputs:
            first.setdefault(producer, position)
    inputs = [vertex for vertex in graph.vertices if vertex.kind is VertexKind.INPUT]
    inputs.sort(key=lambda vertex: (first.get(vertex.id, len(rest)), vertex.id))
    return replace(graph, vertices=(*inputs, *rest))


INPUTS_BY_USE = GraphPass("inputs by use", "inputs in front, by first reader", inputs_by_use)


def plan_build(
    graph: TaskGraph,
    policy: Policy,
    cyclic: bool,
    lookahead: int | None,
    machine: Machine,
    work: SearchWork,
    not_offloaded: Collection[int] = (),
    repairs: Repairs | None = None,
) -> Planned:
    """Plan with BUILDMEMGRAPH: as much look-ahead as fits, less if it must be. Raises BudgetTooSmall."""
    del not_offloaded
    if (vertex := _beyond_build(graph)) is not None:
        raise ConfigError(
            f"planner: 'build' cannot plan {called(vertex)}, which {_changes(vertex)}; use planner: timed"
        )
    repairs = repairs or Repairs()
    for attempt in _attempts(graph, lookahead, repairs):
        planned = partial(_built, graph, policy, cyclic, repairs, attempt)
        try:
            plan = planned(attempt.residents)
        except Infeasible:
            continue
        if len(graph.vertices) > _SEARCH_UP_TO:
            return plan, ()
        return improve(graph, plan, attempt.residents, planned, machine, work), ()
    if not repairs.shorten_lookahead:
        raise Infeasible(0)
    raise _too_small(graph, policy, cyclic, lookahead, work)


def _beyond_build(graph: TaskGraph) -> Vertex | None:
    """Return a vertex that BUILDMEMGRAPH has no rule for: it knows values that neither a step nor the host between two
    steps changes, and kernels that write output 0 over an input."""
    versions = lasting_versions(graph.vertices).values()
    states = {version for each in versions if len(each) > 1 for version in each}
    hosts = host_devices(graph.devices)
    for vertex in graph.vertices:
        if vertex.space in hosts:
            return vertex
        if (vertex.id, 0) in states or not outlives_step(vertex) or any(output for output, _ in vertex.inplace):
            return vertex
    return None


def _changes(vertex: Vertex) -> str:
    if changes_over_steps(vertex):
        return "lives over steps and changes"
    if not outlives_step(vertex):
        return "the host changes between two steps (renewed)"
    if not any(output for output, _ in vertex.inplace):
        return "is of a host device"
    return f"writes outputs {[output for output, _ in vertex.inplace]} over its inputs"


def _too_small(
    graph: TaskGraph, policy: Policy, cyclic: bool, lookahead: int | None, work: SearchWork
) -> BudgetTooSmall | Infeasible:
    if not (work.finds_needed and work.names_needed):
        return Infeasible(0)
    attempts = partial(_attempts, lookahead=lookahead)
    needed = smallest_feasible_memory(graph, policy, cyclic, attempts, work)
    return too_small(graph, needed, lambda other: first_fitting(other, policy, cyclic, attempts) is not None)


def _built(
    graph: TaskGraph, policy: Policy, cyclic: bool, repairs: Repairs, attempt: Attempt, residents: Residents
) -> MemGraph:
    plan = build(
        graph,
        policy,
        lookahead=attempt.lookahead,
        residents=residents,
        cyclic=cyclic,
        repairs=repairs,
        outs_apart=attempt.outs_apart,
        slack=attempt.slack,
    )
    return replace(plan, planner="build")


def plan_timed(
    graph: TaskGraph,
    policy: Policy,
    cyclic: bool,
    lookahead: int | None,
    machine: Machine,
    work: SearchWork,
    not_offloaded: Collection[int] = (),
) -> Planned:
    """Plan in simulated time; where that finds no plan or a slower one, with BUILDMEMGRAPH. Raises BudgetTooSmall.

    A memory is too small if it is for BUILDMEMGRAPH, which can tell in a fraction of the time, and which always ends.
    ``policy`` has no effect, there neither, as users are told. BUILDMEMGRAPH may offload any value, and is not asked
    where some outputs are ``not_offloaded``.
    """
    del policy
    policy = policy_named(AUTO)
    if not_offloaded or _beyond_build(graph) is not None:
        return _plan_timed_alone(graph, cyclic, machine, work, not_offloaded)
    attempts = partial(_attempts, lookahead=lookahead)
    if not has_ample_memory(graph) and first_fitting(graph, policy, cyclic, attempts) is None:
        raise _too_small(graph, policy, cyclic, lookahead, work)
    orders, fastest = order_choices(graph, machine)
    enough = _NEAR * fastest if orders else _GOOD * _compute(graph, machine)
    plans = Candidates(machine, enough, work)

    def built(each: TaskGraph, own: SearchWork) -> MemGraph:
        one_lookahead = Repairs(shorten_lookahead=False)
        plan, _ = plan_build(each, policy, cyclic, lookahead, machine, own, repairs=one_lookahead)
        return plan

    def timed(each: TaskGraph, own: SearchWork) -> MemGraph:
        return replace(build_timed(each, machine, cyclic=cyclic, work=own), planner="timed")

    if not orders:
        plans.add(timed, graph)
        plans.add(built, graph)
    for order in orders:
        plans.add(built, graph, order)
    for order in plans.fastest_first(orders)[: 1 if len(graph.vertices) > _ORDERS_UP_TO else None]:
        plans.add(timed, graph, order)
    if plans.best is None:
        return plan_build(graph, policy, cyclic, lookahead, machine, work)
    return plans.best, _orders_of(graph, plans.best, plans.order)


def fits(graph: TaskGraph) -> bool:
    """Whether ``plan_timed`` does not refuse the memory of ``graph``, run step after step, as too small. Of graphs that
    BUILDMEMGRAPH cannot plan only a search can tell, and the answer is yes."""
    if _beyond_build(graph) is not None:
        return True
    return first_fitting(graph, policy_named(AUTO), True, partial(_attempts, lookahead=None)) is not None


def _orders_of(given: TaskGraph, plan: MemGraph, order: GraphPass | None) -> tuple[GraphPass, ...]:
    """Return the passes from the order of ``given`` to that of ``plan``, which was made of ``given`` in ``order``."""
    passes = () if order is None else (order,)
    ordered = given if order is None else order.run(given)
    # The one other order that a draft may have.
    return passes if _has_order_of(ordered, plan) else (*passes, LOW_PEAK_ORDER)


def _has_order_of(graph: TaskGraph, plan: MemGraph) -> bool:
    """Whether ``plan`` has the vertices of ``graph`` in its serial order, copies aside."""
    order = [vertex.id for vertex in serial_order(graph)]
    own = frozenset(order)
    return order == [vertex.id for vertex in plan.vertices if vertex.id in own]


def _plan_timed_alone(
    graph: TaskGraph,
    cyclic: bool,
    machine: Machine,
    work: SearchWork,
    not_offloaded: Collection[int],
) -> Planned:
    """As ``plan_timed``, for graphs that BUILDMEMGRAPH cannot plan."""
    orders, fastest = order_choices(graph, machine)
    plans = Candidates(machine, _NEAR * fastest, work)

    def timed(each: TaskGraph, own: SearchWork) -> MemGraph:
        made = build_timed(each, machine, cyclic=cyclic, work=own, not_offloaded=not_offloaded)
        return replace(made, planner="timed")

    def frugal(each: TaskGraph, own: SearchWork) -> MemGraph:
        # A modest search is over soon, and no graph is refused because the one before it took all the work there was.
        own = SearchWork() if work.limit is None and work.finds_needed else own
        made = plan_frugally(each, machine, cyclic=cyclic, work=own, not_offloaded=not_offloaded)
        return replace(made, planner="timed")

    for order in orders[: 1 if len(graph.vertices) > _ORDERS_UP_TO else None] or (None,):
        plans.add(timed, graph, order)
    for order in (*orders[:1], None):
        if plans.best is None:
            plans.add(frugal, graph, order)
    if plans.best is not None:
        return plans.best, _orders_of(graph, plans.best, plans.order)
    check_overwrites(graph)
    if not work.finds_needed:
        raise Infeasible(0)
    # Measured durations differ from run to run, and with them what a search finds. Without them it does not: the memory
    # that a refusal names is enough for whoever asks again.
    untimed = _without_durations(graph), _with_time_to_copy(graph, machine)
    for each in untimed:
        for plan in (build_timed, plan_frugally):
            with suppress(Infeasible):
                made = plan(each, machine, cyclic=cyclic, work=SearchWork(), not_offloaded=not_offloaded)
                return replace(made, planner="timed", vertices=_with_durations(made.vertices, graph)), ()
    if not work.names_needed:
        raise Infeasible(0)
    needed = []
    for each in untimed:
        with suppress(Infeasible):
            needed.append(smallest_timed_memory(each, machine, cyclic=cyclic, work=work))
    if not needed:
        raise _beyond_host_devices(graph)

    def fits(other: TaskGraph) -> bool:
        for each in (_without_durations(other), _with_time_to_copy(other, machine)):
            with suppress(Infeasible):
                plan_frugally(each, machine, cyclic=cyclic, work=SearchWork())
                return True
        return False

    raise too_small(graph, min(needed), fits)


def _beyond_host_devices(graph: TaskGraph) -> Exception:
    """The error for a graph that has no plan even where all but host devices have memory for everything."""
    for device in graph.devices:
        if device.is_host_device:
            made = [v for v in graph.vertices if v.space == device.id and not is_foreign(v)]
            enough = sum(-(-size // device.alignment) * device.alignment for v in made for size in v.sizes)
            if device.memory < enough:
                return PlanError(
                    f"device {device.id}: memory: {device.memory} bytes are too few for kernels on the host, however "
                    f"many other devices have; {enough} bytes have room for all that they make"
                )
    return Infeasible(0)


def _with_time_to_copy(graph: TaskGraph, machine: Machine) -> TaskGraph:
    """Return ``graph`` with kernels that take so long that their outputs can be offloaded beside the next ones: in the
    least memory, results that are kept to the end lie on the host."""
    links = machine.link(TO_HOST), machine.link(TO_DEVICE)
    there_and_back, latency = sum(1 / link.bandwidth for link in links), sum(link.latency for link in links)
    return replace(
        graph,
        vertices=tuple(
            replace(v, duration=_PATIENCE * (latency + sum(v.sizes) * there_and_back))
            if v.kind is VertexKind.KERNEL
            else v
            for v in graph.vertices
        ),
    )


def _without_durations(graph: TaskGraph) -> TaskGraph:
    """Return ``graph`` with kernels that take as long as their outputs are large."""
    return replace(graph, vertices=tuple(replace(vertex, duration=None) for vertex in graph.vertices))


def _with_durations(vertices: Sequence[Vertex], graph: TaskGraph) -> tuple[Vertex, ...]:
    """Return the ``vertices`` of a plan of ``graph``, each that is not a copy with its duration."""
    own = {vertex.id: vertex.duration for vertex in graph.vertices}
    return tuple(replace(v, duration=own[v.id]) if v.id in own else v for v in vertices)


def _compute(graph: TaskGraph, machine: Machine) -> float:
    """Return the seconds that the busiest device's kernels take."""
    busy: dict[int, float] = {}
    for vertex in graph.vertices:
        if vertex.kind is VertexKind.KERNEL:
            busy[vertex.space] = busy.get(vertex.space, 0.0) + (vertex.duration or 0.0)
    return max(busy.values(), default=0.0) / machine.compute_streams


PLANNERS: dict[str, Planner] = {
    "build": plan_build,
    "timed": plan_timed,
}


def _lookaheads(lookahead: int | None, repairs: Repairs) -> Iterator[int | None]:
    yield lookahead
    if repairs.shorten_lookahead:
        yield from (ahead for ahead in _SHORTER if lookahead is None or ahead < lookahead)


def _attempts(graph: TaskGraph, lookahead: int | None, repairs: Repairs | None = None) -> Iterator[Attempt]:
    """Yield the attempts in turn: first as much look-ahead and as many residents as can be, last none of both."""
    repairs = repairs or Repairs()
    choices = plain_choices(graph) if len(graph.vertices) <= _SEARCH_UP_TO else first_choices(graph)
    if repairs.shorten_lookahead and any(handed_out_at_gate(vertex) for vertex in graph.vertices):
        modest = [Attempt(0, Residents(), outs_apart=True), Attempt(0, Residents())]
    else:
        modest = []
    if len(graph.devices) > 1:
        yield Attempt(lookahead, choices[0], slack=_SLACK)
    for ahead in _lookaheads(lookahead, repairs):
        for residents in choices:
            attempt = Attempt(ahead, residents)
            if attempt not in modest:
                yield attempt
    yield from modest
