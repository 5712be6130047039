"""How long a step on one device takes at least, as a linear program over time.

The program has these constraints alone. A stream runs kernels, a link loads bytes, each at its own rate, from the start
of one kernel of a chain to that of the next (``ordered_starts.py``). When a kernel starts, its inputs have come. Until
it has ended its inputs, its outputs, bytes kept for later readers and bytes loaded ahead fit the memory. Parts of
values may be kept, and copies may be of any size and in any order. Between two readers of a value is a gap, through
which some of its bytes are kept and the others loaded again. The step is a ring: bytes loaded ahead at its end are
there at its start.

Values that the host updates between two steps are loaded in each, from its start on. Where one vertex may run before or
after a start, its inputs and outputs take no memory there. Offloads take no time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from disco_accel.plan.bound.device_facts import DeviceFacts, DeviceValue
from disco_accel.plan.bound.linear_program import Index, Program
from disco_accel.plan.bound.ordered_starts import OrderedStarts, Precedence

MOST_STARTS = 512
"""In Qwen3-30B-A3B's step at 44 GiB, of 16,237 vertices, 256 and 1024 starts give the same seconds, 128 0.7 % less."""


@dataclass(frozen=True, slots=True)
class _Span:
    """Rows of gaps that are alike. Kept bytes are there from row ``begin`` to ``end``, of a gap over the step's
    boundary from ``begin`` on and up to ``end``. Others are needed by row ``by``, and count as loaded ahead before row
    ``until``. ``largest``: bytes of one gap, rounded up to a power of two."""

    begin: int
    end: int
    by: int
    until: int
    around: bool
    largest: int


@dataclass
class _Demands:
    """Bytes that are loaded once a step, by row: needed ``by`` then, and no longer loaded ahead from ``until`` on."""

    rows: int
    by: NDArray[np.int64] = field(init=False)
    until: NDArray[np.int64] = field(init=False)
    copies: int = 0

    def __post_init__(self) -> None:
        self.by, self.until = np.zeros((2, self.rows), np.int64)

    def add(self, size: int, by: int, until: int) -> None:
        """Add a value."""
        self.by[by] += size
        self.until[until] += size
        self.copies += 1

    @property
    def total(self) -> int:
        """Bytes."""
        return int(self.by.sum())


Keeps = Callable[[DeviceValue, int], float]
"""The part of a value that is kept through its gap of that number."""


@dataclass(frozen=True, slots=True)
class _Variables:
    """The numbers of the program's variables: ``kept`` by span, the others by row.

    ``loaded``, ``fresh``: bytes since the step's start, of values that may stay and of host_updated ones, when a row's
    kernel starts; ``loaded_then``, ``fresh_then``: when it ends. ``due``, ``gone``: bytes that have to be loaded by a
    row, and those no longer ahead there; ``held``: bytes kept through it; ``ahead``, ``ahead_fresh``: bytes loaded for
    later rows."""

    kept: Index
    time: Index
    done: Index
    loaded: Index
    fresh: Index
    loaded_then: Index
    fresh_then: Index
    at_start: Index
    held: Index
    ahead: Index
    ahead_fresh: Index
    due: Index
    gone: Index


class StepProgram:
    """The program of one device."""

    def __init__(self, facts: DeviceFacts, precedence: Precedence, most_starts: int = MOST_STARTS) -> None:
        self.facts = facts
        needed = np.append(facts.needed, 0)
        weight = needed / max(1, needed.sum()) + 1.0 / len(needed)
        self.starts = OrderedStarts.of(precedence, weight.tolist(), most_starts)
        self.spans: dict[_Span, list[tuple[DeviceValue, int]]] = defaultdict(list)
        """The gaps of each: a value, and which of its gaps, by its number in ``gaps``."""
        # As lists: each is looked at element by element, for every gap of every value.
        self.ended, self.ahead, self.read_by = (
            rows.tolist() for rows in (self.starts.ended, self.starts.ahead, self.starts.read_by)
        )
        self.host_updated, self.always = _Demands(self.starts.rows), _Demands(self.starts.rows)
        for value in facts.each_value:
            self._take(value)

    def _take(self, value: DeviceValue) -> None:
        if not value.uses:
            return
        ended, ahead, read_by = self.ended, self.ahead, self.read_by
        if value.at_home:
            # A version for each step; which of its readers is the first is not known.
            self.always.add(value.size, read_by[value.uses[-1]], 0)
            return
        if value.host_updated:
            first = value.uses[0]
            self.host_updated.add(value.size, read_by[first], ahead[first] + 1)
        largest = 1 << (value.size - 1).bit_length()
        for number, (a, b) in enumerate(gaps(value)):
            around = number == len(value.uses) - (value.made < 0)
            begin, end = ended[a], ahead[b]
            if around:
                # A first reader that may run behind the last one: the same bytes take no memory twice.
                end = min(end, begin - 1)
            if around or begin <= end:
                span = _Span(begin, end, read_by[b], ahead[b] + 1, around, largest)
                self.spans[span].append((value, number))

    def seconds(self, keeps: Keeps | None = None, *, whole_above: int | None = None, limit: float = 0.0) -> float:
        """Return the least seconds of a step. ``keeps``: the part of a value that is kept through its gap of a number
        (None: the program finds the best). ``whole_above``: values of as many bytes or more are kept whole or not at
        all, as far as a search of ``limit`` seconds says."""
        table = _StepTable(self.facts, self.starts, self.spans, self.host_updated, self.always, keeps)
        if whole_above is None:
            return table.seconds()
        table.in_whole_values(whole_above)
        return table.seconds(limit)

    def kept_parts(self, load_cost: float) -> tuple[float, dict[tuple[int, int], float]] | None:
        """Return the seconds of a shortest step, and by the identity of a value and the number of a gap the part that
        is kept through it. ``load_cost``: as of ``_StepTable``, so the seconds hold up to that. None: the solver has no
        answer."""
        table = _StepTable(self.facts, self.starts, self.spans, self.host_updated, self.always, None, load_cost)
        if (solved := table.kept_bytes()) is None:
            return None
        parts: dict[tuple[int, int], float] = {}
        for alike, kept in zip(self.spans.values(), solved[1], strict=True):
            left = float(kept)
            for value, number in alike:
                parts[id(value), number] = min(1.0, left / value.size)
                left = max(0.0, left - value.size)
        return solved[0], parts


def gaps(value: DeviceValue) -> Iterator[tuple[int, int]]:
    """Yield the positions before and behind each gap of ``value``; the last may cross the step's boundary."""
    stops = value.uses if value.made < 0 else [value.made, *value.uses]
    yield from pairwise(stops)
    if value.starts_on_host and not value.host_updated and not value.at_home:
        yield value.uses[-1], value.uses[0]


class _StepTable:
    """The rows and variables of a program, by the rows of ``starts``.

    Bytes are parts of the memory, seconds parts of the time in which a link fills it. ``load_cost``: cost of a second
    of loading, where a second of the step costs 1. It decides between steps that are equally long."""

    def __init__(
        self,
        facts: DeviceFacts,
        starts: OrderedStarts,
        spans: Mapping[_Span, Sequence[tuple[DeviceValue, int]]],
        host_updated: _Demands,
        always: _Demands,
        keeps: Keeps | None,
        load_cost: float = 0.0,
    ) -> None:
        self.facts, self.starts, self.spans, self.load_cost = facts, starts, spans, load_cost
        self.host_updated, self.always, self.keeps = host_updated, always, keeps
        self.unit = facts.memory / facts.loads.bandwidth
        self.latency = facts.loads.latency / self.unit
        self.sizes = self._of_gaps(lambda value, _: value.size)
        self.loaded_in_all = float(self.sizes.sum()) + always.total / facts.memory
        self.compute = np.array(facts.seconds) / self.unit
        self.program = Program()
        self.vars = self._variables()
        self._pass_time()
        self._demand_bytes()
        self._fill_memory()
        self._close_the_ring()

    def seconds(self, limit: float = 0.0) -> float:
        """Return the least seconds; ``limit``: those that a search over whole values may take."""
        return max(0.0, (self.program.solve_whole(limit) if limit else self.program.solve()[0]) * self.unit)

    def kept_bytes(self) -> tuple[float, NDArray[np.float64]] | None:
        """Return the least cost in seconds, and the bytes that are kept through the gaps of each span there (None: the
        solver has no answer)."""
        cost, found = self.program.solve()
        return None if found is None else (cost * self.unit, found[self.vars.kept] * self.facts.memory)

    def in_whole_values(self, least: int) -> None:
        """Let values of ``least`` bytes or more be kept whole or not at all."""
        program = self.program
        for c, each in enumerate(self.spans.values()):
            if len({value.size for value, _ in each}) == 1 and each[0][0].size >= least:
                whole = program.require(1, 0.0, equal=True)
                program.put(whole, self.vars.kept[c : c + 1], 1.0)
                program.put(whole, program.add_whole(len(each)), -each[0][0].size / self.facts.memory)

    def _of_gaps(self, size: Callable[[DeviceValue, int], float]) -> NDArray[np.float64]:
        every = [sum(size(*each) for each in alike) for alike in self.spans.values()]
        return np.array(every, np.float64) / self.facts.memory

    def _variables(self) -> _Variables:
        program, rows, in_all = self.program, self.starts.rows, self.loaded_in_all
        low, high = np.zeros(len(self.spans)), self.sizes
        if (keeps := self.keeps) is not None:
            low = high = self._of_gaps(lambda value, number: value.size * keeps(value, number))
        kept = program.add(len(self.spans), low, high)
        host_updated = self.host_updated.total / self.facts.memory
        copies = sum(map(len, self.spans.values())) + self.always.copies + self.host_updated.copies
        # One load after the other, each when its kernel asks, is feasible.
        longest = float(self.compute.sum()) + float(self.starts.chain_seconds.sum()) / self.unit
        longest += in_all + host_updated + copies * self.latency
        is_last = np.arange(rows) == rows - 1
        later = (np.arange(rows) > 0).astype(np.float64)
        time = program.add(rows, 0.0, longest * later, is_last)
        done = program.add(rows, *self._compute_done())
        loaded = program.add(rows, 0.0, in_all * later, self.load_cost * is_last)
        fresh = program.add(rows, 0.0, host_updated * later)
        return _Variables(
            kept=kept,
            time=time,
            done=done,
            loaded=loaded,
            fresh=fresh,
            loaded_then=np.append(program.add(rows - 1, 0.0, in_all), loaded[-1:]),
            fresh_then=np.append(program.add(rows - 1, 0.0, host_updated), fresh[-1:]),
            at_start=np.full(rows, program.add(1)[0]),
            held=program.add(rows),
            ahead=program.add(rows),
            ahead_fresh=program.add(rows),
            due=program.add(rows, 0.0, in_all),
            gone=program.add(rows, 0.0, in_all),
        )

    def _compute_done(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the least and the most seconds of compute that the stream has done at each row."""
        starts, end = self.starts, self.facts.end
        rows = starts.rows
        least = np.cumsum(np.bincount(starts.ended[:end], self.compute, rows))
        # The kernel of a row has not begun there.
        begun = np.where(starts.row[:end] > 0, starts.row[:end], starts.ahead[:end]) + 1
        most = np.cumsum(np.bincount(np.minimum(begun, rows - 1), self.compute, rows)).astype(np.float64)
        most[-1] = least[-1]
        return np.minimum(least, most), most

    def _pass_time(self) -> None:
        """From row to row: seconds of the chain, of the stream, and of the link during and behind each kernel."""
        program, starts, last = self.program, self.starts, self.starts.rows - 1
        own = starts.own_seconds / self.unit
        chain, work = program.require(last, starts.chain_seconds / self.unit), program.require(last, 0.0)
        during, behind = program.require(last, -own), program.require(last, own)
        _growth(program, chain, self.vars.time, 1.0)
        _growth(program, work, self.vars.time, float(self.facts.streams))
        _growth(program, work, self.vars.done, -1.0)
        _growth(program, behind, self.vars.time, 1.0)
        for start, end in ((self.vars.loaded, self.vars.loaded_then), (self.vars.fresh, self.vars.fresh_then)):
            for row, before, after in ((during, start[:-1], end[:-1]), (behind, end[:-1], start[1:])):
                program.put(row, before, 1.0)
                program.put(row, after, -1.0)
                grows = program.require(last, 0.0)
                program.put(grows, before, -1.0)
                program.put(grows, after, 1.0)
        _growth(program, program.require(last, 0.0), self.vars.done, 1.0)

    def _demand_bytes(self) -> None:
        """Bytes that are kept through each row, have to be loaded by it, or are no longer ahead there."""
        program, rows, memory = self.program, self.starts.rows, self.facts.memory
        begin, end, by, until = (
            np.array([getattr(span, name) for span in self.spans], np.int64) for name in ("begin", "end", "by", "until")
        )
        around = np.array([span.around for span in self.spans], bool)
        held = program.require(rows, 0.0, equal=True)
        _running(program, held, self.vars.held)
        program.put(held[begin], self.vars.kept, -1.0)
        ends = end + 1 < rows
        program.put(held[end[ends] + 1], self.vars.kept[ends], 1.0)
        program.put(np.full(int(around.sum()), held[0]), self.vars.kept[around], -1.0)
        for running, at, constant in ((self.vars.due, by, self.always.by), (self.vars.gone, until, self.always.until)):
            asked = program.require(rows, constant / memory + np.bincount(at, self.sizes, rows), equal=True)
            _running(program, asked, running)
            program.put(asked[at], self.vars.kept, 1.0)
        came = program.require(rows, 0.0)
        program.put(came, self.vars.loaded, 1.0)
        program.put(came, self.vars.at_start, 1.0)
        program.put(came, self.vars.due, -1.0)
        program.put(program.require(rows, np.cumsum(self.host_updated.by) / memory), self.vars.fresh, 1.0)

    def _fill_memory(self) -> None:
        """When a kernel ends, its own bytes, kept bytes and those loaded ahead fit."""
        program, starts, facts, own = self.program, self.starts, self.facts, self.vars
        ahead = program.require(starts.rows, 0.0)
        for variables, entry in ((own.ahead, 1.0), (own.gone, 1.0), (own.loaded_then, -1.0), (own.at_start, -1.0)):
            program.put(ahead, variables, entry)
        fresh = program.require(starts.rows, -np.cumsum(self.host_updated.until) / facts.memory)
        program.put(fresh, own.ahead_fresh, 1.0)
        program.put(fresh, own.fresh_then, -1.0)
        needed = np.zeros(starts.rows)
        kernels = starts.chain < facts.end
        needed[1:-1][kernels] = np.minimum(1.0, facts.needed[starts.chain[kernels]] / facts.memory)
        room = program.require(starts.rows, needed - 1.0)
        for variables in (own.held, own.ahead, own.ahead_fresh):
            program.put(room, variables, -1.0)

    def _close_the_ring(self) -> None:
        """A step loads the bytes that its gaps have lost, each copy after its latency."""
        program, spans, memory = self.program, self.spans, self.facts.memory
        closed = program.require(1, self.loaded_in_all, equal=True)
        program.put(closed, self.vars.loaded[-1:], 1.0)
        program.put(np.full(len(spans), closed[0]), self.vars.kept, 1.0)
        program.put(program.require(1, self.host_updated.total / memory, equal=True), self.vars.fresh[-1:], 1.0)
        cost = 1.0 + self.latency * memory / np.array([span.largest for span in spans], np.float64)
        copies = float(cost @ self.sizes)
        if (keeps := self.keeps) is not None:
            lost = sum(keeps(*each) < 1.0 for alike in spans.values() for each in alike)
            copies, cost = float(self.sizes.sum()) + lost * self.latency, np.ones(len(spans))
        once = (self.always.total + self.host_updated.total) / memory
        once += (self.always.copies + self.host_updated.copies) * self.latency
        link = program.require(1, once + copies)
        program.put(link, self.vars.time[-1:], 1.0)
        program.put(np.full(len(spans), link[0]), self.vars.kept, cost)


def _growth(program: Program, rows: Index, variables: Index, entry: float) -> None:
    program.put(rows, variables[1:], entry)
    program.put(rows, variables[:-1], -entry)


def _running(program: Program, rows: Index, variables: Index) -> None:
    """Make ``variables`` running sums: each row is the difference of one to the one before."""
    program.put(rows, variables, 1.0)
    program.put(rows[1:], variables[:-1], -1.0)
