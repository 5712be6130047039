"""Tables of what ``make gpu`` has measured, from its file: rows by case, then what the other stages found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.gpu.stage import NOT_HERE
from benchmarks.gpu.training import UNFUSED
from benchmarks.step.table import rate_cell, size_cell

CASES = {
    "1b": "LoRA, TinyLlama-1.1B shape, bf16, 4 x 1024 tokens, rank 16",
    "8b": "LoRA, Llama-3-8B shape, bf16, 4 x 1024 tokens, rank 16",
    "70b": "QLoRA, Llama-2-70B shape, NF4, 1 x 2048 tokens, rank 16",
}
_TITLES = {
    "eager": "eager, activations checkpointed",
    "no_checkpointing": "eager, nothing checkpointed",
    "eager_again": "eager, activations checkpointed, after the others",
    "checkpoint_offload": "transformers checkpoint offload",
    "compile": "torch.compile, activations checkpointed",
    "zero3": "ZeRO-3 offload_param, tuned",
    "soup": "Soup layer streaming",
}
HEADER = (
    "| engine | s per step | tokens/s | device used | to device, GB/s | lower bound / step | first step, s "
    "| beside eager |\n|" + "---|" * 8
)
_OTHERS = ("8b_prompt", "8b_evaluation", "1.5b_full")


def table(result: Mapping[str, Any]) -> str:
    """Markdown. A stage that did not end says so in its row."""
    rows = {row["stage"]: row for row in result["rows"]}
    parts = []
    for case, title in CASES.items():
        lines = [
            _line(name.removeprefix(f"{case}_"), row)
            for name, row in rows.items()
            if name.startswith(f"{case}_") and name not in _OTHERS
        ]
        if lines:
            parts.append("\n".join([f"{title}:", "", HEADER, *lines]))
    for name in _OTHERS:
        if name in rows:
            parts.append(_pair(name, rows[name]))
    rest = [row for name, row in rows.items() if not name.startswith(tuple(CASES)) and name not in _OTHERS]
    parts.append("\n".join(f"- {_sentence(row)}" for row in rest))
    return "\n\n".join(part for part in parts if part)


def first_screen_lines(result: Mapping[str, Any]) -> list[str]:
    """The README's lines: each case's steps of ours beside the checkpointed step of eager in memory."""
    rows = {row["stage"]: row["figures"] for row in result["rows"] if row["status"] == "ok"}
    lines = []
    for case, title in CASES.items():
        eager = rows.get(f"{case}_eager")
        for name, figures in rows.items():
            budget = name.removeprefix(f"{case}_ours_")
            if eager is None or budget == name or budget.endswith(UNFUSED):
                continue
            words = title.removeprefix("LoRA, ").removesuffix(", rank 16")
            beside = f"{eager['seconds']:.3g} s, {size_cell(eager['used'])}"
            ours = f"{figures['seconds']:.3g} s, {size_cell(figures['used'])}"
            card = result["machine"].partition(",")[0]
            lines.append(f"| {words} | {beside} | {ours} | {budget} | {card}, {result['date']} |")
    return lines


def _line(name: str, row: Mapping[str, Any]) -> str:
    ours = f"disco, {name.removeprefix('ours_').removesuffix(UNFUSED)}"
    ours += ", no fused kernels" if name.endswith(UNFUSED) else ""
    title = ours if name.startswith("ours_") else _TITLES[name]
    figures = row["figures"]
    if "seconds" not in figures:
        return f"| {title} |" + " — |" * 6 + f" {_why(row)} |"
    seconds = figures["seconds"]
    first = figures.get("first_step_seconds")
    cells = [
        title,
        f"{seconds:.3f}",
        f"{figures['tokens_per_second']:,.0f}",
        size_cell(figures.get("used")),
        rate_cell(figures.get("reload_bytes", figures.get("h2d")), seconds),
        "—" if "any_plan" not in figures else f"{figures['any_plan'] / seconds:.0%}",
        "—" if first is None else f"{first:.1f}",
        figures.get("verdict", "—"),
    ]
    return "| " + " | ".join(cells) + " |"


def _why(row: Mapping[str, Any]) -> str:
    figures = row["figures"]
    return str(figures.get("error") or figures.get(NOT_HERE) or row["status"])


def _pair(name: str, row: Mapping[str, Any]) -> str:
    figures = row["figures"]
    what = {
        "8b_prompt": "A prompt of {batch} x {tokens} tokens, 8B shape, bf16",
        "8b_evaluation": "The loss of a batch of 4 x 1024 without gradients, 8B shape, by a model that trains",
        "1.5b_full": "All weights of a 1.5B shape trained with AdamW, bf16, {batch} x {tokens}",
    }[name]
    words = [f"{what.format_map(dict(figures))}:"]
    for engine, found in figures.items():
        if isinstance(found, dict) and "seconds" in found:
            used = f", {size_cell(found['used'])}" if found.get("used") else ""
            verdict = f", {found['verdict']}" if found.get("verdict") else ""
            words.append(f"{engine.replace('ours_', 'disco ')} {found['seconds']:.3f} s{used}{verdict};")
        elif isinstance(found, dict):
            words.append(f"{engine}: {found.get('error', 'no figures')};")
    return " ".join([*words, f"stage {row['status']}."])


def _sentence(row: Mapping[str, Any]) -> str:
    shown = ", ".join(f"{key} {_short(value)}" for key, value in row["figures"].items() if key != "python")
    return f"`{row['stage']}`: {row['status']} in {row['seconds']:.0f} s; {shown}"


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        return "(" + ", ".join(f"{key} {_short(item)}" for key, item in value.items()) + ")"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ", ".join(_short(item) for item in value) + "]"
    return str(value)
