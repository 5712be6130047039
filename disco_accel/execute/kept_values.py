"""Values that a plan keeps until its step has ended, as tensors."""

from __future__ import annotations

import functools

import torch

from disco_accel.execute.addresses import Memory
from disco_accel.execute.final_location import FinalResidences
from disco_accel.execute.state_homes import StateHomes
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.taskgraph import Ref, TensorSpec
from disco_accel.native.arena import alias


class KeptValues(dict[tuple[Ref, TensorSpec], torch.Tensor]):
    """Kept values as tensors over the memory that they lie in after a step; each is looked up once."""

    def __init__(self, graph: MemGraph, memory: Memory, states: StateHomes) -> None:
        super().__init__()
        self._graph, self._memory, self._states = graph, memory, states

    @functools.cached_property
    def _final(self) -> FinalResidences:
        return FinalResidences(self._graph, self._states.planned)

    def __missing__(self, key: tuple[Ref, TensorSpec]) -> torch.Tensor:
        (ref, spec), memory = key, self._memory
        where = self._final.of(ref)
        if where.home is not None:
            found = self._states.view(where.home, spec)
        else:
            arena = memory.host if where.device is None else memory.devices[where.device]
            found = alias(arena, where.offset, where.size, spec)
        self[key] = found
        return found
