"""Autocast as a step meets it: the state at the call, and a trace that starts as eager would."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

from disco_accel.native.backend import DEVICE_TYPES


@dataclass(frozen=True, slots=True)
class AutocastState:
    """``dtypes``: device type and dtype (torch's name without prefix) of each kind of region that is open.

    ``cache``: casts of trainable weights are shared inside a region.
    """

    dtypes: tuple[tuple[str, str], ...]
    cache: bool


def autocast_state() -> AutocastState:
    """Autocast of this thread, now."""
    dtypes = tuple(
        (device, str(torch.get_autocast_dtype(device)).removeprefix("torch."))
        for device in DEVICE_TYPES
        if torch.is_autocast_enabled(device)
    )
    return AutocastState(dtypes, bool(dtypes) and torch.is_autocast_cache_enabled())


@contextmanager
def outside_autocast() -> Iterator[None]:
    """As if no autocast region were open, which is where a backward runs.

    A region inside it is an outermost one: its cast cache starts empty at each checkpointed segment's
    recomputation, as it does in eager mode.
    """
    depth = torch.autocast_increment_nesting() - 1
    for _ in range(depth + 1):
        torch.autocast_decrement_nesting()
    enabled = [device for device in DEVICE_TYPES if torch.is_autocast_enabled(device)]
    for device in enabled:
        torch.set_autocast_enabled(device, False)
    try:
        yield
    finally:
        for device in enabled:
            torch.set_autocast_enabled(device, True)
        for _ in range(depth):
            torch.autocast_increment_nesting()


@contextmanager
def autocast_region(state: AutocastState) -> Iterator[None]:
    """A region with ``state``; none at all where autocast is off."""
    with ExitStack() as stack:
        for device, dtype in state.dtypes:
            stack.enter_context(torch.autocast(device, dtype=getattr(torch, dtype), cache_enabled=state.cache))
        yield
