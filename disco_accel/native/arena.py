"""Memory that a plan's addresses point into."""

from __future__ import annotations

import torch

from disco_accel.graph.taskgraph import TensorSpec
from disco_accel.native.extension import load_extension


def device_arena(nbytes: int, device: torch.device) -> torch.Tensor:
    """One arena of exactly ``nbytes`` bytes on ``device``, as a 1-d uint8 tensor.

    On the host it is an anonymous mapping between guard pages whose pages are untouched until used; on CUDA it is one
    block of the caching allocator. Raises RuntimeError when the memory is not there.
    """
    if device.type == "cpu":
        return host_arena(nbytes)
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def host_arena(nbytes: int) -> torch.Tensor:
    """``nbytes`` bytes of anonymous host memory between guard pages, as a 1-d uint8 tensor."""
    load_extension()
    arena: torch.Tensor = torch.ops.disco_accel.map_arena(nbytes)
    return arena


def is_arena(tensor: torch.Tensor) -> bool:
    """Whether ops may be made to allocate in ``tensor``: PyTorch must not free what lies in it one by one."""
    load_extension()
    return tensor.device.type != "cpu" or tensor.numel() == 0 or bool(torch.ops.disco_accel.is_arena(tensor))


def touched_bytes(arena: torch.Tensor) -> int:
    """Bytes of the arena's pages that are in memory (host), or all of them (CUDA, which backs all at once)."""
    if arena.device.type != "cpu":
        return arena.numel()
    return int(torch.ops.disco_accel.touched_bytes(arena))


def alias(arena: torch.Tensor, offset: int, nbytes: int, spec: TensorSpec) -> torch.Tensor:
    """A tensor laid out as ``spec`` over bytes ``offset`` to ``offset + nbytes`` of ``arena``, which it keeps alive.

    On the host the tensor has its own storage of exactly ``nbytes`` bytes, so saving it does not save the arena.
    """
    dtype = getattr(torch, spec.dtype)
    if arena.device.type == "cpu":
        storage = torch.ops.disco_accel.carve(arena, offset, nbytes).untyped_storage()
        return torch.empty(0, dtype=dtype).set_(storage, spec.offset, spec.shape, spec.stride)
    flat = arena[offset : offset + nbytes].view(dtype)
    return torch.as_strided(flat, spec.shape, spec.stride, flat.storage_offset() + spec.offset)
