"""Accumulation in ``.grad``: which steps of a prepared model add to it in their plans, which leave it to autograd."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, MutableMapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from disco_accel.step.compile.compiled_step import CompiledStep
from disco_accel.step.gradients.accumulating_step import (
    AccumulatingStep,
    AloneInBackward,
    accumulating_step,
    adds_to_all,
    sums_so_far,
)
from disco_accel.step.placement.gradient_memory import GradientMemory

Making = Callable[[], AbstractContextManager[Callable[[str], None]]]
"""Around the making of a plan: gives whom to tell of its stages."""


class Accumulation:
    """Of one prepared model, used under its session's lock."""

    def __init__(
        self,
        memory: GradientMemory,
        plans: MutableMapping[Any, CompiledStep],
        say_once: Callable[[str], None],
        made: Callable[[CompiledStep], None],
        compared: Callable[[], bool],
        host_memory: int,
    ) -> None:
        """``plans``: the session's table, which holds those that add too; ``made`` hears of each. ``compared``: whether
        gradients of steps are being compared with eager ones, for which each must be alone. ``host_memory``: bytes that
        training may take on the host."""
        self._memory, self._plans, self._compared = memory, plans, compared
        self._host_memory = host_memory
        self._say_once, self._made = say_once, made
        self._alone = AloneInBackward()
        self._without: set[Hashable] = set()
        """Steps that have no plan with sums."""
        self._off = False
        """Whether no step adds in its plan any more."""
        self._waiting: weakref.WeakSet[object] = weakref.WeakSet()
        """Forwards whose backward has not run: one backward may run those of several."""
        self.steps = 0
        """Backwards that have added in their plans."""

    def begun(self, forward: object) -> None:
        """A planned step's ``forward`` has begun, whose backward may come."""
        self._waiting.add(forward)

    def ended(self, forward: object) -> None:
        """The backward of ``forward`` runs."""
        self._waiting.discard(forward)

    def step_for(self, plain: CompiledStep, making: Making, norms: bool) -> CompiledStep:
        """``plain``, or where its gradients have others in ``.grad`` to be added to, the step that does it. ``norms``:
        the plan shall make norms of the sums; one that does serves others too."""
        if not self._may_add(plain):
            return plain
        keys = [("accumulate", id(plain), with_norms) for with_norms in {norms, True}]
        steps = (self._plans[key] for key in keys if key in self._plans)
        step: CompiledStep | None = next(steps, None)
        key = ("accumulate", id(plain), norms)
        if step is None and key not in self._without:
            with making() as stage:
                step = accumulating_step(plain, norms, self._host_memory, stage)
            if step is None:
                self._without.add(key)
                self._say_once(
                    "gradients are added to those in .grad behind each backward: no plan within memory_budget and "
                    "host_memory has room for sums on the device"
                )
            else:
                self._plans[key] = step
                self._made(step)
        if step is None:
            return plain
        step.parameters = plain.parameters
        return step

    def _may_add(self, plain: CompiledStep) -> bool:
        if self._off or self._waiting or not plain.transfers or not self._alone.known:
            return False
        # What other processes have is added to what this one has made, not to sums.
        if plain.parameters is None or self._compared() or _several_processes():
            return False
        if self._alone.shared:
            why = "weights get gradients from elsewhere than the planned step too"
            once = "; the first such backward has added these last, which may round otherwise than eager mode"
            self._stop(why + (once if self._alone.reordered else ""))
            return False
        return sums_so_far(plain, self._memory) is not None

    def holds_for(self, step: CompiledStep, nodes: Sequence[Any]) -> bool:
        """Whether ``step``, which adds in its plan, is right for the backward that runs: ``nodes`` add the gradients of
        the trained parameters, in order, to ``.grad``."""
        if self._alone.shared or self._waiting or self._alone.seen_in_this() or not nodes or not adds_to_all(nodes):
            return False
        if sums_so_far(step, self._memory) is None:
            self._stop(
                "gradients were cleared or replaced between a forward and its backward, which ran twice; clear "
                "them before the forward, as the next step's backward adds to nothing"
            )
            return False
        return True

    def left_to_add(
        self, step: CompiledStep, nodes: Sequence[Any], gradients: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Those of ``gradients``, which ``step`` has just left, by name, that ``nodes`` are to add to ``.grad``."""
        if isinstance(step, AccumulatingStep):
            self.steps += 1
            gradients = {name: gradient for name, gradient in gradients.items() if name not in step.summed}
        if step.trained_on_host and step.parameters is not None and len(nodes) == len(step.parameters):
            self._alone.look(nodes, [gradients.get(name) for name in step.parameters])
        return gradients

    def _stop(self, why: str) -> None:
        self._off = True
        self._say_once(f"gradients are added to those in .grad behind each backward from now on: {why}")

    def stats(self) -> dict[str, int]:
        """How many backwards have added to gradients in their plans."""
        return {"steps_accumulated": self.steps} if self._memory.nbytes else {}


def _several_processes() -> bool:
    return (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and (torch.distributed.get_world_size() > 1)
    )
