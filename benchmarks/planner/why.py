"""Why plans take longer than the bound.

    python -m benchmarks.planner --why [-o FILE] [--only NAME ...] [--plans FOLDER]

Each case is planned, verified and simulated as by ``disco-accel compile --cyclic``, and its distance from the bound
taken apart as by ``disco-accel bound --why``. Nothing is measured but the seconds to plan.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.provenance import provenance
from benchmarks.planner.why_cases import ROOT, why_cases
from disco_accel.graph.files import read_memgraph, write_atomically
from disco_accel.graph.passes import arena_of
from disco_accel.plan import make_plan
from disco_accel.plan.bound.ladder import explain
from disco_accel.plan.bound.why_text import as_json, as_text
from disco_accel.simulate.simulator import Machine
from disco_accel.sizes import format_size, parse_size
from disco_accel.verify.static import verify

SHORT = {
    "addresses": "addresses",
    "offloads": "offloads",
    "whole_places": "whole places",
    "latency": "latency",
    "load_order": "load order",
    "choice": "choice",
    "whole_values": "whole values",
    "kernel_order": "kernel order",
}
"""Columns, each a row of ``disco_accel.plan.bound.ladder.ROWS``."""


def rows(only: Sequence[str] = (), plans: Path | None = None) -> Iterator[dict[str, Any]]:
    """Plan each case and yield its row, ``memory`` in bytes and seconds unless it says otherwise; those of which
    ``plans`` has a file ``NAME@MEMORY.memgraph.json`` as that says."""
    machine = Machine()
    for graph, memory in why_cases(only):
        size = parse_size(memory)
        file = None if plans is None else plans / f"{graph.name.replace(' ', '-')}@{memory}.memgraph.json"
        began = time.process_time()
        if file is not None and file.exists():
            plan = read_memgraph(file)
        else:
            plan = make_plan(graph, memory=size, planner="timed", cyclic=True, machine=machine)
        planned = time.process_time()
        verify(arena_of(size).run(graph), plan)
        why = explain(plan, machine)
        print(f"\n{graph.name}, {memory}\n{as_text(why)}", flush=True)
        head = {"graph": graph.name, "vertices": len(graph.vertices), "memory": size}
        yield {**head, **as_json(why), "plan_seconds": round(planned - began, 1)}


HEADER = f"| case | memory | step, s | / bound | loads, / least | {' | '.join(SHORT.values())} | dip |\n|" + "---|" * (
    len(SHORT) + 6
)


def line(row: Mapping[str, Any]) -> str:
    """One row as Markdown; what makes up the distance, and the dip, in percent of the bound."""
    bound, least = row["bound"]["bound"], row["bound"]["lp_reload_bytes"]
    loads = format_size(row["reload_bytes"]) + (f", {row['reload_bytes'] / least:.2f}" if least else "")
    percent = [_percent(row["rows"].get(name, 0.0), bound) for name in SHORT]
    cells = [row["graph"], format_size(row["memory"]), f"{row['step']:.4g}", f"{row['step'] / bound:.3f}", loads]
    return "| " + " | ".join([*cells, *percent, _percent(row["dip"], bound)]) + " |"


def _percent(seconds: float, bound: float) -> str:
    share = 100 * seconds / bound
    return f"{share:.1f}" if abs(share) >= 0.05 else ""


def table(result: Mapping[str, Any]) -> str:
    """All rows of a result as a Markdown table."""
    return "\n".join([HEADER, *(line(row) for row in result["rows"])])


def main(options: argparse.Namespace, words: Sequence[str]) -> int:
    """Print each case, then the table; write the result to ``--output`` after each; returns 0."""
    device = "simulated: an A100 by estimate, 20 GB/s each way, 10 us a copy"
    head = provenance("python -m benchmarks.planner", words, device)
    output = Path(options.output or ROOT / "out" / "planner-why.json")
    output.parent.mkdir(parents=True, exist_ok=True)
    made: list[dict[str, Any]] = []
    result = {"benchmark": "planner-why", **head, "rows": made}
    for row in rows(options.only, options.plans):
        made.append(row)
        write_atomically(output, json.dumps(result, indent=1).encode() + b"\n")
    print("\n" + table(result))
    return 0
