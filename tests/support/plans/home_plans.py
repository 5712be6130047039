"""Random plans of graphs with kernels on a host device, which use what the host has at its home."""

from __future__ import annotations

import contextlib
import random
from dataclasses import replace

from disco_accel.errors import PlanError
from disco_accel.graph.home_uses import HomeUses
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.taskgraph import TaskGraph
from disco_accel.plan import make_plan
from tests.support.graphs.strategies import Shape, random_taskgraph, with_room
from tests.support.plans.state_plans import NoPlan, random_plan

HOME_SHAPES = (
    Shape(vertices=12, inputs=6, devices=1, host=0.5, states=0.5, leaving=0.5, inplace=0.0),
    Shape(vertices=10, inputs=6, devices=2, host=0.4, states=0.7, gate=False, keep=0.3, leaving=0.5, inplace=0.0),
    Shape(vertices=12, inputs=8, devices=1, host=0.4, states=0.4, host_updated=0.5, may_inplace=0.4, inplace=0.0),
)
"""Graphs with updates on the host and on devices, alone, and beside values that the host updates; transfers to the
user's memory."""

OLD_VERSIONS = tuple(replace(shape, inplace=0.2, old_versions=True) for shape in HOME_SHAPES)
"""The same with what no planner takes: versions that are read, or handed out, when they have been overwritten."""

_ROOM = (0.8, 1.0, 1.4, 3.0)


def has_home_writes(graph: TaskGraph) -> bool:
    """Whether a kernel of a host device writes at a home."""
    return bool(HomeUses.of(graph).written)


def planned_homes(count: int, first_seed: int = 0) -> list[tuple[TaskGraph, MemGraph]]:
    """Return ``count`` graphs with such kernels, each with a plan by the timed planner in little memory."""
    found: list[tuple[TaskGraph, MemGraph]] = []
    seed = first_seed
    while len(found) < count:
        seed += 1
        rng = random.Random(seed)
        graph = with_room(random_taskgraph(rng, rng.choice(HOME_SHAPES)), rng.choice(_ROOM))
        if has_home_writes(graph):
            with contextlib.suppress(PlanError):
                found.append((graph, make_plan(graph, cyclic=rng.random() < 0.6, planner="timed")))
    return found


def drawn_homes(count: int, first_seed: int = 0) -> list[tuple[TaskGraph, MemGraph]]:
    """The same by no planner, on devices as large as the plan needs."""
    found: list[tuple[TaskGraph, MemGraph]] = []
    seed = first_seed
    while len(found) < count:
        seed += 1
        rng = random.Random(seed)
        graph = random_taskgraph(rng, rng.choice((*HOME_SHAPES, *OLD_VERSIONS)))
        if has_home_writes(graph):
            with contextlib.suppress(NoPlan):
                plan = random_plan(graph, rng)
                found.append((replace(graph, spaces=plan.devices), plan))
    return found


def home_plans(count: int, first_seed: int = 0) -> list[tuple[TaskGraph, MemGraph]]:
    """Half of ``count`` by the timed planner, half by lots."""
    return [*planned_homes(count // 2, first_seed), *drawn_homes(count - count // 2, first_seed)]
