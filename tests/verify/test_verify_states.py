"""Values that live over steps and change: every judge accepts good plans of them, and notices each planted fault."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from disco_accel.errors import GraphFileError, Stalled, VerifyError
from disco_accel.graph.check import check_taskgraph
from disco_accel.graph.memgraph import MemGraph, Slot
from disco_accel.graph.order import data_edges
from disco_accel.graph.spaces import HOST, Space
from disco_accel.graph.taskgraph import Ref, TaskGraph, Vertex, VertexKind
from disco_accel.graph.traits import LATE, PER_STEP, STATE
from disco_accel.verify.static import verify
from tests.support.faults.state_faults import STATE_FAULTS, STATE_RUN_FAULTS
from tests.support.oracles.adversary import run_reference
from tests.support.oracles.naive_judge import is_safe
from tests.support.plans.state_plans import state_plans, timed_state_plans


@functools.cache
def plans() -> list[tuple[TaskGraph, MemGraph]]:
    return [*state_plans(300), *timed_state_plans(80)]


SIZE = 256
INPUT, KERNEL = VertexKind.INPUT, VertexKind.KERNEL


def refused_by_adversary(graph: TaskGraph, plan: MemGraph, orders: int) -> bool:
    try:
        for seed in range(orders):
            run_reference(graph, plan, seed)
    except (VerifyError, Stalled):
        return True
    return False


def test_every_judge_accepts_good_plans() -> None:
    for graph, plan in plans():
        verify(graph, plan)
        assert is_safe(graph, plan)
        assert not refused_by_adversary(graph, plan, 5)


@pytest.mark.parametrize("name", sorted(STATE_FAULTS))
def test_every_judge_notices_a_planted_fault(name: str) -> None:
    """The adversary, which draws orders by lot, most of those that an execution can show."""
    rng, planted, shown = random.Random(5), 0, 0
    for graph, plan in plans():
        bad = STATE_FAULTS[name](plan, rng)
        if bad is None:
            continue
        planted += 1
        with pytest.raises(VerifyError):
            verify(graph, bad)
        assert not is_safe(graph, bad)
        shown += name in STATE_RUN_FAULTS and refused_by_adversary(graph, bad, 20)
    assert planted >= 8
    assert shown > 0.6 * planted or name not in STATE_RUN_FAULTS


class Maker:
    """A plan by hand, one vertex or copy after the other, each waiting for all before it."""

    def __init__(self, graph: TaskGraph, resident: int | None = None) -> None:
        self.graph = graph
        self.vertices = [v for v in graph.vertices if v.kind is INPUT]
        self.slots = {} if resident is None else {(0, 0): Slot(0, resident)}
        self.fresh = 100

    def run(self, number: int, inputs: tuple[Ref, ...], *offsets: int) -> None:
        vertex = next(v for v in self.graph.vertices if v.id == number)
        self.vertices.append(replace(vertex, inputs=inputs))
        self.slots |= {(number, k): Slot(0, offset) for k, offset in enumerate(offsets)}

    def offload(self, source: Ref) -> Ref:
        return self._copy(0, HOST, "offload", source)

    def reload(self, source: Ref, offset: int) -> Ref:
        copy = self._copy(HOST, 0, "reload", source)
        self.slots[copy] = Slot(0, offset)
        return copy

    def _copy(self, source: int, target: int, op: str, ref: Ref) -> Ref:
        self.vertices.append(Vertex(self.fresh, VertexKind.COPY, target, op, (ref,), (SIZE,), source=source))
        self.fresh += 1
        return self.fresh - 1, 0

    def plan(self, cyclic: bool = True) -> MemGraph:
        vertices = tuple(self.vertices)
        done = [v.id for v in vertices if v.kind is not INPUT]
        chain = tuple(itertools.pairwise(done))
        return MemGraph("", self.graph.devices, vertices, self.slots, data_edges(vertices), chain, cyclic)


def twice(**changes: bool) -> TaskGraph:
    """w, of which k1 makes the next version, and k2, which reads k1's other result too, the last."""
    vertices = (
        Vertex(0, INPUT, 0, "w", sizes=(SIZE,), traits=STATE, keep=changes.get("keep_first", False)),
        Vertex(1, KERNEL, 0, "k1", ((0, 0),), (SIZE, SIZE), inplace=((1, 0),)),
        Vertex(2, KERNEL, 0, "k2", ((1, 0), (1, 1)), (SIZE,), inplace=((0, 1),), keep=changes.get("keep", False)),
    )
    return check_taskgraph(TaskGraph("twice", (Space(0, 4 * SIZE),), vertices))


def resident() -> Maker:
    make = Maker(twice(), 0)
    make.run(1, ((0, 0),), SIZE, 0)
    make.run(2, ((1, 0), (1, 1)), 0)
    return make


def streamed(graph: TaskGraph | None = None) -> Maker:
    """Loaded, changed, written back, loaded elsewhere, changed again and written back."""
    make = Maker(graph or twice())
    make.run(1, (make.reload((0, 0), 0),), SIZE, 0)
    loaded = make.reload(make.offload((1, 1)), 2 * SIZE)
    make.run(2, ((1, 0), loaded), 2 * SIZE)
    make.offload((2, 0))
    return make


def moved_while_resident() -> Maker:
    """Changed in its place, written home and loaded elsewhere, changed there, written home and loaded back."""
    make = Maker(twice(), 0)
    make.run(1, ((0, 0),), SIZE, 0)
    loaded = make.reload(make.offload((1, 1)), 2 * SIZE)
    make.run(2, ((1, 0), loaded), 2 * SIZE)
    make.reload(make.offload((2, 0)), 0)
    return make


def read_at_home_too() -> Maker:
    """Resident, and loaded from home for the change, which goes home as well."""
    make = Maker(twice(), 0)
    make.run(1, (make.reload((0, 0), 2 * SIZE),), SIZE, 2 * SIZE)
    make.run(2, ((1, 0), (1, 1)), 2 * SIZE)
    make.reload(make.offload((2, 0)), 0)
    return make


HAND_MADE: dict[str, tuple[Callable[[], Maker], bool]] = {
    "resident, never written back": (resident, True),
    "not resident, written back twice": (streamed, True),
    "one step, written back": (streamed, False),
    "resident, and somewhere else between": (moved_while_resident, True),
    "resident, and read at home too": (read_at_home_too, True),
}


def judged(graph: TaskGraph, plan: MemGraph) -> str:
    """The static judge's message, "" if it accepts; the other judges must agree."""
    message = ""
    try:
        verify(graph, plan)
    except VerifyError as error:
        message = str(error)
    assert is_safe(graph, plan) == (not message), message
    assert refused_by_adversary(graph, plan, 20) == bool(message)
    return message


@pytest.mark.parametrize("how", HAND_MADE)
def test_hand_made_plans_are_good(how: str) -> None:
    make, cyclic = HAND_MADE[how]
    assert not judged(twice(), make().plan(cyclic))


def without_last(make: Maker) -> Maker:
    lost = make.vertices.pop()
    make.slots.pop((lost.id, 0), None)
    return make


def home_left_alone() -> Maker:
    make = read_at_home_too()
    without_last(without_last(make))
    return make


HAND_SPOILT: dict[str, tuple[Callable[[], Maker], bool, str]] = {
    "one step, resident": (resident, False, r"vertex 0 \(w\) is changed, and its home does not have its last version"),
    "not written back": (lambda: without_last(streamed()), True, "its home does not have its last version"),
    "not loaded back": (lambda: without_last(moved_while_resident()), True, "is resident but not back"),
    "neither home nor back": (home_left_alone, True, "its home does not have its last version"),
}


@pytest.mark.parametrize("how", HAND_SPOILT)
def test_what_is_wrong_with_a_hand_made_plan_is_named(how: str) -> None:
    make, cyclic, message = HAND_SPOILT[how]
    with pytest.raises(VerifyError, match=message):
        verify(twice(), make().plan(cyclic))
    assert judged(twice(), make().plan(cyclic))


def test_a_home_is_written_only_when_what_it_held_was_read() -> None:
    make = Maker(twice())
    make.run(1, (make.reload((0, 0), 0),), SIZE, 0)
    late = make.reload((0, 0), 3 * SIZE)
    make.run(2, ((1, 0), (1, 1)), 0)
    back = make.offload((2, 0))
    plan = make.plan()
    assert not judged(twice(), plan)
    racing = replace(plan, memory_edges=tuple(edge for edge in plan.memory_edges if late[0] not in edge))
    names = rf"vertex {late[0]} \(reload\) need not finish before vertex {back[0]} \(offload\) starts: "
    with pytest.raises(VerifyError, match=names + r".* share the home of vertex 0 \(w\)"):
        verify(twice(), racing)
    assert judged(twice(), racing)


def test_versions_that_are_kept_have_a_copy_when_the_step_ends() -> None:
    last = twice(keep=True)
    assert not judged(last, streamed(last).plan())
    first = twice(keep_first=True)
    assert "must be kept" in judged(first, streamed(first).plan())
    make = Maker(first, 0)
    make.reload((0, 0), 3 * SIZE)
    make.run(1, ((0, 0),), SIZE, 0)
    make.run(2, ((1, 0), (1, 1)), 0)
    make.offload((2, 0))
    assert not judged(first, make.plan())


def test_what_is_handed_out_at_the_gate_is_at_home_until_then() -> None:
    """w itself is handed out at the gate and only at home; a change of it may go home when the gate is open."""
    vertices = (
        Vertex(0, INPUT, 0, "w", sizes=(SIZE,), traits=STATE, out=True),
        Vertex(1, KERNEL, 0, "k1", ((0, 0),), (SIZE,), inplace=((0, 0),)),
        Vertex(2, INPUT, 0, "t", sizes=(SIZE,), traits=LATE),
        Vertex(3, KERNEL, 0, "after", ((2, 0),), (SIZE,)),
    )
    graph = check_taskgraph(TaskGraph("gated", (Space(0, 4 * SIZE),), vertices))
    make = Maker(graph)
    make.slots[2, 0] = Slot(0, 3 * SIZE)
    make.run(1, (make.reload((0, 0), 0),), 0)
    early = make.offload((1, 0))
    make.run(3, ((2, 0),), SIZE)
    plan = make.plan()
    with pytest.raises(VerifyError, match=r"overwrites vertex 0 \(w\) before it is handed out"):
        verify(graph, plan)
    assert not is_safe(graph, plan)
    late = replace(plan, memory_edges=((100, 1), (1, 3), (3, early[0])))
    verify(graph, late)
    assert is_safe(graph, late)


def test_versions_form_one_chain_of_equal_sizes() -> None:
    graph = twice()
    w, k1, k2 = graph.vertices
    for vertices, message in (
        ((w, k1, replace(k2, inputs=((1, 0), (0, 0)))), r"vertex 2 \(k2\): inplace: vertex 1 writes over the same"),
        (
            (w, replace(k1, sizes=(SIZE, 9)), replace(k2, sizes=(9,))),
            r"vertex 1 \(k1\): inplace: output 1 is a version of vertex 0",
        ),
    ):
        with pytest.raises(GraphFileError, match=message):
            check_taskgraph(replace(graph, vertices=vertices))
    brought = replace(w, traits=PER_STEP)
    check_taskgraph(replace(graph, vertices=(brought, k1, replace(k2, inputs=((1, 0), (0, 0))))))
    check_taskgraph(replace(graph, vertices=(replace(w, keep=True, out=True), k1, k2)))
