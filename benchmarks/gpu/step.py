"""Stages ``step_*``: ``bench step`` at 7B shape, all resident and under several budgets, beside eager in memory."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.step import suite as step
from benchmarks.step.table import table
from disco_accel.native.backend import run_device, workspace_bytes
from disco_accel.sizes import format_size

_CELLS: Mapping[str, tuple[str, ...]] = {
    "step_8x1024": ("--engines", "in-memory,resident,disco", "--memory", "8GiB,16GiB,24GiB"),
    "step_1x2048": ("--engines", "in-memory,disco", "--memory", "8GiB"),
}
"""What each stage measures, at the batch and tokens of its name."""


def measure(device: str, small: bool, stage: str) -> dict[str, Any]:
    """Seconds, bytes, GB/s and the verdict of each engine; the table goes to the log.

    ``OUT`` gets the whole result, as ``bench step -o`` writes it, for ``benchmarks/results``.
    """
    batch, tokens = stage.removeprefix("step_").split("x")
    words = ["--shape", "7b", "--batch", batch, "--tokens", tokens, *_CELLS[stage]]
    if small:
        budget = (5 << 18) + 2 * workspace_bytes(run_device(device))
        words = ["--shape", "tiny", "--batch", "2", "--tokens", "16", "--rounds", "2", "--memory", str(budget)]
        words += ["--engines", "in-memory,disco"]
    result = step.run([*words, "--dtype", "bfloat16", "--device", device])
    print(table(result))
    out = Path(os.environ.get("OUT") or "out/gpu")
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{stage}.json").write_text(json.dumps(result, indent=1))
    return figures_of(result)


def figures_of(result: Mapping[str, Any]) -> dict[str, Any]:
    """The rows of ``bench step`` as figures by engine; ``wrong`` names what must not be."""
    figures: dict[str, Any] = {"batch": result["batch"], "tokens": result["tokens"]}
    wrong = []
    rows = result["rows"]
    eager = next((median(r["seconds"]) for r in rows if r["engine"] == "in-memory" and r["seconds"]), None)
    for row in rows:
        name = row["engine"] + (f" {format_size(row['budget'])}" if row["budget"] is not None else "")
        if row["error"] is not None:
            wrong.append(f"{name}: {row['error']}")
            continue
        seconds = median(row["seconds"])
        figures[name] = {
            "seconds": seconds,
            **({"over_eager": seconds / eager} if eager is not None else {}),
            **({"of_bound": row["bound"] / seconds} if row["bound"] is not None else {}),
            **({"h2d_gb_s": row["h2d"] / seconds * 1e-9} if row["h2d"] is not None else {}),
            **{key: row[key] for key in ("used", "reserved", "host", "verdict")},
        }
        if row["ours"] and not row["equal"]:
            wrong.append(f"{name}: {row['verdict']}")
        if row["budget"] is not None and row["used"] > row["budget"]:
            wrong.append(f"{name}: the peak of {row['used']} bytes is above the budget")
    return figures | ({"wrong": wrong} if wrong else {})
