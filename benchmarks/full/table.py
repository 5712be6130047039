"""Rows of ``bench full``: equal work, what each step is made of, and how far it is from the longest of its parts."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.common.subjects import Times
from benchmarks.step.process import Worker
from benchmarks.step.table import Row, Verdict, cell_text, judge, rows_of, size_cell

TITLES = {
    "in-memory": "eager in memory",
    "in-memory-2": "eager in memory, two threads",
    "resident": "disco, everything resident",
    "device": "disco, `optimizer: device`",
    "host-step": "disco, `optimizer: host`",
    "host-deferred": "disco, `optimizer: host`, `update: deferred`",
    "host-auto": "the same, `update_on: auto`",
    "host-half": "the same, every second weight on the device",
    "zero2-offload": "ZeRO-2 offload_optimizer",
}
DEFERRED = frozenset({"host-deferred", "host-auto", "host-half"})
OURS = frozenset({"resident", "device", "host-step"}) | DEFERRED
HEADER = (
    "| engine | s per step | tokens/s | device used | process memory | kernels, s | AdamW alone, s | to device, s "
    "| from device, s | step / longest of these | step / lower bound | equal to eager |\n|" + "---|" * 12
)


def judge_whole(workers: Sequence[Worker], dtype: str) -> list[Verdict]:
    """As ``judge``; ours must have eager's weights, too, bit for bit."""
    eager = next((w.facts.get("digest") for w in workers if w.job.engine == "in-memory"), None)
    found = []
    for worker, verdict in zip(workers, judge(workers, dtype, OURS), strict=True):
        same = eager is None or worker.facts.get("digest") == eager
        if verdict.words == "bits" and not same:
            wrong = worker.job.engine in OURS
            verdict = Verdict(not wrong, "no: other weights" if wrong else "losses and gradients to bits")
        found.append(verdict)
    return found


def rows_of_whole(
    workers: Sequence[Worker], verdicts: Sequence[Verdict], args: argparse.Namespace, warm: int
) -> list[Row]:
    """A row for each worker. ``facts["parts"]``: seconds of kernels alone, of AdamW alone, and of the copies each
    way; None of what is not known. ``any_plan`` has the update, where it waits for the step's end. ``warm``: steps
    before the timed ones."""
    by_engine = {w.job.engine: w for w in workers if w.error is None}
    updates = None
    if "in-memory" in by_engine:
        updates = median(by_engine["in-memory"].facts["update_seconds"][warm:])
    compute = None
    if "resident" in by_engine:
        # The first step has no plan yet that could be timed.
        compute = median(by_engine["resident"].facts["kernel_seconds"][warm - 1 :])
    return [_with_parts(row, compute, updates, args.bandwidth) for row in rows_of(workers, verdicts, args, OURS)]


def _with_parts(row: Row, compute: float | None, updates: float | None, bandwidth: float) -> Row:
    if row.error is not None or not row.ours or row.h2d is None or row.d2h is None:
        return row
    parts = {"kernels": compute, "updates": updates, "h2d": row.h2d / bandwidth, "d2h": row.d2h / bandwidth}
    known = [seconds for seconds in parts.values() if seconds is not None]
    bound = row.any_plan
    if bound is not None and row.engine not in DEFERRED:
        bound = None if updates is None else bound + updates
    facts = {**row.facts, "parts": parts}
    return dataclasses.replace(row, bound=max(known), any_plan=bound, facts=facts)


def table(result: Mapping[str, Any]) -> str:
    """Markdown: a line for each row; why an engine could not run stands in its last cell."""
    return "\n".join([HEADER, *(_line(row) for row in result["rows"])])


def _line(row: Mapping[str, Any]) -> str:
    title = TITLES[row["engine"]]
    if row["error"] is not None:
        return f"| {title} |" + " — |" * 10 + f" {cell_text(row['error'])} |"
    times, parts = Times(tuple(row["seconds"])), row["facts"].get("parts", {})
    cells = [
        title,
        f"{times.median:.3g} ±{times.spread:.1g}",
        f"{row['tokens_per_second']:.0f}",
        *(size_cell(row[name]) for name in ("used", "host")),
        *("—" if parts.get(n) is None else f"{parts[n]:.3g}" for n in ("kernels", "updates", "h2d", "d2h")),
        *("—" if not parts or row[n] is None else f"{times.median / row[n]:.2f}" for n in ("bound", "any_plan")),
        row["verdict"],
    ]
    return "| " + " | ".join(cells) + " |"
