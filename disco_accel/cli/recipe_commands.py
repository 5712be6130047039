"""Commands about recipes and weights: ``weights`` and ``capture`` run nothing, ``prefill`` does."""

from __future__ import annotations

import argparse
import json
import math
import sys
from typing import Any

from disco_accel.cli import step_question
from disco_accel.errors import ConfigError
from disco_accel.graph.values import host_copy_exists


def weights_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``weights``."""
    parser.add_argument("instance", metavar="INSTANCE.json", help="memory, bandwidth, a0 and layers")
    parser.add_argument("--milp", metavar="SECONDS", default="30", help="time for the lower bound (default: 30)")


def weights(options: argparse.Namespace) -> int:
    """Which layers' weights leave the device, how long the step takes, and how long it must take at least."""
    from disco_accel.plan.beaumont.instance_file import read_instance
    from disco_accel.plan.beaumont.solve import solve

    seconds = _seconds("--milp", options.milp)
    print(json.dumps(solve(read_instance(options.instance), seconds).as_dict()))
    return 0


def _seconds(option: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not (0 <= seconds < math.inf):
        raise ConfigError(f"{option}: {text!r} does not work; give seconds, 0 or more")
    return seconds


def prefill_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``prefill``."""
    parser.add_argument("recipe", metavar="RECIPE.yaml", help="model, prompts and disco_config")
    parser.add_argument("--memory", metavar="SIZE", help="the budget, such as 12GiB (default: the recipe's)")


def prefill(options: argparse.Namespace) -> int:
    """Read each prompt of a recipe within its budget; one JSON line each."""
    from disco_accel.recipes.settings import read_prefill_recipe

    recipe = read_prefill_recipe(options.recipe)
    if sys.modules.get("torch") is None:
        say("loading PyTorch and transformers")
    from disco_accel.recipes.prefill import run

    return run(recipe, options.memory)


def capture_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``capture``."""
    parser.add_argument(
        "recipe", metavar="RECIPE.yaml", help="a training or a prefill; of the model only its config is read"
    )
    step_question.device_arguments(parser)
    parser.add_argument("-o", "--output", metavar="TASK.json", required=True, help="where the task graph goes")


def plan_seconds_argument(parser: argparse.ArgumentParser) -> None:
    """Declare ``--plan-seconds``."""
    works = "seconds after which the best plan so far is taken, or auto: work enough for the graph (default: auto)"
    parser.add_argument("--plan-seconds", metavar="SECONDS", help=works)


def deadline(options: argparse.Namespace, default: float | None = None) -> float | None:
    """``--plan-seconds`` as a number; None for auto. Raises ConfigError."""
    from disco_accel.config.keys import seconds_or_auto

    if options.plan_seconds is None:
        return default
    try:
        seconds = seconds_or_auto(options.plan_seconds)
    except ValueError as error:
        raise ConfigError(f"--plan-seconds: {options.plan_seconds!r} does not work; {error}") from None
    return None if isinstance(seconds, str) else seconds


def say(line: str) -> None:
    """Tell the user something beside the result, if there is anything to tell."""
    if line:
        print(f"disco-accel: {line}", file=sys.stderr)


def capture(options: argparse.Namespace) -> int:
    """Write the task graph of a recipe's training step, with estimated durations and the scratch that is known."""
    from disco_accel.graph.files import write_taskgraph
    from disco_accel.measure.costs import Estimated
    from disco_accel.step.compile.pipeline import with_costs

    asked = step_question.of_recipe(options.recipe)
    outlined = step_question.outlined(asked, options.quant, lambda: 1 << 62)
    step, known = with_costs(outlined.captured, Estimated(options.device, compute_threads=asked.config.compute_threads))
    say(known.note)
    try:
        write_taskgraph(step.graph, options.output)
    except OSError as error:
        raise ConfigError(f"{options.output}: cannot be written: {error.strerror}") from None
    kernels = len(step.graph.ops)
    seconds = sum(v.duration or 0.0 for v in step.graph.vertices)
    frozen = sum(v.sizes[0] for v in step.graph.vertices if host_copy_exists(v))
    adapters = outlined.budget(0).adapters
    figures: dict[str, Any] = {
        "kernels": kernels,
        "compute_seconds": seconds,
        "frozen_bytes": frozen,
        "adapters": adapters,
    }
    if outlined.packed is not None:
        figures["quant"] = outlined.packed.as_dict()
    print(json.dumps(figures))
    return 0
