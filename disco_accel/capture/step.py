"""Trace a training step, or a forward alone, into a TaskGraph: nothing is allocated, nothing runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from disco_accel.capture.attention import refuse_cudnn_attention, without_cudnn_attention
from disco_accel.capture.autocast import autocast_state, outside_autocast
from disco_accel.capture.captured_step import (
    CapturedStep,
    InputBinding,
    InputSource,
    Rewrite,
    TracedStep,
    ValueBinding,
)
from disco_accel.capture.constants import (
    bind_constants,
    copies_without_addresses,
    no_data_assigned,
    no_values_read,
    tracing_mode,
)
from disco_accel.capture.copies_outside import copy_early, refuse_constants
from disco_accel.capture.fake_inputs import batch_tensors, model_twins, replace_tensors, twin
from disco_accel.capture.fake_kernels import fake_kernels, libraries_patched, quiet
from disco_accel.capture.leaving_gradients import with_leaving_gradients
from disco_accel.capture.lower import OpLowering, hold_back, lower_ops, mark, remove_unread, used_inputs
from disco_accel.capture.op_recorder import record_ops
from disco_accel.capture.parts import named_parts, rebuilt, states_replaced
from disco_accel.capture.returned_fields import REAL_DTYPES
from disco_accel.capture.rng import chain_draws, random_sites, user_generator
from disco_accel.capture.storages import storage_key, tensor_spec
from disco_accel.capture.thread_tables import own_tables
from disco_accel.capture.trace_log import TraceLog, code_line, logging_trace
from disco_accel.capture.traced_modules import Forward, ForwardModule, StepModule
from disco_accel.capture.waiting_modules import modules_wait
from disco_accel.errors import CaptureError
from disco_accel.graph.op_traits import op_traits
from disco_accel.graph.spaces import Space
from disco_accel.graph.taskgraph import TaskGraph, VertexKind
from disco_accel.graph.traits import FOREIGN, FROZEN, LATE_FOREIGN, Traits
from disco_accel.native.host_memory import place
from disco_accel.shortage import met_shortage

Contexts = Sequence[Callable[[], AbstractContextManager[Any]]]
_CPU = torch.device("cpu")
_TRAITS = {
    InputSource.FROZEN: FROZEN,
    InputSource.BUFFER: FROZEN,
    InputSource.CONSTANT: FROZEN,
    InputSource.BATCH: FOREIGN,
    InputSource.TANGENT: LATE_FOREIGN,
    InputSource.OUTSIDE: FOREIGN,
}


def capture_step(
    model: torch.nn.Module,
    kwargs: Mapping[str, Any],
    *,
    forward: Callable[..., Any] | None = None,
    contexts: Contexts = (),
    name: str = "step",
    device: torch.device = _CPU,
    outputs: Sequence[str] = ("loss",),
    differentiated: int = 1,
    trained: Traits = FOREIGN,
    rewrite: Rewrite = lambda traced: traced,
) -> CapturedStep:
    """Capture outputs and gradients of one training step of ``model`` on a batch shaped as ``kwargs``.

    ``outputs``: fields of the model's output, or dotted paths into them such as ``hidden_states.2``. The first
    ``differentiated`` are those that the user differentiates: ``loss``, which is alone then, or tensors such as
    ``logits``; the others can be read alone. A tensor that a model returns alone stands for the first. ``trained``: the
    traits of trained weights, HOST_UPDATED where an optimizer changes them in host memory. ``rewrite``: after tracing.

    Works on fake twins on ``device``, where the step will run, because PyTorch chooses kernels by device; neither
    weights nor batch are read, and a model built on ``meta`` will do. ``forward`` is traced in place of
    ``model.forward``; ``contexts`` are entered around the trace. Autocast that is active at
    the call becomes part of the step.

    Raises:
        CaptureError: names the op and module that cannot be captured, or the argument to change.
    """
    _check_batch(kwargs)
    mode = tracing_mode()
    twins = _Twins.of(mode, model, kwargs, device)
    step = StepModule(
        model, forward if forward is not None else model.forward, autocast_state(), outputs, differentiated
    )
    call = twins.caller(step, model, kwargs)
    if outputs[0] == "loss":
        with mode:
            tangents = _tangents_of_loss(device)
    else:
        with _tracing(model, mode, contexts, device) as log:
            tangents = _tangents(lambda: call(*twins.arguments, []), device, log)
    with _tracing(model, mode, contexts, device) as log:
        traced = _trace(call, (*twins.arguments, tangents), log)
    names = [outputs[0]] * len(tangents) if outputs[0] == "loss" else outputs[:differentiated]
    sources = twins.sources(model) + [(InputSource.TANGENT, name) for name in names]
    constants = functools.partial(bind_constants, log.graph, traced, mode, model)
    captured = _lower(sources, constants, log, name, device, outputs, trained=trained, rewrite=rewrite)
    captured = replace(captured, bare=step.bare, differentiated=differentiated, kept_casts=step.kept_casts)
    return with_leaving_gradients(captured) if trained.host_has_it else captured


def _check_batch(kwargs: Mapping[str, Any]) -> None:
    for name, tensor in batch_tensors(kwargs).items():
        if tensor.requires_grad:
            raise CaptureError(
                f"{name}: requires a gradient, and a planned step has none for its inputs; detach() it, or make "
                "part of the model what is trained before it"
            )


def capture_forward(
    model: torch.nn.Module,
    kwargs: Mapping[str, Any],
    *,
    forward: Forward,
    contexts: Contexts = (),
    name: str = "forward",
    device: torch.device = _CPU,
    outside: Callable[[str], bool] = lambda _: False,
    changed: Callable[[str], bool] = lambda _: False,
    trained: Traits = FOREIGN,
    rewrite: Rewrite = lambda traced: traced,
) -> CapturedStep:
    """Capture the results of ``forward`` for a batch shaped as ``kwargs``, without gradients: nothing arrives late.

    ``forward`` calls ``model``; the rest is as in ``capture_step``. Outputs whose names are ``outside`` take no room
    in the arena once they are made: they are clones that ``forward`` makes, each written to an external INPUT for
    whose memory the caller cares. They are none of ``CapturedStep.outputs``. Tensors of the batch whose names are
    ``changed`` may be written to in place, where they lie.

    Raises:
        CaptureError: as ``capture_step``; also where ``forward`` returns one of its inputs as it is.
    """
    mode = tracing_mode()
    twins = _Twins.of(mode, model, kwargs, device)
    step = ForwardModule(model, forward, autocast_state())
    with _tracing(model, mode, contexts, device, gradients=False) as log:
        traced = _trace(twins.caller(step, model, kwargs), (*twins.arguments, []), log)
    constants = functools.partial(bind_constants, log.graph, traced, mode, model)
    return _lower(twins.sources(model), constants, log, name, device, step.outputs, outside, changed, trained, rewrite)


@dataclass(frozen=True)
class _Twins:
    """The tensors that replace a model's and a batch's while a step is traced."""

    parameters: dict[str, torch.Tensor]
    """The twins of parameters and buffers, of quantised ones by part."""
    batch: dict[str, torch.Tensor]

    @classmethod
    def of(
        cls, mode: FakeTensorMode, model: torch.nn.Module, kwargs: Mapping[str, Any], device: torch.device
    ) -> _Twins:
        parameters, real = model_twins(mode, model, device), batch_tensors(kwargs)
        with mode:
            return cls(parameters, {key: twin(tensor, device) for key, tensor in real.items()})

    @property
    def arguments(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        return list(self.parameters.values()), list(self.batch.values())

    def caller(self, step: torch.nn.Module, model: torch.nn.Module, kwargs: Mapping[str, Any]) -> Callable[..., Any]:
        """``step``, whose ``model`` is the one that the twins are of, as a function of lists of tensors."""
        names = {id(part.tensor): part.name for part in named_parts(model)}
        by_place = {place(part.tensor): part.name for part in named_parts(model)}

        def call(parameters: list[torch.Tensor], tensors: list[torch.Tensor], tangents: list[torch.Tensor]) -> Any:
            arguments = replace_tensors(dict(kwargs), dict(zip(self.batch, tensors, strict=True)))
            twins = dict(zip(self.parameters, parameters, strict=True))

            def twin_of(leaf: torch.Tensor) -> torch.Tensor:
                # What lies beside a weight may be another view of the weight's own bytes. It is a tensor of its own,
                # because a forward may put other bytes under one of the two.
                name = names.get(id(leaf))
                if name is not None:
                    return twins[name]
                if place(leaf) not in by_place:
                    raise CaptureError(
                        f"a tensor of shape {tuple(leaf.shape)} was put into the model while its step was captured; "
                        "other threads may do so between steps"
                    )
                return twins[by_place[place(leaf)]].detach()

            named = [*model.named_parameters(), *model.named_buffers()]
            swapped = {f"model.{name}": rebuilt(tensor, twin_of) for name, tensor in named}
            buffers = {name: swapped[f"model.{name}"] for name, _ in model.named_buffers()}
            with states_replaced(model, twin_of):
                result = torch.func.functional_call(step, swapped, (arguments, tangents), tie_weights=True)
            for name, buffer in buffers.items():
                # What a forward leaves in a table stands in ``swapped`` afterwards.
                if swapped[f"model.{name}"] is not buffer:
                    raise CaptureError(
                        f"{name}: the forward puts another tensor in the place of this buffer, which a plan would not "
                        "do at each step; rotary embeddings with rope_type: dynamic or longrope do so, others do not"
                    )
            return result

        return call

    def sources(self, model: torch.nn.Module) -> list[tuple[InputSource, str]]:
        """Source and name, as in ``InputBinding``, of each of ``arguments``."""
        buffers = {part.name for part in named_parts(model) if part.is_buffer}
        sources = [_source(name, tensor, buffers) for name, tensor in self.parameters.items()]
        return sources + [(InputSource.BATCH, key) for key in self.batch]


@contextmanager
def _tracing(
    model: torch.nn.Module,
    mode: FakeTensorMode,
    contexts: Contexts,
    device: torch.device,
    *,
    gradients: bool = True,
) -> Iterator[TraceLog]:
    """All settings and patches of a trace."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context())
        stack.enter_context(quiet())
        stack.enter_context(own_tables(model))
        stack.enter_context(user_generator())
        stack.enter_context(no_values_read(model))
        stack.enter_context(copies_without_addresses())
        stack.enter_context(fake_kernels())
        stack.enter_context(libraries_patched())
        stack.enter_context(no_data_assigned())
        stack.enter_context(without_cudnn_attention(device))
        stack.enter_context(outside_autocast())
        stack.enter_context(torch.set_grad_enabled(gradients))
        # On CUDA autograd would run the backward in a thread of its own, out of sight of the contexts here.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(modules_wait(model, mode))
        log = stack.enter_context(logging_trace(model))
        stack.enter_context(mode)
        yield log


def _tangents_of_loss(device: torch.device) -> list[torch.Tensor]:
    """Gradients of a loss in each possible dtype: it has no dimensions, and its dtype is known once the forward is
    traced."""
    return [torch.empty((), dtype=dtype, device=device) for dtype in REAL_DTYPES]


def _tangents(
    forward: Callable[[], list[torch.Tensor | None]], device: torch.device, log: TraceLog
) -> list[torch.Tensor]:
    """The gradients of the results of ``forward``: their shapes take a forward more to find out."""
    with torch.no_grad(), _errors_named(log):
        values = [value for value in forward() if value is not None]
    return [torch.empty(value.shape, dtype=value.dtype, device=device) for value in values]


def _source(name: str, tensor: torch.Tensor, buffers: set[str]) -> tuple[InputSource, str]:
    if tensor.requires_grad:
        return InputSource.TRAINABLE, name
    return (InputSource.BUFFER if name in buffers else InputSource.FROZEN), name


def _trace(call: Callable[..., Any], arguments: tuple[Any, ...], log: TraceLog) -> dict[str, torch.Tensor]:
    with _errors_named(log):
        constants = record_ops(call, arguments, log)
    for formula, module in log.formulas.items():
        raise CaptureError(
            f"{formula} in module {module or '?'}: autograd rounds the gradient of prod and cumprod otherwise while a "
            "step is captured; write products of trainable values as multiplications"
        )
    return constants


@contextmanager
def _errors_named(log: TraceLog) -> Iterator[None]:
    """Any error inside becomes a CaptureError that names the module."""
    try:
        yield
    except CaptureError:
        raise
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise CaptureError(
            f"{error.func} in module {log.module or '?'}{code_line(error)} depends on the data, not only on shapes; "
            f"{op_traits(error.func._schema.name).data_hint}"
        ) from error
    except Exception as error:
        summary = str(error).strip().split("\n")[0] or type(error).__name__
        if met_shortage(error):
            summary += "; free some memory, and the next step tries again"
        if "torch._C.Generator" in summary:
            # Before PyTorch 2.13 tracing itself stops at one.
            summary = "an op draws from a generator of its own, not the default one: leave out generator="
        raise CaptureError(f"capturing module {log.module or '?'} failed: {summary}") from error


def _lower(
    sources: Sequence[tuple[InputSource, str]],
    bind: Callable[[], Mapping[str, torch.Tensor]],
    log: TraceLog,
    name: str,
    where: torch.device,
    wanted: Sequence[str],
    outside: Callable[[str], bool] = lambda _: False,
    changed: Callable[[str], bool] = lambda _: False,
    trained: Traits = FOREIGN,
    rewrite: Rewrite = lambda traced: traced,
) -> CapturedStep:
    refuse_cudnn_attention(log.graph)
    drawing = random_sites(log.graph, log)
    remove_unread(log.graph)
    constants = bind()
    traced = rewrite(TracedStep(log.graph, sources, drawing, log.output_grads))
    graph, sites = traced.graph, traced.sites
    if graph is not log.graph:
        remove_unread(graph)
    source_of = dict(zip(graph.find_nodes(op="placeholder"), sources, strict=True))
    low = OpLowering(device=str(where))
    bindings: list[InputBinding] = []
    traits = {**_TRAITS, InputSource.TRAINABLE: trained}
    for node in used_inputs(graph):
        source, key = source_of.get(node, (InputSource.CONSTANT, str(node.target)))
        tensor = node.meta["val"]
        if storage_key(tensor) in low.owner:
            continue  # A constant that is read in several places.
        vertex = low.add_input(tensor, source.value, traits[source])
        bindings.append(InputBinding(vertex, source, key, tensor_spec(tensor)))
        if source is InputSource.BATCH and changed(key):
            low.change(vertex)
    returned: Any = graph.output_node().args[0]
    grads = returned[len(wanted) :]
    named = list(zip(wanted, returned, strict=False))
    copies = {key: node for key, node in named if outside(key)}
    refuse_constants(graph, copies)
    copy_early(graph, copies.values())
    for key, node in named:
        if outside(key):
            source, tensor = InputSource.OUTSIDE, node.meta["val"]
            low.outside[node] = vertex = low.add_input(tensor, source.value, traits[source])
            bindings.append(InputBinding(vertex, source, key, tensor_spec(tensor)))
    lower_ops(graph, low, sites)
    outputs = tuple(_value(low, key, node) for key, node in named if not outside(key))
    for output in outputs:
        if low.vertices[output.ref[0]].kind is VertexKind.INPUT:
            raise CaptureError(f"{output.name}: is an input of the step, returned as it is; return a copy")
    for output in outputs:
        mark(low, output.ref, out=True, keep=True)
    gradients = _gradients(low, [key for source, key in sources if source is InputSource.TRAINABLE], grads)
    # The arena's size is the planner's business; a device's memory only bounds it.
    device = Space(0, sum(sum(v.sizes) for v in low.vertices))
    # By the last output the forward has run, which is what the user's generator has to show.
    last = max([*(output.ref for output in outputs), *low.copied_outside])
    passes = hold_back(low, traced.output_grads), chain_draws(last)
    task = TaskGraph(name, (device,), tuple(low.vertices), low.ops)
    return CapturedStep(task, tuple(bindings), outputs, gradients, constants).through(passes)


def _gradients(low: OpLowering, trainable: Sequence[str], grads: Sequence[fx.Node | None]) -> tuple[ValueBinding, ...]:
    """The gradients ``grads`` of the parameters ``trainable``, kept until the step ends; parameters without one are
    left out. Raises CaptureError for a gradient that no op makes, and where there are more or fewer parameters."""
    if grads and len(grads) != len(trainable):
        raise CaptureError("the model's forward adds or removes trainable parameters, or freezes some, while it runs")
    pairs = zip(trainable, grads, strict=True) if grads else ()
    gradients = tuple(_value(low, key, grad) for key, grad in pairs if grad is not None)
    for gradient in gradients:
        if low.vertices[gradient.ref[0]].kind is VertexKind.INPUT:
            raise CaptureError(
                f"{gradient.name}: its gradient is that of the output itself, which no op makes; multiply what the "
                "parameter adds to the output by 1.0"
            )
        mark(low, gradient.ref, keep=True)
    return gradients


def _value(low: OpLowering, name: str, node: fx.Node) -> ValueBinding:
    tensor = node.meta["val"]
    return ValueBinding(name, low.ref(tensor), tensor_spec(tensor))
