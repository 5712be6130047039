"""A ``GradScaler`` of a device beside gradients on the host.

PyTorch copies the scale, and whether a gradient was infinite, to the gradients' device without waiting for the copies:
right between devices, whose streams wait for each other, but a kernel of the host would read, or write, too early.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.amp import grad_scaler

from disco_accel.native.backend import is_host

_FUSED = ("grad_scale", "found_inf")
"""What a scaler leaves on a fused optimizer, around its ``step()``."""


@functools.cache
def wait_for_scalers() -> None:
    """From now on the copies that scalers make on the host have arrived when they are used."""
    replicator: Any = grad_scaler._MultiDeviceReplicator
    get = replicator.get

    @functools.wraps(get)
    def get_arrived(self: Any, device: torch.device) -> torch.Tensor:
        made = self._per_device_tensors
        if is_host(device) and not self.master.is_cpu and made.get(device) is None:
            made[device] = self.master.to(device, copy=True)
        copied: torch.Tensor = get(self, device)
        return copied

    replicator.get = get_arrived


def bring_to_host(optimizer: torch.optim.Optimizer) -> None:
    """Have what a scaler left on ``optimizer``, whose step on the host begins, there."""
    for name in _FUSED:
        value = getattr(optimizer, name, None)
        if isinstance(value, torch.Tensor) and not value.is_cpu:
            setattr(optimizer, name, value.cpu())
