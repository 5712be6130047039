"""Clipping by norm whose product is left to the update of the weights.

Between the clipping and the update the gradients lie unclipped, so that this is for runs in which no other code reads
them there: ``integrate/accelerate/trainer_runs.py`` knows which these are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch

from disco_accel.native.host_memory import expect_rewrite

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class TakesProducts(Protocol):
    """The updates of one model."""

    def clip(self, parameters: Sequence[torch.Tensor], coefficient: torch.Tensor) -> list[torch.Tensor]:
        """Leave the product of gradients with ``coefficient``, of no dimension, to the next update; returns the
        parameters whose gradients are to be multiplied now."""

    def multiply_clipped(self) -> None:
        """Multiply the gradients whose product has been left to the update."""


def clip_grad_norm(
    parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float, updates: TakesProducts
) -> torch.Tensor:
    """As ``torch.nn.utils.clip_grad_norm_``, with the product of gradients left to ``updates`` where these take it."""
    utils: Any = torch.nn.utils
    updates.multiply_clipped()
    rest = list(parameters)
    total: torch.Tensor = utils.get_total_norm([p.grad for p in rest if p.grad is not None], norm_type)
    if max_norm == float("inf") and bool(total.isfinite()):
        # The coefficient is 1.
        return total
    if type(total) is torch.Tensor and total.is_cpu and not total.dim() and total.dtype in _DTYPES:
        with torch.no_grad():
            rest = updates.clip(rest, torch.clamp(float(max_norm) / (total + 1e-6), max=1.0))
    if rest:
        utils.clip_grads_with_norm_(rest, max_norm, total)
    return total


class ClippedGradients:
    """Gradients of one model that are still to be multiplied by the coefficient of their clipping."""

    def __init__(self) -> None:
        self._noted: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        """Parameter, gradient, coefficient of no dimension."""
        self.expected: frozenset[int] = frozenset()
        """Ids of parameters whose next update is put off if it is as the last one was."""

    def note(self, parameters: Iterable[torch.Tensor], coefficient: torch.Tensor) -> None:
        """The gradients of ``parameters`` are to be multiplied by ``coefficient``."""
        self._noted += [(p, p.grad, coefficient) for p in parameters if p.grad is not None]

    def coefficients(self) -> dict[int, torch.Tensor]:
        """By id of a gradient."""
        return {id(gradient): coefficient for _, gradient, coefficient in self._noted}

    def multiply(self) -> None:
        """Multiply those that their parameters still have, as PyTorch does; forget all."""
        noted = [(g, c) for parameter, g, c in self._noted if parameter.grad is g]
        self._noted.clear()
        expect_rewrite([gradient for gradient, _ in noted])
        with torch.no_grad():
            for gradient, coefficient in noted:
                gradient.mul_(coefficient)
