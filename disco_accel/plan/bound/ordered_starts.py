"""Moments of a step that come in one order in every run of every plan: the starts of kernels that follow each other.

Kernels run in the order in which they become ready, not in the serial one: where two do not depend on each other,
either may be first. So a bound in time speaks of a chain of kernels alone, each of which depends on the one before. Of
every other vertex is known which of these moments come before it starts and which after it has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from disco_accel.graph.check import dependencies
from disco_accel.graph.order import serial_order
from disco_accel.graph.taskgraph import TaskGraph, VertexKind
from disco_accel.graph.values import arrives_at_gate, handed_out_at_gate
from disco_accel.simulate.machine import Machine


@dataclass(frozen=True, slots=True)
class Precedence:
    """A step's vertices by position in the serial order, without inputs, and the gate as one more behind all of them.

    ``before``: positions that each waits for; ``order``: all of them in a topological order; ``seconds``: of each.
    """

    before: Sequence[Sequence[int]]
    order: Sequence[int]
    seconds: Sequence[float]

    @classmethod
    def of(cls, graph: TaskGraph, machine: Machine) -> Precedence:
        """Return that of ``graph``, whose kernels and transfers take as long as on ``machine``."""
        vertices = serial_order(graph)
        rest = [vertex for vertex in vertices if vertex.kind is not VertexKind.INPUT]
        position = {vertex.id: i for i, vertex in enumerate(rest)}
        gate = len(rest)
        position |= {vertex.id: gate for vertex in vertices if arrives_at_gate(vertex)}
        before = [sorted({position[each] for each in dependencies(v) if each in position}) for v in rest]
        out = [i for i, vertex in enumerate(rest) if handed_out_at_gate(vertex)]
        last_out = max(out, default=-1)
        lanes = machine.lanes(graph.spaces)
        seconds = [lanes.seconds(vertex) for vertex in rest]
        order = [*range(last_out + 1), gate, *range(last_out + 1, gate)]
        return cls([*before, out], order, [*seconds, 0.0])


@dataclass(frozen=True, slots=True)
class OrderedStarts:
    """Rows of a table over time: row 0 is the start of a step, the last one its end, in between start ``chain``'s
    positions, one a row.

    Of each position, ``ended``: the first row at which it has ended for certain; ``ahead``: the last row at which it
    has not started for certain; ``row``: its own, 0 if it has none. Of each row but the last, ``chain_seconds``: the
    least time between it and the next; ``own_seconds``: the seconds of its kernel.
    """

    chain: NDArray[np.int64]
    ended: NDArray[np.int64]
    ahead: NDArray[np.int64]
    row: NDArray[np.int64]
    chain_seconds: NDArray[np.float64]
    own_seconds: NDArray[np.float64]

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return len(self.chain) + 2

    @property
    def read_by(self) -> NDArray[np.int64]:
        """The first row at which each position has its inputs for certain."""
        return np.where(self.row > 0, self.row, self.ended)

    @classmethod
    def of(cls, precedence: Precedence, weight: Sequence[float], most: int) -> OrderedStarts:
        """Return at most ``most`` starts on the heaviest chain, which is cut in parts of equal weight: the heaviest
        vertex of each is one. So a vertex that weighs as much as a part is one itself."""
        before, order = precedence.before, precedence.order
        behind: list[list[int]] = [[] for _ in before]
        for at, sources in enumerate(before):
            for source in sources:
                behind[source].append(at)
        path = _heaviest_path(before, order, weight)
        heavy = np.array([weight[at] for at in path])
        part = np.ceil(np.cumsum(heavy) * (min(most, len(path)) / heavy.sum()) - 1e-9) if path else heavy
        parts = np.split(np.arange(len(path)), np.flatnonzero(np.diff(part)) + 1)
        picked = [int(each[np.argmax(heavy[each])]) for each in parts if len(each)]
        chain = [path[place] for place in picked]
        row = np.zeros(len(before), np.int64)
        row[chain] = np.arange(1, len(chain) + 1)
        end = len(chain) + 1
        ended, ahead = [end] * len(before), [0] * len(before)
        own = row.tolist()
        for at in order:
            for source in before[at]:
                ahead[at] = max(ahead[at], own[source] or ahead[source])
        for at in reversed(order):
            for reader in behind[at]:
                ended[at] = min(ended[at], own[reader] or ended[reader])
        clock = np.concatenate(([0.0], np.cumsum([precedence.seconds[at] for at in path])))
        stops = np.array([0, *picked, len(path)])
        own_seconds = np.array([0.0, *(precedence.seconds[at] for at in chain)])
        return cls(np.array(chain, np.int64), np.array(ended), np.array(ahead), row, np.diff(clock[stops]), own_seconds)


def _heaviest_path(before: Sequence[Sequence[int]], order: Sequence[int], weight: Sequence[float]) -> list[int]:
    total = [0.0] * len(before)
    came_from = [-1] * len(before)
    for at in order:
        for source in before[at]:
            if total[source] > total[at]:
                total[at], came_from[at] = total[source], source
        total[at] += weight[at]
    if not before:
        return []
    path = [max(order, key=total.__getitem__)]
    while came_from[path[-1]] >= 0:
        path.append(came_from[path[-1]])
    return path[::-1]
