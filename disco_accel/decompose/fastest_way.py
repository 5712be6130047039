"""Which of several ways to give layers to devices takes the shortest step, in simulated time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from disco_accel.decompose.spread import SpreadGraph
from disco_accel.errors import BudgetTooSmall, ConfigError
from disco_accel.plan import make_plan
from disco_accel.plan.common.justified_runs import shortest_run
from disco_accel.plan.common.serial_orders import unlimited_run
from disco_accel.plan.infeasible import Infeasible
from disco_accel.plan.search_work import SearchWork
from disco_accel.simulate.machine import Machine
from disco_accel.simulate.simulator import simulate

_AT_ONCE = 1.1
"""Seconds of all devices' kernels over those of the step, below which devices work one after the other."""
_SHORTER = 0.99
"""Of a step in a row, the share that one must get by with whose layers are dealt out in turn: more of its values go
from device to device."""

Ways = Sequence[Callable[[], SpreadGraph]]
"""Layers in a row first, then in shorter and shorter runs that are dealt out in turn."""


def fastest_with_room(ways: Ways, machine: Machine) -> SpreadGraph:
    """Return the step with the shortest runs if it is faster with memory for everything than that in a row, or the next
    that is. In a row stays what has one device at work at a time: nothing is faster then."""
    row = ways[0]()
    run = unlimited_run(row.graph, machine)
    at_work = sum(seconds for lane, seconds in run.busy.items() if lane.startswith("compute"))
    if at_work < _AT_ONCE * run.makespan or len(ways) == 1:
        return row
    in_a_row = shortest_run(row.graph, machine).makespan
    for way in reversed(ways[1:]):
        dealt = way()
        if shortest_run(dealt.graph, machine).makespan < _SHORTER * in_a_row:
            return dealt
    return row


def fastest_plan(ways: Ways, machine: Machine) -> SpreadGraph:
    """Return the step with the fastest plan of BUILDMEMGRAPH, which takes a tenth of the time that the timed planner
    does; the one with the shortest runs, whose links have the most to do at once, where that has no plans."""
    spreads = [way() for way in ways]
    best, fastest = spreads[-1], float("inf")
    for each in spreads:
        with suppress(BudgetTooSmall, ConfigError, Infeasible):
            plan = make_plan(
                each.graph, planner="build", cyclic=True, machine=machine, work=SearchWork(names_needed=False)
            )
            seconds = simulate(plan, machine).makespan
            if seconds < fastest:
                best, fastest = each, seconds
    return best
