"""Host tensors that steps load although they are no parameters, in page-locked memory: buffers and plain tensors.

A copy from other memory makes the engine's thread wait for it. Tensors that share bytes move together and go on sharing
them. A tensor that shares bytes with one held elsewhere, or with a numpy array, stays where it is, slower and right.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from disco_accel.native.backend import backend_of, has_backend
from disco_accel.native.host_memory import ALIGNMENT, HostMemory, footprint


@dataclass(frozen=True)
class _Shared:
    """Tensors that have one storage on ``device``, and the bytes of it from the first to the last that they use."""

    tensors: tuple[torch.Tensor, ...]
    device: torch.device
    begin: int
    end: int

    @classmethod
    def of(cls, tensors: list[torch.Tensor]) -> _Shared:
        """``tensors`` of one storage."""
        begins = [int(t.storage_offset()) * t.element_size() for t in tensors]
        ends = [begin + footprint(t) for begin, t in zip(begins, tensors, strict=True)]
        # Aligned as before: the bits of some of ATen's kernels depend on it.
        return cls(tuple(tensors), tensors[0].device, min(begins) // ALIGNMENT * ALIGNMENT, max(ends))

    @property
    def nbytes(self) -> int:
        return self.end - self.begin

    def known(self) -> bool:
        """Whether nothing but ``tensors`` uses the storage, as far as PyTorch knows."""
        storage = self.tensors[0].untyped_storage()
        # The storage's own Python object counts, too. One that cannot be resized is another library's, or was shown it.
        return storage.resizable() and torch._C._storage_Use_Count(storage._cdata) == len(self.tensors) + 1

    def move_to(self, memory: torch.Tensor) -> None:
        """Give the tensors the same bytes in ``memory``, 1-d uint8 in a storage of its own."""
        old = torch.empty(0, dtype=torch.uint8, device=self.device)
        memory.copy_(old.set_(self.tensors[0].untyped_storage(), self.begin, (self.nbytes,), (1,)))
        storage = memory.untyped_storage()
        for tensor in self.tensors:
            start = tensor.storage_offset() - self.begin // tensor.element_size()
            moved = torch.empty(0, dtype=tensor.dtype, device=memory.device)
            tensor.data = moved.set_(storage, start, tensor.shape, tensor.stride())


def _by_storage(tensors: Iterable[torch.Tensor]) -> Iterator[_Shared]:
    groups: dict[Any, dict[int, torch.Tensor]] = defaultdict(dict)
    for tensor in tensors:
        # A view keeps what it was taken from, which goes along.
        for one in (tensor, tensor._base):
            if one is not None and one.untyped_storage()._cdata == tensor.untyped_storage()._cdata:
                groups[one.untyped_storage()._cdata][id(one)] = one
    for group in groups.values():
        yield _Shared.of(list(group.values()))


def _is_movable(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in (torch.Tensor, torch.nn.Buffer)
        and tensor.layout is torch.strided
        and has_backend(tensor.device)
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_inference() or tensor.numel() == 0)
    )


class PinnedTensors:
    """Moves tensors into host memory that is page-locked where ``device`` is a GPU, and back."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._arenas: list[HostMemory] = []
        self._moved: dict[int, tuple[weakref.ref[torch.Tensor], torch.device]] = {}

    def gather(self, buffers: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> None:
        """Move ``buffers``, wherever they are, and ``others`` that are on the host, unless they are there already.

        Raises:
            ExecutionError: the system does not allow as much page-locked memory.
        """
        wanted = [t for t in buffers if _is_movable(t)]
        buffer_ids = {id(t) for t in wanted}
        plain = [t for t in others if _is_movable(t) and id(t) not in buffer_ids]
        shared = [
            group
            for group in _by_storage([*wanted, *plain])
            if not self._holds(group.tensors[0])
            and (group.known() if group.tensors[0].is_cpu else any(id(t) in buffer_ids for t in group.tensors))
        ]
        if not shared:
            return
        self._arenas = [arena for arena in self._arenas if any(arena.holds(t) for t in self._alive())]
        # Unwatched: a device may write to such tensors, as to buffers, and what no page tells their content does.
        arena = HostMemory(sum(-(-g.nbytes // ALIGNMENT) * ALIGNMENT for g in shared), huge_pages=False, watched=False)
        if backend_of(self._device).separate_memory:
            arena.pin(self._device)
        self._arenas.append(arena)
        for group in shared:
            for tensor in group.tensors:
                self._moved[id(tensor)] = weakref.ref(tensor), group.device
            group.move_to(arena.allocate((group.nbytes,), torch.uint8))

    def _holds(self, tensor: torch.Tensor) -> bool:
        return any(arena.holds(tensor) for arena in self._arenas)

    def _alive(self) -> list[torch.Tensor]:
        return [t for reference, _ in self._moved.values() if (t := reference()) is not None]

    def undo(self) -> None:
        """Give the tensors that are still there ordinary memory where they were, values and sharing kept."""
        homes = {id(t): device for reference, device in self._moved.values() if (t := reference()) is not None}
        for group in _by_storage(t for t in self._alive() if self._holds(t)):
            group.move_to(torch.empty(group.nbytes, dtype=torch.uint8, device=homes[id(group.tensors[0])]))
        self._moved.clear()
        self._arenas.clear()
