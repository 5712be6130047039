"""Seconds that stretches of a step need one after another, some for their kernels and some for their loads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

_MARKS = 128
_TURNS = 16


class ReadValue(Protocol):
    """A value as ``plan/bound.py`` knows it."""

    size: int
    made: int
    starts_on_host: bool
    renewed: bool
    uses: list[int]


@dataclass(frozen=True, slots=True)
class OneDevice:
    """A device whose kernels run one at a time: ``seconds`` of compute and bytes of ``outputs`` by position, ``memory``
    in bytes, bytes/s of its loads, and the ``values`` that are read on it."""

    seconds: Sequence[float]
    outputs: NDArray[np.int64]
    memory: int
    bandwidth: float
    values: Sequence[ReadValue]


def phases(device: OneDevice) -> float:
    """Return the seconds that stretches of the step need one after another.

    From the start of one vertex, or of the step, to the start of a later one, the values that are read between and were
    made before, less the bytes that fit beside the outputs of the first, must be loaded. A stretch may cross the step
    boundary; what the host has renewed there must be loaded in any case. The result is the largest sum over divisions
    of the ring into such stretches.
    """
    end = len(device.seconds)
    marks = sorted({round(i * end / _MARKS) for i in range(_MARKS)})
    count = len(marks)
    clock = np.concatenate(([0.0], np.cumsum(device.seconds)))
    length = np.diff([*(clock[mark] for mark in marks), clock[-1]])
    reads = _Reads(device.values, marks, end)
    stretch = np.array([_stretch(device, reads, a) for a in range(count)])
    for a in range(count):
        stretch[a] = np.maximum(stretch[a], np.cumsum(np.roll(length, -a)))
    best = 0.0
    for turn in range(0, count, max(1, count // _TURNS)):
        ends = np.zeros(count + 1)
        for step in range(count):
            a = (turn + step) % count
            ends[step + 1 :] = np.maximum(ends[step + 1 :], ends[step] + stretch[a][: count - step])
        best = max(best, float(ends[-1]))
    return best


def _stretch(device: OneDevice, reads: _Reads, a: int) -> list[float]:
    """Return the seconds that the link needs from mark ``a`` to each of the marks after it, all around the ring."""
    begin = reads.marks[a]
    room = device.memory - int(device.outputs[begin]) if begin < reads.end else device.memory
    first, renewed = reads.loads_from(a)
    total, always = (np.cumsum(np.roll(each, -a)) for each in (first, renewed))
    loads = zip(total.tolist(), always.tolist(), strict=True)
    return [(max(0, nbytes - room) + renewed_bytes) / device.bandwidth for nbytes, renewed_bytes in loads]


class _Reads:
    """The values that are read, as arrays. ``marks``: ascending positions from 0 on, each the begin of an interval that
    ends before the next one, or with the step."""

    def __init__(self, values: Sequence[ReadValue], marks: Sequence[int], end: int) -> None:
        values = [value for value in values if value.uses]
        self.marks, self.end = marks, end
        self._size = np.array([value.size for value in values], np.int64)
        self._made = np.array([value.made for value in values], np.int64)
        self._on_host = np.array([value.starts_on_host for value in values], np.bool_)
        self._renewed = np.array([value.renewed for value in values], np.bool_)
        counts = np.array([len(value.uses) for value in values], np.int64)
        uses = np.array([use for value in values for use in value.uses], np.int64)
        self._ends = np.cumsum(counts)
        self._first = np.array([value.uses[0] for value in values], np.int64)
        self._interval = np.searchsorted(np.array(marks), uses, side="right") - 1
        """Of each use, all of a value side by side; ``_ends``: where those of each value end."""
        # One sorted array of all uses: those of a value lie between its number times so many positions and the next's.
        self._stride = end + 1
        self._numbers = np.arange(len(values), dtype=np.int64) * self._stride
        self._keys = np.repeat(self._numbers, counts) + uses

    def loads_from(self, a: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return, by interval, the bytes of the values that are read first there from mark ``a`` on, around the ring,
        and were made before; and the bytes that the host renews, which no device has before their first use."""
        begin = self.marks[a]
        step_starts = begin in (0, self.end)
        first, renewed = np.zeros((2, len(self.marks)), np.int64)
        if not len(self._size):
            return first, renewed
        at = np.searchsorted(self._keys, self._numbers + begin)
        later = at < self._ends
        takes = later & (self._made < begin)
        if step_starts:
            takes &= ~self._renewed
        np.add.at(first, self._interval[at[takes]], self._size[takes])
        earliest = self._interval[self._ends - np.diff(self._ends, prepend=0)]
        # Their next reader is in the next step.
        around = ~later & self._on_host & ~self._renewed
        np.add.at(first, earliest[around], self._size[around])
        anew = self._renewed if step_starts else self._renewed & (self._first < begin)
        np.add.at(renewed, earliest[anew], self._size[anew])
        return first, renewed
