"""Autocast as a step meets it: the state at the call, and a trace that starts as eager would."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

_DEVICE = "cpu"


@dataclass(frozen=True, slots=True)
class AutocastState:
    """``dtype`` is torch's name without prefix; ``cache``: casts of trainable weights are shared inside a region."""

    enabled: bool
    dtype: str
    cache: bool


def autocast_state() -> AutocastState:
    """Autocast of this thread, now."""
    enabled = torch.is_autocast_enabled(_DEVICE)
    dtype = str(torch.get_autocast_dtype(_DEVICE)).removeprefix("torch.") if enabled else ""
    return AutocastState(enabled, dtype, enabled and torch.is_autocast_cache_enabled())


@contextmanager
def outside_autocast() -> Iterator[None]:
    """As if no autocast region were open, which is where a backward runs.

    A region inside it is an outermost one: its cast cache starts empty at each checkpointed segment's
    recomputation, as it does in eager mode.
    """
    depth = torch.autocast_increment_nesting() - 1
    for _ in range(depth + 1):
        torch.autocast_decrement_nesting()
    enabled = torch.is_autocast_enabled(_DEVICE)
    torch.set_autocast_enabled(_DEVICE, False)
    try:
        yield
    finally:
        torch.set_autocast_enabled(_DEVICE, enabled)
        for _ in range(depth):
            torch.autocast_increment_nesting()


@contextmanager
def autocast_region(state: AutocastState) -> Iterator[None]:
    """A region with ``state``; none at all where autocast is off."""
    with ExitStack() as stack:
        if state.enabled:
            dtype = getattr(torch, state.dtype)
            stack.enter_context(torch.autocast(_DEVICE, dtype=dtype, enabled=True, cache_enabled=state.cache))
        yield
