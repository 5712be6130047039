"""The one way from a captured step to its verified plan: costs, budget, plan, verification.

``prepare``, ``disco-accel plan`` and ``capture``, and the benchmarks that capture steps go it: ``with_costs``, then
``plan_step``. They differ in where costs come from (``measure/costs.py``) and in what they do with the plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from disco_accel.errors import BudgetTooSmall
from disco_accel.graph.dequantise_again import DEQUANTISE_AGAIN
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.passes import AppliedPass, GraphPass, arena_of, run_passes
from disco_accel.graph.taskgraph import TaskGraph
from disco_accel.graph.value_numbering import Clone, graph_of_plan, left_out
from disco_accel.measure.costs import Costs, GraphCosts
from disco_accel.plan import Machine, make_plan
from disco_accel.plan.infeasible import Infeasible
from disco_accel.plan.keep_or_recompute import decide
from disco_accel.plan.plan_cache import PlanCache, PlanCacheUse, plan_fingerprint
from disco_accel.plan.planning_process import PlanningProcess
from disco_accel.plan.search_work import SearchWork
from disco_accel.plan.summary import cut_short
from disco_accel.sizes import format_size
from disco_accel.step.compile.budget_parts import Budget, BudgetBytes, BudgetFacts
from disco_accel.step.compile.memory_parts import what_it_needs
from disco_accel.verify.static import verify

STEP_PASSES: tuple[GraphPass, ...] = (DEQUANTISE_AGAIN,)
"""Run on every captured graph, in this order, before its kernels get their costs. Those of the capture come before
them, those of costs, arena and planner behind."""


@dataclass(frozen=True, slots=True)
class PlannerSettings:
    """``planner``, ``policy`` and ``machine`` as in ``make_plan``. ``plan_seconds``: time for the search, or None for
    as much work as the graph is worth."""

    planner: str = "timed"
    policy: str = "auto"
    machine: Machine | None = None
    plan_seconds: float | None = None


@dataclass(frozen=True)
class PlanStore:
    """Plans of earlier runs. ``environment``: facts that must be equal for a plan to be used again."""

    cache: PlanCache
    environment: Mapping[str, str]


@dataclass(frozen=True)
class CostedStep:
    """A captured ``graph`` with ``costs`` in it, ready to be planned. ``applied``: the passes so far; ``seconds`` that
    costs took. ``copies``: inputs that have the bytes of another one on another device.
    """

    graph: TaskGraph
    costs: GraphCosts
    applied: tuple[AppliedPass, ...]
    seconds: float
    copies: frozenset[int] = frozenset()


@dataclass(frozen=True)
class PlannedStep:
    """``plan`` is verified for ``graph``, whose device has the budget's arena: the step's, without the kernels
    ``left_out`` whose values are kept instead, and those that only they needed.

    ``applied``: all passes from the capture to the plan. For a plan that was stored, without those of the planner.
    ``seconds`` of each stage: record, plan, verify. ``cut``: the user's deadline ended the search; ``notes``: lines for
    the user about that.
    """

    graph: TaskGraph
    plan: MemGraph
    budget: Budget
    costs: GraphCosts
    cache_use: PlanCacheUse
    applied: tuple[AppliedPass, ...]
    seconds: dict[str, float]
    cut: bool
    notes: tuple[str, ...]
    left_out: tuple[Clone, ...] = ()


def with_costs(
    graph: TaskGraph,
    costs: Costs,
    applied: Sequence[AppliedPass] = (),
    passes: Sequence[GraphPass] | None = None,
) -> CostedStep:
    """Run ``passes`` on a captured ``graph``, ask for the costs of what comes out, and put them into it.

    ``applied``: the passes of the capture; ``passes``: None for ``STEP_PASSES``. Raises CaptureError and
    ExecutionError, as ``costs`` does.
    """
    began = time.perf_counter()
    done = list(applied)
    graph = run_passes(graph, STEP_PASSES if passes is None else passes, done)
    known = costs.of(graph)
    graph = run_passes(graph, known.passes, done)
    return CostedStep(graph, known, tuple(done), time.perf_counter() - began)


def plan_step(
    step: CostedStep,
    facts: BudgetFacts | BudgetBytes,
    settings: PlannerSettings,
    *,
    store: PlanStore | None = None,
    say: Callable[[str], None] = lambda _: None,
    names_needed: bool = True,
    elsewhere: PlanningProcess | None = None,
) -> PlannedStep:
    """Plan ``step``, to be run step after step, in what ``facts`` leave of their budget. ``say`` hears of a search,
    which is made ``elsewhere`` if that is given: there no kernels are left out.

    Raises:
        BudgetTooSmall: with ``needed`` and ``given`` as whole budgets, not arenas.
        Infeasible: the same, where nobody asks what would do: without ``names_needed``.
        VerifyError: the planner's fault.
    """
    began = time.perf_counter()
    applied = list(step.applied)
    budget = facts.split(step.costs.workspaces, in_blocks=step.costs.in_blocks)
    # A budget that adapters and optimizer state already exceed still gets an answer: what the whole step needs.
    graph = run_passes(step.graph, [arena_of(max(budget.arena, step.graph.devices[0].alignment))], applied)
    key = "" if store is None else _fingerprint(graph, settings, store)
    plan = None if store is None else store.cache.load(key, graph, cyclic=True)
    use = PlanCacheUse.OFF if store is None else PlanCacheUse.MISS if plan is None else PlanCacheUse.HIT
    work = SearchWork(settings.plan_seconds, names_needed=names_needed)
    if plan is None:
        say(f"planning {len(graph.ops)} kernels in {format_size(graph.devices[0].memory)}")
        try:
            if elsewhere is not None:
                plan = _made_elsewhere(graph, work, settings, elsewhere)
            else:
                made = partial(_made, settings=settings)
                machine = settings.machine or Machine()
                plan = decide(graph, made, machine, work, applied, planner=settings.planner)
        except BudgetTooSmall as error:
            needed, parts = budget.total_for(error.needed), what_it_needs(budget, error.needed, graph, step.copies)
            where = f" on device {', '.join(map(str, error.devices))}" if error.devices else ""
            what = f"memory_budget: the step{where}"
            raise BudgetTooSmall(needed, budget.total, what, parts, error.devices) from error
    graph, clones = _planned_graph(graph, plan)
    notes = (cut_short(graph, plan, work, settings.machine),) if work.cut else ()
    planned = time.perf_counter()
    if use is not PlanCacheUse.HIT:
        # What the cache has loaded it has verified.
        verify(graph, plan)
        if store is not None:
            store.cache.store(key, plan)
    seconds = {"record": step.seconds, "plan": planned - began, "verify": time.perf_counter() - planned}
    costs = replace(step.costs, records={k: v for k, v in step.costs.records.items() if k in graph.ops})
    return PlannedStep(graph, plan, budget, costs, use, tuple(applied), seconds, work.cut, notes, clones)


def _planned_graph(graph: TaskGraph, plan: MemGraph) -> tuple[TaskGraph, tuple[Clone, ...]]:
    """Return the graph that ``plan`` is one of, and the clones of ``graph`` that it has not."""
    planned = graph_of_plan(graph, plan.vertices)
    assert planned is not None, "the planner leaves out clones alone"
    return planned, left_out(graph, planned)


def replan(
    graph: TaskGraph,
    memory: int,
    settings: PlannerSettings,
    store: PlanStore | None = None,
    work: SearchWork | None = None,
    elsewhere: PlanningProcess | None = None,
) -> MemGraph:
    """Another verified plan of a graph that has its costs, in an arena of ``memory`` bytes; ``elsewhere`` as in
    ``plan_step``. Raises as ``make_plan``."""
    sized = arena_of(memory).run(graph)
    key = "" if store is None else _fingerprint(sized, settings, store)
    plan = None if store is None else store.cache.load(key, sized, cyclic=True)
    if plan is not None:
        return plan
    work = work or SearchWork(settings.plan_seconds)
    if elsewhere is not None:
        plan = _made_elsewhere(sized, work, settings, elsewhere)
    else:
        plan = _made(sized, work, None, settings=settings)
    verify(sized, plan)
    if store is not None:
        store.cache.store(key, plan)
    return plan


def replan_if_it_fits(
    graph: TaskGraph, memory: int, settings: PlannerSettings, store: PlanStore | None = None
) -> MemGraph | None:
    """As ``replan``; None where that finds no plan, without the search for the memory that would do."""
    try:
        return replan(graph, memory, settings, store, SearchWork(settings.plan_seconds, names_needed=False))
    except (BudgetTooSmall, Infeasible):
        return None


def _made(
    graph: TaskGraph,
    work: SearchWork,
    applied: list[AppliedPass] | None,
    not_offloaded: Collection[int] = (),
    *,
    settings: PlannerSettings,
) -> MemGraph:
    return make_plan(
        graph,
        policy=settings.policy,
        planner=settings.planner,
        cyclic=True,
        machine=settings.machine,
        work=work,
        applied=applied,
        not_offloaded=not_offloaded,
    )


def _made_elsewhere(
    graph: TaskGraph, work: SearchWork, settings: PlannerSettings, process: PlanningProcess
) -> MemGraph:
    return process.plan(graph, planner=settings.planner, policy=settings.policy, machine=settings.machine, work=work)


def _fingerprint(graph: TaskGraph, settings: PlannerSettings, store: PlanStore) -> str:
    return plan_fingerprint(
        graph,
        planner=settings.planner,
        policy=settings.policy,
        plan_seconds=settings.plan_seconds,
        cyclic=True,
        machine=settings.machine,
        environment=store.environment,
    )
