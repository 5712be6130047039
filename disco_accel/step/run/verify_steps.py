"""``verify_steps: N``: the first N planned steps beside the model's own forward and backward.

The comparison is made in the step's backward, from the step's own inputs: the same batch, parameters, random numbers
and autocast. Nothing of the training changes by it: gradients are computed beside ``.grad``, the generators are put
back. The plan's memory is freed meanwhile, and tensors that autograd saves go to the host, so that the budget holds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from disco_accel.capture.attention import cudnn_attention_off
from disco_accel.capture.autocast import AutocastState, autocast_region, autocast_state, outside_autocast
from disco_accel.capture.checkpointing import never_reentrant
from disco_accel.capture.returned_fields import field_at
from disco_accel.errors import StepsDiffer
from disco_accel.graph.taskgraph import tensor_args
from disco_accel.native.backend import backend_of
from disco_accel.selfcheck.agreement import RUNS, Agreement, agreement
from disco_accel.step.budget.engine_memory import EngineMemory
from disco_accel.step.capture_lock import Gate
from disco_accel.step.compile.compiled_step import CompiledStep, shared_weights
from disco_accel.step.compile.fitted_batch import FittedBatch
from disco_accel.step.placement.model_placement import Placement
from disco_accel.step.placement.streamed_eager import saved_on_host
from disco_accel.step.run.inner_forwards import own_forward_runs
from disco_accel.step.run.step_inputs import generator_from

logger = logging.getLogger("disco_accel")

_FINE, _COARSE = 1e-4, 2e-2
"""Tolerated distance as a part of the norm of a plan that rounds otherwise by design, in fp32 and in 16 bits."""
_COARSE_SUMS = 0.1
"""In 16 bits, where devices round their parts of each sum: as far as one device's gradients are from exact ones."""

Comparison = Callable[[Mapping[str, torch.Tensor], torch.Tensor, Mapping[str, torch.Tensor]], None]
"""Takes a step's outputs by name, the gradient of the first of them, and those of the parameters by name. Raises
StepsDiffer."""


class StepVerifier:
    """Compares the first ``wanted`` planned steps of one prepared model, and says once that they agree."""

    def __init__(
        self,
        wanted: int,
        forward: Callable[..., Any],
        gate: Gate,
        memory: EngineMemory,
        placement: Placement,
        name: str,
    ) -> None:
        """``forward``: the model's own, which runs inside ``gate``. ``name``: of the model, for messages."""
        self.forward, self.gate, self.memory, self.placement = forward, gate, memory, placement
        self._wanted, self._name = wanted, name
        self._done = 0
        self._seconds = 0.0
        self._farthest: Agreement | None = None

    @property
    def active(self) -> bool:
        """Whether the next step is compared."""
        return self._done < self._wanted

    @property
    def number(self) -> int:
        """Of the step that is compared, from 1."""
        return self._done + 1

    def comparison(
        self, model: torch.nn.Module, fitted: FittedBatch, step: CompiledStep, generator: torch.Tensor | None
    ) -> Comparison | None:
        """Of the step that begins now, from ``generator``'s state on; None where enough have been compared."""
        return _Compared(self, model, fitted, step, generator, autocast_state()) if self.active else None

    def agreed(self, seconds: float, found: Agreement, gradients: int) -> None:
        """One step more was compared, and ``found`` to agree with unplanned ones."""
        self._done += 1
        self._seconds += seconds
        if self._farthest is None or found.farthest > self._farthest.farthest:
            self._farthest = found
        if self.active:
            return
        widest = self._farthest
        how = "bit for bit" if widest.bits else f"to {widest.farthest:.2g} of the norm"
        if widest.spread:
            how += f" (eager runs to {widest.spread:.2g} with each other)"
        steps = "step" if self._done == 1 else f"{self._done} steps"
        logger.info(
            "%s: verify_steps: the first planned %s and the same without a plan agree %s, loss and %d gradients; "
            "comparing took %.1f s",
            self._name,
            steps,
            how,
            gradients,
            self._seconds,
        )


@dataclass
class _Compared:
    """One planned step to be compared, as its forward was given it."""

    verifier: StepVerifier
    model: torch.nn.Module
    fitted: FittedBatch
    step: CompiledStep
    generator: torch.Tensor | None
    autocast: AutocastState

    def __call__(
        self, values: Mapping[str, torch.Tensor], tangent: torch.Tensor, gradients: Mapping[str, torch.Tensor]
    ) -> None:
        verifier = self.verifier
        with verifier.memory.lock:
            if not verifier.active:
                return
            began = time.perf_counter()
            # Both at once might not fit the budget.
            verifier.memory.unload()
            planned = {**values, **{f"gradient of {name}": g for name, g in gradients.items()}}
            eager = (self._unplanned(tuple(values), tangent) for _ in range(RUNS))
            found = agreement(planned, eager, outputs=values, allowance=self._allowance())
            if found.wrong:
                raise StepsDiffer(self._message(found))
            spent = time.perf_counter() - began
            verifier.agreed(spent, found, len(gradients))

    @property
    def _device(self) -> torch.device:
        return self.verifier.memory.device

    def _allowance(self) -> float:
        """How far the plan is from eager by design; 0: not at all."""
        # Libraries leave out the mask of a part that has no padding; the plan has one for all parts or for none.
        masked = self.step.parts > 1 and self.fitted.batch.get("attention_mask") is not None
        # Devices that share weights add up in an order of their own, and so do chunks; products of one row are other
        # routines than those of many.
        in_parts = shared_weights(self.step.captured) or self.step.chunked_kernels
        if not masked and not in_parts:
            return 0.0
        dtypes = {argument.spec.dtype for call in self.step.graph.ops.values() for argument in tensor_args(call.args)}
        if not dtypes & {"bfloat16", "float16"}:
            return _FINE
        return _COARSE_SUMS if shared_weights(self.step.captured) else _COARSE

    def _unplanned(self, outputs: tuple[str, ...], tangent: torch.Tensor) -> dict[str, torch.Tensor]:
        """Outputs and gradients of the model's own forward and backward."""
        parameters = self.step.parameters
        assert parameters is not None
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(_host_generator_kept())
            stack.enter_context(generator_from(self.step, self.generator))
            stack.enter_context(_buffers_kept(self.model))
            stack.enter_context(_without_hooks(parameters))
            stack.enter_context(self.verifier.gate.eager())
            stack.enter_context(self.verifier.placement.visiting())
            stack.enter_context(own_forward_runs())
            stack.enter_context(cudnn_attention_off(self._device))
            stack.enter_context(never_reentrant())
            if backend_of(self._device).separate_memory:
                visitors = self.verifier.placement.visitors
                stack.enter_context(saved_on_host(self._device, visitors, parameters.values()))
            total: dict[str, torch.Tensor] = {}
            for number in range(self.step.parts):
                # Losses and gradients of parts of a batch add up in the order of the parts.
                batch = self.fitted.part(number) if self.step.parts > 1 else self.fitted.batch
                for name, value in self._once(batch, outputs, tangent, parameters).items():
                    total[name] = total[name] + value if name in total else value
        return total

    def _once(
        self,
        batch: Mapping[str, Any],
        outputs: tuple[str, ...],
        tangent: torch.Tensor,
        parameters: Mapping[str, torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        with outside_autocast(), autocast_region(self.autocast):
            output = self.verifier.forward(**batch)
        bare = isinstance(output, torch.Tensor)
        values = {name: output if bare else field_at(output, name) for name in outputs}
        by_parameter = torch.autograd.grad(values[outputs[0]], list(parameters.values()), tangent, allow_unused=True)
        gradients = {f"gradient of {n}": g for n, g in zip(parameters, by_parameter, strict=True) if g is not None}
        return {name: value.detach() for name, value in values.items()} | gradients

    def _message(self, found: Agreement) -> str:
        wrong, compared = found.wrong, len(found.distances)
        first = max(wrong, key=lambda name: wrong[name])
        limit = found.limits[first]
        asked = f"at most {limit:.3g}" if limit else "the same bits"
        if wrong[first] <= limit:
            asked = "that of eager runs from each other"
            if found.middle is not None:
                asked += f" (it is {found.middle:.3g} times as large in the middle one)"
        if found.spread:
            asked += f", {found.runs} eager runs being up to {found.spread:.3g} from each other,"
        more = (
            f" (and {len(wrong) - 1} more of {compared} compared)" if len(wrong) > 1 else f" (of {compared} compared)"
        )
        return (
            f"verify_steps: planned step {self.verifier.number} is not the unplanned one: {first} is "
            f"{wrong[first]:.3g} of its norm apart{more}, where {asked} was asked for. No parameter has been updated "
            "from it. This is a fault of the plan, the engine or the device (disco-accel doctor --selftest looks at "
            "the last two); please report it with this message. enabled: false trains without plans"
        )


@contextmanager
def _host_generator_kept() -> Iterator[None]:
    """The CPU's generator is where it was, also where the step runs and draws elsewhere."""
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)


@contextmanager
def _buffers_kept(model: torch.nn.Module) -> Iterator[None]:
    """A forward inside changes no buffer, as a planned step does not."""
    before = [(buffer, buffer._version, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, version, value in before:
                if buffer._version != version:
                    buffer.copy_(value)


@contextmanager
def _without_hooks(parameters: Mapping[str, torch.nn.Parameter]) -> Iterator[None]:
    """Hooks on the gradients of ``parameters`` are not called inside: they belong to the planned step's."""
    hooks: dict[torch.nn.Parameter, Any] = {p: p._backward_hooks for p in parameters.values() if p._backward_hooks}
    try:
        for parameter in hooks:
            parameter._backward_hooks = None
        yield
    finally:
        for parameter, before in hooks.items():
            parameter._backward_hooks = before
