"""Commands about recipes and weights: ``weights``, ``capture`` and ``plan`` run nothing, ``prefill`` does."""

from __future__ import annotations

import argparse
import json
import math
import sys
import warnings
from typing import TYPE_CHECKING, Any

from disco_accel.errors import BudgetTooSmall, CaptureError, ConfigError
from disco_accel.graph.spaces import BETWEEN_DEVICES, TO_DEVICE, TO_HOST
from disco_accel.graph.values import host_copy_exists
from disco_accel.native.device_types import DEVICE_TYPES
from disco_accel.quantised.forms import PackedForm

if TYPE_CHECKING:
    from disco_accel.config.settings import DiscoConfig
    from disco_accel.measure.costs import Estimated, GraphCosts
    from disco_accel.step.compile.budget_parts import Budget
    from disco_accel.step.compile.stages import StagedStep


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
    from disco_accel.recipes.prefill import run

    return run(options.recipe, options.memory)


def capture_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``capture``."""
    _recipe_arguments(parser)
    parser.add_argument("-o", "--output", metavar="TASK.json", required=True, help="where the task graph goes")


def plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``plan``."""
    _recipe_arguments(parser)
    parser.add_argument("--memory", metavar="SIZE", help="the budget, such as 12GiB (default: the recipe's)")
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
    parser.add_argument("-o", "--output", metavar="DIR", help="folder for the plan, its figures and pictures")


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


def _recipe_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = tuple(DEVICE_TYPES)[::-1]
    parser.add_argument(
        "recipe", metavar="RECIPE.yaml", help="a training or a prefill; of the model only its config is read"
    )
    parser.add_argument(
        "--device",
        choices=kinds,
        default=kinds[0],
        help="whose speed is estimated: cuda is an A100 behind PCIe 4",
    )
    parser.add_argument(
        "--quant",
        choices=(*PackedForm, "none"),
        help="form of the frozen weights; no library of it is needed (default: what the recipe's keys say)",
    )


def capture(options: argparse.Namespace) -> int:
    """Write the task graph of a recipe's training step, with estimated durations and the scratch that is known."""
    from disco_accel.graph.files import write_taskgraph
    from disco_accel.step.compile.pipeline import with_costs

    outlined, costs, _ = _outlined(options)
    step, known = with_costs(outlined.captured, costs)
    say(known.note)
    try:
        write_taskgraph(step.graph, options.output)
    except OSError as error:
        raise ConfigError(f"{options.output}: cannot be written: {error.strerror}") from None
    kernels = len(step.graph.ops)
    seconds = sum(v.duration or 0.0 for v in step.graph.vertices)
    frozen = sum(v.sizes[0] for v in step.graph.vertices if host_copy_exists(v))
    adapters = outlined.budget(0).adapters
    figures = {"kernels": kernels, "compute_seconds": seconds, "frozen_bytes": frozen, "adapters": adapters}
    if outlined.packed is not None:
        figures["quant"] = outlined.packed.as_dict()
    print(json.dumps(figures))
    return 0


def plan(options: argparse.Namespace) -> int:
    """Say whether a recipe's training step fits its budget, how many weights stay on the device, and how long it
    takes."""
    if options.parallel != "all":
        _plan(options, None)
        return 0
    if options.output is not None:
        raise ConfigError("-o: takes one plan; give --parallel layers, batch or tensor")
    rows, first = [], None
    for parallel in PARALLEL:
        try:
            figures = _plan(options, parallel)
        except (BudgetTooSmall, ConfigError, CaptureError) as error:
            say(f"{parallel}: {error}")
            first = first or error
            continue
        seconds, bound = figures["step_seconds"], figures["bound_seconds"]
        rows.append([parallel, f"{seconds:.3f}", f"{bound:.3f}", f"{figures['ratio']:.2f}"])
    if not rows:
        assert first is not None, "there is more than one way"
        raise first
    from disco_accel.observe.report import table

    print("\n" + table(["parallel", "step, s", "bound, s", "ratio"], rows), file=sys.stderr)
    return 0


PARALLEL = ("layers", "batch", "tensor")


def _budget(outlined: Any, options: argparse.Namespace, config: DiscoConfig) -> Budget:
    """That of each device."""
    from dataclasses import replace

    from disco_accel.execute.engine_options import EngineOptions, makes_graphs

    engine = EngineOptions(options.device, lookahead=config.lookahead, launch_graphs=config.launch_graphs == "auto")
    budget: Budget = outlined.budget(_memory(options, config))
    return replace(budget, has_graphs=makes_graphs(engine))


def _plan(options: argparse.Namespace, parallel: str | None) -> dict[str, Any]:
    """Plan the recipe's step, with ``parallel`` in place of the options' and the recipe's, and print the figures."""
    from dataclasses import replace

    import torch

    from disco_accel.native.backend import backend_of_kind
    from disco_accel.observe.forecast import forecast, forecast_text, passes_text, write_forecast
    from disco_accel.step.compile.pipeline import PlannerSettings
    from disco_accel.step.compile.planned_step import plan_in_chunks
    from disco_accel.step.compile.stages import PlanRequest, Sharing, stages_text
    from disco_accel.step.optimizer_home import TrainedBytes, keeps_masters

    outlined, costs, config = _outlined(options, parallel)
    given = _budget(outlined, options, config)
    say(config.without_effect)
    machine = _machine(options.device, config)
    settings = PlannerSettings(config.planner, config.policy, machine, deadline(options, config.deadline))
    given_on_host = config.host_memory if isinstance(config.host_memory, int) else None
    rounded = TrainedBytes.of(outlined.model, keeps_masters(config)).rounded
    settings = replace(settings, recompute=config.recompute, host_memory=given_on_host, rounded=rounded)
    sharing = Sharing(_device_count(config), _parallel(config))
    more: dict[str, Any] = {}

    def costed(known: GraphCosts) -> None:
        say("" if "without_scratch_of" in more else known.note)
        more["without_scratch_of"] = known.without_scratch

    asked = PlanRequest(sharing, costs, given, settings, config.chunks, torch.device("cpu"), costed=costed)
    if _device_count(config) > 1:
        more |= {"devices": _device_count(config), "parallel": _parallel(config)}
    if outlined.packed is not None:
        more["quant"] = outlined.packed.as_dict()
    if options.passes:
        print(stages_text(), file=sys.stderr)
    try:
        made = plan_in_chunks(outlined.whole, asked)
    except BudgetTooSmall as error:
        print(json.dumps({"fits": False, "budget_bytes": error.given, "needed_bytes": error.needed} | more))
        raise
    planned = made.planned
    outlined = replace(outlined, captured=made.captured)
    for note in planned.notes:
        say(note)
    more |= _figures(outlined, made, config, rounded)
    if options.passes:
        more["passes"] = [each.as_dict() for each in planned.applied]
    estimated_for = backend_of_kind(options.device).speed.name
    budget, names = planned.budget.as_dict(), outlined.names
    copies, whole = made.captured.copies, planned.whole
    result = forecast(planned.graph, planned.plan, machine, budget, names, estimated_for, copies, whole)
    result = replace(result, figures={**result.figures, **more})
    print(json.dumps(result.figures))
    # The same for people, who may have sent the line of JSON elsewhere.
    print(forecast_text(result.figures), end="", file=sys.stderr)
    if options.passes:
        print("\n" + passes_text(planned.applied), end="", file=sys.stderr)
    if options.output is not None:
        write_forecast(options.output, result)
    return dict(result.figures)


def _figures(outlined: Any, made: StagedStep, config: DiscoConfig, rounded: int) -> dict[str, Any]:
    """The figures of a plan beside its forecast. ``rounded``: as of ``PlannerSettings``. Raises ConfigError where the
    host memory of ``config`` is less than the plan takes."""
    from dataclasses import asdict

    from disco_accel.step.compile.budget_parts import host_memory_parts, require_host_memory
    from disco_accel.step.compile.compiled_step import shared_weights
    from disco_accel.step.placement.shard_memory import packed_bytes

    planned, copies = made.planned, made.captured.copies
    packed = packed_bytes(shared_weights(outlined.captured), dict(outlined.model.named_parameters()))
    if isinstance(config.host_memory, int):
        require_host_memory(config.host_memory, planned.graph, planned.plan.host.memory, rounded, copies, packed)
    chunks = made.chunked
    return {
        **({} if chunks is None else {"chunks": {"kernels": chunks.kernels, "most": chunks.most, "sums": chunks.sums}}),
        "host_memory": host_memory_parts(planned.graph, planned.plan.host.memory, rounded, copies, packed),
        "optimizer": outlined.optimizer.value,
        "update": outlined.update,
        "cut_short": planned.cut,
        "recomputation": None if planned.recomputation is None else asdict(planned.recomputation),
    }


def _chunks(text: str) -> int | str:
    """A number; the config refuses anything else."""
    return int(text) if text.isdecimal() else text


def _parallel(config: DiscoConfig) -> str:
    """The way that is asked for, or that ``auto`` means."""
    return "layers" if config.parallel == "auto" else config.parallel


def _device_count(config: DiscoConfig) -> int:
    """``devices`` of a machine that need not be this one."""
    if isinstance(config.devices, str):
        raise ConfigError("devices: auto asks this machine, which need not be the one that trains; give --devices")
    return len(config.devices) if isinstance(config.devices, tuple) else config.devices


def _outlined(options: argparse.Namespace, parallel: str | None = None) -> tuple[Any, Estimated, DiscoConfig]:
    """The outline of the recipe's step, the source of its costs, and its ``disco_config``."""
    from dataclasses import replace

    from disco_accel.config.settings import DiscoConfig
    from disco_accel.measure.costs import Estimated
    from disco_accel.recipes.outline import outline
    from disco_accel.recipes.settings import read_any_recipe

    # transformers warns about its own calls from inside PEFT; nobody here can act on that.
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    recipe = read_any_recipe(options.recipe)
    config = DiscoConfig.from_env(DiscoConfig.from_dict(recipe.disco_config or {}))
    # A graph alone has no budget: auto means the device.
    known = hasattr(options, "memory")
    asked = {
        key: getattr(options, key, None) for key in ("devices", "parallel", "micro_batches", "chunks", "recompute")
    }
    asked |= {"parallel": parallel} if parallel is not None else {}
    config = replace(config, **{key: value for key, value in asked.items() if value is not None})
    by_rows = config.parallel == "batch" and _device_count(config) > 1
    ranks = _device_count(config) if config.parallel == "tensor" else 1
    outlined = outline(
        recipe,
        options.quant,
        config=config,
        budget=lambda: _memory(options, config) if known else 1 << 62,
        parts=_device_count(config) if by_rows else config.micro_batches,
        ranks=ranks,
    )
    return outlined, Estimated(options.device, compute_threads=config.compute_threads), config


def _machine(device: str, config: DiscoConfig) -> Any:
    """The device's links, or the throttled one that the recipe asks for."""
    from disco_accel.native.backend import backend_of_kind
    from disco_accel.plan import Machine
    from disco_accel.simulate.simulator import Link

    backend = backend_of_kind(device)
    if backend.separate_memory or config.link_bandwidth is None:
        return backend.speed.machine
    link = Link(float(config.link_bandwidth), 0.0)
    return Machine(links=dict.fromkeys((TO_DEVICE, TO_HOST, BETWEEN_DEVICES), link))


def _memory(options: argparse.Namespace, config: DiscoConfig) -> int:
    """The budget in bytes. A size is taken as it is: this machine need not be the one that trains."""
    from dataclasses import replace

    from disco_accel.sizes import parse_size

    if options.memory is not None:
        return parse_size(options.memory)
    if isinstance(config.memory_budget, int):
        return config.memory_budget
    try:
        return replace(config, device=options.device, link_bandwidth=None).resolve().memory_budget
    except ConfigError as error:
        raise ConfigError(
            f"memory_budget: {config.memory_budget} of a device that is not here; give --memory"
        ) from error
