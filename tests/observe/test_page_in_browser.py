"""The page of a step in a headless Chromium: drawn without a complaint, and it answers pointer and keys."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from disco_accel.graph.copies import swaps_in
from disco_accel.graph.files import read_taskgraph
from disco_accel.graph.taskgraph import VertexKind
from disco_accel.observe.report import write_report
from disco_accel.observe.step_facts import _StepFacts
from disco_accel.plan import make_plan
from disco_accel.plan.summary import swapped_bytes
from disco_accel.sizes import format_size
from tests.observe.test_step_folder import STATS
from tests.observe.traced_step import simulated
from tests.support.browser import ABSENT, Tab, chromium, opened

MIB = 1 << 20
EVIL = "</script><b>bad</b>"


def write_page(folder: Path, graphs: Path) -> tuple[Path, int]:
    """The page of a simulated LoRA step with modules, one of a hostile name, and the bytes that the plan loads."""
    plan = make_plan(read_taskgraph(graphs / "lora_small.taskgraph.json"), memory=64 * MIB, cyclic=True)
    plan = dataclasses.replace(plan, name=EVIL)
    kernels = [vertex for vertex in plan.vertices if vertex.kind is VertexKind.KERNEL]
    modules = {v.id: "model.layers." + ".".join(v.op.removeprefix("L").split(".")[:2]) for v in kernels}
    modules[kernels[0].id] = EVIL
    names = {v.id: f"model.{v.op}.weight" for v in plan.vertices if v.kind is VertexKind.INPUT}
    stats = {**STATS, "budget": {**STATS["budget"], "total": 70 * MIB, "arena": 64 * MIB}}
    write_report(folder, plan, simulated(plan), stats, facts=_StepFacts(names, modules))
    return folder / "report.html", swapped_bytes(plan, swaps_in)


def shown(tab: Tab) -> tuple[float, float]:
    return tuple(tab.value("[page.view.from, page.view.to]"))


def ink(tab: Tab, canvas: str) -> int:
    """How many colours a canvas has."""
    return tab.value(
        f"(() => {{ const c = document.querySelector({canvas!r}); const d = c.getContext('2d')"
        ".getImageData(0, 0, c.width, c.height).data; const s = new Set();"
        "for (let k = 0; k < d.length; k += 4) s.add((d[k] << 16) + (d[k + 1] << 8) + d[k + 2]); return s.size })()"
    )


@pytest.mark.skipif(chromium() is None, reason=ABSENT)
def test_a_page_is_drawn_and_answers(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    path, loaded = write_page(tmp_path, request.config.rootpath / "tests/data/graphs")
    with opened(path) as tab:
        assert tab.value("document.title").startswith(EVIL) and not tab.value(
            "document.querySelectorAll('main b').length"
        )
        assert [ink(tab, c) > 4 for c in ("#timeline", "#memory canvas", "#use canvas")] == [True] * 3
        its_pointer(tab)
        its_keys(tab)
        its_tables(tab, loaded)
        light = tab.picture()
        tab.click("#theme")
        tab.click("#theme")
        assert tab.value("document.documentElement.dataset.theme") == "dark" and tab.picture() != light
        assert not tab.errors and tab.requests == [path.resolve().as_uri()], "nothing is loaded beside the file"


def its_pointer(tab: Tab) -> None:
    """Hovering names the event, and what lies on the device then; dragging and clicking zoom, pan and hold."""
    k = tab.value("page.lanes[0].from + 40")
    tab.value(f"page.view.set(page.events.start[{k}] - 20000, page.events.end[{k}] + 20000)")
    tab.drawn()
    middle = tab.value(
        f"((page.events.start[{k}] + page.events.end[{k}]) / 2 - page.view.from) / (page.view.to - page.view.from)"
    )
    at = tab.place("#timeline")
    wide = tab.value("document.querySelector('#timeline').clientWidth")
    left = tab.value("document.querySelector('#timeline').getBoundingClientRect().x")
    top = tab.value("document.querySelector('#timeline').getBoundingClientRect().y")
    at = left + 132 + middle * (wide - 132 - 14), top + 40 + 17
    tab.mouse("mouseMoved", *at)
    tab.drawn()
    tip = tab.value("document.querySelector('#tip').innerText")
    assert tab.value(f"page.text(page.events.name[{k}])") in tip and "module" in tip and "runs" in tip, tip
    live = tab.value("document.querySelector('#live').innerText")
    assert live.startswith("At ") and "streamed weights" in live
    before = shown(tab)
    for kind, by in (("mousePressed", 0), ("mouseMoved", 120), ("mouseReleased", 120)):
        tab.mouse(kind, at[0] - by, at[1], button="left", buttons=1, clickCount=1)
    tab.drawn()
    after = shown(tab)
    assert after[0] > before[0] and after[1] - after[0] == pytest.approx(before[1] - before[0])
    tab.value("page.view.set(0, page.finish)")
    tab.click("#spans button:nth-child(1)")
    chart = tab.place("#memory .u-over", 0.25)
    for kind, by in (("mousePressed", 0), ("mouseMoved", 200), ("mouseReleased", 200)):
        tab.mouse(kind, chart[0] + by, chart[1], button="left", buttons=1, clickCount=1)
    tab.drawn()
    assert shown(tab)[1] - shown(tab)[0] < tab.value("page.finish / 3"), "a range that is chosen in a chart is shown"


def its_keys(tab: Tab) -> None:
    tab.value("document.querySelector('#find').focus()")
    tab.press("Tab")
    assert tab.value("document.activeElement.id") == "timeline", "the canvas follows the search in the order of Tab"
    assert tab.value("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    tab.press("0")
    whole = shown(tab)
    assert whole == (0, tab.value("page.finish"))
    tab.press("+")
    tab.press("+")
    near = shown(tab)
    assert near[1] - near[0] == pytest.approx(0.36 * whole[1])
    tab.press("ArrowRight")
    assert shown(tab)[0] > near[0]
    tab.press("-")
    assert shown(tab)[1] - shown(tab)[0] == pytest.approx(0.6 * whole[1])
    tab.press("ArrowDown")
    tab.press("n")
    assert "reload" in tab.value("document.querySelector('#tip').innerText"), "the next event of the chosen lane"
    tab.press("Escape")
    assert tab.value("document.querySelector('#tip').hidden && page.view.at === null")


def its_tables(tab: Tab, loaded: int) -> None:
    rows = "document.querySelectorAll('#{} tbody tr').length"
    foot = tab.value("document.querySelector('#moved tfoot').innerText")
    assert format_size(loaded) in foot, foot
    assert format_size(loaded) in tab.value("document.querySelector('#modules tfoot').innerText")
    assert EVIL in tab.value("document.querySelector('#modules').textContent")
    many = tab.value(rows.format("moved"))
    tab.type("#moved input", "gate.weight")
    few = tab.value(rows.format("moved"))
    assert 0 < few < many
    tab.click("#moved tbody button")
    assert "Needed next by" in tab.value("document.querySelector('#moved td.detail').innerText")
    first = "document.querySelector('#modules tbody td').innerText"
    top = tab.value(first)
    tab.click("#modules thead th:nth-child(1) button")
    assert tab.value(first) != top and tab.value("document.querySelector('#modules th').ariaSort") == "ascending"
    tab.click("#gaps tbody tr:first-child td:last-child button")
    assert tab.value("page.view.held") and shown(tab)[1] - shown(tab)[0] < tab.value("page.finish / 2")
