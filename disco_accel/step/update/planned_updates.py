"""The updates of one prepared model that are put off, and the plans that do them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from disco_accel.step.compile.compiled_step import CompiledStep
from disco_accel.step.gradients.extended_graph import extended
from disco_accel.step.update.deferral import Deferral
from disco_accel.step.update.pending_update import PendingUpdate
from disco_accel.step.update.updated_step import StepWithUpdate, step_with_update

Making = Callable[[], AbstractContextManager[Callable[[str], None]]]
"""Around the making of a plan: gives whom to tell of its stages."""

_KINDS = 8
"""Plans for one step with updates that differ; an optimizer whose settings change all the time gets no more."""


class PlannedUpdates:
    """``deferral`` is None where updates are done in ``optimizer.step()``."""

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
        """From now on, or ``when_told`` by ``put_off``."""
        if when_told:
            self._when_told = deferral
        else:
            self.deferral = deferral()

    @property
    def told(self) -> bool:
        """Whether ``put_off`` decides."""
        return self._when_told is not None

    def put_off(self, wanted: bool) -> None:
        """Put updates off from now on, or settle and have ``optimizer.step()`` do them. Where ``told``; raises as
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
            step = self._make(model, plain, pending, making, norms)
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
        self,
        model: torch.nn.Module,
        plain: CompiledStep,
        pending: PendingUpdate,
        making: Making,
        norms: bool,
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
                more = extended(plain, accumulate=False, norms=norms_too)
                made = step_with_update(model, plain, pending, self._host_memory, stage, self._update_on, more)
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
        """What ``step`` is given of the pending update, by INPUT. Raises as ``Deferral.settle``."""
        assert self.deferral is not None
        pending = self.deferral.checked()
        assert pending is not None, "nothing settles between the choice of a step and its start"
        return step.given(pending)

    def taking(self) -> AbstractContextManager[None]:
        """See ``Deferral.taking``."""
        return nullcontext() if self.deferral is None else self.deferral.taking()

    @property
    def seen(self) -> bool:
        """Whether updates of the model's weights are not put off, or one was before now."""
        return self.deferral is None or self.deferral.seen

    @property
    def waiting(self) -> bool:
        """Whether an update is put off until the next step."""
        return self.deferral is not None and self.deferral.pending is not None

    def settle(self) -> None:
        """See ``Deferral.settle``."""
        if self.deferral is not None:
            self.deferral.settle()

    def clip(self, parameters: Sequence[torch.Tensor], coefficient: torch.Tensor) -> list[torch.Tensor]:
        """See ``Deferral.clip``."""
        return [*parameters] if self.deferral is None else self.deferral.clip(parameters, coefficient)

    def multiply_clipped(self) -> None:
        """See ``Deferral.multiply_clipped``."""
        if self.deferral is not None:
            self.deferral.multiply_clipped()

    def taken(self) -> None:
        """See ``Deferral.taken``."""
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
            if step.executor.failed_vertex() in step.updated.ids_on_host:
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
        """Settle, and put nothing off any more."""
        if self.deferral is not None:
            self.deferral.remove()
            self.deferral = None
        self._when_told = None

    def stats(self) -> dict[str, Any]:
        """When weights were updated last; where updates were put off, how many plans did, how many were done by hand,
        and how many clippings were left to them."""
        if self.deferral is None:
            return {"update": "step"}
        return {
            "update": "deferred" if self.deferral.deferring else "step",
            "updates_planned": self.deferral.counts.planned,
            "updates_settled": self.deferral.counts.by_hand,
            "clips_deferred": self.deferral.counts.clips,
        }
