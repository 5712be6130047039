"""Algorithm 2 of Beaumont et al.: when the weights of chosen gaps are copied, for every point at which the cyclic
sequence of ops may be cut.

Within a period copies go as early as they can: writes by the end of their gap's first op, reads by the op that needs
them. A read may run ahead of that op as long as, at each op until then, the weights that are present by the choice of
gaps and those read ahead fit the memory. Weights are made of many tensors: their memory is taken and freed byte by
byte as a copy proceeds.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from disco_accel.plan.weights import Floats, Gap, Instance

_TINY = 1e-9
"""Relative: bytes of the memory, or seconds of the period, that rounding may lose."""

PERIODS = 6
"""Steps that are simulated in a row before a schedule that does not repeat is given up."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A piece of a read (``gap`` says which; it ends before the gap's second op) or of a layer's write, whose ``gap``
    is None. Seconds from the start of the period; the end may lie in the next one."""

    layer: int
    gap: Gap | None
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Schedule:
    """One step of ``period`` seconds that is repeated: when each op starts, by its number, and all copies.

    From the end of a gap's first op the weights' memory is free as far as they have been written since their update
    (frozen ones: all of it), and it is taken again as far as they have been read.
    """

    period: float
    starts: tuple[float, ...]
    copies: tuple[Copy, ...]
    chosen: tuple[Gap, ...]


def best_schedule(instance: Instance, chosen: Collection[Gap]) -> Schedule:
    """The shortest schedule over all cuts, where no copy crosses the cut, and of the steps that follow one another
    without any. ``chosen`` must leave room for every op."""
    gaps = tuple(sorted(chosen))
    if not gaps:
        starts = np.concatenate([[0.0], np.cumsum(instance.seconds)[:-1]])
        return Schedule(instance.sum_u, tuple(float(s) for s in starts), (), ())
    best = _Run(instance, gaps, 0, 1).alone()
    for cut in range(1, instance.ops):
        if best.period <= instance.sum_u * (1 + _TINY):
            return best
        found = _Run(instance, gaps, cut, 1).alone(best.period)
        best = found if found is not None and found.period < best.period else best
    steady = _Run(instance, gaps, 0, PERIODS).repeated()
    return steady if steady is not None and steady.period < best.period * (1 - _TINY) else best


@dataclass(slots=True)
class _Write:
    layer: int
    left: float
    freeing: bool
    """Whether the weights' gap has begun, so that what is written is freed."""


@dataclass(slots=True)
class _Read:
    gap: Gap
    due: int
    left: float


@dataclass(slots=True)
class _Mark:
    """The state as a period begins: two that are equal are followed by the same step."""

    time: float
    op_starts: int
    copies: int
    state: Floats = field(default_factory=lambda: np.zeros(0))


class _Run:
    """A simulation of ``periods`` steps from op ``cut``, at which every weight is where the choice of gaps says.

    Positions count the ops from the cut on through all periods.
    """

    def __init__(self, instance: Instance, chosen: Sequence[Gap], cut: int, periods: int) -> None:
        self.instance, self.chosen, self.cut = instance, chosen, cut
        self.ops = instance.ops
        self.end = periods * self.ops
        self.seconds = np.roll(instance.seconds, -cut).tolist()
        self.during = np.roll(instance.activations, -cut).tolist()
        self.after = np.roll(instance.activations_after, -cut).tolist()
        self.memory = instance.memory
        self.tolerance = instance.memory * _TINY
        self.room = np.roll(-instance.excess(chosen), -cut)
        self.room = np.tile(self.room, periods + 1)
        self.opens: dict[int, list[Gap]] = {}
        self.due: dict[int, list[Gap]] = {}
        self.updates: dict[int, list[int]] = {}
        self._events()
        self.time = 0.0
        self.act = self.after[-1]
        self.present = float(instance.weights.sum())
        self.reads: list[tuple[int, Gap]] = []
        self.reading: _Read | None = None
        self.ready: dict[Gap, float] = {}
        """Bytes missing of each gap that is open."""
        self.writes: list[tuple[int, int, _Write]] = []
        self.unwritten: dict[int, _Write] = {}
        self.waiting: dict[int, Gap] = {}
        """Layer → its open gap whose weights are still being written."""
        self.starts: list[float] = []
        self.copies: list[Copy] = []
        self.marks: list[_Mark] = []
        for gap in chosen:
            first, due = self._positions(gap)
            if due <= first:
                self.present -= instance.layers[gap.layer].w
                self._away(gap, due)

    def _positions(self, gap: Gap) -> tuple[int, int]:
        last, following = self.instance.uses(gap)
        return (last - self.cut) % self.ops, (following - self.cut) % self.ops

    def _events(self) -> None:
        trained: set[int] = set()
        for gap in self.chosen:
            first, due = self._positions(gap)
            self.opens.setdefault(first, []).append(gap)
            self.due.setdefault(due, []).append(gap)
            if not self.instance.frozen and gap.layer not in trained:
                trained.add(gap.layer)
                backward = (self.ops - 1 - gap.layer - self.cut) % self.ops
                self.updates.setdefault(backward, []).append(gap.layer)

    # -- what a step does -----------------------------------------------------------------------------------------

    def alone(self, limit: float = float("inf")) -> Schedule | None:
        raise NotImplementedError
