"""A step between its forward and its backward, and the autograd node that ties it to the user's graph.

A step is *pending* from forward until its backward ends or its autograd node is freed. Another run may take the
engine meanwhile: the pending step is then suspended and rerun from its own inputs if its backward comes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from disco_accel.capture.captured_step import InputSource
from disco_accel.capture.fake_inputs import batch_tensors
from disco_accel.errors import ExecutionError, Stalled
from disco_accel.native.device_types import DEVICE_TYPES
from disco_accel.native.host_memory import expect_rewrite
from disco_accel.step.compile.compiled_step import CompiledStep
from disco_accel.step.compile.fitted_batch import part_of
from disco_accel.step.dynamo import not_compiled
from disco_accel.step.gradients.accumulating_step import AccumulatingStep
from disco_accel.step.run.one_backward import OneForward
from disco_accel.step.run.session import Session
from disco_accel.step.run.step_inputs import InputSnapshot, generator_from, generator_state, kept_on_failure
from disco_accel.step.run.verify_steps import Comparison
from disco_accel.step.state.step_key import model_state
from disco_accel.step.update.updated_step import StepWithUpdate

logger = logging.getLogger("disco_accel")


class PendingStep:
    """One step in flight. ``externals`` are the caller's tensors by INPUT vertex id, ``inputs`` notes how they were.

    ``generator``: where the user's random generator stood when the forward began.
    """

    running = False
    """Whether the step has the engine; read by ``__del__``, also of one whose making was interrupted."""

    def __init__(
        self,
        state: Session,
        model: torch.nn.Module,
        step: CompiledStep,
        externals: Mapping[int, torch.Tensor],
    ) -> None:
        self.state = state
        self.model = model
        self.step = step
        self.externals = dict(externals)
        self.inputs = self._snapshot_inputs()
        self.python = model_state(model).for_backward()
        self.generator = generator_state(step)
        self.compare: Comparison | None = None
        """Called in the backward."""
        self.outputs: dict[str, torch.Tensor] = {}
        self.traced = state.reports.trace_wanted()
        state.gradients.accumulation.begun(self)
        self.updating = isinstance(step, StepWithUpdate)
        """Whether the update that the step begins with is not known to be done."""

    def _snapshot_inputs(self) -> InputSnapshot:
        assert self.step.parameters is not None
        trainable = {b.name: self.step.parameters[b.name] for b in self.step.vertices_of(InputSource.TRAINABLE)}
        # Parts of a tensor have its version.
        batch = {b.name: self.externals[b.vertex] for b in self.step.vertices_of(InputSource.BATCH)}
        return InputSnapshot(trainable, batch, self.state.loader.weights_seen)

    def forward(self) -> list[torch.Tensor]:
        """Start the step and return copies of its outputs once they are ready; the rest waits at the gate."""
        if isinstance(self.step, StepWithUpdate):
            # The snapshot of ``__init__`` watches their pages, and is replaced once they are written.
            expect_rewrite([weight for weight, *_ in self.step.homes])
        with kept_on_failure(self.step):
            try:
                self._take_engine()
            finally:
                written = self.state.loader.weights_seen.finish_check()
            if self.updating:
                # All kernels of the update have run, as the outputs wait for them; what it wrote is no change.
                self.updating = False
                self.state.updates.taken()
                self.step.executor.release_inputs(self._forget_update())
                self.inputs = self._snapshot_inputs()
            elif written:
                # Residents are older than a write that came before this forward.
                self.suspend()
                self.state.loader.make_current(self.model, self.step)
                self.inputs = self._snapshot_inputs()
                with generator_from(self.step, self.generator):
                    self._take_engine()
        outputs, _ = self.step.groups
        return self.step.executor.leave(outputs)

    def _take_engine(self) -> None:
        self.state.memory.take_engine(self.suspend)
        self.running = True
        if self.traced:
            self.step.executor.set_tracing(True)
        with kept_on_failure(self.step):
            try:
                self.step.executor.run_out(self.externals)
            except BaseException:
                # A device that does not end its work is what this error tells of already.
                with suppress(Stalled):
                    self.suspend()
                raise

    def backward(self, tangents: Mapping[str, torch.Tensor], nodes: Sequence[Any] = ()) -> dict[str, torch.Tensor]:
        """Deliver the gradients of the differentiated outputs, by name; returns copies of those of the parameters, but
        for those that the plan has added to ``.grad``.

        ``nodes``: those that autograd is about to give them to, which add them to ``.grad``, one for each parameter.
        """
        self.state.memory.require_own_process()
        with self.state.memory.lock:
            # As in eager mode, a backward behind optimizer.step() meets weights that were changed.
            self.state.updates.settle()
            # Autograd adds to gradients as they lie.
            self.state.updates.multiply_clipped()
            # A step that still runs has read what it needs, as eager has; one that is run again reads all of it again.
            # Weights on the host are loaded in the backward too.
            reads_weights = not self.running or self.step.trained_on_host
            self._require(self._python_change() or self.inputs.begin_check(content=reads_weights))
            accumulation = self.state.gradients.accumulation
            accumulation.ended(self)
            if isinstance(self.step, AccumulatingStep) and not accumulation.holds_for(self.step, nodes):
                self.suspend()
                self.step = self.step.plain
            if not self.running:
                self._require(self.inputs.finish_check())
                self._without_update()
                self.step = self.state.loader.make_current_again(self.model, self.step)
                with generator_from(self.step, self.generator):
                    self._take_engine()
            executor = self.step.executor
            late = {b.vertex: tangents[b.name].contiguous() for b in self.step.vertices_of(InputSource.TANGENT)}
            self.state.gradients.norms.forget()
            with kept_on_failure(self.step):
                try:
                    places = self.step.gradient_places(self.state.gradients.memory)
                    if isinstance(self.step, AccumulatingStep):
                        self.step.before_sums()
                    executor.run_end(late | self.step.transferred(places))
                    self._require(self.inputs.finish_check())
                    leaving = self.step.gradients(self.state.gradients.memory, places)
                except BaseException:
                    with suppress(Stalled):
                        self.suspend()
                    # Nothing reads the weights behind the caller's back.
                    self.inputs.finish_check()
                    raise
            self._release()
            if self.traced:
                self.traced = False
                self.state.report(self.step)
                executor.set_tracing(False)
            gradients = {g.name: copy for g, copy in zip(self.step.captured.gradients, leaving, strict=True)}
            self.state.gradients.norms.made(gradients, self.step.gradient_norms())
            self.state.reports.on_backward(self.step)
            left = accumulation.left_to_add(self.step, nodes, gradients)
            self.state.budgets.step_ended()
            return left

    def suspend(self) -> None:
        """Stop the rest of this step; its inputs stay so that it can be rerun."""
        if self.running:
            self._release()
            self.step.executor.abandon()
            if isinstance(self.step, StepWithUpdate):
                self.state.updates.abandoned(self.step, updating=self.updating)
                self.updating = False

    def end(self) -> None:
        """Its backward has run, or another step makes its gradients with those of other outputs."""
        with self.state.memory.lock:
            self.state.gradients.accumulation.ended(self)
            self.suspend()

    def _without_update(self) -> None:
        """From now on this is the step without the update that it has done, for running it again."""
        if isinstance(self.step, StepWithUpdate):
            self.step = self.step.plain
            self._forget_update()

    def _forget_update(self) -> Collection[int]:
        """Release the gradients that the update was made with; returns the inputs that held these."""
        known = {binding.vertex for binding in self.step.externals}
        own = self.externals.keys() - known
        self.externals = {vertex: tensor for vertex, tensor in self.externals.items() if vertex in known}
        return own

    def _release(self) -> None:
        self.running = False
        self.state.memory.release_engine(self.suspend)

    def _python_change(self) -> str | None:
        """Names Python state that a backward's own code would read otherwise than the capture did."""
        if self.python is None or self.python.returned(self.model):
            return None
        changed = self.python.last_difference
        where = changed if "." in changed or " " in changed else f"{changed} of the model"
        return f"{where}, which Python code that runs in the backward may read,"

    def _require(self, changed: str | None) -> None:
        """As eager mode does for saved tensors: the backward must see the values that the forward saw."""
        if changed is not None:
            self.suspend()
            raise ExecutionError(
                f"{changed} was changed in place between this step's forward and its backward; "
                "call backward() before changing it"
            )

    def __del__(self) -> None:
        # Never waits: this may run in any thread at any time. Whoever holds the lock ends what still runs.
        if self.running and self.state.memory.lock.acquire(blocking=False):
            try:
                self.suspend()
            finally:
                self.state.memory.lock.release()


class _PlannedForward(torch.autograd.Function):
    """Forward returns the first output; backward returns the gradient of each trainable parameter, in order."""

    @staticmethod
    def forward(
        ctx: Any,
        pending: PendingStep,
        together: OneForward,
        names: tuple[str, ...],
        others: list[torch.Tensor],
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        ctx.pending, ctx.together, ctx.names = pending, together, names
        together.add(ctx)
        # DDP's node behind a value that no loss depends on passes no gradient on; zeros would cost half a step.
        ctx.set_materialize_grads(False)
        first, *rest = pending.forward()
        if pending.compare is not None:
            named = zip(pending.step.captured.outputs, (first, *rest), strict=True)
            # Copies, because the user may write to what they are given.
            pending.outputs = {output.name: value.detach().clone() for output, value in named}
        others += rest
        return first

    @staticmethod
    @not_compiled
    def backward(ctx: Any, tangent: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        pending: PendingStep = ctx.pending
        if tangent is not None and torch.is_grad_enabled():
            raise ExecutionError(
                "create_graph=True: a planned step has no second derivative; use the unprepared model for it"
            )
        if tangent is not None and any(map(torch.is_autocast_enabled, DEVICE_TYPES)):
            pending.state.reports.say_once(
                "backward() was called inside autocast, against PyTorch's advice: a planned step's runs outside of it, "
                "as if it had been called after the region; eager mode may round differently there"
            )
        nodes = [node for node, _ in ctx.next_functions]

        def alone(tangents: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            gradients: dict[str, torch.Tensor] = pending.backward(tangents, nodes)
            if pending.compare is not None:
                (arrived,) = tangents.values()
                pending.compare(pending.outputs, arrived, gradients)
            return gradients

        tangents = {} if tangent is None else {pending.step.captured.outputs[0].name: tangent}
        gradients = ctx.together.gradients(ctx, tangents, alone)
        if tangents:
            pending.end()
        return (None, None, None, None, *(gradients.get(name) for name in ctx.names))


def externals_of(
    state: Session, model: torch.nn.Module, step: CompiledStep, batch: Mapping[str, Any]
) -> dict[int, torch.Tensor]:
    """The inputs of ``step``, by INPUT vertex: the model's trainable parameters and the tensors of ``batch``.

    Raises:
        ExecutionError: a token id outside the vocabulary; a gradient that has no parameter.
    """
    if step.parameters is None:
        # A parameter that is added, removed or replaced changes the step's key, so these stay the model's own.
        step.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        # Part of a field, a hidden state say, need not be reached by all that the loss is.
        if step.captured.gradients and "." not in step.captured.outputs[0].name:
            _check_gradients(state, step, step.parameters)
    # A plan for the weights as they were may be met again.
    state.placement.take_unfrozen(step.parameters.values())
    on_caller_device = batch_tensors(batch)
    _check_rows(step, on_caller_device)
    at_home = {b.name for b in step.vertices_of(InputSource.BATCH) if b.vertex in step.captured.at_home}
    inputs = {
        name: t if name in at_home else t.to(state.memory.device, non_blocking=True)
        for name, t in on_caller_device.items()
    }
    tensors: dict[InputSource, Mapping[str, torch.Tensor]] = {
        InputSource.TRAINABLE: step.parameters,
        InputSource.BATCH: inputs,
    }
    given = ((b, tensors[b.source][b.name].detach()) for b in step.externals)
    return {b.vertex: part_of(tensor, b.part, b.parts) if b.parts > 1 else tensor for b, tensor in given}


def _check_rows(step: CompiledStep, tensors: Mapping[str, torch.Tensor]) -> None:
    """Token ids outside the vocabulary are named here; the engine knows the op alone, and a GPU not even that."""
    for name, rows in step.row_limits.items():
        tensor = tensors[name]
        # Elsewhere a look would wait for the device.
        if not tensor.is_cpu or not tensor.numel():
            continue
        low, high = (int(value) for value in torch.aminmax(tensor))
        if low < 0 or high >= rows:
            raise ExecutionError(
                f"{name}: holds {low if low < 0 else high}, and the model looks it up in a table of {rows} rows, 0 to "
                f"{rows - 1}; check the tokenizer, or call resize_token_embeddings() before prepare()"
            )


def _check_gradients(state: Session, step: CompiledStep, parameters: Mapping[str, torch.Tensor]) -> None:
    """Nothing trains silently without its gradient: the user is told of those that eager leaves out too, and any other
    is an error."""
    with_gradient = {gradient.name for gradient in step.captured.gradients}
    if not with_gradient <= parameters.keys():
        raise ExecutionError(f"{sorted(with_gradient - parameters.keys())[0]}: its gradient has no parameter to go to")
    without = sorted(parameters.keys() - with_gradient)
    if without and without != state.reports.counts.without_gradient:
        state.reports.counts.without_gradient = without
        logger.warning(
            "%d of %d trainable parameters do not reach the loss and get no gradient, as in eager mode: %s",
            len(without),
            len(parameters),
            ", ".join(without[:3]) + (", ..." if len(without) > 3 else ""),
        )


def run_step(
    state: Session,
    model: torch.nn.Module,
    step: CompiledStep,
    batch: Mapping[str, Any],
    together: OneForward,
    compare: Comparison | None = None,
) -> tuple[list[torch.Tensor], InputSnapshot]:
    """Run the forward part of ``step``, ``together`` for autograd; the first output's backward runs the rest, then
    ``compare`` on its results.

    Returns the outputs, and the inputs as they were then.
    """
    externals = externals_of(state, model, step, batch)
    if isinstance(step, StepWithUpdate):
        externals |= state.updates.given(step)
    assert step.parameters is not None
    pending = PendingStep(state, model, step, externals)
    pending.compare = compare
    others: list[torch.Tensor] = []
    apply: Callable[..., torch.Tensor] = _PlannedForward.apply
    first = apply(pending, together, tuple(step.parameters), others, *step.parameters.values())
    return [first, *others], pending.inputs
