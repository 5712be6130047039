"""Rows of the suite: whether engines did equal work, and what of it the table shows."""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.common.quantised import PLAIN
from benchmarks.common.subjects import Times
from benchmarks.step.engines import COUNTED
from benchmarks.step.process import FIRST_STEPS, REFERENCE, Worker
from disco_accel.selfcheck.agreement import agreement
from disco_accel.sizes import format_size

TITLES = {
    "in-memory": "eager in memory",
    "resident": "disco, everything resident",
    "disco": "disco",
    "fixed-order": "disco, fixed order",
    "k0": "disco, no look-ahead (K=0)",
    "unfused": "disco, no fused kernels",
    "no-graphs": "disco, no launch graphs",
    "streamed": "module by module, synchronous",
    "compile": "torch.compile in memory",
    "checkpoint-offload": "transformers checkpoint offload",
    "accelerate": "accelerate cpu_offload",
    "zero3": "ZeRO-3 offload_param",
    "zero3-tuned": "ZeRO-3 offload_param, tuned",
    "deepcompile": "DeepCompile offload_parameters",
    "axolotl": "axolotl layer_offloading",
    "soup": "Soup layer streaming",
}
TOLERANCE = {"float32": (1e-5, 1e-3), "bfloat16": (2e-2, 5e-2)}
"""Of losses and of others' gradients in the first step, relative. Ours must agree with eager (``agreement``)."""
FALL = {"float32": 1e-3, "bfloat16": 0.02}
"""Of what the loss has fallen, added to its tolerance: optimizers that round otherwise take slightly other ways, and
one that does not train is off by all of it."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether an engine did the work that eager in memory did, and in words how far apart they were."""

    equal: bool
    words: str


@dataclass(frozen=True, slots=True)
class Row:
    """``losses`` of all steps, ``seconds`` of the timed ones. Sizes in bytes, of the steps; ``h2d`` and ``d2h`` in
    bytes per step, None where nobody knows. ``bound``: max(compute alone, link) in seconds, None if compute alone was
    not measured; ``any_plan``: seconds that no plan beats with the engine's own kernels, None without a plan."""

    engine: str
    quant: str
    budget: int | None
    ours: bool
    equal: bool
    verdict: str
    error: str | None
    losses: list[float]
    seconds: list[float]
    tokens_per_second: float | None
    used: int | None
    reserved: int | None
    host: int | None
    h2d: int | None
    d2h: int | None
    bound: float | None
    any_plan: float | None
    facts: Mapping[str, Any]


OURS = frozenset({"resident", "disco", "fixed-order", "k0", "unfused", "no-graphs"})


def judge(workers: Sequence[Worker], dtype: str, ours: Collection[str] = OURS) -> list[Verdict]:
    """Compare each worker with the one in memory that has weights of the same form. Their folders must still be
    there. The first step of engines in ``ours`` must agree with its own, and on the CPU all losses have its bits."""
    references = {w.job.quant: w for w in workers if w.job.engine == REFERENCE and w.error is None}
    return [_verdict(worker, references.get(worker.job.quant), dtype, ours) for worker in workers]


def _verdict(worker: Worker, reference: Worker | None, dtype: str, ours: Collection[str]) -> Verdict:
    if worker.error is not None:
        return Verdict(False, "")
    trainable = worker.facts["trainable"]
    if worker.facts["gradients"] != trainable["tensors"]:
        return Verdict(False, f"no: {worker.facts['gradients']} of {trainable['tensors']} gradients")
    if reference is None:
        return Verdict(True, "not compared: nothing ran in memory")
    if trainable != reference.facts["trainable"]:
        return Verdict(False, f"no: trains {trainable['elements']} elements")
    losses = max(abs(a - b) / abs(b) for a, b in zip(worker.losses, reference.losses, strict=True))
    mine, *eager = (run for w in (worker, reference) for run in _first_steps(w))
    if mine.keys() != eager[0].keys():
        return Verdict(False, "no: other parameters have gradients")
    found = agreement(mine, eager, outputs=("loss",))
    if losses == 0 and found.bits:
        return Verdict(True, "bits")
    gradients = max(relative(mine[name], eager[0][name]) for name in mine)
    close = _close(worker.losses, reference.losses, dtype)
    if worker.job.engine not in ours:
        equal, own = close and gradients <= TOLERANCE[dtype][1], ""
    else:
        exact = worker.job.device == "cpu" and not found.spread
        equal = not found.wrong and (losses == 0 if exact else close)
        own = f", eager's own {found.spread:.0e}" if found.spread else ""
    return Verdict(equal, f"{'to' if equal else 'no:'} {losses:.0e}, gradients {gradients:.0e}{own}")


def _first_steps(worker: Worker) -> list[dict[str, torch.Tensor]]:
    paths = [Path(worker.job.folder) / name for name in FIRST_STEPS]
    return [load_file(path) for path in paths if path.exists()]


def _close(mine: Sequence[float], theirs: Sequence[float], dtype: str) -> bool:
    fall = FALL[dtype] * abs(theirs[0] - theirs[-1])
    return all(abs(a - b) <= TOLERANCE[dtype][0] * abs(b) + fall for a, b in zip(mine, theirs, strict=True))


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """How far apart ``a`` and ``b`` are, over the size of ``b``."""
    return float((a.float() - b.float()).norm() / b.float().norm().clamp_min(1e-20))


def rows_of(
    workers: Sequence[Worker], verdicts: Sequence[Verdict], args: argparse.Namespace, ours: Collection[str] = OURS
) -> list[Row]:
    """A row for each worker."""
    compute = {w.job.quant: median(w.facts["kernel_seconds"]) for w in workers if w.facts.get("kernel_seconds")}
    rates = next((w.facts["rates"] for w in workers if w.facts.get("rates")), None)
    if args.device == "cpu":
        rates = {"h2d": args.bandwidth, "d2h": args.bandwidth}
    tokens = args.batch * args.tokens
    return [_row(w, v, tokens, compute.get(w.job.quant), rates, ours) for w, v in zip(workers, verdicts, strict=True)]


def _row(
    worker: Worker,
    verdict: Verdict,
    tokens: int,
    compute: float | None,
    rates: Mapping[str, float] | None,
    ours: Collection[str],
) -> Row:
    facts = dict(worker.facts) if worker.error is None else {}
    copied = {way: facts.pop(way, None) for way in ("h2d", "d2h")}
    link = max(((copied[way] or 0) / rates[way] for way in copied), default=0.0) if rates else 0.0
    seconds = worker.seconds if worker.error is None else []
    return Row(
        engine=worker.job.engine,
        quant=worker.job.quant,
        budget=worker.job.budget,
        ours=worker.job.engine in ours,
        equal=verdict.equal,
        verdict=verdict.words,
        error=worker.error,
        losses=worker.losses,
        seconds=seconds,
        tokens_per_second=tokens / median(seconds) if seconds else None,
        used=facts.pop("used", None),
        reserved=facts.pop("reserved", None),
        host=facts.pop("host", None),
        h2d=copied["h2d"],
        d2h=copied["d2h"],
        bound=None if compute is None else max(compute, link),
        any_plan=facts.pop("any_plan", None),
        facts=facts,
    )


HEADER = (
    "| engine | s per step | tokens/s | device used | device reserved | process memory | to device, GB/s "
    "| from device, GB/s | max(compute, link) / step | lower bound / step | equal to eager |\n|" + "---|" * 11
)


def table(result: Mapping[str, Any]) -> str:
    """Markdown: a line for each row; why an engine could not run stands in a footnote under the table, and of budgets
    that rows share with other forms of the weights the ratios."""
    budgets = {row["budget"] for row in result["rows"] if row["budget"] is not None}
    lines, notes = [HEADER], []
    for row in result["rows"]:
        mark = None
        if row["error"] is not None:
            mark = f"<sup>{len(notes) + 1}</sup>"
            notes.append(f"{mark} {cell_text(row['error'])}")
        lines.append(line(row, len(budgets) > 1, mark))
    words = [*ratios(result), *counts(result)]
    return "\n".join([*lines, *(["", "; ".join(notes) + "."] if notes else []), *_listed(words)])


def _listed(words: Sequence[str]) -> list[str]:
    return ["", *(f"- {text}" for text in words)] if words else []


def ratios(result: Mapping[str, Any]) -> list[str]:
    """Of each step from a plan of quantised weights within a budget: its bytes, and how long it took beside eager with
    all of them in memory and beside the same engine with plain weights within the same budget."""
    rows = {(r["engine"], r.get("quant", PLAIN), r["budget"]): r for r in result["rows"] if r["error"] is None}
    found = []
    for (engine, quant, budget), row in rows.items():
        if quant == PLAIN or budget is None or not row["ours"]:
            continue
        words = [f"{TITLES[engine]}, {quant}, {format_size(budget)}: reloads {format_size(row['h2d'])} a step"]
        eager, plain = rows.get(("in-memory", quant, None)), rows.get((engine, PLAIN, budget))
        if eager is not None:
            words.append(f"{_over(row, eager)} of eager {quant} in memory")
        if plain is not None:
            words.append(f"{_over(row, plain)} of {result['dtype']} ({format_size(plain['h2d'])}) at this budget")
        found.append("; ".join(words))
    return found


def counts(result: Mapping[str, Any]) -> list[str]:
    """Of each step from a plan its kernels, those that are fused, and the runs whose kernels were refused for a bit."""
    found = []
    for row in result["rows"]:
        if row["error"] is None and row["facts"].get("fused") is not None:
            kernels, fused, refused = (row["facts"][name] for name in COUNTED)
            budget = "" if row["budget"] is None else f", {format_size(row['budget'])}"
            found.append(
                f"{TITLES[row['engine']]}{budget}: {kernels} kernels, {fused} fused, {refused} refused for a bit"
            )
    return found


def _over(row: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    return f"{median(row['seconds']) / median(other['seconds']):.3f} × the step"


def line(row: Mapping[str, Any], name_budget: bool, mark: str | None = None) -> str:
    """One row as Markdown. An engine that could not run says why in the last cell, or has ``mark`` there."""
    title = TITLES[row["engine"]]
    if row.get("quant", PLAIN) != PLAIN:
        title += f", {row['quant']}"
    if name_budget and row["budget"] is not None:
        title += f", {format_size(row['budget'])}"
    if row["error"] is not None:
        return f"| {title} |" + " — |" * 9 + f" {mark or cell_text(row['error'])} |"
    times = Times(tuple(row["seconds"]))
    cells = [
        title,
        f"{times.median:.3g} ±{times.spread:.1g}",
        f"{row['tokens_per_second']:.0f}",
        *(size_cell(row[name]) for name in ("used", "reserved", "host")),
        *(rate_cell(row[way], times.median) for way in ("h2d", "d2h")),
        # Results of before this was measured have no bound of any plan.
        *("—" if row.get(name) is None else f"{row[name] / times.median:.0%}" for name in ("bound", "any_plan")),
        row["verdict"],
    ]
    return "| " + " | ".join(cells) + " |"


def size_cell(nbytes: int | None) -> str:
    """A size, or a dash."""
    return "—" if nbytes is None else format_size(nbytes)


def rate_cell(nbytes: int | None, seconds: float) -> str:
    """GB/s, or a dash."""
    return "—" if nbytes is None else f"{nbytes / seconds / 1e9:.3g}"


_REASONS = (
    ("ModuleNotFoundError", "not installed"),
    ("requires a CUDA", "needs a GPU"),
    ("Error building extension", "does not build here"),
    ("OutOfMemoryError", "out of memory"),
    ("out of memory", "out of memory"),
    ("TimeoutError", "not within its time"),
)
"""What an engine's error contains, and what that comes to. The file of results has the whole message."""


def cell_text(error: str) -> str:
    """``error`` as a cell of a table: why there is no figure, in a few words."""
    if least := re.search(r"at least \d+ bytes \(([^)]+)\)", error):
        return f"needs at least {least[1]}"
    for part, words in _REASONS:
        if part in error:
            return words
    kind = re.match(r"(\w+(?:Error|Exception|Small)):", error)
    return f"cannot run ({kind[1]})" if kind else "cannot run"


SHORT = ("in-memory", "disco", "streamed", "zero3-tuned")
"""The engines of the README's table: without a budget, with one, and two ways that others go."""
SHORT_HEADER = "| LoRA step | s | tokens/s | device memory | equal to eager |\n|" + "---|" * 5


def short_table(result: Mapping[str, Any]) -> str:
    """Markdown: the first row of each of ``SHORT`` that ran, and the columns that need no explanation."""
    ran_last = sorted(reversed(result["rows"]), key=lambda row: row["error"] is None)
    rows = {row["engine"]: row for row in ran_last}
    return "\n".join([SHORT_HEADER, *(_short_line(rows[name], result) for name in SHORT if name in rows)])


def _short_line(row: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    title = TITLES[row["engine"]]
    if row["budget"] is not None and len({r["budget"] for r in result["rows"]} - {None}) > 1:
        title += f", {format_size(row['budget'])}"
    if row["error"] is not None:
        return f"| {title} | — | — | — | {cell_text(row['error'])} |"
    # On the host device the engines without an arena have no device but the process's own memory.
    used = "all in host memory" if row["used"] is None and result.get("device") == "cpu" else size_cell(row["used"])
    times = Times(tuple(row["seconds"]))
    cells = [title, f"{times.median:.3g} ±{times.spread:.1g}", f"{row['tokens_per_second']:.0f}", used, row["verdict"]]
    return "| " + " | ".join(cells) + " |"
