"""How long a step on one device takes at least, as a linear program over time.

A plan is let off everything but this. A stream runs kernels, a link loads bytes, each at its own rate, from the start
of one kernel of a chain to that of the next (``ordered_starts.py``). When a kernel starts, its inputs have come; and
until it has ended its inputs, its outputs, what is kept for later readers and what has been loaded ahead fit the
memory. Parts of values may be kept, and copies may be of any size and in any order; what lies between two readers of a
value is a gap, through which some of its bytes are kept and the others loaded again. The step is a ring: what was
loaded ahead at its end is there at its start.

Values that the host updates between two steps are loaded in each, from its start on. Where one vertex may run before or
after a start, its inputs and outputs take no memory there. Offloads take no time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from disco_accel.plan.bound.device_facts import DeviceFacts, DeviceValue
from disco_accel.plan.bound.ordered_starts import OrderedStarts, Precedence
from disco_accel.plan.bound.step_table import Demands, Keeps, Span, StepTable

MOST_STARTS = 512
"""In Qwen3-30B-A3B's step at 44 GiB, of 16,237 vertices, 256 and 1024 starts give the same seconds, 128 0.7 % less."""


class StepProgram:
    """The program of one device."""

    def __init__(self, facts: DeviceFacts, precedence: Precedence, most_starts: int = MOST_STARTS) -> None:
        self.facts = facts
        needed = np.append(facts.needed, 0)
        weight = needed / max(1, needed.sum()) + 1.0 / len(needed)
        self.starts = OrderedStarts.of(precedence, weight.tolist(), most_starts)
        self.spans: dict[Span, list[tuple[DeviceValue, int]]] = defaultdict(list)
        """The gaps of each: a value, and which of its gaps, by its number in ``gaps``."""
        # As lists: each is looked at element by element, for every gap of every value.
        self.ended, self.ahead, self.read_by = (
            rows.tolist() for rows in (self.starts.ended, self.starts.ahead, self.starts.read_by)
        )
        self.host_updated, self.always = Demands(self.starts.rows), Demands(self.starts.rows)
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
                span = Span(begin, end, read_by[b], ahead[b] + 1, around, largest)
                self.spans[span].append((value, number))

    def seconds(self, keeps: Keeps | None = None, *, whole_above: int | None = None, limit: float = 0.0) -> float:
        """Return the least seconds of a step. ``keeps``: the part of a value that is kept through its gap of a number
        (None: whatever the program finds). ``whole_above``: values of as many bytes or more are kept whole or not at
        all, as far as a search of ``limit`` seconds says."""
        table = StepTable(self.facts, self.starts, self.spans, self.host_updated, self.always, keeps)
        if whole_above is None:
            return table.seconds()
        table.in_whole_values(whole_above)
        return table.seconds(limit)

    def kept_parts(self, load_cost: float) -> tuple[float, dict[tuple[int, int], float]] | None:
        """Return the seconds of a shortest step, and by the identity of a value and the number of a gap which part of
        the value is kept through it; ``load_cost`` as of ``StepTable``, so the seconds hold up to that. None: the
        solver has no answer."""
        table = StepTable(self.facts, self.starts, self.spans, self.host_updated, self.always, None, load_cost)
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
