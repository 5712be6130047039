"""A traced step turns into the right intervals, sums and trace rows."""

from __future__ import annotations

import json

import pytest

from disco_accel.memgraph import Slot
from disco_accel.observe.timeline import (
    Content,
    chrome_trace,
    contents,
    lane_order,
    occupancy,
    stays,
    write_chrome_trace,
)
from tests.observe import traced_step as small


def at(used, time, content=None):
    column = used.total if content is None else used.held[content]
    return max((t, column[i]) for i, t in enumerate(used.times) if t <= time)[1]


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
    plan.slots[small.LOSS, 0] = Slot(0, 0, 256)
    by_ref = {s.ref: s for s in stays(plan, small.events())}
    assert by_ref[small.W0, 0].end == 2


def test_bytes_in_use_are_summed_per_content_and_in_place_results_count_once():
    used = occupancy(small.plan(), small.events())
    assert at(used, 0) == 256 + 256 + 512
    assert at(used, 3.5) == 256 + 256 + 512 + 512
    assert at(used, 6.5) == 256 + 512 + 256, "c lies on b"
    assert at(used, 7.5, Content.KEPT) == 256
    assert at(used, 7.5, Content.STREAMED) == 0
    assert used.total[-1] == 0


def test_an_empty_trace_gives_an_empty_timeline():
    assert occupancy(small.plan(), []).times in ((), (0.0,))
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
