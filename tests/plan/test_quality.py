"""What makes plans fast, in simulated time: nothing is copied without need, and copies hide behind compute."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from disco_accel.errors import ConfigError
from disco_accel.eviction import POLICIES
from disco_accel.graph.copies import swaps_in, swaps_out
from disco_accel.graph.files import read_taskgraph
from disco_accel.graph.spaces import TO_DEVICE, TO_HOST
from disco_accel.graph.taskgraph import TaskGraph
from disco_accel.graph.values import host_copy_exists
from disco_accel.plan import make_plan
from disco_accel.plan.summary import resident_bytes, summary, swapped_bytes
from disco_accel.simulate.simulator import Link, Machine, lower_bound, simulate
from disco_accel.verify.static import verify
from tests.support.graphs.lora_graph import LoraShape, lora_graph

GRAPHS = Path(__file__).parent.parent / "data" / "graphs"
SMALL_STEP = LoraShape(layers=8, hidden=1024, ffn=2816, vocabulary=4096, tokens=1024, flops=2e13)


def balanced(graph: TaskGraph, memory: int) -> Machine:
    """A machine whose link takes about as long for the plan's reloads as compute takes for its kernels."""
    compute = sum(vertex.duration or 0.0 for vertex in graph.vertices)
    loaded = swapped_bytes(make_plan(graph, memory=memory, cyclic=True), swaps_in)
    return Machine(links={TO_DEVICE: Link(loaded / compute, 1e-5), TO_HOST: Link(loaded / compute, 1e-5)})


def weights(graph: TaskGraph) -> int:
    return sum(vertex.sizes[0] for vertex in graph.vertices if host_copy_exists(vertex))


def test_where_everything_fits_every_weight_stays_and_nothing_is_loaded() -> None:
    graph = lora_graph(SMALL_STEP, 1 << 30)
    plan = make_plan(graph, cyclic=True)
    assert resident_bytes(plan) == weights(graph)
    assert swapped_bytes(plan, swaps_in) == swapped_bytes(plan, swaps_out) == 0


@pytest.mark.parametrize(("share", "limit"), [(0.5, 1.15), (0.65, 1.15), (0.8, 1.12), (0.9, 1.12)])
def test_copies_hide_behind_compute_when_both_take_as_long(share: float, limit: float) -> None:
    """With less memory the forward, a third of the compute, has to load half of the weights: the link limits it."""
    graph = lora_graph(SMALL_STEP, int(share * weights(lora_graph(SMALL_STEP, 1))))
    memory = graph.devices[0].memory
    machine = balanced(graph, memory)
    plan = make_plan(graph, memory=memory, cyclic=True, machine=machine)
    verify(graph, plan)
    assert simulate(plan, machine).makespan <= limit * lower_bound(plan, machine)


def test_frozen_weights_are_never_copied_back() -> None:
    graph = lora_graph(SMALL_STEP, weights(lora_graph(SMALL_STEP, 1)) // 2)
    plan = make_plan(graph, cyclic=True)
    clean = {vertex.id for vertex in graph.vertices if host_copy_exists(vertex)}
    loaded = {v.id for v in plan.vertices if swaps_in(v) and v.inputs[0][0] in clean}
    assert loaded
    assert not any(swaps_out(v) and v.inputs[0][0] in clean | loaded for v in plan.vertices)


def test_an_unchanged_value_is_offloaded_once_and_waits_for_its_producer_alone() -> None:
    for share in (0.25, 0.3, 0.4):
        graph = read_taskgraph(GRAPHS / "lora_small.taskgraph.json")
        plan = make_plan(graph, memory=int(share * graph.devices[0].memory), cyclic=True)
        sources = [vertex.inputs[0] for vertex in plan.vertices if swaps_out(vertex)]
        assert len(sources) == len(set(sources))
        for vertex in plan.vertices:
            if swaps_out(vertex):
                assert [u for u, v in plan.data_edges if v == vertex.id] in ([], [vertex.inputs[0][0]])


def test_lookahead_is_what_hides_copies() -> None:
    graph = lora_graph(SMALL_STEP, weights(lora_graph(SMALL_STEP, 1)) // 2)
    near = simulate(make_plan(graph, cyclic=True, lookahead=0)).makespan
    far = simulate(make_plan(graph, cyclic=True)).makespan
    assert far < 0.95 * near


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_plans_a_step_that_does_not_fit(policy: str) -> None:
    graph = lora_graph(SMALL_STEP, weights(lora_graph(SMALL_STEP, 1)) // 2)
    plan = make_plan(graph, cyclic=True, policy=policy)
    verify(graph, plan)
    found = summary(plan)
    sizes = {(v.id, k): size for v in plan.vertices for k, size in enumerate(v.sizes)}
    top = max(slot.offset + sizes[ref] for ref, slot in plan.slots.items() if slot.space == 0)
    assert found["peak_bytes"] == top <= graph.devices[0].memory
    assert found["planner"] == "build"


def test_no_memory_edge_is_implied_by_others() -> None:
    graph = read_taskgraph(GRAPHS / "lora_small.taskgraph.json")
    plan = make_plan(graph, memory=64 << 20, cyclic=True)
    successors: dict[int, set[int]] = {vertex.id: set() for vertex in plan.vertices}
    for u, v in (*plan.data_edges, *plan.memory_edges):
        successors[u].add(v)
    for u, v in plan.memory_edges:
        reached, stack = set(), [w for w in successors[u] if w != v]
        while stack:
            vertex = stack.pop()
            if vertex not in reached:
                reached.add(vertex)
                stack.extend(successors[vertex])
        assert v not in reached


def test_unknown_names_list_the_known_ones() -> None:
    graph = lora_graph(replace(SMALL_STEP, layers=1), 1 << 30)
    with pytest.raises(ConfigError, match="build"):
        make_plan(graph, planner="timed?")
    with pytest.raises(ConfigError, match="belady, cost, fifo, latency_aware, lru, size_aware"):
        make_plan(graph, policy="random")
    with pytest.raises(ConfigError, match="lookahead"):
        make_plan(graph, lookahead=-1)
