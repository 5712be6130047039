"""``generate`` on a prepared model: the prompt and each token after it run from plans, where their shapes allow it."""

from __future__ import annotations

import functools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from disco_accel.errors import BudgetTooSmall, CaptureError, ConfigError
from disco_accel.integrate.hf.planned_forward import planned_forward
from disco_accel.integrate.hf.planned_prefill import planned_prompt
from disco_accel.integrate.hf.static_cache import is_static
from disco_accel.native.backend import is_host
from disco_accel.step.capture_lock import in_capture
from disco_accel.step.dynamo import not_compiled
from disco_accel.step.run.arguments import base_model
from disco_accel.step.run.observer import Fallback
from disco_accel.step.state.containers import OWN_MARK

if TYPE_CHECKING:
    from disco_accel.step.run.session import Session

logger = logging.getLogger("disco_accel")

_PATCH = "_disco_generation"
_PREFILL = "_prefill"
_GENERATE = "generate"
_CANDIDATES = "_get_candidate_generator"
"""The first methods that transformers' assisted and prompt-lookup decoding call."""
_GUESSES = (
    "assistant_model, prompt_lookup_num_tokens: decoding that guesses tokens reads several at once, each time others, "
    'and the prompt with the first; leave them out, and pass cache_implementation="static", to decode from plans'
)
_COMPILES = "_valid_auto_compile_criteria"
"""Whether transformers compiles the forward; a plan takes the place of that."""


class _PatchedGeneration:
    """The state of a model's patched methods; a copy of the model gets none."""

    def __init__(self, state: Session, model: torch.nn.Module, forward: Callable[..., Any]) -> None:
        self.state = state
        self.model = model
        self.forward = forward
        self.lock = threading.Lock()
        self.before: Callable[..., Any] | None = None
        self.threads: Counter[int] = Counter()
        """Those inside a patched method, for which alone the instance's forward is another one."""
        self.prompts: Counter[int] = Counter()
        """Those inside ``_prefill``."""
        self.guessing: set[int] = set()
        """Those whose decoding guesses tokens: each of its forwards has another shape."""

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
        inner.__dict__[_PATCH] = _PatchedGeneration(state, model, own_forward(state, model))
        inner.__dict__[_PREFILL] = functools.partial(_prefill, inner)
        own: Any = inner.generate
        inner.__dict__[_GENERATE] = functools.update_wrapper(functools.partial(_generate, inner), own)
        if hasattr(inner, _COMPILES):
            inner.__dict__[_COMPILES] = _never
    if hasattr(inner, _CANDIDATES):
        inner.__dict__[_CANDIDATES] = functools.partial(_candidates, inner)


def remove(model: torch.nn.Module) -> None:
    """Undo ``install``."""
    inner = generating_model(model)
    for name in (_PATCH, _PREFILL, _GENERATE, _COMPILES, _CANDIDATES):
        inner.__dict__.pop(name, None)


def _never(*_args: Any, **_kwargs: Any) -> bool:
    return False


def _generate(self: Any, *args: Any, **kwargs: Any) -> Any:
    """As GenerationMixin's, every forward in it planned where it can be."""
    patch: _PatchedGeneration | None = self.__dict__.get(_PATCH)
    if patch is None:
        return type(self).generate(self, *args, **kwargs)
    with _routed(self, patch):
        return type(self).generate(self, *args, **kwargs)


def _prefill(self: Any, *args: Any, **kwargs: Any) -> Any:
    """As GenerationMixin's, every forward in it planned, for the last token's logits alone."""
    patch: _PatchedGeneration | None = self.__dict__.get(_PATCH)
    if patch is None:
        return type(self)._prefill(self, *args, **kwargs)
    thread = threading.get_ident()
    with _routed(self, patch):
        patch.prompts[thread] += 1
        try:
            return type(self)._prefill(self, *args, **kwargs)
        finally:
            patch.prompts[thread] -= 1


@contextmanager
def _routed(self: Any, patch: _PatchedGeneration) -> Iterator[None]:
    """Inside, forwards of this thread on ``self`` are planned."""
    thread = threading.get_ident()

    @not_compiled
    def forward(*positional: Any, **named: Any) -> Any:
        # Another thread may evaluate the same model.
        caller = threading.get_ident()
        if caller not in patch.threads or positional or torch.is_grad_enabled() or in_capture():
            return patch.forward(*positional, **named)
        if caller in patch.guessing:
            _fall_back(patch.state, _GUESSES, "decoding")
            return _own(patch, named)
        return _planned_or_own(patch, named, prompt=patch.prompts[caller] > 0)

    with patch.lock:
        if not patch.threads:
            patch.before = self.__dict__.get("forward")
            routed = functools.update_wrapper(forward, patch.forward)
            setattr(routed, OWN_MARK, True)
            self.__dict__["forward"] = routed
        patch.threads[thread] += 1
    try:
        yield
    finally:
        with patch.lock:
            patch.threads[thread] -= 1
            if not patch.threads[thread]:
                del patch.threads[thread]
                patch.guessing.discard(thread)
            if not patch.threads:
                if patch.before is None:
                    self.__dict__.pop("forward", None)
                else:
                    self.__dict__["forward"] = patch.before


def _planned_or_own(patch: _PatchedGeneration, kwargs: dict[str, Any], *, prompt: bool) -> Any:
    """A forward that cannot be planned runs as it is, and says so once."""
    state = patch.state
    state.calls.casts.own_forward()
    try:
        if prompt and not is_static(kwargs.get("past_key_values")):
            return planned_prompt(state, patch.model, patch.forward, kwargs)
        given = {name: value for name, value in kwargs.items() if value is not None}
        if "past_key_values" not in given:
            raise CaptureError("use_cache: without a cache each token reads all before it, in another shape each time")
        return planned_forward(state, patch.model, given, patch.forward)
    except CaptureError as error:
        _fall_back(state, str(error), "first step" if prompt else "decoding")
    except BudgetTooSmall as error:
        if prompt:
            raise
        _fall_back(state, str(error), "decoding")
    return _own(patch, kwargs)


def _own(patch: _PatchedGeneration, kwargs: dict[str, Any]) -> Any:
    patch.state.calls.casts.own_forward()
    kwargs = patch.state.placement.batch(kwargs)
    with patch.state.placement.visiting():
        return patch.forward(**kwargs)


def _candidates(self: Any, *args: Any, **kwargs: Any) -> Any:
    """As GenerationMixin's. Decoding that guesses tokens has no first step of its own that could be planned."""
    patch: _PatchedGeneration | None = self.__dict__.get(_PATCH)
    if patch is not None:
        ids = kwargs.get("input_ids")
        if isinstance(ids, torch.Tensor) and is_host(ids.device) != is_host(self.device):
            # transformers compares tokens of both devices, and ends in its midst.
            raise ConfigError(
                f"input_ids: on {ids.device}, but decoding that guesses tokens (assistant_model, "
                f"prompt_lookup_num_tokens) takes them where the weights are; pass input_ids.to('{self.device}')"
            )
        patch.guessing.add(threading.get_ident())
    return type(self)._get_candidate_generator(self, *args, **kwargs)


def _fall_back(state: Session, reason: str, what: str) -> None:
    if reason not in state.reports.counts.fallbacks:
        logger.warning("generate's %s runs without a plan: %s", what, reason)
    state.reports.on_fallback(Fallback.FORWARD, reason)
