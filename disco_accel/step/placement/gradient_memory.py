"""Host memory of the gradients that planned steps hand out where the optimizer lives on the host.

A range for each trained weight, page-locked for a GPU and used again by the next step once nobody holds the gradient
that was handed out there. Where somebody does, as accumulation holds the gradient that it adds to, a second range is
made, and beside two that are held ordinary memory is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from disco_accel.capture.leaving_gradients import dense
from disco_accel.errors import ConfigError
from disco_accel.graph.taskgraph import TensorSpec
from disco_accel.native.arena import alias
from disco_accel.native.backend import backend_of
from disco_accel.native.host_memory import HostMemory, footprint
from disco_accel.native.out_of_memory import typed_out_of_memory
from disco_accel.sizes import format_size

GradientPlaces = Sequence[torch.Tensor | None]
"""Memory on the host for gradients; None for those whose copy has another layout."""

_RANGES = 2
"""For each weight: the gradient in ``.grad``, and the next one, which is added to it."""


@dataclass(frozen=True, slots=True)
class LeavingGradient:
    """The gradient of the weight ``name``. ``spec``: how it lies in its memory, from the begin; ``like``: on no device.

    Not ``dense``: its elements leave holes or repeat. A copy of it has another layout, and goes to ordinary memory.
    """

    name: str
    spec: TensorSpec
    like: torch.Tensor
    dense: bool

    @property
    def nbytes(self) -> int:
        """Bytes from the first to the last element."""
        return footprint(self.like)

    @classmethod
    def of(cls, name: str, spec: TensorSpec) -> LeavingGradient:
        """Of a gradient that is laid out as ``spec`` in its storage."""
        like = torch.empty_strided(spec.shape, spec.stride, dtype=getattr(torch, spec.dtype), device="meta")
        return cls(name, replace(spec, offset=0), like, dense(spec))


class _Range:
    """``nbytes`` bytes of ``memory`` for one weight's gradients; the memory stays page-locked as long as one of its
    ranges is there."""

    def __init__(self, memory: HostMemory, nbytes: int) -> None:
        self.memory, self.nbytes = memory, nbytes
        self.whole = memory.allocate((nbytes,), torch.uint8)
        self._idle = self._uses()

    def _uses(self) -> int:
        whole: Any = self.whole
        return int(whole._use_count())

    @property
    def free(self) -> bool:
        """Whether nobody can come by these bytes any more.

        The result of ``tensor`` has a storage of its own. Its bytes hold the whole range until they are freed: as long
        as a tensor, an array or a storage object of Python's is over them. The count of uses of one storage for all
        would not tell: PyTorch keeps the Python object of a storage, whether somebody holds it or not.
        """
        return self._uses() == self._idle

    def tensor(self, spec: TensorSpec) -> torch.Tensor:
        """One over the range, from its begin."""
        return alias(self.whole, 0, self.nbytes, spec)


class GradientMemory:
    """The ranges of one model's weights, which all plans of the model share."""

    def __init__(self, device: torch.device, limit: int, *, watched: bool = False, masters: int = 0) -> None:
        """``device``: the one that copies into the ranges. ``limit``: ``host_memory``, in bytes. ``watched``: writes to
        gradients may be looked for (``WatchedTensors``). ``masters``: bytes of ``limit`` that fp32 masters take, and
        that their moments take beyond the size of weights, of which no step knows."""
        self._backend, self._limit, self._watched, self._masters = backend_of(device), limit, watched, masters
        self._ranges: dict[str, list[_Range]] = {}
        self._memories: list[HostMemory] | None = None
        """Of all ranges; None: not known since these have changed."""

    @property
    def memory(self) -> Sequence[HostMemory]:
        """Where the ranges lie."""
        if self._memories is None:
            self._memories = list({id(r.memory): r.memory for each in self._ranges.values() for r in each}.values())
        return self._memories

    @property
    def nbytes(self) -> int:
        """Of all ranges."""
        return sum(memory.nbytes for memory in self.memory)

    def holds(self, gradient: torch.Tensor) -> bool:
        """Whether it lies in one of the ranges."""
        return any(memory.holds(gradient) for memory in self.memory)

    def has(self, gradient: torch.Tensor, leaving: LeavingGradient) -> bool:
        """Whether ``gradient`` is laid out as ``leaving`` and fills a range of its weight."""
        spec = leaving.spec
        alike = gradient.shape == spec.shape and gradient.stride() == spec.stride and gradient.is_cpu
        if not alike or gradient.dtype is not leaving.like.dtype:
            return False
        address, ranges = gradient.data_ptr(), self._ranges.get(leaving.name, ())
        return any(r.whole.data_ptr() == address and r.nbytes == leaving.nbytes for r in ranges)

    def release(self) -> None:
        """Give up the ranges; the device is idle. Gradients that somebody holds keep their memory, which is not
        page-locked any more."""
        self._ranges.clear()
        self._memories = None

    @typed_out_of_memory("making host memory for the gradients")
    def places(self, gradients: Sequence[LeavingGradient], beside: int) -> GradientPlaces:
        """Tensors on the host that nobody else has, one for each of ``gradients`` but those that are not dense.

        ``beside``: bytes of ``host_memory`` that all but gradients takes.

        Raises:
            ConfigError: ``host_memory`` is too small for gradients that are held beside the new ones.
        """
        # The user's own copies from gradients to a device may not have ended when the gradients were freed.
        self._backend.synchronize()
        ranges = self._free_ranges(gradients, beside + self._masters)
        return [_place(gradient, ranges.get(gradient.name)) for gradient in gradients]

    def fill(self, copies: Sequence[tuple[torch.Tensor | None, torch.Tensor]]) -> list[torch.Tensor]:
        """Copies of gradients, each into its place where it has one, complete. No step may be running."""
        with self._backend.current(), torch.no_grad():
            filled: dict[int, torch.Tensor] = {}
            # What the device copies first: the processor copies the rest meanwhile.
            for i in sorted(range(len(copies)), key=lambda i: copies[i][0] is None or copies[i][1].is_cpu):
                place, value = copies[i]
                filled[i] = value.to("cpu", copy=True) if place is None else place.copy_(value, non_blocking=True)
        self._backend.synchronize()
        return [filled[i] for i in range(len(copies))]

    def _free_ranges(self, gradients: Sequence[LeavingGradient], beside: int) -> dict[str, _Range]:
        """By name; without the gradients that go to ordinary memory."""
        found, lacking = self._look_for(gradients)
        if lacking and not self._fits(lacking, beside) and self._ranges.keys() - {g.name for g in gradients}:
            # Weights that are frozen by now, or that this step does not reach, leave their room to others.
            self.release()
            found, lacking = self._look_for(gradients)
        if lacking:
            self._require_room(lacking, beside)
            for gradient, made in zip(lacking, self._made(lacking), strict=True):
                self._ranges[gradient.name].append(made)
                self._memories = None
                found[gradient.name] = made
        return found

    def _look_for(self, gradients: Sequence[LeavingGradient]) -> tuple[dict[str, _Range], list[LeavingGradient]]:
        """Free ranges by name, and the gradients that have none and may get one."""
        found, lacking = {}, []
        for gradient in gradients:
            # A weight that was replaced, or has another dtype, has ranges of another size.
            ranges = [r for r in self._ranges.get(gradient.name, ()) if r.nbytes == gradient.nbytes]
            if len(ranges) < len(self._ranges.setdefault(gradient.name, [])):
                self._memories = None
            self._ranges[gradient.name] = ranges
            free = next((r for r in ranges if r.free), None)
            if free is not None:
                found[gradient.name] = free
            elif len(ranges) < _RANGES and gradient.dense:
                lacking.append(gradient)
        return found, lacking

    def _fits(self, gradients: Sequence[LeavingGradient], beside: int) -> bool:
        return beside + self.nbytes + _room_for(gradients) <= self._limit

    def _require_room(self, gradients: Sequence[LeavingGradient], beside: int) -> None:
        # The first range of each weight was counted when the step was planned.
        if any(self._ranges[gradient.name] for gradient in gradients) and not self._fits(gradients, beside):
            raise ConfigError(
                f"host_memory: {format_size(self._limit)} is too small for gradients of two backwards at once, as "
                f"accumulation and zero_grad(set_to_none=False) have them: {format_size(self.nbytes)} and "
                f"{format_size(_room_for(gradients))} more, beside {format_size(beside)} of weights, two moments and "
                "offloaded values; raise it, or set gradients to None before each backward()"
            )

    def _made(self, gradients: Sequence[LeavingGradient]) -> list[_Range]:
        """New ranges, one after the other in one piece of memory."""
        memory = HostMemory(_room_for(gradients), watched=self._watched, gpu=self._backend.device)
        if self._backend.separate_memory:
            memory.pin(self._backend.device)
        return [_Range(memory, gradient.nbytes) for gradient in gradients]


def _place(gradient: LeavingGradient, free: _Range | None) -> torch.Tensor | None:
    if free is not None:
        return free.tensor(gradient.spec)
    return torch.empty_like(gradient.like, device="cpu") if gradient.dense else None


def _room_for(gradients: Sequence[LeavingGradient]) -> int:
    return HostMemory.room_for([gradient.like for gradient in gradients])
