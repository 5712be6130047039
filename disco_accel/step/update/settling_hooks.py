"""Hooks of a model and its optimizers before which a pending update is done."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch

from disco_accel.step.capture_lock import in_capture


class Settling(Protocol):
    """What has a pending update."""

    def settle(self) -> None:
        """Do it now."""

    def loads(self, loaded: torch.nn.Module | torch.optim.Optimizer) -> None:
        """``loaded`` is about to load weights or moments."""


class SettlingHooks:
    """Those of one model and of the optimizers that update it."""

    def __init__(self, model: torch.nn.Module, owner: Settling) -> None:
        self._settle, self._loads = _Hook(owner), _Hook(owner, loads=True)
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._handles: list[Any] = []
        for module in model.modules():
            # Weights that an update has left torn are not saved.
            self._handles.append(module.register_state_dict_pre_hook(self._settle))
            self._handles.append(module.register_load_state_dict_pre_hook(self._loads))
            # The model's own forward settles where it does not run from a plan.
            own = module is not model and any(p.requires_grad for p in module.parameters(recurse=False))
            if own:
                self._handles.append(module.register_forward_pre_hook(self._settle))

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """``optimizer`` updates the model."""
        if optimizer not in self._optimizers:
            self._optimizers.add(optimizer)
            self._handles.append(optimizer.register_state_dict_pre_hook(self._settle))
            self._handles.append(optimizer.register_load_state_dict_pre_hook(self._loads))

    def remove(self) -> None:
        """No hook any more."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class _Hook:
    """A hook that settles; that of a copied or stored module does nothing."""

    def __init__(self, owner: Settling | None = None, *, loads: bool = False) -> None:
        """``loads``: the call that it hooks loads weights or moments."""
        self._owner = None if owner is None else weakref.ref(owner)
        self._loads = loads

    def __call__(self, caller: Any = None, *_: Any, **__: Any) -> None:
        owner = None if self._owner is None else self._owner()
        if owner is None or in_capture():
            return
        if self._loads:
            owner.loads(caller)
        else:
            owner.settle()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return _Hook()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, ()


def settles(hook: object) -> bool:
    """Whether ``hook`` of a module is one of these."""
    return isinstance(hook, _Hook)
