"""The Trainer of the recipe, in a module of its own: a script's classes belong to ``__main__``, and ``update: auto``
knows those of this package by the module's name."""

from __future__ import annotations

from typing import Any

import torch

from disco_accel.recipes.metrics import Ledger
from disco_accel.recipes.saving import WholeCheckpoints


class RecordingTrainer(WholeCheckpoints):
    """A Trainer that notes every micro-batch's loss before anything rounds it."""

    ledger: Ledger

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(*args, **kwargs)
        self.ledger.micro_batch(loss)
        return loss

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        # PEFT loads every adapter as float32; the optimizer's state, loaded next, takes the dtype of its parameter.
        assert self.model is not None
        dtypes = {name: p.dtype for name, p in self.model.named_parameters() if p.requires_grad}
        super()._load_from_checkpoint(*args, **kwargs)
        for name, parameter in self.model.named_parameters():
            if name in dtypes:
                parameter.data = parameter.data.to(dtypes[name])
