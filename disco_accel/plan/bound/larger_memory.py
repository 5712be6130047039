"""A step in more memory, by the bound: the loads that it needs there, and the memory from which more gains nothing.

Nothing is searched. A linear program of some hundred rows says how many bytes must be loaded; plans load somewhat more,
in most memory sizes by about the same part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace
from functools import cached_property

from disco_accel.graph.taskgraph import TaskGraph, Vertex
from disco_accel.graph.value_numbering import clones, without
from disco_accel.plan.bound.device_facts import DeviceFacts
from disco_accel.plan.bound.least_copies import gaps_of, least_copies, load_with_all_kept
from disco_accel.simulate.machine import Machine
from disco_accel.sizes import size_for_people

Joined = Callable[[TaskGraph], TaskGraph]
"""Gives a graph its fused kernels."""

HALF_LOADS, ALL_STAYS = "half_loads", "all_stays"
"""Budgets by name: see ``step/compile/useful_budgets.py``."""

_ROWS = 400
"""Positions of a step that the programs look at."""

_HALVINGS = 8
"""Of the memory between two sizes, until one with half of the loads is near enough."""

_BETWEEN = 1.05
"""Offsets of values that come and go leave bytes between them. A tiny Llama loads 6 % in the bytes of its values alone,
and nothing in so many times as many."""


class _LargerMemory:
    """The gains of memory for a step of ``graph`` on ``machine``. All sizes are bytes of each device."""

    def __init__(
        self, graph: TaskGraph, machine: Machine, whole: TaskGraph, recompute: str, joined: Joined | None
    ) -> None:
        """``whole``: ``graph`` with the kernels that its plan leaves out. ``recompute``: as in ``decide``. ``joined``
        gives fused kernels to a graph, which ``graph`` has where they make its step faster, and ``whole`` has not;
        None: there are none."""
        self._graph, self._machine, self._whole, self._recompute = graph, machine, whole, recompute
        self._joined = joined

    def loads(self, memory: int) -> tuple[float, int]:
        """Seconds and bytes of the loads that a step needs in ``memory``."""
        found = []
        # Copies: threads may ask about different sizes at once.
        for facts in map(copy, self._facts):
            facts.memory = memory
            found.append(least_copies(facts, loads=True, backs=False, most_rows=_ROWS))
        return max(seconds for seconds, _ in found), int(sum(nbytes for _, nbytes in found))

    def half_loads(self, memory: int) -> int:
        """The memory in which a step needs about half of the loads of ``memory``."""
        _, now = self.loads(memory)
        low, high = memory, max(memory, self.ample)
        for _ in range(_HALVINGS):
            middle = (low + high) // 2
            low, high = (low, middle) if 2 * self.loads(middle)[1] <= now else (middle, high)
        return high

    @cached_property
    def ample(self) -> int:
        """The memory in which all values stay on their device, and no kernel runs again for another."""
        most = max(int(load_with_all_kept(each, gaps_of(each)).max(initial=0)) for each in self._facts_of_kept)
        return int(most * _BETWEEN)

    @cached_property
    def least_seconds(self) -> float:
        """Of the busiest device's kernels, each run once."""
        return _kernel_seconds(self._facts_of_kept)

    @cached_property
    def kernel_seconds(self) -> float:
        """Of the busiest device's kernels."""
        return _kernel_seconds(self._facts)

    @cached_property
    def _facts(self) -> list[DeviceFacts]:
        return _facts_of(self._graph, self._machine)

    @cached_property
    def _facts_of_kept(self) -> list[DeviceFacts]:
        again = (clone for clone in clones(self._whole) if self._recompute == "auto" or clone.constant)
        kept = without(self._whole, again)
        return _facts_of(kept if self._joined is None else self._joined(kept), self._machine)


def larger_memory(
    graph: TaskGraph,
    machine: Machine,
    whole: TaskGraph | None = None,
    recompute: str = "auto",
    joined: Joined | None = None,
) -> _LargerMemory:
    """Return the gains of memory for a step of ``graph``; see ``_LargerMemory``."""
    return _LargerMemory(graph, machine, whole or graph, recompute, joined)


def useful_text(budgets: Mapping[str, int], beyond: int) -> str:
    """``budgets`` by name, for people; "" where there are none. ``beyond``: the one that they were found for. All in
    bytes."""
    if not budgets:
        return ""
    half, stays = (size_for_people(budgets[name]) for name in (HALF_LOADS, ALL_STAYS))
    return (
        f"In {half} a step needs about half of the loads that it needs in {size_for_people(beyond)}, and in {stays} "
        "all values stay on the device"
    )


def _facts_of(graph: TaskGraph, machine: Machine) -> list[DeviceFacts]:
    devices = [device for device in graph.devices if not device.is_host_device]
    unit = max(device.alignment for device in devices)

    def aligned(vertex: Vertex) -> Vertex:
        return replace(vertex, sizes=tuple(-(-size // unit) * unit for size in vertex.sizes))

    graph = replace(graph, vertices=tuple(map(aligned, graph.vertices)))
    return [DeviceFacts(graph, machine, device.id, device.memory) for device in devices]


def _kernel_seconds(facts: list[DeviceFacts]) -> float:
    return max(sum(each.seconds) / each.streams for each in facts)
