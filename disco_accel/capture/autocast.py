"""Autocast as a step meets it: the state at the call, and a trace that starts as eager would."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from disco_accel.native.device_types import DEVICE_TYPES


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
    recomputation, as it does in eager mode. The casts of regions outside are dropped too, but keep their number.
    """
    generation = cast_generation()
    depth = torch.autocast_increment_nesting() - 1
    for _ in range(depth + 1):
        torch.autocast_decrement_nesting()
    try:
        with _autocast_off():
            yield
    finally:
        for _ in range(depth):
            torch.autocast_increment_nesting()
        if generation is not None:
            _marked_generation(generation)


@contextmanager
def _autocast_off() -> Iterator[None]:
    enabled = [device for device in DEVICE_TYPES if torch.is_autocast_enabled(device)]
    for device in enabled:
        torch.set_autocast_enabled(device, False)
    try:
        yield
    finally:
        for device in enabled:
            torch.set_autocast_enabled(device, True)


@contextmanager
def another_autocast(state: AutocastState) -> Iterator[None]:
    """A region with ``state`` in the place of those that are open, whose casts stay and can be found inside."""
    with _autocast_off(), autocast_region(state):
        yield


@contextmanager
def autocast_region(state: AutocastState) -> Iterator[None]:
    """A region with ``state``; none at all where autocast is off."""
    with ExitStack() as stack:
        for device, dtype in state.dtypes:
            stack.enter_context(torch.autocast(device, dtype=getattr(torch, dtype), cache_enabled=state.cache))
        yield


_MARKS = 200
"""So many whole numbers have a bfloat16 of their own."""
_lock = threading.Lock()
_generation, _next_generation = 0, 1
_mark, _one = torch.zeros(1, 1, requires_grad=True), torch.ones(1, 1)


def cast_generation() -> int | None:
    """A number for the casts that PyTorch keeps now: another one once they were dropped, as the outermost region does
    when it ends. None where no region is open that keeps casts of weights.

    The casts are the process's. PyTorch tells nothing of them, so a tensor is cast and then written to: as long as its
    first value comes out of an op, the casts made since are there too.
    """
    if not torch.is_autocast_cache_enabled() or not any(map(torch.is_autocast_enabled, DEVICE_TYPES)):
        return None
    if torch.is_inference_mode_enabled() or torch._C._len_torch_dispatch_stack():
        # In the one casts are neither kept nor found, and modes that see every op would see this one.
        return None
    return _marked_generation(_next_generation)


def _marked_generation(new: int) -> int:
    """The number of the casts that are kept, which is ``new`` from now on if they have none."""
    global _generation, _next_generation
    usual = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is torch.bfloat16
    with _lock, torch.no_grad(), nullcontext() if usual else torch.autocast("cpu", torch.bfloat16):
        _mark.fill_(new % _MARKS)
        if torch.mm(_mark, _one).item() != _generation % _MARKS:
            _generation, _next_generation = new, max(_next_generation, new + 1)
        return _generation


def kept_casts(outputs: Iterable[torch.Tensor], weights: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Those of ``weights``, leaves by name, of which the region that is open keeps a cast that ``outputs`` were made
    from; called within that region.

    Each comes with the dtype that eager adds its gradients in when one backward goes through several forwards of the
    region. It is "" where the weight is used several times, as eager adds parts of them in another order.
    """
    users: dict[Any, Counter[Any]] = {}
    queue = [tensor.grad_fn for tensor in outputs]
    seen = set(queue)
    while queue:
        node: Any = queue.pop()
        for before, _ in () if node is None else node.next_functions:
            if before is not None:
                users.setdefault(before, Counter())[node] += 1
                if before not in seen:
                    seen.add(before)
                    queue.append(before)
    leaves = {id(node.variable): node for node in users if hasattr(node, "variable")}
    kept = {}
    for name, weight in weights.items():
        uses = users.get(leaves.get(id(weight)), Counter())
        if not weight.dim() or not any("ToCopy" in type(node).__name__ for node in uses):
            continue
        cast, dtype = _kept_cast(weight)
        if cast in uses:
            kept[name] = dtype if len(uses) == 1 and users[cast].total() == 1 else ""
    return kept


def _kept_cast(weight: torch.Tensor) -> tuple[Any, str]:
    """Autograd's node of the cast that an op of the open region takes of ``weight``, and the cast's dtype."""
    # Of its data type: a region of another device casts neither.
    row = torch.zeros(weight.shape[-2 if weight.dim() > 1 else 0], dtype=weight.dtype, device=weight.device)
    product = torch.matmul(row, weight)
    node: Any = product.grad_fn
    while not hasattr(node.next_functions[0][0] or node.next_functions[1][0], "variable"):
        node = next(before for before, _ in node.next_functions if before is not None)
    return node, str(product.dtype).removeprefix("torch.")
