"""``torch.nn.utils.clip_grad_norm_`` takes norms that a plan has made; its callers see no difference."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable

import torch
from torch.nn.utils import clip_grad

from disco_accel.step.gradients.gradient_norms import GradientNorms
from disco_accel.step.gradients.norm_pass import NORM_TYPE
from disco_accel.step.gradients.wrapped_function import wrap

_known: weakref.WeakSet[GradientNorms] = weakref.WeakSet()


def norms_for_clipping(norms: GradientNorms) -> None:
    """From now on ``norms`` are asked."""
    _known.add(norms)
    _wrap()


@functools.cache
def _wrap() -> None:
    wrap(
        clip_grad,
        "_get_total_norm",
        ("tensors", "norm_type", "error_if_nonfinite", "foreach"),
        _asking,
        aliases=((torch.nn.utils, "get_total_norm"),),
    )


def _asking(compute: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def total_norm(
        tensors: torch.Tensor | Iterable[torch.Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        if not isinstance(tensors, torch.Tensor) and not torch.compiler.is_compiling():
            tensors = list(tensors)
            if float(norm_type) == NORM_TYPE and not foreach:
                total = _total(tensors)
                if total is not None and (not error_if_nonfinite or bool(total.isfinite())):
                    return total
        return compute(tensors, norm_type, error_if_nonfinite, foreach)

    return total_norm


def _total(tensors: list[torch.Tensor]) -> torch.Tensor | None:
    """The norm of all, from known norms of some; None if none is known."""
    # Of several dtypes or devices, PyTorch adds up norms in an order of its own.
    if not tensors or len({(tensor.dtype, tensor.device) for tensor in tensors}) != 1:
        return None
    for norms in list(_known):
        norm = norms.of(tensors)
        if any(each is not None for each in norm):
            with torch.no_grad():
                parts = [
                    torch.linalg.vector_norm(tensor, NORM_TYPE) if each is None else each
                    for tensor, each in zip(tensors, norm, strict=True)
                ]
                total: torch.Tensor = torch.linalg.vector_norm(torch.stack(parts), NORM_TYPE)
                return total
    return None
