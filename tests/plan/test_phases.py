"""Stretches of a step, from arrays, are those that a walk over all values gives."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

from disco_accel.plan.phases import OneDevice, _Reads, _stretch, phases


@dataclass
class Read:
    size: int
    made: int
    starts_on_host: bool
    renewed: bool
    uses: list[int] = field(default_factory=list)


def plain_stretch(device: OneDevice, marks: list[int], a: int) -> list[float]:
    """Position by position, value by value."""
    begin, end = marks[a], len(device.seconds)
    room = device.memory - int(device.outputs[begin])
    around = [*range(begin, end), *range(begin)]
    loads, renewed = [0] * end, [0] * end
    for value in device.values:
        if not value.uses:
            continue
        later = [use for use in value.uses if use >= begin]
        if value.renewed and (begin == 0 or value.uses[0] < begin):
            renewed[value.uses[0]] += value.size
        if later and value.made < begin and not (value.renewed and begin == 0):
            loads[later[0]] += value.size
        elif not later and value.starts_on_host and not value.renewed:
            loads[value.uses[0]] += value.size
    seconds = []
    for mark in [*marks[a + 1 :], *marks[: a + 1]]:
        passed = around[: (mark - begin) if mark > begin else mark - begin + end]
        must = max(0, sum(loads[p] for p in passed) - room) + sum(renewed[p] for p in passed)
        seconds.append(must / device.bandwidth)
    return seconds


def random_device(rng: random.Random) -> OneDevice:
    end = rng.randrange(1, 40)
    values = []
    for _ in range(rng.randrange(12)):
        made = rng.choice((-1, rng.randrange(end)))
        uses = sorted({rng.randrange(max(0, made), end) for _ in range(rng.randrange(4))} - {made})
        on_host = made < 0 and rng.random() < 0.8
        values.append(Read(rng.randrange(1, 100), made, on_host, on_host and rng.random() < 0.3, uses))
    outputs = np.array([rng.randrange(50) for _ in range(end)], np.int64)
    return OneDevice([rng.random() for _ in range(end)], outputs, rng.randrange(100), 7.0, values)


def test_each_stretch_is_that_of_a_walk() -> None:
    rng, waiting = random.Random(1), 0
    for _ in range(200):
        device = random_device(rng)
        end = len(device.seconds)
        marks = sorted({0, *(rng.randrange(end) for _ in range(5))})
        reads = _Reads(device.values, marks, end)
        for a in range(len(marks)):
            found = _stretch(device, reads, a)
            assert found == plain_stretch(device, marks, a)
            waiting += any(found)
    assert waiting > 100


def test_phases_are_at_least_all_kernels() -> None:
    rng = random.Random(2)
    for _ in range(50):
        device = random_device(rng)
        assert phases(device) >= sum(device.seconds) * (1 - 1e-9)
