"""Addresses for pieces of time: no two at once in the same bytes, compiled and not compiled the same ones."""

from __future__ import annotations

import logging
import random
from pathlib import Path

import pytest

from disco_accel.plan.timed import packing as module
from disco_accel.plan.timed.packing import CompiledPacking, Piece, SlowPacking, packing_of, place


def random_pieces(seed: int, count: int = 120, ticks: int = 60) -> list[Piece]:
    """Pieces of a ring of ``ticks``: some go over its border, some are always there, some take no bytes."""
    rng = random.Random(seed)
    pieces = []
    for _ in range(count):
        begin = rng.randrange(ticks)
        end = rng.randint(begin + 1, ticks)
        spans = ((begin, end),)
        if begin > 2 and rng.random() < 0.2:
            spans = ((0, rng.randrange(1, begin)), (begin, ticks))
        elif rng.random() < 0.05:
            spans = ((0, ticks),)
        elif rng.random() < 0.6:
            spans = ((begin, min(ticks, begin + rng.randint(1, 4))),)
        pieces.append(Piece(rng.choice((0, 1, 3, 16, 64, 256)) * rng.randint(1, 3), spans))
    return pieces


def overlaps(pieces: list[Piece], addresses: list[int]) -> list[tuple[int, int]]:
    found = []
    for i, a in enumerate(pieces):
        for j in range(i):
            b = pieces[j]
            at_once = any(s < f and t < e for s, e in a.spans for t, f in b.spans)
            apart = addresses[i] + a.block <= addresses[j] or addresses[j] + b.block <= addresses[i]
            if at_once and not apart:
                found.append((j, i))
    return found


def live_peak(pieces: list[Piece]) -> int:
    ends = max(end for piece in pieces for _, end in piece.spans)
    return max(sum(p.block for p in pieces if any(s <= t < e for s, e in p.spans)) for t in range(ends))


@pytest.mark.parametrize("seed", range(18))
def test_compiled_and_not_compiled_find_the_same(seed: int) -> None:
    # So many that the compiled one looks at no, one, or two kinds of slices of the time.
    pieces = random_pieces(seed, count=(120, 700, 1500)[seed % 3], ticks=(60, 500, 3000)[seed // 3 % 3])
    compiled = packing_of(pieces)
    assert isinstance(compiled, CompiledPacking), "tests need a C++ compiler"
    limit = live_peak(pieces)
    for rounds in (0, 1, 9):
        order = random.Random(seed).sample(range(len(pieces)), len(pieces))
        found, slow = (packing.place(order, limit, rounds) for packing in (compiled, SlowPacking(pieces)))
        assert found == slow
        assert not overlaps(pieces, found.addresses)
        assert found.top == max(a + p.block for a, p in zip(found.addresses, pieces, strict=True)) >= limit
        assert order == random.Random(seed).sample(range(len(pieces)), len(pieces)), "what was passed is as it was"


def test_rounds_bring_what_lies_too_high_down() -> None:
    """Over 40 random instances that no single order packs into their live bytes."""
    first, last, peaks = 0, 0, 0
    for seed in range(40):
        pieces = random_pieces(seed)
        packing, peak = packing_of(pieces), live_peak(pieces)
        order = sorted(range(len(pieces)), key=lambda i: -pieces[i].block)
        before, after = packing.place(order, peak, 0), packing.place(order, peak, 24)
        assert after.top <= before.top
        first, last, peaks = first + before.top - peak, last + after.top - peak, peaks + peak
    assert last < 0.6 * first, f"{first / peaks:.1%} above the peaks without rounds, {last / peaks:.1%} with"


def test_what_fits_is_taken_at_once_and_an_order_is_gone_on_from() -> None:
    pieces = random_pieces(3)
    roomy = place(pieces, 4 * live_peak(pieces))
    assert roomy.tried == 1
    lowest = place(pieces, 0)
    again = place(pieces, lowest.top, lowest.order)
    assert (again.top, again.addresses, again.tried) == (lowest.top, lowest.addresses, 1)
    assert place([], 0).top == 0


def test_without_a_compiler_plans_are_the_same_and_the_user_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    pieces = random_pieces(5)
    expected = place(pieces, live_peak(pieces))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    module._compiled.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, "disco_accel"):
            assert [place(pieces, live_peak(pieces)) for _ in range(2)] == [expected] * 2
    finally:
        module._compiled.cache_clear()
    assert len(caplog.messages) == 1 and "no C++ compiler 'no-such-compiler'" in caplog.messages[0]
