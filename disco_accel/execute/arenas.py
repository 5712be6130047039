"""The arenas that a plan runs in: how large they are, and those given by the caller checked."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from disco_accel.errors import ConfigError, ExecutionError
from disco_accel.graph.memgraph import MemGraph
from disco_accel.native.arena import device_arena, is_arena


def arena_bytes(memgraph: MemGraph, device: int | None = None) -> int:
    """Bytes of memory that the plan uses on ``device``: the end of its highest slot. None = on the only device."""
    if device is None:
        device = _only(memgraph)
    return max((slot.addr + slot.size for slot in memgraph.slots.values() if slot.device == device), default=0)


def _only(memgraph: MemGraph) -> int:
    if len(memgraph.devices) != 1:
        raise ConfigError(f"the plan has {len(memgraph.devices)} devices: say which one, by id")
    return memgraph.devices[0].id


def arenas_of(
    memgraph: MemGraph, given: torch.Tensor | Mapping[int, torch.Tensor] | None, device: torch.device
) -> dict[int, torch.Tensor]:
    """One arena for each device of the plan. Raises ExecutionError for one that is too small."""
    if isinstance(given, torch.Tensor):
        given = {_only(memgraph): given}
    arenas = {}
    for planned in memgraph.devices:
        needed = arena_bytes(memgraph, planned.id)
        arena = (given or {}).get(planned.id)
        if arena is None:
            arena = device_arena(needed, device)
        elif arena.numel() < needed:
            raise ExecutionError(f"the arena of device {planned.id} has {arena.numel()} bytes, the plan needs {needed}")
        elif not is_arena(arena):
            raise ExecutionError(f"the arena of device {planned.id} is ordinary memory: make it with device_arena()")
        arenas[planned.id] = arena
    return arenas
