"""What kernels and copies of changing length cost a step on several devices, in simulation:
``python -m benchmarks.simulated.jitter [--devices 2 4 8] [--draws 21] [--jitter 0.5] [-o FILE]``.

No device runs anything. Each plan is simulated as it is and with the seconds of every kernel and copy times a factor
of its own, in three orders that take equally long undisturbed: *dynamic*, each stream and link takes the first of the
plan that is ready; *fixed*, each takes its vertices as they came in the undisturbed step; *loads in order*, kernels
dynamic and the host's links fixed. A draw has the same factors in all of them. ``benchmarks.engine.jitter`` asks the
engine.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import quantiles

from benchmarks.common.provenance import provenance
from benchmarks.common.shapes import Shape, llama
from benchmarks.planner.captures import Workload, lora_outline
from benchmarks.simulated_devices.cells import A100
from disco_accel.decompose.decomposition import over_devices
from disco_accel.errors import BudgetTooSmall
from disco_accel.graph.files import write_atomically
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.spaces import TO_DEVICE, TO_HOST
from disco_accel.graph.taskgraph import TaskGraph, with_memory
from disco_accel.graph.values import host_copy_exists
from disco_accel.measure.costs import Estimated
from disco_accel.plan import make_plan
from disco_accel.simulate.simulator import Link, Machine, Simulator
from disco_accel.step.compile.pipeline import with_costs
from tests.support.graphs.tensor_parallel import PrefillShape, tensor_parallel_prefill

SHAPE = llama(4096, 11008, 8, 32, 32, 32000)
"""Eight layers of Llama 7B, so that eight devices have one each."""
ROWS, TOKENS = 8, 1024
SLOW = 5e9
"""Bytes/s from and to the host where the link is to lead."""
_SHARE = 0.3
"""Of a device's weights that it has memory for, beside the least that the step works in."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A step to disturb; ``streamed``: in little memory behind a slow link."""

    name: str
    devices: int
    streamed: bool


@dataclass(frozen=True, slots=True)
class Loss:
    """A disturbed step over the undisturbed one, less one: quartiles over the draws."""

    low: float
    median: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:+.1%} ({self.low:+.1%} to {self.high:+.1%})"


@dataclass(frozen=True, slots=True)
class Row:
    """``seconds`` of the undisturbed step; ``busiest``: lane with the most to do; ``wins``: draws in which dynamic was
    not longer than fixed, of ``draws``."""

    subject: Subject
    vertices: int
    seconds: float
    busiest: str
    dynamic: Loss
    fixed: Loss
    loads_in_order: Loss
    wins: int
    draws: int


def subjects(devices: Sequence[int]) -> Iterator[Subject]:
    """A LoRA step by layers and by parts of its batch, a prompt in tensor parallel; compute leads, then the link."""
    for count in devices:
        for name in ("LoRA, layers", "LoRA, batch", "prompt, tensor"):
            yield Subject(name, count, streamed=False)
            yield Subject(name, count, streamed=True)


def machine_of(subject: Subject) -> Machine:
    """Return A100s, behind a slow link if ``subject`` is streamed."""
    slow = Link(SLOW, 1e-5)
    return A100.machine.with_links({TO_DEVICE: slow, TO_HOST: slow}) if subject.streamed else A100.machine


def graph_of(subject: Subject, shape: Shape, tokens: int) -> TaskGraph:
    """Return the step of ``subject`` with memory for everything."""
    if subject.name.startswith("prompt"):
        layers = shape["num_hidden_layers"] // 2
        return tensor_parallel_prefill(PrefillShape(layers=layers, devices=subject.devices, tokens=2 * tokens), 1 << 40)
    by_batch = subject.name.endswith("batch")
    outlined = lora_outline(Workload(shape, ROWS, tokens), parts=subject.devices if by_batch else ROWS)
    step, _ = with_costs(outlined.captured, Estimated("cuda", A100))
    memory, part_of = [1 << 40] * subject.devices, outlined.part_of if by_batch else None
    return over_devices(outlined.captured, step.graph, memory, machine_of(subject), [], part_of)[1]


def plan_of(subject: Subject, graph: TaskGraph) -> MemGraph:
    """Plan ``graph``; if it is streamed, in the least memory and some of the weights more."""
    machine = machine_of(subject)
    if subject.streamed:
        try:
            make_plan(graph, memory=1, planner="timed", cyclic=True, machine=machine)
        except BudgetTooSmall as error:
            least = error.needed
        weights = max(
            sum(v.sizes[0] for v in graph.vertices if host_copy_exists(v) and v.space == device.id)
            for device in graph.devices
        )
        graph = with_memory(graph, lambda _: least + int(_SHARE * weights))
    return make_plan(graph, planner="timed", cyclic=True, machine=machine)


def in_order(plan: MemGraph, machine: Machine, lanes: tuple[str, ...]) -> MemGraph:
    """Return ``plan`` with edges that keep each of the ``lanes``, by the beginnings of their names, to the order of the
    undisturbed step."""
    simulator = Simulator(plan, machine)
    starts = simulator.run().starts
    of_lane: dict[str, list[int]] = defaultdict(list)
    number = {vertex: i for i, vertex in enumerate(simulator.ids)}
    for vertex in sorted(starts, key=lambda each: (starts[each], number[each])):
        name = simulator.lane_names[simulator.lanes[number[vertex]]]
        if name.startswith(lanes):
            of_lane[name].append(vertex)
    edges = [(u, v) for each in of_lane.values() for u, v in pairwise(each)]
    return replace(plan, memory_edges=(*plan.memory_edges, *edges))


def row(subject: Subject, draws: int, jitter: float, shape: Shape = SHAPE, tokens: int = TOKENS) -> Row:
    """Plan ``subject`` and disturb its step ``draws`` times."""
    machine = machine_of(subject)
    plan = plan_of(subject, graph_of(subject, shape, tokens))
    lanes = {"dynamic": (), "fixed": ("compute", "h2d", "d2h", "p2p"), "loads_in_order": ("h2d", "d2h")}
    simulators = {name: Simulator(in_order(plan, machine, kept), machine) for name, kept in lanes.items()}
    calm = simulators["dynamic"].run()
    seconds = {
        name: [each.run(seed=seed, jitter=jitter).makespan for seed in range(draws)]
        for name, each in simulators.items()
    }
    losses = {}
    for name, each in seconds.items():
        low, middle, high = quantiles([second / calm.makespan - 1 for second in each], n=4, method="inclusive")
        losses[name] = Loss(low, middle, high)
    pairs = zip(seconds["dynamic"], seconds["fixed"], strict=True)
    busiest = max(sorted(calm.busy), key=lambda lane: calm.busy[lane])
    wins = sum(one <= other * (1 + 1e-9) for one, other in pairs)
    return Row(subject, len(plan.vertices), calm.makespan, busiest, **losses, wins=wins, draws=draws)


HEADER = (
    "| step | devices | busiest | ms | dynamic loses (quartiles) | fixed loses | loads in order | dynamic no longer |\n"
    + "|---" * 8
    + "|"
)


def line(made: Row) -> str:
    """One row as Markdown."""
    name = f"{made.subject.name}{', streamed' if made.subject.streamed else ''}"
    cells = [name, made.subject.devices, made.busiest, f"{1e3 * made.seconds:.1f}", made.dynamic, made.fixed]
    cells += [made.loads_in_order, f"{made.wins} of {made.draws}"]
    return "| " + " | ".join(map(str, cells)) + " |"


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulated.jitter", description=__doc__.split("\n")[0])
    parser.add_argument("--devices", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--draws", type=int, default=21)
    parser.add_argument("--jitter", type=float, default=0.5, help="share by which times vary")
    parser.add_argument("-o", "--output", type=Path, help="everything as JSON")
    args = parser.parse_args(words)
    print(HEADER, flush=True)
    made = []
    for subject in subjects(args.devices):
        made.append(row(subject, args.draws, args.jitter))
        print(line(made[-1]), flush=True)
    if args.output is not None:
        head = provenance("python -m benchmarks.simulated.jitter", words, f"simulated: {A100.name}")
        result = {"benchmark": "simulated-jitter", **head, "rows": [asdict(each) for each in made]}
        args.output.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(args.output, json.dumps(result, indent=1).encode())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
