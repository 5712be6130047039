"""Trained weights whose optimizer updates them in host memory: the ones that may move into a host arena, and the end of
the watch over their pages.

Between a forward and its backward their pages are watched for writes. Rewriting watched pages takes seven times as
long as rewriting others, and splits huge ones, so the watch ends where one of PyTorch's optimizers begins to update.

A ``GradScaler`` of a device lies beside gradients on the host. PyTorch copies the scale, and whether a gradient was
infinite, to the gradients' device without waiting for the copies. That is right between devices, whose streams wait for
each other, but a kernel of the host would read, or write, too early.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.amp import grad_scaler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from disco_accel.capture.parts import named_parts
from disco_accel.errors import ConfigError
from disco_accel.native.backend import is_host
from disco_accel.native.host_memory import expect_rewrite, footprint

_FUSED = ("grad_scale", "found_inf")
"""Names of tensors that a scaler leaves on a fused optimizer, around its ``step()``."""

_updated: set[weakref.WeakMethod[Callable[[torch.Tensor], bool]]] = set()


def unwatch_updates_of(holds: Callable[[torch.Tensor], bool]) -> None:
    """From now on every optimizer says so before it updates weights that ``holds`` is true of, a method, as long as its
    object lives."""
    _updated.add(weakref.WeakMethod(holds, _updated.discard))
    _say_updates()
    _wait_for_scalers()


@functools.cache
def _say_updates() -> None:
    register_optimizer_step_pre_hook(_before_update)


before_updates: list[Callable[[torch.optim.Optimizer], None]] = []
"""Called before the watch over an optimizer's weights ends: writes of these calls are no change of the weights."""


def _before_update(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for call in before_updates:
        call(optimizer)
    for method in list(_updated):
        holds = method()
        updated = [p for group in optimizer.param_groups for p in group["params"] if holds is not None and holds(p)]
        expect_rewrite(updated)
        if updated:
            _bring_to_host(optimizer)


@functools.cache
def _wait_for_scalers() -> None:
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


def _bring_to_host(optimizer: torch.optim.Optimizer) -> None:
    """Move tensors of a scaler on ``optimizer``, whose step on the host begins, there."""
    for name in _FUSED:
        value = getattr(optimizer, name, None)
        if isinstance(value, torch.Tensor) and not value.is_cpu:
            setattr(optimizer, name, value.cpu())


def movable_weights(model: torch.nn.Module, in_arena: Callable[[torch.Tensor], bool]) -> list[torch.Tensor]:
    """Trained weights of ``model`` that are ``in_arena`` or whose memory is theirs alone, so that it can be another.

    One that shares its memory with a tensor from elsewhere, as a piece of a flat vector does, stays where it is:
    a write there is one to the weight.

    Raises:
        ConfigError: such a weight is not on the host.
    """
    weights = {p.name: p.tensor for p in named_parts(model) if p.requires_grad}
    shared = _shared(t for t in weights.values() if not in_arena(t))
    for name, tensor in weights.items():
        if id(tensor) in shared and not tensor.is_cpu:
            raise ConfigError(
                f"{name}: shares its memory on {tensor.device} with another tensor, so that it cannot live on the "
                "host; use optimizer: device"
            )
    return [t for t in weights.values() if id(t) not in shared]


def _shared(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Ids of those whose memory somebody else knows, or another of them overlaps."""
    by_storage: dict[Any, list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        by_storage[tensor.untyped_storage()._cdata].append(tensor)
    return {id(t) for group in by_storage.values() if not _ours_alone(group) for t in group}


def _ours_alone(group: list[torch.Tensor]) -> bool:
    storage: Any = group[0].untyped_storage()
    # Its own Python object counts too. One that cannot be resized is a file's, another library's, or was shown it.
    if torch._C._storage_Use_Count(storage._cdata) != len(group) + 1:
        return False
    if is_host(storage.device) and not storage.resizable() and storage.filename is None:
        return False
    spans = sorted((int(t.storage_offset()) * t.element_size(), footprint(t)) for t in group)
    return all(begin + size <= after for (begin, size), (after, _) in itertools.pairwise(spans))


def set_aside_adapters(model: torch.nn.Module) -> set[int]:
    """The ids of parameters of PEFT's adapters that a forward would leave out: they are disabled, or others are active.

    PEFT freezes them meanwhile, which does not make them weights that stay as they are.
    """
    aside: set[int] = set()
    layers: list[Any] = [layer for layer in model.modules() if hasattr(layer, "disable_adapters")]
    for layer in layers:
        active = () if layer.disable_adapters else layer.active_adapters
        for kind in getattr(layer, "adapter_layer_names", ()):
            by_adapter: Any = getattr(layer, kind, None)
            if isinstance(by_adapter, torch.nn.ModuleDict | torch.nn.ParameterDict):
                for name, held in by_adapter.items():
                    if name not in active:
                        aside |= {id(p) for p in (held.parameters() if isinstance(held, torch.nn.Module) else [held])}
    return aside
