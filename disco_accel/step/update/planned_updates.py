"""The deferred updates of one prepared model, and the plans that do them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from disco_accel.step.compile.compiled_step import CompiledStep
from disco_accel.step.gradients.accumulation import Making
from disco_accel.step.gradients.extended_step import extended
from disco_accel.step.update.deferral import Deferral
from disco_accel.step.update.updated_step import StepWithUpdate, step_with_update

_KINDS = 8
"""Plans for one step with updates that differ; an optimizer whose settings change all the time gets no more."""


_CLIPPED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of a norm whose clipping an update takes."""


class PlannedUpdates:
    """``deferral``, to whose methods those of the same names lead, is None where ``optimizer.step()`` updates."""

    def __init__(
        self,
        plans: MutableMapping[Any, CompiledStep],
        say_once: Callable[[str], None],
        made: Callable[[CompiledStep], None],
        host_memory: int,
        update_on: str = "host",
    ) -> None:
        """``plans``: the session's table, which holds those with updates too; ``made`` hears of each. ``host_memory``:
        bytes that training may take on the host. ``update_on``: as in the config."""
        self._plans, self._say_once, self._made = plans, say_once, made
        self._host_memory, self._update_on = host_memory, update_on
        self._without: set[Hashable] = set()
        """Steps with updates that have no plan."""
        self.deferral: Deferral | None = None
        self._when_told: Callable[[], Deferral] | None = None

    def defer(self, deferral: Callable[[], Deferral], *, when_told: bool = False) -> None:
        """From now on, or ``when_told`` by ``set_deferring``."""
        if when_told:
            self._when_told = deferral
        else:
            self.deferral = deferral()

    @property
    def told(self) -> bool:
        """Whether ``set_deferring`` decides."""
        return self._when_told is not None

    def set_deferring(self, wanted: bool) -> None:
        """Defer updates from now on, or settle and have ``optimizer.step()`` do them. Where ``told``; raises as
        ``Deferral.settle``."""
        if self._when_told is None or (self.deferral is None and not wanted):
            return
        if self.deferral is None:
            self.deferral = self._when_told()
        self.deferral.paused = not wanted
        if not wanted:
            self.deferral.settle()

    def step_for(
        self,
        model: torch.nn.Module,
        plain: CompiledStep,
        making: Making,
        norms: bool = False,
    ) -> CompiledStep:
        """``plain``, or the step with the pending update at its head; settles where there is no plan of that.
        ``norms``: the plan shall make norms of gradients. Raises as ``Deferral.settle``."""
        pending = None if self.deferral is None else self.deferral.pending
        if pending is None:
            self.settle()
            return plain
        key = ("update", id(plain), pending.signature, norms)
        step = self._plans.get(key)
        if step is None and key not in self._without:
            planned = partial(step_with_update, model, plain, pending, self._host_memory)
            step = self._make(planned, plain, making, norms)
            if step is None:
                self._without.add(key)
            else:
                self._plans[key] = step
                self._made(step)
        if not isinstance(step, StepWithUpdate):
            self.settle()
            return plain
        step.use_memory_of(pending)
        return step

    def _make(
        self, planned: Callable[..., StepWithUpdate | None], plain: CompiledStep, making: Making, norms: bool
    ) -> StepWithUpdate | None:
        kinds = sum(key[:2] == ("update", id(plain)) and key[-1] is norms for key in self._plans)
        if kinds >= _KINDS:
            self._say_once(
                "update: deferred: the optimizer's betas, weight decay, eps or set of parameters change from step to "
                "step, and each plan is made for one of them; updates run before the step from now on"
            )
            return None
        with making() as stage:
            # Where norms have no room in the budget, the update may have.
            for norms_too in (True, False) if norms else (False,):
                made = planned(stage, self._update_on, extended(plain, accumulate=False, norms=norms_too))
                if made is not None:
                    break
        if made is None:
            self._say_once(
                "update: deferred: a step does not use all of the weights that are updated, loads one on several "
                "devices, or has too little memory for it; such an update runs before the step"
            )
        elif self._update_on == "device" and not made.updated.on_device:
            self._say_once(
                "update_on: device: no plan within memory_budget has room for a weight's update on the device; the "
                "processors update all weights, as with update_on: host"
            )
        return made

    def given(self, step: StepWithUpdate) -> dict[int, torch.Tensor]:
        """Tensors of the pending update that ``step`` is given, by INPUT. Raises as ``Deferral.settle``."""
        assert self.deferral is not None
        pending = self.deferral.checked()
        assert pending is not None, "nothing settles between the choice of a step and its start"
        return step.given(pending)

    def taking(self) -> AbstractContextManager[None]:
        return nullcontext() if self.deferral is None else self.deferral.taking()

    @property
    def seen(self) -> bool:
        """Whether an update of the model's weights came before now, or none is deferred."""
        return self.deferral is None or self.deferral.seen

    @property
    def waiting(self) -> bool:
        """Whether an update is deferred to the next step."""
        return self.deferral is not None and self.deferral.pending is not None

    def settle(self) -> None:
        if self.deferral is not None:
            self.deferral.settle()

    def clip(self, parameters: Sequence[torch.Tensor], coefficient: torch.Tensor) -> list[torch.Tensor]:
        return [*parameters] if self.deferral is None else self.deferral.clip(parameters, coefficient)

    def multiply_clipped(self) -> None:
        if self.deferral is not None:
            self.deferral.multiply_clipped()

    def taken(self) -> None:
        assert self.deferral is not None
        self.deferral.taken()

    def abandoned(self, step: StepWithUpdate, *, updating: bool) -> None:
        """``step`` has ended early: ``updating``, or behind its forward, when another update may be pending already."""
        assert self.deferral is not None
        if updating:
            pending = self.deferral.pending
            assert pending is not None, "it is until the forward has ended"
            if not step.executor.counters()["changes"]:
                return
            # Part of a piece may be done; what a device changes it changes in copies.
            if step.executor.failed_vertex() in {kernel.id for kernel in step.updated.kernels if kernel.on_host}:
                self.deferral.torn()
                return
            try:
                step.finish(pending)
            except BaseException:
                self.deferral.torn()
                raise
            self.deferral.taken()
        # All is done, and homes hold what it wrote.
        step.executor.restore_states()

    def remove(self) -> None:
        """Settle, and defer nothing any more."""
        if self.deferral is not None:
            self.deferral.remove()
            self.deferral = None
        self._when_told = None

    def stats(self) -> dict[str, Any]:
        """When weights were updated last, and where updates are deferred the counts of ``Deferral``."""
        if self.deferral is None:
            return {"update": "step"}
        return {"update": "deferred" if self.deferral.deferring else "step", **self.deferral.counts}


def clip_grad_norm(
    parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float, updates: PlannedUpdates
) -> torch.Tensor:
    """As ``torch.nn.utils.clip_grad_norm_``, with the product of gradients left to ``updates`` where these take it.

    Between the clipping and the update the gradients lie unclipped, so that this is for runs in which no other code
    reads them there: ``integrate/accelerate/trainer_runs.py`` knows which these are.
    """
    utils: Any = torch.nn.utils
    updates.multiply_clipped()
    rest = list(parameters)
    total: torch.Tensor = utils.get_total_norm([p.grad for p in rest if p.grad is not None], norm_type)
    if max_norm == float("inf") and bool(total.isfinite()):
        # The coefficient is 1.
        return total
    if type(total) is torch.Tensor and total.is_cpu and not total.dim() and total.dtype in _CLIPPED:
        with torch.no_grad():
            rest = updates.clip(rest, torch.clamp(float(max_norm) / (total + 1e-6), max=1.0))
    if rest:
        utils.clip_grads_with_norm_(rest, max_norm, total)
    return total
