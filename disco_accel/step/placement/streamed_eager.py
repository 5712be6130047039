"""Modules whose weights are on the host, computed in eager mode on another device: weights visit it."""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from disco_accel.capture.checkpointing import within_segments
from disco_accel.capture.parts import leaves, rebuilt_state, states_of
from disco_accel.native.file_arena import FileArena
from disco_accel.step.placement.visiting_tables import restore_tables, watch_tables
from disco_accel.step.placement.visitors import TABLES, Visits
from disco_accel.step.placement.weight_ring import WeightRing
from disco_accel.step.state.containers import OWN_MARK

_hooks_allowed: Callable[[], bool] = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]
_SMALL = 4096
"""Bytes of a tensor that stays on the device."""


class StreamedEager:
    """Makes a model whose weights are on the host computable in eager mode on another device.

    A weight or buffer visits the device when a forward reads it, whichever module it belongs to, recomputation in a
    backward included; it stays for the innermost forward that runs then. Writes of a forward to a visitor go home at
    the end. Forwards are those of modules inside the model, of checkpointed segments, and ``visiting``: the model's
    own may be that of a plan, which reads weights where they are. The visit of a trained weight is differentiable: its
    gradient comes back to the host. Slower than a plan; meant for evaluation, generation and other runs without one.

    With a ``WeightRing`` weights are loaded ahead into memory of bounded size. Weights that autograd saves in
    ``visiting`` are read again from the host in the backward, and take no memory on the device until then.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        visit: Callable[[torch.Tensor], torch.Tensor],
        plain: Iterable[torch.Tensor] = (),
        ring: WeightRing | None = None,
    ) -> None:
        """``visit``: the tensor as a forward needs it, or the same object where it lies right already. ``plain``:
        tensors in attributes of modules that visit, besides parameters and buffers. ``ring``: loads them ahead."""
        self._handles: list[Any] = []
        self.visits = Visits(visit, model, plain, ring)
        for module in model.modules():
            if module is not model and _has_tensors(module):
                arrive, leave = (functools.partial(hook, self.visits) for hook in (_arrive, _leave))
                setattr(arrive, OWN_MARK, True)
                self._handles.append(module.register_forward_pre_hook(arrive, with_kwargs=True))
                self._handles.append(module.register_forward_hook(leave, always_call=True))
        watch_tables(model, self.visits)

    @contextmanager
    def visiting(self, model: torch.nn.Module) -> Iterator[None]:
        """Around a forward of the model's own."""
        saved = contextlib.nullcontext() if self.visits.ring is None else _weights_saved_at_home(self.visits)
        with within_segments(self.visits.forward), saved, self.visits.forward(model):
            _bring_states(self.visits, model)
            yield

    def remove(self, model: torch.nn.Module | None) -> None:
        """Take hooks and tables off ``model``, if it is still there."""
        for handle in self._handles:
            handle.remove()
        if model is not None:
            restore_tables(model)


def _has_tensors(module: torch.nn.Module) -> bool:
    tensors = (t for part in module.modules() for name in TABLES for t in vars(part)[name].values())
    return any(t is not None for t in tensors) or any(True for part in module.modules() for _ in states_of(part))


def own_leaves(model: torch.nn.Module) -> list[list[torch.Tensor]]:
    """Of each module of ``model``, the plain tensors of the weights and buffers that are its own."""
    return [_own_leaves(module) for module in model.modules()]


def _own_leaves(module: torch.nn.Module) -> list[torch.Tensor]:
    """The plain tensors of the weights and buffers that belong to ``module`` itself."""
    own = (tensor for name in TABLES for tensor in vars(module)[name].values() if tensor is not None)
    return [leaf for tensor in own for _, leaf in leaves(tensor)]


def _arrive(visits: Visits, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
    batch = visits.batch((args, kwargs))
    visits.enter(module, sys._getframe(1))
    _bring_states(visits, module)
    return batch


def _leave(visits: Visits, module: torch.nn.Module, _arguments: Any, output: Any) -> None:
    # Of a forward that has failed there is no output.
    visits.leave(module, whole=output is not None, output=output)


def _bring_states(visits: Visits, module: torch.nn.Module) -> None:
    table = vars(module)
    for key, _ in list(states_of(module)):
        visits.swap(table, key, visits.bring(table[key], rebuilt_state))


def visitor_of(
    device: torch.device, shared: Callable[[], list[FileArena]] | None = None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """For ``StreamedEager``: a copy on ``device`` of a tensor elsewhere, of the values that this process sees in
    ``shared`` arenas."""
    return functools.partial(_on, device) if shared is None else _SharedVisitor(device, shared)


def source_of(visitor: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    """The source of a copy of ``tensor`` by ``visitor``."""
    return visitor.seen(tensor) if isinstance(visitor, _SharedVisitor) else tensor


class _SharedVisitor:
    """Hooks of a module that outlives its model hold this, so the method that names the arenas is held weakly."""

    def __init__(self, device: torch.device, arenas: Callable[[], list[FileArena]]) -> None:
        self._device, self._arenas = device, weakref.WeakMethod(arenas)

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        return _on(self._device, self.seen(tensor))

    def seen(self, tensor: torch.Tensor) -> torch.Tensor:
        """The source of a copy to the device."""
        arenas = self._arenas()
        arena = next((a for a in (arenas() if arenas is not None else []) if a.holds(tensor)), None)
        if arena is not None and any(arena.differs([tensor])):
            # A copy to the device reads the pages that are page-locked, which are still the shared ones.
            return tensor.detach().clone()
        return tensor

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the model has weights of its own.
        return visitor_of, (self._device,)


def _on(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    # At once: the host's tensor may be written to as soon as the forward is over, and pinned memory is read later.
    return tensor if tensor.device == device else (tensor if tensor.requires_grad else tensor.detach()).to(device)


@contextmanager
def saved_on_host(
    device: torch.device, visitors: Mapping[int, torch.Tensor], staying: Iterable[torch.Tensor]
) -> Iterator[None]:
    """Inside, autograd saves tensors on ``device`` on the host; each comes back with its bits and strides.

    So an unplanned forward and backward take no more of the device's memory than a module and its activations do.
    ``visitors``: address of a storage on the device to the tensor on the host that it is a copy of, at this moment.
    ``staying``: tensors that lie on the device in any case, and are saved as they are.
    """
    stay = {tensor.untyped_storage().data_ptr() for tensor in staying}

    def pack(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        address = tensor.untyped_storage().data_ptr()
        original = visitors.get(address)
        if tensor.device != device or address in stay:
            return lambda: tensor
        if original is not None and original.dtype == tensor.dtype:
            size, stride, offset = tensor.size(), tensor.stride(), tensor.storage_offset()
            return lambda: original.detach().to(device).as_strided(size, stride, offset)
        if tensor.nbytes <= _SMALL:
            return lambda: tensor
        return _away(tensor.detach())

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda back: back()):
        yield


def _weights_saved_at_home(visits: Visits) -> AbstractContextManager[object]:
    """Inside, autograd saves no copies of parameters: the backward reads them again."""
    if not torch.is_grad_enabled() or not _hooks_allowed():
        return contextlib.nullcontext()

    def pack(tensor: torch.Tensor) -> torch.Tensor | _SavedWeight:
        if is_traceable_wrapper_subclass(tensor):
            return tensor
        home = visits.addresses.get(tensor.untyped_storage().data_ptr())
        # What a forward has written to a copy, the host does not have yet.
        if not isinstance(home, torch.nn.Parameter) or home.dtype != tensor.dtype or tensor._version:
            return tensor
        layout = tensor.size(), tensor.stride(), tensor.storage_offset()
        return _SavedWeight(visits, home, home._version, layout)

    def unpack(saved: torch.Tensor | _SavedWeight) -> torch.Tensor:
        return saved if isinstance(saved, torch.Tensor) else saved.read()

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


@dataclass(frozen=True, slots=True)
class _SavedWeight:
    """A part of a copy of ``home``, which had this ``version`` then."""

    visits: Visits
    home: torch.Tensor
    version: int
    layout: tuple[Any, Any, Any]

    def read(self) -> torch.Tensor:
        if self.home._version != self.version:
            # As PyTorch says it of a tensor that it has saved itself.
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"weight of shape {list(self.home.shape)} is at version {self.home._version}; expected version "
                f"{self.version} instead"
            )
        return self.visits.read_again(self.home).as_strided(*self.layout)


def _away(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A copy on the host, and how it comes back. Strides decide about kernels, and kernels about bits: they stay."""
    device, shape = tensor.device, tensor.shape
    once = tensor
    for dimension, stride in enumerate(tensor.stride()):
        if stride == 0:
            once = once.narrow(dimension, 0, 1)
    if torch._debug_has_internal_overlap(once) != 0:
        return lambda: tensor
    size, strides = once.size(), once.stride()
    host = torch.empty_strided(size, strides, dtype=once.dtype, device="cpu").copy_(once)
    return lambda: torch.empty_strided(size, strides, dtype=host.dtype, device=device).copy_(host).expand(shape)
