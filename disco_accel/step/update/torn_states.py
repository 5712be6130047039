"""Weights and moments of which an update has changed some and will not change the rest."""

from __future__ import annotations

import weakref

import torch

from disco_accel.errors import StatesTorn

_TORN = (
    "update: deferred: a forward ended in the middle of the update of the step before: some weights have it and others "
    "do not. Load a checkpoint of the model and of its optimizer (load_state_dict)"
)


class TornStates:
    """Those of one model and its optimizers, until they load others."""

    def __init__(self) -> None:
        self._weights = False
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        """Those whose moments are torn."""
        self._updating: weakref.ref[torch.optim.Optimizer] | None = None

    def begins(self, optimizer: torch.optim.Optimizer) -> None:
        """The next update is one of ``optimizer``."""
        self._updating = weakref.ref(optimizer)

    def tear(self) -> None:
        """The update has ended in the middle."""
        self._weights = True
        optimizer = None if self._updating is None else self._updating()
        if optimizer is not None:
            self._optimizers.add(optimizer)

    def loads(self, loaded: torch.nn.Module | torch.optim.Optimizer, model: torch.nn.Module | None) -> None:
        """``loaded`` is about to load weights or moments: all of its own, if it is ``model`` or an optimizer."""
        if loaded is model:
            self._weights = False
        elif isinstance(loaded, torch.optim.Optimizer):
            self._optimizers.discard(loaded)

    @property
    def weights(self) -> bool:
        """Whether weights are torn."""
        return self._weights

    def require_whole(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Raise StatesTorn if weights are torn, or moments of ``optimizer``."""
        if self._weights or (optimizer is not None and optimizer in self._optimizers):
            raise StatesTorn(_TORN)
