"""Why a budget that is not a size is as large as it is, in words for the user."""

from __future__ import annotations

from disco_accel.config.settings import DiscoConfig, Settings, local_processes
from disco_accel.host_limits import HostLimit, host_limits, own_bytes
from disco_accel.native.device_types import DEVICE_TYPES
from disco_accel.sizes import format_size


def budget_why(config: DiscoConfig, settings: Settings) -> str:
    """One line about ``memory_budget: auto`` or a share, as ``config.resolve()`` made it to ``settings``, and about the
    memory that is in use now; "" for a size, and for a store's."""
    asked, kind = config.memory_budget, DEVICE_TYPES[settings.device]
    if not isinstance(asked, str) or asked == "shared":
        return ""
    share = f"{kind.auto_share:.0%}" if asked == "auto" else asked
    why = _of_gpu(settings, share) if kind.separate_memory else _of_host(settings, share)
    return f"memory_budget {asked}: {format_size(settings.memory_budget)} is {why}"


def _of_gpu(settings: Settings, share: str) -> str:
    from disco_accel.native.backend import backend_of_kind

    backends = [backend_of_kind(settings.device, index) for index in settings.gpus or (None,)]
    smallest = min(backends, key=lambda each: each.memory_bytes())
    total, free, own = smallest.memory_bytes(), smallest.free_bytes(), smallest.tensor_bytes()[0]
    among = ", the smallest of its devices" if len(backends) > 1 else ""
    return (
        f"{share} of {smallest.resolve()}'s {format_size(total)}{among}; the rest stays for the driver's context and "
        f"libraries. {format_size(max(0, total - free - own))} are in use now outside of this process's tensors"
        f"{_if_less(free + own, settings)}"
    )


def _of_host(settings: Settings, share: str) -> str:
    held = own_bytes()

    def taken(limit: HostLimit) -> int:
        return max(0, limit.total - limit.left - held)

    lowest = min(host_limits(), key=lambda limit: limit.total)
    sharers = {"devices": settings.devices, "processes": local_processes()}
    each = "".join(f", for each of {count} {name}" for name, count in sharers.items() if count > 1)
    return (
        f"{share} of {format_size(lowest.total)}, {lowest.name}{each}; the rest stays for weights, which lie in host "
        f"memory, and for other programs, which use {format_size(taken(lowest))} now"
        f"{_if_less(lowest.total - taken(lowest), settings)}"
    )


def _if_less(there: int, settings: Settings) -> str:
    """What to do where only ``there`` bytes can be had."""
    if there >= settings.memory_budget:
        return ""
    return f": only {format_size(there)} can be had, so set memory_budget to less, or end what uses the rest"
