"""Trained weights whose optimizer updates them in host memory: which of them may move into a host arena, and how their
pages are let be written to.

Between a forward and its backward their pages are watched for writes. Rewriting watched pages takes seven times as
long as rewriting others, and splits huge ones, so the watch ends where one of PyTorch's optimizers begins to update.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from disco_accel.capture.parts import named_parts
from disco_accel.errors import ConfigError
from disco_accel.native.backend import is_host
from disco_accel.native.host_memory import expect_rewrite, footprint
from disco_accel.step.placement.scaler_on_host import bring_to_host, wait_for_scalers


class HostWeights(Protocol):
    """Knows where the weights of one model lie on the host."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is one of them."""


_updated: weakref.WeakSet[HostWeights] = weakref.WeakSet()


def unwatch_updates_of(weights: HostWeights) -> None:
    """From now on every optimizer that updates some of ``weights`` says so before it does, as long as they live."""
    _updated.add(weights)
    _say_updates()
    wait_for_scalers()


@functools.cache
def _say_updates() -> None:
    register_optimizer_step_pre_hook(_before_update)


before_updates: list[Callable[[torch.optim.Optimizer], None]] = []
"""Called before the watch over an optimizer's weights ends: what is still to be done to them by then is no change."""


def _before_update(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for call in before_updates:
        call(optimizer)
    for weights in list(_updated):
        updated = [p for group in optimizer.param_groups for p in group["params"] if weights.holds(p)]
        expect_rewrite(updated)
        if updated:
            bring_to_host(optimizer)


def movable_weights(model: torch.nn.Module, in_arena: Callable[[torch.Tensor], bool]) -> list[torch.Tensor]:
    """Trained weights of ``model`` that are ``in_arena`` or whose memory is theirs alone, so that it can be another.

    One that shares its memory with a tensor from elsewhere, as a piece of a flat vector does, stays where it is:
    whoever writes there means the weight.

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
