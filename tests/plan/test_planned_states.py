"""Plans of steps whose kernels change values that live over steps: weights, moments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from disco_accel.errors import BudgetTooSmall, ConfigError, GraphFileError, PlanError, VerifyError
from disco_accel.graph.carried_values import inputs_held
from disco_accel.graph.check import check_taskgraph, largest_need
from disco_accel.graph.copies import swaps, swaps_in, swaps_out
from disco_accel.graph.files import read_taskgraph, write_taskgraph
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.spaces import HOST, TO_DEVICE, TO_HOST
from disco_accel.graph.taskgraph import TaskGraph, Vertex, VertexKind, with_memory
from disco_accel.graph.traits import FROZEN, Arrival, Traits
from disco_accel.graph.values import changes_over_steps, lasting_versions, may_leave
from disco_accel.plan import make_plan
from disco_accel.plan.bound.lower_bound import bound_of
from disco_accel.plan.summary import staying
from disco_accel.simulate.machine import Link, Machine
from disco_accel.simulate.simulator import simulate
from disco_accel.verify.static import verify
from tests.support.graphs.update_graph import UpdateShape, update_graph
from tests.support.oracles.adversary import run_reference

MIB = 1 << 20
MACHINE = Machine(links={TO_DEVICE: Link(10e9, 5e-6), TO_HOST: Link(10e9, 5e-6)})
EVERYTHING = 1 << 30


def planned(graph: TaskGraph, memory: int, cyclic: bool = True) -> MemGraph:
    """A plan that all judges accept."""
    sized = with_memory(graph, lambda _: memory)
    plan = make_plan(sized, planner="timed", cyclic=cyclic, machine=MACHINE)
    verify(sized, plan)
    for seed in range(3):
        run_reference(sized, plan, seed)
    return plan


def copies(plan: MemGraph, counts: Callable[[Vertex], bool]) -> list[int]:
    """The inputs whose bytes each copy that ``counts`` moves."""
    of = inputs_held(plan)
    return [of[v.id, 0] for v in plan.vertices if counts(v) and (v.id, 0) in of]


def states_of(graph: TaskGraph) -> set[int]:
    return {v.id for v in graph.vertices if changes_over_steps(v)}


def test_with_memory_for_everything_nothing_moves() -> None:
    graph = update_graph(UpdateShape(), EVERYTHING)
    plan = planned(graph, EVERYTHING)
    assert not any(swaps(v) for v in plan.vertices)
    assert staying(plan) >= states_of(graph)


def test_a_plan_for_one_step_writes_back_all_that_changed() -> None:
    graph = update_graph(UpdateShape(updated=3), EVERYTHING)
    plan = planned(graph, EVERYTHING, cyclic=False)
    changed = {state for (state, _), versions in lasting_versions(graph.vertices).items() if len(versions) > 1}
    assert len(changed) == 6
    assert sorted(copies(plan, swaps_out)) == sorted(changed)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.6])
@pytest.mark.parametrize("cyclic", [False, True])
def test_what_leaves_after_a_change_was_written_back(share: float, cyclic: bool) -> None:
    graph = update_graph(UpdateShape(layers=6, updated=4), EVERYTHING)
    least, most = largest_need(graph, 0)[0], sum(sum(v.sizes) for v in graph.vertices)
    try:
        plan = planned(graph, int(least + share * (most - least)) // 256 * 256, cyclic)
    except BudgetTooSmall as error:
        assert share == 0.0
        plan = planned(graph, error.needed, cyclic)
    offloads, reloads = copies(plan, swaps_out), copies(plan, swaps_in)
    written = {versions[0][0] for versions in lasting_versions(graph.vertices).values() if len(versions) > 1}
    assert set(offloads) <= written
    assert not any(slot.space == HOST for ref, slot in plan.slots.items() if ref in inputs_held(plan))
    if cyclic:
        # What is reloaded unchanged was written back by the step before, or nothing changed it.
        assert {state for state in reloads if state in written} <= set(offloads)
    else:
        assert set(offloads) == written


def test_one_unit_less_than_needed_is_refused() -> None:
    """What is needed does not depend on durations; with them a search may find a plan in less."""
    graph = update_graph(UpdateShape(layers=3, weight=3 * MIB, frozen=MIB), 1)
    graph = replace(graph, vertices=tuple(replace(vertex, duration=None) for vertex in graph.vertices))
    with pytest.raises(BudgetTooSmall) as refused:
        planned(graph, 1024)
    planned(graph, refused.value.needed)
    with pytest.raises(BudgetTooSmall) as again:
        planned(graph, refused.value.needed - 256)
    assert again.value.needed == refused.value.needed


def test_a_step_is_never_faster_than_the_bound_and_seldom_much_slower() -> None:
    ratios = []
    for memory in (6 * MIB, 8 * MIB, 12 * MIB, 16 * MIB):
        graph = update_graph(UpdateShape(layers=8), memory)
        plan = planned(graph, memory)
        bound = bound_of(graph, MACHINE).bound
        ratios.append(simulate(plan, MACHINE).makespan / bound)
        assert simulate(plan, MACHINE, steps=5).makespan / 5 >= bound * (1 - 1e-9)
    assert min(ratios) >= 1 - 1e-9 and sum(ratios) / len(ratios) < 1.1


def test_the_bound_counts_write_backs_on_the_slow_way_to_the_host() -> None:
    graph = update_graph(UpdateShape(layers=8, seconds=1e-5), 8 * MIB)
    even = bound_of(graph, MACHINE).link
    slow = bound_of(graph, MACHINE.with_links({TO_HOST: Link(1e9, 5e-6)})).link
    assert slow > 2 * even
    frozen = replace(graph, vertices=tuple(v for v in graph.vertices if v.op != "update"))
    assert bound_of(frozen, MACHINE.with_links({TO_HOST: Link(1e9, 5e-6)})).link == bound_of(frozen, MACHINE).link


def test_a_reload_waits_for_the_write_back_of_the_step_before() -> None:
    """The last layer's weight is needed first; with a slow way to the host the next step starts late."""
    graph = update_graph(UpdateShape(layers=2, seconds=1e-6), 5 * MIB)
    plan = planned(graph, 5 * MIB)
    slow = MACHINE.with_links({TO_HOST: Link(1e8, 5e-6)})
    one, two = simulate(plan, slow).makespan, simulate(plan, slow, steps=2).makespan
    assert copies(plan, swaps_out)
    assert two > 1.9 * one


def test_buildmemgraph_names_what_it_cannot_plan() -> None:
    graph = update_graph(UpdateShape(), EVERYTHING)
    with pytest.raises(ConfigError, match=r"planner: 'build' cannot plan vertex 1 \(w0\), which lives over steps"):
        make_plan(graph, planner="build")


def edited(graph: TaskGraph, vertex: int, **changes: object) -> TaskGraph:
    """``graph`` with one vertex changed."""
    vertices = tuple(replace(v, **changes) if v.id == vertex else v for v in graph.vertices)  # type: ignore[arg-type]
    return check_taskgraph(replace(graph, vertices=vertices))


def test_a_version_that_is_wanted_once_it_is_overwritten_is_refused_by_name() -> None:
    graph = update_graph(UpdateShape(layers=2), EVERYTHING)
    update = next(v for v in graph.vertices if v.op == "update")
    weight = update.inputs[0]
    late = Vertex(1000, VertexKind.KERNEL, 0, "late reader", (weight, (update.id, 1)), (256,), 1e-6)
    reads_late = check_taskgraph(replace(graph, vertices=(*graph.vertices, late)))
    with pytest.raises(PlanError, match=r"vertex 1000 \(late reader\): reads what vertex \d+ \(update\) overwrites"):
        make_plan(reads_late, planner="timed")
    with pytest.raises(PlanError, match=r"\(update\): out: changes a value that lives over steps"):
        make_plan(edited(graph, update.id, out=True), planner="timed")
    again = Vertex(1000, VertexKind.KERNEL, 0, "again", ((update.id, 0),), (MIB,), 1e-6, inplace=((0, 0),))
    twice = check_taskgraph(replace(edited(graph, update.id, keep=True), vertices=(*graph.vertices, again)))
    kept = edited(twice, update.id, keep=True)
    with pytest.raises(PlanError, match=r"\(update\): is handed out, but vertex 1000 \(again\) overwrites it"):
        make_plan(kept, planner="timed")


def test_two_updates_in_a_step_are_planned_in_little_memory() -> None:
    """Read, update, much else, update again: between the two it may leave, and comes back changed."""
    graph = update_graph(UpdateShape(layers=6), EVERYTHING)
    update = next(v for v in graph.vertices if v.op == "update")
    again = Vertex(1000, VertexKind.KERNEL, 0, "again", ((update.id, 0),), (MIB,), 1e-6, inplace=((0, 0),))
    twice = check_taskgraph(replace(graph, vertices=(*graph.vertices, again)))
    least = largest_need(twice, 0)[0]
    plan = planned(twice, least + 2 * MIB)
    state = update.inputs[0][0]
    assert copies(plan, swaps_out).count(state) >= 2
    order = [v for v in plan.vertices if (v.id, 0) in inputs_held(plan) and inputs_held(plan)[v.id, 0] == state]
    assert any(swaps_out(a) and swaps_in(b) for a, b in pairwise(order))


def test_a_lost_write_back_is_not_accepted() -> None:
    graph = update_graph(UpdateShape(layers=6), 7 * MIB)
    plan = planned(graph, 7 * MIB)
    last = [v.id for v in plan.vertices if swaps_out(v)][-1]
    lost = replace(
        plan,
        vertices=tuple(v for v in plan.vertices if v.id != last),
        data_edges=tuple(e for e in plan.data_edges if last not in e),
        memory_edges=tuple(e for e in plan.memory_edges if last not in e),
    )
    with pytest.raises(VerifyError):
        verify(graph, lost)


@pytest.mark.parametrize("planner", ["timed", "build"])
@pytest.mark.parametrize("cyclic", [False, True])
def test_what_has_to_stay_is_never_loaded(planner: str, cyclic: bool) -> None:
    """Weights that plans of this memory stream are named to stay; a plan that streams them is refused."""
    shape = UpdateShape(layers=6, updated=0 if planner == "build" else None)
    graph = update_graph(shape, 9 * MIB)
    if planner == "build":
        graph = replace(graph, vertices=tuple(_with(v, FROZEN) if changes_over_steps(v) else v for v in graph.vertices))
    streamed = make_plan(graph, planner=planner, cyclic=cyclic, machine=MACHINE)
    names = sorted({*copies(streamed, swaps_in)})[:2]
    named = replace(graph, vertices=tuple(_named(v, names) for v in graph.vertices))
    plan = make_plan(named, planner=planner, cyclic=cyclic, machine=MACHINE)
    verify(named, plan)
    wrong = replace(streamed, vertices=tuple(_named(v, names) for v in streamed.vertices))
    if cyclic:
        assert not set(names) & set(copies(plan, swaps_in))
        with pytest.raises(VerifyError, match=r"which has to stay"):
            verify(named, wrong)
    else:
        verify(named, wrong)


def _with(vertex: Vertex, traits: Traits) -> Vertex:
    return replace(vertex, traits=traits)


def _named(vertex: Vertex, names: list[int]) -> Vertex:
    return _with(vertex, replace(vertex.traits, stays=True)) if vertex.id in names else vertex


def test_more_than_the_memory_cannot_stay() -> None:
    graph = update_graph(UpdateShape(layers=4), 6 * MIB)
    names = [v.id for v in graph.vertices if v.kind is VertexKind.INPUT and v.op != "x"]
    everything = replace(graph, vertices=tuple(_named(v, names) for v in graph.vertices))
    with pytest.raises(BudgetTooSmall) as refused:
        make_plan(everything, planner="timed", cyclic=True, machine=MACHINE)
    plan = planned(everything, refused.value.needed)
    assert refused.value.needed >= 12 * MIB and not copies(plan, swaps_in)


def test_a_state_that_is_kept_as_it_was_is_refused() -> None:
    graph = update_graph(UpdateShape(layers=2), EVERYTHING)
    with pytest.raises(PlanError, match=r"vertex 1 \(w0\): is handed out, but vertex \d+ \(update\) overwrites it"):
        make_plan(edited(graph, 1, keep=True), planner="timed")


def test_a_value_that_is_read_after_it_was_overwritten_is_named() -> None:
    graph = update_graph(UpdateShape(layers=2), EVERYTHING)
    layer = next(v for v in graph.vertices if v.op == "layer")
    over = Vertex(1000, VertexKind.KERNEL, 0, "over", ((layer.id, 0),), layer.sizes, 1e-6, inplace=((0, 0),))
    late = Vertex(1001, VertexKind.KERNEL, 0, "late", ((layer.id, 0), (1000, 0)), (256,), 1e-6)
    both = check_taskgraph(replace(graph, vertices=(*graph.vertices, over, late)))
    with pytest.raises(PlanError, match=r"vertex 1000 \(over\): inplace: vertex \d+ \(layer\) is wanted after"):
        make_plan(both, planner="timed")


def test_offloads_that_the_host_has_no_room_for_are_refused() -> None:
    """Activations take the host's bytes; states have homes of their own."""
    shape = UpdateShape(layers=6, weight=MIB // 4, frozen=MIB // 4, activation=4 * MIB, updated=0)
    graph = update_graph(shape, 20 * MIB)
    plan = make_plan(graph, planner="timed", cyclic=True, machine=MACHINE)
    assert plan.host.memory > 0
    enough = replace(graph, spaces=(*graph.devices, plan.host))
    assert make_plan(enough, planner="timed", cyclic=True, machine=MACHINE) == plan
    verify(enough, plan)
    less = replace(graph, spaces=(*graph.devices, replace(plan.host, memory=plan.host.memory - 1)))
    with pytest.raises(PlanError, match=r"host: offloads take \d+ bytes, the graph gives \d+"):
        make_plan(less, planner="timed", cyclic=True, machine=MACHINE)
    with pytest.raises(VerifyError, match=r"the host: the plan counts on \d+ bytes"):
        verify(less, plan)


def test_traits_that_contradict_each_other_are_named_and_all_others_go_through_a_file(tmp_path: Path) -> None:
    graph = update_graph(UpdateShape(layers=1, updated=0), EVERYTHING)
    x, weight = (next(v.id for v in graph.vertices if v.op == name) for name in ("x", "w0"))
    write_taskgraph(replace(graph, vertices=tuple(_named(v, [weight]) for v in graph.vertices)), tmp_path / "g")
    assert [v.id for v in read_taskgraph(tmp_path / "g").vertices if not may_leave(v)] == [weight]
    write_taskgraph(replace(graph, vertices=tuple(_named(v, [x]) for v in graph.vertices)), tmp_path / "g")
    with pytest.raises(GraphFileError, match=rf"vertex {x} \(x\): stays: only a value that lives over steps"):
        read_taskgraph(tmp_path / "g")


def test_contradicting_traits_are_refused_in_memory_too() -> None:
    graph = update_graph(UpdateShape(layers=1), EVERYTHING)
    with pytest.raises(GraphFileError, match=r"vertex 1 \(w0\): arrival: a value that lives from step to step"):
        edited(graph, 1, traits=replace(FROZEN, arrival=Arrival.GATE))
