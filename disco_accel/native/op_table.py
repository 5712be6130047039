"""The engine's torchbind classes as types: what they look like to Python."""

from __future__ import annotations

from typing import Any, Protocol, cast

import torch

from disco_accel.native.extension import load_extension

Recorded = tuple[list[int], list[int], list[int], list[torch.Tensor], list[int]]
"""Sizes of the blocks of one call, when each was allocated and freed (-1: not), the tensors it returned, and the number
of the block that holds each (-1: none, -2: the tensor is undefined)."""


class OpTable(Protocol):
    """Storages and prepared calls of one plan: ``torch.classes.disco_accel.Ops``. Every method may raise RuntimeError
    that names the op, or the argument that does not fit."""

    def set_device(self, device: str) -> None:
        """Storages and calls added from now on are of ``device``, of the table's kind. Where an argument of theirs
        names the table's own device, for which they were captured, they get this one."""

    def set_host(self) -> None:
        """The same of a device in host memory, beside the table's own."""

    def add_fixed(self, address: int, nbytes: int) -> int:
        """A storage over ``nbytes`` bytes at ``address``; its number."""

    def add_external(self, nbytes: int) -> int:
        """A storage whose address is bound before each step; its number."""

    def add_op(self, name: str, overload: str, args: Any, label: str) -> int:
        """A call with encoded ``args`` (``op_encoding.py``); its number. ``label``: what messages call it."""

    def expect_result(self, op: int, mode: int, where: Any) -> None:
        """The next returned tensor of a call: a ``ResultMode`` and an encoded tensor."""

    def set_schedule(self, op: int, addresses: list[int], sizes: list[int]) -> None:
        """Where the allocations of a call are served from, in order."""

    def set_loose(self, op: int, address: int, nbytes: int) -> None:
        """Room for allocations beyond those."""

    def set_rng(self, op: int, slot: int, replay: bool) -> None:
        """The call draws random numbers: see ``RngSite``."""

    def run(self, op: int) -> None:
        """Run a call on this thread."""

    def is_direct(self, op: int) -> bool:
        """Whether it runs without the dispatcher."""

    def record(self, op: int) -> Recorded:
        """Run a call with PyTorch's own allocator and report what it allocated and returned."""

    def time(self, op: int, repeats: int) -> list[float]:
        """Seconds of each of ``repeats`` runs."""


def op_table(device: torch.device) -> OpTable:
    """An empty table for ops on ``device``."""
    load_extension()
    return cast(OpTable, torch.classes.disco_accel.Ops(str(device)))
