"""A planned step's forward once more, for outputs that its plan does not have or does not differentiate."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from disco_accel.capture.attention import cudnn_attention_off
from disco_accel.capture.autocast import AutocastState, another_autocast, autocast_region, outside_autocast
from disco_accel.capture.checkpointing import never_reentrant
from disco_accel.capture.fake_inputs import batch_tensors
from disco_accel.capture.returned_fields import field_at
from disco_accel.capture.traced_modules import UNREACHED
from disco_accel.errors import CaptureError, ExecutionError
from disco_accel.step.budget.grant_source import GrantChanged
from disco_accel.step.compile.compiled_step import CompiledStep
from disco_accel.step.compile.fitted_batch import FittedBatch
from disco_accel.step.dynamo import not_compiled
from disco_accel.step.run.observer import Fallback
from disco_accel.step.run.one_backward import GradientsOf, OneForward
from disco_accel.step.run.output_usage import HABIT, OutputUsage
from disco_accel.step.run.pending import PendingStep, externals_of
from disco_accel.step.run.session import Session
from disco_accel.step.run.step_inputs import InputSnapshot, generator_from, versions_of
from disco_accel.step.run.step_plans import compiled, planned_for
from disco_accel.step.state.step_key import StepKey, model_state, step_key

logger = logging.getLogger("disco_accel")

_PLAIN = (str, bytes, int, float, complex, bool, type, torch.nn.Module, torch.dtype, torch.device)


@dataclass
class Rerun:
    """The inputs of a forward, and the output of running it again as the model's own."""

    state: Session
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
        self._python = model_state(self.model).last_seen

    @property
    def batch(self) -> Mapping[str, Any]:
        """As the step got it."""
        return self.fitted.batch

    def __call__(self, name: str) -> Any:
        """Field ``name`` of the model's own output, without the padding of a bucket. The settings of the reading
        thread make no difference: in eager mode too the graph of a value is that of its forward.

        Raises:
            AttributeError: it has none.
            ExecutionError: an input of the forward was changed since.
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
            calls, visit = self.state.calls, self.state.placement.visiting()
            with calls.gate.eager(), torch.no_grad(), draws, autocast, self._step_kernels(), visit:
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
        return _with_gradients({name: value}, parameters, self.together, *ways)[name]

    def _differentiable_inside(self, name: str, value: Any) -> Any:
        """``value``, all tensors in which have one way back together."""
        floats = {path: tensor for path, tensor in _leaves(value, name) if tensor.is_floating_point()}
        if not floats or self.step.parameters is None:
            return value
        ways = self._gradients_of, self._gradients_of
        connected = _with_gradients(floats, self.step.parameters, self.together, *ways)
        return _with_leaves(value, name, connected)

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
        make = functools.partial(compiled, self.state, self.model, self.fitted, outputs, differentiated=len(tangents))
        return self._run(tangents, make)

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
        """From the model's own forward and backward, where no plan can be made and eager mode is allowed."""
        names = ", ".join(tangents)
        if self.state.setup.config.on_unsupported != "eager":
            raise ExecutionError(
                f"{names}: a gradient is asked for, and a step that gives it cannot be planned ({error}); detach() it, "
                "or set on_unsupported: eager"
            ) from error
        self.state.reports.on_fallback(Fallback.GRADIENTS, str(error))
        self.state.reports.say_once(f"{names}: gradients are made in eager mode, outside the memory budget: {error}")
        assert self.step.parameters is not None
        draws, autocast = generator_from(self.step, self.generator), self._autocast_of_forward()
        visit = self.state.placement.visiting()
        # The step's kernels in the backward too, which may recompute.
        with torch.enable_grad(), draws, autocast, self._step_kernels(), never_reentrant(), visit:
            output = self.state.calls.forward(**self.batch)
            pairs = [(v, t) for n, t in tangents.items() if (v := field_at(output, n)).requires_grad]
            values, value_tangents = [v for v, _ in pairs], [t for _, t in pairs]
            parameters = list(self.step.parameters.values())
            gradients = torch.autograd.grad(values, parameters, value_tangents, allow_unused=True)
        return {n: g for n, g in zip(self.step.parameters, gradients, strict=True) if g is not None}

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
        """Names a change that makes a forward run now another than the step's own."""
        changed = self.inputs.changed(content=True)
        if changed is not None:
            return changed
        for name, version in versions_of(batch_tensors(self.batch)).items():
            if version != self._batch_versions[name]:
                return name
        with torch.enable_grad(), another_autocast(self.autocast):
            key = step_key(self.model, self.batch)
            # A forward in another state, of a reference say, may have given this one another number.
            returned = self._python is not None and self._python.returned(self.model)
            same = key == self.key or (key.arguments == self.key.arguments and returned)
        return None if same else "the model's mode, an adapter, or a setting of PyTorch's"

    @contextmanager
    def _autocast_of_forward(self) -> Iterator[None]:
        """Autocast as it was at the forward, also inside another one."""
        with outside_autocast(), autocast_region(self.autocast):
            yield


class _Elsewhere(torch.autograd.Function):
    """Values whose gradients other code takes to the parameters, all at once."""

    @staticmethod
    def forward(
        ctx: Any,
        paths: tuple[str, ...],
        together: OneForward,
        gradients: tuple[GradientsOf, GradientsOf],
        names: tuple[str, ...],
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.paths, ctx.together, ctx.gradients, ctx.names = paths, together, gradients, names
        # DDP's node behind a value that no loss depends on passes no gradient on; zeros would cost a step.
        ctx.set_materialize_grads(False)
        together.add(ctx)
        return tuple(tensor.detach() for tensor in tensors[: len(paths)])

    @staticmethod
    @not_compiled
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        arrived = {path: t for path, t in zip(ctx.paths, tangents, strict=True) if t is not None}
        gradients = ctx.together.gradients(ctx, arrived, *ctx.gradients)
        return (None, None, None, None, *(None for _ in ctx.paths), *(gradients.get(name) for name in ctx.names))


def _with_gradients(
    values: Mapping[str, torch.Tensor],
    parameters: Mapping[str, torch.Tensor],
    together: OneForward,
    alone: GradientsOf,
    jointly: GradientsOf,
) -> dict[str, torch.Tensor]:
    """``values``, by path, as functions of ``parameters`` whose backward is ``alone``, or ``jointly`` with that of
    other outputs of the forward ``together``."""
    apply: Callable[..., tuple[torch.Tensor, ...]] = _Elsewhere.apply
    made = apply(tuple(values), together, (alone, jointly), tuple(parameters), *values.values(), *parameters.values())
    return dict(zip(values, made, strict=True))


def _leaves(value: Any, path: str, visited: set[int] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Dotted path → each tensor in ``value``, in the terms of ``field_at``."""
    visited = set() if visited is None else visited
    if isinstance(value, torch.Tensor):
        yield path, value
        return
    if id(value) in visited:
        return
    visited.add(id(value))
    for name, item in _items(value):
        yield from _leaves(item, f"{path}.{name}", visited)


def _items(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [(str(k), v) for k, v in value.items()]
    if isinstance(value, (list, tuple)):
        return [(str(i), v) for i, v in enumerate(value)]
    if value is None or isinstance(value, _PLAIN) or not hasattr(value, "__dict__"):
        return []
    return list(vars(value).items())


def _with_leaves(value: Any, path: str, tensors: Mapping[str, torch.Tensor]) -> Any:
    """``value`` with the tensors under the paths of ``_leaves`` replaced; objects and lists are changed in place."""
    if path in tensors:
        return tensors[path]
    if not any(name.startswith(f"{path}.") for name in tensors):
        return value
    new = {name: _with_leaves(item, f"{path}.{name}", tensors) for name, item in _items(value)}
    if isinstance(value, tuple):
        return type(value)(*new.values()) if hasattr(value, "_fields") else tuple(new.values())
    if isinstance(value, list):
        value[:] = new.values()
    elif isinstance(value, Mapping):
        for key in list(value):
            value[key] = new[str(key)]  # type: ignore[index]
    else:
        vars(value).update(new)
    return value
