"""Parameters that move into a host arena as soon as a library has made them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook

from disco_accel.capture.parts import leaves, named_parts
from disco_accel.native.host_memory import HostMemory, footprint, give_back_freed, glibc, place

_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1
"""glibc's mallopt(3)."""
_LOW_THRESHOLD, _HIGHEST_THRESHOLD = 1 << 20, 32 << 20
"""Bytes from which on each allocation is a mapping of its own. It rises with the size of freed mappings, to the second
one."""
_TRIM_EVERY = 1 << 20
"""Bytes."""


@contextmanager
def parameters_adopted(memory: HostMemory) -> Iterator[None]:
    """Inside, each parameter that this thread gives to a module moves into ``memory`` when it gives another one.

    Not at once: a library may set a weight, pack it and set it again. Parameters without bits (``meta``) and those for
    which no room is left stay as they are. ``adopt_rest`` moves the last ones.
    """
    adopter = _Adopter(memory)
    handle = register_module_parameter_registration_hook(adopter)
    try:
        yield
    finally:
        handle.remove()


def adopt_rest(model: torch.nn.Module, memory: HostMemory) -> None:
    """Move all parts of ``model``'s parameters that are outside ``memory`` into it, as far as there is room."""
    moved: dict[tuple[Any, ...], torch.Tensor] = {}
    for parameter in model.parameters():
        _adopt(parameter, memory, moved)
    for part in named_parts(model):
        if not part.is_buffer:
            _adopt(part.tensor, memory, moved)


class _Adopter:
    """``__call__`` is PyTorch's hook: before ``module.name`` becomes ``parameter``."""

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        # Hooks of PyTorch's are called in every thread, for every module.
        self._thread = threading.get_ident()
        self._last: tuple[torch.nn.Module, str] | None = None
        self._trimmed_at = 0

    def __call__(self, module: torch.nn.Module, name: str, parameter: torch.Tensor | None) -> None:
        if threading.get_ident() != self._thread or parameter is None or parameter.is_meta:
            return
        if self._last is not None and (self._last[0] is not module or self._last[1] != name):
            last = self._last[0]._parameters.get(self._last[1])
            if last is not None:
                _adopt(last, self._memory, {})
        self._last = module, name
        if self._memory.used - self._trimmed_at >= _TRIM_EVERY:
            self._trimmed_at = self._memory.used
            give_back_freed()


@contextmanager
def freed_at_once() -> Iterator[None]:
    """Inside, large tensors go back to the operating system when they are freed.

    Those that a weight is made from come in many sizes and leave holes in the heap into which the next ones do not fit.
    By and by these would hold as much as the checkpoint. After it the thresholds are those that they rise to anyway.
    """
    glibc("mallopt", _MMAP_THRESHOLD, _LOW_THRESHOLD)
    give_back_freed()
    try:
        yield
    finally:
        glibc("mallopt", _MMAP_THRESHOLD, _HIGHEST_THRESHOLD)
        glibc("mallopt", _TRIM_THRESHOLD, 2 * _HIGHEST_THRESHOLD)
        give_back_freed()


def _adopt(tensor: torch.Tensor, memory: HostMemory, moved: dict[tuple[Any, ...], torch.Tensor]) -> None:
    for _, leaf in leaves(tensor):
        if leaf.is_meta or not leaf.is_cpu or memory.holds(leaf):
            continue
        before = place(leaf)
        if before not in moved:
            if footprint(leaf) > memory.nbytes - memory.used:
                continue
            moved[before] = memory.adopt(leaf.data)
        # The object stays, so that all who hold it see the move.
        leaf.data = moved[before]
