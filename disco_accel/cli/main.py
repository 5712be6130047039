"""The command line. Exit status: 0 yes, 1 no (not verified, does not fit), 2 bad input."""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from disco_accel.cli import (
    bound_command,
    convert_command,
    doctor_command,
    init_command,
    merge_command,
    plan_command,
    recipe_commands,
    report_command,
    simulate_command,
)
from disco_accel.errors import BudgetTooSmall, ConfigError, DiscoError, VerifyError
from disco_accel.sizes import parse_size
from disco_accel.store import store_command

if TYPE_CHECKING:
    from disco_accel.graph.taskgraph import TaskGraph


@dataclass(frozen=True, slots=True)
class _Command:
    """A subcommand: ``arguments`` declares its options, ``run`` does it and returns the exit status.

    ``arguments`` is None for a command with a parser of its own, whose ``run`` finds its words in ``options.rest``.
    """

    name: str
    help: str
    arguments: Callable[[argparse.ArgumentParser], None] | None
    run: Callable[[argparse.Namespace], int]


_POLICIES = (
    "which values are evicted first, with --planner build alone: auto (belady), belady, cost, fifo, latency_aware, "
    "lru, size_aware; no effect with --planner timed"
)


def _compile_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("task", metavar="TASK.json", help="the task graph")
    parser.add_argument("-o", "--output", metavar="MEM.json", required=True, help="where the plan goes")
    parser.add_argument("--memory", metavar="SIZE", help="device memory, such as 12GiB (default: what the graph says)")
    parser.add_argument("--cyclic", action="store_true", help="the plan is run step after step")
    parser.add_argument("--planner", default="timed", help="timed, or build (the paper's)")
    parser.add_argument("--policy", default="auto", help=_POLICIES)
    recipe_commands.plan_seconds_argument(parser)


def _compile(options: argparse.Namespace) -> int:
    from disco_accel.config.keys import unused_policy
    from disco_accel.graph.files import read_taskgraph, write_memgraph
    from disco_accel.plan import make_plan
    from disco_accel.plan.search_work import SearchWork
    from disco_accel.plan.summary import cut_short, summary

    memory = None if options.memory is None else parse_size(options.memory)
    names = options.names
    graph = read_taskgraph(options.task, names)
    asked = {"policy": options.policy, "planner": options.planner, "cyclic": options.cyclic}
    recipe_commands.say(unused_policy(options.planner, options.policy))
    work = SearchWork(recipe_commands.deadline(options))
    started = time.perf_counter()
    try:
        plan = make_plan(graph, memory=memory, work=work, **asked)
    except BudgetTooSmall as error:
        raise _with_culprit(error, graph, memory) from None
    seconds = time.perf_counter() - started
    try:
        write_memgraph(plan, options.output, names)
    except OSError as error:
        raise ConfigError(f"{options.output}: cannot be written: {error.strerror}") from None
    print(json.dumps({**summary(plan), "seconds": round(seconds, 3), "drafts": work.drafts, "cut_short": work.cut}))
    if work.cut:
        recipe_commands.say(cut_short(graph, plan, work))
    return 0


def _with_culprit(error: BudgetTooSmall, graph: TaskGraph, memory: int | None) -> BudgetTooSmall:
    """Return ``error``, naming the vertex if a single one is too large for its device, that has ``memory`` bytes (None:
    as the graph says)."""
    from disco_accel.graph.check import called, largest_need
    from disco_accel.graph.strict_json import plain

    most, what = 0, error.what
    for device in graph.devices:
        need, vertex = largest_need(graph, device.id)
        given = device.memory if memory is None or device.is_host_device else memory
        if vertex is not None and need > max(most, given):
            most = need
            what = f"the plan of '{plain(graph.name)}', whose {called(vertex)} takes {need} bytes by itself,"
    return BudgetTooSmall(error.needed, error.given, what, error.parts, error.devices)


def _verify_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("task", metavar="TASK.json", help="the task graph")
    parser.add_argument("plan", metavar="MEM.json", help="its plan")
    parser.add_argument("--memory", metavar="SIZE", help="device memory, such as 12GiB (default: what the graph says)")


def _verify(options: argparse.Namespace) -> int:
    from disco_accel.graph.files import in_file, read_memgraph, read_taskgraph
    from disco_accel.graph.passes import arena_of
    from disco_accel.verify.static import verify

    memory = None if options.memory is None else parse_size(options.memory)
    graph = read_taskgraph(options.task, options.names)
    if memory is not None:
        graph = arena_of(memory).run(graph)
    plan = read_memgraph(options.plan, options.names)
    try:
        verify(graph, plan)
    except VerifyError as error:
        print(json.dumps({"verified": False, "reason": in_file(str(error), options.names)}))
        raise
    print(json.dumps({"verified": True, "vertices": len(plan.vertices)}))
    return 0


def _launch(options: argparse.Namespace) -> int:
    from disco_accel.integrate.launch.launcher import main as launch

    return launch(options.rest)


def _train(options: argparse.Namespace) -> int:
    from disco_accel.recipes.lora import main as train

    return train(options.rest)


BENCHMARKS = {
    "devices": "devices",
    "engine": "engine",
    "full": "full",
    "optimizer": "optimizer",
    "planner": "planner",
    "policies": "planner.policies",
    "prefill": "prefill",
    "scale": "planner.scale",
    "step": "step",
    "store": "store",
    "weights": "planner.weights",
}
"""Name of a benchmark → its module, or its folder with a ``__main__``, in ``benchmarks``."""


def _bench(options: argparse.Namespace) -> int:
    name = options.rest[0] if options.rest else ""
    if name not in BENCHMARKS:
        raise ConfigError(f"bench: '{name}' is not a benchmark; there are {', '.join(BENCHMARKS)}")
    checkout = Path(__file__).resolve().parents[2]
    module = f"benchmarks.{BENCHMARKS[name]}"
    path = checkout.joinpath(*module.split("."))
    if path.is_dir():
        module += ".__main__"
    elif not path.with_suffix(".py").is_file():
        raise ConfigError(
            "bench: benchmarks are in the repository, not in the package; in a checkout of it run make setup, "
            f"then .venv/bin/disco-accel bench {name}"
        )
    # Installed for development, the package is found there and its neighbours are not.
    sys.path.insert(0, str(checkout))
    status: int = importlib.import_module(module).main(options.rest[1:])
    return status


COMMANDS: tuple[_Command, ...] = (
    _Command("compile", "plan a task graph within a memory budget", _compile_arguments, _compile),
    _Command(
        "bound",
        "the seconds that no repeating plan of a task graph can beat, and why a plan takes longer",
        bound_command.bound_arguments,
        bound_command.bound,
    ),
    _Command("verify", "check that a plan is safe in any order its edges allow", _verify_arguments, _verify),
    _Command(
        "convert",
        "a graph or a plan from one version of its file to the other",
        convert_command.convert_arguments,
        convert_command.convert,
    ),
    _Command(
        "simulate",
        "a plan in simulated time, beside what no plan can beat",
        simulate_command.simulate_arguments,
        simulate_command.simulate,
    ),
    _Command(
        "weights",
        "which layers' weights to keep away from the device, and when",
        recipe_commands.weights_arguments,
        recipe_commands.weights,
    ),
    _Command(
        "plan",
        "does a recipe or a model fit a budget, which budgets do, and how fast is it then",
        plan_command.plan_arguments,
        plan_command.plan,
    ),
    _Command(
        "capture",
        "a recipe's training step as a task graph",
        recipe_commands.capture_arguments,
        recipe_commands.capture,
    ),
    _Command(
        "report",
        "a page that shows a step: what runs when, what lies where, what moves and why",
        report_command.report_arguments,
        report_command.report,
    ),
    _Command(
        "doctor",
        "what this machine has, and what keeps the engine from running",
        doctor_command.doctor_arguments,
        doctor_command.doctor,
    ),
    _Command("launch", "run a script under accelerate and the disco_config section of --config", None, _launch),
    _Command(
        "init", "write a recipe for a model and the GPU that is here", init_command.init_arguments, init_command.init
    ),
    _Command("train", "fine-tune a model as a recipe file says", None, _train),
    _Command(
        "merge", "an adapter into its base model, shard by shard", merge_command.merge_arguments, merge_command.merge
    ),
    _Command(
        "prefill", "read a recipe's prompts within a budget", recipe_commands.prefill_arguments, recipe_commands.prefill
    ),
    _Command(
        "store",
        "hold tensors for all processes of this user; its figures; programs that it counts",
        store_command.store_arguments,
        store_command.store,
    ),
    _Command("bench", f"measure: {', '.join(BENCHMARKS)}", None, _bench),
)


@functools.cache
def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="disco-accel", description="Plan and run models larger than device memory.")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        subparser = subparsers.add_parser(command.name, help=command.help, description=command.help)
        if command.arguments is not None:
            command.arguments(subparser)
        subparser.set_defaults(run=command.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: the process's) and return the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    own_parser = [command.name for command in COMMANDS if command.arguments is None]
    rest = words[1:] if words[:1] and words[0] in own_parser else []
    try:
        options = _parser().parse_args(words[: len(words) - len(rest)], argparse.Namespace(rest=rest, names={}))
    except SystemExit as exit:
        return exit.code if isinstance(exit.code, int) else 2
    try:
        status: int = options.run(options)
    except DiscoError as error:
        from disco_accel.graph.files import in_file

        # Ids that are texts in the file are numbers in memory.
        print(f"disco-accel {options.command}: {in_file(str(error), options.names)}", file=sys.stderr)
        return 1 if isinstance(error, BudgetTooSmall | VerifyError) else 2
    return status


if __name__ == "__main__":
    sys.exit(main())
