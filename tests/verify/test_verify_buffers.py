"""The judge of version-2 plans agrees with that of version 1, and knows values that live over steps and change."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from disco_accel.errors import BudgetTooSmall, GraphFileError, VerifyError
from disco_accel.graph.convert import plan_in_buffers, plan_in_vertices
from disco_accel.graph.convert_graphs import graph_in_values, graph_in_vertices
from disco_accel.graph.schema2 import Buffer, Edge, Graph, Plan, Planned, Space, SpaceKind, Value, Vertex, Work
from disco_accel.graph.schema2_check import check_graph
from disco_accel.graph.taskgraph import TaskGraph
from disco_accel.graph.traits import FOREIGN, STATE, Lifetime
from disco_accel.plan import make_plan
from disco_accel.verify.static import verify
from tests.support.graphs.strategies import Shape, random_taskgraph, with_room
from tests.support.oracles.buffers import verify_buffers
from tests.support.plans.state_plans import state_plans

SHAPES = (
    Shape(vertices=14),
    Shape(vertices=12, gate=False, keep=0.3),
    Shape(vertices=12, inplace=0.3, may_inplace=0.5),
)
SIZE = 256

Change = Callable[[Plan, random.Random], Plan]


def accepted(graph: Graph, plan: Plan) -> bool:
    try:
        verify_buffers(graph, plan)
    except VerifyError:
        return False
    return True


def accepted_1(graph: TaskGraph, plan: Plan) -> bool | None:
    """What the judge of version 1 says; None where version 1 cannot say it."""
    try:
        verify(graph, plan_in_vertices(plan))
    except GraphFileError:
        return None
    except VerifyError:
        return False
    return True


def converted_plans(count: int, seed: int) -> list[tuple[TaskGraph, Graph, Plan]]:
    rng, made = random.Random(seed), []
    while len(made) < count:
        graph = with_room(random_taskgraph(rng, rng.choice(SHAPES)), rng.choice((1.0, 1.2)))
        try:
            second = graph_in_values(graph)
            first = graph_in_vertices(second)
            plan = make_plan(first, planner=rng.choice(("build", "timed")), cyclic=rng.random() < 0.5)
        except (BudgetTooSmall, GraphFileError):
            continue
        made.append((first, second, plan_in_buffers(plan)))
    return made


def converted_state_plans(count: int, seed: int) -> list[tuple[TaskGraph, Graph, Plan]]:
    """Of graphs whose values change over steps, as far as version 2 can say them."""
    made = []
    for graph, plan in state_plans(count, seed):
        with contextlib.suppress(GraphFileError):
            second = graph_in_values(graph)
            made.append((graph_in_vertices(second), second, plan_in_buffers(plan)))
    return made


def drop_edge(plan: Plan, rng: random.Random) -> Plan:
    lost = rng.choice(plan.memory_edges)
    return replace(plan, memory_edges=tuple(edge for edge in plan.memory_edges if edge != lost))


def drop_data_edge(plan: Plan, rng: random.Random) -> Plan:
    lost = rng.choice(plan.data_edges)
    return replace(plan, data_edges=tuple(edge for edge in plan.data_edges if edge != lost))


def move_buffer(plan: Plan, rng: random.Random) -> Plan:
    moved = rng.choice([buffer for buffer in plan.buffers if buffer.offset is not None])
    offset = rng.choice([b.offset for b in plan.buffers if b.offset is not None and b.space == moved.space])
    return changed(plan, moved, replace(moved, offset=offset))


def shift_buffer(plan: Plan, rng: random.Random) -> Plan:
    moved = rng.choice([buffer for buffer in plan.buffers if buffer.offset is not None])
    return changed(plan, moved, replace(moved, offset=moved.offset + rng.choice((1, 256, -256, 1 << 20))))


def read_another(plan: Plan, rng: random.Random) -> Plan:
    readers = [planned for planned in plan.order if planned.reads]
    reader = rng.choice(readers)
    at = rng.randrange(len(reader.reads))
    reads = (*reader.reads[:at], rng.choice(plan.buffers).id, *reader.reads[at + 1 :])
    return replace(plan, order=tuple(replace(p, reads=reads) if p is reader else p for p in plan.order))


def lose_an_entry(plan: Plan, rng: random.Random) -> Plan:
    lost = rng.choice(plan.order)
    edges = [tuple(e for e in edges if lost.id not in e) for edges in (plan.data_edges, plan.memory_edges)]
    order = tuple(planned for planned in plan.order if planned is not lost)
    return replace(plan, order=order, data_edges=edges[0], memory_edges=edges[1])


def write_another_home(plan: Plan, rng: random.Random) -> Plan:
    """A copy to the host goes to a home instead, or to one of another version."""
    devices = {space.id for space in plan.graph.spaces if space.kind is SpaceKind.DEVICE}
    written = {number for planned in plan.order for number in planned.writes}
    to = rng.choice([buffer for buffer in plan.buffers if buffer.id in written and buffer.space not in devices])
    other = rng.choice([buffer for buffer in plan.buffers if buffer.space not in devices])
    return changed(plan, to, replace(to, version=other.version, offset=other.offset))


def copy_home_again(plan: Plan, rng: random.Random) -> Plan:
    """One more copy of what is on a device to its home, after some of the others and before the rest."""
    values = plan.graph.value
    sources = [b for b in plan.buffers if b.offset is not None and b.space == values[b.version[0]].space]
    source = rng.choice([b for b in sources if values[b.version[0]].traits.lifetime is Lifetime.STEPS])
    home = values[source.version[0]].home
    assert home is not None
    buffer = Buffer(1 + max(b.id for b in plan.buffers), source.version, home)
    number, at = 1 + max(p.id for p in plan.order), rng.randrange(len(plan.order) + 1)
    before = [(p.id, number) for p in plan.order[:at]]
    data = [(p.id, number) for p in plan.order if source.id in p.writes]
    then = [(number, p.id) for p in plan.order[at:]]
    copy = Planned(number, (source.id,), (buffer.id,))
    return replace(
        plan,
        buffers=(*plan.buffers, buffer),
        order=(*plan.order[:at], copy, *plan.order[at:]),
        data_edges=(*plan.data_edges, *data),
        memory_edges=(*plan.memory_edges, *before, *then),
    )


def more_memory(plan: Plan, rng: random.Random) -> Plan:
    spaces = tuple(replace(s, bytes=(s.bytes or 0) + 256) for s in plan.graph.spaces)
    return replace(plan, graph=replace(plan.graph, spaces=spaces))


def changed(plan: Plan, old: Buffer, new: Buffer) -> Plan:
    return replace(plan, buffers=tuple(new if buffer is old else buffer for buffer in plan.buffers))


CHANGES = (drop_edge, drop_data_edge, move_buffer, shift_buffer, read_another, lose_an_entry, more_memory)
OF_STATES = (write_another_home, copy_home_again)


@pytest.mark.parametrize(
    ("plans", "changes"),
    [(converted_plans, CHANGES), (converted_state_plans, (*CHANGES, *OF_STATES, *OF_STATES))],
    ids=["brought or frozen", "changing over steps"],
)
def test_both_judges_agree_on_good_plans_and_on_changed_ones(
    plans: Callable[[int, int], list[tuple[TaskGraph, Graph, Plan]]], changes: Sequence[Change]
) -> None:
    rng, refused, agreed = random.Random(5), Counter[str](), 0
    for first, second, plan in plans(40, 1):
        verify_buffers(second, plan)
        for _ in range(12):
            change = rng.choice(changes)
            try:
                spoilt = change(plan, rng)
            except IndexError:
                continue
            answer, expected = accepted(second, spoilt), accepted_1(first, spoilt)
            refused[change.__name__] += not answer
            if expected is not None:
                agreed += 1
                assert answer == expected, (change.__name__, expected)
    assert agreed > 250 and all(refused[change.__name__] for change in changes), refused


def updating(layers: int, memory: int) -> Graph:
    """A chain of ``layers``: y = w x forwards, then from the last layer to the first w' = u(w, y) and g' = b(g, w)."""
    values = [Value(0, SIZE, 0, FOREIGN, None, "x")]
    weights = range(1, 1 + layers)
    values += [Value(w, SIZE, 0, STATE, 1, f"w{w}") for w in weights]
    results = range(1 + layers, 1 + 2 * layers)
    values += [Value(y, SIZE, 0) for y in results]
    vertices, source = [], 0
    for number, (w, y) in enumerate(zip(weights, results, strict=True)):
        vertices.append(Vertex(number, Work.KERNEL, 0, "mm", ((w, 0), (source, 0)), ((y, 0),), 1.0))
        source = y
    for number, (w, y) in enumerate(zip(reversed(weights), reversed(results), strict=True), start=layers):
        vertices.append(Vertex(number, Work.KERNEL, 0, "update", ((w, 0), (y, 0)), ((w, 1),), 1.0))
    spaces = (Space(0, SpaceKind.DEVICE, memory), Space(1, SpaceKind.HOST))
    return check_graph(Graph("updating", spaces, tuple(values), tuple(vertices), at_end=((results[-1], 0),)))


class Maker:
    """A plan by hand, one vertex or copy after the other, each waiting for all before it: chains have no races."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.buffers: list[Buffer] = []
        self.order: list[Planned] = []
        self.data: list[Edge] = []
        self.memory: list[Edge] = []
        self.made_by: dict[int, int] = {}

    def buffer(self, version: tuple[int, int], space: int, offset: int | None) -> int:
        self.buffers.append(Buffer(len(self.buffers), version, space, offset))
        return len(self.buffers) - 1

    def run(self, number: int, reads: tuple[int, ...], writes: tuple[int, ...]) -> None:
        self.data += [(self.made_by[each], number) for each in dict.fromkeys(reads) if each in self.made_by]
        if self.order:
            self.memory.append((self.order[-1].id, number))
        self.order.append(Planned(number, reads, writes))
        self.made_by.update(dict.fromkeys(writes, number))

    def plan(self, cyclic: bool = True) -> Plan:
        data = tuple(dict.fromkeys(self.data))
        return Plan(self.graph, tuple(self.buffers), tuple(self.order), data, tuple(self.memory), cyclic)


def streamed(graph: Graph, layers: int, resident: int = 0) -> Plan:
    """The first ``resident`` weights stay on the device; each other is loaded for its use and for its update, and
    written back to its home after that. Copies have ids from 100 on."""
    make, fresh = Maker(graph), iter(range(100, 1000))
    x = make.buffer((0, 0), 0, None)
    stay = {w: make.buffer((w, 0), 0, (w - 1) * SIZE) for w in range(1, 1 + resident)}
    homes = {w: make.buffer((w, 0), 1, None) for w in range(1 + resident, 1 + layers)}
    ring, results = resident * SIZE, {}

    def load(w: int) -> int:
        if w in stay:
            return stay[w]
        loaded = make.buffer((w, 0), 0, ring)
        make.run(next(fresh), (homes[w],), (loaded,))
        return loaded

    for number in range(layers):
        y = 1 + layers + number
        results[y] = make.buffer((y, 0), 0, ring + (1 + number) * SIZE)
        source = results[y - 1] if number else x
        make.run(number, (load(number + 1), source), (results[y],))
    for number, w in enumerate(range(layers, 0, -1), start=layers):
        old = load(w)
        new = make.buffer((w, 1), 0, make.buffers[old].offset)
        make.run(number, (old, results[layers + w]), (new,))
        if w not in stay:
            make.run(next(fresh), (new,), (make.buffer((w, 1), 1, None),))
    return make.plan()


@pytest.mark.parametrize("resident", [0, 1, 3])
def test_changed_weights_are_written_back_or_stay(resident: int) -> None:
    graph = updating(3, (4 + resident) * SIZE)
    verify_buffers(graph, streamed(graph, 3, resident))


def without(plan: Plan, number: int) -> Plan:
    """``plan`` without one copy, whose neighbors in the chain wait for each other."""
    at = next(i for i, planned in enumerate(plan.order) if planned.id == number)
    memory = [edge for edge in plan.memory_edges if number not in edge]
    if 0 < at < len(plan.order) - 1:
        memory.append((plan.order[at - 1].id, plan.order[at + 1].id))
    data = tuple(edge for edge in plan.data_edges if number not in edge)
    lost = plan.order[at].writes
    order = tuple(planned for planned in plan.order if planned.id != number)
    buffers = tuple(buffer for buffer in plan.buffers if buffer.id not in lost)
    return replace(plan, order=order, buffers=buffers, data_edges=data, memory_edges=tuple(memory))


def last_copy(plan: Plan) -> int:
    return max(planned.id for planned in plan.order)


def reuse_before_written_back(plan: Plan) -> Plan:
    """The load into the ring does not wait for the write-back of what was there."""
    back = next(p for p in plan.order if p.id >= 100 and plan.buffers[p.writes[0]].version[1])
    return replace(plan, memory_edges=tuple(edge for edge in plan.memory_edges if edge[0] != back.id))


def elsewhere_than_read(plan: Plan) -> Plan:
    new = next(b for b in plan.buffers if b.version[1] and b.offset is not None)
    return changed(plan, new, replace(new, offset=new.offset + SIZE))


def updated_elsewhere(plan: Plan) -> Plan:
    """The resident weight is copied within the device before its update, and changed there."""
    old, new = (next(b for b in plan.buffers if b.version == (1, k)) for k in (0, 1))
    update = next(planned for planned in plan.order if new.id in planned.writes)
    at = plan.order.index(update)
    moved, copy = Buffer(900, (1, 0), 0, 8 * SIZE), Planned(900, (old.id,), (900,))
    changed_update = replace(update, reads=tuple(900 if each == old.id else each for each in update.reads))
    plan = changed(plan, new, replace(new, offset=8 * SIZE))
    return replace(
        plan,
        buffers=(*plan.buffers, moved),
        order=(*plan.order[:at], copy, changed_update, *plan.order[at + 1 :]),
        data_edges=(*plan.data_edges, (900, update.id)),
    )


def another_home(plan: Plan) -> Plan:
    back = plan.buffers[-1]
    return changed(plan, back, replace(back, version=(back.version[0] + 1, 1)))


LASTING: dict[str, tuple[int, Callable[[Plan], Plan]]] = {
    "its home does not have its last version": (0, lambda plan: without(plan, last_copy(plan))),
    "must copy one buffer to another of the same version": (0, another_home),
    "need not finish before .* starts: buffers .* share memory": (0, reuse_before_written_back),
    "changes value 3 in place, but buffer .* is elsewhere": (0, elsewhere_than_read),
    "value 1 is resident but not back in its place": (1, updated_elsewhere),
}


@pytest.mark.parametrize("message", LASTING)
def test_faults_of_values_that_live_over_steps_are_named(message: str) -> None:
    resident, spoil = LASTING[message]
    graph = updating(3, 16 * SIZE)
    plan = streamed(graph, 3, resident)
    verify_buffers(graph, plan)
    with pytest.raises(VerifyError, match=message):
        verify_buffers(graph, spoil(plan))


def test_a_plan_that_runs_once_writes_back_what_it_keeps() -> None:
    """The next step of a repeating plan finds the weight on the device; after one step only its home is looked at."""
    graph = updating(2, 16 * SIZE)
    plan = streamed(graph, 2, 2)
    verify_buffers(graph, plan)
    with pytest.raises(VerifyError, match="its home does not have its last version"):
        verify_buffers(graph, replace(plan, cyclic=False))
