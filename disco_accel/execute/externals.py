"""Memory of the user's that a step works on: what it begins with, and what it waits for at its gate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from disco_accel.graph.check import after_gate
from disco_accel.graph.memgraph import MemGraph

_EARLY, _LATE = 0, 1
"""Places in what ``externals_of`` returns."""


@dataclass(frozen=True, slots=True)
class _Externals:
    """Vertices whose memory is bound together, each with its storage in the engine: inputs, and transfers to the user's
    memory."""

    storage: Mapping[int, int]

    @property
    def vertices(self) -> list[int]:
        return list(self.storage)

    @property
    def storages(self) -> list[int]:
        return list(self.storage.values())


def externals_of(storages: Mapping[int, int], graph: MemGraph) -> tuple[_Externals, _Externals]:
    """By ``_EARLY`` and ``_LATE``; ``storages``: of vertices whose memory is the user's."""
    late = after_gate(graph.vertices, (*graph.data_edges, *graph.memory_edges))
    early = {k: s for k, s in storages.items() if k not in late}
    return _Externals(early), _Externals({k: s for k, s in storages.items() if k in late})
