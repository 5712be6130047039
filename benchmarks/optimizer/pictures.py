"""The study's pictures, of its schedule and of ours: device memory and links over time, transfers by phase."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.optimizer.trace import FROM_DEVICE, PHASES, TO_DEVICE, Trace, copies_by_phase, held_bytes, link_rates
from disco_accel.graph.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = {TO_DEVICE: "#e07a3f", FROM_DEVICE: "#b5423f"}
_SHADES = {"forward": "#eef4f8", "backward": "#dde8f0", "update": "#f7ede4"}
_GB = 1e9


def draw(path: Path, columns: Sequence[tuple[str, Trace]], memory: int) -> None:
    """Write a PNG with a column for each titled trace; ``memory``: bytes of the device, as a line."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.2 * len(columns), 8.4), dpi=120, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(3, len(columns), squeeze=False)
    for column, (title, traced) in enumerate(columns):
        held, links, transfers = (axes[row][column] for row in range(3))
        held.set_title(f"{title}: {traced.seconds:.2f} s", loc="left", fontsize=11)
        _memory(held, traced, memory)
        _links(links, traced)
        _transfers(transfers, traced)
    figure.suptitle("Simulated: one optimizer step of 13 billion parameters; no device ran it", x=0.01, ha="left")
    image = io.BytesIO()
    figure.savefig(image, format="png")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, image.getvalue())


def _shade(axis: Axes, traced: Trace) -> None:
    axis.set_xlim(0, traced.seconds)
    axis.set_facecolor(_SHADES["update"])
    for name, start, end in traced.phases:
        axis.axvspan(start, end, color=_SHADES[name], linewidth=0)
    axis.set_xlabel("seconds; shaded: forward, backward, neither")


def _memory(axis: Axes, traced: Trace, memory: int) -> None:
    _shade(axis, traced)
    times, held = held_bytes(traced)
    axis.fill_between(
        [*times, traced.seconds], [b / _GB for b in [*held, held[-1]]], step="post", color="#2f6f9f", linewidth=0
    )
    axis.axhline(memory / _GB, color="#b5423f", linewidth=1.2)
    axis.set_ylim(0, memory / _GB * 1.08)
    axis.set_ylabel("GB on the device")


def _links(axis: Axes, traced: Trace) -> None:
    _shade(axis, traced)
    for direction, color in _COLORS.items():
        rates = link_rates(traced, direction)
        times = [traced.seconds * i / len(rates) for i in range(len(rates))]
        axis.step(times, [rate / _GB for rate in rates], where="post", color=color, label=direction, linewidth=1)
    axis.set_ylim(0, 60)
    axis.set_ylabel("GB/s on the link")
    _legend(axis)


def _transfers(axis: Axes, traced: Trace) -> None:
    sizes = copies_by_phase(traced)
    for shift, direction in ((-0.2, TO_DEVICE), (0.2, FROM_DEVICE)):
        total = [sum(sizes[phase, direction]) / _GB for phase in PHASES]
        places = [i + shift for i in range(len(PHASES))]
        axis.bar(places, total, 0.38, color=_COLORS[direction], label=direction)
        for place, height, phase in zip(places, total, PHASES, strict=True):
            copies = sorted(sizes[phase, direction])
            if copies:
                words = f"{len(copies)} copies\nmedian {copies[len(copies) // 2] / 1e6:.0f} MB"
                axis.annotate(words, (place, height), ha="center", va="bottom", fontsize=8)
    axis.set_xticks(range(len(PHASES)), PHASES)
    axis.set_ylim(0, 1.25 * max(1.0, *(sum(each) / _GB for each in sizes.values())))
    axis.set_ylabel("GB copied")
    _legend(axis)


def _legend(axis: Axes) -> None:
    axis.legend(loc="lower right", bbox_to_anchor=(1, 0.99), ncols=2, frameon=False, fontsize=9, borderpad=0)
