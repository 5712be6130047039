"""The command ``bound``: the seconds that no plan of a graph beats, and why a plan takes longer."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from disco_accel.errors import BudgetTooSmall, ConfigError
from disco_accel.sizes import parse_size

if TYPE_CHECKING:
    from disco_accel.graph.taskgraph import TaskGraph
    from disco_accel.simulate.machine import Machine


def bound_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``bound``."""
    parser.add_argument("task", metavar="TASK.json", nargs="?", help="the task graph (with --why: default the plan's)")
    parser.add_argument("--machine", metavar="M.json", help="links and streams (default: those of docs/schema.md)")
    parser.add_argument("--memory", metavar="SIZE", help="device memory, such as 12GiB (default: what the graph says)")
    parser.add_argument("--why", metavar="MEM.json", help="a plan: its distance from the bound, as a sum")
    parser.add_argument("--json", action="store_true", help="with --why: one JSON line")


def bound(options: argparse.Namespace) -> int:
    """Print the bound as one JSON line, or with ``--why`` a sentence and tables (``--json``: one JSON line)."""
    from disco_accel.plan.bound.lower_bound import bound_of
    from disco_accel.simulate.machine_file import read_machine

    machine = None if options.machine is None else read_machine(options.machine)
    if options.why is not None:
        return _why(options, machine)
    if options.task is None:
        raise ConfigError("bound: which graph? Name TASK.json, or a plan with --why MEM.json")
    memory = None if options.memory is None else parse_size(options.memory)
    graph = _read_fitting(options, memory)
    found = bound_of(graph, machine, memory)
    print(json.dumps({**asdict(found), "bound": found.bound}))
    return 0


def _read_fitting(options: argparse.Namespace, memory: int | None) -> TaskGraph:
    from disco_accel.graph.check import called, largest_need
    from disco_accel.graph.files import read_taskgraph

    graph = read_taskgraph(options.task, options.names)
    for device in graph.devices:
        need, vertex = largest_need(graph, device.id)
        memory_given = device.memory if memory is None or device.is_host_device else memory
        if vertex is not None and need > memory_given:
            raise BudgetTooSmall(need, memory_given, called(vertex))
    return graph


def _why(options: argparse.Namespace, machine: Machine | None) -> int:
    from disco_accel.graph.carried_values import taskgraph_of
    from disco_accel.graph.check import check_taskgraph
    from disco_accel.graph.files import read_memgraph, read_taskgraph
    from disco_accel.plan.bound.ladder import explain
    from disco_accel.plan.bound.why_text import as_json, as_text
    from disco_accel.verify.static import verify

    if options.memory is not None:
        raise ConfigError("--memory: with --why the memory is the plan's; leave it out")
    plan = read_memgraph(options.why, options.names)
    graph = check_taskgraph(taskgraph_of(plan)) if options.task is None else read_taskgraph(options.task, options.names)
    verify(graph, plan)
    why = explain(plan, machine)
    print(json.dumps(as_json(why)) if options.json else as_text(why))
    return 0
