"""A step between its forward and its backward, and the autograd node that ties it to the user's graph.

A step is *pending* from forward until its backward ends or its autograd node is freed. Another run may take the
engine meanwhile: the pending step is then suspended and rerun from its own inputs if its backward comes.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from disco_accel.capture.step import ValueBinding
from disco_accel.capture.twins import batch_tensors
from disco_accel.errors import ExecutionError
from disco_accel.execute.hostmem import sample_digest
from disco_accel.integrate.compiled import CompiledStep
from disco_accel.integrate.generator import generator_from, generator_state, kept_on_failure

if TYPE_CHECKING:
    from disco_accel.integrate.plugin import PreparedModel


Seen = tuple[torch.Tensor, int, int]
"""A frozen tensor with the data pointer and the version that it had."""


def weights_changed(seen: Sequence[Seen], digest: int) -> bool:
    """Whether a tensor was written to since ``digest`` was taken over all of ``seen``, or lies somewhere else."""
    if any(t._version != version or t.data_ptr() != pointer for t, pointer, version in seen):
        return True
    return sample_digest([t for t, _, _ in seen]) != digest


class PendingStep:
    """One step in flight. ``externals`` are the caller's tensors by INPUT vertex id, with the versions seen.

    ``generator``: where the user's random generator stood when the forward began.
    """

    def __init__(
        self,
        state: PreparedModel,
        model: torch.nn.Module,
        step: CompiledStep,
        externals: Mapping[int, torch.Tensor],
    ) -> None:
        self.state = state
        self.model = model
        self.step = step
        self.externals = dict(externals)
        self.versions = {v: t._version for v, t in self.externals.items()}
        # Replaced, not changed, when the weights are looked at again: what this forward saw stays here.
        self.frozen, self.digest = state.weights_seen, state.weights_digest
        self.generator = generator_state(step)
        self.running = False
        self.traced = state.trace_wanted()

    def forward(self) -> torch.Tensor:
        """Start the step and return a clone of its loss once that is ready; the rest waits at the gate."""
        self._take_engine()
        output = self.step.captured.outputs[0]
        return self._leave(output)

    def _take_engine(self) -> None:
        self.state.abandon_active()
        # Weak: the autograd graph alone keeps a step alive, so that dropping the loss frees the engine.
        self.state.active = weakref.ref(self)
        self.running = True
        if self.traced:
            self.step.executor.set_tracing(True)
        with kept_on_failure(self.step):
            try:
                self.step.executor.begin(self.externals)
                self.step.executor.wait_out()
            except BaseException:
                self.suspend()
                raise

    def backward(self, tangent: torch.Tensor) -> dict[str, torch.Tensor]:
        """Deliver the gradient of the loss; returns clones of the gradients by parameter name."""
        self.state.require_own_process()
        with self.state.lock:
            self._check_unchanged()
            if not self.running:
                self.state.make_current(self.model, self.step)
                with generator_from(self.step, self.generator):
                    self._take_engine()
            executor = self.step.executor
            late = {b.vertex: tangent.contiguous() for b in self.step.vertices_of("tangent")}
            with kept_on_failure(self.step):
                try:
                    executor.deliver(late)
                    executor.wait_end()
                    gradients = {g.name: self._leave(g) for g in self.step.captured.gradients}
                except BaseException:
                    self.suspend()
                    raise
            self._release()
            if self.traced:
                self.traced = False
                self.state.report(self.model, self.step)
                executor.set_tracing(False)
            return gradients

    def _leave(self, value: ValueBinding) -> torch.Tensor:
        """A copy for the user, on the run's device also where the plan left the value in host memory."""
        return self.step.executor.value(value.ref, value.spec).to(self.state.device, copy=True)

    def suspend(self) -> None:
        """Stop what is left of this step; its inputs stay so that it can be rerun."""
        if self.running:
            self._release()
            self.step.executor.abandon()

    def _release(self) -> None:
        self.running = False
        if self.state.active is not None and self.state.active() is self:
            self.state.active = None

    def _check_unchanged(self) -> None:
        """As eager mode does for what it saved: the backward must see the values that the forward saw."""
        changed = [b.name for b in self.step.externals if self.externals[b.vertex]._version != self.versions[b.vertex]]
        if not changed and weights_changed(self.frozen, self.digest):
            changed = ["a frozen weight"]
        if changed:
            self.suspend()
            raise ExecutionError(
                f"{changed[0]} was changed in place between this step's forward and its backward; "
                "call backward() before changing it"
            )

    def __del__(self) -> None:
        # Never waits: this may run in any thread at any time. Whoever holds the lock ends what still runs.
        if self.state.lock.acquire(blocking=False):
            try:
                self.suspend()
            finally:
                self.state.lock.release()


class _Step(torch.autograd.Function):
    """Forward returns the loss; backward returns the gradient of each trainable parameter, in order."""

    @staticmethod
    def forward(ctx: Any, pending: PendingStep, names: tuple[str, ...], *parameters: torch.Tensor) -> torch.Tensor:
        ctx.pending = pending
        ctx.names = names
        return pending.forward()

    @staticmethod
    def backward(ctx: Any, tangent: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        if torch.is_grad_enabled():
            raise ExecutionError(
                "create_graph=True: a planned step has no second derivative; use the unprepared model for it"
            )
        gradients = ctx.pending.backward(tangent)
        return (None, None, *(gradients.get(name) for name in ctx.names))


def run_step(
    state: PreparedModel, model: torch.nn.Module, step: CompiledStep, batch: Mapping[str, Any]
) -> torch.Tensor:
    """Run the forward part of ``step``; the returned loss's backward runs the rest."""
    if step.parameters is None:
        # A parameter that is added, removed or replaced changes the step's key, so these stay the model's own.
        step.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    inputs = {name: t.to(state.device, non_blocking=True) for name, t in batch_tensors(batch).items()}
    tensors = {"trainable": step.parameters, "batch": inputs}
    externals = {b.vertex: tensors[b.source][b.name].detach() for b in step.externals}
    pending = PendingStep(state, model, step, externals)
    loss: torch.Tensor = _Step.apply(pending, tuple(step.parameters), *step.parameters.values())
    return loss
