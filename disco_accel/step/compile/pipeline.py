"""From a captured step to its verified plan: ``with_costs`` gives seconds to its kernels, ``plan_step`` plans it.

``prepare`` and ``disco-accel plan`` run both as stages (``step/compile/stages.py``), benchmarks call them, and
``capture`` the first alone. They differ in where costs come from (``measure/costs.py``) and in the use of the plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from disco_accel.capture.captured_step import CapturedStep
from disco_accel.errors import BudgetTooSmall
from disco_accel.graph.dequantise_again import DEQUANTISE_AGAIN
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.passes import AppliedPass, GraphPass, arena_of
from disco_accel.graph.taskgraph import TaskGraph, VertexKind
from disco_accel.graph.value_numbering import graph_of_plan
from disco_accel.measure.costs import Costs, GraphCosts
from disco_accel.measure.estimated_fusing import _EstimatedFusing
from disco_accel.measure.fused_kernels import Fusing
from disco_accel.measure.record import OpRecord
from disco_accel.plan import Machine
from disco_accel.plan.bound.larger_memory import larger_memory, useful_text
from disco_accel.plan.infeasible import Infeasible
from disco_accel.plan.keep_or_recompute import Recomputation, decide, plan_soon
from disco_accel.plan.plan_cache import PlanCache, PlanCacheUse, plan_fingerprint
from disco_accel.plan.planning_process import PlanningProcess
from disco_accel.plan.search_work import SearchWork
from disco_accel.plan.summary import cut_short
from disco_accel.simulate.simulator import simulate
from disco_accel.sizes import MAX_SIZE, format_size
from disco_accel.step.compile.boundary import Boundary, shared_boundary
from disco_accel.step.compile.budget_parts import Budget, host_memory_parts, what_it_needs
from disco_accel.step.compile.useful_budgets import useful_budgets
from disco_accel.verify.static import verify

STEP_PASSES: tuple[GraphPass, ...] = (DEQUANTISE_AGAIN,)
"""Run on every captured graph, in this order, before its kernels get their costs. Those of the capture come before
them, those of costs, arena and planner behind."""


@dataclass(frozen=True)
class PlannerSettings:
    """``planner``, ``policy`` and ``machine`` as in ``make_plan``. ``plan_seconds``: time for the search, or None for
    as much work as the graph is worth. ``cache``: plans of earlier runs, used again in an equal ``environment``.
    ``recompute``: as in ``decide``. ``host_memory``: bytes that training may take on the host, None for any;
    ``rounded``: bytes of the model's weights that have fp32 masters there. ``fusing``: kernels of runs, which plans may
    use; None: plans have none. ``boundary``: weights that another plan of the model has in the arena when a step
    begins."""

    planner: str = "timed"
    policy: str = "auto"
    machine: Machine | None = None
    plan_seconds: float | None = None
    cache: PlanCache | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    recompute: str = "auto"
    host_memory: int | None = None
    rounded: int = 0
    fusing: Fusing | None = None
    boundary: Boundary = field(default_factory=dict)


@dataclass(frozen=True)
class PlannedStep:
    """``plan`` is verified for ``graph``, whose device has the budget's arena: the step's, without kernels whose values
    are kept, as ``recomputation`` says (None: the step repeats nothing). ``whole``: with them.

    ``applied``: all passes from the capture to the plan. For a plan that was stored, without those of the planner.
    ``seconds`` of each stage: plan, verify. ``cut``: the user's deadline ended the search; ``notes``: lines for the
    user about that. ``fused``: records of the fused kernels of ``graph``. ``hasty``: a longer search may find a faster
    plan with such kernels.
    """

    graph: TaskGraph
    plan: MemGraph
    budget: Budget
    cache_use: PlanCacheUse
    applied: tuple[AppliedPass, ...]
    seconds: dict[str, float]
    cut: bool
    notes: tuple[str, ...]
    whole: TaskGraph
    recomputation: Recomputation | None = None
    fused: Mapping[int, OpRecord] = field(default_factory=dict)
    hasty: bool = False


def with_costs(
    step: CapturedStep, source: Costs, passes: Sequence[GraphPass] | None = None
) -> tuple[CapturedStep, GraphCosts]:
    """Run ``passes`` on a captured ``step``, ask ``source`` for the costs of the result, and put them into its graph.

    ``passes``: None for ``STEP_PASSES``. Raises CaptureError and ExecutionError, as ``source`` does.
    """
    step = step.through(STEP_PASSES if passes is None else passes)
    costs = source.of(step.graph)
    return step.through(costs.passes), costs


def plan_step(
    step: CapturedStep,
    budget: Budget,
    settings: PlannerSettings,
    *,
    say: Callable[[str], None] = lambda _: None,
    names_needed: bool = True,
    elsewhere: PlanningProcess | None = None,
) -> PlannedStep:
    """Plan ``step``, which has its costs and is run again and again, in the arena of ``budget``. ``say`` hears of a
    search, which is made ``elsewhere`` if that is given.

    Raises:
        BudgetTooSmall: with ``needed`` and ``given`` as whole budgets, not arenas.
        Infeasible: the same, where nobody asks for the budget that is needed: without ``names_needed``.
        VerifyError: the planner's fault.
    """
    began = time.perf_counter()
    # A budget that adapters and optimizer state already exceed still gets an answer: the needs of the whole step.
    step = step.through((arena_of(max(budget.arena, step.graph.devices[0].alignment)),))
    graph, passes = step.graph, tuple[GraphPass, ...]()
    key = _key(step, settings)
    room = _room_on_host(step, settings)
    plan = _stored(key, graph, settings, room)
    use = PlanCacheUse.OFF if settings.cache is None else PlanCacheUse.MISS if plan is None else PlanCacheUse.HIT
    work = SearchWork(settings.plan_seconds, names_needed=names_needed)
    if plan is None:
        say(f"planning {len(graph.ops)} kernels in {format_size(graph.devices[0].memory)}")
        asked: dict[str, Any] = {
            "planner": settings.planner,
            "policy": settings.policy,
            "recompute": settings.recompute,
            "offered": step.offered,
            "host_memory": room,
        }
        try:
            if elsewhere is not None:
                plan = elsewhere.plan(graph, machine=settings.machine, work=work, **asked)
            else:
                plan, passes = decide(graph, settings.machine or Machine(), work, **asked)
        except BudgetTooSmall as error:
            raise _told(error, step, budget, settings, names_more=elsewhere is None) from error
    planned = graph_of_plan(graph, plan.vertices)
    assert planned is not None, "the planner leaves out clones alone"
    notes = (cut_short(planned, plan, work, settings.machine),) if work.cut else ()
    found = time.perf_counter()
    if use is not PlanCacheUse.HIT:
        # What the cache has loaded it has verified.
        verify(planned, plan)
        if settings.cache is not None:
            settings.cache.store(key, plan)
    seconds = {"plan": found - began, "verify": time.perf_counter() - found}
    applied = step.through(passes).passes
    recomputation = Recomputation.of(graph, planned, plan, step.offered)
    made = PlannedStep(planned, plan, budget, use, applied, seconds, work.cut, notes, graph, recomputation)
    return with_fused_kernels(step, at_boundary(step, made, settings, elsewhere), settings, elsewhere)


def _told(
    error: BudgetTooSmall, step: CapturedStep, budget: Budget, settings: PlannerSettings, *, names_more: bool
) -> BudgetTooSmall:
    """``error`` with whole budgets in the place of arenas. ``names_more``: with larger ones, which take a moment to
    find."""
    graph, needed = step.graph, budget.total_for(error.needed)
    useful: dict[str, int] = {}
    if names_more:
        larger = larger_memory(graph, settings.machine or Machine(), recompute=settings.recompute)
        useful = useful_budgets(larger, budget, error.needed)
    where = f" on device {', '.join(map(str, error.devices))}" if error.devices else ""
    what, parts = f"memory_budget: the step{where}", what_it_needs(budget, error.needed, graph, step.copies)
    more = useful_text(useful, needed)
    return BudgetTooSmall(needed, budget.total, what, parts, error.devices, useful, more)


def at_boundary(
    step: CapturedStep, planned: PlannedStep, settings: PlannerSettings, elsewhere: PlanningProcess | None = None
) -> PlannedStep:
    """``planned``, which was made of ``step``, or a plan of its graph from the boundary of ``settings``, where that is
    about as fast. Raises VerifyError: the planner's fault."""
    shared = shared_boundary(settings.boundary, step, planned.graph)
    # Beside steps, which a planning process is for, the search would take the interpreter from them.
    if shared is None or elsewhere is not None or settings.planner != "timed":
        return planned
    began, graph = time.perf_counter(), planned.graph
    own = replace(settings, recompute="as-written", environment={**settings.environment, "boundary": shared.text})
    key, room = _key(replace(step, graph=graph, offered=frozenset()), own), _room_on_host(step, settings)
    plan = _stored(key, graph, own, room)
    if plan is None:
        limit = settings.plan_seconds
        left = None if limit is None else max(0.0, limit - planned.seconds["plan"])
        plan = shared.plan(graph, planned.plan, settings.machine or Machine(), left)
        if plan.host.memory > room:
            return planned
        if plan is not planned.plan:
            verify(graph, plan)
        if settings.cache is not None:
            settings.cache.store(key, plan)
    seconds = {**planned.seconds, "plan": planned.seconds["plan"] + time.perf_counter() - began}
    recomputation = Recomputation.of(planned.whole, graph, plan, step.offered)
    return replace(planned, plan=plan, seconds=seconds, recomputation=recomputation)


def with_fused_kernels(
    step: CapturedStep,
    planned: PlannedStep,
    settings: PlannerSettings,
    elsewhere: PlanningProcess | None = None,
    *,
    soon: bool = False,
    estimated: _EstimatedFusing | None = None,
) -> PlannedStep:
    """``planned``, which was made of ``step``, or a plan of its graph with fused kernels where that is faster.
    ``soon``: a step waits for it, and a longer search follows where the plan is ``hasty``. ``estimated``: kernels in
    the place of those of ``settings``."""
    fusing = estimated or settings.fusing
    if fusing is None:
        return planned
    graph = fusing.fused(planned.graph)
    records = fusing.records(graph)
    if not records:
        return planned
    captured = replace(step, graph=graph, offered=frozenset())
    own = replace(settings, recompute="decided", fusing=None)
    if soon and _may_be_hasty(captured, own):
        made, hasty = _planned_soon(captured, planned, own)
    else:
        made, hasty = plan_if_it_fits(captured, planned.budget, own, elsewhere), False
    machine = settings.machine or Machine()
    if made is None or simulate(made.plan, machine).makespan >= simulate(planned.plan, machine).makespan:
        return replace(planned, hasty=hasty)
    seconds = {stage: spent + made.seconds.get(stage, 0.0) for stage, spent in planned.seconds.items()}
    made = replace(made, whole=planned.whole, recomputation=planned.recomputation, fused=records)
    return replace(made, seconds=seconds, hasty=hasty)


def _may_be_hasty(step: CapturedStep, settings: PlannerSettings) -> bool:
    """Whether ``plan_soon`` is for ``step``, and no thorough plan is stored."""
    kernels = (vertex for vertex in step.graph.vertices if vertex.kind is VertexKind.KERNEL)
    if settings.planner != "timed" or len({vertex.space for vertex in kernels}) != 1:
        return False
    return _stored(_key(step, settings), step.graph, settings, _room_on_host(step, settings)) is None


def _planned_soon(
    step: CapturedStep, planned: PlannedStep, settings: PlannerSettings
) -> tuple[PlannedStep | None, bool]:
    """A plan of ``step``, which is ``planned`` with fused kernels, that takes little time to find, or None; and whether
    ``decide`` may find a faster one."""
    began, limit = time.perf_counter(), settings.plan_seconds
    work = SearchWork(None if limit is None else max(0.0, limit - planned.seconds["plan"]))
    room = _room_on_host(step, settings)
    plan, keeps_up = plan_soon(step.graph, settings.machine or Machine(), work, room)
    if plan is None:
        return None, True
    done = time.perf_counter()
    verify(step.graph, plan)
    seconds = {"plan": done - began, "verify": time.perf_counter() - done}
    use = PlanCacheUse.OFF if settings.cache is None else PlanCacheUse.MISS
    made = replace(planned, graph=step.graph, plan=plan, cache_use=use, seconds=seconds, whole=step.graph)
    return at_boundary(step, made, settings), not keeps_up


def plan_if_it_fits(
    step: CapturedStep, budget: Budget, settings: PlannerSettings, elsewhere: PlanningProcess | None = None
) -> PlannedStep | None:
    """As ``plan_step``; None where that finds no plan, without the search for the smallest memory that has one."""
    try:
        return plan_step(step, budget, settings, names_needed=False, elsewhere=elsewhere)
    except (BudgetTooSmall, Infeasible):
        return None


def _stored(key: str, graph: TaskGraph, settings: PlannerSettings, room: int) -> MemGraph | None:
    """The plan under ``key`` in the cache of ``settings``, unless it offloads more than ``room`` bytes."""
    plan = None if settings.cache is None else settings.cache.load(key, graph, cyclic=True)
    return None if plan is None or plan.host.memory > room else plan


def _room_on_host(step: CapturedStep, settings: PlannerSettings) -> int:
    """Bytes of host memory that ``step`` leaves to values that are offloaded."""
    if settings.host_memory is None:
        return MAX_SIZE
    parts = host_memory_parts(step.graph, rounded=settings.rounded, copies=step.copies)
    return max(0, settings.host_memory - sum(parts.values()))


def _key(step: CapturedStep, settings: PlannerSettings) -> str:
    """The key of ``step`` in the cache of ``settings``; "" without a cache."""
    if settings.cache is None:
        return ""
    choice = {"recompute": settings.recompute, "offered": ",".join(map(str, sorted(step.offered)))}
    return plan_fingerprint(
        step.graph,
        planner=settings.planner,
        policy=settings.policy,
        plan_seconds=settings.plan_seconds,
        cyclic=True,
        machine=settings.machine,
        environment={**settings.environment, **choice},
    )
