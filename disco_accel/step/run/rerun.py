"""A planned step's forward once more, for outputs that its plan does not have or cannot differentiate."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from disco_accel.capture.attention import cudnn_attention_off
from disco_accel.capture.autocast import AutocastState, another_autocast, autocast_region, outside_autocast
from disco_accel.capture.checkpointing import never_reentrant
from disco_accel.capture.fake_inputs import batch_tensors
from disco_accel.capture.returned_fields import field_at
from disco_accel.capture.step import UNREACHED
from disco_accel.errors import CaptureError, ExecutionError
from disco_accel.step.budget.grant_source import GrantChanged
from disco_accel.step.compile.compiled_step import CompiledStep
from disco_accel.step.compile.fitted_batch import FittedBatch
from disco_accel.step.placement.model_placement import Placement
from disco_accel.step.run.late_gradient import with_gradients
from disco_accel.step.run.model_setup import ModelSetup
from disco_accel.step.run.observer import Fallback
from disco_accel.step.run.one_backward import OneForward
from disco_accel.step.run.output_field import Planning, planned_for
from disco_accel.step.run.output_fields import leaves, with_leaves
from disco_accel.step.run.output_usage import HABIT, OutputUsage
from disco_accel.step.run.pending import PendingStep, Running, externals_of
from disco_accel.step.run.rng_state import generator_from
from disco_accel.step.state.input_snapshot import InputSnapshot, versions_of
from disco_accel.step.state.step_key import StepKey, step_key

logger = logging.getLogger("disco_accel")


class Rerunning(Running, Planning, Protocol):
    """What a forward that runs once more needs of its model's session."""

    @property
    def setup(self) -> ModelSetup: ...

    @property
    def placement(self) -> Placement: ...


@dataclass
class Rerun:
    """What a forward was given, and what came of running it again as the model's own."""

    state: Rerunning
    model: torch.nn.Module
    fitted: FittedBatch
    step: CompiledStep
    usage: OutputUsage
    generator: torch.Tensor | None
    autocast: AutocastState
    key: StepKey
    inputs: InputSnapshot
    together: OneForward
    eager_output: Any = None

    def __post_init__(self) -> None:
        # The step may have had a copy of the batch on its device; a forward of the model's own reads these.
        self._batch_versions = versions_of(batch_tensors(self.batch))

    @property
    def batch(self) -> Mapping[str, Any]:
        """As the step got it."""
        return self.fitted.batch

    def __call__(self, name: str) -> Any:
        """Field ``name`` of the model's own output, without what padding to a bucket added, whatever is set for the
        reading thread: in eager mode too the graph of a value is that of its forward.

        Raises:
            AttributeError: it has none.
            ExecutionError: what the forward read was changed since.
        """
        with torch.inference_mode(False), torch.enable_grad():
            return self.fitted.cut(name, self._read(name))

    def fields(self) -> tuple[str, ...]:
        """Names of the fields that the model's own output has, in their order. Raises as reading one does."""
        if self.usage.fields is None:
            output = self._eager_output("its fields")
            self.usage.fields = tuple(output.keys()) if isinstance(output, Mapping) else ()
        return self.usage.fields

    def returned(self, name: str) -> None:
        """Field ``name``, which the step returned, is read."""
        self.usage.read_in_step.add(name)

    def _eager_output(self, name: str) -> Any:
        if self.eager_output is None:
            self._check_readable(name)
            # The draws are those of the step's own forward, and the user's generator does not notice. Values need no
            # casts that stay.
            draws = generator_from(self.step, self.generator)
            autocast = another_autocast(replace(self.autocast, cache=False))
            calls = self.state.calls
            with calls.gate.eager(), torch.no_grad(), draws, autocast, self._step_kernels(), self._visiting():
                self.eager_output = calls.forward(**self.batch)
        return self.eager_output

    def _read(self, name: str) -> Any:
        if name == "loss" and self.batch.get("labels") is None and self.usage.differentiated is None:
            return None
        value = getattr(self._eager_output(name), name)
        if not isinstance(value, torch.Tensor):
            return self._differentiable_inside(name, value)
        self.usage.was_read(name)
        if self.usage.read[name] == HABIT:
            logger.info("the model's %s are read: steps are planned with them from now on", name)
        return self.differentiable(name, value)

    def differentiable(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """``value`` with the way back that eager's has."""
        parameters = self.step.parameters
        if parameters is None or not value.is_floating_point():
            return value
        ways = functools.partial(self._gradients, name), self._gradients_of
        return with_gradients({name: value}, parameters, self.together, *ways)[name]

    def _differentiable_inside(self, name: str, value: Any) -> Any:
        """``value``, all tensors in which have one way back together."""
        floats = {path: tensor for path, tensor in leaves(value, name) if tensor.is_floating_point()}
        if not floats or self.step.parameters is None:
            return value
        ways = self._gradients_of, self._gradients_of
        connected = with_gradients(floats, self.step.parameters, self.together, *ways)
        return with_leaves(value, name, connected)

    def _gradients(self, name: str, tangents: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Runs the step that differentiates ``name``, from this forward's inputs."""
        if self.usage.differentiated != name:
            logger.info("%s: a gradient is asked for; steps are planned for it from now on", name)
        self.usage.differentiates(name)
        return self._run(tangents, functools.partial(planned_for, self.state, self.model, self.fitted, self.usage))

    def _gradients_of(self, tangents: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Runs the step that differentiates all of ``tangents``, from this forward's inputs."""
        last = self.step.captured.outputs[0].name
        # A loss is alone where it is the first.
        tangents = dict(sorted(tangents.items(), key=lambda item: item[0] == "loss"))
        # Where random numbers are drawn, the step goes on to the end of the forward, to draw all of them.
        outputs = (*tangents, *((last,) if self.step.draws and last not in tangents else ()))
        return self._run(
            tangents,
            lambda: self.state.compiler.compiled(self.model, self.fitted, outputs, differentiated=len(tangents)),
        )

    def _run(
        self, tangents: Mapping[str, torch.Tensor], planned: Callable[[], CompiledStep]
    ) -> dict[str, torch.Tensor]:
        changed = self._changed()
        if changed is not None:
            raise ExecutionError(
                f"{changed} was changed in place between this step's forward and the backward of its "
                f"{next(iter(tangents))}; call backward() before changing it"
            )
        with self.state.memory.lock:
            try:
                with torch.enable_grad(), self._autocast_of_forward():
                    step = self._followed(planned)
            except CaptureError as error:
                if str(error).startswith(UNREACHED):
                    return {}
                return self._eager_gradients(tangents, error)
            externals = externals_of(self.state, self.model, step, self.batch)
            pending = PendingStep(self.state, self.model, step, externals)
            # As if it had been made at the forward: its backward refuses what has changed since.
            pending.generator, pending.inputs = self.generator, self.inputs
            return pending.backward(tangents)

    def _followed(self, planned: Callable[[], CompiledStep]) -> CompiledStep:
        while True:
            try:
                return planned()
            except GrantChanged:
                self.state.budgets.follow()

    def _eager_gradients(self, tangents: Mapping[str, torch.Tensor], error: CaptureError) -> dict[str, torch.Tensor]:
        """From the model's own forward and backward, where no plan can be made and eager mode may stand in."""
        names = ", ".join(tangents)
        if self.state.setup.config.on_unsupported != "eager":
            raise ExecutionError(
                f"{names}: a gradient is asked for, and a step that gives it cannot be planned ({error}); detach() it, "
                "or set on_unsupported: eager"
            ) from error
        self.state.reports.observers.on_fallback(Fallback.GRADIENTS, str(error))
        self.state.reports.say_once(f"{names}: gradients are made in eager mode, outside the memory budget: {error}")
        assert self.step.parameters is not None
        draws, autocast = generator_from(self.step, self.generator), self._autocast_of_forward()
        # The step's kernels in the backward too, which may recompute.
        with torch.enable_grad(), draws, autocast, self._step_kernels(), never_reentrant(), self._visiting():
            output = self.state.calls.forward(**self.batch)
            pairs = [(v, t) for n, t in tangents.items() if (v := field_at(output, n)).requires_grad]
            values, value_tangents = [v for v, _ in pairs], [t for _, t in pairs]
            parameters = list(self.step.parameters.values())
            gradients = torch.autograd.grad(values, parameters, value_tangents, allow_unused=True)
        return {n: g for n, g in zip(self.step.parameters, gradients, strict=True) if g is not None}

    def _visiting(self) -> AbstractContextManager[None]:
        return self.state.placement.visiting()

    def _step_kernels(self) -> AbstractContextManager[None]:
        """Attention by the step's kernel, whose dropout is another than cuDNN's."""
        return cudnn_attention_off(torch.device(self.step.engine.device))

    def _check_readable(self, name: str) -> None:
        changed = self._changed()
        if changed is None:
            return
        planned = ""
        if name == "logits":
            self.usage.read[name] = max(HABIT, self.usage.read[name])
            planned = "; steps are planned with it from now on"
        raise ExecutionError(
            f"{name}: {changed} was changed since this step's forward, which was not planned to return {name}, so that "
            f"another value would come out; read output.{name} before optimizer.step() or any other change{planned}"
        )

    def _changed(self) -> str | None:
        """What keeps a forward made now from being the step's own forward."""
        changed = self.inputs.changed(content=True)
        if changed is not None:
            return changed
        for name, version in versions_of(batch_tensors(self.batch)).items():
            if version != self._batch_versions[name]:
                return name
        with torch.enable_grad(), another_autocast(self.autocast):
            same = step_key(self.model, self.batch) == self.key
        return None if same else "the model's mode, an adapter, or a setting of PyTorch's"

    @contextmanager
    def _autocast_of_forward(self) -> Iterator[None]:
        """Autocast as it was at the forward, whatever it is now."""
        with outside_autocast(), autocast_region(self.autocast):
            yield
