"""Stage ``prefill_1x1024``: a prompt read at 7B shape under 4 and 8 GiB, beside eager in memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache

from benchmarks.gpu.models import SEVEN_B, SMALL, arena_llama, batch_for, draw_weights, meta_llama
from disco_accel import DiscoConfig, prefill, restore, stats
from disco_accel.native.backend import run_device, workspace_bytes
from disco_accel.sizes import format_size
from disco_accel.step.session import current_step

_RUNS = 5
_TOLERANCE = 5e-2


def measure(device: str, small: bool, stage: str) -> dict[str, Any]:
    """Seconds of a prefill among others (median), bytes, and how far logits, keys and values are from eager's."""
    where = run_device(device)
    rows, tokens = (1, 16) if small else (int(n) for n in stage.removeprefix("prefill_").split("x"))
    shape = SMALL if small else SEVEN_B
    budgets = [(1 << 19) + 2 * workspace_bytes(where)] if small else [4 << 30, 8 << 30]
    ids = batch_for(shape["vocab_size"], rows, tokens, where)["input_ids"]
    figures: dict[str, Any] = {"batch": rows, "tokens": tokens}
    expected, figures["eager_seconds"] = _eager(shape, ids, where)
    base, _ = arena_llama(shape, dtype=torch.bfloat16, attention="sdpa", source=where)
    model = base.requires_grad_(False).eval()
    wrong = []
    for budget in budgets:
        config = DiscoConfig(memory_budget=budget, device=device, plan_cache=None)
        prefill(model, ids, config=config)

        def once() -> list[torch.Tensor]:
            found = _tensors(prefill(model, ids))
            step = current_step(model)
            assert step is not None, "the model has read a prompt"
            step.settle()
            return found

        got, seconds = _timed(once, where)
        apart = max(float((a - b).norm() / b.norm().clamp_min(1e-20)) for a, b in zip(got, expected, strict=True))
        counted = stats(model)
        figures[format_size(budget)] = {
            "seconds": seconds,
            "h2d_gb_s": counted["reload_bytes"] / seconds * 1e-9,
            "reload_bytes": counted["reload_bytes"],
            "peak_bytes": counted["peak_bytes"],
            "compute_seconds": counted["compute_seconds"],
            "apart": apart,
        }
        if apart > (0.0 if where.type == "cpu" else _TOLERANCE):
            wrong.append(f"{format_size(budget)}: logits, keys or values are not eager's ({apart:.1e})")
        if counted["peak_bytes"] > budget:
            wrong.append(f"{format_size(budget)}: the peak is above the budget")
        restore(model)
    return figures | ({"wrong": wrong} if wrong else {})


def _eager(shape: Any, ids: torch.Tensor, where: torch.device) -> tuple[list[torch.Tensor], float]:
    model = meta_llama(shape, dtype=torch.bfloat16, attention="sdpa")
    draw_weights(model, where, lambda t: t.to(where, copy=True))
    model = model.to(where).eval()

    def once() -> list[torch.Tensor]:
        cache = DynamicCache(config=model.config)
        mask = torch.ones_like(ids)
        with torch.no_grad():
            positions = mask.cumsum(-1) - 1
            return _tensors(model(ids, mask, positions, past_key_values=cache, use_cache=True, logits_to_keep=1))

    return _timed(once, where)


def _timed(once: Callable[[], list[torch.Tensor]], where: torch.device) -> tuple[list[torch.Tensor], float]:
    """The last result, on the host in 32 bits, and the median seconds after one run that warms up."""
    samples = []
    for _ in range(_RUNS + 1):
        _synchronize(where)
        began = time.perf_counter()
        found = once()
        _synchronize(where)
        samples.append(time.perf_counter() - began)
    return [t.to("cpu", torch.float32) for t in found], statistics.median(samples[1:])


def _tensors(output: Any) -> list[torch.Tensor]:
    return [output.logits, *(t for layer in output.past_key_values.layers for t in (layer.keys, layer.values))]


def _synchronize(where: torch.device) -> None:
    if where.type == "cuda":
        torch.cuda.synchronize(where)
