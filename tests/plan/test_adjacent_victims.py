"""The range of copies that leave is the one that a look at every range finds."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

from disco_accel.plan.buildmemgraph.sim_malloc import _adjacent_victims, _Extent


def plain(extents: Sequence[_Extent], size: int) -> tuple[int, int] | None:
    found = []
    for first in range(len(extents)):
        for behind in range(first + 1, len(extents) + 1):
            part = extents[first:behind]
            if any(left.end != right.begin for left, right in pairwise(part)):
                break
            if part[-1].end - part[0].begin >= size:
                rank = min(each.rank for each in part)
                offload = sum(each.offload for each in part)
                found.append(((any(each.kept for each in part), -rank, offload, part[0].begin), (first, behind)))
                break
    return min(found)[1] if found else None


def random_extents(rng: random.Random) -> list[_Extent]:
    extents, begin = [], 0
    for _ in range(rng.randrange(1, 30)):
        begin += rng.choice((0, 0, 0, 64))
        end = begin + 64 * rng.randrange(1, 6)
        if rng.random() < 0.3:
            extents.append(_Extent(begin, end))
        else:
            extents.append(
                _Extent(begin, end, float(rng.randrange(6)), rng.random() < 0.2, rng.choice((0, 0, end - begin)))
            )
        begin = end
    return extents


def test_it_is_the_range_that_all_ranges_give() -> None:
    rng, found, none = random.Random(0), 0, 0
    for _ in range(2000):
        extents, size = random_extents(rng), 64 * rng.randrange(1, 24)
        expected = plain(extents, size)
        assert _adjacent_victims(extents, size) == expected
        found, none = found + (expected is not None), none + (expected is None)
    assert min(found, none) > 200


def test_of_equal_ranges_the_lowest_leaves() -> None:
    copies = [_Extent(0, 64, 5.0), _Extent(64, 128, 5.0), _Extent(128, 192, 5.0)]
    assert _adjacent_victims(copies, 64) == (0, 1)
    assert _adjacent_victims([], 64) is None
