"""Host memory of the frozen weights: one anonymous arena that the parameters are moved into."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from disco_accel.errors import ExecutionError
from disco_accel.execute.arena import alias, host_arena, touched_bytes
from disco_accel.execute.build_ext import load_extension
from disco_accel.taskgraph import TensorSpec

ALIGNMENT = 64
"""Bytes. ATen's CPU kernels give other bits for less aligned fp32 operands."""


def footprint(tensor: torch.Tensor) -> int:
    """Bytes from the first to the last element of ``tensor``, holes of a strided layout included."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


class HostMemory:
    """An arena of ``nbytes`` bytes that hands out room for tensors from the bottom up and never takes it back."""

    def __init__(self, nbytes: int) -> None:
        self._arena = host_arena(nbytes)
        self._next = 0

    @staticmethod
    def room_for(tensors: list[torch.Tensor]) -> int:
        """Bytes that an arena needs to adopt all of ``tensors``."""
        return sum(-(-footprint(t) // ALIGNMENT) * ALIGNMENT for t in tensors)

    @property
    def nbytes(self) -> int:
        """Size of the arena in bytes."""
        return self._arena.numel()

    @property
    def used(self) -> int:
        """Bytes handed out."""
        return self._next

    def touched(self) -> int:
        """Bytes of the arena that are in memory."""
        return touched_bytes(self._arena)

    def adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor with the bits, shape, strides and dtype of ``tensor`` in a storage of its own inside the arena.

        The result needs no gradient and keeps the arena alive. Raises ExecutionError when the arena is full or the
        tensor is not on the CPU.
        """
        if tensor.device.type != "cpu":
            raise ExecutionError(f"only CPU tensors can move into host memory, this one is on {tensor.device}")
        nbytes = footprint(tensor)
        if self._next + nbytes > self.nbytes:
            raise ExecutionError(
                f"the host arena of {self.nbytes} bytes has {self.nbytes - self._next} left, a tensor needs {nbytes}"
            )
        dtype = str(tensor.dtype).removeprefix("torch.")
        spec = TensorSpec(dtype, tuple(tensor.shape), tuple(tensor.stride()))
        with torch.no_grad():
            moved = alias(self._arena, self._next, nbytes, spec)
            moved.copy_(tensor)
        self._next += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return moved


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A 1-d uint8 view of the memory from the first to the last element of ``tensor``, which it keeps alive."""
    nbytes = footprint(tensor)
    offset = tensor.storage_offset() * tensor.element_size()
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage(), offset, (nbytes,), (1,))


def sample_digest(tensors: Sequence[torch.Tensor]) -> int:
    """A number that changes, with near certainty, when the content of one of these CPU tensors does.

    Reads sixteen words of each, so that writes which autograd's version counter misses (through ``.data``) are noticed.
    A change of a few elements alone may go unnoticed.
    """
    load_extension()
    return int(torch.ops.disco_accel.sample_digest(list(tensors)))
