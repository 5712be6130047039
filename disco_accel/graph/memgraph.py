"""MemGraph: the plan. A TaskGraph whose values have offsets, plus copies to and from backing spaces and memory edges.

It is free of races in every order that respects ``data_edges`` and ``memory_edges``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from disco_accel.graph.spaces import HOST, Space, SpaceKind, devices_of
from disco_accel.graph.taskgraph import Ref, Vertex

Edge = tuple[int, int]
"""``(u, v)`` by vertex id: v may start only after u has finished."""


_NO_HOST = Space(HOST, 0, 1, SpaceKind.HOST)


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a value lives: ``offset`` in bytes from the base of ``space``."""

    space: int
    offset: int


@dataclass(frozen=True, slots=True)
class MemGraph:
    """``vertices`` in a topological order of all edges; a vertex's position is its priority at run time.

    ``spaces``: those of the task graph, and the bytes of the host's memory that the plan takes. ``slots``: every output
    with bytes whose place is the plan's to choose. Those without one: foreign inputs, inputs that are only at their
    homes, and versions of states that a copy or a host device's kernel writes at the home. ``cyclic``: the plan is run
    step after step, and the resident inputs are back, intact, at the end. ``planner``: which planner made it, "" if
    unknown; no part of the plan, and not in its file.
    """

    name: str
    spaces: tuple[Space, ...]
    vertices: tuple[Vertex, ...]
    slots: Mapping[Ref, Slot]
    data_edges: tuple[Edge, ...]
    memory_edges: tuple[Edge, ...]
    cyclic: bool = False
    planner: str = field(default="", compare=False)

    @property
    def devices(self) -> tuple[Space, ...]:
        """The spaces in which kernels run."""
        return devices_of(self.spaces)

    @property
    def host(self) -> Space:
        """The host's memory; its ``memory``: bytes that swapped-out values take there."""
        return next((space for space in self.spaces if space.id == HOST), _NO_HOST)
