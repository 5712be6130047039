"""Updates on the processors or on their device: the graph of each choice, and that the choice is the faster one."""

from __future__ import annotations

import pytest

from disco_accel.errors import ConfigError
from disco_accel.graph.copies import is_transfer, swaps_in, swaps_out
from disco_accel.graph.home_uses import HomeUses
from disco_accel.graph.passes import run_passes
from disco_accel.graph.spaces import TO_DEVICE, TO_HOST
from disco_accel.graph.taskgraph import TaskGraph, Vertex
from disco_accel.plan import make_plan
from disco_accel.plan.update_estimate import estimated, list_schedule
from disco_accel.plan.update_places import balanced_share, choose, placed, spread, update_places, updates_of
from disco_accel.simulate.simulator import Link, Machine, lower_bound, simulate
from disco_accel.verify.static import verify
from tests.support.graphs.update_graph import UpdateShape, update_graph
from tests.support.oracles.adversary import run_reference

SHAPE = UpdateShape(layers=12)
MEMORY = 33 << 20
"""All weights, what a step makes at once, and a few moments."""
HOST = 2e-3
"""Seconds of an update on the processors: it takes an eighth of that on the device."""


def machine(bandwidth: float) -> Machine:
    link = Link(bandwidth, 1e-6)
    return Machine(links={TO_DEVICE: link, TO_HOST: link})


BALANCED = machine(1.2e9)


@pytest.fixture(scope="module")
def graph() -> TaskGraph:
    return update_graph(SHAPE, MEMORY)


def host_seconds(vertex: Vertex) -> float | None:
    return HOST if vertex.op == "update" else None


def test_what_a_moved_update_reads_of_the_step_is_transferred_and_its_moment_stays_at_home(graph: TaskGraph) -> None:
    found = updates_of(graph, host_seconds)
    assert len(found) == SHAPE.layers
    moved = list(found)[3]
    result = placed(graph, {moved: HOST})
    by_id = {vertex.id: vertex for vertex in result.vertices}
    (host,) = (device.id for device in result.devices if device.is_host_device)
    update = by_id[moved]
    assert (update.space, update.duration) == (host, HOST)
    weight, moment, gradient = (by_id[ref[0]] for ref in update.inputs)
    assert is_transfer(gradient) and gradient.space == host
    assert (weight.space, moment.space) == (0, host), "the device reads the weight"
    assert HomeUses.of(result).written == {(moved, 0), (moved, 1)}
    others = [v for v in result.vertices if v.id not in (moved, moment.id, gradient.id)]
    assert others == [v for v in graph.vertices if v.id not in (moved, moment.id)]
    assert placed(graph, {}) is graph
    assert placed(graph, found) == placed(graph, dict(reversed(found.items()))), (
        "the order of the choice is no part of it"
    )


def test_a_kernel_that_changes_nothing_lasting_is_refused_by_name(graph: TaskGraph) -> None:
    layer = next(v for v in graph.vertices if v.op == "layer")
    with pytest.raises(ConfigError, match=rf"vertex {layer.id} \(layer\): .*let it run on its device"):
        placed(graph, {layer.id: HOST})
    assert layer.id not in updates_of(graph, lambda vertex: HOST)


@pytest.mark.parametrize("count", [0, 3, SHAPE.layers])
def test_plans_of_any_number_of_moved_updates_are_right(graph: TaskGraph, count: int) -> None:
    found = updates_of(graph, host_seconds)
    there = placed(graph, {update: HOST for update in spread(list(found), count)})
    assert sum(v.op == "update" and v.space != 0 for v in there.vertices) == count
    plan = make_plan(there, planner="timed", cyclic=True, machine=BALANCED)
    verify(there, plan)
    run_reference(there, plan, seed=count)


def test_the_choice_is_expected_to_be_faster_than_all_fixed_ones(graph: TaskGraph) -> None:
    found = updates_of(graph, host_seconds)
    updates = list(found)
    share = balanced_share(graph, found, BALANCED)
    assert 0.2 < share < 0.8
    best, *others = choose(updates, lambda there: placed(graph, dict.fromkeys(there, HOST)), BALANCED, share)
    assert 0 < len(best.on_host) < len(updates)
    for fixed in ([], updates, list(spread(updates, len(updates) // 2))):
        assert best.seconds <= estimated(placed(graph, dict.fromkeys(fixed, HOST)), BALANCED).makespan
    for fixed in ([], updates):
        assert best.seconds < 0.95 * estimated(placed(graph, dict.fromkeys(fixed, HOST)), BALANCED).makespan
    assert all(best.seconds <= each.seconds for each in others)


def test_slow_processors_get_no_updates(graph: TaskGraph) -> None:
    made = run_passes(graph, [update_places(lambda v: 1.0 if v.op == "update" else None, BALANCED)])
    assert made is graph


def test_a_graph_without_updates_that_can_move_stays_as_it_is(graph: TaskGraph) -> None:
    assert run_passes(graph, [update_places(lambda vertex: None, BALANCED)]) is graph


@pytest.mark.parametrize("count", [0, 5, SHAPE.layers])
def test_the_estimate_is_a_schedule_with_each_copy_that_a_step_needs(graph: TaskGraph, count: int) -> None:
    there = placed(graph, dict.fromkeys(spread(list(updates_of(graph, host_seconds)), count), HOST))
    schedule = list_schedule(there)
    run = simulate(schedule, BALANCED)
    assert run.makespan == estimated(there, BALANCED).makespan >= lower_bound(schedule, BALANCED)
    reloads = [v for v in schedule.vertices if swaps_in(v)]
    offloads = [v for v in schedule.vertices if swaps_out(v)]
    weights = {v.inputs[0] for v in there.vertices if v.op == "update" and v.space != 0}
    assert len(weights) == count == len([v for v in reloads if v.inputs[0] in weights])
    streamed = {v.inputs[0] for v in reloads} - weights
    assert len(offloads) == len(streamed), "a streamed state goes back when it has changed"


def test_the_estimate_agrees_with_plans(graph: TaskGraph) -> None:
    """It is good enough to compare places by: a planned step is never faster, and at most a quarter slower."""
    for count in (4, 8, SHAPE.layers):
        there = placed(graph, dict.fromkeys(spread(list(updates_of(graph, host_seconds)), count), HOST))
        plan = make_plan(there, planner="timed", cyclic=True, machine=BALANCED)
        seconds, expected = simulate(plan, BALANCED).makespan, estimated(there, BALANCED).makespan
        assert 0.999 * expected <= seconds <= 1.25 * expected
