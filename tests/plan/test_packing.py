"""Offsets for buffers: no two that are live at once share bytes, and those of the naive packer."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from disco_accel.errors import ExtensionError
from disco_accel.plan.timed.packing import LiveBuffer, LivePart, _Packer, pack
from disco_accel.plan.timed.planner_library import planner_library
from tests.support.oracles.naive_packer import NaivePacker


def random_buffers(seed: int, count: int = 120, ticks: int = 60, further: float = 0.3) -> list[LiveBuffer]:
    """Buffers of a ring of ``ticks``: some go over its border, some are always there, some take no bytes, some are in
    several parts (as many as ``further`` says), which have the same bytes at another time or others."""
    rng = random.Random(seed)
    buffers = []
    for _ in range(count):
        begin = rng.randrange(ticks)
        end = rng.randint(begin + 1, ticks)
        lifespans = ((begin, end),)
        if begin > 2 and rng.random() < 0.2:
            lifespans = ((0, rng.randrange(1, begin)), (begin, ticks))
        elif rng.random() < 0.05:
            lifespans = ((0, ticks),)
        elif rng.random() < 0.6:
            lifespans = ((begin, min(ticks, begin + rng.randint(1, 4))),)
        size = rng.choice((0, 1, 3, 16, 64, 256)) * rng.randint(1, 3)
        parts = [LivePart(0, size, lifespans)]
        while size and rng.random() < further:
            begin = rng.randrange(ticks)
            end = rng.randint(begin + 1, ticks)
            if rng.random() < 0.3 and end < parts[-1].lifespans[0][0]:
                parts.append(LivePart(parts[-1].offset, parts[-1].size, ((begin, end),)))
            else:
                parts.append(LivePart(parts[-1].offset + parts[-1].size, rng.choice((1, 3, 16, 64)), ((begin, end),)))
        buffers.append(LiveBuffer(tuple(parts)))
    return buffers


def overlaps(buffers: list[LiveBuffer], offsets: list[int]) -> list[tuple[int, int]]:
    placed = np.array(
        [
            (i, offset + part.offset, offset + part.offset + part.size, begin, end)
            for i, (buffer, offset) in enumerate(zip(buffers, offsets, strict=True))
            for part in buffer.parts
            for begin, end in part.lifespans
        ]
    )
    owner, low, high, begin, end = placed.T
    overlapping = []
    for i, *mine in placed:
        other = (owner > i) & (low < mine[1]) & (high > mine[0]) & (begin < mine[3]) & (end > mine[2])
        overlapping += [(int(i), int(j)) for j in owner[other & (low < high)]]
    return overlapping


def live_peak(buffers: list[LiveBuffer]) -> int:
    ends = max(end for buffer in buffers for part in buffer.parts for _, end in part.lifespans)
    parts = [part for buffer in buffers for part in buffer.parts]
    return max(sum(p.size for p in parts if any(s <= t < e for s, e in p.lifespans)) for t in range(ends))


@pytest.mark.parametrize("seed", range(9))
def test_packings_are_those_of_the_naive_packer(seed: int) -> None:
    # So many that the compiled one looks at no, one, or two kinds of slices of the time.
    buffers = random_buffers(seed, count=(120, 700, 1500)[seed % 3], ticks=(60, 500, 3000)[seed // 3 % 3])
    limit = live_peak(buffers)
    for rounds in (0, 1, 9):
        order = random.Random(seed).sample(range(len(buffers)), len(buffers))
        packed, slow = (packer.pack(order, limit, rounds) for packer in (_Packer(buffers), NaivePacker(buffers)))
        assert packed == slow
        assert not overlaps(buffers, packed.offsets)
        assert packed.height == max(a + p.size for a, p in zip(packed.offsets, buffers, strict=True)) >= limit
        assert order == random.Random(seed).sample(range(len(buffers)), len(buffers)), "what was passed is as it was"


@pytest.mark.parametrize("seed", range(6))
def test_buffers_that_have_an_offset_keep_it(seed: int) -> None:
    """They are there before all others, in any order and round, and the packer agrees with the naive one."""
    free = random_buffers(seed, count=(120, 700)[seed % 2], ticks=(60, 500)[seed // 2 % 2])
    rng = random.Random(seed)
    limit = live_peak(free)
    # A packing with room to spare says where some of them may lie together.
    loose = _Packer(free).pack(rng.sample(range(len(free)), len(free)), limit, 0)
    # A buffer of no bytes is in no buffer's way, wherever it lies.
    some = [i for i, buffer in enumerate(free) if buffer.size]
    fixed = set(rng.sample(some, len(some) // 4))
    buffers = [replace(b, at=loose.offsets[i] + 64) if i in fixed else b for i, b in enumerate(free)]
    for rounds in (0, 9):
        order = rng.sample(range(len(buffers)), len(buffers))
        packed, slow = (packer.pack(order, limit, rounds) for packer in (_Packer(buffers), NaivePacker(buffers)))
        assert packed == slow
        assert not overlaps(buffers, packed.offsets)
        assert all(packed.offsets[i] == buffers[i].at for i in fixed)
        assert packed.height >= max(buffers[i].at + buffers[i].size for i in fixed)
    assert pack(buffers, limit).offsets[min(fixed)] == buffers[min(fixed)].at


def test_rounds_bring_what_lies_too_high_down() -> None:
    """Over 40 random instances that no single order packs into their live bytes."""
    first, last, peaks = 0, 0, 0
    for seed in range(40):
        buffers = random_buffers(seed, further=0.0)
        packer, peak = _Packer(buffers), live_peak(buffers)
        order = sorted(range(len(buffers)), key=lambda i: -buffers[i].size)
        before, after = packer.pack(order, peak, 0), packer.pack(order, peak, 24)
        assert after.height <= before.height
        first, last, peaks = first + before.height - peak, last + after.height - peak, peaks + peak
    assert last < 0.6 * first, f"{first / peaks:.1%} above the peaks without rounds, {last / peaks:.1%} with"


def test_the_first_packing_that_fits_is_taken() -> None:
    buffers = random_buffers(3)
    roomy = pack(buffers, 4 * live_peak(buffers))
    assert roomy.tried == 1
    lowest = pack(buffers, 0)
    assert lowest.tried > 1 and live_peak(buffers) <= lowest.height <= roomy.height
    assert pack([], 0).height == 0


def test_without_a_compiler_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    planner_library.cache_clear()
    try:
        with pytest.raises(ExtensionError, match=r"no C\+\+ compiler 'no-such-compiler'.*install g\+\+"):
            pack(random_buffers(5), 1)
    finally:
        planner_library.cache_clear()
