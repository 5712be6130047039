"""What code that moves tensors through a store asks of it; ``Store`` has it, and tests have doubles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch


class ObjectStore(Protocol):
    """The part of ``Store`` that offloaded weights and saved activations use; its docstrings hold."""

    @property
    def device(self) -> torch.device:
        """Of tensors of the device tier."""

    def create(self, shape: Sequence[int], dtype: torch.dtype, device: str = "host") -> int:
        """A new object."""

    def get(self, id: int) -> torch.Tensor:
        """Its tensor."""

    def put(self, id: int, next_use: float | None = None) -> None:
        """Its content is final, and its next use so many seconds away."""

    def free(self, id: int) -> None:
        """It is no more."""

    def prefetch(self, id: int) -> None:
        """It is used soon."""

    def stats(self) -> dict[str, Any]:
        """Its figures."""
