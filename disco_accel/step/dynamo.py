"""``torch.compile`` beside plans: a planned step is never traced by Dynamo, and never holds compiled code."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import torch
from torch._dynamo import config as dynamo_config
from torch._dynamo import eval_frame
from torch._dynamo.eval_frame import OptimizedModule

logger = logging.getLogger("disco_accel")

_P = ParamSpec("_P")
_R = TypeVar("_R")
_REASON = "this model's steps run from disco_accel's plans, which take the place of torch.compile; leave fullgraph out"


# Private, and younger than the oldest torch that we run on.
_in_optimized_module: Callable[[], bool] = getattr(eval_frame, "_is_in_optimized_module", lambda: False)


def not_compiled(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """``function``, run by Python as it is wherever it is called from, and all that it calls.

    Code around it that the user compiles is cut in two at the call.
    """
    wrapped: Callable[_P, _R] = torch.compiler.disable(function, reason=_REASON)
    return wrapped


def plain_model(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside a result of ``torch.compile(model)``; any other model itself."""
    while isinstance(model, OptimizedModule):
        model = model._orig_mod
    return model


@contextmanager
def compiled_parts_traced() -> Iterator[None]:
    """Layers and functions that are compiled each for themselves are traced as if they were not, in this thread."""
    with dynamo_config.patch(disable=True, error_on_nested_fx_trace=False):
        yield


def compiled_parts(model: torch.nn.Module) -> list[str]:
    """Names of the modules that ``torch.compile`` or ``Module.compile`` was called on; the model's own is ``''``."""
    return [name for name, m in model.named_modules() if isinstance(m, OptimizedModule) or _compiled_in_place(m)]


def _compiled_in_place(module: torch.nn.Module) -> bool:
    call = getattr(module, "_compiled_call_impl", None)
    # ``step/run/inner_forwards.py`` has calls of its own there.
    return call is not None and not getattr(call, "_disco", False)


def compiled_note(model: torch.nn.Module) -> str | None:
    """A message for the user of a model that is compiled, or in parts, or called through ``torch.compile``; None for
    any other."""
    parts = compiled_parts(model)
    whole = "" in parts or bool(_in_optimized_module())
    if not whole and not parts:
        return None
    what = "this model is compiled" if whole else f"{parts[0]} is compiled" + _others(len(parts) - 1)
    return (
        f"torch.compile: {what}; planned steps run uncompiled, with eager mode's bits. Leave torch.compile and "
        "torch_compile out: plans take their place"
    )


def _others(count: int) -> str:
    return f", and so are {count} other modules" if count else ""
