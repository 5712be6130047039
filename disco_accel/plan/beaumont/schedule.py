"""Algorithm 2 of Beaumont et al.: when the weights of chosen gaps are copied, for every point at which the cyclic
sequence of ops may be cut.

Copies go as early as they can: writes by the end of their gap's first op, reads by the op that needs them. A read may
run ahead of that op as long as, at each op until then, the weights that are present by the choice of gaps and those
read ahead fit the memory. Weights are made of many tensors: their memory is taken and freed byte by byte as a copy
proceeds.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from disco_accel.plan.beaumont.selection import Instance, WeightGap

PERIODS = 8
"""Steps that are simulated in a row; if none of them repeats the one before, there is no steady state worth it."""

EFFORT = 100_000
"""Ops that are simulated in all; beyond this the cuts that are tried are fewer and evenly spread."""

_TINY = 1e-9
"""Relative: bytes of the memory that rounding may lose."""


@dataclass(frozen=True, slots=True)
class Copy:
    """One piece of a copy, in seconds from the start of the period: of the read that ends ``gap``, or, where that is
    None, of the write of a layer's new weights."""

    layer: int
    gap: WeightGap | None
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Schedule:
    """A step of ``period`` seconds that is repeated: when each op starts, by its number, and all copies.

    From the end of a gap's first op only those bytes of its weights take memory that are not yet written since their
    update (of frozen ones none), or that have been read again.
    """

    period: float
    starts: tuple[float, ...]
    copies: tuple[Copy, ...]
    chosen: tuple[WeightGap, ...]


def best_schedule(instance: Instance, chosen: Collection[WeightGap], effort: int = EFFORT) -> Schedule:
    """The shortest of: for every cut, the steps with no copy across it; and the step that, when they follow one another
    without such a barrier, repeats itself. ``chosen`` must leave room for every op (``Instance.excess``)."""
    gaps = tuple(sorted(chosen))
    best = _ScheduleRun(instance, gaps, 0, 1).alone(math.inf)
    assert best is not None
    stride = -(-instance.ops // max(1, effort // instance.ops))
    for cut in range(stride, instance.ops, stride):
        if best.period <= instance.sum_u * (1 + _TINY):
            return best
        from_cut = _ScheduleRun(instance, gaps, cut, 1).alone(best.period)
        best = best if from_cut is None or from_cut.period >= best.period else from_cut
    steady = _ScheduleRun(instance, gaps, 0, PERIODS).repeated()
    return best if steady is None or steady.period >= best.period else steady


@dataclass(slots=True)
class _Write:
    layer: int
    left: float
    gap: tuple[int, WeightGap] | None = None
    """The gap that has begun meanwhile, with the position of its read's op: bytes are freed as they are written."""


@dataclass(slots=True)
class _Read:
    due: int
    gap: WeightGap
    left: float


@dataclass(frozen=True, slots=True)
class _Mark:
    """Where a period begins. Two with equal ``state`` are followed by equal steps."""

    time: float
    copies: int
    state: tuple[float, ...]


class _Cut:
    """The ops of ``instance`` from op ``first`` on, by position, the gaps that begin and end there, and the ``room``
    that reads ahead have left."""

    def __init__(self, instance: Instance, chosen: Sequence[WeightGap], first: int, periods: int) -> None:
        self.instance, self.chosen, self.first = instance, chosen, first
        self.end = periods * instance.ops
        self.reads_end = self.end if periods == 1 else math.inf
        self.seconds = np.roll(instance.seconds, -first).tolist()
        self.during = np.roll(instance.activations, -first).tolist()
        self.after = np.roll(instance.activations_after, -first).tolist()
        self.room = np.tile(np.roll(-instance.excess(chosen), -first), periods + 1)
        self.tolerance = instance.memory * _TINY
        self.across = {gap.layer for gap in chosen if gap.across}
        self.openings: dict[int, list[WeightGap]] = defaultdict(list)
        self.updates: dict[int, list[int]] = defaultdict(list)
        for gap in chosen:
            self.openings[self.position(instance.uses(gap)[0])].append(gap)
        for layer in sorted({gap.layer for gap in chosen}):
            if not instance.frozen:
                self.updates[self.position(instance.ops - 1 - layer)].append(layer)

    def position(self, op: int) -> int:
        """Return the position of an op."""
        return (op - self.first) % self.instance.ops


class _ScheduleRun:
    """A simulation of ``periods`` steps from op ``cut``, where all weights are as the choice of gaps says.

    Positions count ops from the cut on. A single period has nothing to read for the next one.
    """

    def __init__(self, instance: Instance, chosen: Sequence[WeightGap], cut: int, periods: int) -> None:
        self.instance = instance
        self.cut = _Cut(instance, chosen, cut, periods)
        self.time, self.act, self.present = 0.0, self.cut.after[-1], float(instance.weights.sum())
        self.next = 0
        """Position of the first op that has not started."""
        self.missing: dict[int, int] = defaultdict(int)
        """How many reads each op still waits for."""
        self.queue: list[tuple[int, WeightGap]] = []
        self.reading: _Read | None = None
        self.writes: list[tuple[int, int]] = []
        self.unwritten: dict[int, _Write] = {}
        self.starts: list[float] = []
        self.copies: list[Copy] = []
        self.marks: list[_Mark] = []
        for gap in chosen:
            first, due = (self.cut.position(op) for op in instance.uses(gap))
            if due <= first:
                self._open(gap, due)

    def alone(self, limit: float) -> Schedule | None:
        """The step with no copy across its start; None if it takes longer than ``limit`` seconds."""
        for position in range(self.cut.end):
            self._op(position)
            if self.time > limit:
                return None
        while self.unwritten:
            self._advance(math.inf, reading=False)
        return self._schedule(0, 0.0, self.time, self.copies)

    def repeated(self) -> Schedule | None:
        """The first step that ends with all copies as far as it began with; None if there is none."""
        for position in range(self.cut.end):
            if position % self.instance.ops == 0:
                self.marks.append(_Mark(self.time, len(self.copies), self._state()))
                begin, end = (self.marks[0], *self.marks)[-2:]
                if begin is not end and np.allclose(begin.state, end.state, rtol=0, atol=self.cut.tolerance):
                    copies = self.copies[begin.copies : end.copies]
                    return self._schedule(len(self.marks) - 2, begin.time, end.time, copies)
            self._op(position)
        return None

    def _schedule(self, period: int, begin: float, end: float, copies: Sequence[Copy]) -> Schedule:
        first = period * self.instance.ops
        starts = [self.starts[first + self.cut.position(op)] - begin for op in range(self.instance.ops)]
        moved = tuple(Copy(c.layer, c.gap, c.start - begin, c.end - begin) for c in copies)
        return Schedule(end - begin, tuple(starts), moved, tuple(self.cut.chosen))

    def _state(self) -> tuple[float, ...]:
        """Bytes left of each write, and of each read that the gaps open now need."""
        reads = dict.fromkeys(self.cut.chosen, 0.0)
        for _, gap in self.queue:
            reads[gap] = self.instance.layers[gap.layer].w
        if self.reading is not None:
            reads[self.reading.gap] = self.reading.left
        writes = [self.unwritten[g.layer].left if g.layer in self.unwritten else 0.0 for g in self.cut.chosen]
        return (*reads.values(), *writes)

    def _op(self, position: int) -> None:
        """Wait for weights and memory, run the op, and free the memory that it was the last to need."""
        index = position % self.instance.ops
        while self.missing[position]:
            self._advance(math.inf, reading=True)
        # Reads for later ops must not take the memory that this op waits for.
        while self.present + self.cut.during[index] > self.instance.memory + self.cut.tolerance:
            self._advance(math.inf, reading=False)
        self.starts.append(self.time)
        self.act, self.next = self.cut.during[index], position + 1
        finish = self.time + self.cut.seconds[index]
        while self.time < finish:
            self._advance(finish, reading=True)
        self.act = self.cut.after[index]
        for layer in self.cut.updates[index]:
            self._update(layer, position)
        for gap in self.cut.openings[index]:
            last, following = self.instance.uses(gap)
            self._open(gap, position + following - last)

    def _update(self, layer: int, position: int) -> None:
        """The backward has changed the weights: they are written before they are dropped."""
        dropped = position if layer in self.cut.across else position + 2 * layer + 1
        self.unwritten[layer] = _Write(layer, self.instance.layers[layer].w)
        heapq.heappush(self.writes, (dropped, layer))

    def _open(self, gap: WeightGap, due: int) -> None:
        """``gap`` begins: the bytes that the host has are freed."""
        write = self.unwritten.get(gap.layer)
        self.present -= self.instance.layers[gap.layer].w - (write.left if write else 0.0)
        self.missing[due] += 1
        if write is not None:
            write.gap = (due, gap)
        elif due < self.cut.reads_end:
            heapq.heappush(self.queue, (due, gap))

    def _advance(self, until: float, *, reading: bool) -> None:
        """Copy until something changes, at most until ``until``."""
        write = self.unwritten[self.writes[0][1]] if self.writes else None
        read = self._read() if reading else None
        frees = write is not None and write.gap is not None
        free = self.instance.memory - self.act - self.present
        if read is not None and free <= self.cut.tolerance and not frees:
            read = None
        rate = self.instance.bandwidth
        step = until - self.time
        step = step if write is None else min(step, write.left / rate)
        if read is not None:
            step = min(step, read.left / rate, math.inf if frees else free / rate)
        assert step < math.inf, "the choice of gaps leaves an op without room"
        end = until if step == until - self.time else self.time + step
        if write is not None:
            self._note(write.layer, None, end)
            write.left -= min(write.left, step * rate)
            self.present -= step * rate if frees else 0.0
            if write.left <= self.cut.tolerance:
                self._written(write)
        if read is not None:
            self._note(read.gap.layer, read.gap, end)
            read.left -= min(read.left, step * rate)
            self.present += step * rate
            if read.left <= self.cut.tolerance:
                self.present += read.left
                self.missing[read.due] -= 1
                self.reading = None
        self.time = end

    def _written(self, write: _Write) -> None:
        heapq.heappop(self.writes)
        del self.unwritten[write.layer]
        if write.gap is not None:
            self.present -= write.left
            if write.gap[0] < self.cut.reads_end:
                heapq.heappush(self.queue, write.gap)

    def _read(self) -> _Read | None:
        """The read in progress, or the next one if there will be room for it until its op."""
        if self.reading is None and self.queue:
            due, gap = self.queue[0]
            weight = self.instance.layers[gap.layer].w
            ahead = self.cut.room[self.next : due]
            if not ahead.size or ahead.min() >= weight - self.cut.tolerance:
                heapq.heappop(self.queue)
                ahead -= weight
                self.reading = _Read(due, gap, weight)
        return self.reading

    def _note(self, layer: int, gap: WeightGap | None, end: float) -> None:
        """Record the copy from now to ``end``, as part of the piece that it continues."""
        first = self.marks[-1].copies if self.marks else 0
        for at in range(len(self.copies) - 1, max(first, len(self.copies) - 2) - 1, -1):
            piece = self.copies[at]
            if (piece.layer, piece.gap, piece.end) == (layer, gap, self.time):
                self.copies[at] = Copy(layer, gap, piece.start, end)
                return
        self.copies.append(Copy(layer, gap, self.time, end))
