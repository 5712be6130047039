"""Forwards of a module inside a prepared model, called past it: they run without a plan, are counted and told once."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from disco_accel.step.capture_lock import in_capture
from disco_accel.step.dynamo import not_compiled
from disco_accel.step.run.observer import Fallback
from disco_accel.step.run.reports import Reports

_CALL = "_compiled_call_impl"
"""Set, as ``Module.compile`` sets it, it runs in place of ``_call_impl``. Tracing sees no hook there, and it is neither
copied nor pickled with the module."""
_HALF = 0.5
_thread = threading.local()


@contextmanager
def own_forward_runs() -> Iterator[None]:
    """Around a forward that runs without a plan and is accounted for: calls inside it are its own."""
    before = getattr(_thread, "inside", False)
    _thread.inside = True
    try:
        yield
    finally:
        _thread.inside = before


def watch_inner_forwards(reports: Reports, model: torch.nn.Module) -> Callable[[], None]:
    """Watch those modules of ``model`` that hold most of it. A call of the result gives them their own calls again; a
    module that the user has compiled since stays so."""
    watched: list[tuple[weakref.ref[torch.nn.Module], Any, Any]] = []
    reference = weakref.ref(reports)
    for name, module in _inner_models(model):
        before = module.__dict__.get(_CALL)
        module.__dict__[_CALL] = call = _watch(reference, name, module, before)
        watched.append((weakref.ref(module), call, before))

    def remove() -> None:
        for known, call, before in watched:
            module = known()
            if module is not None and module.__dict__.get(_CALL) is call:
                module.__dict__[_CALL] = before
        watched.clear()

    return remove


def _watch(
    reports: weakref.ref[Reports], name: str, module: torch.nn.Module, before: Callable[..., Any] | None
) -> Callable[..., Any]:
    original = before or module._call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or in_capture() or getattr(_thread, "inside", False):
            return original(*args, **kwargs)
        _count(reports, name)
        with own_forward_runs():
            return original(*args, **kwargs)

    # One that ``Module.compile`` has put there is still compiled.
    call._disco = before is None  # type: ignore[attr-defined]
    return call


@not_compiled
def _count(reference: weakref.ref[Reports], name: str) -> None:
    reports = reference()
    if reports is None:
        return
    reason = (
        f"{name}: called itself, past the model that is prepared, so that it runs without a plan and outside the "
        "memory budget; call the prepared model, or prepare this module in its place"
    )
    reports.on_fallback(Fallback.INNER_FORWARD, reason)
    reports.say_once(reason)


def _inner_models(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Modules below ``model``, by name, that hold at least half of its parameters: a user may take them for it."""
    whole = sum(p.numel() for p in model.parameters())
    todo = [("", model)]
    while todo:
        above, module = todo.pop()
        for child_name, child in module.named_children():
            name = f"{above}.{child_name}" if above else child_name
            most = sum(p.numel() for p in child.parameters()) >= _HALF * whole
            if most and not isinstance(child, (torch.nn.ModuleList, torch.nn.Sequential)):
                yield name, child
                todo.append((name, child))
