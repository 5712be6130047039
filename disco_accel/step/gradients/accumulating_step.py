"""A step whose plan adds its gradients to those in ``.grad``, and when it can be taken."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from disco_accel.graph.taskgraph import Ref
from disco_accel.step.compile.compiled_step import CompiledStep
from disco_accel.step.compile.pipeline import plan_if_it_fits
from disco_accel.step.gradients.extended_step import extended, leaving_specs
from disco_accel.step.placement.gradient_memory import GradientMemory, GradientPlaces


@dataclass(eq=False, kw_only=True)
class AccumulatingStep(CompiledStep):
    """A compiled step that is given gradients and leaves sums in their memory. ``plain``: the same step without that.
    ``old``: by transfer, the INPUT that the sum so far is given as."""

    plain: CompiledStep
    old: Mapping[int, int]

    @property
    def transfers(self) -> Mapping[Ref, int]:
        """Gradient → the transfer that takes its sum to the user's memory."""
        return self.plain.transfers

    @functools.cached_property
    def summed(self) -> frozenset[str]:
        """Names of the weights whose gradients are added in the plan."""
        return frozenset(name for name, _ in leaving_specs(self).values())

    def gradient_places(self, memory: GradientMemory) -> GradientPlaces:
        """As ``CompiledStep.gradient_places``; for gradients that are added, the memory of those in ``.grad``, which
        ``sums_so_far`` has found."""
        sums = sums_so_far(self, memory)
        assert sums is not None, "looked at before a backward, under the session's lock"
        others = iter(memory.places([g for g in self.leaving if g.name not in sums], self.bytes_beside_gradients))
        return [sums[g.name] if g.name in sums else next(others) for g in self.leaving]

    def transferred(self, places: GradientPlaces) -> dict[int, torch.Tensor]:
        """As ``CompiledStep.transferred``, and the sums so far, by INPUT."""
        written = super().transferred(places)
        return written | {self.old[transfer]: place for transfer, place in written.items()}

    def before_sums(self) -> None:
        """Gradients are about to change without autograd, which counts changes."""
        assert self.parameters is not None
        for name in self.summed:
            gradient = self.parameters[name].grad
            assert gradient is not None
            torch.autograd.graph.increment_version(gradient)


def sums_so_far(step: CompiledStep, memory: GradientMemory) -> dict[str, torch.Tensor] | None:
    """By name, the gradients that the parameters of ``step`` have; None if a plan cannot add to all that leave. One may
    be missing, lie elsewhere or otherwise than planned, or have a hook that wants the new part, or to hear of the sum.
    """
    assert step.parameters is not None
    sums: dict[str, torch.Tensor] = {}
    leaving = {name for name, _ in leaving_specs(step).values()}
    for gradient in step.leaving:
        if gradient.name not in leaving:
            continue
        parameter = step.parameters[gradient.name]
        hooks = parameter._backward_hooks or parameter._post_accumulate_grad_hooks
        if parameter.grad is None or parameter.grad.requires_grad or hooks:
            return None
        if not memory.has(parameter.grad, gradient):
            return None
        sums[gradient.name] = parameter.grad.detach()
    return sums or None


def accumulating_step(
    plain: CompiledStep,
    norms: bool,
    host_memory: int,
    say: Callable[[str], None],
) -> AccumulatingStep | None:
    """The plan of ``plain`` that adds to gradients; None if the device, or ``host_memory``, has no room for it.
    ``norms``: of the sums, where there is room."""
    began = time.perf_counter()
    say(f"measuring the sums of {len(plain.transfers)} gradients")
    more = extended(plain, accumulate=True, norms=norms)
    recorded = time.perf_counter()
    say(f"planning {len(more.captured.graph.ops)} kernels, {len(more.old)} of them sums of gradients")
    planned = plan_if_it_fits(more.captured, plain.budget, plain.settings_beside)
    if planned is None or plain.host_bytes(planned.plan) > host_memory:
        # Where norms have no room in the budget, sums may have.
        return accumulating_step(plain, False, host_memory, say) if norms else None
    return AccumulatingStep(**more.step_fields(plain, planned, began, recorded), plain=plain, old=more.old)
