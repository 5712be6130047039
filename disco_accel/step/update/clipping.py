"""PyTorch's clipping of gradients by their norm, whose product is left to the update of the weights where it can be."""

from __future__ import annotations

import functools
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.nn.utils import clip_grad

from disco_accel.step.gradients.wrapped_function import wrap
from disco_accel.step.update.unscaled_gradients import _grad, attribute_is_replaced, owner_of

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Clipper(Protocol):
    """What one model's gradients are clipped by."""

    def clip(
        self, parameters: Sequence[torch.Tensor], coefficient: torch.Tensor, known: Mapping[int, int]
    ) -> list[torch.Tensor]:
        """Note ``coefficient`` for the gradients of ``parameters`` that nobody can look at but by ``.grad``; returns
        the parameters whose gradients are to be multiplied now. ``known``: by id of a gradient, how often the function
        that clips refers to it."""


_clippers: weakref.WeakSet[Any] = weakref.WeakSet()


def clip_by(clipper: Clipper) -> None:
    """From now on, as long as it lives."""
    _clippers.add(clipper)
    _install()


def end_clipping_by(clipper: Clipper) -> None:
    """From now on PyTorch multiplies."""
    _clippers.discard(clipper)


def held_elsewhere(parameter: torch.Tensor, known: int) -> bool:
    """Whether somebody refers to the gradient of ``parameter``, or to its memory, by another way than ``.grad``:
    ``known`` references are none of theirs."""
    references, *others = _references(parameter)
    usual, *of_others = _usual_references()
    return references - known != usual or others != of_others


def _references(parameter: torch.Tensor) -> tuple[int, ...]:
    """To the gradient: Python's, weak ones and PyTorch's; to its storage: PyTorch's and Python's."""
    gradient: Any = _grad.__get__(parameter)
    storage: Any = gradient.untyped_storage()
    uses = int(gradient._use_count()), int(torch._C._storage_Use_Count(storage._cdata))
    return sys.getrefcount(gradient), weakref.getweakrefcount(gradient), *uses, sys.getrefcount(storage)


@functools.cache
def _usual_references() -> tuple[int, ...]:
    fresh = torch.nn.Parameter(torch.zeros(1, device="cpu"))
    fresh.grad = torch.zeros(1, device="cpu")
    return _references(fresh)


def coefficient_of(max_norm: float, total_norm: torch.Tensor) -> torch.Tensor:
    """What PyTorch multiplies gradients by."""
    return torch.clamp(float(max_norm) / (total_norm + 1e-6), max=1.0)


@functools.cache
def _install() -> None:
    wrap(
        clip_grad,
        "_clip_grads_with_norm_",
        ("parameters", "max_norm", "total_norm", "foreach"),
        _noting,
        aliases=((torch.nn.utils, "clip_grads_with_norm_"),),
    )


def _noting(clip: Callable[..., None]) -> Callable[..., None]:
    with torch.inference_mode(False):
        if not _multiplies_by_coefficient(clip):
            return clip
    norms_and_clips = getattr(clip_grad.clip_grad_norm_, "__wrapped__", clip_grad.clip_grad_norm_).__code__

    def clip_grads_with_norm_(parameters: Any, max_norm: Any, total_norm: Any, foreach: bool | None = None) -> None:
        if torch.compiler.is_compiling():
            return clip(parameters, max_norm, total_norm, foreach)
        caller = sys._getframe(1)
        known = Counter(map(id, caller.f_locals.get("grads", ()) if caller.f_code is norms_and_clips else ()))
        rest = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        with torch.inference_mode(False), torch.no_grad():
            rest = _note(rest, max_norm, total_norm, known)
        return clip(rest, max_norm, total_norm, foreach) if rest else None

    return clip_grads_with_norm_


def _note(
    parameters: list[torch.Tensor], max_norm: Any, total_norm: Any, known: Mapping[int, int]
) -> list[torch.Tensor]:
    """Those whose gradients are to be multiplied now."""
    for parameter in parameters:
        owner = owner_of(parameter)
        if owner is not None:
            owner.show()
    clippers = list(_clippers)
    if (
        not clippers
        or attribute_is_replaced()
        or type(total_norm) is not torch.Tensor
        or not total_norm.is_cpu
        or total_norm.dim()
    ):
        return parameters
    coefficient = coefficient_of(max_norm, total_norm.detach())
    # A gradient that is there twice is multiplied twice.
    if coefficient.dtype not in _DTYPES or len(set(map(id, parameters))) < len(parameters):
        return parameters
    for clipper in clippers:
        parameters = clipper.clip(parameters, coefficient, known)
    return parameters


def _multiplies_by_coefficient(clip: Callable[..., None]) -> bool:
    """Whether this version of PyTorch does as ``coefficient_of`` says."""
    for dtype in (torch.float32, torch.bfloat16):
        for norm in (0.3, 1.7, 1e30, float("inf"), float("nan")):
            parameter = torch.nn.Parameter(torch.zeros(8, dtype=dtype, device="cpu"))
            gradient = torch.linspace(-2, 3, 8, device="cpu").to(dtype)
            total = torch.tensor(norm, dtype=dtype, device="cpu")
            parameter.grad = gradient.clone()
            clip([parameter], 1.0, total, None)
            expected = gradient * coefficient_of(1.0, total)
            if not torch.equal(parameter.grad.view(torch.uint8), expected.view(torch.uint8)):
                return False
    return True
