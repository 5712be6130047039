"""What a memory budget is made of: the arena is the budget less what lives on the device outside the plan."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from disco_accel.capture.captured_step import CapturedStep, InputBinding, InputSource, ValueBinding

_ROUNDING = 22 << 20
"""Bytes: blocks of up to 1 MiB share pieces of 2 MiB, those of up to 10 MiB pieces of 20 MiB, others are whole pieces
(c10/core/AllocatorConfig.h). One piece of each kind is only partly used."""

_SLACK = 256
"""Bytes outside an arena that several steps share are rounded up to this part of the budget: a batch that is some bytes
larger than all before leaves the other steps' plans as they are."""

_ROUNDING_SHARE = 64
"""No more than this part of the budget is set aside for it: one of less than 1.4 GiB may be exceeded by the rest."""


@dataclass(frozen=True, slots=True)
class Budget:
    """All in bytes. ``total`` is what the user gave; the rest of ``total`` after the other parts is ``arena``.

    ``optimizer`` is the state AdamW will hold: two tensors as large as each trainable parameter. ``workspaces`` are
    those of the libraries that multiply matrices. ``outputs``: copies of logits that the user gets, and their gradient.
    ``rounding``: memory that PyTorch's allocator takes from the driver beyond what is allocated.
    """

    total: int
    adapters: int
    gradients: int
    optimizer: int
    batch: int
    workspaces: int = 0
    outputs: int = 0
    rounding: int = 0

    @property
    def outside(self) -> int:
        """All but the arena."""
        return self._used + self.rounding

    @property
    def _used(self) -> int:
        return self.adapters + self.gradients + self.optimizer + self.batch + self.workspaces + self.outputs

    def total_for(self, arena: int) -> int:
        """The smallest whole budget that leaves ``arena`` bytes."""
        used = self._used + arena
        return used + min(_ROUNDING, -(-(used - self.workspaces) // (_ROUNDING_SHARE - 1))) if self.rounding else used

    @property
    def arena(self) -> int:
        return self.total - self.outside

    def as_dict(self) -> dict[str, int]:
        return {
            "total": self.total,
            "arena": self.arena,
            "adapters": self.adapters,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "batch": self.batch,
            "workspaces": self.workspaces,
            "outputs": self.outputs,
            "rounding": self.rounding,
        }


def _storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    # By identity: storages on meta all have the same address.
    return sum({(s := t.untyped_storage())._cdata: s.nbytes() for t in tensors}.values())


@dataclass(frozen=True, slots=True)
class BudgetBytes:
    """What a budget of ``total`` bytes is for, besides the arena, in bytes: trained weights on the device, the batch,
    and ``outputs``. ``others``: the most that another step with the same arena has on the device outside of it."""

    total: int
    adapters: int
    batch: int
    outputs: int = 0
    others: int = 0

    def split(self, workspaces: int = 0, *, in_blocks: bool = False) -> Budget:
        """As ``BudgetFacts.split``."""
        whole = self._of(self.total, workspaces, in_blocks)
        if self.others <= whole.outside:
            return whole
        granule = max(1, self.total // _SLACK)
        arena = self.total - -(-self.others // granule) * granule
        # Of a smaller budget less is set aside for rounding.
        more = max(0, self._of(whole.outside + arena, workspaces, in_blocks).arena - arena)
        return self._of(min(self.total, whole.outside + arena - more), workspaces, in_blocks)

    def _of(self, total: int, workspaces: int, in_blocks: bool) -> Budget:
        # Workspaces are whole pieces.
        rounding = min(_ROUNDING, -(-max(0, total - workspaces) // _ROUNDING_SHARE)) if in_blocks else 0
        adapters = self.adapters
        return Budget(total, adapters, adapters, 2 * adapters, self.batch, workspaces, self.outputs, rounding)


@dataclass(frozen=True)
class BudgetFacts:
    """What a budget of ``total`` bytes is for, besides the arena: ``trainable`` parameters, the ``batch``, and so many
    bytes of ``outputs``; ``others`` as of ``BudgetBytes``."""

    total: int
    trainable: Sequence[torch.Tensor]
    batch: Mapping[str, torch.Tensor]
    outputs: int = 0
    others: int = 0

    def split(self, workspaces: int = 0, *, in_blocks: bool = False) -> Budget:
        """The parts of ``total``, or of less where the arena is one that ``others`` leave too. ``in_blocks``: the
        device's memory comes from PyTorch's caching allocator."""
        return self.in_bytes().split(workspaces, in_blocks=in_blocks)

    def in_bytes(self) -> BudgetBytes:
        """The same without the tensors."""
        trained, batch = _storage_bytes(self.trainable), _storage_bytes(self.batch.values())
        return BudgetBytes(self.total, trained, batch, self.outputs, self.others)


def leaving_bytes(captured: CapturedStep) -> dict[str, int]:
    """Name → bytes of the user's copy of each output, or of its memory outside the arena. A loss takes none."""
    outside = (b for b in captured.bindings if b.source is InputSource.OUTSIDE)
    returned: list[ValueBinding | InputBinding] = [*captured.outputs, *outside]
    return {
        o.name: math.prod(o.spec.shape) * getattr(torch, o.spec.dtype).itemsize if o.spec.shape else 0 for o in returned
    }


def outputs_bytes(captured: CapturedStep) -> int:
    """Bytes outside the arena: the user's copy of each output, and the gradient of those that are differentiated."""
    sizes = leaving_bytes(captured)
    return sum(sizes.values()) + sum(sizes[o.name] for o in captured.outputs[: captured.differentiated])
