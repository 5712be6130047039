"""``plan``: whether a recipe's step, or that of a model by its name, fits budgets, and how fast it is then."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from disco_accel.cli import step_question
from disco_accel.cli.plan_answers import _StepAnswers, answers_about, device_of
from disco_accel.cli.recipe_commands import plan_seconds_argument, say
from disco_accel.errors import BudgetTooSmall, CaptureError, ConfigError
from disco_accel.sizes import format_size, parse_size

PARALLEL = ("layers", "batch", "tensor")
_MOST = 1 << 20
"""Rows of a batch and tokens of a row: more are a slip of the pen."""
_POINTS = 6
"""Of the curve of ``--budget all``."""


def plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``plan``."""
    parser.add_argument(
        "recipe", metavar="RECIPE.yaml", nargs="?", help="a training or a prefill; of the model only its config is read"
    )
    parser.add_argument(
        "--model", metavar="NAME", help="in its place: a config's folder, a preset, or a name on the hub"
    )
    parser.add_argument("--task", choices=step_question.TASKS, help="of --model (default: lora)")
    parser.add_argument("--batch", metavar="N,...", help="rows of a step (default: 1, or the recipe's)")
    parser.add_argument("--seq", metavar="N,...", help="tokens of a row or cache (default: 2048, or the recipe's)")
    parser.add_argument(
        "--budget",
        "--memory",
        dest="budget",
        metavar="SIZE,...",
        help="device memory such as 12GiB, several, or all: from the smallest that works to the largest of any use "
        "(default: the recipe's, or nine tenths of --gpu)",
    )
    parser.add_argument("--host-memory", metavar="SIZE", help="that the step may take (default: the recipe's, or any)")
    parser.add_argument("--gpu", metavar="NAME", help="whose speed and memory are taken, or this (default: a100-40g)")
    step_question.device_arguments(parser)
    plan_seconds_argument(parser)
    parser.add_argument("--devices", metavar="N", type=int, help="how many share the step (default: the recipe's)")
    parser.add_argument(
        "--parallel",
        choices=(*PARALLEL, "all"),
        help="what each of them gets: layers in a row, a part of the batch, or of each large weight; all: plan all "
        "(default: the recipe's)",
    )
    parser.add_argument("--chunks", metavar="N", type=_chunks, help="that large kernels run in, or auto (the recipe's)")
    parser.add_argument(
        "--recompute",
        choices=("auto", "as-written"),
        help="auto: what fits is kept in the place of recomputation (default: the recipe's)",
    )
    parser.add_argument("--micro-batches", metavar="M", type=int, help="that a batch runs in (default: the recipe's)")
    parser.add_argument("--passes", action="store_true", help="list what changed the graph between capture and plan")
    parser.add_argument("--json", action="store_true", help="for programs: one object a line for each plan")
    parser.add_argument("-o", "--output", metavar="DIR", help="folder for the plans, their figures and pictures")


def _chunks(text: str) -> int | str:
    """A number; the config refuses anything else."""
    return int(text) if text.isdecimal() else text


def plan(options: argparse.Namespace) -> int:
    """Say which budgets a training step, a prompt or a token fits, how many weights stay on the device, and how long it
    takes."""
    from disco_accel.observe.plan_table import plan_text

    if options.parallel == "all" and options.output is not None:
        raise ConfigError("-o: takes one plan; give --parallel layers, batch or tensor")
    device = device_of(options)
    budgets = _budgets(options.budget)
    steps = list(_steps(options))
    answers: list[dict[str, Any]] = []
    errors: list[Exception] = []
    for step in steps:
        for way in PARALLEL if options.parallel == "all" else (options.parallel,):
            try:
                asked = answers_about(step.with_config(parallel=way), device, options)
                for figures, error in _asked(asked, budgets, options, several=len(steps) > 1):
                    answers.append(figures)
                    errors += [] if error is None else [error]
                    if options.json:
                        say("" if len(answers) > 1 else figures.get("not_counted", ""))
                        print(json.dumps(figures), flush=True)
            except (ConfigError, CaptureError) as error:
                if options.parallel != "all":
                    raise
                say(f"{way}: {error}")
                errors.append(error)
    if not options.json and answers:
        print(plan_text(answers), end="")
    if not any(each["fits"] for each in answers):
        # That of the largest budget tells most.
        raise max(errors, key=lambda error: error.given if isinstance(error, BudgetTooSmall) else -1)
    return 0


def _asked(
    asked: _StepAnswers, budgets: tuple[int, ...] | str, options: argparse.Namespace, several: bool
) -> Iterator[tuple[dict[str, Any], Exception | None]]:
    """The figures of a step in each budget, with an error where it does not fit."""
    totals = asked.curve(_POINTS) if budgets == "all" else budgets or (asked.own_budget(),)
    for total in totals:
        folder = None if options.output is None else Path(options.output)
        if folder is not None and (several or len(totals) > 1):
            folder /= f"{asked.step.rows}x{asked.step.recipe.max_length}-{format_size(int(total))}"
        try:
            yield asked.answer(int(total), folder)
        except ConfigError as error:
            if len(totals) == 1 or not str(error).startswith("host_memory:"):
                raise
            yield {**asked.question, "fits": False, "budget_bytes": int(total), "reason": str(error)}, error


def _steps(options: argparse.Namespace) -> Iterator[step_question._Step]:
    """Those that are asked about: each number of rows with each length."""
    if (options.recipe is None) == (options.model is None):
        raise ConfigError("plan: give a recipe's file or --model NAME, one of both")
    if options.recipe is not None and options.task is not None:
        raise ConfigError("--task: a recipe says what it does; leave it out, or give --model in the recipe's place")
    rows, lengths = _numbers("--batch", options.batch, 1), _numbers("--seq", options.seq, 2)
    host = None if options.host_memory is None else _size("--host-memory", options.host_memory)
    names = ("devices", "micro_batches", "chunks", "recompute")
    changes: Mapping[str, Any] = {name: getattr(options, name) for name in names} | {"host_memory": host}
    for count in rows or (None,):
        for length in lengths or (None,):
            if options.model is not None:
                step = step_question.of_model(options.model, options.task or "lora", count or 1, length or 2048)
            else:
                step = step_question.of_recipe(options.recipe, count, length)
            yield step.with_config(**changes)


def _numbers(option: str, text: str | None, least: int) -> tuple[int, ...]:
    """The members of a list. Raises ConfigError naming the one that is no number."""
    found = []
    for member in [] if text is None else text.split(","):
        if not (member.strip().isdecimal() and least <= int(member) <= _MOST):
            raise ConfigError(f"{option}: {member!r} does not work; give numbers from {least} to {_MOST}, such as 1,4")
        found.append(int(member))
    return tuple(dict.fromkeys(found))


def _budgets(text: str | None) -> tuple[int, ...] | str:
    """Sizes, ``all``, or none. Raises ConfigError naming the one that is no size."""
    if text is None or text == "all":
        return text or ()
    return tuple(dict.fromkeys(_size("--budget", member) for member in text.split(",")))


def _size(option: str, text: str) -> int:
    try:
        return parse_size(text)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from None
