"""Stage ``1.5b_full``: all weights of a 1.5B shape trained, eagerly in memory, and with the optimizer on the host."""

from __future__ import annotations

from statistics import median
from typing import Any

from benchmarks.common.shapes import PRESETS
from benchmarks.full.suite import WARM
from benchmarks.full.table import judge_whole
from benchmarks.full.worker import COMMAND
from benchmarks.gpu.stage import Run
from benchmarks.step.engines import Job
from benchmarks.step.suite import measure as measured

_ROUNDS = 3
_LIMIT = 600.0
"""Seconds for any one answer; the stage's own limit is lower."""


def measure(run: Run) -> dict[str, Any]:
    """A row of each, in processes of their own whose logs stay in the stage's folder."""
    shape, rows, tokens = ("tiny", 2, 16) if run.small else ("1.5b", 4, 1024)
    budget = run.budget("12GiB", 1 << 21)
    figures: dict[str, Any] = {"batch": rows, "tokens": tokens}
    workers = []
    for engine in ("in-memory", "host-deferred"):
        folder = run.folder / f"{run.stage}_{engine}"
        folder.mkdir(exist_ok=True)
        job = Job(
            engine=engine,
            shape=dict(PRESETS[shape]),
            batch=rows,
            tokens=tokens,
            dtype="bfloat16",
            rank=0,
            device=run.device,
            budget=budget if engine != "in-memory" else None,
            bandwidth=None,
            planner="timed",
            folder=str(folder),
            cache=run.cache,
        )
        workers += measured([job], _ROUNDS, apart=True, limit=_LIMIT, command=COMMAND, warm=WARM)
        figures[engine] = _row(workers[-1].error, workers[-1].seconds, workers[-1].facts, rows * tokens)
        run.keep(figures)
    for worker, verdict in zip(workers, judge_whole(workers, "bfloat16"), strict=True):
        figures[worker.job.engine]["verdict"] = verdict.words
        if worker.job.engine != "in-memory" and not verdict.equal:
            figures["wrong"] = [worker.error or verdict.words]
    return figures


def _row(error: str | None, seconds: list[float], facts: dict[str, Any], tokens: int) -> dict[str, Any]:
    if error is not None:
        return {"error": error}
    names = ("used", "reserved", "host", "h2d", "d2h", "update_seconds", "compile_seconds", "updates_planned", "traced")
    return {
        "seconds": median(seconds),
        "spread": max(seconds) - min(seconds),
        "tokens_per_second": tokens / median(seconds),
        **{name: facts[name] for name in names if name in facts},
    }
