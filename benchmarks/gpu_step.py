"""Stages ``step_*``: one LoRA step at 7B shape under 8 GiB, beside the same step in memory in eager mode."""

from __future__ import annotations

import gc
import statistics
import time
from typing import Any

import torch

from benchmarks.gpu_models import SEVEN_B, SMALL, arena_llama, batch_for, with_adapter
from disco_accel import DiscoConfig, prepare, stats
from disco_accel.execute.cuda import run_device, workspace_bytes

_STEPS = 5
_WARM = 2
_LEARNING_RATE = 1e-4


def measure(device: str, small: bool, stage: str) -> dict[str, Any]:
    """Seconds of a step (median after two warm ones), peaks in bytes, and how far losses and gradients are apart."""
    where = run_device(device)
    rows, length = (int(n) for n in stage.removeprefix("step_").split("x"))
    if small:
        rows, length = min(rows, 2), 16
    shape = SMALL if small else SEVEN_B
    budget = (2 << 20) + 2 * workspace_bytes(where) if small else 8 << 30
    figures: dict[str, Any] = {"budget_bytes": budget}
    batch = batch_for(shape["vocab_size"], rows, length, where)

    eager = _run(_model(shape, where).to(where), batch, where)
    _free(where)
    model = prepare(_model(shape, where), DiscoConfig(memory_budget=budget, device=device))
    planned = _run(model, batch, where)
    found = stats(model)
    figures |= {
        "eager_seconds": eager.seconds,
        "planned_seconds": planned.seconds,
        "first_step_seconds": planned.first,
        "compile_seconds": {k: round(v, 2) for k, v in found["compile_seconds"].items()},
        "compute_seconds": found["compute_seconds"],
        "eager_peak_bytes": eager.peak,
        "planned_peak_bytes": planned.peak if where.type == "cuda" else found["peak_bytes"],
        "kernels": found["kernels"],
        "reload_bytes": found["reload_bytes"],
        "offload_bytes": found["offload_bytes"],
        "losses_apart": max(abs(a - b) for a, b in zip(eager.losses, planned.losses, strict=True)),
        "gradients_apart": _apart(eager.gradients, planned.gradients),
    }
    wrong = []
    if figures["losses_apart"] > 2e-2 or figures["gradients_apart"] > 5e-2:
        wrong.append("losses or gradients are not eager's")
    if figures["planned_peak_bytes"] > figures["budget_bytes"]:
        wrong.append("the peak is above the budget")
    if found["steps_eager"]:
        wrong.append(f"steps ran in eager mode: {found['fallbacks']}")
    if where.type == "cpu" and (figures["losses_apart"] or figures["gradients_apart"]):
        wrong.append("on the CPU every bit must be eager's")
    return figures | ({"wrong": wrong} if wrong else {})


class _Run:
    """What ``_STEPS`` steps gave: seconds, losses, the gradients of the first step on the host."""

    def __init__(self) -> None:
        self.first = self.seconds = 0.0
        self.peak = 0
        self.losses: list[float] = []
        self.gradients: dict[str, torch.Tensor] = {}


def _model(shape: dict[str, int], where: torch.device) -> Any:
    base, _ = arena_llama(shape, dtype=torch.bfloat16, attention="sdpa", source=where)
    return with_adapter(base, rank=16, checkpointing=True)


def _run(model: Any, batch: dict[str, torch.Tensor], where: torch.device) -> _Run:
    run = _Run()
    trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trainable.values(), lr=_LEARNING_RATE)
    samples = []
    for step in range(_WARM + _STEPS):
        _synchronize(where)
        began = time.perf_counter()
        loss = model(**batch).loss
        loss.backward()
        if step == 0:
            run.gradients = {n: p.grad.to("cpu", copy=True) for n, p in trainable.items() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        _synchronize(where)
        samples.append(time.perf_counter() - began)
        run.losses.append(float(loss.detach()))
        if step == _WARM - 1 and where.type == "cuda":
            torch.cuda.reset_peak_memory_stats(where)
    run.first, run.seconds = samples[0], statistics.median(samples[_WARM:])
    if where.type == "cuda":
        run.peak = torch.cuda.max_memory_allocated(where)
    return run


def _apart(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The largest relative distance, over all parameters, between two sets of gradients."""
    assert a.keys() == b.keys(), "both runs have the same trainable parameters"
    return max(float((a[n].float() - b[n].float()).norm() / a[n].float().norm().clamp_min(1e-20)) for n in a)


def _synchronize(where: torch.device) -> None:
    if where.type == "cuda":
        torch.cuda.synchronize(where)


def _free(where: torch.device) -> None:
    gc.collect()
    if where.type == "cuda":
        torch.cuda.empty_cache()
