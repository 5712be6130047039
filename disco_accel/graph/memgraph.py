"""MemGraph: the plan. A TaskGraph whose values have addresses, plus offloads, reloads and memory edges.

Whatever order a runtime picks, it is free of races as long as it respects ``data_edges`` and ``memory_edges``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from disco_accel.graph.taskgraph import Device, Ref, Vertex

Edge = tuple[int, int]
"""``(u, v)`` by vertex id: v may start only after u has finished."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a value lives: ``addr`` is a byte offset from the base of the arena of ``device``; ``size`` in bytes."""

    device: int
    addr: int
    size: int


@dataclass(frozen=True, slots=True)
class MemGraph:
    """``vertices`` in a topological order of all edges; a vertex's position is its priority at run time.

    ``slots``: every output on a device with size > 0 that has an address (``external`` inputs and clean inputs
    that are only on the host have none). ``host_offsets``: OFFLOAD id → byte offset in the host arena of
    ``host_memory`` bytes. ``cyclic``: the plan is run step after step and the resident clean inputs are back,
    intact, at the end. ``planner``: which planner made it, "" if unknown; no part of the plan, and not in its file.
    """

    name: str
    devices: tuple[Device, ...]
    vertices: tuple[Vertex, ...]
    slots: Mapping[Ref, Slot]
    data_edges: tuple[Edge, ...]
    memory_edges: tuple[Edge, ...]
    host_offsets: Mapping[int, int]
    host_memory: int = 0
    host_alignment: int = 256
    cyclic: bool = False
    planner: str = field(default="", compare=False)
