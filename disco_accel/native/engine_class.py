"""The engine's torchbind classes, as types for Python."""

from __future__ import annotations

from collections.abc import Sequence
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
        """A call with encoded ``args`` (``op_encoding.py``); its number. ``label``: its name in messages."""

    def expect_result(self, op: int, mode: int, where: Any) -> None:
        """The next returned tensor of a call: a ``ResultMode`` and an encoded tensor."""

    def set_schedule(self, op: int, addresses: list[int], sizes: list[int]) -> None:
        """Where the allocations of a call are served from, in order."""

    def set_loose(self, op: int, address: int, nbytes: int) -> None:
        """Room for allocations beyond those."""

    def set_rng(self, op: int, slot: int, replay: bool) -> None:
        """The call draws random numbers: see ``RngSite``."""

    def set_varying(self, op: int, longest: Any, shortest: Any) -> None:
        """A call that is complete depends on a length. ``longest``, as it is, and ``shortest``: its encoded arguments,
        an encoded tensor for each result, and the sizes of its allocations."""

    def set_length(self, below: int, span: int) -> None:
        """Between steps: all calls that depend on the length are at one that is ``below`` the longest from now on; the
        shortest is ``span`` below it."""

    def resize_external(self, storage: int, nbytes: int) -> None:
        """Between steps: the tensor that is bound to an external storage has so many bytes from now on."""

    def run(self, op: int) -> None:
        """Run a call on this thread."""

    def is_direct(self, op: int) -> bool:
        """Whether it runs without the dispatcher."""

    def record(self, op: int) -> Recorded:
        """Run a call with PyTorch's own allocator and report its allocations and results."""

    def time(self, op: int, repeats: int) -> list[float]:
        """Seconds of each of ``repeats`` runs."""


def op_table(device: torch.device) -> OpTable:
    """An empty table for ops on ``device``."""
    load_extension()
    return cast(OpTable, torch.classes.disco_accel.Ops(str(device)))


LastError = tuple[int, int, str, bool, bool, bool, list[int], int, list[int], int]
"""An ``EngineStatus``, the position of the vertex (-1: none), a message, and three flags: the device found it later, is
lost, is still draining. Then positions in flight and their number. Then pairs, one after the other, of a position that
waits and one that it waits for (-1: none), and their number."""


class Engine(Protocol):
    """Runs one program step after step: ``torch.classes.disco_accel.Engine``.

    Waits return an ``EngineStatus`` after ``timeout`` seconds at the latest. RuntimeError for a call out of turn.
    """

    def expect_dtype(self, storage: int, dtype: str) -> None:
        """The data type that an external input of that storage must have."""

    def expect_layout(self, storage: int, dtype: str, shape: Sequence[int], stride: Sequence[int]) -> None:
        """The same, and its layout."""

    def bind(self, storages: list[int], externals: list[torch.Tensor]) -> tuple[int, str] | None:
        """Externals of the next step; the position of one that does not fit and why, None if all do."""

    def begin(self) -> None:
        """Start a step."""

    def fail_at(self, op: int) -> None:
        """For tests: call number ``op`` of the op table fails as if it had thrown; -1: none."""

    def run_out(self, timeout: float) -> int:
        """``begin`` and ``wait_out`` in one."""

    def wait_out(self, timeout: float) -> int:
        """Wait for all ``out`` vertices."""

    def deliver(self) -> None:
        """Complete the late inputs."""

    def run_end(self, timeout: float) -> int:
        """``deliver`` and ``wait_end`` in one."""

    def wait_end(self, timeout: float) -> int:
        """Wait for all vertices."""

    def abort(self, timeout: float) -> bool:
        """Launch nothing more; whether all that ran has ended."""

    def invalidate(self, in_place: list[int]) -> None:
        """Load residents again before the next step, but for those at positions ``in_place``."""

    def holds_residents(self) -> bool:
        """Whether the last step ran to its end, and nothing has invalidated the residents since."""

    def set_tracing(self, on: bool) -> None:
        """Whether the following steps are traced."""

    def launch_graphs(self) -> tuple[int, int, int, str]:
        """Graphs, kernels in them, bytes of device memory that they take, and why a kernel is in none or ""."""

    def last_error(self) -> LastError:
        """Why the last step ended early."""

    def events(self) -> torch.Tensor:
        """int64, a row of ``EVENT_COLUMNS`` for each vertex of a traced step."""

    def counters(self) -> dict[str, float]:
        """Of the last step, by name."""

    def ops_run(self, device: int) -> int:
        """Ops of the last step that the device at that position, one in host memory, has run to their end."""

    def ran(self, position: int) -> bool:
        """Whether the vertex there has run to its end in the last step."""

    def add_leaving(self, values: list[torch.Tensor]) -> int:
        """The number of a group of values that ``copies`` copies."""

    def copies(self, group: int) -> list[torch.Tensor]:
        """Copies of a group's values in memory of their own."""

    def release(self, storages: list[int]) -> None:
        """Drop these tensors, which nothing in the step reads any more."""

    def release_externals(self) -> None:
        """Drop the tensors bound last."""


def make_engine(
    table: OpTable,
    vertices: torch.Tensor,
    edges: torch.Tensor,
    copied: torch.Tensor,
    arenas: list[torch.Tensor],
    host: torch.Tensor,
    clean: list[torch.Tensor],
    states: list[torch.Tensor],
    options: dict[str, float],
    links: list[float],
    places: list[str],
) -> Engine:
    """An engine for a program, whose tables have the columns of ``engine_numbers.py``.

    ``arenas``: one for each device. ``places``: PyTorch's name of each, "" for one in host memory. ``host``: memory of
    offloaded values. ``clean``: host memory that is only read. ``states``: homes of values that change, in memory of
    their own. All of it is kept. ``options``: those of ``OPTIONS``. ``links``: bandwidth and latency of each device
    that is not in host memory. Raises RuntimeError for a program that would touch other memory, and for a device that
    does not start.
    """
    load_extension()
    tables, memory = (vertices, edges, copied), (arenas, host, clean, states)
    return cast(Engine, torch.classes.disco_accel.Engine(table, *tables, *memory, options, links, places))
