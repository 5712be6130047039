"""The picture is a readable PNG, drawn without a display, and draws what it is given."""

from __future__ import annotations

import struct
import subprocess
import sys

import pytest

from disco_accel.graph.spaces import HOST
from tests.observe import traced_step as small

pytest.importorskip("matplotlib")

from disco_accel.graph.taskgraph import Vertex, VertexKind
from disco_accel.graph.traits import FROZEN
from disco_accel.observe.budget_plot import draw_budget
from disco_accel.observe.plots import color_of, draw_step


def size_of(png: bytes) -> tuple[int, int]:
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", png[16:24])
    return width, height


def test_the_picture_is_a_png_and_replaces_an_older_one(tmp_path):
    path = tmp_path / "new" / "step.png"
    for _ in range(2):
        draw_step(path, small.plan(), small.events(), budget=2048, outside=100, in_memory_peak=4096, title="small")
    width, height = size_of(path.read_bytes())
    assert width > 1000
    assert height > 500
    assert [p.name for p in path.parent.iterdir()] == ["step.png"]


def test_events_change_the_picture(tmp_path):
    draw_step(tmp_path / "a.png", small.plan(), small.events())
    draw_step(tmp_path / "b.png", small.plan(), small.events()[:3])
    assert (tmp_path / "a.png").read_bytes() != (tmp_path / "b.png").read_bytes()


def test_no_copy_is_drawn_in_the_colour_of_a_kernel():
    """Whatever kind of copy: a lane of a link has colours of its own."""
    vertices = (
        Vertex(0, VertexKind.INPUT, 0, op="w", sizes=(256,), traits=FROZEN),
        Vertex(1, VertexKind.COPY, 0, inputs=((0, 0),), sizes=(256,)),
        Vertex(2, VertexKind.KERNEL, 0, op="aten::mul", inputs=((1, 0),), sizes=(256,)),
        Vertex(3, VertexKind.COPY, 1, op="p2p", inputs=((2, 0),), sizes=(256,), source=0),
        Vertex(4, VertexKind.COPY, HOST, inputs=((2, 0),), sizes=(256,), source=0),
    )
    lanes = {1: "h2d", 2: "compute0", 3: "p2p", 4: "d2h"}
    colors = {lanes[v.id]: color_of(v) for v in vertices[1:]}
    assert len(set(colors.values())) == 4


def test_an_empty_step_can_be_drawn(tmp_path):
    draw_step(tmp_path / "a.png", small.plan(), [])
    size_of((tmp_path / "a.png").read_bytes())


def test_matplotlib_is_not_imported_until_something_is_drawn():
    imports = "import sys, disco_accel.observe.plots, disco_accel.observe.timeline"
    code = f"{imports}; sys.exit('matplotlib' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_budget_that_moved_is_drawn(tmp_path):
    """Also one of which nothing has happened yet."""
    for name, history in {"a": [(0.0, 1 << 20, 0), (1.0, 1 << 20, 1 << 19), (3.0, 1 << 19, 1 << 18)], "b": []}.items():
        draw_budget(tmp_path / f"{name}.png", history)
        size_of((tmp_path / f"{name}.png").read_bytes())
