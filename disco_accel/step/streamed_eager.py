"""Modules whose weights are on the host, computed in eager mode on another device: weights visit it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from disco_accel.capture.parts import LeafOf, rebuilt, rebuilt_state, states_of
from disco_accel.native.file_arena import FileArena


class StreamedEager:
    """Makes a model whose weights are on the host computable in eager mode on another device.

    Each module's weights and buffers visit the device while that module's forward runs, recomputation in a backward
    included. Those of the model itself do so within ``visiting``: its forward may be that of a plan, which reads them
    where they are. The visit of a trained weight is
    differentiable: its gradient comes back to the host. Slower than a plan; meant for what has none, such as evaluation
    and generation.
    """

    def __init__(self, model: torch.nn.Module, visit: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """``visit``: the tensor as a forward needs it, or the same object where it lies right already."""
        self._handles: list[Any] = []
        self.visitors: dict[int, torch.Tensor] = {}
        """Address of a visiting tensor's storage → the tensor that it is a copy of."""
        self._model, self._visit = weakref.ref(model), visit
        for module in model.modules():
            if module is model:
                continue
            tensors = [t for table in (module._parameters, module._buffers) for t in table.values() if t is not None]
            if tensors or any(True for _ in states_of(module)):
                on_host: list[_OnHost] = []
                arrive = functools.partial(_arrive, visit, self.visitors, on_host)
                leave = functools.partial(_leave, self.visitors, on_host)
                self._handles.append(module.register_forward_pre_hook(arrive))
                self._handles.append(module.register_forward_hook(leave, always_call=True))

    @contextmanager
    def visiting(self) -> Iterator[None]:
        """Around a forward of the model's own."""
        on_host: list[_OnHost] = []
        model = self._model()
        assert model is not None
        try:
            _arrive(self._visit, self.visitors, on_host, model)
            yield
        finally:
            _leave(self.visitors, on_host)

    def remove(self) -> None:
        """Take the hooks off again."""
        for handle in self._handles:
            handle.remove()


@dataclass(frozen=True, slots=True)
class _OnHost:
    """An entry of a table of a module that visits the device: ``value`` belongs there, ``addresses`` are those of the
    visiting storages."""

    table: dict[str, Any]
    key: str
    value: Any
    addresses: tuple[int, ...]


def _arrive(
    visit: Callable[[torch.Tensor], torch.Tensor],
    visitors: dict[int, torch.Tensor],
    on_host: list[_OnHost],
    module: torch.nn.Module,
    *_: Any,
) -> None:
    def swap(table: dict[str, Any], key: str, rebuild: Callable[[Any, LeafOf], Any]) -> None:
        addresses: list[int] = []

        def visiting(leaf: torch.Tensor) -> torch.Tensor:
            visitor = visit(leaf)
            if visitor is not leaf:
                addresses.append(visitor.untyped_storage().data_ptr())
                visitors[addresses[-1]] = leaf
            return visitor

        before = table[key]
        visitor = rebuild(before, visiting)
        if addresses:
            on_host.append(_OnHost(table, key, before, tuple(addresses)))
            table[key] = visitor

    for state in list(states_of(module)):
        swap(state.table, state.key, rebuilt_state)
    for table in (module._parameters, module._buffers):
        for name, tensor in table.items():
            if tensor is not None:
                swap(table, name, rebuilt)


def _leave(visitors: dict[int, torch.Tensor], on_host: list[_OnHost], *_: Any) -> None:
    while on_host:
        entry = on_host.pop()
        for address in entry.addresses:
            visitors.pop(address, None)
        entry.table[entry.key] = entry.value


def visitor_of(device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    """For ``StreamedEager``: a copy on ``device`` of what lives elsewhere."""
    return functools.partial(_on, device)


def shared_visitor_of(
    device: torch.device, arenas: weakref.WeakMethod[Callable[[], list[FileArena]]]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """As ``visitor_of``, of the values that this process sees of what lies in ``arenas``. Weak, because hooks are part
    of a model's state, which a step compares; a placement is not."""
    return functools.partial(_visit_shared, device, arenas)


def _visit_shared(
    device: torch.device, arenas: weakref.WeakMethod[Callable[[], list[FileArena]]], tensor: torch.Tensor
) -> torch.Tensor:
    arenas_now = arenas()
    arena = next((a for a in (arenas_now() if arenas_now is not None else []) if a.holds(tensor)), None)
    if arena is not None and any(arena.differs([tensor])):
        # A copy to the device reads the pages that are page-locked, which are still the shared ones.
        tensor = tensor.detach().clone()
    return _on(device, tensor)


def _on(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    # At once: the host's tensor may be written to as soon as the forward is over, and pinned memory is read later.
    return tensor if tensor.device == device else (tensor if tensor.requires_grad else tensor.detach()).to(device)
