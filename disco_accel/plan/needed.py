"""The budget that would do: the smallest arena that is found to work while one alignment unit less does not."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from disco_accel.graphcheck import largest_need
from disco_accel.plan.build import failing_position
from disco_accel.plan.evict import Policy
from disco_accel.plan.resident import Residents
from disco_accel.taskgraph import Device, TaskGraph


@dataclass(frozen=True, slots=True)
class Attempt:
    """What ``build`` is asked for: see there."""

    lookahead: int | None
    residents: Residents
    outs_apart: bool = False
    slack: float | None = None


Attempts = Callable[[TaskGraph], Iterator[Attempt]]
"""What is tried for a graph, in order; the last is the most modest."""

_ROUNDS = 6
"""Positions that fail one after another before the search stops looking at the vertices up to them alone."""


def with_memory(graph: TaskGraph, size: Callable[[Device], int]) -> TaskGraph:
    """Return ``graph`` with arenas of ``size(device)`` bytes."""
    return replace(graph, devices=tuple(replace(device, memory=size(device)) for device in graph.devices))


def working_set(graph: TaskGraph) -> int:
    """Return bytes below which no plan exists, the same for every device: what its neediest vertex has there."""
    return max(largest_need(graph, device.id)[0] for device in graph.devices)


def smallest(graph: TaskGraph, policy: Policy, cyclic: bool, attempts: Attempts) -> int:
    """Return the smallest size found, the same for every device, at which BUILDMEMGRAPH has a plan of ``graph``.

    One alignment unit less fails; what the devices of ``graph`` have now is known to fail. Planning is not monotone in
    memory, so there may be smaller sizes that work by chance. The most modest attempt gets close; all are asked just
    below what it needs, and the search goes on with one that works there.
    """
    unit = max(device.alignment for device in graph.devices)
    given = min(device.memory for device in graph.devices)
    least = max(-(-working_set(graph) // unit), given // unit + 1)

    def works(units: int, attempt: int) -> bool:
        return _failing(with_memory(graph, lambda _: units * unit), policy, cyclic, attempts, attempt) is None

    def first(units: int) -> int | None:
        return first_fitting(with_memory(graph, lambda _: units * unit), policy, cyclic, attempts)

    def modest(units: int, until: int | None) -> int | None:
        return _failing(with_memory(graph, lambda _: units * unit), policy, cyclic, attempts, 0, until)

    sizes = {size for vertex in graph.vertices if not vertex.external for size in vertex.sizes}
    working = _climb(least, max(1, math.gcd(*(-(-size // unit) for size in sizes))), modest)
    while working > least and (other := first(working - 1)) is not None:
        working = lowered(working - 1, least, partial(works, attempt=other))
    return working * unit


def _climb(size: int, grain: int, failing: Callable[[int, int | None], int | None]) -> int:
    """Return a number from ``size`` on that does not fail.

    ``failing(n, until)``: the position at which ``n`` fails, looking no further than ``until``. The vertex there
    decides: the least number that gets past it is found by looking at no more than what comes before. All allocations
    are multiples of ``grain``, so few numbers between are worth a try.
    """
    rounds = 0
    while (at := failing(size, None)) is not None:
        rounds += 1
        until = at if rounds < _ROUNDS else None
        low, step = size, grain
        while failing(low + step, until) is not None:
            low, step = low + step, step * 2
        high = low + step
        while high - low > grain:
            middle = low + (high - low) // 2 // grain * grain
            low, high = (low, middle) if failing(middle, until) is None else (middle, high)
        size = high
    return size


def first_fitting(graph: TaskGraph, policy: Policy, cyclic: bool, attempts: Attempts) -> int | None:
    """Return the number of an attempt with which BUILDMEMGRAPH has a plan, counted from the most modest one."""
    for attempt in range(len(list(attempts(graph)))):
        if _failing(graph, policy, cyclic, attempts, attempt) is None:
            return attempt
    return None


def _failing(
    graph: TaskGraph, policy: Policy, cyclic: bool, attempts: Attempts, attempt: int, until: int | None = None
) -> int | None:
    """Return where that attempt, counted from the most modest one, fails up to ``until``; None if it does not."""
    ordered = list(attempts(graph))[::-1]
    if attempt >= len(ordered):
        return 0
    tried = ordered[attempt]
    return failing_position(
        graph,
        policy,
        lookahead=tried.lookahead,
        residents=tried.residents,
        cyclic=cyclic,
        outs_apart=tried.outs_apart,
        slack=tried.slack,
        until=until,
    )


def lowered(working: int, least: int, fits: Callable[[int], bool]) -> int:
    """Return a number from ``least`` to ``working`` that fits and is ``least`` or has a neighbour below that does not.

    Steps down from ``working``, which fits, are doubled until one fails.
    """
    step = 1
    failing = least - 1
    while working > least:
        lower = max(least, working - step)
        if not fits(lower):
            failing = lower
            break
        working, step = lower, step * 2
    return boundary(failing, working, fits)


def boundary(failing: int, working: int, fits: Callable[[int], bool]) -> int:
    """Return a number that fits although the one before does not, given one that fails and a larger one that fits."""
    while working - failing > 1:
        middle = (failing + working) // 2
        if fits(middle):
            working = middle
        else:
            failing = middle
    return working
