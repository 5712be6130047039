"""Free memory of one arena: what a search remembers of runs of free bytes is still so."""

from __future__ import annotations

import random

import pytest

from disco_accel.plan.common.device_copy import Piece
from disco_accel.plan.common.free_list import FreeSpace, Window

SIZE = 400


def rank(_: object) -> float:
    raise AssertionError("nothing is cached here")


def afresh(space: FreeSpace, size: int) -> Window | None:
    """What is found in the same free bytes by a search that remembers nothing."""
    copy = FreeSpace(0)
    copy.give([Piece(piece.start, piece.end, piece.release, piece.newest) for piece in space.pieces])
    return copy.oldest_fit(size, rank)


@pytest.mark.parametrize("aged", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_the_oldest_place_is_found_whatever_was_taken_and_given_before(seed: int, aged: bool) -> None:
    rng = random.Random(seed)
    space = FreeSpace(SIZE, aged=aged)
    space.take(0, SIZE)
    taken = [(start, start + 4) for start in range(0, SIZE, 4)]
    searches = 0
    for step in range(600):
        if taken and rng.random() < 0.55:
            start, end = taken.pop(rng.randrange(len(taken)))
            release = rng.choice([(), (step,), (step // 7,)])
            space.give([Piece(start, end, release, max(release, default=-1))])
            continue
        size = rng.choice([4, 8, 20])
        window = space.oldest_fit(size, rank)
        assert window == afresh(space, size)
        assert window is None or space.is_free(window.start, window.end)
        if aged:
            assert space.first_fit(size, rank) == window
        if window is not None:
            searches += 1
            space.take(window.start, window.end)
            taken.append((window.start, window.end))
    assert searches > 100
