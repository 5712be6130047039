"""Norms of gradients that the last planned backward has made: ``torch.nn.utils.clip_grad_norm_`` takes them, and its
callers see no difference."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch.nn.utils import clip_grad

from disco_accel.native.host_memory import WatchedTensors, expect_rewrite, writes_are_watched
from disco_accel.step.gradients.extended_step import NORM_TYPE

_MISSES = 2
"""Gradients that were written to, before somebody asked for their norms, in so many steps: norms are not made then."""


class GradientNorms:
    """Of one prepared model. A norm is known as long as nobody has written to its gradient, in any way."""

    def __init__(self, holds: Callable[[torch.Tensor], bool], lock: Any, *, watched: bool) -> None:
        """``holds``: whether a tensor is a gradient of the model that a plan has left. ``lock``: the session's.
        ``watched``: writes to gradients may be looked for; without that no norm is known."""
        self._holds, self._lock = holds, lock
        self._watchable = watched and writes_are_watched()
        self._asked = False
        self._misses = self.used = 0
        """``used``: how often one was known that was asked for."""
        self._known: dict[int, tuple[int, torch.Tensor]] = {}
        """Address of a gradient → its version, and its norm."""
        self._watch: WatchedTensors | None = None

    @property
    def wanted(self) -> bool:
        """Whether somebody has asked, and gradients do not change before."""
        return self.possible and self._asked

    @property
    def possible(self) -> bool:
        """Whether writes to gradients are seen, and these do not change before somebody asks."""
        return self._watchable and self._misses < _MISSES

    def stats(self) -> dict[str, int]:
        """How many clippings took norms that plans had made."""
        return {"norms_planned": self.used} if self._watchable else {}

    def forget(self) -> None:
        """Gradients are about to change."""
        self._known, self._watch = {}, None

    def made(self, gradients: Mapping[str, torch.Tensor], norms: Mapping[str, torch.Tensor]) -> None:
        """``norms`` of some of the ``gradients`` that a step has just left, by name."""
        if not self.wanted or not norms:
            return
        known = {name: gradients[name] for name in norms}
        self._known = {g.data_ptr(): (g._version, norms[name]) for name, g in known.items()}
        # Of tensors of their own: autograd takes a gradient that nobody else has, and copies others.
        self._watch = WatchedTensors([gradient.detach() for gradient in known.values()])

    def of(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """The norm of each of ``gradients``, None where it is not known. They may be written to from now on."""
        unknown: list[torch.Tensor | None] = [None for _ in gradients]
        if not self._watchable or not any(map(self._holds, gradients)):
            return unknown
        with self._lock:
            self._asked = True
            return self._of(gradients) if self._watch is not None else unknown

    def _of(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        known, watch = self._known, self._watch
        assert watch is not None
        self.forget()
        written = watch.changed()
        del watch
        expect_rewrite(list(gradients))
        found: list[torch.Tensor | None] = []
        for gradient in gradients:
            version, norm = known.get(gradient.data_ptr(), (gradient._version, None))
            written |= gradient._version != version
            found.append(norm)
        if written:
            self._misses += 1
            return [None for _ in gradients]
        self.used += any(norm is not None for norm in found)
        return found


_asked: weakref.WeakSet[GradientNorms] = weakref.WeakSet()


def norms_for_clipping(norms: GradientNorms) -> None:
    """From now on ``norms`` are asked."""
    _asked.add(norms)
    _wrap_clipping()


@functools.cache
def _wrap_clipping() -> None:
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
    for norms in list(_asked):
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


def wrap(
    module: ModuleType,
    name: str,
    parameters: Sequence[str],
    make: Callable[[Callable[..., Any]], Callable[..., Any]],
    *,
    aliases: Sequence[tuple[ModuleType, str]] = (),
) -> bool:
    """Put ``make(function)`` in the place of the ``function`` that ``module`` calls by ``name``, and into ``aliases``
    that are the same function. Changes nothing and returns False where it is missing, takes other ``parameters``, or
    ``make`` returns it as it is."""
    function = getattr(module, name, None)
    if not callable(function) or tuple(inspect.signature(function).parameters) != tuple(parameters):
        return False
    made = make(function)
    if made is function:
        return False
    functools.update_wrapper(made, function)
    setattr(module, name, made)
    for other, alias in aliases:
        if getattr(other, alias, None) is function:
            setattr(other, alias, made)
    return True
