"""Modules whose weights are on the host, computed in eager mode on another device: weights visit it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from disco_accel.capture.checkpointing import within_segments
from disco_accel.capture.parts import rebuilt_state, states_of
from disco_accel.native.file_arena import FileArena
from disco_accel.step.placement.visitors import TABLES, VisitingTable, Visits
from disco_accel.step.state.containers import OWN_MARK


class StreamedEager:
    """Makes a model whose weights are on the host computable in eager mode on another device.

    A weight or buffer visits the device when a forward reads it, whichever module it belongs to, recomputation in a
    backward included; it stays for the innermost forward that runs then. What a forward writes to a visitor goes home
    at the end. Forwards are those of modules inside the model, of checkpointed segments, and ``visiting``: the model's
    own may be that of a plan, which reads weights where they are. The visit of a trained weight is differentiable: its
    gradient comes back to the host. Slower than a plan; meant for what has none, such as evaluation and generation.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        visit: Callable[[torch.Tensor], torch.Tensor],
        plain: Iterable[torch.Tensor] = (),
    ) -> None:
        """``visit``: the tensor as a forward needs it, or the same object where it lies right already. ``plain``:
        tensors in attributes of modules that visit, besides parameters and buffers."""
        self._handles: list[Any] = []
        self._visits = Visits(visit, model, plain)
        for module in model.modules():
            if module is not model and _has_tensors(module):
                arrive, leave = (functools.partial(hook, self._visits) for hook in (_arrive, _leave))
                setattr(arrive, OWN_MARK, True)
                self._handles.append(module.register_forward_pre_hook(arrive, with_kwargs=True))
                self._handles.append(module.register_forward_hook(leave, always_call=True))
        for module in model.modules():
            for name in TABLES:
                vars(module)[name] = VisitingTable(name, vars(module)[name], module, self._visits)

    @property
    def visitors(self) -> dict[int, torch.Tensor]:
        """Address of a visiting tensor's storage → the tensor that it is a copy of."""
        return self._visits.addresses

    @contextmanager
    def visiting(self, model: torch.nn.Module) -> Iterator[None]:
        """Around a forward of the model's own."""
        with within_segments(self._visits.forward), self._visits.forward(model):
            _bring_states(self._visits, model)
            yield

    def batch(self, arguments: Any) -> Any:
        """The arguments of a forward of the model's own, on the device if all tensors in them are on the host."""
        return self._visits.batch(arguments)

    def hidden(self) -> AbstractContextManager[None]:
        """Around what reads tensors where they are, such as a plan, though a forward of a module may run around it."""
        return self._visits.hidden()

    def remove(self, model: torch.nn.Module | None) -> None:
        """Take hooks and tables off ``model``, if it is still there."""
        for handle in self._handles:
            handle.remove()
        for attributes in [vars(module) for module in model.modules()] if model is not None else []:
            for name in TABLES:
                if isinstance(attributes[name], VisitingTable):
                    attributes[name] = dict(dict.items(attributes[name]))


def _has_tensors(module: torch.nn.Module) -> bool:
    tensors = (t for part in module.modules() for name in TABLES for t in vars(part)[name].values())
    return any(t is not None for t in tensors) or any(True for part in module.modules() for _ in states_of(part))


def _arrive(visits: Visits, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
    batch = visits.batch((args, kwargs))
    visits.enter(module)
    _bring_states(visits, module)
    return batch


def _leave(visits: Visits, module: torch.nn.Module, _arguments: Any, _output: Any) -> None:
    visits.leave(module)


def _bring_states(visits: Visits, module: torch.nn.Module) -> None:
    for state in list(states_of(module)):
        visits.swap(state.table, state.key, visits.bring(state.table[state.key], rebuilt_state))


def visitor_of(
    device: torch.device, shared: Callable[[], list[FileArena]] | None = None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """For ``StreamedEager``: a copy on ``device`` of what lives elsewhere, of tensors in ``shared`` arenas with the
    values that this process sees."""
    return functools.partial(_on, device) if shared is None else _SharedVisitor(device, shared)


class _SharedVisitor:
    """A module that outlives its model leads here by its hooks, so the method that names the arenas is held weakly."""

    def __init__(self, device: torch.device, arenas: Callable[[], list[FileArena]]) -> None:
        self._device, self._arenas = device, weakref.WeakMethod(arenas)

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        arenas = self._arenas()
        arena = next((a for a in (arenas() if arenas is not None else []) if a.holds(tensor)), None)
        if arena is not None and any(arena.differs([tensor])):
            # A copy to the device reads the pages that are page-locked, which are still the shared ones.
            tensor = tensor.detach().clone()
        return _on(self._device, tensor)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the model has weights of its own.
        return visitor_of, (self._device,)


def _on(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    # At once: the host's tensor may be written to as soon as the forward is over, and pinned memory is read later.
    return tensor if tensor.device == device else (tensor if tensor.requires_grad else tensor.detach()).to(device)
