"""The refusal of a graph that does not fit: the devices that are short, and the bytes that they need."""

from __future__ import annotations

from collections.abc import Callable

from disco_accel.errors import BudgetTooSmall
from disco_accel.graph.strict_json import plain
from disco_accel.graph.taskgraph import TaskGraph, with_at_least, with_memory

_TRIED_UP_TO = 100_000
"""Vertices times devices for which it is tried which of the devices are short; a trial is some walks over a graph."""


def too_small(graph: TaskGraph, needed: int, fits: Callable[[TaskGraph], bool]) -> BudgetTooSmall:
    """Return the refusal of ``graph``, which has a plan once no device has less than ``needed`` bytes.

    ``fits``: whether a graph has a plan. A device is short unless one is found in its own memory, beside others with as
    many bytes as are needed.
    """
    memory = {device.id: device.memory for device in graph.devices if not device.is_host_device}
    short = {device: given for device, given in memory.items() if given < needed}
    enough = with_at_least(graph, needed)
    for device in list(short) if len(graph.vertices) * len(short) <= _TRIED_UP_TO else []:
        trial = _with(enough, device, memory[device])
        if len(short) > 1 and fits(trial):
            del short[device]
            enough = trial
    what, given = f"the plan of '{plain(graph.name)}'", max(short.values())
    if len(short) == len(memory):
        return BudgetTooSmall(needed, given, what)
    names = ", ".join(map(str, short))
    what += f" on device {names}" if len(short) == 1 else f" on each of the devices {names}"
    return BudgetTooSmall(needed, given, what, devices=tuple(short))


def _with(graph: TaskGraph, device: int, memory: int) -> TaskGraph:
    return with_memory(graph, lambda each: memory if each.id == device else each.memory)
