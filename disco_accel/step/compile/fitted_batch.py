"""A batch as its step gets it: as the user gave it, or padded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from disco_accel.errors import ExecutionError

CUT = frozenset(("loss", "logits", "hidden_states", "attentions"))
"""Fields of a model's output that padding can be taken out of."""


def part_of(tensor: torch.Tensor, number: int, parts: int) -> torch.Tensor:
    """Rows of ``tensor``: part ``number`` of as many of the same size."""
    rows = tensor.shape[0] // parts
    return tensor.narrow(0, number * rows, rows)


@dataclass(frozen=True, slots=True)
class FittedBatch:
    """A ``batch`` as its step gets it. ``length``: that of the user's rows, if they were padded, else None. A step that
    returns its loss alone works on ``parts`` of it: each has as many rows of the tensors that are ``divided``.
    ``parallel``: the part that each of several devices gets, as of ``Sharing``.
    """

    batch: Mapping[str, Any]
    length: int | None = None
    parts: int = 1
    divided: frozenset[str] = frozenset()
    parallel: str = "layers"

    def part(self, number: int) -> dict[str, Any]:
        """Part ``number`` of the batch, in views."""
        return {n: part_of(v, number, self.parts) if n in self.divided else v for n, v in self.batch.items()}

    def cut(self, name: str, value: Any) -> Any:
        """Field ``name`` of the model's output as the batch without padding has it, contiguous as eager's is.

        Raises:
            ExecutionError: a field whose padding cannot be told from the rest.
        """
        if self.length is None or value is None or name == "loss":
            return value
        if name == "logits":
            return value[:, : self.length].contiguous()
        if name == "hidden_states":
            return tuple(layer[:, : self.length].contiguous() for layer in value)
        if name == "attentions":
            return tuple(layer[..., : self.length, : self.length].contiguous() for layer in value)
        raise ExecutionError(
            f"{name}: this batch was padded from {self.length} tokens to a bucket, and padding cannot be taken out of "
            f"{name}; set buckets: off to read it"
        )
