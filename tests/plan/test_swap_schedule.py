"""Swaps are scheduled, event by event and to the last bit of the seconds, as a naive scheduler in Python does."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from disco_accel.errors import PlanError
from disco_accel.graph.passes import run_passes
from disco_accel.graph.spaces import TO_DEVICE, TO_HOST
from disco_accel.plan.infeasible import Infeasible
from disco_accel.plan.select import INPUTS_BY_USE
from disco_accel.plan.timed.requirements import requirements_of
from disco_accel.plan.timed.step_buffers import StepRequirements
from disco_accel.plan.timed.swap_schedule import SwapSchedule, buffers_at_boundary, schedule_step
from disco_accel.simulate.simulator import Link, Machine
from tests.support.graphs.strategies import Shape, random_taskgraph, with_room
from tests.support.oracles.naive_swaps import resident_at_boundary, schedule_swaps
from tests.support.plans.home_plans import HOME_SHAPES

FACTORS = (1.0, 1.2, 1.5, 2.0, 3.0, 10.0)


def case(rng: random.Random) -> tuple[StepRequirements, Machine, dict[str, Any]]:
    """A step with durations, and what a draft may hold on to: some buffers for good, some between uses."""
    shape = rng.choice((Shape(vertices=rng.choice((24, 60, 120))), Shape(states=0.4, host_updated=0.3), *HOME_SHAPES))
    graph = random_taskgraph(rng, shape)
    graph = run_passes(with_room(graph, rng.choice(FACTORS)), (INPUTS_BY_USE,))
    durations = [replace(v, duration=rng.random() * 1e-4) if v.duration else v for v in graph.vertices]
    machine = Machine(
        links={TO_DEVICE: Link(rng.choice((1e7, 1e9)), 1e-6), TO_HOST: Link(rng.choice((1e7, 1e9)), 1e-6)}
    )
    ratio, range_bytes = rng.choice((None, 0.0, 2.0)), rng.choice((None, 1 << 12))
    graph = replace(graph, vertices=tuple(durations))
    requirements = requirements_of(graph, machine, ratio, range_bytes=range_bytes)
    resident = [i for i, buffer in enumerate(requirements.swappable) if buffer.may_be_resident]
    permanent = tuple(i for i in resident if rng.random() < 0.1)
    others = [i for i, buffer in enumerate(requirements.swappable) if i not in permanent and buffer.uses]
    kept = {i: frozenset({-1, rng.choice(requirements.swappable[i].uses)}) for i in others if rng.random() < 0.2}
    return requirements, machine, {"permanent": permanent, "kept": kept}


def outcome(
    requirements: StepRequirements, machine: Machine, given: dict[str, Any], at_boundary: Any, schedule: Any
) -> Any:
    """The buffers at the boundary and the schedule, or the position where memory is short."""
    capacity = {device.id: device.memory for device in requirements.graph.devices}
    for i in given["permanent"]:
        capacity[requirements.swappable[i].device] -= requirements.swappable[i].block
    try:
        there = at_boundary(requirements, machine, capacity, **given)
        return there, schedule(requirements, machine, capacity, at_start=there, at_end=there, **given)
    except Infeasible as infeasible:
        return infeasible.args


def test_schedules_are_those_of_the_naive_scheduler() -> None:
    scheduled = reloaded = at_home = changed = 0
    for seed in range(500):
        try:
            drawn = case(random.Random(seed))
        except (Infeasible, PlanError):
            continue
        compiled = outcome(*drawn, buffers_at_boundary, schedule_step)
        assert outcome(*drawn, resident_at_boundary, schedule_swaps) == compiled
        if isinstance(compiled[-1], SwapSchedule):
            scheduled, reloaded = scheduled + 1, reloaded + compiled[-1].reloaded
            at_home, changed = at_home + bool(drawn[0].read_before), changed + bool(drawn[0].changed)
    assert scheduled > 150 and reloaded, scheduled
    assert at_home > 10 and changed > 50, (at_home, changed)
