"""The self-check of all devices before the first plan that a training or a prefill makes for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from disco_accel.config.settings import DiscoConfig
from disco_accel.native.backend import backend_of
from disco_accel.native.out_of_memory import typed_out_of_memory
from disco_accel.selfcheck.first_use import Rates, require_passed
from disco_accel.selfcheck.self_check import LINK_BYTES
from disco_accel.step.capture_lock import capturing

_SHARE = 8
"""The part of the budget that measuring the link may take is one in so many."""


@typed_out_of_memory("the self-check of the device")
def require_self_check(device: torch.device, config: DiscoConfig, budget: int, gpus: Sequence[int] = ()) -> Rates:
    """Check ``device`` unless it has passed before or ``config`` says not to. ``budget``: bytes of each device.
    ``gpus``: indices of those that share its steps, itself included; each is checked by itself. Return the rates of
    their links, of each the least; none where none is known.

    Raises:
        SelfCheckFailed: one has not; the message says the difference, and names the file for a bug report.
    """
    if config.self_check == "off" or not backend_of(device).needs_self_check:
        return {}
    link_bytes = min(LINK_BYTES, max(1 << 20, budget // _SHARE & ~4095))
    found: list[Rates] = []
    for each in dict.fromkeys([device, *(torch.device(device.type, index) for index in gpus)]):
        with backend_of(each).current():
            found.append(require_passed(each, config.plan_cache, tracing=capturing, link_bytes=link_bytes))
    known = set.intersection(*(set(rates) for rates in found))
    return {name: min(rates[name] for rates in found) for name in sorted(known)}
