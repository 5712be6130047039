"""The judge of schedules of weights: could a device follow one? It shares only data with the code that makes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from disco_accel.errors import VerifyError
from disco_accel.plan.beaumont.schedule import Copy, Schedule
from disco_accel.plan.beaumont.selection import Instance, WeightGap

TOLERANCE = 1e-6
"""Relative to the period and to the memory."""

Span = tuple[float, float]


def check_schedule(instance: Instance, schedule: Schedule) -> None:
    """Raise VerifyError, naming layer or op, unless ``schedule`` can be repeated step after step.

    Ops run one after the other in order. Each direction of the link carries one copy at a time, at the bandwidth.
    Weights that are away were written since their update, and are back before their next use. The memory is never
    exceeded.
    """
    clock = _Clock(instance, schedule)
    _check_ops(clock)
    for name, writes in (("reads", False), ("writes", True)):
        _check_link(clock, name, [c for c in schedule.copies if (c.gap is None) == writes])
    chosen = set(schedule.chosen)
    for copy in schedule.copies:
        if copy.gap is not None and (copy.gap not in chosen or copy.gap.layer != copy.layer):
            raise VerifyError(f"layer {copy.layer + 1} is read, but it is not away")
    layers = [_Presence(clock, layer) for layer in range(len(instance.layers))]
    _check_memory(clock, layers)


class _Clock:
    """Seconds at which ops of a step and of the next ones start and end, where ops are numbered on through steps."""

    def __init__(self, instance: Instance, schedule: Schedule) -> None:
        self.instance, self.schedule, self.period = instance, schedule, schedule.period
        self.ops = 2 * len(instance.layers)
        self.tolerance = TOLERANCE * schedule.period
        if len(schedule.starts) != self.ops or not 0 <= schedule.period < math.inf:
            raise VerifyError(f"a period of {schedule.period} s with {len(schedule.starts)} of {self.ops} ops")
        turns = [i for i in range(self.ops) if schedule.starts[i] < schedule.starts[i - 1]]
        if len(turns) > 1:
            raise VerifyError(f"{self.name(turns[1])} starts before {self.name(turns[1] - 1)}")
        self.first = turns[0] if turns else 0

    def name(self, op: int) -> str:
        op %= self.ops
        return f"F{op + 1}" if op < self.ops // 2 else f"B{self.ops - op}"

    def seconds(self, op: int) -> float:
        op %= self.ops
        forward = op < self.ops // 2
        layer = self.instance.layers[op if forward else self.ops - 1 - op]
        return layer.u_f if forward else layer.u_b

    def start(self, op: int) -> float:
        return self.schedule.starts[op % self.ops] + (op - self.first) // self.ops * self.period

    def end(self, op: int) -> float:
        return self.start(op) + self.seconds(op)

    def after(self, copies: Sequence[Copy], time: float) -> list[Span]:
        """The repetition of each piece that starts at ``time`` or later, in order."""
        turns = [math.ceil((time - self.tolerance - c.start) / self.period) * self.period for c in copies]
        return sorted((c.start + turn, c.end + turn) for c, turn in zip(copies, turns, strict=True))


def _check_ops(clock: _Clock) -> None:
    for op in range(clock.first, clock.first + clock.ops):
        if clock.start(op + 1) < clock.end(op) - clock.tolerance:
            raise VerifyError(f"{clock.name(op + 1)} starts before {clock.name(op)} ends")


def _check_link(clock: _Clock, name: str, copies: Sequence[Copy]) -> None:
    spans = clock.after(copies, 0.0)
    spans += [(start + clock.period, end + clock.period) for start, end in spans[:1]]
    for (start, end), (following, _) in pairwise(spans):
        if end < start or end > following + clock.tolerance:
            raise VerifyError(f"two {name} at once at {following} s: the link carries one at a time")


@dataclass
class _Away:
    """A gap of a layer, from the end of op ``last`` to the start of ``following``, and the reads that end it."""

    last: int
    following: int
    reads: list[Span]


class _Presence:
    """How much of a layer's weights is on the device, from the end of its backward to the end of the next one."""

    def __init__(self, clock: _Clock, layer: int) -> None:
        self.weight, self.bandwidth = clock.instance.layers[layer].w, clock.instance.bandwidth
        self.frozen, self.period = clock.instance.frozen, clock.period
        self.name = f"layer {layer + 1}"
        chosen, copies = clock.schedule.chosen, clock.schedule.copies
        backward, forward = clock.ops - 1 - layer, clock.ops + layer
        self.backward, self.ops = backward, clock.ops
        self.origin = clock.end(backward)
        self.writes = clock.after([c for c in copies if c.gap is None and c.layer == layer], self.origin)
        self.gaps: list[_Away] = []
        for gap, last, following in (
            (WeightGap(layer, True), backward, forward),
            (WeightGap(layer, False), forward, clock.ops + backward),
        ):
            if gap in chosen:
                reads = clock.after([c for c in copies if c.gap == gap], clock.end(last))
                self.gaps.append(_Away(last, following, reads))
        tolerance = clock.tolerance
        if self.gaps and not self.frozen and abs(self._bytes(self.writes) - self.weight) > self._slack(tolerance):
            raise VerifyError(f"{self.name}: {self._bytes(self.writes)} of {self.weight} bytes are written")
        for away in self.gaps:
            if abs(self._bytes(away.reads) - self.weight) > self._slack(tolerance):
                raise VerifyError(f"{self.name}: {self._bytes(away.reads)} of {self.weight} bytes come back")
            needed = clock.start(away.following)
            if away.reads and away.reads[-1][1] > needed + tolerance:
                raise VerifyError(f"{self.name} is needed at {needed} s but only back at {away.reads[-1][1]} s")
            if away.reads and self.writes and self.writes[-1][1] > away.reads[0][0] + tolerance:
                raise VerifyError(f"{self.name} is read at {away.reads[0][0]} s, before it has been written")

    def _bytes(self, spans: Sequence[Span], until: float = math.inf) -> float:
        return sum(max(0.0, min(end, until) - start) for start, end in spans) * self.bandwidth

    def _slack(self, tolerance: float) -> float:
        return TOLERANCE * self.weight + tolerance * self.bandwidth

    def at(self, time: float, op: int, running: bool) -> float:
        """Bytes at ``time``, while ``op`` is running or between it and the next."""
        turn = (op - self.backward) // self.ops
        op, time = op - turn * self.ops, time - turn * self.period
        for away in self.gaps:
            if away.last + running <= op < away.following:
                left = 0.0 if self.frozen else self.weight - self._bytes(self.writes, time)
                return max(0.0, left) + self._bytes(away.reads, time)
        return self.weight


def _check_memory(clock: _Clock, layers: Sequence[_Presence]) -> None:
    instance, period = clock.instance, clock.period
    # A copy may be off by the tolerance of its time.
    limit = instance.memory * (1 + TOLERANCE) + 2 * clock.tolerance * instance.bandwidth
    edges = [(copy.start, copy.end) for copy in clock.schedule.copies]
    for op in range(clock.first, clock.first + clock.ops):
        for running in (True, False):
            begin, end = (clock.start(op), clock.end(op)) if running else (clock.end(op), clock.start(op + 1))
            moved = {begin + (edge - begin) % period for pair in edges for edge in pair}
            activations = _activations(instance, op % clock.ops, running)
            for time in (begin, end, *(edge for edge in moved if edge < end)):
                used = activations + sum(layer.at(time, op, running) for layer in layers)
                if used > limit:
                    raise VerifyError(
                        f"{used:.0f} bytes are in use {'in' if running else 'after'} {clock.name(op)}, at {time} s: "
                        f"the memory is {instance.memory:.0f}"
                    )


def _activations(instance: Instance, op: int, running: bool) -> float:
    """Bytes in use beside weights: a backward frees its layer's activations as it ends."""
    layers = instance.layers
    depth = min(op, 2 * len(layers) - 1 - op) + (running or op < len(layers))
    return instance.a0 + sum(layer.a for layer in layers[:depth])
