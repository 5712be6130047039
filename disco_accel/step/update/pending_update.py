"""The work of an optimizer's ``step()``, noted so that it can be done later: by hand, or as part of a plan.

Adam and AdamW with ``fused=True`` on the CPU: the same kernel does it in either way, so that bits agree.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
)

from disco_accel.errors import ExecutionError


@dataclass(frozen=True, slots=True)
class AdamSettings:
    """Constants of a kernel of the update. ``decoupled``: AdamW's weight decay, not Adam's."""

    decoupled: bool
    beta1: float
    beta2: float
    weight_decay: float
    eps: float
    maximize: bool

    @property
    def op(self) -> str:
        """The name of the kernel."""
        return "aten::_fused_adamw_" if self.decoupled else "aten::_fused_adam_"


Changed = tuple[torch.Tensor, ...]
"""A parameter, its moments, exp_avg and exp_avg_sq, and its master if it has one: an update writes to them."""

MASTER = "master"
"""The key of a master in an optimizer's state."""

PIECE_BY_HAND = 1 << 20
"""Elements whose gradients are multiplied or cast at once, a multiple of 64: cut there, pieces have the bits of the
whole tensor."""


@dataclass(frozen=True, slots=True)
class ParameterUpdate:
    """One parameter's part: its gradient, moments and count of steps, which has this step already. ``lr``: float64.
    ``master``: float32, as the moments then are; the kernel updates it, and the parameter is it, rounded.
    ``coefficient``: of no dimension; the kernel gets its product with the gradient, which stays as it is."""

    parameter: torch.Tensor
    gradient: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    steps: torch.Tensor
    lr: torch.Tensor
    settings: AdamSettings
    master: torch.Tensor | None = None
    coefficient: torch.Tensor | None = None

    @property
    def changed(self) -> Changed:
        """The tensors that the update writes to."""
        master = () if self.master is None else (self.master,)
        return self.parameter, self.exp_avg, self.exp_avg_sq, *master

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Parameter, gradient, both moments, master: equal layouts; equal dtypes but where there is a master."""
        return self.parameter, self.gradient, *self.changed[1:]

    def run(self, begin: int = 0, end: int | None = None) -> None:
        """Do it now, or the part from element ``begin`` to ``end``: multiples of 64, but for the last."""
        if self.master is None and self.coefficient is None:
            self.update(begin, end)
            return
        last = self.parameter.numel() if end is None else end
        for at in range(begin, last, PIECE_BY_HAND):
            until = min(at + PIECE_BY_HAND, last)
            self.update(at, until)
            if self.master is not None:
                self.round(at, until)

    def update(self, begin: int = 0, end: int | None = None) -> None:
        """As ``run``, of the master alone where there is one."""
        kernel = torch._fused_adamw_ if self.settings.decoupled else torch._fused_adam_
        parameter, gradient, exp_avg, exp_avg_sq, *master = (t.detach().view(-1)[begin:end] for t in self.tensors)
        if self.coefficient is not None:
            gradient = gradient * self.coefficient
        kernel(
            [*master] or [parameter],
            [gradient.float() if master else gradient],
            [exp_avg],
            [exp_avg_sq],
            [],
            [self.steps],
            amsgrad=False,
            lr=float(self.lr),
            beta1=self.settings.beta1,
            beta2=self.settings.beta2,
            weight_decay=self.settings.weight_decay,
            eps=self.settings.eps,
            maximize=self.settings.maximize,
        )

    def round(self, begin: int = 0, end: int | None = None) -> None:
        """Round the master into the parameter."""
        assert self.master is not None
        self.parameter.detach().view(-1)[begin:end].copy_(self.master.view(-1)[begin:end])


class GradientsAway:
    """Gradients that parameters do not have while ``optimizer.step()`` runs, which so has nothing to do with these."""

    def __init__(self) -> None:
        self._gradients: list[tuple[torch.Tensor, torch.Tensor]] = []
        _away.add(self)
        _give_back_after_steps()

    def take(self, parts: Sequence[ParameterUpdate]) -> None:
        """Those of ``parts``. Of a ``step()`` that failed none are given back any more."""
        self._gradients = [(part.parameter, part.gradient) for part in parts]
        for parameter, _ in self._gradients:
            parameter.grad = None

    def give_back(self) -> None:
        """``step()`` has run."""
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        self._gradients.clear()


_away: weakref.WeakSet[GradientsAway] = weakref.WeakSet()


@functools.cache
def _give_back_after_steps() -> None:
    register_optimizer_step_post_hook(_after_step)


def _after_step(*_: Any) -> None:
    for away in list(_away):
        away.give_back()


@dataclass(frozen=True)
class PendingUpdate:
    """The parts of one ``step()``, and autograd's versions of their tensors by then."""

    parts: tuple[ParameterUpdate, ...]
    versions: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, parts: Sequence[ParameterUpdate]) -> PendingUpdate:
        """As of now."""
        return cls(tuple(parts), _versions(parts))

    def check(self) -> None:
        """Raise ExecutionError if a tensor was written to since, so that the update is lost."""
        for part, then, now in zip(self.parts, self.versions, _versions(self.parts), strict=True):
            if then == now:
                continue
            what = next(name for name, a, b in zip(_NAMES, then, now, strict=False) if a != b)
            raise ExecutionError(
                f"update: deferred: the {what} of a parameter of shape {list(part.parameter.shape)} was changed in "
                "place after optimizer.step() and before the next forward, when its update runs: call "
                "disco_accel.settle(model) before, clear gradients by zero_grad(set_to_none=True), or use update: step"
            )

    def run(self) -> None:
        """Do it now. Raises ExecutionError as ``check``."""
        self.check()
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for part in self.parts:
                part.run()

    @property
    def signature(self) -> Hashable:
        """Equal for updates that one plan can do: parameters, constants of kernels, and the ones that share a learning
        rate, a count or a coefficient."""
        kinds = tuple(
            (id(p.parameter), p.settings, p.master is None, None if p.coefficient is None else p.coefficient.dtype)
            for p in self.parts
        )
        return kinds, tuple(_first_of_each([s(p) for p in self.parts]) for s in _SCALARS)


_SCALARS: tuple[Callable[[ParameterUpdate], object], ...] = (
    lambda part: part.lr,
    lambda part: part.steps,
    lambda part: part.coefficient,
)


def _first_of_each(objects: Sequence[object]) -> tuple[int, ...]:
    """Of each object, where it is for the first time."""
    first: dict[int, int] = {}
    return tuple(first.setdefault(id(each), number) for number, each in enumerate(objects))


_PACKAGE = __name__.split(".", 1)[0] + "."

_NAMES = ("value", "gradient", "count of steps", "exp_avg", "exp_avg_sq", "master")


def _versions(parts: Sequence[ParameterUpdate]) -> tuple[tuple[int, ...], ...]:
    with torch._C.DisableTorchFunctionSubclass():
        return tuple(
            tuple(t._version for t in (part.parameter, part.gradient, part.steps, *part.changed[1:])) for part in parts
        )


def parts_of(
    optimizer: torch.optim.Optimizer, on_host: Callable[[torch.Tensor], bool]
) -> tuple[ParameterUpdate, ...] | str:
    """The parts of the update that ``optimizer.step()`` would do now; or why that cannot be deferred.

    Empty where there is nothing to do, or no state yet: the optimizer makes that in its first step. ``on_host``:
    whether a tensor is a trained weight of the model.
    """
    reason = why_not(optimizer)
    if reason is not None:
        return reason
    if not all(map(_is_own, optimizer._optimizer_step_pre_hooks.values())):
        return "the optimizer has a hook that runs before step(), which may change gradients"
    if optimizer._optimizer_step_post_hooks:
        return "the optimizer has a hook that runs after step(), which may look at the weights"
    if not all(map(_is_own, (*_global_optimizer_pre_hooks.values(), *_global_optimizer_post_hooks.values()))):
        return "a hook of all optimizers runs before or after step(), which may look at gradients or weights"
    parts: list[ParameterUpdate] = []
    for group in optimizer.param_groups:
        settings, lr = settings_of(group)
        for parameter in group["params"]:
            if parameter.grad is None or not parameter.numel():
                continue
            if not on_host(parameter):
                return f"it also updates a parameter of shape {list(parameter.shape)}, which the plan does not load"
            state = optimizer.state.get(parameter)
            if not state:
                return ()
            part = part_of(parameter, state, lr, settings)
            if isinstance(part, str):
                return part
            parts.append(part)
    return tuple(parts)


def _is_own(hook: object) -> bool:
    """Whether a hook before or after ``step()`` is one of ours: others may look at gradients, or change them."""
    return str(getattr(hook, "__module__", "")).startswith(_PACKAGE)


def why_not(optimizer: torch.optim.Optimizer) -> str | None:
    """Why only ``optimizer.step()`` itself can do its work, if so."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return f"{type(optimizer).__name__} is not torch.optim.AdamW or Adam"
    if getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None:
        return "a GradScaler decides in step() whether to skip it"
    return next((reason for group in optimizer.param_groups if (reason := _group_reason(group)) is not None), None)


def settings_of(group: dict[str, Any]) -> tuple[AdamSettings, torch.Tensor]:
    """Of one of the optimizer's groups, with the learning rate: float64."""
    settings = AdamSettings(
        bool(group["decoupled_weight_decay"]),
        float(group["betas"][0]),
        float(group["betas"][1]),
        float(group["weight_decay"]),
        float(group["eps"]),
        bool(group["maximize"]),
    )
    return settings, torch.tensor(float(group["lr"]), dtype=torch.float64)


def _group_reason(group: dict[str, Any]) -> str | None:
    if not group["fused"]:
        return "it is not fused (fused=True, or optim=adamw_torch_fused)"
    for name in ("amsgrad", "capturable", "differentiable"):
        if group[name]:
            return f"{name}=True"
    if any(isinstance(beta, torch.Tensor) for beta in group["betas"]):
        return "a beta is a tensor"
    if isinstance(group["lr"], torch.Tensor) and not group["lr"].is_cpu:
        return "its learning rate is on a device"
    return None


def part_of(
    parameter: torch.Tensor, state: dict[str, Any], lr: torch.Tensor, settings: AdamSettings
) -> ParameterUpdate | str:
    """The part of ``parameter``, which has a gradient, with its ``state``; or why it cannot be done by hand."""
    gradient, master = parameter.grad, state.get(MASTER)
    assert gradient is not None
    moments, steps = (state["exp_avg"], state["exp_avg_sq"]), state["step"]
    part = ParameterUpdate(parameter, gradient, *moments, steps, lr, settings, master)
    kept = parameter.dtype if master is None else torch.float32
    expected = (parameter.dtype, parameter.dtype, *(kept for _ in part.changed[1:]))
    for tensor, dtype in zip(part.tensors, expected, strict=True):
        plain = tensor.layout is torch.strided and type(tensor.data) is torch.Tensor
        plain = plain and tensor.is_contiguous() and tensor.is_cpu
        if not plain or tensor.dtype is not dtype or tensor.shape != parameter.shape:
            name = f"a parameter of shape {list(parameter.shape)}"
            return f"{name}, its gradient and moments are not all contiguous CPU tensors of one dtype and shape"
    if part.steps.dtype is not torch.float32 or not part.steps.is_cpu:
        return "a count of steps is no float32 tensor on the CPU"
    return part
