"""A topological order that moves as little as it can."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence


def stable_order(ids: Sequence[int], pairs: Iterable[tuple[int, int]]) -> list[int] | None:
    """Return the places of ``ids`` in the first order, in terms of those places, in which u comes before v for each
    (u, v) of ``pairs``; None if there is a cycle. So an order that is already topological comes back unchanged."""
    place = {number: at for at, number in enumerate(ids)}
    successors: list[list[int]] = [[] for _ in ids]
    waiting = [0] * len(ids)
    for before, then in pairs:
        successors[place[before]].append(place[then])
        waiting[place[then]] += 1
    ready = [at for at, count in enumerate(waiting) if count == 0]
    order: list[int] = []
    while ready:
        at = heapq.heappop(ready)
        order.append(at)
        for successor in successors[at]:
            waiting[successor] -= 1
            if waiting[successor] == 0:
                heapq.heappush(ready, successor)
    return order if len(order) == len(ids) else None
