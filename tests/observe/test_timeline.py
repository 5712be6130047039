"""A traced step turns into the right intervals, sums and trace rows."""

from __future__ import annotations

import dataclasses
import json

import pytest

from disco_accel.errors import BudgetTooSmall
from disco_accel.graph.files import read_taskgraph
from disco_accel.graph.memgraph import Slot
from disco_accel.graph.spaces import HOST
from disco_accel.graph.taskgraph import Vertex, VertexKind
from disco_accel.graph.values import host_copy_exists
from disco_accel.observe.timeline import (
    Content,
    chrome_trace,
    contents,
    lane_order,
    occupancy,
    stays,
    write_chrome_trace,
)
from disco_accel.plan import make_plan
from disco_accel.plan.summary import staying_bytes
from disco_accel.simulate.machine import Machine
from disco_accel.verify.static import verify
from tests.observe import traced_step as small


def total(held):
    return [sum(parts) for parts in zip(*held.values(), strict=True)]


def at(used, time, content=None):
    times, held = used
    column = total(held) if content is None else held[content]
    return max((t, column[i]) for i, t in enumerate(times) if t <= time)[1]


def test_each_value_is_named_by_what_it_holds():
    found = contents(small.plan())
    assert found[small.W0, 0] is Content.RESIDENT
    assert found[small.L, 0] is Content.STREAMED
    assert found[small.BACK, 0] is Content.ACTIVATION, "a reload of an offload is not a weight"
    assert found[small.LOSS, 0] is Content.KEPT


def test_a_value_stays_from_its_producer_to_its_last_reader_offloads_included():
    by_ref = {s.ref: s for s in stays(small.plan(), small.events())}
    assert (by_ref[small.A, 0].start, by_ref[small.A, 0].end) == (0, 4)
    assert (by_ref[small.L, 0].start, by_ref[small.L, 0].end) == (0, 5)
    assert (by_ref[small.BACK, 0].start, by_ref[small.BACK, 0].end) == (4, 7)


def test_residents_and_kept_values_stay_to_the_end_of_the_step():
    by_ref = {s.ref: s for s in stays(small.plan(), small.events())}
    assert by_ref[small.W0, 0].end == 8
    assert by_ref[small.LOSS, 0].end == 8


def test_a_resident_that_is_overwritten_leaves_after_its_last_reader():
    plan = small.plan()
    plan.slots[small.LOSS, 0] = Slot(0, 0)
    by_ref = {s.ref: s for s in stays(plan, small.events())}
    assert by_ref[small.W0, 0].end == 2


def going_home():
    """w0 makes room for b and is loaded again at the end, for the next step."""
    plan = small.plan()
    home = small.LOSS + 1
    plan.slots[small.B, 0] = Slot(0, 0)
    plan.slots[small.C, 0] = Slot(0, 0)
    plan.slots[home, 0] = plan.slots[small.W0, 0]
    back = Vertex(home, VertexKind.COPY, 0, inputs=((small.W0, 0),), sizes=(256,))
    plan = dataclasses.replace(plan, vertices=(*plan.vertices, back))
    return plan, [*small.events(), small.Event(home, "h2d", 8, 8, 9, 256)], home


def test_a_resident_that_leaves_and_comes_home_does_not_stay_meanwhile():
    plan, events, home = going_home()
    by_ref = {s.ref: s for s in stays(plan, events)}
    assert by_ref[small.W0, 0].end == 2
    assert (by_ref[home, 0].start, by_ref[home, 0].end) == (8, 9)


def test_a_weight_that_makes_room_during_the_step_is_not_drawn_as_one_that_stays():
    """Only those that never leave are: what is drawn as staying is constant, and is what the report counts."""
    plan, events, home = going_home()
    assert staying_bytes(small.plan()) == 256 and staying_bytes(plan) == 0
    assert contents(plan)[small.W0, 0] is contents(plan)[home, 0] is Content.STREAMED
    assert set(occupancy(plan, events)[1][Content.RESIDENT]) == {0}


@pytest.mark.parametrize("name", ["lora_small", "chain8"])
def test_a_repeating_step_ends_with_the_weights_that_it_began_with(request, name):
    """Each lies where the next step expects it until the step's end, also one that was loaded and read in this step."""
    graph = read_taskgraph(request.config.rootpath / "tests" / "data" / "graphs" / f"{name}.taskgraph.json")
    with pytest.raises(BudgetTooSmall) as too_small:
        make_plan(graph, memory=1, cyclic=True)
    plan = make_plan(graph, memory=2 * too_small.value.needed, planner="build", cyclic=True)
    events = serial_run(plan)
    finish = max(e.end for e in events)
    at_the_end = {(s.addr, s.size) for s in stays(plan, events) if s.end == finish}
    residents = [v for v in plan.vertices if host_copy_exists(v) and (v.id, 0) in plan.slots and not v.inputs]
    assert residents and {(plan.slots[v.id, 0].offset, v.sizes[0]) for v in residents} <= at_the_end


@pytest.mark.parametrize("room", [1.2, 2.0, 4.0])
@pytest.mark.parametrize("planner", ["timed", "build"])
def test_what_is_drawn_as_staying_stays(request, planner, room):
    """From the start of the step to its end, as many bytes as the report names."""
    graph = read_taskgraph(request.config.rootpath / "tests" / "data" / "graphs" / "chain8.taskgraph.json")
    with pytest.raises(BudgetTooSmall) as too_small:
        make_plan(graph, memory=1, cyclic=True)
    plan = make_plan(graph, memory=int(room * too_small.value.needed), planner=planner, cyclic=True)
    _, held = occupancy(plan, serial_run(plan))
    assert set(held[Content.RESIDENT][:-1]) == {staying_bytes(plan)}


def serial_run(plan):
    """Events of a run that takes one second for each vertex, in serial order."""
    run = [v for v in plan.vertices if v.kind is not VertexKind.INPUT]
    lanes = Machine().lanes(plan.spaces)
    return [small.Event(v.id, lanes.name(v), i, i, i + 1) for i, v in enumerate(run)]


@pytest.mark.parametrize("room", [1.0, 1.3, 2.0, 3.0])
@pytest.mark.parametrize("name", ["lora_small", "chain8"])
def test_a_verified_plan_is_never_drawn_above_its_arena(request, name, room):
    graph = read_taskgraph(request.config.rootpath / "tests" / "data" / "graphs" / f"{name}.taskgraph.json")
    with pytest.raises(BudgetTooSmall) as too_small:
        make_plan(graph, memory=1, cyclic=True)
    memory = int(room * too_small.value.needed)
    plan = make_plan(graph, memory=memory, cyclic=True)
    verify(graph, plan)
    _, held = occupancy(plan, serial_run(plan))
    size = {(v.id, k): each for v in plan.vertices for k, each in enumerate(v.sizes)}
    top = max(slot.offset + size[ref] for ref, slot in plan.slots.items() if slot.space != HOST)
    assert 0 < max(total(held)) <= top <= memory


def test_bytes_in_use_are_summed_per_content_and_in_place_results_count_once():
    used = occupancy(small.plan(), small.events())
    assert at(used, 0) == 256 + 256 + 512
    assert at(used, 3.5) == 256 + 256 + 512 + 512
    assert at(used, 6.5) == 256 + 512 + 256, "c lies on b"
    assert at(used, 7.5, Content.KEPT) == 256
    assert at(used, 7.5, Content.STREAMED) == 0
    assert total(used[1])[-1] == 0


def test_an_empty_trace_gives_an_empty_timeline():
    assert occupancy(small.plan(), [])[0] in ([], [0.0])
    assert chrome_trace(small.plan(), [])["traceEvents"]


def test_lanes_are_read_compute_first():
    assert lane_order(small.events()) == ["compute0", "h2d", "d2h"]


def test_the_chrome_trace_has_every_event_once_on_its_lane_in_microseconds():
    rows = chrome_trace(small.plan(), small.events())["traceEvents"]
    complete = {r["args"]["vertex"]: r for r in rows if r["ph"] == "X"}
    assert len(complete) == len(small.events())
    threads = {r["tid"]: r["args"]["name"] for r in rows if r["ph"] == "M" and r["name"] == "thread_name"}
    for event in small.events():
        row = complete[event.vertex]
        assert threads[row["tid"]] == event.lane
        assert row["ts"] == pytest.approx(event.start * 1e6)
        assert row["dur"] == pytest.approx((event.end - event.start) * 1e6)
    assert complete[small.BACK]["name"] == "reload aten::mm", "a copy is named by what it copies"
    assert complete[small.L]["name"] == "reload w1"


def test_arrows_lead_from_each_reload_to_its_first_reader():
    rows = chrome_trace(small.plan(), small.events())["traceEvents"]
    ends = {r["id"]: r["ts"] for r in rows if r["ph"] == "f"}
    assert ends == {small.L: 3e6, small.BACK: 6e6}


def test_the_file_is_json_and_nothing_else_is_left(tmp_path):
    path = tmp_path / "sub" / "trace.json"
    write_chrome_trace(path, small.plan(), small.events())
    assert json.loads(path.read_text())["traceEvents"]
    assert [p.name for p in path.parent.iterdir()] == ["trace.json"]
