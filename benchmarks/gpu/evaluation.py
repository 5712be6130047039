"""Stage ``*_evaluation``: the loss of a batch without gradients, in memory, and by a model that trains within 8 GiB."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch

from benchmarks.gpu.stage import Run
from benchmarks.gpu.subject import ROUNDS, Subject, case_of, subject_of, synchronize
from disco_accel import DiscoConfig, prepare, restore, stats
from disco_accel.step.run.session import find_state


def measure(run: Run) -> dict[str, Any]:
    """Seconds and losses of both; losses without a backward have one value, which must be the same."""
    subject = subject_of(case_of(run), run.where, run.folder)
    if find_state(subject.model) is not None:
        restore(subject.model)
    subject.release()
    subject.model.eval()
    try:
        figures: dict[str, Any] = {"eager": _evaluated(subject)}
        run.keep(figures)
        subject.release()
        budget = run.budget("8GiB", 800_000)
        prepare(subject.model, DiscoConfig(memory_budget=budget, device=run.device, plan_cache=run.cache))
        figures["ours_8GiB"] = _evaluated(subject)
        counted = stats(subject.model)
        figures["ours_8GiB"] |= {name: counted[name] for name in ("inner_forwards", "fallbacks") if name in counted}
        restore(subject.model)
    finally:
        subject.model.train()
    eager, ours = (figures[name]["losses"] for name in ("eager", "ours_8GiB"))
    if not set(ours) <= set(eager):
        figures["wrong"] = [f"losses {sorted(set(ours))}, eager's {sorted(set(eager))}"]
    return figures


def _evaluated(subject: Subject) -> dict[str, Any]:
    losses, seconds = [], []
    for number in range(ROUNDS + 1):
        synchronize(subject.where)
        if number == 1 and subject.where.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        with torch.no_grad():
            losses.append(float(subject.model(**subject.batch).loss))
        seconds.append(time.perf_counter() - began)
    used = {"used": torch.cuda.max_memory_allocated()} if subject.where.type == "cuda" else {}
    rest = seconds[1:]
    return {
        "seconds": median(rest),
        "spread": max(rest) - min(rest),
        "first_seconds": seconds[0],
        "losses": losses,
        **used,
    }
