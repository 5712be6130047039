"""How long a step of a graph takes by a plan that is found in little time: for a choice between graphs."""

from __future__ import annotations

from dataclasses import replace

from disco_accel.errors import BudgetTooSmall, ConfigError
from disco_accel.graph.check import check_taskgraph
from disco_accel.graph.taskgraph import TaskGraph
from disco_accel.plan.common.serial_orders import start_order, unlimited_run
from disco_accel.plan.infeasible import Infeasible
from disco_accel.plan.search_work import SearchWork
from disco_accel.plan.select import fits, inputs_by_use, make_plan
from disco_accel.plan.timed.search import drafted
from disco_accel.plan.timed.search_settings import TimedSettings
from disco_accel.simulate.machine import Machine
from disco_accel.simulate.simulator import simulate

_SETTINGS = replace(
    TimedSettings(),
    resident_shares=(0.0, 0.5, 0.9),
    outliers_permanent=False,
    low_peak_order=False,
)
"""Fewer drafts, and as much work on their offsets: in little memory, where a choice matters, fewer rounds of those find
no plan."""


_RESERVE = 0.03
"""Share of the memory that drafts leave free for offsets."""


def quick_seconds(graph: TaskGraph, machine: Machine) -> float:
    """Seconds of a simulated step of ``graph``, run step after step, by a modest plan of the timed planner, or
    BUILDMEMGRAPH's where that finds none. Infinite where there is no plan, or none that ``make_plan`` would find."""
    if not fits(graph):
        return float("inf")
    ready = inputs_by_use(check_taskgraph(graph))
    ready = start_order(unlimited_run(ready, machine).starts).run(ready)
    work = SearchWork(names_needed=False)
    try:
        plan = drafted(ready, machine, cyclic=True, work=work, settings=_SETTINGS, reserve=_RESERVE).plan(work)
    except Infeasible:
        try:
            plan = make_plan(graph, planner="build", cyclic=True, machine=machine, work=SearchWork(names_needed=False))
        except (BudgetTooSmall, ConfigError, Infeasible):
            return float("inf")
    return simulate(plan, machine).makespan
