"""The free list of one arena: the oldest ranges that it remembers by run are what a search from scratch finds."""

from __future__ import annotations

import random

import pytest

from disco_accel.plan.common.device_copy import FreeBlock
from disco_accel.plan.common.free_list import AddressRange, FreeList

SIZE = 400


def rank(_: object) -> float:
    raise AssertionError("nothing is cached here")


def from_scratch(free_list: FreeList, size: int) -> AddressRange | None:
    """The range that a search finds in the same free blocks when it remembers nothing."""
    fresh = FreeList(0)
    fresh.free([FreeBlock(block.start, block.end, block.release, block.last_use) for block in free_list.blocks])
    return fresh.oldest_fit(size, rank)


@pytest.mark.parametrize("oldest_first", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_the_oldest_range_is_found_whatever_was_allocated_and_freed_before(seed: int, oldest_first: bool) -> None:
    rng = random.Random(seed)
    free_list = FreeList(SIZE, oldest_first=oldest_first)
    free_list.allocate(0, SIZE)
    allocated = [(start, start + 4) for start in range(0, SIZE, 4)]
    searches = 0
    for step in range(600):
        if allocated and rng.random() < 0.55:
            start, end = allocated.pop(rng.randrange(len(allocated)))
            release = rng.choice([(), (step,), (step // 7,)])
            free_list.free([FreeBlock(start, end, release, max(release, default=-1))])
            continue
        size = rng.choice([4, 8, 20])
        fit = free_list.oldest_fit(size, rank)
        assert fit == from_scratch(free_list, size)
        assert fit is None or free_list.is_free(fit.start, fit.end)
        if oldest_first:
            assert free_list.first_fit(size, rank) == fit
        if fit is not None:
            searches += 1
            free_list.allocate(fit.start, fit.end)
            allocated.append((fit.start, fit.end))
    assert searches > 100
