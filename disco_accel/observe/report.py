"""Text for people: places of a plan's values, and the distance of a step from its bound. Sizes in bytes, times in
seconds."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from disco_accel.graph.files import write_atomically, write_memgraph
from disco_accel.graph.memgraph import MemGraph
from disco_accel.observe.step_facts import NO_FACTS, _StepFacts
from disco_accel.observe.step_folder import _Step, figures_of
from disco_accel.observe.step_page import write_step_page
from disco_accel.observe.timeline import TracedEvent, write_chrome_trace
from disco_accel.sizes import format_size


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns padded with spaces: the first to the left, the others to the right."""
    cells = [[str(c) for c in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = []
    for row in cells:
        first, *rest = zip(row, widths, strict=True)
        lines.append("  ".join([first[0].ljust(first[1]), *(text.rjust(width) for text, width in rest)]).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def budget_table(stats: Mapping[str, Any]) -> str:
    """The parts of a memory budget, from ``disco_accel.stats(model)`` after at least one planned step."""
    budget = stats["budget"]
    resident = stats["resident_weight_bytes"]
    total = budget["total"]
    work = stats["arena_bytes"] - resident
    parts = {
        "weights that stay": resident,
        "streamed weights, activations, scratch": work,
        "adapters": budget["adapters"],
        "gradients": budget["gradients"],
        "optimizer state": budget["optimizer"],
        "batch": budget["batch"],
    }
    parts["unused"] = total - sum(parts.values())
    rows = [[name, format_size(size), f"{size / total:.1%}"] for name, size in parts.items()]
    rows.append(["budget", format_size(total), "100.0%"])
    return table(["memory on the device", "size", "share"], rows)


def step_text(stats: Mapping[str, Any]) -> str:
    """The figures of each step: kernels, bytes over the link, time, and the time no schedule of this plan could
    beat."""
    lines = [
        f"{stats['kernels']} kernels, {format_size(stats['reload_bytes'])} loaded and "
        f"{format_size(stats['offload_bytes'])} saved over the link each step"
    ]
    seconds, bound = stats["step_seconds"], stats["bound_seconds"]
    if seconds and bound:
        lines.append(
            f"step {seconds:.3f} s; bound {bound:.3f} s (max of compute and link); ratio {seconds / bound:.2f}"
        )
    return "\n".join(lines)


def first_step_text(stats: Mapping[str, Any]) -> str:
    """For the user after the first planned step: the budget's parts, the plan, reasons of steps without one."""
    lines = [budget_table(stats), step_text(stats)]
    stages = stats.get("compile_seconds", {})
    if stages:
        lines.append("made in " + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in stages.items()))
    lines += [f"not planned: {reason}" for reason in stats.get("fallbacks", ())]
    return "\n".join(lines)


def write_report(
    folder: str | os.PathLike[str],
    plan: MemGraph,
    events: Sequence[TracedEvent],
    stats: Mapping[str, Any],
    *,
    in_memory_peak: int | None = None,
    facts: _StepFacts = NO_FACTS,
) -> list[Path]:
    """Write plan.json, trace.json, stats.json, report.txt, report.html and, with matplotlib, step.png into ``folder``.

    ``events`` are those of one traced step, ``stats`` is ``disco_accel.stats(model)`` after it, ``facts`` are those of
    the plan's graph. Returns the files.
    """
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    write_memgraph(plan, target / "plan.json")
    write_chrome_trace(target / "trace.json", plan, events, facts)
    write_atomically(target / "stats.json", json.dumps(stats, indent=1, sort_keys=True).encode())
    write_atomically(target / "report.txt", (first_step_text(stats) + "\n").encode())
    write_step_page(target / "report.html", _Step(plan, events, facts, "measured", figures_of(stats)))
    names = ["plan.json", "trace.json", "stats.json", "report.txt", "report.html"]
    if importlib.util.find_spec("matplotlib") is not None:
        from disco_accel.observe.plots import draw_step

        budget = stats["budget"]
        draw_step(
            target / "step.png",
            plan,
            events,
            budget=budget["total"],
            outside=budget["total"] - budget["arena"],
            in_memory_peak=in_memory_peak,
            title="One training step under a memory budget",
        )
        names.append("step.png")
    return [target / name for name in names]
