"""The smallest feasible memory: an arena in which BUILDMEMGRAPH has a plan while one alignment unit less has none."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from disco_accel.eviction import Policy
from disco_accel.graph.check import largest_need
from disco_accel.graph.taskgraph import TaskGraph, with_at_least
from disco_accel.graph.values import is_foreign
from disco_accel.plan.buildmemgraph.builder import failing_position
from disco_accel.plan.buildmemgraph.residents import Residents
from disco_accel.plan.search_work import WALKED, SearchWork

_AMPLE = 4
"""A memory of so many times the need of the largest kernel is enough for BUILDMEMGRAPH. To ask it takes a third of the
planning of 80 layers that do not fit."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """Arguments of ``build``: see there."""

    lookahead: int | None
    residents: Residents
    outs_apart: bool = False
    slack: float | None = None


Attempts = Callable[[TaskGraph], Iterator[Attempt]]
"""The attempts for a graph, in order; the last one needs the least memory."""


def working_set(graph: TaskGraph) -> int:
    """Return the bytes below which no plan exists, the same for every device: the need of its neediest vertex."""
    return max(largest_need(graph, device.id)[0] for device in graph.devices)


def least_memory(graph: TaskGraph) -> int:
    """Return the least bytes for devices of ``graph`` that have less, if it has no plan as they are. That is more than
    the smallest has, and as many as a vertex needs on a device where it does not fit."""
    devices = [device for device in graph.devices if not device.is_host_device]
    needs = [need for device in devices if (need := largest_need(graph, device.id)[0]) > device.memory]
    return max([min(device.memory for device in devices) + 1, *needs])


_EXACT = 100_000
"""Vertices that a search which is exact to the alignment unit may walk past, about four seconds."""

_USUAL = 40
"""Walks that such a search usually takes; where there is no time for as many, it ends with a size nearby."""

_FIRST = 128
_SAME = 8
_SLOW = 20_000
_FINER = 5
"""Sizes are tried from the working set up, in steps of one part in ``_FIRST`` of it, ``_SAME`` times or ``_SLOW``
vertices before steps double; the last step is halved ``_FINER`` times. Whether a captured step fits is not monotone in
the size, and a search whose steps double each time may miss the smallest feasible one by a fifth."""


def smallest_feasible_memory(
    graph: TaskGraph, policy: Policy, cyclic: bool, attempts: Attempts, work: SearchWork
) -> int:
    """Return the smallest size found at which BUILDMEMGRAPH has a plan of ``graph``, of every device that has less.

    One alignment unit less fails, unless the search for that would take long (``_EXACT``), or the user's time is up.
    The memory that the devices of ``graph`` have now is known to be infeasible. Planning is not monotone in memory, so
    a smaller size may be feasible by chance. The attempt that needs least memory gets close. Then all attempts are
    tried in one unit less, and the search goes on with one that works there.
    """
    unit = max(device.alignment for device in graph.devices)
    least = -(-least_memory(graph) // unit)
    walked = 0

    def exact() -> bool:
        return max(walked, _USUAL * len(graph.vertices)) <= _EXACT and not work.late()

    def failing(units: int, attempt: int, until: int | None = None) -> int | None:
        nonlocal walked
        at = _failing(with_at_least(graph, units * unit), policy, cyclic, attempts, attempt, until)
        walked += len(graph.vertices) if at is None and until is None else at or until or 0
        return at

    def feasible(units: int, attempt: int) -> bool:
        return failing(units, attempt) is None

    def first_feasible(units: int) -> int | None:
        return next((n for n in range(len(list(attempts(graph)))) if feasible(units, n)), None)

    def modest(units: int, until: int | None) -> int | None:
        return failing(units, 0, until)

    sizes = {size for vertex in graph.vertices if not is_foreign(vertex) for size in vertex.sizes}
    grain = max(1, math.gcd(*(-(-size // unit) for size in sizes)))
    units = _grow_until_feasible(least, grain, modest, work)
    # Invariant: some attempt has a plan in units. The loop ends where none has one in units - 1, or no longer exactly.
    while units > least and exact() and (attempt := first_feasible(units - 1)) is not None:
        units = bisect_down(units - 1, least, partial(feasible, attempt=attempt), exact)
    work.add(WALKED, walked)
    return units * unit


def _grow_until_feasible(
    least: int, grain: int, failing: Callable[[int, int | None], int | None], work: SearchWork
) -> int:
    """Return a number from ``least`` on that does not fail, in few walks.

    ``failing(n, until)``: the position at which ``n`` fails, looking no further than ``until``. All allocations are
    multiples of ``grain``.
    """
    size, count, furthest, passed = least, 0, -1, 0
    step = before = max(grain, least // _FIRST // grain * grain)
    while (at := failing(size, None)) is not None:
        furthest, before = max(furthest, at), step
        size, count, passed = size + step, count + 1, passed + at
        if count == _SAME or passed > _SLOW or work.late():
            step, count, passed = step * 2, 0, 0
    finer = size
    for _ in range(_FINER if finer > least else 0):
        before = before // 2 // grain * grain
        # A size that passes the furthest position at which a smaller one failed most likely passes the others too; one
        # whole walk at the end makes sure.
        if before and not work.late() and failing(finer - before, furthest) is None:
            finer -= before
    return finer if finer == size or failing(finer, None) is None else size


def has_ample_memory(graph: TaskGraph) -> bool:
    """Whether each device has so much more than any of its kernels needs that BUILDMEMGRAPH need not be asked."""
    devices = [device for device in graph.devices if not device.is_host_device]
    return all(_AMPLE * largest_need(graph, device.id)[0] <= device.memory for device in devices)


def first_fitting(graph: TaskGraph, policy: Policy, cyclic: bool, attempts: Attempts) -> int | None:
    """Return the number of an attempt with which BUILDMEMGRAPH has a plan, counted from the last one of all."""
    for attempt in range(len(list(attempts(graph)))):
        if _failing(graph, policy, cyclic, attempts, attempt) is None:
            return attempt
    return None


def _failing(
    graph: TaskGraph, policy: Policy, cyclic: bool, attempts: Attempts, attempt: int, until: int | None = None
) -> int | None:
    """Return the position up to ``until`` at which that attempt, counted from the last of all, fails; None if none."""
    from_last = list(attempts(graph))[::-1]
    if attempt >= len(from_last):
        return 0
    tried = from_last[attempt]
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


def bisect_down(
    feasible: int, least: int, fits: Callable[[int], bool], exact: Callable[[], bool] = lambda: True
) -> int:
    """Return a number from ``least`` to ``feasible`` that fits and is ``least`` or has a neighbour below that does not.

    Steps down from ``feasible``, which fits, are doubled until one fails; between the two it is bisected. Once
    ``exact`` says no, it is the smallest number so far that fits.
    """
    step = 1
    failing = least - 1
    while feasible > least and exact():
        lower = max(least, feasible - step)
        if not fits(lower):
            failing = lower
            break
        feasible, step = lower, step * 2
    return bisect(failing, feasible, fits, exact)


def bisect(failing: int, feasible: int, fits: Callable[[int], bool], exact: Callable[[], bool] = lambda: True) -> int:
    """Return a number that fits although the one below does not, given one that fails and a larger one that fits."""
    # Invariant: failing < feasible, feasible fits and failing does not.
    while feasible - failing > 1 and exact():
        middle = (failing + feasible) // 2
        if fits(middle):
            feasible = middle
        else:
            failing = middle
    return feasible
