"""Tensors that a forward reads although they are no parameter, buffer or input: plain attributes, its own new tensors.

A trace lifts each into a constant. Its twin here has a storage of its own for the length of the trace, so that all
views of it are known as such. Its bytes are those of the live tensor: changes in place are followed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorConverter

from disco_accel.capture.fake_mode import fake_mode
from disco_accel.capture.parts import is_plain, named_parts
from disco_accel.capture.storages import storage_key
from disco_accel.capture.thread_patches import patched
from disco_accel.capture.trace_log import active_log
from disco_accel.errors import CaptureError
from disco_accel.native.host_memory import place

if TYPE_CHECKING:
    from disco_accel.capture.captured_step import CapturedStep, InputBinding

_LIFT = torch.ops.aten.lift_fresh_copy.default
_AS_STRIDED = torch.ops.aten.as_strided.default
_DATA: Any = torch.Tensor.data


class _Twins(FakeTensorConverter):
    """Gives each real tensor one twin with offset 0, and keeps both, so that no identity is used twice in a trace."""

    def __init__(self) -> None:
        super().__init__()
        self.twins: dict[int, tuple[torch.Tensor, FakeTensor]] = {}

    def from_real_tensor(  # type: ignore[override]
        self, fake_mode: FakeTensorMode, t: torch.Tensor, make_constant: bool = False, **options: Any
    ) -> FakeTensor:
        known = self.twins.get(id(t))
        if known is not None:
            return known[1]
        if make_constant or not is_plain(t):
            return super().from_real_tensor(fake_mode, t, make_constant, **options)
        with fake_mode:
            made: Any = torch.empty_strided(tuple(t.shape), tuple(t.stride()), dtype=t.dtype, device=t.device)
        self.twins[id(t)] = t, made
        return made  # type: ignore[no-any-return]


def tracing_mode() -> FakeTensorMode:
    """A fake mode that takes real tensors as well, each as one twin."""
    mode = fake_mode()
    mode.fake_tensor_converter = _Twins()
    # Torch's memory of results is that of all modes, without the rules of ``fake_kernels``; ``FakeResults`` is ours.
    mode.cache_enabled = False
    # A kernel that is no op reads addresses: its results would be missing in the graph. torch's default is a warning.
    mode._allow_unsafe_data_ptr_access = False
    return mode


def bind_constants(
    graph: fx.Graph, traced: Mapping[str, torch.Tensor], mode: FakeTensorMode, model: torch.nn.Module
) -> dict[str, torch.Tensor]:
    """Name → live tensor of every constant that ``graph`` reads, of those that were ``traced``; their nodes get twins.

    Raises:
        CaptureError: a constant that has no bits, wants a gradient, is on a device, is a trainable parameter's
            memory or has no layout; names the attribute that holds it.
    """
    converter = mode.fake_tensor_converter
    assert isinstance(converter, _Twins)
    trainable = {storage_key(p): name for name, p in model.named_parameters() if p.requires_grad}
    constants: dict[str, torch.Tensor] = {}
    for node in graph.find_nodes(op="get_attr"):
        if not node.users:
            continue
        key = str(node.target)
        value = traced[key]
        real = _real(value)
        if real is None:
            raise CaptureError(
                f"{name_of(model, value)}: was put there by the forward itself, so that a step has no value to start "
                "from; make it before the first step, or leave it a local variable"
            )
        # What torch.tensor() makes, on a device too, is copied before anyone sees it: nobody else has it, and the copy
        # has its twin.
        made = all(user.target is _LIFT for user in node.users)
        constants[key] = real = real.cpu() if made else real
        _check(real, model, trainable)
        if not made:
            node.meta["val"] = converter.twins[id(real)][1]
    _check_offsets(graph, constants)
    return constants


@contextmanager
def no_values_read(model: torch.nn.Module) -> Iterator[None]:
    """Refuse Python reading the values of a constant, which would be part of the graph without anyone knowing.

    ``item`` and ``bool`` go through the dispatcher, which refuses them; these do not.
    """

    def refusing(read: Callable[..., Any]) -> Callable[..., Any]:
        def refuse(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if isinstance(tensor, FakeTensor):
                return read(tensor, *args, **kwargs)
            raise CaptureError(
                f"{name_of(model, tensor)}: {read.__name__}() reads its values while a step is captured, and a planned "
                "step would not read them again; keep them as Python numbers, or use the tensor itself"
            )

        return refuse

    with ExitStack() as stack:
        for name in ("tolist", "numpy", "__array__"):
            stack.enter_context(patched(torch.Tensor, name, refusing))
        yield


@contextmanager
def copies_without_addresses() -> Iterator[None]:
    """Lets ``copy.deepcopy`` of a fake tensor go on, which asks for its address and has none: a clone."""

    def without(copied: Callable[..., Any]) -> Callable[..., Any]:
        def copy(tensor: torch.Tensor, memo: dict[int, Any]) -> Any:
            with patched(torch.Tensor, "data_ptr", lambda read: lambda t: 0 if isinstance(t, FakeTensor) else read(t)):
                return copied(tensor, memo)

        return copy

    with patched(torch.Tensor, "__deepcopy__", without):
        yield


@contextmanager
def no_data_assigned() -> Iterator[None]:
    """Refuse ``tensor.data = other`` in this thread, but for the very bytes that the tensor has. It is no op, so that a
    graph would go on with the tensor's old bytes.

    Raises:
        CaptureError: from the assignment.
    """
    thread = threading.get_ident()

    def assign(tensor: torch.Tensor, value: torch.Tensor) -> None:
        if threading.get_ident() == thread and place(value) != place(tensor):
            log = active_log()
            raise CaptureError(
                f"module {log.module if log is not None and log.module else '?'}: its forward puts other data into a "
                f"tensor of shape {tuple(tensor.shape)} (tensor.data = ...), which no plan does; if it does so at its "
                "first run only, as layers that convert a weight do, run the model once before prepare()"
            )
        _DATA.__set__(tensor, value)

    FakeTensor.data = property(_DATA.__get__, assign)  # type: ignore[assignment]
    try:
        yield
    finally:
        del FakeTensor.data


def _real(value: Any) -> torch.Tensor | None:
    if isinstance(value, FakeTensor):
        value = value.constant
    return value if isinstance(value, torch.Tensor) and not value.is_meta else None


def _check(real: torch.Tensor, model: torch.nn.Module, trainable: dict[int, str]) -> None:
    if real.requires_grad:
        raise CaptureError(
            f"{name_of(model, real)}: requires a gradient but is no parameter of the model, so a planned step cannot "
            "train it; make it an nn.Parameter of its module and use it as such, or detach() it"
        )
    if not is_plain(real):
        raise CaptureError(f"{name_of(model, real)}: a {type(real).__name__} ({real.layout}) cannot be captured")
    # One without elements, such as a cache starts with, has nothing to follow.
    if not real.is_cpu and real.numel():
        raise CaptureError(
            f"{name_of(model, real)}: is on {real.device} and neither a parameter nor a buffer, so a planned step "
            "cannot follow what is written to it; make it a buffer (register_buffer), or keep it on the CPU and take "
            ".to(x.device) of it in forward"
        )
    if storage_key(real) in trainable:
        raise CaptureError(
            f"{name_of(model, real)}: is a view of the trainable parameter {trainable[storage_key(real)]}; "
            "take it from the parameter in forward"
        )
    if real.is_conj() or real.is_neg():
        raise CaptureError(f"{name_of(model, real)}: is lazily conjugated or negated; keep .resolve_conj() of it")


def _check_offsets(graph: fx.Graph, constants: dict[str, torch.Tensor]) -> None:
    """A twin begins at the first element of its tensor, and ``as_strided`` counts from the begin of the storage."""
    moved = {storage_key(n.meta["val"]) for n in graph.find_nodes(op="get_attr") if _offset(n, constants)}
    for node in graph.find_nodes(op="call_function", target=_AS_STRIDED):
        source: Any = node.args[0]
        if storage_key(source.meta["val"]) in moved and len(node.args) > 3:
            raise CaptureError(f"{node.target}: counts from the begin of a constant's storage; keep a clone() of it")


def _offset(node: fx.Node, constants: dict[str, torch.Tensor]) -> int:
    real = constants.get(str(node.target))
    return 0 if real is None else int(real.storage_offset())


def name_of(model: torch.nn.Module, tensor: torch.Tensor) -> str:
    """The owner of ``tensor``: the dotted path of a module's attribute, with the place in a container."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in ("_modules", "_parameters", "_buffers"):
                for found in _places(value, tensor, name):
                    return f"{path}.{found}" if path else found
    for part in named_parts(model):
        if part.tensor is tensor:
            return part.name
    return f"a tensor of shape {tuple(tensor.shape)} that the forward reads"


def _places(value: Any, tensor: torch.Tensor, name: str) -> Iterator[str]:
    if value is tensor:
        yield name
    elif isinstance(value, (list, tuple)):
        yield from (p for i, item in enumerate(value) for p in _places(item, tensor, f"{name}[{i}]"))
    elif isinstance(value, dict):
        yield from (p for key, item in value.items() for p in _places(item, tensor, f"{name}[{key!r}]"))


def live_constant(captured: CapturedStep, binding: InputBinding) -> torch.Tensor:
    """The tensor behind the constant ``binding`` of a step.

    Raises:
        CaptureError: it is laid out otherwise than when the step was captured.
    """
    tensor, spec = captured.constants[binding.name], binding.spec
    if (tuple(tensor.shape), tensor.stride(), str(tensor.dtype)) != (spec.shape, spec.stride, f"torch.{spec.dtype}"):
        raise CaptureError(
            f"a tensor of shape {spec.shape} that the forward reads got shape {tuple(tensor.shape)} in place after the "
            "step was captured; put a new tensor in its place instead"
        )
    return tensor
