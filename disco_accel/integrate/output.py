"""What a planned training step returns in place of the model's own output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils import ModelOutput

_NOT_LOGITS = (
    "a planned training step keeps only the loss; read {name!r} from a forward under torch.no_grad(), "
    "or set disco_config.on_unsupported: eager"
)


@dataclass
class LossOutput(ModelOutput):
    """The loss of a planned step. ``logits`` (detached) are computed by one more forward when they are read."""

    loss: torch.Tensor | None = None

    def attach(self, logits: Callable[[], torch.Tensor]) -> LossOutput:
        """Give the output its way to compute logits of shape (batch, sequence, vocabulary) on demand."""
        self.__dict__["_logits"] = logits
        return self

    def __getattr__(self, name: str) -> Any:
        if name == "logits" and "_logits" in self.__dict__:
            return self.__dict__["_logits"]()
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(_NOT_LOGITS.format(name=name))

    def __getitem__(self, key: Any) -> Any:
        if key == "logits" or key == 1:
            return self.logits
        return super().__getitem__(key)
