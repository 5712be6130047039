"""Why a tensor moved: who got its room, when it left, and who needs it next."""

from __future__ import annotations

import dataclasses

import pytest

from disco_accel.graph.carried_values import carried_values
from disco_accel.graph.copies import swaps_in, swaps_out
from disco_accel.graph.files import read_taskgraph
from disco_accel.graph.memgraph import Slot
from disco_accel.graph.taskgraph import Vertex, VertexKind
from disco_accel.graph.traits import HOST_UPDATED
from disco_accel.observe.tensor_moves import _Reason, moved_values
from disco_accel.observe.timeline import stays
from disco_accel.plan import make_plan
from disco_accel.plan.summary import swapped_bytes
from tests.observe import traced_step as small
from tests.observe.traced_step import simulated

MIB = 1 << 20


def moves(plan, events):
    return {moved.value: moved for moved in moved_values(plan, events, stays(plan, events))}


def test_a_weight_of_a_repeating_step_left_in_the_step_before():
    """The loss took half of its place, after its last reader: it is loaded again for the first one."""
    moved = moves(small.plan(), small.events())[small.W1, 0]
    (load,) = moved.loads
    assert (moved.loaded, moved.saved, load.copy) == (512, 0, small.L)
    assert load.reason is _Reason.ROOM and load.room == (((small.LOSS, 0), 256),)
    assert load.left == 5 - 8, "its last reader ended at 5 of 8 seconds, in the step before"
    assert (load.reader, load.needed) == (small.B, 3)


def test_an_activation_whose_place_nobody_took_is_said_to_have_left_for_nothing():
    moved = moves(small.plan(), small.events())[small.A, 0]
    (load,) = moved.loads
    assert (moved.saved, moved.saves) == (256, ((small.SAVE, 256),))
    assert load.reason is _Reason.UNUSED and load.room == ()
    assert (load.left, load.reader, load.needed) == (4, small.C, 6)


def test_an_activation_whose_place_is_taken_names_the_one_that_took_it():
    plan = small.plan()
    plan.slots[small.B, 0] = plan.slots[small.C, 0] = Slot(0, 0)
    events = [dataclasses.replace(e, start=4.5) if e.vertex == small.B else e for e in small.events()]
    events = [dataclasses.replace(e, start=5) if e.vertex == small.BACK else e for e in events]
    (load,) = moves(plan, events)[small.A, 0].loads
    assert load.reason is _Reason.ROOM and load.room == (((small.B, 0), 256),)


def test_a_load_for_the_next_step_is_needed_by_its_first_reader_there():
    plan = small.plan()
    home = small.LOSS + 1
    plan.slots[small.B, 0] = plan.slots[small.C, 0] = Slot(0, 0)
    plan.slots[home, 0] = plan.slots[small.W0, 0]
    back = Vertex(home, VertexKind.COPY, 0, inputs=((small.W0, 0),), sizes=(256,))
    plan = dataclasses.replace(plan, vertices=(*plan.vertices, back))
    (load,) = moves(plan, [*small.events(), small.Event(home, "h2d", 8, 8, 9, 256)])[small.W0, 0].loads
    assert load.reason is _Reason.ROOM and load.room[0] == ((small.B, 0), 256)
    assert (load.left, load.reader, load.needed) == (2, small.A, 9)


def test_a_step_that_does_not_repeat_loads_for_the_first_time_and_the_host_s_changes_are_told():
    once = dataclasses.replace(small.plan(), cyclic=False)
    assert moves(once, small.events())[small.W1, 0].loads[0].reason is _Reason.FIRST
    vertices = [dataclasses.replace(v, traits=HOST_UPDATED) if v.id == small.W1 else v for v in small.plan().vertices]
    updated = dataclasses.replace(small.plan(), vertices=tuple(vertices))
    assert moves(updated, small.events())[small.W1, 0].loads[0].reason is _Reason.UPDATED


@pytest.mark.parametrize("memory", [28 * MIB, 64 * MIB])
def test_sums_are_the_plan_s_and_each_cause_was_there(request, memory):
    graph = read_taskgraph(request.config.rootpath / "tests/data/graphs/lora_small.taskgraph.json")
    plan = make_plan(graph, memory=memory, cyclic=True)
    events = simulated(plan)
    there = stays(plan, events)
    found = moved_values(plan, events, there)
    assert sum(m.loaded for m in found) == swapped_bytes(plan, swaps_in) > 0
    assert sum(m.saved for m in found) == swapped_bytes(plan, swaps_out)
    held = {(carried_values(plan)[stay.ref], stay.device) for stay in there}
    reads = {(v.id, producer) for v in plan.vertices for producer, _ in v.inputs}
    finish = max(e.end for e in events)
    for moved in found:
        for load in moved.loads:
            assert all((ref, 0) in held and ref != moved.value and size > 0 for ref, size in load.room)
            assert load.needed >= finish or (load.reader, load.copy) in reads
    assert any(load.reason is _Reason.ROOM for moved in found for load in moved.loads)
