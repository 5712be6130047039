"""A lower bound of the step over all choices of gaps and all schedules: a mixed integer program, solved by HiGHS.

Each op is followed by an idle time, to be kept short in sum. Whether a gap is used is 0 or 1. How many bytes of each
are read, and of each layer written, is free in every op and every idle time, as long as the link keeps up. Memory is
counted only when an op starts and when it ends. Every schedule that ``weights_judge`` accepts obeys this, so no step is
shorter than the optimum, nor than the bound that HiGHS has proven when its time is up.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from dataclasses import replace

import numpy as np

from disco_accel.plan.beaumont.selection import Instance, WeightGap

GAP = 1e-6
"""Relative: a bound this close to a schedule is attained."""

MANY_VARIABLES = 100_000
"""The program grows with the square of the layers; HiGHS does not look at the time while it prepares a larger one."""


def lower_bound(instance: Instance, limit: float, attained: float = math.inf) -> tuple[float, bool]:
    """Return seconds than which no step is shorter, and whether that is the program's optimum or a schedule attains it.

    HiGHS proves the bound within ``limit`` seconds, or sooner: ``attained`` is the step of a known schedule.

    First as if the weights were frozen: without writes the program is a third as large, and a bound all the same.
    """
    best, optimal = instance.sum_u, not (instance.excess(()) > 0).any()
    began = time.perf_counter()
    stages = [replace(instance, frozen=True)] if instance.frozen else [replace(instance, frozen=True), instance]
    for stage in stages:
        optimal |= best >= attained * (1 - GAP)
        left = limit - (time.perf_counter() - began)
        if optimal or left <= 0 or (4 if stage.frozen else 12) * len(instance.layers) ** 2 > MANY_VARIABLES:
            break
        seconds, solved = _solved(stage, left)
        best, optimal = max(best, seconds), solved and stage.frozen == instance.frozen
    return best, bool(optimal or best >= attained * (1 - GAP))


def _solved(instance: Instance, limit: float) -> tuple[float, bool]:
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    program = _Program(instance)
    matrix = coo_array((program.values, (program.rows, program.columns)), (len(program.limits), program.column)).tocsr()
    cost = np.zeros(program.column)
    cost[program.idle] = 1.0
    upper = np.full(program.column, np.inf)
    whole = np.zeros(program.column)
    whole[list(program.used.values())] = 1
    upper[list(program.used.values())] = 1
    result = milp(
        cost,
        constraints=LinearConstraint(matrix, -np.inf, np.array(program.limits)),
        bounds=Bounds(0.0, upper),
        integrality=whole,
        options={"time_limit": limit, "mip_rel_gap": GAP},
    )
    proven = result.mip_dual_bound
    idle = 0.0 if proven is None or not np.isfinite(proven) else max(0.0, float(proven)) * program.unit
    return instance.sum_u + idle, result.status == 0


class _Program:
    """Rows ``sum(values * variables) <= limit``. Bytes are given as seconds on the link, and these in ``unit`` s.

    Phases of a step: 2i is op i, 2i + 1 the idle time after it. They count on through the next step.
    """

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.ops, self.phases = instance.ops, 2 * instance.ops
        self.unit = instance.l2l
        self.per_byte = 1 / (instance.bandwidth * self.unit)
        self.rows: list[int] = []
        self.columns: list[int] = []
        self.values: list[float] = []
        self.limits: list[float] = []
        self.column = 0
        gaps = instance.gaps()
        self.idle = self._variables(self.ops)
        self.used = dict(zip(gaps, self._variables(len(gaps)), strict=True))
        self.link: dict[tuple[str, int], list[tuple[int, float]]] = defaultdict(list)
        """Direction and phase → the bytes copied in it."""
        self.held: list[list[tuple[int, float]]] = [[] for _ in range(self.phases)]
        """Bytes of weights as each phase ends, beside those that are there in any case."""
        self.sure = np.full(self.phases, instance.weights.sum() * self.per_byte)
        for layer in sorted({gap.layer for gap in gaps}):
            self._layer(layer, [gap for gap in gaps if gap.layer == layer])
        self._limits()

    def _variables(self, count: int) -> list[int]:
        self.column += count
        return list(range(self.column - count, self.column))

    def _row(self, terms: list[tuple[int, float]], limit: float) -> None:
        """``sum(values * variables) <= limit``"""
        for column, value in terms:
            self.rows.append(len(self.limits))
            self.columns.append(column)
            self.values.append(value)
        self.limits.append(limit)

    def _growing(self, direction: str, phases: range, most: list[tuple[int, float]]) -> dict[int, int]:
        """Bytes copied by the end of each of ``phases``: phase → variable. At the end they are ``most``, or more."""
        sums = dict(zip(phases, self._variables(len(phases)), strict=True))
        for phase in phases:
            now = [(sums[phase], 1.0)]
            if phase > phases.start:
                now.append((sums[phase - 1], -1.0))
                self._row([(column, -value) for column, value in now], 0.0)
            self.link[direction, phase % self.phases] += now
        for term in most:
            self._row([term, (sums[phases[-1]], -1.0)], 0.0)
        return sums

    def _layer(self, layer: int, gaps: list[WeightGap]) -> None:
        weight = self.instance.layers[layer].w * self.per_byte
        updated = 2 * (self.ops - 1 - layer) + 1
        writes: dict[int, int] = {}
        if not self.instance.frozen:
            most = [(self.used[gap], weight) for gap in gaps]
            writes = self._growing("write", range(updated, updated + self.phases - 1), most)
        for gap in gaps:
            last, following = self.instance.uses(gap)
            phases = range(2 * last + 1, 2 * following)
            reads = self._growing("read", phases, [(self.used[gap], weight)])
            for phase in phases:
                away = phase % self.phases
                self.sure[away] -= weight
                missing = [(self.used[gap], -weight), (reads[phase], 1.0)]
                if not writes:
                    self.held[away] += missing
                    self.sure[away] += weight
                    continue
                written = writes[phase if phase >= updated else phase + self.phases]
                held = self._variables(1)[0]
                self.held[away].append((held, 1.0))
                # All that is not away, or not yet written, and what has been read.
                self._row([*missing, (held, -1.0)], -weight)
                self._row([(written, -1.0), (reads[phase], 1.0), (held, -1.0)], -weight)

    def _limits(self) -> None:
        seconds = self.instance.seconds / self.unit
        for (_, phase), terms in sorted(self.link.items()):
            op, idle = divmod(phase, 2)
            if idle:
                self._row([*terms, (self.idle[op], -1.0)], 0.0)
            else:
                self._row(terms, float(seconds[op]))
        for phase in range(self.phases):
            op, idle = divmod(phase, 2)
            active = self.instance.activations[(op + idle) % self.ops]
            free = (self.instance.memory - float(active)) * self.per_byte
            self._row(self.held[phase], free - float(self.sure[phase]))
