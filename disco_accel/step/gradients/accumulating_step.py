"""A step whose plan adds its gradients to those in ``.grad``, and when it can be taken."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from disco_accel.graph.taskgraph import Ref
from disco_accel.step.compile.compiled_step import CompiledStep
from disco_accel.step.compile.pipeline import replan_if_it_fits
from disco_accel.step.gradients.extended_graph import extended, leaving_specs
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
    """By name, the gradients that the parameters of ``step`` have; None if a plan cannot add to all that leave: one is
    missing, lies elsewhere or otherwise than planned, or has a hook that wants the new part, or to hear of the sum."""
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
    plain: CompiledStep, norms: bool, host_memory: int, say: Callable[[str], None]
) -> AccumulatingStep | None:
    """The plan of ``plain`` that adds to gradients; None if the device, or ``host_memory``, has no room for it.
    ``norms``: of the sums, where there is room."""
    began = time.perf_counter()
    say(f"measuring the sums of {len(plain.transfers)} gradients")
    more = extended(plain, accumulate=True, norms=norms)
    recorded = time.perf_counter()
    say(f"planning {len(more.graph.ops)} kernels, {len(more.old)} of them sums of gradients")
    plan = replan_if_it_fits(more.graph, more.graph.devices[0].memory, plain.settings)
    if plan is None or plain.host_bytes(plan) > host_memory:
        # Where norms have no room in the budget, sums may have.
        return accumulating_step(plain, False, host_memory, say) if norms else None
    own: dict[str, Any] = {field.name: getattr(plain, field.name) for field in fields(CompiledStep)}
    own |= {
        "graph": more.graph,
        "plan": plan,
        "records": more.records,
        "norms": more.norms,
        "seconds": {"record": recorded - began, "plan": time.perf_counter() - recorded},
        "loaded": None,
        "groups": (-1, -1),
    }
    return AccumulatingStep(**own, plain=plain, old=more.old)


class AloneInBackward:
    """Whether autograd adds gradients of a step to ``.grad`` as the step makes them, with no others added first.

    Floating-point sums depend on the order: a plan adds to ``.grad`` what it makes, autograd would add the sum of that
    and of what other nodes make for the same weight, a penalty on weights say. Looked at in each backward.
    """

    def __init__(self) -> None:
        self.known = False
        """Whether a backward has shown it."""
        self.shared = self.reordered = False
        """Whether a weight got another gradient beside the step's; when the plan had added that one already."""
        self._backward: tuple[int, bool] = (-1, False)
        """The run of autograd in which gradients were looked at last, and whether the plan had added some."""
        self._handles: dict[int, Any] = {}

    def seen_in_this(self) -> bool:
        """Whether the backward that runs has had gradients of another step."""
        return self._backward[0] == torch._C._current_graph_task_id() != -1

    def look(self, nodes: Sequence[Any], gradients: Sequence[torch.Tensor | None]) -> None:
        """``gradients`` are about to be given to ``nodes``, one for each, that add them to ``.grad``; None where the
        step has done it."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
        self.known = True
        if self.seen_in_this():
            self.shared = True
            self.reordered |= self._backward[1]
        self._backward = torch._C._current_graph_task_id(), any(gradient is None for gradient in gradients)
        for number, (node, gradient) in enumerate(zip(nodes, gradients, strict=True)):
            # No reference to the tensor: autograd takes one that nobody else has, and copies others.
            expected = None if gradient is None else (gradient.data_ptr(), gradient._version)
            if node is not None:
                self._handles[number] = node.register_prehook(functools.partial(self._check, number, expected))

    def _check(self, number: int, expected: tuple[int, int] | None, gradients: tuple[torch.Tensor | None, ...]) -> None:
        handle = self._handles.pop(number, None)
        if handle is not None:
            handle.remove()
        (gradient,) = gradients
        # A sum that autograd has made is another tensor, or a newer version of the first.
        if (None if gradient is None else (gradient.data_ptr(), gradient._version)) != expected:
            self.shared = True
            self.reordered |= expected is None


def adds_to_all(nodes: Sequence[Any]) -> bool:
    """Whether the backward that runs will add to ``.grad`` behind each of ``nodes``: not that of ``autograd.grad``, or
    of ``backward(inputs=...)`` without some of them."""
    try:
        return all(node is not None and torch._C._will_engine_execute_node(node) for node in nodes)
    except RuntimeError:
        return False
