"""The ops that a step issues, as an FX graph: the ops of PyTorch's ``make_fx``, in half its time.

A dispatch mode above the fake tensors notes each op below autograd, with the nodes of its arguments. Proxies, symbolic
sizes, metadata for Inductor and generated code serve nobody here.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses import FakeTensor
from torch.fx import _symbolic_trace
from torch.fx.experimental.proxy_tensor import snapshot_fake
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
    autograd_would_have_decomposed,
)

from disco_accel.capture.result_memory import FakeResults
from disco_accel.capture.trace_log import NodeInfo, TraceLog, note
from disco_accel.errors import CaptureError

_DEVICE_OF = torch.ops.prim.device.default
_LIFT = torch.ops.aten.lift_fresh.default
_LIFTED = torch.ops.aten.lift_fresh_copy.default
_IS_TRUE = torch.ops.aten.is_nonzero.default


_UNREAD = -1
_NUMBERS = frozenset(
    (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
)


@dataclass(slots=True)
class _Known:
    """A tensor that has a node. The reference is weak, so that autograd frees its saved tensors as it would without a
    trace.

    ``layout``: as of ``FakeResults.layout``, or ``_UNREAD``.
    """

    tensor: weakref.ref[torch.Tensor]
    node: fx.Node
    layout: int = _UNREAD


@dataclass(slots=True)
class _Call:
    """The arguments of a call as the recorder reads them: their tensors, and all facts that a result may depend on."""

    tensors: list[torch.Tensor]
    key: list[Any]


def record_ops(
    call: Callable[..., Sequence[torch.Tensor | None]], arguments: Sequence[Sequence[torch.Tensor]], log: TraceLog
) -> dict[str, torch.Tensor]:
    """Run ``call(*arguments)`` on fake tensors and note its aten ops in ``log.graph``, which returns its results.

    Each tensor of ``arguments`` has a placeholder, in order, each node a twin of its result under ``meta["val"]``.
    Returns the constants: name of a ``get_attr`` node → the tensor that an op read although nothing in the graph made
    it. Runs under a ``FakeTensorMode``.

    Raises:
        CaptureError: an op of higher order, which takes functions.
    """
    recorder = _Recorder(log)
    for tensor in (tensor for group in arguments for tensor in group):
        recorder.add_placeholder(tensor)
    with _known_to_dynamo(), _without_autocast_cache(), _NoFastPaths(), _below_the_users_modes(recorder):
        returned = call(*arguments)
    recorder.end(returned)
    return recorder.constants


class _NoFastPaths(TorchFunctionMode):
    """Modules of PyTorch that have one op for a whole layer in evaluation do not take it: it has no twin rule."""

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, log: TraceLog) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.constants: dict[str, torch.Tensor] = {}
        self._log = log
        self._graph = log.graph
        self._known: dict[int, _Known] = {}
        """By identity of the tensor."""
        self._results = FakeResults()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: no switch around each op. Dynamo is off for all of a capture."""
        return False

    def add_placeholder(self, tensor: torch.Tensor) -> None:
        node = self._graph.create_node("placeholder", f"arg{len(self._known)}")
        node.meta["val"] = _twin(tensor)
        self._remember(tensor, node)

    def end(self, returned: Sequence[torch.Tensor | None]) -> None:
        """The graph is complete and returns the nodes of ``returned``."""
        self._graph.output([None if tensor is None else self._find(tensor).node for tensor in returned])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _DEVICE_OF:
            return args[0].device
        if not isinstance(func, OpOverload):
            raise CaptureError(f"{func} in module {self._log.module or '?'} is not an aten op")
        if any(kind is not FakeTensor for kind in types):
            # A subclass of tensors first says which ops it is made of.
            return NotImplemented
        if _is_composite(func) and autograd_would_have_decomposed(func, _tensors_in((args, kwargs))):
            with self:
                made = func.decompose(*args, **kwargs)
            if made is not NotImplemented:
                return made
        if func is _IS_TRUE:
            with self:
                return (args[0] != 0).item()
        if torch.Tag.data_dependent_output in func.tags:
            # Fake tensors know the value of some constants; of anything else this raises.
            return func(*args, **kwargs)
        recorded = _LIFTED if func is _LIFT else func
        read = _Call([], [])
        nodes = self._read(args, read), {name: self._read(value, read, name) for name, value in kwargs.items()}
        info = self._log.info()
        made, twins, layouts = self._call(func, args, kwargs, read)
        self._keep(self._add(recorded, *nodes), made, twins, layouts, info)
        return made

    def _call(self, func: OpOverload, args: Any, kwargs: Any, read: _Call) -> tuple[Any, Any, Any]:
        """The result of the call, the same again for ``meta["val"]``, and its layouts."""
        key = None if 0 in read.key else self._results.key(func, read.key)
        if key is not None and (again := self._results.again(key, read.tensors)) is not None:
            return again
        made = func(*args, **kwargs)
        if key is not None:
            self._results.keep(key, read.tensors, made)
        elif func._schema.is_mutable:
            self._read_again(read.tensors)
        return made, _snapshots(made), None

    def _read_again(self, tensors: list[torch.Tensor]) -> None:
        """Of tensors that an op may have changed in place, and where it changed how one lies, of all."""
        for tensor in tensors:
            known = self._find(tensor)
            before, known.layout = known.layout, self._results.layout(tensor)
            if before != known.layout:
                for other in self._known.values():
                    other.layout = _UNREAD
                return

    def _keep(self, node: fx.Node, made: Any, twins: Any, layouts: Any, info: NodeInfo) -> None:
        note(node, info)
        node.meta["val"] = twins
        if isinstance(made, torch.Tensor):
            self._known[id(made)] = _Known(weakref.ref(made), node, _UNREAD if layouts is None else layouts)
        elif isinstance(made, (tuple, list)):
            for index, item in enumerate(made):
                if isinstance(item, (torch.Tensor, tuple, list)):
                    part = self._add(operator.getitem, (node, index), {})
                    self._keep(part, item, twins[index], None if layouts is None else layouts[index], info)

    def _add(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        node = self._graph.create_node("call_function", target, name=_name_of(target))
        # Given to create_node, they would be searched for symbolic numbers, of which there are none.
        node.args = args
        if kwargs:
            node.kwargs = kwargs
        return node

    def _read(self, value: Any, call: _Call, name: str = "") -> Any:
        """``value`` with nodes in the place of tensors; its tensors and facts are added to ``call``."""
        if isinstance(value, torch.Tensor):
            known = self._find(value)
            if known.layout == _UNREAD:
                known.layout = self._results.layout(value)
            call.tensors.append(value)
            if name:
                call.key.append(name)
            call.key.append(-known.layout if value.requires_grad else known.layout)
            return known.node
        if isinstance(value, (tuple, list)):
            call.key.append((name, len(value)))
            items = [self._read(item, call) for item in value]
            return items if isinstance(value, list) else tuple(items)
        call.key.append((name, type(value), value) if type(value) in _NUMBERS else 0)
        return value

    def _find(self, tensor: torch.Tensor) -> _Known:
        known = self._known.get(id(tensor))
        if known is not None and known.tensor() is tensor:
            return known
        kind = "_param_constant" if isinstance(tensor, torch.nn.Parameter) else "_tensor_constant"
        name = f"{kind}{sum(key.startswith(kind) for key in self.constants)}"
        self.constants[name] = tensor
        node = self._graph.create_node("get_attr", name)
        node.meta["val"] = _twin(tensor)
        return self._remember(tensor, node)

    def _remember(self, tensor: torch.Tensor, node: fx.Node) -> _Known:
        known = self._known[id(tensor)] = _Known(weakref.ref(tensor), node)
        return known


def _snapshots(made: Any) -> Any:
    """``made`` with other tensors of the same memory in it."""
    if isinstance(made, torch.Tensor):
        return snapshot_fake(made)
    return type(made)(map(_snapshots, made)) if isinstance(made, (tuple, list)) else made


@functools.cache
def _name_of(target: Callable[..., Any]) -> str:
    return target.__name__.replace(".", "_")


@functools.cache
def _is_composite(func: OpOverload) -> bool:
    return bool(func._can_decompose())


def _tensors_in(value: Any) -> list[Any]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = tuple(value.values())
    return [tensor for item in value for tensor in _tensors_in(item)] if isinstance(value, (tuple, list)) else []


def _twin(tensor: torch.Tensor) -> torch.Tensor | None:
    if isinstance(tensor, FakeTensor):
        return snapshot_fake(tensor)
    if tensor.layout is not torch.strided:
        return None
    return torch.empty_strided(tuple(tensor.shape), tuple(tensor.stride()), dtype=tensor.dtype, device=tensor.device)


@contextmanager
def _below_the_users_modes(recorder: _Recorder) -> Iterator[None]:
    """Dispatch modes of the user's own get each op before ``recorder``, which then notes the ops that they run
    instead."""
    theirs = [mode for mode in _get_current_dispatch_mode_stack() if getattr(mode, "_mode_key", None) is None]
    for _ in theirs:
        _pop_mode()
    try:
        with recorder:
            for mode in theirs:
                _push_mode(mode)
            try:
                yield
            finally:
                for _ in theirs:
                    _pop_mode()
    finally:
        for mode in theirs:
            _push_mode(mode)


@contextmanager
def _known_to_dynamo() -> Iterator[None]:
    """Functions that are compiled are run as they are, and are compiled as ever afterwards."""
    before = _symbolic_trace._is_fx_tracing_flag
    _symbolic_trace._is_fx_tracing_flag = True
    try:
        yield
    finally:
        _symbolic_trace._is_fx_tracing_flag = before


@contextmanager
def _without_autocast_cache() -> Iterator[None]:
    """A cast that a region outside has made is no tensor of this graph."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
