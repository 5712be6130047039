"""Memory that a plan's addresses point into."""

from __future__ import annotations

import torch

from disco_accel.graph.taskgraph import TensorSpec
from disco_accel.native.backend import backend_of
from disco_accel.native.host_backend import host_arena

__all__ = ["alias", "device_arena", "host_arena", "is_arena", "touched_bytes"]


def device_arena(nbytes: int, device: torch.device) -> torch.Tensor:
    """One arena of exactly ``nbytes`` bytes on ``device``, as a 1-d uint8 tensor: a mapping of host memory of its own,
    or one block of CUDA's caching allocator. Raises RuntimeError when the memory is not there."""
    return backend_of(device).arena(nbytes)


def is_arena(tensor: torch.Tensor) -> bool:
    """Whether ops may be made to allocate in ``tensor``: PyTorch must not free the tensors in it one by one."""
    return backend_of(tensor.device).is_arena(tensor)


def touched_bytes(arena: torch.Tensor) -> int:
    """Bytes of the arena's pages that are in memory (host), or all of them (CUDA, which backs all at once)."""
    return backend_of(arena.device).touched_bytes(arena)


def alias(arena: torch.Tensor, offset: int, nbytes: int, spec: TensorSpec) -> torch.Tensor:
    """A tensor laid out as ``spec`` over bytes ``offset`` to ``offset + nbytes`` of ``arena``, which it keeps alive."""
    return backend_of(arena.device).alias(arena, offset, nbytes, spec)
