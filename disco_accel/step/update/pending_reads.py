"""Weights and moments whose update is pending: code that reads one of them has the update done first.

Two fences, both lifted before the update runs. The class of each tensor is changed to one whose ``__torch_function__``
settles the update: every function and method of PyTorch goes through it, in any thread. And the tensor's storage
refuses access to its data, with a message that names the remedy. That is for readers that PyTorch's functions do not
see: extensions in C++, and other tensors over the same storage, as ``parameter.data`` made earlier is one.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from types import GetSetDescriptorType
from typing import Any

import torch

from disco_accel.native.host_memory import first_held_elsewhere
from disco_accel.step.capture_lock import in_capture
from disco_accel.step.dynamo import not_compiled

_REFUSED = (
    "update: deferred: the update of this weight or moment has not run yet, and it is read past the tensor that has it "
    "(by parameter.data kept from before optimizer.step(), or by an extension): call disco_accel.settle(model) first, "
    "or use update: step"
)

_LOOK_AGAIN = 0.01
"""Seconds."""

not_intercepted: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunctionSubclass
"""Around code of ours that may read pending tensors and calls nobody else's."""

_T: Any = torch.Tensor
_PROPERTIES = "dtype device layout shape ndim itemsize nbytes grad_fn output_nr _version _backward_hooks"
_KINDS = tuple(n for n in dir(_T) if n.startswith("is_") and isinstance(getattr(_T, n), GetSetDescriptorType))
_WRITABLE = "grad", "_grad", "requires_grad"
_METHODS = (
    "__hash__ size stride dim numel nelement element_size storage_offset is_contiguous is_floating_point is_complex "
    "is_inference requires_grad_ register_hook register_post_accumulate_grad_hook get_device"
)
_WITHOUT_VALUES = frozenset(
    [
        *(getattr(_T, name).__get__ for name in (*_PROPERTIES.split(), *_KINDS)),
        *(getattr(getattr(_T, name), do) for name in _WRITABLE for do in ("__get__", "__set__")),
        _T.grad.__delete__,
        *(getattr(_T, name) for name in _METHODS.split()),
    ]
)
"""Functions that read and write no element of their tensors; ``zero_grad`` and optimizers call them all the time."""


class PendingReads:
    """The tensors of one pending update. ``settle`` does the update, and lifts the fences.

    Used under the session's lock, which ``lock`` is.
    """

    def __init__(self, settle: Callable[[], object], lock: Any) -> None:
        self._settle, self._lock = settle, lock
        self._classes: dict[type, type] = {}
        self._tensors: list[torch.Tensor] = []
        self._owner: int | None = None
        """The thread that does the update, which reads the tensors as they are."""

    def fence(self, tensors: Iterable[torch.Tensor]) -> int:
        """From ``close`` on the first reader of one of ``tensors`` settles. Until then this thread alone may read.

        Returns which of them is the first whose memory something else holds, which reads past the fences, or -1.
        """
        self._owner, self._tensors = threading.get_ident(), list(tensors)
        for tensor in self._tensors:
            tensor.__class__ = self._class_of(type(tensor))
        # Behind the first fence nobody gets hold of their memory unnoticed.
        with not_intercepted():
            return first_held_elsewhere(self._tensors)

    def open(self) -> None:
        """Let this thread read and write the tensors; functions of PyTorch in other threads wait for ``lift``."""
        if self._tensors:
            self._owner = threading.get_ident()
            with not_intercepted():
                torch.ops.disco_accel.allow_data_access(self._tensors)

    def close(self) -> None:
        """Readers of this thread settle too."""
        with not_intercepted():
            torch.ops.disco_accel.refuse_data_access(self._tensors, _REFUSED)
        self._owner = None

    def lift(self) -> None:
        """The update is done, or lost: the tensors are ordinary ones."""
        self.open()
        for tensor in self._tensors:
            if issubclass(type(tensor), _Pending):
                tensor.__class__ = type(tensor).__base__  # type: ignore[assignment]
        self._tensors, self._owner = [], None

    def _class_of(self, base: type) -> type:
        if base not in self._classes:
            # The class holds the update, and the tensors the class: they live and die together.
            self._classes[base] = type(base.__name__, (_Pending, base), {"__module__": base.__module__, "reads": self})
        return self._classes[base]

    def opened_here(self) -> bool:
        """Whether the calling thread is the one that may read the tensors as they are."""
        return self._owner == threading.get_ident()

    def settle(self) -> None:
        """Raises as ``Deferral.settle``."""
        # Behind the lock: the thread that does the update now is done with it then. That thread may wait for this one
        # once it is done, to trace the model when this one's forward has ended.
        while not self._lock.acquire(timeout=_LOOK_AGAIN):
            if not self._tensors:
                return
        try:
            with torch.utils._python_dispatch._disable_current_modes(), torch._C.DisableTorchFunction():
                self._settle()
        finally:
            self.lift()
            self._lock.release()


class _Pending:
    """Beside a tensor's own class, in front of it."""

    reads: PendingReads

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # ``type(tensor)(data)`` makes an ordinary tensor.
        return cls.__mro__[2](*args, **kwargs)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _WITHOUT_VALUES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return _read(func, types, args, kwargs or {})


def reads_of(tensor: torch.Tensor) -> PendingReads | None:
    """The watch over reads of ``tensor``, if its update is pending."""
    kind = type(tensor)
    return kind.reads if issubclass(kind, _Pending) else None


@not_compiled
def _read(func: Callable[..., Any], types: Iterable[type], args: Any, kwargs: dict[str, Any]) -> Any:
    waiting = [
        kind.reads for kind in types if issubclass(kind, _Pending) and not (kind.reads.opened_here() or in_capture())
    ]
    for reads in waiting:
        reads.settle()
    if waiting:
        return func(*args, **kwargs)
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


class SettlingHooks:
    """Hooks of one model, and of the optimizers that update it, before which a pending update is done."""

    def __init__(
        self,
        model: torch.nn.Module,
        settle: Callable[[], None],
        loads: Callable[[torch.nn.Module | torch.optim.Optimizer], None],
    ) -> None:
        """Methods that are not kept alive: ``settle`` does the update; ``loads`` is called with a module or an
        optimizer that is about to load weights or moments."""
        self._settle, self._loads = _Hook(settle), _Hook(loads, loads=True)
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
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class _Hook:
    """A hook that settles; that of a copied or stored module does nothing."""

    def __init__(self, method: Callable[..., None] | None = None, *, loads: bool = False) -> None:
        """``loads``: ``method`` gets the module or optimizer."""
        self._method = None if method is None else weakref.WeakMethod(method)
        self._loads = loads

    def __call__(self, caller: Any = None, *_: Any, **__: Any) -> None:
        method = None if self._method is None else self._method()
        if method is not None and not in_capture():
            method(*((caller,) if self._loads else ()))

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, ()


def settles(hook: object) -> bool:
    """Whether ``hook`` of a module is one of these."""
    return isinstance(hook, _Hook)
