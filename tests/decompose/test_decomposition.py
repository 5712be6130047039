"""Layers in a row, or dealt out in turn: what is faster in simulated time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import pytest

from disco_accel.decompose.decomposition import fastest_with_room
from disco_accel.decompose.layers import placements
from disco_accel.decompose.spread import SpreadGraph, spread
from disco_accel.graph.check import check_taskgraph
from disco_accel.graph.spaces import BETWEEN_DEVICES, Space
from disco_accel.graph.taskgraph import OpCall, Ref, TaskGraph, Vertex, VertexKind
from disco_accel.graph.traits import FROZEN, LATE, Traits
from disco_accel.plan import make_plan
from disco_accel.simulate.simulator import Link, Machine, simulate

LAYERS, MILLISECOND = 8, 1e-3


def step(parts: int, value: int) -> TaskGraph:
    """A forward and a backward of eight layers, a millisecond each for every part; ``value``: bytes between layers."""
    vertices: list[Vertex] = []
    calls: dict[int, OpCall] = {}

    def add(module: str, reads: list[Ref], traits: Traits | None = None) -> Ref:
        at = len(vertices)
        vertex = Vertex(at, VertexKind.INPUT, 0, "in", (), (8,), traits=traits or FROZEN)
        if traits is None:
            vertex = Vertex(at, VertexKind.KERNEL, 0, "f", tuple(reads), (value,), MILLISECOND)
            calls[at] = OpCall("aten::f", "default", (), (None,), module)
        vertices.append(vertex)
        return at, 0

    weights = [add("", [], FROZEN) for _ in range(LAYERS)]
    kept = [[add("", [], FROZEN)] for _ in range(parts)]
    for part in kept:
        for k, weight in enumerate(weights):
            part.append(add(f"model.layers.{k}", [part[-1], weight]))
    losses = [part[-1] for part in kept]
    add(f"model.layers.{LAYERS - 1}", losses)
    vertices[-1] = replace(vertices[-1], out=True, duration=0.0)
    tangent = add("", [], LATE)
    for part in kept:
        gradient = tangent
        for k in reversed(range(LAYERS)):
            gradient = add(f"model.layers.{k}", [gradient, part[k], weights[k]])
        vertices[-1] = replace(vertices[-1], keep=True)
    return check_taskgraph(TaskGraph("step", (Space(0, 1 << 40),), tuple(vertices), calls))


def chosen(graph: TaskGraph, devices: int, machine: Machine) -> tuple[int, SpreadGraph, list[SpreadGraph]]:
    """The number of the way that is chosen, what it makes, and what all make."""
    memory = [1 << 40] * devices
    places = [Space(d, 1 << 40) for d in range(devices)]
    made: list[SpreadGraph] = []

    def spread_in(way: Mapping[int, int]) -> SpreadGraph:
        return spread(graph, way, places, ())

    ways = placements(graph, memory, machine)
    made = [spread_in(way) for way in ways]
    done = fastest_with_room([partial(spread_in, way) for way in ways], machine)
    return [each.graph for each in made].index(done.graph), done, made


@pytest.mark.parametrize("devices", [2, 4])
def test_micro_batches_are_faster_in_turn_and_the_plan_is_too(devices: int) -> None:
    """In a row a device is idle for as many layers of a part as lie on the others, in turn for one on each."""
    parts, machine = 4, Machine(links={BETWEEN_DEVICES: Link(1e12, 0.0)})
    number, done, made = chosen(step(parts, 8), devices, machine)
    assert number == len(made) - 1, "layer by layer"
    row, dealt = (make_plan(each.graph, planner="timed", cyclic=True, machine=machine) for each in (made[0], done))
    share = LAYERS // devices * MILLISECOND
    assert simulate(row, machine).makespan == pytest.approx(2 * (parts + devices - 1) * share, rel=1e-3)
    assert simulate(dealt, machine).makespan == pytest.approx(
        2 * (parts * share + (devices - 1) * MILLISECOND), rel=1e-3
    )


def test_one_batch_stays_in_a_row() -> None:
    """Each of its layers waits for the one before, wherever that is."""
    assert chosen(step(1, 8), 4, Machine(links={BETWEEN_DEVICES: Link(1e12, 0.0)}))[0] == 0


def test_what_takes_long_to_send_stays_in_a_row() -> None:
    """Eight milliseconds from device to device, each of which has four layers of a millisecond."""
    assert chosen(step(4, 8000), 2, Machine(links={BETWEEN_DEVICES: Link(1e6, 0.0)}))[0] == 0
