"""Ways to run one and the same LoRA step, for the suite: planned, eager and compiled in memory, streamed.

Every engine has the same frozen weights, the same adapter, the same batch and the same optimizer.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from benchmarks.common.any_plan import any_plan_of, kernel_seconds
from benchmarks.common.quantised import PLAIN, quantise_of
from benchmarks.gpu.link import rate
from benchmarks.gpu.models import arena_llama, batch_for, draw_weights, meta_llama, with_adapter
from disco_accel import DiscoConfig, prepare, stats
from disco_accel.capture.parts import frozen_parts
from disco_accel.graph.spaces import TO_DEVICE, TO_HOST
from disco_accel.native.backend import run_device
from disco_accel.simulate.simulator import Link, Machine
from disco_accel.step.placement.streamed_eager import StreamedEager
from disco_accel.step.run.session import current_step, find_state

LEARNING_RATE = 1e-4
COUNTED = ("kernels", "fused", "fused_refused")
"""Of ``stats``: kernels of a step, those that are fused, and runs whose kernels have other bits than their ops."""
_RATE_BYTES = 512 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """What one process measures. ``rank`` of the adapter, 0 for a prompt; ``budget`` in bytes, None for engines that
    know none; ``bandwidth`` in bytes/s, of a link of the host device; ``folder`` receives the first step's gradients,
    or what the first prompt left; ``quant``: the frozen weights' form, one of ``benchmarks.common.quantised``;
    ``cache``: the folder of plans and passed self-checks, None for neither; ``checkpointing``: of activations, by the
    script."""

    engine: str
    shape: Mapping[str, int]
    batch: int
    tokens: int
    dtype: str
    rank: int
    device: str
    budget: int | None
    bandwidth: float | None
    planner: str
    folder: str
    quant: str = PLAIN
    cache: str | None = None
    checkpointing: bool = True

    @property
    def torch_dtype(self) -> torch.dtype:
        """``dtype`` as torch has it."""
        kind: torch.dtype = getattr(torch, self.dtype)
        return kind

    @property
    def config(self) -> DiscoConfig:
        """What ours are prepared with."""
        cpu = self.device == "cpu"
        return DiscoConfig(
            memory_budget="auto" if self.budget is None else self.budget,
            device=self.device,
            planner=self.planner,
            link_bandwidth=self.bandwidth if cpu else None,
            compute_threads=1 if cpu else None,
            plan_cache=self.cache,
        )

    @property
    def where(self) -> torch.device:
        """The device that computes, with its index."""
        return run_device(self.device)


class Engine:
    """A LoRA step in eager mode; as it stands, with everything on the device."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.where = job.where
        self.model = self.build()
        self.batch = batch_for(job.shape["vocab_size"], job.batch, job.tokens, self.where)
        self.trainable = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        self.optimizer = self.make_optimizer()

    def build(self) -> Any:
        """The model as it trains."""
        model = self.random_model(lambda t: t.to(self.where, copy=True))
        return model.to(self.where)

    def random_model(self, home: Callable[[torch.Tensor], torch.Tensor], *, offload: bool = False) -> Any:
        """The job's model, its frozen weights where ``home`` puts them."""
        job = self.job
        base = meta_llama(job.shape, dtype=job.torch_dtype, attention="sdpa", positions=max(2048, job.tokens))
        draw_weights(base, self.where, home, quantise=quantise_of(job.quant))
        return with_adapter(base, rank=job.rank, checkpointing=job.checkpointing, offload=offload)

    def arena_model(self) -> Any:
        """The job's model, its frozen weights in a host arena; packed ones on the host, for ``prepare`` to move."""
        job = self.job
        positions = max(2048, job.tokens)
        if (quantise := quantise_of(job.quant)) is not None:
            base = meta_llama(job.shape, dtype=job.torch_dtype, attention="sdpa", positions=positions)

            def pack(layer: torch.nn.Module) -> None:
                quantise(layer)
                layer.to("cpu")

            draw_weights(base, self.where, lambda t: t.to(self.where, copy=True), quantise=pack)
            return with_adapter(base.to("cpu"), rank=job.rank, checkpointing=job.checkpointing)
        base, _ = arena_llama(
            job.shape, dtype=job.torch_dtype, attention="sdpa", source=self.where, positions=positions
        )
        return with_adapter(base, rank=job.rank, checkpointing=job.checkpointing)

    def make_optimizer(self) -> torch.optim.Optimizer:
        """Of what is trained alone; its rate makes losses fall from step to step."""
        return self.adamw()

    def adamw(self) -> torch.optim.Optimizer:
        """PyTorch's own."""
        return torch.optim.AdamW(self.trainable.values(), lr=LEARNING_RATE)

    def backward(self) -> float:
        """Forward and backward; returns the loss."""
        loss = self.model(**self.batch).loss
        loss.backward()
        return float(loss.detach())

    def gradients(self) -> dict[str, torch.Tensor]:
        """Copies on the host of the adapter's gradients, those that there are."""
        return {n: p.grad.to("cpu", copy=True) for n, p in self.trainable.items() if p.grad is not None}

    def update(self) -> None:
        """The optimizer's step."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def figures(self) -> dict[str, Any]:
        """What is known beside the times: ``used`` and ``reserved`` device bytes, ``h2d`` and ``d2h`` bytes a step.

        Who does not know the bytes has them looked up by PyTorch's profiler, on a GPU.
        """
        return {}


class InMemory(Engine):
    """Everything on the device: nothing is copied."""

    def figures(self) -> dict[str, Any]:
        return {"h2d": 0, "d2h": 0}


class Compiled(InMemory):
    """``torch.compile`` in memory, with the same checkpointing."""

    def build(self) -> Any:
        model = super().build()
        model.compile()
        return model


class CheckpointOffload(Engine):
    """Weights on the device; transformers keeps what checkpointing saves in pinned host memory."""

    def build(self) -> Any:
        return self.random_model(lambda t: t.to(self.where, copy=True), offload=True).to(self.where)


class Streamed(Engine):
    """Eager, each module's frozen weights copied to the device before it runs, synchronously; none of them stays."""

    def build(self) -> Any:
        self.copied = 0
        model = self.arena_model()
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(self.where)
        self.frozen = {id(part) for part in frozen_parts(model).values()}
        self.hooks = StreamedEager(model, self._visit)
        return model

    def backward(self) -> float:
        self.copied = 0
        return super().backward()

    def _visit(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self.frozen:
            return tensor.to(self.where)
        self.copied += tensor.nbytes
        began = time.perf_counter()
        copy = tensor.detach().to(self.where, copy=True)
        if self.job.bandwidth is not None:
            time.sleep(max(0.0, began + tensor.nbytes / self.job.bandwidth - time.perf_counter()))
        return copy

    def figures(self) -> dict[str, Any]:
        return {"h2d": self.copied, "d2h": 0}


class Planned(Engine):
    """A step from a plan within the job's budget, by an engine with the options ``engine``; ``settings``: of the
    configuration, in the place of the job's."""

    engine: ClassVar[Mapping[str, Any]] = {}
    settings: ClassVar[Mapping[str, Any]] = {}

    def build(self) -> Any:
        model = prepare(self.arena_model(), dataclasses.replace(self.job.config, **self.settings))
        state = find_state(model)
        assert state is not None
        state.engine = self.engine
        return model

    def figures(self) -> dict[str, Any]:
        found = stats(self.model)
        if found["steps_eager"]:
            raise RuntimeError(f"steps ran in eager mode: {found['fallbacks']}")
        outside = found["budget"]["total"] - found["budget"]["arena"]
        kept = ("budget", *COUNTED, "resident_weight_bytes", "compile_seconds", "compute_seconds")
        rates = link_rates() if self.where.type == "cuda" else None
        return {
            "used": found["peak_bytes"],
            "reserved": outside + found["arena_bytes"],
            "h2d": found["reload_bytes"],
            "d2h": found["offload_bytes"],
            **{name: found[name] for name in kept},
            **({} if rates is None else {"rates": rates}),
            **self._any_plan(rates or dict.fromkeys(("h2d", "d2h"), self.job.bandwidth)),
        }

    def _any_plan(self, rates: Mapping[str, float | None]) -> dict[str, float]:
        """``any_plan``: seconds that no plan beats, the kernels as in the middle one of three more steps."""
        step, h2d, d2h = current_step(self.model), rates["h2d"], rates["d2h"]
        if step is None or h2d is None or d2h is None:
            return {}
        run = super().backward
        traced = [kernel_seconds(step, run) for _ in range(3)]
        seconds = sorted(traced, key=lambda found: sum(found.values()))[1]
        self.optimizer.zero_grad()
        machine = Machine(links={TO_DEVICE: Link(h2d, 0.0), TO_HOST: Link(d2h, 0.0)})
        return {"any_plan": any_plan_of(step, seconds, machine)}


def link_rates() -> dict[str, float]:
    """Bytes/s of a pinned copy in each direction."""
    host = torch.empty(_RATE_BYTES, dtype=torch.uint8).random_(0, 256).pin_memory()
    there = host.cuda()
    return {
        "h2d": 1e9 * rate(lambda: there.copy_(host, non_blocking=True), _RATE_BYTES),
        "d2h": 1e9 * rate(lambda: host.copy_(there, non_blocking=True), _RATE_BYTES),
    }


class FixedOrder(Planned):
    """The same plan, its vertices started in serial order only."""

    engine: ClassVar[Mapping[str, Any]] = {"dispatch": "fixed"}


class NoLookahead(Planned):
    """Kernels are issued when all that they need has finished, as in the paper (K = 0)."""

    engine: ClassVar[Mapping[str, Any]] = {"lookahead": 0}


class Unfused(Planned):
    """Every op is a kernel of PyTorch's."""

    settings: ClassVar[Mapping[str, Any]] = {"fuse": "off"}


class NoGraphs(Planned):
    """Kernels are launched one by one."""

    settings: ClassVar[Mapping[str, Any]] = {"launch_graphs": "off"}


class Resident(Planned):
    """A plan with room for everything. On the host device its kernels' time is measured in every step."""

    def __init__(self, job: Job) -> None:
        super().__init__(dataclasses.replace(job, budget=None))
        self.kernel_seconds: list[float] = []

    def backward(self) -> float:
        step = current_step(self.model)
        if step is None or self.where.type == "cuda":
            return super().backward()
        losses: list[float] = []
        run = super().backward
        seconds = kernel_seconds(step, lambda: losses.append(run()))
        self.kernel_seconds.append(sum(seconds.values()))
        return losses[0]

    def figures(self) -> dict[str, Any]:
        found = super().figures()
        if found["h2d"] or found["d2h"]:
            raise RuntimeError("the device has no room for everything, so that nothing can be said of compute alone")
        return {**found, "kernel_seconds": self.kernel_seconds or [found["compute_seconds"]]}


ENGINES: Mapping[str, type[Engine]] = {
    "in-memory": InMemory,
    "resident": Resident,
    "disco": Planned,
    "fixed-order": FixedOrder,
    "k0": NoLookahead,
    "unfused": Unfused,
    "no-graphs": NoGraphs,
    "streamed": Streamed,
    "compile": Compiled,
    "checkpoint-offload": CheckpointOffload,
}
