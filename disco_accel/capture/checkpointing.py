"""Activation checkpointing in a trace: the forward, the recomputation and the backward of each segment are marked.

Both kinds of ``torch.utils.checkpoint`` are captured as the non-reentrant one. The reentrant kind computes the same
values. Eager runs an autograd of its own for each reentrant segment, which knows the tensors among the segment's
arguments and the trainable ones inside. Any other tensor that it would have to differentiate is refused.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch._C._autograd import _get_sequence_nr, _top_saved_tensors_default_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from disco_accel.capture.storages import storage_key
from disco_accel.capture.thread_patches import patched
from disco_accel.capture.trace_log import BACKWARD, FORWARD, RECOMPUTE, TraceLog, active_log, node_info, unmarked
from disco_accel.errors import CaptureError

_TORCHS: Callable[..., Any] = inspect.unwrap(checkpoint)
"""Torch's function without the decorator that keeps torch.compile out, which is where ``marked_below`` listens."""
_OPTIONS = frozenset(("preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop"))
_SAY_FALSE = 'pass gradient_checkpointing_kwargs={"use_reentrant": False}'


class _Tag(TorchDispatchMode):
    """Sets phase and layer. A dispatch mode in type alone, since torch takes nothing else as context under tracing."""

    def __init__(self, log: TraceLog, phase: str, layer: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._log = log
        self._tag = (phase, layer)
        self._before: list[tuple[str, int, list[str]]] = []

    def __enter__(self) -> _Tag:
        log = self._log
        self._before.append((log.phase, log.layer, list(log.modules)))
        log.phase, log.layer = self._tag
        return self

    def __exit__(self, kind: Any, _value: Any, _traceback: Any) -> None:
        # Recomputation ends by an exception, so modules that it entered were never left.
        phase, layer, modules = self._before.pop()
        if self._tag[0] == RECOMPUTE or kind is None:
            self._log.phase, self._log.layer, self._log.modules = phase, layer, modules


def checkpointed(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Run a segment as ``torch.utils.checkpoint.checkpoint`` does, marking its three phases.

    ``options`` are the keyword arguments of the user's own checkpoint function and of the segment. Outside a
    trace it is plain checkpointing.

    Raises:
        CaptureError: the segment runs with ``use_reentrant=True`` (also torch's default when it is left out), and eager
            would differentiate it in another way than the non-reentrant kind.
    """
    log = active_log()
    if log is None:
        return _TORCHS(function, *args, **options)
    reentrant = options.pop("use_reentrant", None) is not False
    layer = log.layers
    log.layers += 1
    log.layer_modules[layer] = log.module
    options.pop("context_fn", None)
    if not options.get("preserve_rng_state", True):
        log.redrawn.add(layer)
    if log.phase in (FORWARD, RECOMPUTE):
        log.nested.add(layer)
    if reentrant:
        _refuse_keywords(log, options.keys() - _OPTIONS)
        # Eager recomputes such a segment to its end: draws that nothing needs any more move the generator too.
        options["early_stop"] = layer not in log.redrawn
        options["determinism_check"] = "default"
    # The capture itself pairs what draws with its replay; saving generator states would only break tracing.
    options["preserve_rng_state"] = False
    tags = (_Tag(log, FORWARD, layer), _Tag(log, RECOMPUTE, layer))
    run = functools.partial(_TORCHS, function, use_reentrant=False, context_fn=lambda: tags, **options)
    with _nothing_saved_elsewhere(log):
        output = _as_reentrant(log, run, args) if reentrant else run(*args)
    for tensor in _tensors(output):
        if tensor.requires_grad:
            tensor.register_hook(_mark_backward(log, layer))
    return output


def _mark_backward(log: TraceLog, layer: int) -> Callable[[torch.Tensor], None]:
    def mark(grad: torch.Tensor) -> None:
        log.phase, log.layer = BACKWARD, layer
        log.output_grads.setdefault(layer, []).append(grad)

    return mark


def _as_reentrant(log: TraceLog, run: Callable[..., Any], args: Sequence[Any]) -> Any:
    """The output of ``run(*args)``, differentiated as by the reentrant kind.

    Raises:
        CaptureError: eager would differentiate it otherwise.
    """
    where = log.module or "the model"
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    versions = [tensor._version for tensor in tensors]
    # Eager adds up the gradients of an argument within the segment before those from outside.
    args = [_alias(arg) if isinstance(arg, torch.Tensor) and arg.requires_grad else arg for arg in args]
    start = _get_sequence_nr()
    output = run(*args)
    if versions != [tensor._version for tensor in tensors]:
        raise CaptureError(f"use_reentrant: a checkpointed segment of {where} changes an argument; {_SAY_FALSE}")
    returned = output if isinstance(output, tuple) else (output,)
    for value in returned:
        if not isinstance(value, _RETURNED):
            raise CaptureError(
                f"use_reentrant: a checkpointed segment of {where} returns a {type(value).__name__}, into which eager "
                f"sends no gradients with use_reentrant=True; {_SAY_FALSE}"
            )
    trained = [value for value in returned if isinstance(value, torch.Tensor) and value.requires_grad]
    inputs = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.requires_grad]
    if trained and not inputs:
        raise CaptureError(
            f"use_reentrant: a checkpointed segment of {where} has no argument that requires a gradient, so that with "
            "use_reentrant=True nothing in it is trained; call model.enable_input_require_grads() before training, or "
            + _SAY_FALSE
        )
    if not log.reentrant_leaves:
        log.checks.append(_refuse_shared)
    log.reentrant_leaves |= {storage_key(leaf) for leaf in _leaves(trained, inputs, start, where)}
    return output


_RETURNED = (torch.Tensor, type(None), bool, int, float, str)
_alias: Callable[[torch.Tensor], torch.Tensor] = torch.ops.aten.alias.default


def _leaves(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], start: int, where: str) -> Iterator[Any]:
    """Trainable tensors other than ``inputs`` that ``outputs`` were made from, by nodes that autograd numbered from
    ``start`` on."""
    seen = {tensor.grad_fn for tensor in inputs}
    queue = [tensor.grad_fn for tensor in outputs]
    while queue:
        node: Any = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        elif node._sequence_nr() < start:
            raise CaptureError(
                f"use_reentrant: a checkpointed segment of {where} uses a tensor that requires a gradient and is no "
                f"argument of it; with use_reentrant=True eager differentiates that on its own; {_SAY_FALSE}"
            )
        else:
            queue.extend(before for before, _ in node.next_functions)


def _refuse_shared(log: TraceLog) -> None:
    """Eager adds to ``.grad`` after each reentrant segment: gradients of a tensor used in several would be added in
    another order than the plan's, which adds their sum."""
    for placeholder in log.graph.find_nodes(op="placeholder"):
        value = placeholder.meta.get("val")
        if not isinstance(value, torch.Tensor) or storage_key(value) not in log.reentrant_leaves:
            continue
        infos = [node_info(user) for user in placeholder.users]
        uses = {info.layer if info.phase == FORWARD else -1: info.module for info in infos if not info.in_backward}
        if len(uses) > 1:
            names = " and ".join(sorted(set(uses.values())))
            raise CaptureError(f"use_reentrant: {names} train the same parameter in several places; {_SAY_FALSE}")


def _refuse_keywords(log: TraceLog, keywords: Iterable[str]) -> None:
    for keyword in keywords:
        raise CaptureError(
            f"{keyword}: with use_reentrant=True torch gives no keyword arguments to a checkpointed segment of "
            f"{log.module or 'the model'}; {_SAY_FALSE}"
        )


@contextmanager
def _nothing_saved_elsewhere(log: TraceLog) -> Iterator[None]:
    """Leave a segment's arguments where they are, also where the user's function saves them on the host: a plan
    decides.

    Raises:
        CaptureError: the function saves them in a way that is not known to keep their values.
    """
    hooks = _top_saved_tensors_default_hooks(True)
    if hooks is None or getattr(hooks[0], "__module__", "") == _TORCHS.__module__:
        # None, or those of the segment around this one.
        yield
        return
    if not getattr(hooks[0], "__qualname__", "").startswith("save_on_cpu."):
        raise CaptureError(
            f"the checkpoint function of {log.module or 'the model'} works under saved_tensors_hooks that may change "
            "values; a planned step knows torch.autograd.graph.save_on_cpu alone"
        )
    with torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is):
        yield


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def traced(function: Callable[..., Any], module: torch.nn.Module) -> Callable[..., Any]:
    """The replacement of ``module``'s checkpoint ``function`` while a step is traced, inside ``marked_below``.

    A function of the user's own runs as it is, with all that it does besides: torch's checkpointing, wherever it
    calls that, is ``checkpointed``. Modules that it recomputes itself are noticed when they run in the backward.
    """
    if function is checkpoint:
        return checkpointed
    if isinstance(function, functools.partial) and function.func is checkpoint:
        return functools.partial(checkpointed, *function.args, **function.keywords)

    def watched(segment: Callable[..., Any], *args: Any, **options: Any) -> Any:
        log = active_log()
        before = log.layers if log is not None else 0
        output = function(segment, *args, **options)
        if log is not None and log.layers == before:
            log.unmarked |= {id(part) for part in module.modules()}
            _require_trained(module, output, args, log)
        return output

    return watched


def _require_trained(module: torch.nn.Module, output: Any, args: Sequence[Any], log: TraceLog) -> None:
    """Autograd knows the weights that ``module`` trains: its own forward ran, not one inside of an
    ``autograd.Function``."""
    trainable = {id(parameter) for parameter in module.parameters() if parameter.requires_grad}
    inputs = [arg for arg in args if isinstance(arg, torch.Tensor)]
    if trainable and not any(id(leaf) in trainable for leaf in _leaves(_tensors(output), inputs, 0, "")):
        raise CaptureError(unmarked(log.module_names.get(id(module), "")))


def marked_below() -> AbstractContextManager[None]:
    """Inside, each call of torch's ``checkpoint`` in this thread is one of ``checkpointed``, also where it has another
    name: the function that torch's decorator calls is replaced."""
    return _instead(lambda _: checkpointed)


def never_reentrant() -> AbstractContextManager[None]:
    """Inside, reentrant segments in this thread run as the non-reentrant kind, with the same bits: torch differentiates
    nothing in the others but by ``backward()``, and ``torch.autograd.grad`` gets no gradients from them."""

    def making(torchs: Callable[..., Any]) -> Callable[..., Any]:
        def run(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
            if options.get("use_reentrant") is not False:
                args = tuple(_alias(a) if isinstance(a, torch.Tensor) and a.requires_grad else a for a in args)
                options = {**options, "early_stop": options.get("preserve_rng_state", True), "use_reentrant": False}
            return torchs(function, *args, **options)

        return run

    return _instead(making)


def within_segments(scope: Callable[[object], AbstractContextManager[None]]) -> AbstractContextManager[None]:
    """Inside, each segment that torch's ``checkpoint`` runs in this thread is run within ``scope(segment)``, then and
    when it is recomputed."""

    def making(torchs: Callable[..., Any]) -> Callable[..., Any]:
        def run(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
            def segment(*values: Any, **keywords: Any) -> Any:
                with scope(segment):
                    return function(*values, **keywords)

            return torchs(segment, *args, **options)

        return run

    return _instead(making)


def _instead(make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> AbstractContextManager[None]:
    if not hasattr(_TORCHS, _UNCOMPILED):
        checkpoint(_as_it_is, None, use_reentrant=False, preserve_rng_state=False)
    return patched(_TORCHS, _UNCOMPILED, make)


_UNCOMPILED = "__dynamo_disable"
"""Where torch's decorator has the function that it calls, from its first call on."""


def _tensors(output: Any) -> list[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, (tuple, list)):
        return [tensor for item in output for tensor in _tensors(item)]
    return []
