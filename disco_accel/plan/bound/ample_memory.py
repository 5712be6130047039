"""The memory from which more gains nothing: every value stays on its device, and no kernel runs again for another.

From a plan in less memory the way there is taken for a straight line. The least loads are a convex function of the
memory: the next bytes gain at least as much as the line says, if plans follow their bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from disco_accel.graph.taskgraph import TaskGraph, Vertex
from disco_accel.graph.value_numbering import clones, without
from disco_accel.plan.bound.device_facts import DeviceFacts
from disco_accel.plan.bound.least_copies import gaps_of, load_with_all_kept
from disco_accel.simulate.machine import Machine
from disco_accel.sizes import size_for_people

HALF_LOADS, ALL_STAYS = "half_loads", "all_stays"
"""Budgets by name: see ``step/compile/useful_budgets.py``."""

_BETWEEN = 1.05
"""Offsets of values that come and go leave bytes between them. A tiny Llama loads 6 % in the bytes of its values alone,
and nothing in so many times as many."""


@dataclass(frozen=True, slots=True)
class _Ample:
    """``memory``: bytes of each device. A step loads ``loads`` bytes then, of values that the host updates, and takes
    ``seconds``, those of its kernels."""

    memory: int
    loads: int
    seconds: float

    def rest(self, memory: int, less: int) -> float:
        """The part that is left, with ``memory`` bytes, of what ``less`` bytes cost above this."""
        if less >= self.memory:
            return 1.0
        return max(0, self.memory - memory) / (self.memory - less)

    def halfway(self, memory: int) -> int:
        """The bytes with which a step loads about half as much as with ``memory``."""
        return (memory + self.memory) // 2


def ample_memory(graph: TaskGraph, recompute: str = "auto") -> _Ample:
    """Return the memory in which a step of ``graph`` keeps all of its values. ``recompute``: as in ``decide``."""
    once = without(graph, (clone for clone in clones(graph) if recompute == "auto" or clone.constant))
    devices = [device for device in graph.devices if not device.is_host_device]
    unit = max(device.alignment for device in devices)

    def aligned(vertex: Vertex) -> Vertex:
        return replace(vertex, sizes=tuple(-(-size // unit) * unit for size in vertex.sizes))

    # The memory that a device has now makes no difference.
    once = replace(once, vertices=tuple(map(aligned, once.vertices)))
    facts = [DeviceFacts(once, Machine(), device.id, device.memory) for device in devices]
    most = max(int(load_with_all_kept(each, gaps_of(each)).max(initial=0)) for each in facts)
    return _Ample(
        -(-int(most * _BETWEEN) // unit) * unit,
        sum(sum(each.host_updated) for each in facts),
        max(sum(each.seconds) / each.streams for each in facts),
    )


def useful_text(budgets: Mapping[str, int], beyond: int) -> str:
    """``budgets`` by name, for people; "" where there are none. ``beyond``: the one that they were found for. All in
    bytes."""
    if not budgets:
        return ""
    half, stays = (size_for_people(budgets[name]) for name in (HALF_LOADS, ALL_STAYS))
    return (
        f"In {half} a step loads about half as much as in {size_for_people(beyond)}, and in {stays} all values stay on "
        "the device"
    )
