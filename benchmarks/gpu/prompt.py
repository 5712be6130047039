"""Stage ``*_prompt``: a prompt read within a budget by the model that trains, beside eager with all of it in memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from benchmarks.common.shapes import PRESETS
from benchmarks.gpu.models import batch_for
from benchmarks.gpu.stage import Run
from benchmarks.gpu.subject import ROUNDS, Subject, case_of, subject_of, synchronize
from benchmarks.prefill.engines import outputs_of, read_eagerly
from disco_accel import DiscoConfig, prefill, restore, stats
from disco_accel.capture.attention import cudnn_attention_off
from disco_accel.selfcheck.agreement import RUNS, agreement
from disco_accel.step.run.session import current_step, find_state

_ROWS, _TOKENS = 8, 1024


def measure(run: Run) -> dict[str, Any]:
    """Seconds of eager and of ours, logits, keys and values compared. The prompt is read through the adapter."""
    subject = subject_of(case_of(run), run.where, run.folder)
    if find_state(subject.model) is not None:
        restore(subject.model)
    subject.release()
    rows, tokens = (1, 16) if run.small else (_ROWS, _TOKENS)
    ids = batch_for(PRESETS[subject.case.shape]["vocab_size"], rows, tokens, run.where)["input_ids"]
    subject.model.eval().requires_grad_(False)
    try:
        return {"batch": rows, "tokens": tokens} | _measured(run, subject, ids)
    finally:
        restore(subject.base)
        subject.model.train()
        for parameter in subject.trainable.values():
            parameter.requires_grad_(True)


def _measured(run: Run, subject: Subject, ids: torch.Tensor) -> dict[str, Any]:
    model = subject.base

    def eager() -> dict[str, torch.Tensor]:
        return outputs_of(read_eagerly(model, ids))

    with cudnn_attention_off(run.where):
        references = [_on_host(eager()) for _ in range(RUNS)]
    figures: dict[str, Any] = {"eager": _timed(eager, run.where)}
    run.keep(figures)
    subject.release()
    budget = run.budget("8GiB", 500_000)
    began = time.perf_counter()
    prefill(model, ids, config=DiscoConfig(memory_budget=budget, device=run.device, plan_cache=run.cache))

    def ours() -> dict[str, torch.Tensor]:
        found = outputs_of(prefill(model, ids))
        step = current_step(model)
        assert step is not None, "the model has read a prompt"
        step.settle()
        return found

    got = _on_host(ours())
    figures["ours_8GiB"] = {"first_seconds": time.perf_counter() - began} | _timed(ours, run.where)
    counted, compared = stats(model), agreement(got, references)
    figures["ours_8GiB"] |= {
        "h2d_gb_s": counted["reload_bytes"] / figures["ours_8GiB"]["seconds"] * 1e-9,
        "reload_bytes": counted["reload_bytes"],
        "peak_bytes": counted["peak_bytes"],
        "verdict": str(compared),
    }
    wrong = [str(compared)] if compared.wrong else []
    if counted["fallbacks"]:
        wrong.append(f"ran in eager mode: {counted['fallbacks']}")
    if counted["peak_bytes"] > counted["budget"]["total"]:
        wrong.append("the peak is above the budget")
    return figures | ({"wrong": wrong} if wrong else {})


def _timed(once: Callable[[], object], where: torch.device) -> dict[str, float]:
    """Median seconds and their spread, and on a GPU the most memory that was used."""
    samples = []
    if where.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(ROUNDS):
        synchronize(where)
        began = time.perf_counter()
        once()
        synchronize(where)
        samples.append(time.perf_counter() - began)
    used = {"used": torch.cuda.max_memory_allocated()} if where.type == "cuda" else {}
    return {"seconds": median(samples), "spread": max(samples) - min(samples), **used}


def _on_host(outputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.to("cpu", copy=True) for name, tensor in outputs.items()}
