"""A step in words: its seconds against the bound, the bytes that stay, its limit, and the choices of its plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from disco_accel.graph.copies import swaps_in, swaps_out
from disco_accel.graph.taskgraph import VertexKind
from disco_accel.graph.values import host_copy_exists, outlives_step
from disco_accel.observe.idle_gaps import Lane, _Cause, _Gap, by_lane, idle_gaps
from disco_accel.observe.module_table import _ModuleRow
from disco_accel.observe.step_folder import _Step
from disco_accel.observe.timeline import TracedEvent
from disco_accel.plan.summary import peak_bytes, staying_bytes, swapped_bytes
from disco_accel.sizes import format_size

_BUSY = 0.97
"""A lane that runs something for such a share of the step limits it."""

_WAITS = {
    _Cause.DATA: "values that a copy or another device brings",
    _Cause.MEMORY: "room that other values still take",
    _Cause.GATE: "the caller's backward",
    _Cause.START: "the engine's launches",
    _Cause.DONE: "the last copies of the step",
}

_IDLE = {
    _Cause.DATA: "it waits for values from another lane",
    _Cause.MEMORY: "it waits for room that other values still take",
    _Cause.GATE: "it waits for the caller's backward",
    _Cause.START: "it could have started",
    _Cause.DONE: "it has nothing left to run",
}
"""Of a lane, as the page has them."""


def seconds_text(seconds: float) -> str:
    """For people, with three digits that count."""
    scale, unit = (1.0, "s") if seconds >= 1 else (1e3, "ms") if seconds >= 1e-3 else (1e6, "µs")
    return f"{seconds * scale:.3g} {unit}" if seconds * scale < 1000 else f"{seconds * scale:.0f} {unit}"


def headline(step: _Step, gaps: Sequence[_Gap], lanes: Mapping[Lane, Sequence[TracedEvent]]) -> dict[str, Any]:
    """``cards``: short figures by name; ``words``: sentences."""
    figures, plan = step.figures, step.plan
    seconds = figures.step_seconds or step.finish
    frozen, stay = _frozen_bytes(step), staying_bytes(plan)
    loaded, saved = swapped_bytes(plan, swaps_in), swapped_bytes(plan, swaps_out)
    used = sum(figures.outside.values()) + peak_bytes(plan)
    cards = [["one step", seconds_text(seconds)]]
    words = [f"{_source(step)} One step takes {seconds_text(seconds)}."]
    if figures.bound_seconds:
        over = seconds / figures.bound_seconds
        cards += [["lower bound", seconds_text(figures.bound_seconds)], ["over the bound", f"{over:.3f}x"]]
        words.append(
            f"No plan can take less than {seconds_text(figures.bound_seconds)}: "
            f"the step takes {over:.3f} times as long."
        )
    if frozen:
        cards.append(["weights that stay", f"{stay / frozen:.0%}"])
        words.append(f"{format_size(stay)} of {format_size(frozen)} of weights stay on the device all the time.")
    cards += [["loaded each step", format_size(loaded)], ["saved each step", format_size(saved)]]
    cards.append(["peak of the budget", f"{format_size(used)} of {format_size(figures.total)}"])
    words.append(_limit(step, gaps, lanes))
    words += _more_memory(figures.more.get("next_gib"))
    return {"cards": cards, "words": words}


def _more_memory(gain: object) -> list[str]:
    """The gain of a little more memory, from ``next_gib`` as a file has it."""
    if not isinstance(gain, dict):
        return []
    match [gain.get(key) for key in ("more_bytes", "loads_saved_bytes", "seconds")]:
        case [int(more), int(saved), int() | float() as seconds] if saved > 0:
            return [
                f"With {format_size(more)} more memory it would load about {format_size(saved)} less and take about "
                f"{seconds_text(seconds)} less, by estimate."
            ]
    return []


def _source(step: _Step) -> str:
    if step.source == "measured":
        return "These events were measured in a step that ran."
    named = f" at the speeds of {step.figures.estimated_for}" if step.figures.estimated_for else ""
    return f"These events are simulated{named}: no device ran them."


def _frozen_bytes(step: _Step) -> int:
    clean = (v for v in step.plan.vertices if host_copy_exists(v) and not v.inputs)
    return sum(vertex.sizes[0] for vertex in clean if outlives_step(vertex))


def _limit(step: _Step, gaps: Sequence[_Gap], lanes: Mapping[Lane, Sequence[TracedEvent]]) -> str:
    """The limit of the step, by the lane that is busy longest."""
    finish = step.finish
    if not finish or not lanes:
        return "Nothing ran."
    hosts = {device.id for device in step.plan.devices if device.is_host_device}
    busy = {lane: sum(e.end - e.start for e in events) / finish for lane, events in lanes.items()}
    kernels = max((lane for lane in busy if lane[1].startswith("compute")), key=busy.__getitem__, default=None)
    longest = max(busy, key=busy.__getitem__)
    if kernels is not None and busy[kernels] >= _BUSY:
        where = "the host's kernels" if kernels[0] in hosts else "kernels"
        again = sum(e.end - e.start for e in lanes[kernels] if e.vertex in step.facts.repeats)
        of_it = f", {seconds_text(again)} of it on values that were made before and not kept" if again else ""
        return (
            f"The limit is {where}: they run for {busy[kernels]:.0%} of the step{of_it}. Copies cost next to nothing."
        )
    if longest != kernels and busy[longest] >= _BUSY:
        return (
            f"The limit is the link: copies of the lane {longest[1]} run for {busy[longest]:.0%} of the step. "
            "More memory, a faster link or more work for each load makes it shorter."
        )
    if kernels is None:
        return f"The busiest lane, {longest[1]}, runs for {busy[longest]:.0%} of the step."
    waited = _by_cause(gap for gap in gaps if gap.lane == kernels)
    cause = max(waited, key=waited.__getitem__, default=None)
    longest_wait = "" if cause is None else f" They wait most for {_WAITS[cause]}: {seconds_text(waited[cause])}."
    return f"Kernels run for {busy[kernels]:.0%} of the step.{longest_wait}"


def _by_cause(gaps: Iterable[_Gap]) -> dict[_Cause, float]:
    found: dict[_Cause, float] = {}
    for gap in gaps:
        found[gap.cause] = found.get(gap.cause, 0.0) + gap.end - gap.start
    return found


def step_words(step: _Step) -> list[str]:
    """The step for people, in lines: the sentences of the headline, then a line for each lane with its idle seconds and
    their causes."""
    gaps, lanes = idle_gaps(step.plan, step.events), by_lane(step.plan, step.events)
    several = len({device for device, _ in lanes}) > 1
    lines = list(headline(step, gaps, lanes)["words"])
    for (device, name), events in sorted(lanes.items()):
        busy = sum(event.end - event.start for event in events) / (step.finish or 1.0)
        waited = _by_cause(gap for gap in gaps if gap.lane == (device, name))
        longest_first = sorted(waited, key=waited.__getitem__, reverse=True)
        causes = ", ".join(f"{_IDLE[cause]} ({seconds_text(waited[cause])})" for cause in longest_first)
        where = f" of device {device}" if several else ""
        lines.append(f"{name}{where}: busy for {busy:.0%} of the step. {f'Idle: {causes}.' if causes else ''}".rstrip())
    return lines


def choices(step: _Step, rows: Sequence[_ModuleRow]) -> list[list[str]]:
    """Sentences about values that are computed again or kept, and about fused kernels, each behind its heading."""
    facts, plan, more = step.facts, step.plan, step.figures.more
    ran = {event.vertex: event for event in step.events}
    again = [vertex for vertex in facts.repeats if vertex in ran]
    seconds = sum(ran[vertex].end - ran[vertex].start for vertex in again)
    found = []
    if again:
        found.append(["Computed again", f"{len(again)} kernels repeat an earlier one: {seconds_text(seconds)}."])
    else:
        found.append(["Computed again", "No kernel repeats an earlier one."])
    found += _left_out(more.get("recomputation"))
    kept = sum(row.activations for row in rows)
    if kept:
        found.append(
            ["Kept", f"{format_size(kept)} of activations stay on the device from the forward to the backward."]
        )
    if facts.fused:
        calls = sum(count for vertex, count in facts.fused.items() if vertex in ran)
        there = sum(vertex in ran for vertex in facts.fused)
        found.append(["Fused", f"{there} kernels compute {calls} calls."])
    else:
        found.append(["Fused", "No kernels are fused."])
    kernels = sum(vertex.kind is VertexKind.KERNEL for vertex in plan.vertices)
    found.append(["Kernels", f"{kernels}, and {len(plan.memory_edges)} edges that make room."])
    if more.get("cut_short"):
        found.append(["Search", "It ended at plan_seconds: more seconds may find a faster plan."])
    return found


def _left_out(recomputation: object) -> list[list[str]]:
    """Of the kernels that a plan leaves out, from ``Recomputation`` as a file has it."""
    if not isinstance(recomputation, dict):
        return []
    numbers = [recomputation.get(key) for key in ("kernels", "dropped", "kept_bytes", "offloaded_bytes")]
    match numbers:
        case [int(kernels), int() | float() as seconds, int(kept), int(away)] if kernels:
            return [
                [
                    "Kept",
                    f"{kernels} kernels are left out, {seconds_text(seconds)} of them: their values, "
                    f"{format_size(kept)}, are kept from their first maker, of which {format_size(away)} go to the "
                    "host meanwhile.",
                ]
            ]
    return []


def figures_rows(step: _Step) -> list[list[str]]:
    """Sizes of the budget's parts, by name."""
    figures = step.figures
    arena = figures.total - sum(figures.outside.values())
    rows = [["budget", format_size(figures.total)], ["for the plan", format_size(arena)]]
    rows += [[name, format_size(size)] for name, size in figures.outside.items()]
    rows.append(["highest byte of the plan", format_size(peak_bytes(step.plan))])
    if figures.compute_seconds is not None:
        rows.append(["kernels alone", seconds_text(figures.compute_seconds)])
    return rows
