"""Puts an optimizer's ``step()`` off until the next forward of its model, and does it by hand when anybody may look.

``step()`` itself runs, with nothing to do: before it, the gradients of the model's weights are taken away, and given
back behind it. The update is *pending* from then on. A planned step takes it over; whatever else reads or writes the
weights or the optimizer's state through their libraries *settles* it first: any other forward, ``state_dict`` and
``load_state_dict`` of the model, its modules and the optimizer, the next ``step()``.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from disco_accel.errors import ExecutionError, StatesTorn
from disco_accel.native.host_memory import WatchedTensors, expect_rewrite, writes_are_watched
from disco_accel.step.capture_lock import in_capture
from disco_accel.step.trained_weights import before_updates
from disco_accel.step.update.pending_update import PendingUpdate, parts_of

_TORN = (
    "update: deferred: a forward ended in the middle of the update of the step before: some weights have it and others "
    "do not. Load a checkpoint of the model and of its optimizer (load_state_dict)"
)

_deferring: weakref.WeakSet[Deferral] = weakref.WeakSet()


class Deferral:
    """The updates of one prepared model that are put off. ``on_host``: whether a tensor is one of its trained weights;
    ``watchable``: whether the system can tell that a gradient was written to.

    Used under the session's lock, which ``lock`` is.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        on_host: Callable[[torch.Tensor], bool],
        watchable: Callable[[torch.Tensor], bool],
        lock: Any,
        say: Callable[[str], None],
        ready: Callable[[torch.optim.Optimizer], object] | None = None,
    ) -> None:
        """``ready`` makes an optimizer's state what its next update needs."""
        self._on_host, self._watchable, self._lock, self._say = on_host, watchable, lock, say
        self._ready = ready
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._handles: list[Any] = []
        self._gradients: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Parameters whose gradients are away while ``step()`` runs, with these."""
        self.pending: PendingUpdate | None = None
        self.planned = self.by_hand = 0
        """Updates that plans did, and that were settled."""
        self.seen = False
        """Whether an optimizer's ``step()`` was."""
        self._watch: WatchedTensors | None = None
        """The parameters and gradients of the pending update, which nobody may write to."""
        self._updating: weakref.ref[torch.optim.Optimizer] | None = None
        """Whose update is pending, or was the last to be."""
        self._torn = False
        """Whether an update has changed some weights, will not change the rest, and none were loaded since."""
        self._torn_optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        """Those whose moments such an update has left, and that have not loaded any since."""
        settle, loads = _Hook(self), _Hook(self, loads=True)
        self._model = weakref.ref(model)
        for module in model.modules():
            self._handles.append(module.register_state_dict_pre_hook(settle))
            self._handles.append(module.register_load_state_dict_pre_hook(loads))
            if any(parameter.requires_grad for parameter in module.parameters(recurse=False)):
                self._handles.append(module.register_forward_pre_hook(settle))
        _deferring.add(self)
        _hook_all_optimizers()

    def settle(self) -> None:
        """Do the update that is pending now.

        Raises:
            ExecutionError: what it needs was changed since; that update is lost.
            StatesTorn: an update before ended in the middle.
        """
        if self._torn:
            raise StatesTorn(_TORN)
        if self.pending is None:
            return
        with self._lock:
            pending = self.checked()
            if pending is not None:
                self.pending = None
                pending.run()
                self.by_hand += 1

    def checked(self) -> PendingUpdate | None:
        """The pending update, whose weights are about to be written. Raises as ``settle``."""
        if self._torn:
            raise StatesTorn(_TORN)
        pending = self.pending
        if pending is None:
            return None
        watch, self._watch = self._watch, None
        try:
            pending.check()
            if watch is not None and watch.changed():
                raise ExecutionError(
                    "update: deferred: a weight or a gradient was written to after optimizer.step() and before the "
                    "next forward, when its update runs: write behind the next forward, clear gradients by "
                    "zero_grad(set_to_none=True), or use update: step"
                )
        except ExecutionError:
            self.pending = None
            raise
        expect_rewrite([tensor for part in pending.parts for tensor in (part.parameter, part.gradient)])
        return pending

    def taken(self) -> None:
        """A plan has done the update that is pending."""
        self.pending = None
        self.planned += 1

    def torn(self) -> None:
        """A plan has done some of the pending update and will not do the rest."""
        self.pending = None
        self._torn = True
        optimizer = None if self._updating is None else self._updating()
        if optimizer is not None:
            self._torn_optimizers.add(optimizer)

    def loads(self, loaded: torch.nn.Module | torch.optim.Optimizer) -> None:
        """``loaded`` is about to load weights or moments: all of its own, if it is the model itself or an optimizer."""
        if loaded is self._model():
            self._torn = False
        elif isinstance(loaded, torch.optim.Optimizer):
            self._torn_optimizers.discard(loaded)
        if not self._torn:
            self.settle()

    def remove(self) -> None:
        """Settle, and put nothing off any more."""
        _deferring.discard(self)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.settle()

    def updates(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether ``optimizer`` has weights of this model."""
        return any(self._on_host(p) for group in optimizer.param_groups for p in group["params"])

    def before_step(self, optimizer: torch.optim.Optimizer, closure: bool) -> None:
        """``optimizer.step()`` is about to run."""
        if not self.updates(optimizer):
            return
        self.seen = True
        with self._lock:
            if optimizer in self._torn_optimizers:
                raise StatesTorn(_TORN)
            self.settle()
            if self._ready is not None and not closure:
                self._ready(optimizer)
            parts = "its step() is given a closure" if closure else parts_of(optimizer, self._on_host)
            if isinstance(parts, str):
                self._say(f"update: deferred has no effect: {parts}; optimizer.step() updates as it is called")
                return
            if not parts:
                return
            self._hook(optimizer)
            self._updating = weakref.ref(optimizer)
            torch._foreach_add_([part.steps for part in parts], 1)
            self.pending = PendingUpdate.of(parts)
            if writes_are_watched():
                gradients = [part.gradient for part in parts if self._watchable(part.gradient)]
                # Accumulation has written to them since the watch of the step before.
                expect_rewrite(gradients)
                self._watch = WatchedTensors([*(part.parameter for part in parts), *gradients])
            self._gradients = [(part.parameter, part.gradient) for part in parts]
            for parameter, _ in self._gradients:
                parameter.grad = None

    def after_step(self) -> None:
        """``optimizer.step()`` has run."""
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        self._gradients.clear()

    def _hook(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer not in self._optimizers:
            self._optimizers.add(optimizer)
            self._handles.append(optimizer.register_state_dict_pre_hook(_Hook(self)))
            self._handles.append(optimizer.register_load_state_dict_pre_hook(_Hook(self, loads=True)))


class _Hook:
    """A hook that settles; that of a copied or stored module does nothing."""

    def __init__(self, deferral: Deferral | None = None, *, loads: bool = False) -> None:
        """``loads``: the call that it hooks loads weights or moments."""
        self._deferral = None if deferral is None else weakref.ref(deferral)
        self._loads = loads

    def __call__(self, owner: Any = None, *_: Any, **__: Any) -> None:
        deferral = None if self._deferral is None else self._deferral()
        if deferral is None or in_capture():
            return
        if self._loads:
            deferral.loads(owner)
        else:
            deferral.settle()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        # A module's hooks are copied, and stored, before the modules inside it with their weights.
        if not self._loads:
            self()
        return _Hook()

    def __reduce__(self) -> tuple[Any, ...]:
        if not self._loads:
            self()
        return _Hook, ()


@functools.cache
def _hook_all_optimizers() -> None:
    before_updates.append(_settle_before)
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _settle_before(optimizer: torch.optim.Optimizer) -> None:
    for deferral in list(_deferring):
        if deferral.updates(optimizer) and deferral.pending is not None:
            deferral.settle()


def _before_step(optimizer: torch.optim.Optimizer, args: Iterable[Any], kwargs: dict[str, Any]) -> None:
    # The first of the arguments is the optimizer itself.
    closure = next(iter((*args, None)[1:]), None) or kwargs.get("closure")
    for deferral in list(_deferring):
        deferral.before_step(optimizer, closure is not None)


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    del optimizer
    for deferral in list(_deferring):
        deferral.after_step()
