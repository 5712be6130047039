"""The long hunt for a race: random graphs, budgets, policies and planners, each plan run by an adversary.

    python -m tests.verify.safety [--graphs 100000] [--orders 10] [--faults 100] [--first 0] [--ranges] [--minutes M]

Every plan passes the static judge and ``orders`` adversarial executions on tokens (poisoned memory, reads at start and
finish, random overlap). A refusal is checked to name a number that is no smaller than what it was given. Each graph is
planned in twice its working set too (``strategies.with_room``), where no refusal is right, and in twice what
its largest vertex touches, where some are: they are counted, and those where that vertex does not fit beside what may
not leave. Every so many graphs, or with ``--ranges`` each one, have a plan with weights in ranges instead. Then faults
of every kind are planted into good plans: each that one of the judges does not notice must leave the plan's meaning
unchanged. Exit status 1 if anything was found.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from disco_accel.errors import BudgetTooSmall, PlanError, Stalled, VerifyError
from disco_accel.graph.copies import ranged_values
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.taskgraph import TaskGraph
from disco_accel.graph.values import changes_over_steps, host_copy_exists, lasting_versions
from disco_accel.plan import POLICIES, make_plan
from disco_accel.plan.buildmemgraph.builder import build
from disco_accel.plan.buildmemgraph.residents import Residents
from disco_accel.plan.infeasible import Infeasible
from disco_accel.verify.static import verify
from tests.support.faults.faults import FAULTS, Fault
from tests.support.faults.range_faults import RANGE_FAULTS, ranged_plan, ranged_plans
from tests.support.faults.state_faults import STATE_FAULTS
from tests.support.graphs.strategies import Shape, held, random_taskgraph, with_room, with_working_sets, working_set
from tests.support.oracles.adversary import run_reference
from tests.support.plans.host_updated_plans import (
    HOST_UPDATED_FAULTS,
    HOST_UPDATED_SHAPES,
    has_host_updated,
    host_updated_plans,
)
from tests.support.plans.plans import tight_plans
from tests.support.plans.state_plans import TIMED_SHAPES, state_plans

Plans = Callable[[int, int], list[tuple[TaskGraph, MemGraph]]]
"""So many plans of random graphs, from a first seed on."""

FACTORS = (1.0, 1.1, 1.3, 1.6, 2.0, 3.0, 8.0)
SHAPES = (Shape(), Shape(vertices=48, devices=3), Shape(gate=False, keep=0.3), Shape(vertices=12, inplace=0.4))
_TIMED_EVERY = 4
_STATES_EVERY = 5
"""Every so many graphs have values that a step, or the host between two steps, changes for the next one: these the
timed planner alone plans."""
_RANGES_EVERY = 20
"""Every so many graphs are planned with weights in ranges, which takes longer than other plans."""
_FAULT_ORDERS = 20


@dataclass
class Result:
    """Counts of what was tried and what was found. ``wrong`` holds a line per fault found in a plan."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    planted: Counter[str] = field(default_factory=Counter)
    static: Counter[str] = field(default_factory=Counter)
    dynamic: Counter[str] = field(default_factory=Counter)
    either: Counter[str] = field(default_factory=Counter)


def random_case(seed: int, result: Result) -> tuple[TaskGraph, MemGraph | None]:
    """Return the graph of ``seed`` and a plan of it; None if there is none."""
    rng = random.Random(seed)
    states = seed % _STATES_EVERY == 0
    graph = random_taskgraph(rng, rng.choice((*TIMED_SHAPES, *HOST_UPDATED_SHAPES) if states else SHAPES))
    graph = with_working_sets(graph, rng.choice(FACTORS))
    changed = any(len(versions) > 1 for versions in lasting_versions(graph.vertices).values())
    if states and (changed or has_host_updated(graph)):
        return graph, _with_states(seed, graph, rng, result)
    policy, cyclic = rng.choice(sorted(POLICIES)), rng.random() < 0.5
    if rng.random() < 0.5:
        clean = [vertex.id for vertex in graph.vertices if host_copy_exists(vertex) and rng.random() < 0.4]
        permanent = tuple(vertex for vertex in clean if rng.random() < 0.4)
        residents = Residents(permanent, tuple(vertex for vertex in clean if vertex not in permanent))
        ahead = rng.choice((0, 2, None, None))
        try:
            return graph, build(graph, POLICIES[policy], lookahead=ahead, residents=residents, cyclic=cyclic)
        except Infeasible:
            result.counts["no plan with these residents"] += 1
            return graph, None
    planner = "timed" if seed % _TIMED_EVERY == 0 else "build"
    try:
        return graph, make_plan(graph, policy=policy, cyclic=cyclic, planner=planner)
    except BudgetTooSmall as error:
        result.counts["refused"] += 1
        if error.needed <= min(device.memory for device in graph.devices):
            result.wrong.append(f"seed {seed}: {planner} says {error.needed}, which it was given")
        return graph, None


def _with_states(seed: int, graph: TaskGraph, rng: random.Random, result: Result) -> MemGraph | None:
    result.counts["graphs with states"] += any(changes_over_steps(vertex) for vertex in graph.vertices)
    result.counts["graphs with host-updated inputs"] += has_host_updated(graph)
    try:
        return make_plan(graph, cyclic=rng.random() < 0.6, planner="timed")
    except BudgetTooSmall as error:
        result.counts["refused"] += 1
        if error.needed <= min(device.memory for device in graph.devices):
            result.wrong.append(f"seed {seed}: timed says {error.needed}, which it was given")
    except PlanError:
        result.counts["a version is wanted too late"] += 1
    return None


def feasible(seed: int, graph: TaskGraph, result: Result) -> None:
    """Note where ``graph`` is refused twice its working set, which is wrong, or twice its largest vertex."""
    rng = random.Random(f"room {seed}")
    policy, cyclic = rng.choice(sorted(POLICIES)), rng.random() < 0.5
    planner = "timed" if seed % _TIMED_EVERY == 0 else "build"
    try:
        make_plan(with_room(graph, 2.0), policy=policy, cyclic=cyclic, planner=planner)
    except BudgetTooSmall as error:
        result.wrong.append(f"seed {seed}: {planner} refuses twice the working set: {error}")
    plain = with_working_sets(graph, 2.0)
    try:
        make_plan(plain, policy=policy, cyclic=cyclic)
    except BudgetTooSmall:
        result.counts["refused at twice the largest vertex"] += 1
        if any(held(graph, d.id)[0] + working_set(graph, d.id) > d.memory for d in plain.devices):
            result.counts["of these it does not fit beside what may not leave"] += 1


def hunt(seed: int, orders: int, result: Result, *, ranges: bool = False) -> None:
    """Plan the graph of ``seed`` and have the plan judged; with weights in ``ranges``, or every so many seeds so."""
    result.counts["graphs"] += 1
    ranges = ranges or seed % _RANGES_EVERY == 1
    graph, plan = ranged_plan(seed) if ranges else random_case(seed, result)
    if plan is not None:
        result.counts["plans with ranges"] += bool(ranged_values(plan))
    if not ranges and not has_host_updated(graph) and not any(changes_over_steps(vertex) for vertex in graph.vertices):
        feasible(seed, graph, result)
    if plan is None:
        return
    result.counts["plans"] += 1
    try:
        verify(graph, plan)
        for order in range(orders):
            run_reference(graph, plan, order)
            result.counts["executions"] += 1
    except (VerifyError, Stalled) as error:
        result.wrong.append(f"seed {seed}: {type(error).__name__}: {error}")


KINDS: Sequence[tuple[Mapping[str, Fault], Plans]] = (
    (FAULTS, tight_plans),
    (STATE_FAULTS, state_plans),
    (HOST_UPDATED_FAULTS, host_updated_plans),
    (RANGE_FAULTS, ranged_plans),
)
"""Faults, and the plans that they are planted into."""


def plant(
    count: int, result: Result, first_seed: int = 0, kinds: Sequence[tuple[Mapping[str, Fault], Plans]] = KINDS
) -> None:
    """Plant each fault of ``kinds`` ``count`` times, or as often as it applies, and note which judge notices."""
    for faults, plans in kinds:
        _plant(faults, plans, count, result, first_seed)


def _plant(faults: Mapping[str, Fault], plans: Plans, count: int, result: Result, first_seed: int) -> None:
    rng = random.Random(first_seed)
    for turn in range(30):
        missing = [name for name in sorted(faults) if result.planted[name] < count]
        if not missing:
            return
        for graph, plan in plans(count, first_seed + 100_000 * (turn + 1)):
            for name in missing:
                if result.planted[name] < count:
                    bad = faults[name](plan, rng)
                    if bad is not None and bad != plan:
                        _judge(name, graph, bad, result)


def _judge(name: str, graph: TaskGraph, bad: MemGraph, result: Result) -> None:
    static = dynamic = False
    try:
        verify(graph, bad)
    except VerifyError:
        static = True
    try:
        for order in range(_FAULT_ORDERS):
            run_reference(graph, bad, order)
    except (VerifyError, Stalled, KeyError, IndexError):
        # The adversary assumes what the static judge checks first, such as that every vertex is there.
        dynamic = True
    result.planted[name] += 1
    result.static[name] += static
    result.dynamic[name] += dynamic
    result.either[name] += static or dynamic


def main(argv: Sequence[str] | None = None) -> int:
    """Print what was tried and found; returns 1 if a plan was wrong or a planted fault went unnoticed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=int, default=100_000)
    parser.add_argument("--orders", type=int, default=10)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--ranges", action="store_true", help="plan each graph with weights in ranges")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop the hunt after so long")
    options = parser.parse_args(argv)
    result = Result()
    end = time.monotonic() + 60 * options.minutes
    for done in range(options.graphs):
        if time.monotonic() > end:
            break
        hunt(options.first + done, options.orders, result, ranges=options.ranges)
        if (done + 1) % 2000 == 0:
            print(f"{dict(result.counts)}, wrong: {len(result.wrong)}", flush=True)
    plant(options.faults, result, options.first)
    print(f"{dict(result.counts)}, wrong: {len(result.wrong)}")
    for line in result.wrong[:50]:
        print(line)
    missed = 0
    print(f"{'planted fault':<26} {'times':>6} {'static':>7} {'dynamic':>8} {'missed':>7}")
    for name, planted in sorted(result.planted.items()):
        missed += planted - result.either[name]
        left = planted - result.either[name]
        print(f"{name:<26} {planted:>6} {result.static[name]:>7} {result.dynamic[name]:>8} {left:>7}")
    return 1 if result.wrong or missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
