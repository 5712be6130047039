"""The answers of ``disco-accel plan`` for people: a table over budgets, and a sentence of advice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from disco_accel.observe.report import table
from disco_accel.plan.bound.larger_memory import useful_text
from disco_accel.sizes import format_size, size_for_people

Figures = Mapping[str, Any]

_HEADER = (
    *("budget", "fits", "host memory", "never leave", "over the link", "step, s", "tokens/s", "limit", "over bound"),
    *("recompute dropped", "link hidden from"),
)
_AS_FAST = 1.05
"""A step so many times as long as the fastest is as good as that."""
_AFTER_FULL = (
    "Behind these seconds: gradients that are on their way to host memory at the end, and the optimizer's update."
)
_TASKS = {"lora": "LoRA", "full": "training of all weights", "prefill": "a prompt", "decode": "a token with a cache"}


def plan_text(answers: Sequence[Figures]) -> str:
    """A line about the question, a row for each answer, the memory that was not counted, and advice."""
    first, shapes = answers[0], len({(each["batch"], each["seq"]) for each in answers}) > 1
    ways = len({each.get("parallel") for each in answers}) > 1
    header = [*(["batch x seq"] if shapes else []), *(["parallel"] if ways else []), *_HEADER]
    rows = [
        [
            *([f"{each['batch']} x {each['seq']}"] if shapes else []),
            *([each.get("parallel", "")] if ways else []),
            *_row(each),
        ]
        for each in answers
    ]
    lines = [_title(first, shapes), "", table(header, rows), ""]
    if first.get("unverified"):
        lines.append(f"Unverified, no document was read: {', '.join(first['unverified'])} of this GPU.")
    if first.get("not_counted"):
        lines.append(f"Estimated {first['not_counted']}.")
    lines += _about_fused(answers)
    if first["task"] == "full":
        lines.append(_AFTER_FULL)
    lines.append(advice(answers))
    return "\n".join(lines) + "\n"


def _about_fused(answers: Sequence[Figures]) -> list[str]:
    """A line where steps have fused kernels."""
    fused = [each for each in answers if each.get("fused")]
    if not fused:
        return []
    more = [each["step_seconds_without_fused"] / each["step_seconds"] - 1 for each in fused]
    between = "" if min(more) == max(more) else f"{min(more):.0%} to "
    return [
        f"Seconds are with fused kernels, {fused[0]['fused']} of {fused[0]['kernels']}; with fuse: off a step takes "
        f"{between}{max(more):.0%} longer."
    ]


def _title(first: Figures, shapes: bool) -> str:
    step = "" if shapes else f", {first['batch']} x {first['seq']} tokens"
    quant = f", {first['quant']['form']} weights" if "quant" in first else ""
    devices = f", {first['devices']} devices" if "devices" in first else ""
    source = "measured on" if first.get("measured") else "by estimate for"
    return (
        f"{first['model']} ({first['config']}): {_TASKS[first['task']]}{step}{quant}{devices}; {source} "
        f"{first['estimated_for']}"
    )


def _row(each: Figures) -> list[str]:
    budget = size_for_people(each["budget_bytes"])
    if not each["fits"]:
        answer = f"from {size_for_people(each['needed_bytes'])}" if "needed_bytes" in each else "host memory"
        return [budget, answer, *["-"] * (len(_HEADER) - 2)]
    weights = each["frozen_bytes"] + each["host_updated_bytes"]
    again, hidden = each["recomputation"], each["hidden_at_tokens"]
    return [
        budget,
        "yes",
        format_size(sum(each["host_memory"].values())),
        f"{each['resident_bytes'] / weights:.0%}" if weights else "-",
        format_size(each["reload_bytes"] + each["offload_bytes"]),
        f"{each['step_seconds']:.4g}",
        _rate(each["tokens_per_second"]),
        each["limit"],
        f"{each['ratio']:.2f}",
        f"{again['dropped'] / again['seconds']:.0%}" if again and again["seconds"] else "-",
        f"{hidden} tokens" if hidden else "-",
    ]


def _rate(rate: float) -> str:
    """Tokens a second, of which decoding has few."""
    return f"{rate:.0f}" if rate >= 100 else f"{rate:.3g}"


def advice(answers: Sequence[Figures]) -> str:
    """One sentence: the budget to take, or the remedy."""
    fits = sorted((each for each in answers if each["fits"]), key=lambda each: each["budget_bytes"])
    refused = [each for each in answers if not each["fits"]]
    if not fits:
        return _remedy(refused)
    best = min(fits, key=lambda each: each["step_seconds"] / each["tokens"])
    rate = best["tokens_per_second"]
    enough = next(each for each in fits if each["tokens_per_second"] * _AS_FAST >= rate)
    if len(fits) > 1 and len({(each["batch"], each["seq"]) for each in fits}) > 1:
        return (
            f"Most tokens a second: {best['batch']} x {best['seq']} tokens in {size_for_people(best['budget_bytes'])}, "
            f"{_rate(rate)}."
        )
    if len(fits) > 1:
        first = fits[0]
        half = next((each for each in fits if each["step_seconds"] * 2 <= first["step_seconds"]), None)
        halved = (
            f", and {size_for_people(half['budget_bytes'])} halves the step of {size_for_people(first['budget_bytes'])}"
            if half is not None
            else ""
        )
        more = enough["step_seconds"] / best["step_seconds"] - 1
        gain = f"larger ones make a step at most {more:.0%} shorter" if more >= 0.005 else "no larger one is faster"
        return f"{size_for_people(enough['budget_bytes'])} is enough: {gain}{halved}."
    return _of_one(best)


def _remedy(refused: Sequence[Figures]) -> str:
    needed = min((each["needed_bytes"] for each in refused if "needed_bytes" in each), default=None)
    if needed is None:
        return "More host memory is needed, or a form of the weights that takes less (--quant)."
    text = (
        f"It fits from {size_for_people(needed)} on; fewer tokens (--batch, --seq) or large kernels in chunks "
        "(--chunks auto) need less."
    )
    more = next((each["refusal"]["more"] for each in refused if each.get("needed_bytes") == needed), "")
    return f"{text} {more}." if more else text


def _of_one(only: Figures) -> str:
    hidden, over = only["hidden_at_tokens"], max(0.0, only["ratio"] - 1)
    if only["limit"] == "link":
        return (
            f"The link limits this step: kernels take as long from about {hidden} tokens a step on, and it has "
            f"{only['tokens']}; more tokens, a larger budget or --quant help. {_more_memory(only)}"
        )
    if not only["reload_bytes"]:
        return f"All weights stay on the device, and the step takes {size_for_people(only['peak_bytes'])} of it."
    if only["ratio"] <= _AS_FAST:
        return f"Kernels limit this step, {over:.0%} over the bound: more memory gains little."
    return f"Kernels limit this step, {over:.0%} over the bound. {_more_memory(only)}"


def _more_memory(only: Figures) -> str:
    """The gain of a larger budget, in a sentence or two."""
    gain, useful = only["next_gib"], only["useful_budgets"]
    words = [
        f"With {format_size(gain['more_bytes'])} more it loads about {format_size(gain['loads_saved_bytes'])} less and "
        f"takes about {gain['seconds']:.3g} s less, {gain['seconds_at_most']:.3g} s at most with any budget."
    ]
    if useful:
        words.append(f"{useful_text(useful, only['budget_bytes'])}.")
    return " ".join(words)
