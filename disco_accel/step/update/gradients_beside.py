"""Memory of gradients beside what an optimizer keeps that no step knows of."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from disco_accel.step.gradient_memory import GradientMemory, LeavingGradient


class GradientsBeside(GradientMemory):
    """Counts fp32 masters, and what makes moments larger than their weights, as host memory that is taken."""

    def __init__(self, beside: int, device: torch.device, limit: int, *, watched: bool = False) -> None:
        """``beside``: bytes of that; the others as for ``GradientMemory``."""
        super().__init__(device, limit, watched=watched)
        self._beside = beside

    def copies(self, gradients: Sequence[LeavingGradient], beside: int) -> list[torch.Tensor]:
        """As those of ``GradientMemory``."""
        return super().copies(gradients, beside + self._beside)
