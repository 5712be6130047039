"""Values whose gradients are made by another step: of outputs that a plan does not differentiate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from disco_accel.step.dynamo import not_compiled

Gradients = Callable[[torch.Tensor], Mapping[str, torch.Tensor]]
"""From the gradient of a value to those of the trainable parameters, by name."""
GradientsOf = Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]
"""As ``Gradients``, from the gradients of several values by their paths."""


class _Elsewhere(torch.autograd.Function):
    """A value whose gradient other code takes to the parameters."""

    @staticmethod
    def forward(
        ctx: Any, value: torch.Tensor, gradients: Gradients, names: tuple[str, ...], *parameters: torch.Tensor
    ) -> torch.Tensor:
        ctx.gradients, ctx.names = gradients, names
        # DDP's node behind a value that no loss depends on passes no gradient on; zeros would cost a step.
        ctx.set_materialize_grads(False)
        return value.detach()

    @staticmethod
    @not_compiled
    def backward(ctx: Any, tangent: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        gradients = {} if tangent is None else ctx.gradients(tangent)
        return (None, None, None, *(gradients.get(name) for name in ctx.names))


def with_gradient(value: torch.Tensor, parameters: Mapping[str, torch.Tensor], gradients: Gradients) -> torch.Tensor:
    """``value`` as a function of ``parameters`` whose backward is ``gradients``."""
    apply: Callable[..., torch.Tensor] = _Elsewhere.apply
    return apply(value, gradients, tuple(parameters), *parameters.values())


class _Together(torch.autograd.Function):
    """Values whose gradients other code takes to the parameters, all at once."""

    @staticmethod
    def forward(
        ctx: Any, paths: tuple[str, ...], gradients: GradientsOf, names: tuple[str, ...], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.paths, ctx.gradients, ctx.names = paths, gradients, names
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors[: len(paths)])

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        arrived = {path: t for path, t in zip(ctx.paths, tangents, strict=True) if t is not None}
        gradients = ctx.gradients(arrived) if arrived else {}
        return (None, None, None, *(None for _ in ctx.paths), *(gradients.get(name) for name in ctx.names))


def with_gradients(
    values: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor], gradients: GradientsOf
) -> dict[str, torch.Tensor]:
    """``values`` as functions of ``parameters``, which ``gradients`` differentiates together."""
    apply: Callable[..., tuple[torch.Tensor, ...]] = _Together.apply
    made = apply(tuple(values), gradients, tuple(parameters), *values.values(), *parameters.values())
    return dict(zip(values, made, strict=True))
