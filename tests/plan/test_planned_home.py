"""Plans with kernels on a host device: what these use they use at home, and nothing of it is placed or copied there."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.planner.chain import chain_of
from disco_accel.cli.main import main
from disco_accel.errors import BudgetTooSmall, ConfigError, GraphFileError, PlanError
from disco_accel.graph.check import check_taskgraph
from disco_accel.graph.copies import swaps, swaps_in
from disco_accel.graph.files import (
    fingerprint,
    read_memgraph,
    read_taskgraph,
    write_memgraph,
    write_taskgraph,
)
from disco_accel.graph.memgraph import MemGraph, Slot
from disco_accel.graph.spaces import TO_DEVICE, TO_HOST, Space, SpaceKind
from disco_accel.graph.taskgraph import TaskGraph, Vertex, VertexKind, with_at_least
from disco_accel.graph.traits import FROZEN, STATE
from disco_accel.observe.timeline import stays
from disco_accel.plan import make_plan
from disco_accel.plan.bound.lower_bound import bound_of
from disco_accel.plan.plan_cache import PlanCache, plan_fingerprint
from disco_accel.plan.summary import summary
from disco_accel.simulate.simulator import Link, Machine, simulate
from disco_accel.verify.static import verify
from tests.observe.traced_step import Event
from tests.support import turns
from tests.support.graphs.strategies import random_taskgraph, with_room
from tests.support.graphs.update_graph import UpdateShape, host_update_graph
from tests.support.oracles.adversary import run_reference
from tests.support.plans.home_plans import HOME_SHAPES, has_home_writes

INPUT, KERNEL, COPY = VertexKind
MACHINES = (Machine(), Machine(links={TO_DEVICE: Link(2e9, 0.0), TO_HOST: Link(2e9, 0.0)}), Machine(compute_streams=2))
FAST = Machine(links={TO_DEVICE: Link(2e11, 0.0), TO_HOST: Link(2e11, 0.0)})
HOST = Space(1, 1 << 20, kind=SpaceKind.HOST)


def planned(graph: TaskGraph, machine: Machine | None = None, cyclic: bool = True) -> MemGraph:
    plan = make_plan(graph, planner="timed", cyclic=cyclic, machine=machine)
    verify(graph, plan)
    return plan


def chain(*vertices: Vertex, memory: int = 4096) -> TaskGraph:
    return check_taskgraph(TaskGraph("chain", (Space(0, memory), HOST), vertices))


def state(number: int, device: int = 0) -> Vertex:
    return Vertex(number, INPUT, device, f"w{number}", sizes=(1024,), traits=STATE)


def update(number: int, over: tuple[int, int], device: int = 1, **fields: object) -> Vertex:
    made = Vertex(number, KERNEL, device, "update", (over,), (1024,), 1e-4, inplace=((0, 0),))
    return replace(made, **fields)  # type: ignore[arg-type]


def reader(number: int, *read: tuple[int, int], device: int = 0) -> Vertex:
    return Vertex(number, KERNEL, device, "read", read, (256,), 1e-4)


def test_plans_of_random_graphs_pass_and_no_bound_is_above_them() -> None:
    found = refused = 0
    for seed in turns.one_in(3, range(220)):
        rng = random.Random(seed)
        graph = with_room(random_taskgraph(rng, rng.choice(HOME_SHAPES)), rng.choice((0.5, 0.8, 1.2, 2.0, 5.0)))
        if not has_home_writes(graph):
            continue
        cyclic = rng.random() < 0.6
        try:
            plan = make_plan(graph, planner="timed", cyclic=cyclic)
        except BudgetTooSmall as error:
            refused += 1
            graph = with_at_least(graph, error.needed)
            plan = make_plan(graph, planner="timed", cyclic=cyclic)
        except PlanError:
            continue
        found += 1
        verify(graph, plan)
        run_reference(graph, plan, seed)
        for machine in MACHINES:
            bound, once = bound_of(graph, machine), simulate(plan, machine).makespan
            assert max(bound.compute, bound.critical_path) <= once * 1.000001
            # Phases are of the order that is given, and several devices may be planned in another one.
            if cyclic:
                least = max(bound.compute, bound.link, bound.critical_path)
                assert 3 * least <= simulate(plan, machine, steps=3).makespan * 1.000001
    assert found > 15 and refused > 3


@pytest.mark.parametrize("at_head", [True, False])
def test_updates_on_the_host_run_beside_the_device_in_little_memory(at_head: bool) -> None:
    graph = host_update_graph(UpdateShape(layers=6), 6 << 20, at_head=at_head)
    plan = planned(graph)
    moments = {v.id for v in graph.vertices if v.space == 1 and v.kind is INPUT}
    sizes = {(v.id, k): size for v in plan.vertices for k, size in enumerate(v.sizes)}
    assert all(slot.space == 0 for ref, slot in plan.slots.items() if ref[0] in moments or not sizes[ref])
    assert not any(1 in (v.space, v.source) or v.inputs[0][0] in moments for v in plan.vertices if swaps(v))
    thrice, bound = simulate(plan, Machine(), steps=3).makespan, bound_of(graph).bound
    assert 3 * bound <= thrice < 3 * 1.12 * bound


@pytest.mark.parametrize("at_head", [True, False])
def test_the_memory_that_a_refusal_names_has_kept_results_on_the_host(at_head: bool) -> None:
    """All gradients that the step hands out, or all that wait for their transfer, are larger."""
    graph = host_update_graph(UpdateShape(layers=8), 3 << 20, at_head=at_head)
    with pytest.raises(BudgetTooSmall) as refused:
        planned(graph)
    assert 3 << 20 < refused.value.needed <= 4 << 20
    planned(host_update_graph(UpdateShape(layers=8), refused.value.needed, at_head=at_head))


def test_a_kernel_on_the_host_waits_for_others_that_read_what_it_overwrites() -> None:
    graph = chain(state(0), reader(1, (0, 0), device=1), reader(2, (0, 0)), update(3, (0, 0)), reader(4, (3, 0)))
    with pytest.raises(PlanError, match=r"w0.*reads? .*two versions of it, which the host changes between"):
        planned(graph)
    plan = planned(chain(state(0), reader(1, (0, 0), device=1), update(3, (0, 0)), reader(4, (3, 0))))
    assert (1, 3) in plan.memory_edges
    plan = planned(chain(state(0), reader(2, (0, 0)), update(3, (0, 0))))
    (reload,) = (v.id for v in plan.vertices if swaps_in(v))
    assert (reload, 3) in plan.memory_edges


@pytest.mark.parametrize(
    ("vertices", "message"),
    [
        (
            (state(0), update(1, (0, 0), 0), reader(2, (1, 0), device=1)),
            r"vertex 2 \(read\): reads vertex 0 \(w0\) at its home, which vertex 1 .* a transfer take it to device 1",
        ),
        (
            (
                state(0),
                update(1, (0, 0)),
                update(2, (1, 0), after=()),
                replace(reader(3, (1, 0), device=1), after=(2,)),
            ),
            r"vertex 3 \(read\): reads what vertex 2 \(update\) overwrites before it",
        ),
        (
            (state(0), update(1, (0, 0), keep=True), update(2, (1, 0))),
            r"vertex 1 \(update\): is handed out, but vertex 2 \(update\) overwrites it",
        ),
    ],
)
def test_what_no_planner_takes_is_named(vertices: tuple[Vertex, ...], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        planned(chain(*vertices))


@pytest.mark.parametrize(
    ("vertices", "message"),
    [
        ((state(0), update(1, (0, 0)), update(2, (1, 0), 0)), r"writes .* on another device than vertex 1 does"),
        ((state(0, 1), reader(1, (0, 0))), r"vertex 0 lives on device 1: add a copy"),
        (
            (state(0), update(1, (0, 0)), Vertex(2, COPY, 0, "t", ((1, 0),), (1024,), source=1)),
            r"lies at a home.*no copy",
        ),
        (
            (replace(state(0), traits=FROZEN), update(1, (0, 0))),
            r"inplace: over vertex 0 \(w0\) at its home, where no kernel changes it",
        ),
    ],
)
def test_graphs_that_mean_nothing_are_refused(vertices: tuple[Vertex, ...], message: str) -> None:
    with pytest.raises(GraphFileError, match=message):
        chain(*vertices)


def test_a_graph_needs_a_device_that_is_not_the_hosts() -> None:
    with pytest.raises(GraphFileError, match="devices: all are the host's"):
        check_taskgraph(TaskGraph("chain", (HOST,), (state(0, 1),)))


def test_a_host_device_with_too_little_memory_is_named() -> None:
    made = replace(reader(1, (0, 0), device=1), sizes=(1 << 21,))
    with pytest.raises(
        PlanError, match=r"device 1: memory: 1048576 bytes are too few for kernels on the host.*2097152"
    ):
        planned(chain(state(0), made))


def test_other_planners_name_what_they_cannot_plan() -> None:
    graph = chain(replace(state(0), traits=FROZEN), reader(1, (0, 0), device=1), reader(2, (0, 0)))
    with pytest.raises(ConfigError, match=r"'build' cannot plan vertex 1 \(read\), which is of a host device"):
        make_plan(graph, planner="build")
    with pytest.raises(PlanError, match="device"):
        chain_of(graph, FAST)


def test_a_host_device_goes_through_a_file(tmp_path: Path) -> None:
    graph = chain(replace(state(0), traits=FROZEN), reader(1, (0, 0), device=1), reader(2, (0, 0)))
    plan = planned(graph)
    task, mem = tmp_path / "task.json", tmp_path / "mem.json"
    write_taskgraph(graph, task)
    write_memgraph(plan, mem)
    assert read_taskgraph(task) == graph
    assert read_memgraph(mem).devices == plan.devices
    assert main(["verify", str(task), str(mem)]) == 0
    assert main(["simulate", str(mem), "--steps", "3"]) == 0


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            '"kind":"host"',
            '"kind":"storage"',
            r"spaces\[1\]: id: 1: kernels run in spaces from 0 on, and in no storage",
        ),
        ('"kind":"host","memory":1048576', '"kind":"host"', r"spaces\[1\]: memory: missing"),
        ('"kind":"host"', '"kind":"device"', r"vertex 1 \(read\): inputs\[0\]: vertex 0 lives on device 0: add a copy"),
        ('"op":"w0"', '"home":1,"op":"w0"', r"vertex 0 \(w0\): home: 1 is not a space .* in which no kernels run"),
    ],
)
def test_what_contradicts_it_is_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "task.json"
    write_taskgraph(chain(state(0), reader(1, (0, 0), device=1), reader(2, (0, 0))), path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(GraphFileError, match=message):
        read_taskgraph(path)


def test_plans_are_cached_and_the_host_is_part_of_the_fingerprint(tmp_path: Path) -> None:
    def key(graph: TaskGraph) -> str:
        return plan_fingerprint(graph, planner="timed", policy="auto", cyclic=True, machine=None, environment={})

    graph = chain(state(0), reader(1, (0, 0)), update(3, (0, 0)))
    other = replace(graph, spaces=(graph.devices[0], replace(HOST, kind=SpaceKind.DEVICE)), vertices=graph.vertices[:2])
    same = replace(other, spaces=graph.devices)
    assert key(other) != key(same) and fingerprint(other) != fingerprint(same)
    plan, cache = planned(graph), PlanCache(tmp_path)
    cache.store(key(graph), plan)
    back = cache.load(key(graph), graph, cyclic=True)
    assert back is not None and back.devices == plan.devices and dict(back.slots) == dict(plan.slots)
    assert simulate(back, steps=2).makespan == simulate(plan, steps=2).makespan
    # Under a key that is not its own, a plan made for a device that is not the host's does not get through.
    cache.store(key(same), make_plan(other, planner="timed", cyclic=True))
    assert cache.load(key(same), same, cyclic=True) is None


def test_memory_given_is_that_of_devices_but_the_hosts(tmp_path: Path) -> None:
    graph = chain(state(0), replace(reader(1, (0, 0), device=1), sizes=(8192,)), reader(2, (0, 0)))
    write_taskgraph(graph, tmp_path / "task.json")
    assert make_plan(graph, memory=2048, planner="timed").devices == (Space(0, 2048), HOST)
    assert main(["bound", str(tmp_path / "task.json"), "--memory", "2048"]) == 0
    assert bound_of(graph, memory=2048).bound > 0


def test_what_the_host_reads_at_home_is_not_drawn_on_the_device_for_it() -> None:
    """A weight that a device reads early and the host late has left it in between; the host's arena is apart."""
    late = replace(reader(3, (0, 0), device=1), sizes=(8192,))
    graph = chain(replace(state(0), traits=FROZEN), reader(1, (0, 0)), reader(2, (1, 0)), late)
    slots = {(0, 0): Slot(0, 0), (1, 0): Slot(0, 1024), (2, 0): Slot(0, 0), (3, 0): Slot(1, 0)}
    plan = MemGraph("by hand", graph.devices, graph.vertices, slots, ((1, 2),), ())
    verify(graph, plan)
    ends = {stay.ref: stay.end for stay in stays(plan, [Event(n, "lane", n, n, n + 1) for n in (1, 2, 3)])}
    assert ends[0, 0] == 2.0
    assert summary(plan)["peak_bytes"] == 1280
