"""The tables of docs/benchmarks.md and the README's, made from the files in ``benchmarks/results``.

    python -m benchmarks.report            rewrites them
    python -m benchmarks.report --check    exit 1 if a page is not what the files say

A figure is shown with the machine that it was measured on, the date and the command. What was simulated says so in its
heading. ``make gpu`` and ``bench step -o`` write such files; a table appears when its file is there.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common.quantised import PLAIN
from benchmarks.devices import suite as devices
from benchmarks.full import table as full_table
from benchmarks.gpu import table as gpu_table
from benchmarks.optimizer import suite as optimizer
from benchmarks.planner import why
from benchmarks.prefill import peers as prefill_peers
from benchmarks.prefill import suite as prefill
from benchmarks.simulated import full as simulated_full
from benchmarks.simulated import lora as simulated
from benchmarks.simulated import quant as simulated_quant
from benchmarks.simulated import recompute as simulated_recompute
from benchmarks.simulated_devices import tables as simulated_devices
from benchmarks.step import table as step_table
from benchmarks.store import offload as store_offload
from benchmarks.store import policies as store_policies
from benchmarks.store import suite as store
from disco_accel.errors import ConfigError
from disco_accel.graph.files import write_atomically
from disco_accel.sizes import format_size

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- results -->", "<!-- end of results -->"
NOT_ON_GPU = "No GPU has run this: every figure below is from the host device or from simulation, and says which."
SHORT_BEGIN, SHORT_END = "<!-- on a GPU -->", "<!-- end of on a GPU -->"
NOT_ON_GPU_SHORT = "No GPU has run this; these are of the host device."
CARDS = (
    "a LoRA step of rank 16 on all projections, activations checkpointed, at the speeds of an RTX 4090 behind 25 GB/s "
    "each way. For each card: the step over that of a card that held all, and the bytes loaded each step"
)
_QUIET = 1.25
"""A load average of each core above which a machine was doing something else as well."""


def section(folder: Path) -> str:
    """Everything between the markers: a table for each file of results in ``folder``, GPUs first.

    Raises:
        ConfigError: a file is no result of a benchmark, or claims a device of which it does not say the machine.
    """
    results = _results(folder)
    parts = [] if any(_place(result) == 0 for result in results) else [NOT_ON_GPU]
    parts += [_table(result) for result in results]
    return "\n\n".join(parts)


def summary(folder: Path) -> str:
    """The README's part: four rows of the first LoRA step that was measured with plain weights, on a GPU if one has
    run it, and what was simulated for cards with packed weights, which says so.

    Raises:
        ConfigError: as ``section``.
    """
    results = _results(folder)
    steps = [r for r in results if r["benchmark"] == "step" and r.get("quant", [PLAIN]) == [PLAIN]]
    parts = [] if steps and _place(steps[0]) == 0 else [NOT_ON_GPU_SHORT]
    if steps:
        note = f" {steps[0]['note']}".replace("](", "](docs/") if "note" in steps[0] else ""
        parts += [f"{_step_title(steps[0])}; {_origin(steps[0])}.{note}", step_table.short_table(steps[0])]
    for result in results:
        if result["benchmark"] == "simulated-quant":
            parts += [
                f"**Simulated**, no device ran it: {CARDS}; {result['date']}.",
                simulated_quant.short_table(result),
            ]
    return "\n\n".join(parts)


GPU_HEADER = "| LoRA step | eager in memory | disco | within | GPU, date |\n|" + "---|" * 5


def first_screen(folder: Path) -> str:
    """The README's first table: a line for each step and budget that a GPU has run, beside eager in memory there.

    Raises:
        ConfigError: as ``section``.
    """
    lines = []
    for result in _results(folder):
        if _place(result) == 0 and result["benchmark"] == "step":
            lines += _gpu_lines(result)
        elif _place(result) == 0 and result["benchmark"] == "gpu":
            lines += gpu_table.first_screen_lines(result)
    return "\n".join([GPU_HEADER, *lines]) if lines else NOT_ON_GPU_SHORT


def _gpu_lines(result: Mapping[str, Any]) -> list[str]:
    """Steps of each form of the weights from a plan within a budget; who could not run is in docs/benchmarks.md."""
    lines = []
    ran = [row for row in result["rows"] if row["error"] is None]
    card = result["machine"].split(",")[0]
    for row in ran:
        if row["engine"] != "disco":
            continue
        form = row.get("quant", PLAIN)
        eager = next((r for r in ran if r["engine"] == "in-memory" and r.get("quant", PLAIN) == form), None)
        what = f"{result['shape']['name']} {result['dtype'] if form == PLAIN else form}"
        cells = [
            f"{what}, {result['batch']} x {result['tokens']}",
            "—" if eager is None else f"{median(eager['seconds']):.3g} s, {format_size(eager['used'])}",
            f"{median(row['seconds']):.3g} s, {format_size(row['used'])}",
            format_size(row["budget"]),
            f"{card}, {result['date']}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _results(folder: Path) -> list[dict[str, Any]]:
    found = [_read(path) for path in sorted(folder.glob("*.json"))]
    return sorted(found, key=lambda result: (_place(result), result["date"], result["command"]))


def _place(result: Mapping[str, Any]) -> int:
    if result["simulated"]:
        return 2
    return 0 if result.get("device") == "cuda" else 1


def _read(path: Path) -> dict[str, Any]:
    try:
        result: dict[str, Any] = json.loads(path.read_text())
        missing = {"benchmark", "command", "date", "machine", "simulated", "versions", "rows"} - result.keys()
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"{path.name}: not a result of a benchmark: {error}") from error
    if missing or result["benchmark"] not in TABLES:
        raise ConfigError(f"{path.name}: not a result of a benchmark: {', '.join(sorted(missing)) or 'unknown kind'}")
    if result.get("device") == "cuda" and "CUDA" not in result["machine"]:
        raise ConfigError(f"{path.name}: figures of a GPU without a GPU: machine is {result['machine']!r}")
    if not result["simulated"] and result["benchmark"].startswith("simulated"):
        raise ConfigError(f"{path.name}: simulated figures that do not say so")
    return result


def _table(result: Mapping[str, Any]) -> str:
    title, body = TABLES[result["benchmark"]](result)
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    note = f" {result['note']}" if "note" in result else ""
    return f"**{title}**\n\n{body}\n\n{_origin(result)}; `{result['command']}`; {versions}.{note}"


def _origin(result: Mapping[str, Any]) -> str:
    busy = "" if result["simulated"] else f", load {result['load']:g}"
    cores = re.search(r"(\d+) cores", result["machine"])
    if not result["simulated"] and result["load"] > _QUIET * (int(cores[1]) if cores else 2):
        busy += " (busy: the times are not worth quoting)"
    return f"{result['machine']}{busy}; {result['date']}"


def _step(result: Mapping[str, Any]) -> tuple[str, str]:
    return _step_title(result), step_table.table(result)


def _step_title(result: Mapping[str, Any]) -> str:
    shape = f"{result['shape']['name']} shape, batch {result['batch']} x {result['tokens']}, {result['dtype']}"
    budgets = {row["budget"] for row in result["rows"] if row["budget"] is not None}
    form = result.get("quant", [PLAIN])[0]
    parts = [f"LoRA step, {shape}, {format_size(result['weights'])} of {'' if form == PLAIN else f'{form} '}weights"]
    if not result.get("checkpointing", True):
        parts.append("no checkpointing in the script")
    if len(budgets) == 1:
        parts.append(f"budget {format_size(budgets.pop())}")
    if result["bandwidth"] is not None:
        parts.append(f"link {result['bandwidth'] / 1e9:g} GB/s each way")
    return ", ".join(parts)


def _gpu(result: Mapping[str, Any]) -> tuple[str, str]:
    return f"On a GPU: {result['machine'].partition(',')[0]}", gpu_table.table(result)


def _full(result: Mapping[str, Any]) -> tuple[str, str]:
    shape = f"{result['shape']['name']} shape, batch {result['batch']} x {result['tokens']}, {result['dtype']}"
    title = (
        f"All weights trained, {shape}, {format_size(result['weights'])} of weights; eager holds "
        f"{format_size(result['eager_peak'])}, budget {format_size(result['budget'])}, "
        f"link {result['bandwidth'] / 1e9:g} GB/s each way"
    )
    return title, full_table.table(result)


def _simulated(result: Mapping[str, Any]) -> tuple[str, str]:
    lines = [simulated.HEADER, *(simulated.line(row) for row in result["rows"])]
    return "Simulated: LoRA steps on an H200, no device ran them", "\n".join(lines)


def _planner_why(result: Mapping[str, Any]) -> tuple[str, str]:
    return "Simulated: the distance of plans from the bound, in percent of the bound (docs/why.md)", why.table(result)


def _simulated_quant(result: Mapping[str, Any]) -> tuple[str, str]:
    lines = [simulated_quant.HEADER, *(simulated_quant.line(row) for row in result["rows"])]
    return "Simulated: LoRA steps on cards of 12, 16 and 24 GB, no device ran them", "\n".join(lines)


def _simulated_recompute(result: Mapping[str, Any]) -> tuple[str, str]:
    title = "Simulated: recomputation as a script has it, and as a plan chooses it, no device ran it"
    return title, simulated_recompute.table(result)


def _simulated_full(result: Mapping[str, Any]) -> tuple[str, str]:
    return "Simulated: training of all weights, the optimizer in host memory, no device ran it", simulated_full.table(
        result
    )


def _simulated_devices(result: Mapping[str, Any]) -> tuple[str, str]:
    title = "Simulated: LoRA steps and prompts on one to eight GPUs, no device ran them"
    return title, simulated_devices.table(result)


def _devices(result: Mapping[str, Any]) -> tuple[str, str]:
    return "Steps on several host devices", devices.table(result)


def _simulated_optimizer(result: Mapping[str, Any]) -> tuple[str, str]:
    title = "Simulated: a published study's optimizer step of 13 billion parameters on an H100, no device ran it"
    return title, optimizer.table(result)


def _prefill(result: Mapping[str, Any]) -> tuple[str, str]:
    shape = f"hidden {result['hidden']}, {result['layers']} layers, batch {result['batch']}, {result['dtype']}"
    lines = [prefill.HEADER, *(prefill.show(prefill.from_json(row)) for row in result["rows"])]
    return f"Prefill, {shape}, link {result['bandwidth'] / 1e9:g} GB/s each way", "\n".join(lines)


def _prefill_peers(result: Mapping[str, Any]) -> tuple[str, str]:
    shape = f"{result['shape']['name']} shape, {result['batch']} x {result['tokens']} tokens, {result['dtype']}"
    title = f"Prefill, {shape}, {format_size(result['weights'])} of weights, budget {result['memory']}"
    link = "" if result["bandwidth"] is None else f", link {result['bandwidth'] / 1e9:g} GB/s each way"
    return title + link, prefill_peers.table(result)


def _store(result: Mapping[str, Any]) -> tuple[str, str]:
    return "The tensor store's calls", store.table(result)


def _store_policies(result: Mapping[str, Any]) -> tuple[str, str]:
    return store_policies.title(result), store_policies.table(result)


def _store_offload(result: Mapping[str, Any]) -> tuple[str, str]:
    return store_offload.title(result), store_offload.table(result)


TABLES: Mapping[str, Callable[[Mapping[str, Any]], tuple[str, str]]] = {
    "step": _step,
    "gpu": _gpu,
    "full": _full,
    "devices": _devices,
    "prefill": _prefill,
    "prefill-peers": _prefill_peers,
    "store": _store,
    "store-policies": _store_policies,
    "store-offload": _store_offload,
    "simulated": _simulated,
    "simulated-quant": _simulated_quant,
    "simulated-recompute": _simulated_recompute,
    "simulated-devices": _simulated_devices,
    "simulated-full": _simulated_full,
    "simulated-optimizer": _simulated_optimizer,
    "planner-why": _planner_why,
}


def put(text: str, made: str, page: str, begin: str = BEGIN, end: str = END) -> str:
    """``text`` of ``page`` with ``made`` between its markers. ConfigError where they are not there once, in order."""
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ConfigError(f"{page}: the lines '{begin}' and '{end}' must be there once each, in this order")
    head, rest = text.split(begin)
    return f"{head}{begin}\n{made}\n{end}{rest.split(end)[1]}"


PARTS: Sequence[tuple[str, Callable[[Path], str], str, str]] = (
    ("README.md", first_screen, SHORT_BEGIN, SHORT_END),
    ("README.md", summary, BEGIN, END),
    ("docs/benchmarks.md", section, BEGIN, END),
)
"""Page, what makes its part, and the lines around that."""


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page is not up to date")
    args = parser.parse_args(argv)
    stale = False
    for page, make, begin, end in PARTS:
        before = (ROOT / page).read_text()
        after = put(before, make(ROOT / "benchmarks" / "results"), page, begin, end)
        stale |= before != after
        if not args.check:
            write_atomically(ROOT / page, after.encode())
    return int(args.check and stale)


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except ConfigError as error:
        print(f"benchmarks.report.pages: {error}", file=sys.stderr)
        raise SystemExit(2) from None
