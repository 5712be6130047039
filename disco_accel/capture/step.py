"""Trace one training step, forward and backward, into a TaskGraph: nothing is allocated, nothing runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.experimental.proxy_tensor import make_fx

from disco_accel.capture.alias import tensor_spec
from disco_accel.capture.autocast import AutocastState, autocast_region, autocast_state, outside_autocast
from disco_accel.capture.fakes import fake_kernels
from disco_accel.capture.lower import (
    InputFlags,
    Lowering,
    constant_value,
    hold_back,
    lower_ops,
    mark,
    used_inputs,
)
from disco_accel.capture.rng import chain_draws, draws, random_sites, user_generator
from disco_accel.capture.tags import TraceLog, logging_trace
from disco_accel.capture.twins import batch_tensors, model_twins, replace_tensors, twin
from disco_accel.errors import CaptureError
from disco_accel.taskgraph import Device, Ref, TaskGraph, TensorSpec

Contexts = Sequence[Callable[[], AbstractContextManager[Any]]]

_CPU = torch.device("cpu")
_LOSS_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_FLAGS = {
    "frozen": InputFlags("frozen", clean=True),
    "buffer": InputFlags("buffer", clean=True),
    "constant": InputFlags("constant", clean=True),
    "trainable": InputFlags("trainable", external=True),
    "batch": InputFlags("batch", external=True),
    "tangent": InputFlags("tangent", external=True, late=True),
}


@dataclass(frozen=True, slots=True)
class InputBinding:
    """What INPUT ``vertex`` holds. ``source``: frozen, buffer, trainable, batch, tangent or constant.

    ``name``: the parameter's or buffer's as in ``model.named_parameters()``, the batch key (dotted inside
    containers), ``loss`` for its tangent, or a key of ``CapturedStep.constants``. ``spec`` has offset 0: the
    vertex's bytes start at the tensor's first element.
    """

    vertex: int
    source: str
    name: str
    spec: TensorSpec


@dataclass(frozen=True, slots=True)
class ValueBinding:
    """An output (``loss``) or the gradient of the trainable parameter ``name``: value ``ref`` seen through ``spec``."""

    name: str
    ref: Ref
    spec: TensorSpec


@dataclass(frozen=True)
class CapturedStep:
    """A training step as a graph. ``constants`` holds the bits of the INPUTs whose source is ``constant``.

    A trainable parameter that the loss does not reach has no entry in ``gradients``, as eager leaves it None.
    """

    graph: TaskGraph
    bindings: tuple[InputBinding, ...]
    outputs: tuple[ValueBinding, ...]
    gradients: tuple[ValueBinding, ...]
    constants: Mapping[str, torch.Tensor]


class _Step(torch.nn.Module):
    """Loss and gradients in one call, so that parameters swapped in reach the recomputation too."""

    def __init__(self, model: torch.nn.Module, forward: Callable[..., Any], autocast: AutocastState) -> None:
        super().__init__()
        self.model = model
        self._call = forward
        self._autocast = autocast

    def forward(self, batch: Mapping[str, Any], tangents: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        with autocast_region(self._autocast):
            loss = _loss_of(self._call(**batch))
        tangent = next(t for t in tangents if t.dtype is loss.dtype)
        trainable = [p for p in self.model.parameters() if p.requires_grad]
        return [loss, *torch.autograd.grad(loss, trainable, tangent, allow_unused=True)]


def _loss_of(output: Any) -> torch.Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None and isinstance(output, (tuple, list)) and output:
        loss = output[0]
    if not isinstance(loss, torch.Tensor):
        raise CaptureError("labels: the model returned no loss; pass labels so that it computes one")
    if loss.dim() != 0 or loss.dtype not in _LOSS_DTYPES:
        raise CaptureError(f"loss: must be a real scalar, the model returned {tuple(loss.shape)} of {loss.dtype}")
    if not loss.requires_grad:
        raise CaptureError("requires_grad: no trainable parameter reaches the loss")
    return loss


def capture_step(
    model: torch.nn.Module,
    kwargs: Mapping[str, Any],
    *,
    forward: Callable[..., Any] | None = None,
    contexts: Contexts = (),
    name: str = "step",
    device: torch.device = _CPU,
) -> CapturedStep:
    """Capture loss and gradients of one training step of ``model`` on a batch shaped as ``kwargs``.

    Works on fake twins on ``device``, where the step will run, because PyTorch chooses kernels by device; neither
    weights nor batch are read, and a model built on ``meta`` will do. ``forward`` is traced in place of
    ``model.forward``; ``contexts`` are entered around the trace. Autocast that is active at
    the call becomes part of the step.

    Raises:
        CaptureError: names the op and module that cannot be captured, or the argument to change.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    twins = model_twins(mode, model, device)
    real_batch = batch_tensors(kwargs)
    with mode:
        batch = {key: twin(tensor, device) for key, tensor in real_batch.items()}
        # One for each dtype a loss may have: which one is known only after the forward is traced.
        tangents = [torch.empty((), dtype=dtype, device=device) for dtype in _LOSS_DTYPES]
    step = _Step(model, forward if forward is not None else model.forward, autocast_state())
    names = [f"model.{name}" for name in twins]

    def call(
        parameters: list[torch.Tensor], tensors: list[torch.Tensor], tangents: list[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        arguments = replace_tensors(dict(kwargs), dict(zip(batch, tensors, strict=True)))
        swapped = dict(zip(names, parameters, strict=True))
        result: list[torch.Tensor | None] = torch.func.functional_call(
            step, swapped, (arguments, tangents), tie_weights=True
        )
        return result

    with ExitStack() as stack:
        stack.enter_context(_quiet())
        stack.enter_context(user_generator())
        stack.enter_context(fake_kernels())
        stack.enter_context(outside_autocast())
        stack.enter_context(torch.enable_grad())
        # On CUDA autograd would run the backward in a thread of its own, out of sight of the contexts here.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        for context in contexts:
            stack.enter_context(context())
        log = stack.enter_context(logging_trace(model))
        stack.enter_context(mode)
        trace = _trace(call, (list(twins.values()), list(batch.values()), tangents), log)
    buffers = {name for name, _ in model.named_buffers()}
    sources = [_source(name, tensor, buffers) for name, tensor in twins.items()]
    sources += [("batch", key) for key in batch] + [("tangent", "loss")] * len(tangents)
    return _lower(trace, sources, log, name, device)


def _source(name: str, tensor: torch.Tensor, buffers: set[str]) -> tuple[str, str]:
    if tensor.requires_grad:
        return "trainable", name
    return ("buffer" if name in buffers else "frozen"), name


@contextmanager
def _quiet() -> Iterator[None]:
    """Torch logs a traceback for an op it cannot fake, on top of the error it raises."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _trace(call: Callable[..., Any], arguments: tuple[Any, ...], log: TraceLog) -> fx.GraphModule:
    try:
        return make_fx(call, tracing_mode="real")(*arguments)
    except CaptureError:
        raise
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise CaptureError(
            f"{error.func} in module {log.module or '?'} depends on the data, not only on shapes; "
            "a planned step cannot branch on values (.item(), .tolist(), if tensor:, .nonzero())"
        ) from error
    except Exception as error:
        summary = str(error).strip().split("\n")[0]
        raise CaptureError(f"capturing module {log.module or '?'} failed: {summary}") from error


def _lower(
    trace: fx.GraphModule, sources: Sequence[tuple[str, str]], log: TraceLog, name: str, where: torch.device
) -> CapturedStep:
    graph = trace.graph
    sites = random_sites(graph, log)
    graph.eliminate_dead_code(is_impure_node=_must_stay)
    source_of = dict(zip(graph.find_nodes(op="placeholder"), sources, strict=True))
    low = Lowering(device=str(where))
    bindings: list[InputBinding] = []
    constants: dict[str, torch.Tensor] = {}
    for node in used_inputs(graph):
        source, key = source_of.get(node, ("constant", str(node.target)))
        if source == "constant":
            constants[key] = constant_value(trace, node).cpu()
        tensor = node.meta["val"]
        vertex = low.add_input(tensor, _FLAGS[source])
        bindings.append(InputBinding(vertex, source, key, tensor_spec(tensor)))
    lower_ops(graph, low, sites)
    hold_back(low, log.output_grads)

    returned: Any = graph.output_node().args[0]
    loss, *grads = returned
    outputs = (_value(low, "loss", loss),)
    chain_draws(low, outputs[0].ref)
    trainable = [key for source, key in sources if source == "trainable"]
    pairs = zip(trainable, grads, strict=True)
    gradients = tuple(_value(low, key, grad) for key, grad in pairs if grad is not None)
    mark(low, outputs[0].ref, out=True, keep=True)
    for gradient in gradients:
        mark(low, gradient.ref, keep=True)
    # The arena's size is the planner's business; a device's memory only bounds it.
    device = Device(0, sum(sum(v.sizes) for v in low.vertices))
    task = TaskGraph(name, (device,), tuple(low.vertices), low.ops)
    return CapturedStep(task, tuple(bindings), outputs, gradients, constants)


def _must_stay(node: fx.Node) -> bool:
    if node.op in ("placeholder", "output"):
        return True
    # Eager draws the numbers that nobody reads too.
    return draws(node) or (isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable)


def _value(low: Lowering, name: str, node: fx.Node) -> ValueBinding:
    tensor = node.meta["val"]
    return ValueBinding(name, low.ref(tensor), tensor_spec(tensor))
