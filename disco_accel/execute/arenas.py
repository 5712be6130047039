"""The arenas that a plan runs in: how large they are, and those given by the caller checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from disco_accel.errors import ConfigError, ExecutionError
from disco_accel.graph.memgraph import MemGraph
from disco_accel.native.arena import device_arena, is_arena


def arena_bytes(memgraph: MemGraph, device: int | None = None) -> int:
    """Bytes of memory that the plan uses on ``device``: the end of its highest slot. None = on the only device that
    does not lie in host memory."""
    if device is None:
        device = _only(memgraph)
    sizes = {(vertex.id, k): size for vertex in memgraph.vertices for k, size in enumerate(vertex.sizes)}
    slots = memgraph.slots.items()
    return max((slot.offset + sizes[ref] for ref, slot in slots if slot.space == device), default=0)


def _only(memgraph: MemGraph) -> int:
    own = [device.id for device in memgraph.devices if not device.is_host_device]
    if len(own) != 1:
        raise ConfigError(f"the plan has {len(own)} devices: say which one, by id")
    return own[0]


def places_of(memgraph: MemGraph, devices: Sequence[torch.device]) -> dict[int, torch.device]:
    """Where each device of the plan has its arena, by id. ``devices``: those not in host memory, in its order."""
    rest = iter(devices)
    return {device.id: torch.device("cpu") if device.is_host_device else next(rest) for device in memgraph.devices}


def arenas_of(
    memgraph: MemGraph, given: torch.Tensor | Mapping[int, torch.Tensor] | None, places: Mapping[int, torch.device]
) -> tuple[dict[int, torch.Tensor], list[torch.Tensor]]:
    """One arena for each device of the plan, and those of host devices that were made here and that nobody has pinned.
    ``places``: where each is, by id. Raises ExecutionError for one that is too small or elsewhere."""
    if isinstance(given, torch.Tensor):
        given = {_only(memgraph): given}
    arenas, on_host = {}, []
    for planned in memgraph.devices:
        needed = arena_bytes(memgraph, planned.id)
        arena = (given or {}).get(planned.id)
        if arena is None:
            arena = device_arena(needed, places[planned.id])
            if planned.is_host_device:
                on_host.append(arena)
        elif planned.is_host_device and not arena.is_cpu:
            raise ExecutionError(
                f"the arena of device {planned.id} is on {arena.device}, but the device lies in host memory: make it "
                "with host_arena()"
            )
        elif arena.device != places[planned.id]:
            raise ExecutionError(
                f"the arena of device {planned.id} is on {arena.device}, but the device is {places[planned.id]}: make "
                "it with device_arena()"
            )
        elif arena.numel() < needed:
            raise ExecutionError(f"the arena of device {planned.id} has {arena.numel()} bytes, the plan needs {needed}")
        elif not is_arena(arena):
            raise ExecutionError(f"the arena of device {planned.id} is ordinary memory: make it with device_arena()")
        arenas[planned.id] = arena
    return arenas, on_host
