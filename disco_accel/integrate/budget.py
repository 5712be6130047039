"""What a memory budget is made of: the arena is the budget less what lives on the device outside the plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Budget:
    """All in bytes. ``total`` is what the user gave; the rest of ``total`` after the other parts is ``arena``.

    ``optimizer`` is the state AdamW will hold: two tensors as large as each trainable parameter. ``workspaces`` are
    those of the libraries that multiply matrices. ``outputs``: copies of logits that the user gets, and their gradient.
    """

    total: int
    adapters: int
    gradients: int
    optimizer: int
    batch: int
    workspaces: int = 0
    outputs: int = 0

    @property
    def outside(self) -> int:
        return self.adapters + self.gradients + self.optimizer + self.batch + self.workspaces + self.outputs

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
        }


def _storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    # By identity: storages on meta all have the same address.
    return sum({(s := t.untyped_storage())._cdata: s.nbytes() for t in tensors}.values())


def split_budget(
    total: int,
    trainable: Iterable[torch.Tensor],
    batch: Mapping[str, torch.Tensor],
    workspaces: int = 0,
    outputs: int = 0,
) -> Budget:
    """Split ``total`` bytes for a model with these trainable parameters, this batch, and so many bytes of the rest."""
    adapters = _storage_bytes(trainable)
    inputs = _storage_bytes(batch.values())
    return Budget(total, adapters, adapters, 2 * adapters, inputs, workspaces, outputs)
