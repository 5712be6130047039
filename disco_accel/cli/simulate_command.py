"""The command ``simulate``: a plan in simulated time, beside the lower bound of its graph."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from statistics import median

from disco_accel.errors import ConfigError, GraphFileError
from disco_accel.simulate.simulator import DISPATCHES, Simulation, Simulator

MAX_SEEDS = 10_000


def simulate_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``simulate``."""
    parser.add_argument("plan", metavar="MEM.json", help="the plan")
    parser.add_argument("--machine", metavar="M.json", help="links and streams (default: those of docs/schema.md)")
    parser.add_argument("--dispatch", default="priority", help=f"which ready vertex starts: {', '.join(DISPATCHES)}")
    parser.add_argument("--jitter", metavar="X", default="0", help="durations vary by up to this share, such as 0.1")
    parser.add_argument("--seeds", metavar="N", default="1", help="runs, each with random numbers of its own")
    parser.add_argument("--steps", metavar="N", default="1", help="steps that follow each other")


def simulate(options: argparse.Namespace) -> int:
    """Print one JSON line: ``makespan``, ``period``, ``bound``, ``ratio``, ``busy``; with several seeds the spread."""
    from disco_accel.graph.carried_values import taskgraph_of
    from disco_accel.graph.check import called, check_taskgraph, largest_need
    from disco_accel.graph.files import read_memgraph
    from disco_accel.plan.bound.lower_bound import bound_of
    from disco_accel.simulate.machine_file import read_machine

    jitter = _share(options.jitter)
    seeds, steps = _count("--seeds", options.seeds, MAX_SEEDS), _count("--steps", options.steps)
    machine = None if options.machine is None else read_machine(options.machine)
    plan = read_memgraph(options.plan, options.names)
    graph = check_taskgraph(taskgraph_of(plan))
    for device in graph.devices:
        need, vertex = largest_need(graph, device.id)
        if vertex is not None and need > device.memory:
            raise GraphFileError(f"{called(vertex)}: size: takes {need} bytes of {device.memory} on device {device.id}")
    simulator = Simulator(plan, machine)
    runs = [simulator.run(dispatch=options.dispatch, seed=s, jitter=jitter, steps=steps) for s in range(seeds)]
    firsts = runs
    if steps > 1:
        firsts = [simulator.run(dispatch=options.dispatch, seed=s, jitter=jitter) for s in range(seeds)]
    makespans = [run.makespan for run in runs]
    periods = [_period(run, first, steps) for run, first in zip(runs, firsts, strict=True)]
    bound = bound_of(graph, machine).bound
    answer = {
        "makespan": median(makespans),
        "period": median(periods),
        "bound": bound,
        "ratio": median(periods) / bound if bound else None,
        "busy": dict(runs[0].busy),
        "dispatch": options.dispatch,
        "steps": steps,
    }
    if seeds > 1:
        answer |= {"seeds": seeds, "makespans": _spread(makespans), "periods": _spread(periods)}
    print(json.dumps(answer))
    return 0


def _period(run: Simulation, first: Simulation, steps: int) -> float:
    return run.makespan if steps == 1 else (run.makespan - first.makespan) / (steps - 1)


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    return {"median": median(seconds), "min": min(seconds), "max": max(seconds)}


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not 0 <= share <= 1:
        raise ConfigError(f"--jitter: {text!r} does not work; use a number from 0 to 1")
    return share


def _count(option: str, text: str, most: int | None = None) -> int:
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 19 else 0
    upto = " on" if most is None else f" to {most}"
    if number < 1 or (most is not None and number > most):
        raise ConfigError(f"{option}: {text!r} does not work; use a number from 1{upto}")
    return number
