"""The static judge accepts good plans and notices every planted fault."""

from __future__ import annotations

import functools
import random
from dataclasses import replace
from pathlib import Path

import pytest

from disco_accel.errors import VerifyError
from disco_accel.eviction import belady
from disco_accel.graph.files import read_memgraph, read_taskgraph
from disco_accel.graph.memgraph import MemGraph, Slot
from disco_accel.graph.spaces import Space
from disco_accel.graph.taskgraph import TaskGraph, Vertex, VertexKind
from disco_accel.graph.traits import FROZEN, LATE, LATE_FOREIGN
from disco_accel.graph.values import host_copy_exists
from disco_accel.plan.buildmemgraph.builder import build
from disco_accel.plan.buildmemgraph.residents import Residents
from disco_accel.plan.infeasible import Infeasible
from disco_accel.verify.static import verify
from tests.support.faults.faults import FAULTS
from tests.support.plans.plans import tight_plans

GRAPHS = Path(__file__).parents[1] / "data" / "graphs"


@functools.cache
def plans() -> list[tuple[TaskGraph, MemGraph]]:
    """Good ones."""
    made = tight_plans(250)
    for graph, plan in made:
        verify(graph, plan)
    return made


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_a_planted_fault_is_noticed(name: str) -> None:
    rng = random.Random(7)
    planted = 0
    for graph, plan in plans():
        bad = FAULTS[name](plan, rng)
        if bad is not None and bad != plan:
            planted += 1
            with pytest.raises(VerifyError):
                verify(graph, bad)
    assert planted >= 10, f"{name} applied to {planted} plans only"


def test_a_plan_that_forgets_what_is_kept_is_noticed() -> None:
    caught = 0
    for graph, _ in plans():
        careless = replace(graph, vertices=tuple(replace(v, keep=False) for v in graph.vertices))
        try:
            plan = build(careless, belady)
        except Infeasible:
            continue
        own = {v.id: v for v in graph.vertices}
        plan = replace(plan, vertices=tuple(replace(v, keep=v.id in own and own[v.id].keep) for v in plan.vertices))
        try:
            verify(graph, plan)
        except VerifyError as error:
            caught += "must be kept" in str(error)
    assert caught >= 20


def test_a_cyclic_plan_must_bring_its_residents_back() -> None:
    caught = 0
    for graph, _ in plans():
        everything = tuple(vertex.id for vertex in graph.vertices if host_copy_exists(vertex))
        try:
            plan = build(graph, belady, residents=Residents((), everything))
        except Infeasible:
            continue
        verify(graph, plan)
        try:
            verify(graph, replace(plan, cyclic=True))
        except VerifyError as error:
            caught += "not back" in str(error)
    assert caught >= 10


def chain(**third: object) -> TaskGraph:
    """x -> a -> b, on a device with room for three values of 256 bytes."""
    return TaskGraph(
        "chain",
        (Space(0, 768),),
        (
            Vertex(0, VertexKind.INPUT, 0, "x", sizes=(256,)),
            Vertex(1, VertexKind.KERNEL, 0, "a", ((0, 0),), (256,)),
            replace(Vertex(2, VertexKind.KERNEL, 0, "b", ((1, 0),), (256,)), **third),  # type: ignore[arg-type]
        ),
    )


def plan_of(graph: TaskGraph, *addresses: int) -> MemGraph:
    slots = {(i, 0): Slot(0, address) for i, address in enumerate(addresses)}
    return MemGraph("chain", graph.devices, graph.vertices, slots, ((1, 2),), ())


def test_memory_may_be_reused_once_its_reader_has_finished() -> None:
    verify(chain(), plan_of(chain(), 0, 256, 0))


def test_an_output_may_replace_an_input_only_where_the_graph_allows_it() -> None:
    with pytest.raises(VerifyError, match="may not be written over"):
        verify(chain(), plan_of(chain(), 0, 256, 256))
    allowed = chain(may_inplace=(0,))
    verify(allowed, plan_of(allowed, 0, 256, 256))


def test_an_output_that_must_replace_its_input_does() -> None:
    demanded = chain(inplace=((0, 0),))
    verify(demanded, plan_of(demanded, 0, 256, 256))
    with pytest.raises(VerifyError, match="must be written over"):
        verify(demanded, plan_of(demanded, 0, 256, 512))


def test_after_must_hold() -> None:
    graph = TaskGraph(
        "after",
        (Space(0, 512),),
        (
            Vertex(0, VertexKind.KERNEL, 0, "a", (), (256,)),
            Vertex(1, VertexKind.KERNEL, 0, "b", (), (256,), after=(0,)),
        ),
    )
    slots = {(0, 0): Slot(0, 0), (1, 0): Slot(0, 256)}
    good = MemGraph("after", graph.devices, graph.vertices, slots, ((0, 1),), ())
    verify(graph, good)
    with pytest.raises(VerifyError, match="after"):
        verify(graph, replace(good, data_edges=()))


def gated(keep: bool = False) -> TaskGraph:
    """loss is handed out at the gate; early runs before it if it likes, behind only after."""
    return TaskGraph(
        "gated",
        (Space(0, 512),),
        (
            Vertex(0, VertexKind.INPUT, 0, "tangent", sizes=(256,), traits=LATE_FOREIGN),
            Vertex(1, VertexKind.KERNEL, 0, "loss", (), (256,), out=True, keep=keep),
            Vertex(2, VertexKind.KERNEL, 0, "early", ((1, 0),), (256,)),
            Vertex(3, VertexKind.KERNEL, 0, "behind", ((2, 0), (0, 0)), (256,)),
        ),
    )


def gated_plan(graph: TaskGraph, *addresses: int) -> MemGraph:
    slots = {(i + 1, 0): Slot(0, address) for i, address in enumerate(addresses)}
    return MemGraph("gated", graph.devices, graph.vertices, slots, ((1, 2), (2, 3), (0, 3)), ())


def test_what_is_handed_out_is_safe_until_the_gate_opens() -> None:
    verify(gated(), gated_plan(gated(), 0, 256, 0))
    with pytest.raises(VerifyError, match="must be kept"):
        verify(gated(keep=True), gated_plan(gated(keep=True), 0, 256, 0))
    graph = replace(gated(), vertices=(*gated().vertices, Vertex(4, VertexKind.KERNEL, 0, "c", ((2, 0),), (256,))))
    plan = replace(gated_plan(graph, 0, 256, 0, 0), data_edges=((1, 2), (2, 3), (0, 3), (2, 4)), memory_edges=((4, 3),))
    with pytest.raises(VerifyError, match="before it is handed out"):
        verify(graph, plan)


def test_nothing_handed_out_may_wait_for_the_gate() -> None:
    plan = replace(gated_plan(gated(), 0, 256, 0), data_edges=((1, 2), (2, 3), (0, 3)))
    graph = replace(
        gated(), vertices=(*gated().vertices, Vertex(4, VertexKind.KERNEL, 0, "other loss", (), (0,), out=True))
    )
    waiting = replace(plan, vertices=graph.vertices, memory_edges=((3, 4),))
    with pytest.raises(VerifyError, match="never end"):
        verify(graph, waiting)


def test_a_late_input_keeps_its_place_for_the_whole_step() -> None:
    graph = gated()
    late = replace(graph.vertices[0], traits=LATE)
    graph = replace(graph, spaces=(Space(0, 1024),), vertices=(late, *graph.vertices[1:]))
    plan = gated_plan(graph, 0, 256, 512)
    verify(graph, replace(plan, slots={**plan.slots, (0, 0): Slot(0, 768)}))
    with pytest.raises(VerifyError):
        verify(graph, replace(plan, slots={**plan.slots, (0, 0): Slot(0, 256)}))


def test_the_shared_example_plan_is_good() -> None:
    verify(read_taskgraph(GRAPHS / "intro_n10.taskgraph.json"), read_memgraph(GRAPHS / "intro_n10.memgraph.json"))


def test_a_copy_on_another_device_is_not_read() -> None:
    graph = TaskGraph(
        "two",
        (Space(0, 512), Space(1, 512)),
        (
            Vertex(0, VertexKind.INPUT, 0, "w", sizes=(256,), traits=FROZEN),
            Vertex(1, VertexKind.KERNEL, 0, "a", ((0, 0),), (256,)),
        ),
    )
    for device in (0, 1):
        reload = Vertex(2, VertexKind.COPY, device, "", ((0, 0),), (256,))
        kernel = replace(graph.vertices[1], inputs=((2, 0),))
        slots = {(2, 0): Slot(device, 0), (1, 0): Slot(0, 256)}
        plan = MemGraph("two", graph.devices, (graph.vertices[0], reload, kernel), slots, ((2, 1),), ())
        if device == 0:
            verify(graph, plan)
            continue
        with pytest.raises(VerifyError, match="is on device 1"):
            verify(graph, plan)


def test_a_plan_may_use_less_memory_and_a_coarser_alignment_than_the_graph_has() -> None:
    plan = plan_of(chain(), 0, 256, 0)
    verify(chain(), replace(plan, spaces=(Space(0, 512, 256),)))
    wide = plan_of(chain(), 0, 512, 0)
    verify(replace(chain(), spaces=(Space(0, 768, 64),)), replace(wide, spaces=(Space(0, 768, 512),)))
    for device, message in (
        (Space(0, 769), "counts on 769 bytes"),
        (Space(0, 768, 128), "not a multiple"),
        (Space(0, 768, 384), "not a multiple"),
        (Space(0, 768, 0), "not a multiple"),
        (Space(1, 768), "for spaces 1"),
    ):
        with pytest.raises(VerifyError, match=message):
            verify(chain(), replace(plan, spaces=(device,)))
