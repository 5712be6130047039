"""The training of the self-check: a small model, its own plan under little memory, and the same step in plain PyTorch.

Every op of it is deterministic on a GPU as on the CPU, so equal inputs give equal bits. Half of the blocks are
checkpointed; one of those draws random numbers, which its recomputation must draw again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional

from disco_accel.capture.captured_step import CapturedStep, InputSource
from disco_accel.capture.checkpointing import checkpointed
from disco_accel.capture.step import capture_step
from disco_accel.errors import BudgetTooSmall, PlanError
from disco_accel.execute.executor import EngineOptions, Executor
from disco_accel.graph.copies import swaps_in, swaps_out
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.passes import arena_of
from disco_accel.graph.taskgraph import TaskGraph, Vertex
from disco_accel.measure.record import OpRecord, apply, record
from disco_accel.native.backend import backend_of
from disco_accel.native.host_memory import HostMemory, bytes_of
from disco_accel.plan import make_plan
from disco_accel.verify.static import verify

_WIDTH = 256
_ROWS = 256
_RANK = 16
_BLOCKS = 6
_SEED = 14
_DROPPED = 0.25
_TINY = 256 << 10
"""Bytes of memory that are not enough for a plan: the refusal names the least that is."""


class _Block(torch.nn.Module):
    """Two frozen products with trained ones of rank ``_RANK`` beside the first."""

    def __init__(self, generator: torch.Generator, memory: HostMemory, dropout: float) -> None:
        super().__init__()
        self.first, self.second = (
            torch.nn.Parameter(memory.adopt(_drawn(generator, _WIDTH, _WIDTH) / _WIDTH**0.5), requires_grad=False)
            for _ in range(2)
        )
        self.down = torch.nn.Parameter(_drawn(generator, _WIDTH, _RANK) / _WIDTH**0.5)
        self.up = torch.nn.Parameter(_drawn(generator, _RANK, _WIDTH) / _RANK**0.5)
        self.dropout = dropout

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        inside = functional.gelu(rows @ self.first + (rows @ self.down) @ self.up)
        if self.dropout:
            inside = functional.dropout(inside, self.dropout, training=True)
        return rows + inside @ self.second


class _Model(torch.nn.Module):
    """``_BLOCKS`` blocks on (rows, width), the later half of them checkpointed, and a squared error.

    Trained weights lie on ``device``, frozen ones in host memory that is pinned where the device needs it, or beside
    the trained ones with ``resident``. All models have equal weights.
    """

    def __init__(self, device: torch.device, *, resident: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(_SEED)
        memory = HostMemory(2 * _BLOCKS * _WIDTH * _WIDTH * 4)
        dropouts = [0.0] * (_BLOCKS - 1) + [_DROPPED]
        self.blocks = torch.nn.ModuleList([_Block(generator, memory, dropout) for dropout in dropouts])
        # Pinned as long as somebody holds it.
        self.memory = memory
        if not resident and backend_of(device).separate_memory:
            memory.pin()
        for parameter in self.parameters():
            if parameter.requires_grad or resident:
                parameter.data = parameter.data.to(device)

    def forward(self, rows: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            rows = block(rows) if index < _BLOCKS // 2 else checkpointed(block, rows, use_reentrant=False)
        apart = rows - wanted
        return (apart * apart).mean()


def by_name(loss: torch.Tensor, gradients: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The results of a step in one table; ``gradients`` have the names of trainable parameters."""
    return {"loss": loss, **{f"gradient of {name}": gradient for name, gradient in gradients.items()}}


@dataclass(frozen=True)
class Subject:
    """The model, an equal one for plain PyTorch, the captured step and the plan that runs it. ``clean``: INPUT vertex
    to its bytes on the host."""

    model: _Model
    eager: _Model
    device: torch.device
    captured: CapturedStep
    graph: TaskGraph
    records: Mapping[int, OpRecord]
    plan: MemGraph
    clean: Mapping[int, torch.Tensor]

    def executor(self, options: EngineOptions) -> Executor:
        """An executor of the plan; the caller closes it."""
        bindings = self.captured.bindings
        return Executor(
            self.plan,
            self.graph.ops,
            self.records,
            clean=self.clean,
            options=replace(options, device=str(self.device)),
            names={b.vertex: b.name for b in bindings},
            specs={b.vertex: b.spec for b in bindings},
        )

    def vertices(self, source: InputSource) -> dict[str, int]:
        """Name to INPUT vertex, of those with this source."""
        return {b.name: b.vertex for b in self.captured.bindings if b.source is source}

    def count(self, counts: Callable[[Vertex], bool]) -> int:
        """The vertices of a step that ``counts``."""
        return sum(map(counts, self.plan.vertices))


def make_subject(device: torch.device, *, tracing: Callable[[], AbstractContextManager[Any]] = nullcontext) -> Subject:
    """The subject on ``device``, planned in the least memory that is possible. ``tracing`` is entered for the capture.

    Raises PlanError where the plan does not move values in both directions, so that it would show nothing.
    """
    model = _Model(device)
    with tracing():
        captured = capture_step(model, batch_of(0, torch.device("meta")), device=device, name="self-check")
    records = record(captured.graph, device=str(device))
    graph = apply(captured.graph, records)
    plan = _tight_plan(graph)
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    clean = {b.vertex: bytes_of(frozen[b.name].detach()) for b in captured.bindings if b.source is InputSource.FROZEN}
    subject = Subject(model, _Model(device, resident=True), device, captured, graph, records, plan, clean)
    if not (subject.count(swaps_out) and subject.count(swaps_in)):
        raise PlanError("the self-check's plan moves nothing to the host or nothing back, so it would show nothing")
    return subject


def _tight_plan(graph: TaskGraph) -> MemGraph:
    memory = _TINY
    while True:
        sized = arena_of(memory).run(graph)
        try:
            plan = make_plan(sized, cyclic=True)
        except BudgetTooSmall as error:
            if error.needed <= memory:
                raise
            memory = error.needed
            continue
        verify(sized, plan)
        return plan


def batch_of(seed: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Rows and wanted rows, each (rows, width), fp32, of this seed on every device."""
    if device == torch.device("meta"):
        return {name: torch.empty(_ROWS, _WIDTH, dtype=torch.float32, device=device) for name in ("rows", "wanted")}
    generator = torch.Generator().manual_seed(_SEED + 1 + seed)
    return {name: _drawn(generator, _ROWS, _WIDTH).to(device) for name in ("rows", "wanted")}


def eager_step(
    model: torch.nn.Module, batch: Mapping[str, torch.Tensor], device: torch.device, seed: int
) -> dict[str, torch.Tensor]:
    """The step in plain PyTorch, from the generator's state after ``seed``. ``model``: a resident one."""
    seed_generator(device, seed)
    loss = model(**batch)
    trained = trained_of(model)
    gradients = torch.autograd.grad(loss, list(trained.values()))
    return by_name(loss.detach(), dict(zip(trained, gradients, strict=True)))


def trained_of(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The trainable parameters by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def seed_generator(device: torch.device, seed: int) -> None:
    """Set the generator that ops on ``device`` draw from."""
    backend_of(device).seed(seed)


def _drawn(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
