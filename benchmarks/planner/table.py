"""Both planners side by side: simulated step over the bound, bytes loaded over the linear program's, seconds to plan.

    python -m benchmarks.planner [--graph TASK.json ...] [--captures] [--memory SIZE ...] [--bandwidth BYTES_PER_S ...]
                                 [--planners timed,build] [--ablate] [--output out/planner.json]
    python -m benchmarks.planner --why [--only NAME ...] [--plans FOLDER] [--output out/planner-why.json]

Without ``--graph``: the graphs of the tests and generated LoRA steps and prefills; ``--captures``: captured ones
instead. Without ``--memory``: shares of what the graph's weights take, and one memory that holds everything. Where
nothing is copied, ``arena`` is what the timed planner's plan takes over the peak of what is live at once, ``rest`` the
same without the weights. ``--ablate``: instead, what each move of the timed planner's search is worth (simulated step
and CPU seconds of planning without it), with a summary over all graphs and memories at the end; without ``--graph``,
``--captures`` and ``--memory`` on the cases of ``ablation_cases``. ``--why``: instead, why the plans of the cases of
``why_cases`` (``--only``: those whose names begin so) take longer than the bound.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.planner import ablation as moves
from benchmarks.planner import ablation_cases, why
from disco_accel.errors import BudgetTooSmall
from disco_accel.graph.copies import swaps_in, swaps_out
from disco_accel.graph.files import read_taskgraph, write_atomically
from disco_accel.graph.spaces import TO_DEVICE, TO_HOST
from disco_accel.graph.taskgraph import TaskGraph, with_memory
from disco_accel.graph.values import host_copy_exists
from disco_accel.plan import make_plan
from disco_accel.plan.bound.lower_bound import Bound, bound_of
from disco_accel.plan.summary import peak_bytes, swapped_bytes
from disco_accel.plan.timed.requirements import requirements_of
from disco_accel.simulate.simulator import Link, Machine, simulate
from disco_accel.sizes import format_size, parse_size
from disco_accel.verify.static import verify
from tests.support.graphs.lora_graph import LoraShape, lora_graph, prefill_graph

ROOT = Path(__file__).resolve().parents[2]
GRAPHS = ROOT / "tests" / "data" / "graphs"
SHARES = (0.15, 0.25, 0.4, 0.6, 0.85, 1.2)
"""Budgets over the bytes of the weights."""
ROOMY = 1.25
"""The last budget over the bytes that are live at once."""
BANDWIDTHS = (2.0e10, 5.5e10)


@dataclass(frozen=True, slots=True)
class Row:
    """One plan. ``ratio``: simulated step over the bound, whose largest part is ``limit``; ``loads``: bytes loaded over
    the linear program's (None: it needs none); ``seconds``: CPU seconds to plan; ``arena`` and ``rest``: bytes taken
    over the live peak, of all and of all but weights (None: something is copied, or no effort is made to save)."""

    graph: str
    vertices: int
    memory: int
    weights: int
    bandwidth: float
    planner: str
    makespan: float
    bound: float
    limit: str
    ratio: float
    loads: float | None
    offload_bytes: int
    peak_bytes: int
    arena: float | None
    rest: float | None
    memory_edges: int
    seconds: float
    verify_seconds: float


def graphs(files: Sequence[str], captured: bool = False) -> Iterator[TaskGraph]:
    """Yield the graphs of ``files``, or captures, or those that every checkout has."""
    for file in files:
        yield replace(read_taskgraph(file), name=Path(file).name.split(".")[0])
    if captured:
        from benchmarks.planner.captures import captures

        yield from captures()
    elif not files:
        for path in sorted(GRAPHS.glob("*.taskgraph.json")):
            yield replace(read_taskgraph(path), name=path.name.split(".")[0])
        small = LoraShape(layers=8, hidden=1024, ffn=2816, vocabulary=4096, tokens=1024, flops=2e13)
        yield replace(lora_graph(small, 1), name="lora 8 layers")
        yield replace(lora_graph(LoraShape(tokens=1024), 1), name="lora 7B 1x1024")
        yield replace(lora_graph(LoraShape(tokens=8192), 1), name="lora 7B 8x1024")
        yield replace(prefill_graph(LoraShape(tokens=1024), 1), name="prefill 7B 1x1024")
        yield replace(prefill_graph(LoraShape(tokens=8192), 1), name="prefill 7B 8x1024")


def measure(graph: TaskGraph, memory: int, bandwidth: float, planners: Iterable[str]) -> Iterator[Row]:
    """Plan ``graph`` with each of ``planners``, verify and simulate; planners that find no plan give no row."""
    link = Link(bandwidth, 1e-5)
    machine = Machine(links={TO_DEVICE: link, TO_HOST: link})
    bound = bound_of(graph, machine, memory)
    for planner in planners:
        began = time.process_time()
        try:
            plan = make_plan(graph, memory=memory, planner=planner, cyclic=True, machine=machine)
        except BudgetTooSmall as error:
            print(f"{graph.name}: {planner} needs {format_size(error.needed)}, not {format_size(memory)}", flush=True)
            continue
        planned = time.process_time()
        verify(with_memory(graph, lambda device: memory), plan)
        done = time.process_time()
        makespan = simulate(plan, machine).makespan
        loaded = swapped_bytes(plan, swaps_in)
        offloaded = swapped_bytes(plan, swaps_out)
        top = peak_bytes(plan)
        held, others = live_peak(graph)
        saving = plan.planner == "timed" and not loaded and not offloaded
        yield Row(
            graph=graph.name,
            vertices=len(graph.vertices),
            memory=memory,
            weights=weights(graph),
            bandwidth=bandwidth,
            planner=planner,
            makespan=makespan,
            bound=bound.bound,
            limit=limit(bound),
            ratio=makespan / bound.bound,
            loads=loaded / bound.lp_reload_bytes if bound.lp_reload_bytes else None,
            offload_bytes=offloaded,
            peak_bytes=top,
            arena=top / (held + others) if saving else None,
            rest=(top - held) / others if saving and others else None,
            memory_edges=len(plan.memory_edges),
            seconds=planned - began,
            verify_seconds=done - planned,
        )


def weights(graph: TaskGraph) -> int:
    """Return the bytes of all clean inputs."""
    return sum(vertex.sizes[0] for vertex in graph.vertices if host_copy_exists(vertex))


def live_peak(graph: TaskGraph) -> tuple[int, int]:
    """Return the bytes of the weights, and the most of all others at once, on the device that has most in all."""
    requirements = requirements_of(graph, Machine(), None)
    held = {
        device: sum(
            buffer.block for buffer in requirements.swappable if buffer.starts_on_host and buffer.device == device
        )
        for device in requirements.pinned_bytes
    }
    return max(((held[device], int(fixed.max())) for device, fixed in requirements.pinned_bytes.items()), key=sum)


def limit(bound: Bound) -> str:
    """Return the name of the largest part of ``bound``."""
    parts = asdict(bound)
    del parts["lp_reload_bytes"]
    return max(parts, key=lambda name: (parts[name], name))


def show(row: Row) -> str:
    """Return ``row`` as a line of the table."""
    loads, arena, rest = (
        f"{'-':>{w}}" if figure is None else f"{figure:{w}.{w - 3}f}"
        for figure, w in ((row.loads, 5), (row.arena, 6), (row.rest, 6))
    )
    return (
        f"{row.graph:<22} {row.vertices:>6} {format_size(row.memory):>9} {row.memory / max(1, row.weights):5.2f} "
        f"{row.bandwidth / 1e9:6.2f} {row.planner:<6} {row.makespan * 1e3:10.2f} {row.ratio:6.3f} {row.limit:<13} "
        f"{loads} {format_size(row.offload_bytes):>9} {arena} {rest} {row.seconds:7.2f} {row.verify_seconds:6.2f}"
    )


HEADER = (
    f"{'graph':<22} {'vert.':>6} {'memory':>9} {'share':>5} {'GB/s':>6} {'plan':<6} {'step ms':>10} {'/bound':>6} "
    f"{'limit':<13} {'loads':>5} {'offload':>9} {'arena':>6} {'rest':>6} {'plan s':>7} {'ver. s':>6}"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table and write it to ``--output`` as JSON; returns 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graph", nargs="*", default=[])
    parser.add_argument("--captures", action="store_true")
    parser.add_argument("--memory", nargs="*", default=[])
    parser.add_argument("--bandwidth", nargs="*", type=float, default=list(BANDWIDTHS))
    parser.add_argument("--planners", default="timed,build")
    parser.add_argument("--ablate", action="store_true")
    parser.add_argument("--why", action="store_true")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--plans", type=Path)
    parser.add_argument("-o", "--output")
    words = list(sys.argv[1:] if argv is None else argv)
    options = parser.parse_args(words)
    if options.why:
        return why.main(options, words)
    options.output = options.output or str(ROOT / "out" / "planner.json")
    rows = ablation(options) if options.ablate else side_by_side(options)
    Path(options.output).parent.mkdir(parents=True, exist_ok=True)
    write_atomically(options.output, (json.dumps([asdict(row) for row in rows], indent=1) + "\n").encode())
    return 0


def cases(options: argparse.Namespace) -> Iterator[tuple[TaskGraph, int, float]]:
    """Yield every graph with every memory and bandwidth that the command line asks for."""
    for graph in graphs(options.graph, options.captures):
        own = [int(share * weights(graph)) for share in SHARES if weights(graph)]
        own.append(int(ROOMY * sum(live_peak(graph))))
        for memory in [parse_size(size) for size in options.memory] or own:
            for bandwidth in options.bandwidth:
                yield graph, memory, bandwidth


def side_by_side(options: argparse.Namespace) -> list[Row]:
    """Print a line a plan."""
    rows: list[Row] = []
    print(HEADER)
    for graph, memory, bandwidth in cases(options):
        for row in measure(graph, memory, bandwidth, options.planners.split(",")):
            rows.append(row)
            print(show(row), flush=True)
    return rows


def ablation(options: argparse.Namespace) -> list[moves.Outcome]:
    """Print a line for each move of each case, then a summary of each move."""
    outcomes: list[moves.Outcome] = []
    print(moves.HEADER)
    named = options.graph or options.captures or options.memory
    for graph, memory, bandwidth in cases(options) if named else ablation_cases.cases():
        if len(graph.devices) > 1:
            continue
        link = Link(bandwidth, 1e-5)
        full: moves.Outcome | None = None
        for outcome in moves.ablate(graph, memory, bandwidth, Machine(links={TO_DEVICE: link, TO_HOST: link})):
            full = full or outcome
            outcomes.append(outcome)
            if line := moves.show(outcome, full):
                print(line, flush=True)
    print(moves.SUMMARY, *moves.summaries(outcomes), sep="\n")
    return outcomes


if __name__ == "__main__":
    raise SystemExit(main())
