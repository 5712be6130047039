"""The budget that would do: the smallest arena that is found to work while one alignment unit less does not."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from disco_accel.graph.check import largest_need
from disco_accel.graph.taskgraph import TaskGraph, with_memory
from disco_accel.plan.buildmemgraph.builder import failing_position
from disco_accel.plan.buildmemgraph.eviction import Policy
from disco_accel.plan.buildmemgraph.residents import Residents
from disco_accel.plan.search_work import WALKED, Work


@dataclass(frozen=True, slots=True)
class Attempt:
    """What ``build`` is asked for: see there."""

    lookahead: int | None
    residents: Residents
    outs_apart: bool = False
    slack: float | None = None


Attempts = Callable[[TaskGraph], Iterator[Attempt]]
"""What is tried for a graph, in order; the last is the most modest."""


def working_set(graph: TaskGraph) -> int:
    """Return bytes below which no plan exists, the same for every device: what its neediest vertex has there."""
    return max(largest_need(graph, device.id)[0] for device in graph.devices)


_EXACT = 100_000
"""Vertices that a search for the smallest size to the alignment unit may walk past, about four seconds."""

_USUAL = 40
"""Walks that such a search takes as a rule; where there is no time for as many, it ends with some size nearby."""

_FIRST = 128
_SAME = 8
_SLOW = 20_000
_FINER = 5
"""Sizes are tried from the working set up, in steps of one part in ``_FIRST`` of it, ``_SAME`` times or ``_SLOW``
vertices before steps double; the last step is halved so often. In captured steps what fits is not always what is above
a size, and a search whose steps double each time may miss the smallest by a fifth."""


def smallest(graph: TaskGraph, policy: Policy, cyclic: bool, attempts: Attempts, work: Work) -> int:
    """Return the smallest size found, the same for every device, at which BUILDMEMGRAPH has a plan of ``graph``.

    One alignment unit less fails, unless the search for that would take long (``_EXACT``), or the user's time is up;
    what the devices of ``graph`` have now is known to fail. Planning is not monotone in memory, so there may be smaller
    sizes that work by chance. The most modest attempt gets close; all are asked just below what it needs, and the
    search goes on with one that works there.
    """
    unit = max(device.alignment for device in graph.devices)
    given = min(device.memory for device in graph.devices)
    least = max(-(-working_set(graph) // unit), given // unit + 1)
    walked = 0

    def exact() -> bool:
        return max(walked, _USUAL * len(graph.vertices)) <= _EXACT and not work.late()

    def failing(units: int, attempt: int, until: int | None = None) -> int | None:
        nonlocal walked
        at = _failing(with_memory(graph, lambda _: units * unit), policy, cyclic, attempts, attempt, until)
        walked += len(graph.vertices) if at is None and until is None else at or until or 0
        return at

    def works(units: int, attempt: int) -> bool:
        return failing(units, attempt) is None

    def first(units: int) -> int | None:
        return next((n for n in range(len(list(attempts(graph)))) if failing(units, n) is None), None)

    def modest(units: int, until: int | None) -> int | None:
        return failing(units, 0, until)

    sizes = {size for vertex in graph.vertices if not vertex.external for size in vertex.sizes}
    grain = max(1, math.gcd(*(-(-size // unit) for size in sizes)))
    working = _scan(least, grain, modest, work)
    while working > least and exact() and (other := first(working - 1)) is not None:
        working = lowered(working - 1, least, partial(works, attempt=other), exact)
    work.add(WALKED, walked)
    return working * unit


def _scan(size: int, grain: int, failing: Callable[[int, int | None], int | None], work: Work) -> int:
    """Return a number from ``size`` on that does not fail, in few walks.

    ``failing(n, until)``: the position at which ``n`` fails, looking no further than ``until``. All allocations are
    multiples of ``grain``.
    """
    least, count, last, passed = size, 0, -1, 0
    step = before = max(grain, least // _FIRST // grain * grain)
    while (at := failing(size, None)) is not None:
        last, before = max(last, at), step
        size, count, passed = size + step, count + 1, passed + at
        if count == _SAME or passed > _SLOW or work.late():
            step, count, passed = step * 2, 0, 0
    finer = size
    for _ in range(_FINER if finer > least else 0):
        before = before // 2 // grain * grain
        if before and not work.late() and failing(finer - before, last) is None:
            finer -= before
    return finer if finer == size or failing(finer, None) is None else size


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


def lowered(working: int, least: int, fits: Callable[[int], bool], exact: Callable[[], bool] = lambda: True) -> int:
    """Return a number from ``least`` to ``working`` that fits and is ``least`` or has a neighbour below that does not.

    Steps down from ``working``, which fits, are doubled until one fails. Where ``exact`` says no it is the number that
    the search has come to.
    """
    step = 1
    failing = least - 1
    while working > least and exact():
        lower = max(least, working - step)
        if not fits(lower):
            failing = lower
            break
        working, step = lower, step * 2
    return boundary(failing, working, fits, exact)


def boundary(failing: int, working: int, fits: Callable[[int], bool], exact: Callable[[], bool] = lambda: True) -> int:
    """Return a number that fits although the one before does not, given one that fails and a larger one that fits."""
    while working - failing > 1 and exact():
        middle = (failing + working) // 2
        if fits(middle):
            working = middle
        else:
            failing = middle
    return working
