"""Simulation: the paper's example to the second, no lane overbooked, no edge broken, steps that share memory safely."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from disco_accel.errors import ConfigError, PlanError, Stalled
from disco_accel.graph.carried_values import taskgraph_of
from disco_accel.graph.copies import swaps_out
from disco_accel.graph.files import memgraph_from_json, read_memgraph
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.spaces import BETWEEN_DEVICES, HOST, TO_DEVICE, TO_HOST, Space
from disco_accel.graph.taskgraph import TaskGraph, VertexKind
from disco_accel.graph.values import arrives_at_gate, host_copy_exists
from disco_accel.plan import make_plan
from disco_accel.plan.bound.lower_bound import bound_of
from disco_accel.simulate.machine import Link, Machine
from disco_accel.simulate.machine_file import machine_from_json, read_machine
from disco_accel.simulate.simulator import DISPATCHES, Simulator, lower_bound, simulate
from disco_accel.verify.static import verify
from tests.support.graphs.lora_graph import LoraShape, lora_graph
from tests.support.graphs.strategies import Shape, random_taskgraph, with_working_sets

GRAPHS = Path(__file__).parent.parent / "data" / "graphs"
WORK_CONSERVING = ("priority", "fifo", "random")
MIB = 1 << 20


def intro(layers: int) -> MemGraph:
    """The paper's example: two devices with room for one weight each, one link to both, a second for each load."""
    vertices: list[dict[str, Any]] = []
    loads: list[dict[str, Any]] = []
    data, memory = [], []
    for layer in range(layers):
        for device in (0, 1):
            weight, product, copy, load = (f"{kind}{layer}.{device}" for kind in ("w", "mm", "x", "load"))
            vertices.append({"id": weight, "kind": "input", "device": device, "size": MIB, "clean": True, "addr": None})
            before = [f"mm{layer - 1}.{device}", f"x{layer - 1}.{device}"] if layer else []
            kernel = {"id": product, "kind": "compute", "device": device, "size": 0, "duration": 1.0}
            vertices.append({**kernel, "inputs": [load, *before]})
            source = f"mm{layer}.{1 - device}"
            vertices.append({"id": copy, "kind": "transfer", "device": device, "size": 0, "inputs": [source]})
            loads.append({"id": load, "kind": "reload", "device": device, "size": MIB, "inputs": [weight], "addr": 0})
            data += [[load, product], [source, copy], *([each, product] for each in before)]
            memory += [[f"mm{layer - 1}.{device}", load]] if layer else []
    return memgraph_from_json(
        {
            "format": "memgraph",
            "version": 1,
            "devices": [{"id": 0, "memory": MIB}, {"id": 1, "memory": MIB}],
            "vertices": vertices + loads,
            "edges": {"data": data, "memory": memory},
        }
    )


INTRO_MACHINE = read_machine(GRAPHS / "intro.machine.json")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dispatch", WORK_CONSERVING)
@pytest.mark.parametrize("layers", [1, 2, 3, 10, 57])
def test_the_intro_takes_2n_plus_1_when_work_goes_on_where_it_can(layers: int, dispatch: str, seed: int) -> None:
    plan = intro(layers)
    verify(taskgraph_of(plan), plan)
    assert simulate(plan, INTRO_MACHINE, dispatch=dispatch, seed=seed).makespan == 2 * layers + 1


@pytest.mark.parametrize("layers", [1, 2, 3, 10, 57])
def test_the_intro_takes_3n_level_by_level(layers: int) -> None:
    assert simulate(intro(layers), INTRO_MACHINE, dispatch="fixed").makespan == 3 * layers


def test_the_intro_of_the_schema_takes_21_and_30_seconds_and_no_step_less_than_20() -> None:
    plan = read_memgraph(GRAPHS / "intro_n10.memgraph.json")
    found = {dispatch: simulate(plan, INTRO_MACHINE, dispatch=dispatch).makespan for dispatch in DISPATCHES}
    assert found == {"priority": 21.0, "fifo": 21.0, "random": 21.0, "fixed": 30.0}
    assert bound_of(taskgraph_of(plan), INTRO_MACHINE).bound == pytest.approx(20.0)


def test_a_following_step_loads_while_the_one_before_still_computes() -> None:
    """The first load of a step needs only the memory, so each step but the first hides it: 2n a step."""
    plan = intro(10)
    assert simulate(plan, INTRO_MACHINE, steps=5).makespan == 5 * 20 + 1
    assert simulate(plan, INTRO_MACHINE, steps=5, dispatch="fixed").makespan == 5 * 30


def plans(count: int, seed: int, **shape: Any) -> list[tuple[TaskGraph, MemGraph]]:
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        graph = with_working_sets(random_taskgraph(rng, Shape(**shape)), rng.choice((3, 4, 6)))
        plan = make_plan(graph, planner=rng.choice(("build", "timed")), cyclic=True)
        verify(graph, plan)
        made.append((graph, plan))
    return made


MACHINES = (
    Machine(),
    Machine(
        2,
        {
            TO_DEVICE: Link(1e8, 1e-6, "shared"),
            TO_HOST: Link(1e8, 1e-6, "shared"),
            BETWEEN_DEVICES: Link(1e8, 0.0, "pair"),
        },
        joint=(("h2d", "d2h"),),
    ),
    Machine(
        1,
        {
            TO_DEVICE: Link(1e7, 0.0, groups=((0, 1),)),
            TO_HOST: Link(1e8, 1e-6),
            BETWEEN_DEVICES: Link(1e8, 1e-6, "shared"),
        },
    ),
)


@pytest.mark.parametrize("dispatch", DISPATCHES)
def test_no_edge_is_broken_and_no_lane_does_more_than_it_can(dispatch: str) -> None:
    for number, (_, plan) in enumerate(plans(40, seed=1)):
        machine = MACHINES[number % len(MACHINES)]
        run = simulate(plan, machine, dispatch=dispatch, seed=number)
        lane_of = machine.lanes(plan.spaces)
        vertex = {v.id: v for v in plan.vertices}
        ends = {id: start + lane_of.seconds(vertex[id]) for id, start in run.starts.items()}
        assert run.makespan == pytest.approx(max(ends.values(), default=0.0))
        for u, v in (*plan.data_edges, *plan.memory_edges):
            assert vertex[u].kind is VertexKind.INPUT or run.starts[v] >= ends[u] - 1e-12
        outs = [ends[v.id] for v in plan.vertices if v.out and v.kind is not VertexKind.INPUT]
        for v in plan.vertices:
            if any(arrives_at_gate(vertex[producer]) for producer, _ in v.inputs):
                assert run.starts[v.id] >= max(outs, default=0.0) - 1e-12
        lanes = defaultdict(list)
        for v in plan.vertices:
            if v.id in ends and ends[v.id] > run.starts[v.id]:
                lanes[lane_of.name(v)].append((run.starts[v.id], ends[v.id]))
        for lane, spans in lanes.items():
            width = machine.compute_streams if lane.startswith("compute") else 1
            for begin, _ in spans:
                assert sum(a <= begin < b - 1e-12 for a, b in spans) <= width
            assert run.busy[lane] == pytest.approx(sum(b - a for a, b in spans))
        assert lower_bound(plan, machine) <= run.makespan * (1 + 1e-9)
        assert run.makespan <= sum(map(lane_of.seconds, plan.vertices)) * (1 + 1e-9) + 1e-12


def test_priority_and_fifo_leave_no_lane_idle_while_something_is_ready_for_it() -> None:
    for _, plan in plans(25, seed=2):
        for dispatch in ("priority", "fifo"):
            run = simulate(plan, dispatch=dispatch)
            lane_of = Machine().lanes(plan.spaces)
            vertex = {v.id: v for v in plan.vertices}
            before = defaultdict(set)
            for u, v in (*plan.data_edges, *plan.memory_edges):
                before[v].add(u)
            ends = {id: start + lane_of.seconds(vertex[id]) for id, start in run.starts.items()}
            gate = max((ends[v.id] for v in plan.vertices if v.out and v.id in ends), default=0.0)
            for v, start in run.starts.items():
                late = any(arrives_at_gate(vertex[p]) for p, _ in vertex[v].inputs) or any(
                    arrives_at_gate(vertex[p]) for p in before[v]
                )
                ready = max([gate if late else 0.0, *(ends[u] for u in before[v] if u in ends)])
                if ready < start:
                    lane = {w for w in ends if lane_of.name(vertex[w]) == lane_of.name(vertex[v])}
                    assert any(run.starts[w] < start and ends[w] >= start for w in lane), "the lane was free"


def test_jitter_is_bounded_seeded_and_nothing_at_zero() -> None:
    graph = lora_graph(LoraShape(layers=4, hidden=1024, ffn=2816, vocabulary=4096, tokens=1024, flops=2e13), 64 << 20)
    plan = make_plan(graph, cyclic=True)
    simulator = Simulator(plan)
    exact = simulator.run().makespan
    assert simulator.run(seed=5, jitter=0.0).makespan == exact
    runs = [simulator.run(seed=seed, jitter=0.3).makespan for seed in range(12)]
    assert len(set(runs)) == 12
    assert simulator.run(seed=3, jitter=0.3).makespan == runs[3]
    # Scaling everything by 0.7 or by 1.3 bounds all; a graph anomaly would need a change of order.
    assert all(0.69 * exact <= run <= 1.31 * exact for run in runs)


def test_a_period_is_no_shorter_than_the_bound_and_hardly_longer_than_one_step() -> None:
    for seed, share in enumerate((0.6,)):
        shape = LoraShape(layers=2, hidden=1024, ffn=2816, vocabulary=4096, tokens=1024, flops=2e13)
        weights = sum(v.sizes[0] for v in lora_graph(shape, 1).vertices if host_copy_exists(v))
        graph = lora_graph(shape, int(share * weights))
        for planner in ("build", "timed"):
            plan = make_plan(graph, cyclic=True, planner=planner)
            simulator = Simulator(plan)
            once, often = simulator.run(seed=seed).makespan, simulator.run(seed=seed, steps=9).makespan
            period = (often - once) / 8
            assert bound_of(taskgraph_of(plan)).bound * (1 - 1e-9) <= period
            # An early load of the next step may delay, by one copy, a load that this one waits for.
            assert period <= 1.02 * once


def test_lanes_are_shared_as_the_machine_file_says() -> None:
    def lanes(*links: dict[str, Any]) -> list[str]:
        machine = machine_from_json({"links": [{"bandwidth": 1e9, **link} for link in links]})
        lanes = machine.lanes((Space(1), Space(2)))
        ends = ((HOST, 1), (HOST, 2), (1, HOST), (2, HOST), (2, 1), (1, 2))
        return [lanes.link_name(*each) for each in ends]

    apart = ["h2d1", "h2d2", "d2h1", "d2h2", "p2p2", "p2p1"]
    assert lanes() == apart
    assert lanes({"kinds": ["h2d"], "scope": "shared"}) == ["h2d", "h2d", *apart[2:]]
    assert lanes({"kinds": ["p2p"], "scope": "pair"}) == [*apart[:4], "p2p2-1", "p2p1-2"]
    assert lanes({"kinds": ["d2h", "h2d"]}) == ["h2d+d2h1", "h2d+d2h2", "h2d+d2h1", "h2d+d2h2", *apart[4:]]
    assert lanes({"kinds": ["h2d"], "groups": [[0, 1], [3, 2]]})[:2] == ["h2d[0,1]", "h2d[2,3]"]


def test_half_duplex_is_slower_than_two_links() -> None:
    graph = lora_graph(LoraShape(layers=4, hidden=1024, ffn=2816, vocabulary=4096, tokens=1024, flops=2e13), 40 << 20)
    plan = make_plan(graph, cyclic=True)
    link = Link(2e9, 1e-6)
    full = Machine(links={TO_DEVICE: link, TO_HOST: link})
    half = replace(full, joint=(("h2d", "d2h"),))
    copies = sum(swaps_out(v) for v in plan.vertices)
    assert copies, "the plan writes back"
    assert simulate(plan, half).makespan > simulate(plan, full).makespan
    assert set(simulate(plan, half).busy) == {"compute0", "h2d+d2h0"}


def test_what_makes_no_sense_is_an_error_that_says_what_does() -> None:
    plan = intro(2)
    with pytest.raises(ConfigError, match="priority, fifo, random, fixed"):
        simulate(plan, dispatch="luck")
    for jitter in (-0.1, 1.5, float("nan")):
        with pytest.raises(ConfigError, match="jitter"):
            simulate(plan, jitter=jitter)
    for steps in (0, -1, 10**9):
        with pytest.raises(ConfigError, match="steps"):
            simulate(plan, steps=steps)


def test_a_plan_that_cannot_end_names_who_never_starts() -> None:
    plan = intro(2)
    cycle = MemGraph(**{**_fields(plan), "memory_edges": (*plan.memory_edges, plan.data_edges[-1][::-1])})
    for dispatch in DISPATCHES:
        with pytest.raises(Stalled, match=rf"never start, among them {plan.data_edges[-1][0]}|never start"):
            simulate(cycle, dispatch=dispatch)


def _fields(plan: MemGraph) -> dict[str, Any]:
    return {name: getattr(plan, name) for name in MemGraph.__dataclass_fields__}


def test_several_steps_need_a_plan_that_ends_as_it_began() -> None:
    shape = LoraShape(layers=2, hidden=1024, ffn=2816, vocabulary=4096, tokens=1024, flops=2e13)
    graph = lora_graph(shape, 40 << 20)
    once = make_plan(graph, cyclic=False)
    assert simulate(once).makespan > 0
    with pytest.raises(PlanError, match=r"vertex \d+ .*cyclic"):
        simulate(once, steps=2)
    assert simulate(make_plan(graph, cyclic=True), steps=2).makespan > 0
