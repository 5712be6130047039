"""How long a step on several devices takes at least with memory for everything: chains of kernels and transfers in
which each stream and each link takes one at a time (``lane_times.py`` has the reasons).

That is asked of the whole step, and of its two sides of the gate one after the other, since all on the far side start
when all that is handed out has ended. Between sets of kernels that all devices come to it is asked once more:

- ``done`` of a set: a second before which not all of it have ended.
- One of the set before ends last. Which one is not known, so the least of what must follow each of them is added to
  that set's ``done``. Of devices that all compute and then all exchange, the one that is done last has all of its
  exchange before it.
- If one of a set leads to none of the next, the next may have ended before it, and nothing is added.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from disco_accel.graph.copies import is_transfer
from disco_accel.graph.home_uses import host_devices
from disco_accel.graph.taskgraph import TaskGraph, VertexKind
from disco_accel.plan.bound.lanes import Lanes
from disco_accel.simulate.machine import Machine

_AHEAD = 2
"""From each set of kernels to how many of the next ones: one that ends a device's work before an exchange, and one that
ends what the exchange takes."""

_VISITS = 2_000_000
"""Of vertices, some ten seconds, after which no further sets are looked at; what was found until then is a bound."""


def lane_bound(graph: TaskGraph, machine: Machine) -> float:
    """Return the seconds that a step of ``graph`` takes at least, whatever its memory."""
    lanes = Lanes.of(graph, machine)
    gate = [lanes.gate]
    until_gate, behind_gate = lanes.least(None, gate), lanes.least(lanes.gate, None)
    whole = lanes.least(None, None, near=behind_gate is not None)
    assert until_gate is not None and whole is not None, "the gate is in each step"
    best = max(whole, until_gate + (behind_gate or 0.0))
    sets = [gate, *_exchanging_kernels(graph, lanes)]
    if len(sets) == 1:
        return best
    sets.sort(key=lambda each: lanes.depth[each[0]])
    done = [0.0] * len(sets)
    for j, each in enumerate(sets):
        if each == gate:
            done[j] = until_gate
        elif j < _AHEAD:
            done[j] = lanes.least(None, each, near=True) or 0.0
        for i in range(max(0, j - _AHEAD), j):
            if lanes.visits < _VISITS:
                follows = _least_from_last(lanes, sets[i], each)
                done[j] = max(done[j], 0.0 if follows is None else done[i] + follows)
    for i, each in enumerate(sets):
        if i >= len(sets) - _AHEAD or each == gate:
            best = max(best, done[i] + (_least_from_last(lanes, each, None) or 0.0))
    return max(best, *done)


def _least_from_last(lanes: Lanes, sources: Sequence[int], targets: Sequence[int] | None) -> float | None:
    """Return the seconds from the end of the last of ``sources`` to that of the last of ``targets`` (None: of the step)
    at least, whichever of the sources it is; None if it may be one that leads to none of these."""
    least = 0.0
    for number, source in enumerate(sources):
        seconds = lanes.least(source, targets, near=True)
        if seconds is None:
            return None
        least = seconds if not number else min(least, seconds)
    return least


def _exchanging_kernels(graph: TaskGraph, lanes: Lanes) -> list[list[int]]:
    """Return sets of kernels at one depth, one of each device, the results of which others wait for.

    Where these are slices of one result, the kernel that made it stands for them: all of their copies follow it."""
    devices = {vertex.space for vertex in graph.vertices if vertex.kind is VertexKind.KERNEL}
    devices -= host_devices(graph.devices)
    if len(devices) < 2:
        return []
    kernels = {lanes.place[v.id]: v.space for v in graph.vertices if v.kind is VertexKind.KERNEL}
    read = (vertex.inputs[0][0] for vertex in graph.vertices if is_transfer(vertex))
    sent = {lanes.place[each] for each in read if each in lanes.place} & kernels.keys()
    at: dict[int, dict[int, int]] = defaultdict(dict)
    for place in sorted(sent):
        makers = lanes.before[place]
        slices = len(makers) == 1 and sum(
            each in sent and len(lanes.before[each]) == 1 for each in lanes.behind[makers[0]]
        )
        made = makers[0] if slices > 1 and makers[0] in kernels else place
        at[lanes.depth[made]][kernels[made]] = made
    return [list(last.values()) for _, last in sorted(at.items()) if devices <= last.keys()]
