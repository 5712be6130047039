"""Host memory of the parts of weights that devices share: views of a weight's rows, packed copies of its columns."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from disco_accel.capture.captured_step import InputBinding
from disco_accel.native.backend import backend_of
from disco_accel.native.host_memory import HostMemory, WatchedTensors, bytes_of

_Key = tuple[str, int, int, int]
"""Name of a weight, the dimension that is cut, which part, of how many."""


@dataclass(frozen=True)
class _PackedCopy:
    weight: torch.Tensor
    source: torch.Tensor
    """The part in the weight's own memory."""
    packed: torch.Tensor


class ShardMemory:
    """Keeps copies of those parts whose bytes are no run of their weight's, one for all plans, and as the weight is."""

    def __init__(self, device: torch.device) -> None:
        """``device``: the one that loads them."""
        self._device = device
        self._copies: dict[_Key, _PackedCopy] = {}
        self.memory: list[HostMemory] = []
        """Where the copies lie."""
        self._sources = WatchedTensors([])

    def keep(self, bindings: Sequence[InputBinding], weights: Mapping[str, torch.Tensor]) -> None:
        """Make the copies that ``bindings`` need of ``weights`` and that are not there yet."""
        missing: dict[_Key, tuple[torch.Tensor, torch.Tensor]] = {}
        for binding in bindings:
            weight = weights[binding.name].detach()
            part = part_of_weight(binding, weight)
            known = self._copies.get(_key(binding))
            if not part.is_contiguous() and (known is None or not _same_place(known.source, part)):
                missing[_key(binding)] = weight, part
        if not missing:
            return
        memory = HostMemory(HostMemory.room_for([_packed_like(part) for _, part in missing.values()]), watched=False)
        changed = set(self._copies) if self._sources.changed() else set()
        for key, (weight, part) in missing.items():
            self._copies[key] = _PackedCopy(weight, part, memory.allocate(part.shape, part.dtype))
        held = [m for m in self.memory if any(m.holds(copy.packed) for copy in self._copies.values())]
        self.memory = [*held, memory]
        self._copy(changed | missing.keys())
        if backend_of(self._device).separate_memory:
            memory.pin(self._device)

    def bytes_of(self, binding: InputBinding, weight: torch.Tensor) -> torch.Tensor:
        """The bytes of the part ``binding`` of ``weight``, which ``keep`` was given."""
        part = part_of_weight(binding, weight)
        return bytes_of(part if part.is_contiguous() else self._copies[_key(binding)].packed)

    def moved(self, binding: InputBinding, weight: torch.Tensor, place: int) -> bool:
        """Whether the part lies elsewhere than at the address ``place``, or its copy is one of another weight."""
        part = part_of_weight(binding, weight)
        if part.is_contiguous():
            return part.data_ptr() != place
        known = self._copies.get(_key(binding))
        return known is None or known.packed.data_ptr() != place or not _same_place(known.source, part)

    def refresh(self) -> None:
        """Copy anew if one of the weights was written to."""
        if self._copies and self._sources.changed():
            self._copy(self._copies)

    def _copy(self, keys: Collection[_Key]) -> None:
        # In this order: what is written to a weight meanwhile is seen the next time.
        self._sources = WatchedTensors(list({c.weight.data_ptr(): c.weight for c in self._copies.values()}.values()))
        with torch.no_grad():
            for key in keys:
                self._copies[key].packed.copy_(self._copies[key].source)


def packed_bytes(bindings: Iterable[InputBinding], weights: Mapping[str, torch.Tensor]) -> int:
    """Bytes of the copies for ``bindings``, parts of ``weights``, which may be on ``meta``."""
    parts = (part_of_weight(binding, weights[binding.name]) for binding in bindings)
    return HostMemory.room_for([_packed_like(part) for part in parts if not part.is_contiguous()])


def part_of_weight(binding: InputBinding, weight: torch.Tensor) -> torch.Tensor:
    """The part ``binding`` of ``weight``, a view."""
    length = weight.shape[binding.dim] // binding.parts
    return weight.narrow(binding.dim, binding.part * length, length)


def _packed_like(part: torch.Tensor) -> torch.Tensor:
    return torch.empty(part.shape, dtype=part.dtype, device="meta")


def _key(binding: InputBinding) -> _Key:
    return binding.name, binding.dim, binding.part, binding.parts


def _same_place(one: torch.Tensor, other: torch.Tensor) -> bool:
    same = one.shape == other.shape and one.stride() == other.stride() and one.dtype == other.dtype
    return same and one.data_ptr() == other.data_ptr()
