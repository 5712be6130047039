"""Pictures of a step. matplotlib is imported when one is drawn, without a display."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from disco_accel.graph.copies import is_transfer, swaps_in, swaps_out
from disco_accel.graph.files import write_atomically
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.taskgraph import Vertex
from disco_accel.graph.values import handed_out_at_gate
from disco_accel.observe.timeline import Content, TracedEvent, lane_order, occupancy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#22303c"
MUTED = "#7b8794"
LANE_NAMES = {"h2d": "host → device", "d2h": "device → host", "p2p": "device → device"}
_KERNEL_COLORS = {"matrix products": "#2f6f9f", "attention": "#7a5195", "other kernels": "#9fb8c8"}
_COPY_COLORS = {"reloads": "#e07a3f", "offloads": "#b5423f", "copies between devices": "#d9a441"}
_COLORS = _KERNEL_COLORS | _COPY_COLORS
GROUPS = tuple(_COLORS)
"""The kinds of work, kernels first."""
_CONTENT_COLORS = {
    Content.RESIDENT: "#2f6f9f",
    Content.STREAMED: "#e9a26f",
    Content.ACTIVATION: "#a9c7a0",
    Content.SCRATCH: "#d9d3a0",
    Content.KEPT: "#7a5195",
}
_MATMUL = ("mm", "addmm", "bmm", "baddbmm", "linear", "matmul")
MIB = float(1 << 20)


def group_of(vertex: Vertex) -> str:
    """The kind of work that a kernel or a copy is, by which pictures colour it."""
    if swaps_in(vertex):
        return "reloads"
    if swaps_out(vertex):
        return "offloads"
    if is_transfer(vertex):
        return "copies between devices"
    name = vertex.op.split("::")[-1].split(".")[0]
    if "attention" in name:
        return "attention"
    return "matrix products" if name in _MATMUL else "other kernels"


def color_of(vertex: Vertex) -> str:
    """The colour of a kernel's or a copy's bar."""
    return _COLORS[group_of(vertex)]


def draw_step(
    path: str | os.PathLike[str],
    plan: MemGraph,
    events: Sequence[TracedEvent],
    *,
    budget: int | None = None,
    outside: int = 0,
    in_memory_peak: int | None = None,
    title: str = "",
    device: int = 0,
) -> None:
    """Write a PNG of one traced step: kernels and copies side by side, and below them memory under the budget line.

    ``budget`` (bytes) is the whole budget, of which ``outside`` bytes (adapters, gradients, optimizer, batch) lie
    outside the arena; ``in_memory_peak`` is the memory of the step without a plan. Times are milliseconds.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 6.4), dpi=130, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    lanes_axis, memory_axis = figure.subplots(2, 1, sharex=True, height_ratios=[1.0, 1.35])
    _draw_lanes(lanes_axis, plan, events)
    _draw_memory(memory_axis, plan, events, device, outside)
    _draw_limits(memory_axis, budget, in_memory_peak)
    finish = max((e.end for e in events), default=0.0)
    for axis in (lanes_axis, memory_axis):
        axis.set_xlim(0, finish * 1e3 or 1.0)
        _mark_gate(axis, plan, events, label=axis is memory_axis)
        quiet_axis(axis)
    memory_axis.set_xlabel("milliseconds since the step began", color=INK)
    figure.suptitle(title or plan.name or "one step", x=0.01, ha="left", fontsize=13, color=INK)
    save_png(figure, path)


def save_png(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write ``figure``; a reader sees the old picture or the whole new one."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    image = io.BytesIO()
    figure.savefig(image, format="png")
    write_atomically(target, image.getvalue())


def _draw_lanes(axis: Axes, plan: MemGraph, events: Sequence[TracedEvent]) -> None:
    by_id = {v.id: v for v in plan.vertices}
    lanes = lane_order(events)
    finish = max((e.end for e in events), default=0.0)
    bars: dict[tuple[int, str], list[tuple[float, float]]] = {}
    busy = [0.0] * len(lanes)
    for event in events:
        row = lanes.index(event.lane)
        width = event.end - event.start
        busy[row] += width
        bars.setdefault((row, group_of(by_id[event.vertex])), []).append((event.start * 1e3, width * 1e3))
    for (row, group), spans in sorted(bars.items()):
        axis.broken_barh(spans, (row - 0.38, 0.76), facecolors=_COLORS[group], edgecolor="none")
    names = []
    for row, lane in enumerate(lanes):
        name = LANE_NAMES.get(lane, lane.replace("compute", "compute "))
        share = busy[row] / finish if finish else 0.0
        names.append(f"{name}\n{share:.0%} busy")
    axis.set_yticks(range(len(lanes)), names)
    axis.set_ylim(max(len(lanes), 1) - 0.5, -0.5)
    used = {group for _, group in bars}
    add_legend(axis, {name: color for name, color in _COLORS.items() if name in used})


def _draw_memory(axis: Axes, plan: MemGraph, events: Sequence[TracedEvent], device: int, outside: int) -> None:
    seconds, held = occupancy(plan, events, device)
    times = [t * 1e3 for t in seconds]
    layers: list[list[float]] = []
    colors: dict[str, str] = {}
    if outside:
        layers.append([outside / MIB] * len(times))
        colors["adapters, gradients, optimizer"] = "#c9ced4"
    for content in Content:
        if any(held[content]):
            layers.append([b / MIB for b in held[content]])
            colors[content.value] = _CONTENT_COLORS[content]
    if times:
        axis.stackplot(times, layers, colors=list(colors.values()), step="post", linewidth=0)
    axis.set_ylabel("MiB on the device", color=INK)
    axis.set_ylim(bottom=0)
    add_legend(axis, colors)


def _draw_limits(axis: Axes, budget: int | None, in_memory_peak: int | None) -> None:
    top = axis.get_ylim()[1]
    limits = ((budget, "budget", "#b5423f", "-"), (in_memory_peak, "peak without a plan", MUTED, "--"))
    for value, name, color, style in limits:
        if value is None:
            continue
        axis.axhline(value / MIB, color=color, linewidth=1.4, linestyle=style)
        axis.annotate(
            f"{name} {value / MIB:.0f} MiB",
            (1, value / MIB),
            xycoords=("axes fraction", "data"),
            xytext=(-4, 3),
            textcoords="offset points",
            ha="right",
            color=color,
            fontsize=9,
        )
        top = max(top, value / MIB * 1.14)
    axis.set_ylim(0, top)


def _mark_gate(axis: Axes, plan: MemGraph, events: Sequence[TracedEvent], *, label: bool) -> None:
    outs = {v.id for v in plan.vertices if handed_out_at_gate(v)}
    ends = [e.end for e in events if e.vertex in outs]
    if not ends:
        return
    axis.axvline(max(ends) * 1e3, color=INK, linewidth=0.9, linestyle=":")
    if label:
        axis.annotate(
            "loss",
            (max(ends) * 1e3, 1),
            xycoords=("data", "axes fraction"),
            xytext=(3, -10),
            textcoords="offset points",
            fontsize=9,
            color=INK,
        )


def add_legend(axis: Axes, colors: Mapping[str, str]) -> None:
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(facecolor=color, label=name) for name, color in colors.items()]
    axis.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=6, frameon=False, fontsize=9, borderpad=0
    )


def quiet_axis(axis: Axes) -> None:
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axis.spines[side].set_color(MUTED)
    axis.tick_params(colors=INK, labelsize=9)
