"""The least bytes that the copies of a step move, by linear programming."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from disco_accel.plan.bound.device_facts import DeviceFacts


@dataclass(frozen=True, slots=True)
class _Gap:
    """``size`` bytes that nobody reads in ``[begin, end)``, which crosses the step boundary if ``begin > end``.

    ``changed``: by then the host's copy is out of date, so that leaving takes a write-back.
    """

    begin: int
    end: int
    size: int
    changed: bool = False


def gaps_of(facts: DeviceFacts) -> list[_Gap]:
    """Return the gaps between two uses in which keeping a value saves a reload."""
    gaps = []
    for value in facts.each_value:
        if not value.uses:
            continue
        stops = value.uses if value.made < 0 else [value.made, *value.uses]
        gaps += [_Gap(a + 1, b, value.size) for a, b in pairwise(stops) if b > a + 1]
        stays = value.starts_on_host and not value.host_updated and not value.at_home
        if stays and (value.uses[-1] + 1 < facts.end or value.uses[0] > 0):
            gaps.append(_Gap(value.uses[-1] + 1, value.uses[0], value.size, value.changed))
    return gaps


def load_with_all_kept(facts: DeviceFacts, gaps: Sequence[_Gap]) -> npt.NDArray[np.int64]:
    """Return the bytes on the device at each position of a step that keeps its values through all ``gaps``."""
    load = facts.needed.astype(np.int64)
    for gap in gaps:
        if gap.begin <= gap.end:
            load[gap.begin : gap.end] += gap.size
        else:
            load[gap.begin :] += gap.size
            load[: gap.end] += gap.size
    return load


def _rows(facts: DeviceFacts, gaps: Sequence[_Gap], most: int) -> list[int]:
    """Return the positions that can bind: those where not everything fits, thinned out to ``most``."""
    load = load_with_all_kept(facts, gaps)
    pressed = np.flatnonzero(load > facts.memory)
    if len(pressed) <= most:
        return [int(p) for p in pressed]
    parts = np.array_split(pressed, most)
    return [int(part[np.argmax(facts.needed[part])]) for part in parts]


_MAX_ROWS = 20_000
"""Beyond so many some are left out, which keeps the program small, and its optimum a bound."""

_SMALL, _SMALL_ROWS = 2000, 256
"""Gaps of values below such a part of the memory begin and end at one of so many rows, so that many are one variable.
In Qwen3-30B-A3B's step at 44 GiB these values are 2.4 GiB, and 4.4 of its 33.8 GB of loads."""


def least_loads(facts: DeviceFacts) -> tuple[float, float]:
    """Return ``least_copies`` of loads alone."""
    return least_copies(facts, loads=True, backs=False)


def least_copies(facts: DeviceFacts, *, loads: bool, backs: bool, most_rows: int = _MAX_ROWS) -> tuple[float, float]:
    """Return seconds and bytes that ``loads`` from the host, copies ``back`` to it, or both take at least in a step, by
    linear programming. Values that the host updates are loaded once besides.

    The variables are the bytes of each value kept through each gap; at no position may more be kept than fits beside
    the inputs and outputs of its vertex. Bytes that are not kept are reloaded, and written back before where a kernel
    has changed them. One write-back serves all gaps behind a change, so only the gap around the step boundary is
    counted. The step is a ring: values on the device at its end are there at its start. Bytes that are written back and
    reloaded count twice. ``most_rows``: positions that are looked at; fewer leave it a bound.
    """
    link = facts.loads
    host_updated = facts.host_updated if loads else []
    always = sum(host_updated) / link.bandwidth + len(host_updated) * link.latency
    gaps = gaps_of(facts)
    rows = _rows(facts, gaps, most_rows)
    if not rows:
        return always, sum(host_updated)
    spans = _spans(facts, gaps, rows)
    costs = [_cost(facts, loads, changed and backs, size) for _, _, size, changed in spans]
    sizes = [sum(gap.size for gap in same) / facts.memory for same in spans.values()]
    kept = _most_valuable(facts, rows, spans, sizes, [seconds for seconds, _ in costs])
    if kept is None:
        return always, sum(host_updated)
    missing = [(size - part) * facts.memory for size, part in zip(sizes, kept, strict=True)]
    cost = sum(m * seconds for m, (seconds, _) in zip(missing, costs, strict=True))
    nbytes = sum(m * times for m, (_, times) in zip(missing, costs, strict=True))
    return always + max(0.0, float(cost) / link.bandwidth), sum(host_updated) + max(0.0, float(nbytes))


_Spans = dict[tuple[int, int, int, bool], list[_Gap]]
"""Gaps that are one variable, by the numbers of their first and last row, the largest size, and whether changed."""


def _spans(facts: DeviceFacts, gaps: Sequence[_Gap], rows: Sequence[int]) -> _Spans:
    spans: _Spans = defaultdict(list)
    small = facts.memory // _SMALL
    coarse = max(1, len(rows) // _SMALL_ROWS)
    for gap in gaps:
        first, last = (int(each) for each in np.searchsorted(rows, (gap.begin, gap.end)))
        largest = gap.size
        if gap.size < small:
            # Said to be shorter, and of larger values, than they are.
            first, last = -(-first // coarse) * coarse, last // coarse * coarse
            largest = 1 << (gap.size - 1).bit_length()
        if gap.begin > gap.end or last > first:
            # Gaps over the same rows and of equal size are one variable.
            spans[first, last, largest, gap.changed].append(gap)
    return spans


def _cost(facts: DeviceFacts, loads: bool, written_back: bool, size: int) -> tuple[float, int]:
    """Return the cost of a byte that is not kept, in bytes loaded, and how often it is copied."""
    link, back = facts.loads, facts.backs
    cost = loads * (1.0 + link.latency * link.bandwidth / size)
    if written_back:
        cost += (1.0 + back.latency * back.bandwidth / size) * link.bandwidth / back.bandwidth
    return cost, loads + written_back


def _most_valuable(
    facts: DeviceFacts, rows: Sequence[int], spans: _Spans, sizes: Sequence[float], costs: Sequence[float]
) -> Sequence[float] | None:
    """Return the part of the memory that is kept through each of ``spans`` for the least cost of the rest (None: the
    solver has no answer)."""
    from scipy.optimize import linprog
    from scipy.sparse import csc_array

    row, column, entry = [], [], []

    def put(r: int, c: int, value: float) -> None:
        if r < len(rows):
            row.append(r)
            column.append(c)
            entry.append(value)

    # Each row is the difference to the one before: a gap has one entry where it begins and one where it ends.
    for c, ((first, last, *_), same) in enumerate(spans.items()):
        around = same[0].begin > same[0].end
        if around:
            put(0, c, 1.0)
        put(last if around else first, c, -1.0 if around else 1.0)
        put(first if around else last, c, 1.0 if around else -1.0)
    count = len(spans)
    for r in range(len(rows)):
        put(r, count + r, 1.0)
        put(r + 1, count + r, -1.0)
    matrix = csc_array((entry, (row, column)), shape=(len(rows), count + len(rows)))
    free = np.maximum(facts.memory - facts.needed[rows], 0)
    solved = linprog(
        [*(-cost for cost in costs), *(0.0 for _ in rows)],
        A_eq=matrix,
        b_eq=np.diff(free, prepend=0) / facts.memory,
        bounds=[(0.0, size) for size in sizes] + [(0.0, np.inf) for _ in rows],
        method="highs",
    )
    return None if solved.x is None else solved.x[:count]
