"""``generate`` on a prepared model: its first step, which reads the whole prompt, runs from a plan."""

from __future__ import annotations

import functools
import logging
import threading
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from disco_accel.errors import CaptureError
from disco_accel.integrate.hf.planned_prefill import planned_forward
from disco_accel.step.run.arguments import base_model
from disco_accel.step.run.observer import Fallback
from disco_accel.step.state.containers import OWN_MARK

if TYPE_CHECKING:
    from disco_accel.step.run.session import Session

logger = logging.getLogger("disco_accel")

_PATCH = "_disco_generation"
_PREFILL = "_prefill"
_CANDIDATES = "_get_candidate_generator"
"""The first methods that transformers' assisted and prompt-lookup decoding call."""


class _PatchedPrefill:
    """The state of a model's patched method; a copy of the model gets none."""

    def __init__(self, state: Session, model: torch.nn.Module, forward: Callable[..., Any]) -> None:
        self.state = state
        self.model = model
        self.forward = forward
        self.lock = threading.Lock()
        self.before: Callable[..., Any] | None = None
        self.threads: Counter[int] = Counter()
        """Those inside ``_prefill``, for which alone the instance's forward is another one."""

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return (_nothing, ())


def _nothing() -> None:
    return None


def generating_model(model: torch.nn.Module) -> torch.nn.Module:
    """The one whose ``generate`` does the work: PEFT's calls that of its base model, past its own forward."""
    return base_model(model)


def own_forward(state: Session, model: torch.nn.Module) -> Callable[..., Any]:
    """The unpatched forward of ``generating_model(model)``."""
    inner = generating_model(model)
    return state.calls.forward if inner is model else inner.forward


def install(state: Session, model: torch.nn.Module) -> None:
    """Patch the instance that generates; does nothing for a model that cannot."""
    inner = generating_model(model)
    if hasattr(inner, _PREFILL):
        inner.__dict__[_PATCH] = _PatchedPrefill(state, model, own_forward(state, model))
        inner.__dict__[_PREFILL] = functools.partial(_prefill, inner)
    if hasattr(inner, _CANDIDATES):
        inner.__dict__[_CANDIDATES] = functools.partial(_candidates, inner)


def remove(model: torch.nn.Module) -> None:
    """Undo ``install``."""
    inner = generating_model(model)
    inner.__dict__.pop(_PATCH, None)
    inner.__dict__.pop(_PREFILL, None)
    inner.__dict__.pop(_CANDIDATES, None)


def _prefill(self: Any, *args: Any, **kwargs: Any) -> Any:
    """As GenerationMixin's, every forward in it planned."""
    patch: _PatchedPrefill | None = self.__dict__.get(_PATCH)
    if patch is None:
        return type(self)._prefill(self, *args, **kwargs)
    thread = threading.get_ident()

    def forward(*positional: Any, **named: Any) -> Any:
        # Another thread may evaluate the same model.
        if threading.get_ident() not in patch.threads or positional:
            return patch.forward(*positional, **named)
        return _planned_or_own(patch, named)

    with patch.lock:
        if not patch.threads:
            patch.before = self.__dict__.get("forward")
            routed = functools.update_wrapper(forward, patch.forward)
            setattr(routed, OWN_MARK, True)
            self.__dict__["forward"] = routed
        patch.threads[thread] += 1
    try:
        return type(self)._prefill(self, *args, **kwargs)
    finally:
        with patch.lock:
            patch.threads[thread] -= 1
            if not patch.threads[thread]:
                del patch.threads[thread]
            if not patch.threads:
                if patch.before is None:
                    self.__dict__.pop("forward", None)
                else:
                    self.__dict__["forward"] = patch.before


def _planned_or_own(patch: _PatchedPrefill, kwargs: dict[str, Any]) -> Any:
    """A prefill that cannot be planned runs as the decoding steps do, and says so once."""
    patch.state.calls.casts.own_forward()
    try:
        return planned_forward(patch.state, patch.model, patch.forward, kwargs)
    except CaptureError as error:
        _fall_back(patch.state, str(error))
        kwargs = patch.state.placement.batch(kwargs)
        with patch.state.placement.visiting():
            return patch.forward(**kwargs)


def _candidates(self: Any, *args: Any, **kwargs: Any) -> Any:
    """As GenerationMixin's. Decoding that guesses tokens has no first step of its own that could be planned."""
    patch: _PatchedPrefill | None = self.__dict__.get(_PATCH)
    if patch is not None:
        _fall_back(
            patch.state,
            "assistant_model, prompt_lookup_num_tokens: decoding that guesses tokens reads the prompt together with "
            "its first guess; leave them out to read it from a plan",
        )
    return type(self)._get_candidate_generator(self, *args, **kwargs)


def _fall_back(state: Session, reason: str) -> None:
    if reason not in state.reports.counts.fallbacks:
        logger.warning("generate's first step runs without a plan: %s", reason)
    state.reports.on_fallback(Fallback.PREFILL, reason)
