"""A picture of a memory budget that moved. matplotlib is imported when one is drawn, without a display."""

from __future__ import annotations

import os
from collections.abc import Sequence

from disco_accel.observe.plots import INK, MIB, add_legend, quiet_axis, save_png

_GRANTED, _HELD = "#b5423f", "#9fb8c8"


def draw_budget(path: str | os.PathLike[str], history: Sequence[tuple[float, int, int]], *, title: str = "") -> None:
    """Write a PNG of ``history``, which ``stats(model)["budget_history"]`` is: seconds, bytes granted, bytes held."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), dpi=130, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    seconds = [entry[0] for entry in history]
    granted, held = ([entry[which] / MIB for entry in history] for which in (1, 2))
    axis.fill_between(seconds, held, step="post", color=_HELD, linewidth=0)
    axis.step(seconds, granted, where="post", color=_GRANTED, linewidth=1.4)
    add_legend(axis, {"granted": _GRANTED, "held": _HELD})
    axis.set_ylim(0, 1.1 * max([*granted, *held], default=0.0) or 1.0)
    axis.set_xlabel("seconds since the model was prepared", color=INK)
    axis.set_ylabel("MiB", color=INK)
    quiet_axis(axis)
    figure.suptitle(title or "memory budget", x=0.01, ha="left", fontsize=13, color=INK)
    save_png(figure, path)
