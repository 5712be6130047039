"""Values whose gradients are made by another step: of outputs that a plan does not differentiate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from disco_accel.step.dynamo import not_compiled
from disco_accel.step.run.one_backward import GradientsOf, OneForward


class _Elsewhere(torch.autograd.Function):
    """Values whose gradients other code takes to the parameters, all at once."""

    @staticmethod
    def forward(
        ctx: Any,
        paths: tuple[str, ...],
        together: OneForward,
        gradients: tuple[GradientsOf, GradientsOf],
        names: tuple[str, ...],
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.paths, ctx.together, ctx.gradients, ctx.names = paths, together, gradients, names
        # DDP's node behind a value that no loss depends on passes no gradient on; zeros would cost a step.
        ctx.set_materialize_grads(False)
        together.add(ctx)
        return tuple(tensor.detach() for tensor in tensors[: len(paths)])

    @staticmethod
    @not_compiled
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        arrived = {path: t for path, t in zip(ctx.paths, tangents, strict=True) if t is not None}
        gradients = ctx.together.gradients(ctx, arrived, *ctx.gradients)
        return (None, None, None, None, *(None for _ in ctx.paths), *(gradients.get(name) for name in ctx.names))


def with_gradients(
    values: Mapping[str, torch.Tensor],
    parameters: Mapping[str, torch.Tensor],
    together: OneForward,
    alone: GradientsOf,
    jointly: GradientsOf,
) -> dict[str, torch.Tensor]:
    """``values``, by path, as functions of ``parameters`` whose backward is ``alone``, or ``jointly`` with that of
    other outputs of the forward ``together``."""
    apply: Callable[..., tuple[torch.Tensor, ...]] = _Elsewhere.apply
    made = apply(tuple(values), together, (alone, jointly), tuple(parameters), *values.values(), *parameters.values())
    return dict(zip(values, made, strict=True))
