"""What the engine costs and how well it overlaps: ``disco-accel bench engine``.

    python -m benchmarks.engine [--sections overhead,overlap,jitter,loop] [--rounds 7] [-o out/engine.json]

Four tables, the first three each measured side by side in one run, the variants of a round taken in turn:

``overhead``  a step with nothing to copy, beside eager: tiny kernels, where the framework's own time rules, and large
              ones;
``overlap``   a step over a throttled link at bandwidths around the crossover, over max(compute, bytes / bandwidth),
              with the dispatch modes beside the default;
``jitter``    the same with every copy's time disturbed at random: what dynamic dispatch loses, and a fixed order;
``loop``      the engine alone, launching kernels of assumed time on one device and on eight.

Compute alone is measured in the same rounds, on a plan with everything resident. Losses and gradients of every step
have the bits of eager's, or the benchmark fails.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.any_plan import any_plan_of
from benchmarks.common.subjects import Pair, Shape, Times, Variant, lora_llama
from benchmarks.engine import loop
from disco_accel.config.settings import DiscoConfig
from disco_accel.execute.executor import Executor
from disco_accel.graph.copies import swaps_in, swaps_out
from disco_accel.graph.files import write_atomically
from disco_accel.graph.spaces import TO_DEVICE, TO_HOST
from disco_accel.graph.taskgraph import VertexKind
from disco_accel.plan.summary import swapped_bytes
from disco_accel.simulate.simulator import Link, Machine

OVERHEAD = (
    Shape(hidden=32, layers=4, tokens=8),
    Shape(hidden=32, layers=16, tokens=8),
    Shape(hidden=1024, layers=2, tokens=128, vocabulary=2048),
    Shape(hidden=1024, layers=2, tokens=512, vocabulary=2048),
)
OVERLAP = Shape(hidden=512, layers=8, tokens=128, batch=2, vocabulary=4096)
BANDWIDTHS = (0.2e9, 0.35e9, 0.5e9, 1.0e9)
_STEPS_IN_A_ROW = 10
"""Of tiny models: as in training, a step finds the caches as the one before left them."""
BUDGET = 0.5
"""Of the frozen weights."""
JITTER = 0.5
MODES = (
    Variant("default"),
    Variant("fixed order", {"dispatch": "fixed"}),
    Variant("random priority", {"dispatch": "random"}),
    Variant("worker stream", {"inline_compute": False}),
    Variant("worker stream, K=0", {"inline_compute": False, "lookahead": 0}),
    Variant("synchronous", {"dispatch": "synchronous"}),
)


class Differs(Exception):
    """A planned step gave other bits than eager."""


def in_turn(
    rounds: int, subjects: dict[str, Callable[[], tuple[float, float]]], check: Callable[[str], None], steps: int = 1
) -> Any:
    """Seconds of each subject over ``rounds`` rounds after one that warms up; every round starts with another one.

    ``steps``: how many each runs before the next has its turn.
    """
    seconds: dict[str, list[float]] = {name: [] for name in subjects}
    names = list(subjects)
    losses: set[str] = set()
    for number in range(rounds + 1):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            for _ in range(steps):
                loss, taken = subjects[name]()
                losses.add(loss.hex())
                if number > 0:
                    seconds[name].append(taken)
            check(name)
    if len(losses) != 1:
        raise Differs(f"the variants gave {len(losses)} different losses")
    return {name: Times(tuple(taken)) for name, taken in seconds.items()}


def bits_checked(pair: Pair) -> Callable[[str], None]:
    """A check that the last planned step left the gradients that the last eager step left."""
    pair.run(pair.eager)

    def check(name: str) -> None:
        if name != "eager" and not pair.same_bits():
            raise Differs(f"{name}: a gradient differs from eager's")

    return check


def overhead(shapes: Sequence[Shape], rounds: int) -> list[dict[str, Any]]:
    """Rows of eager and planned steps where everything is resident."""
    rows = []
    for shape in shapes:
        pair = Pair(shape, DiscoConfig(memory_budget=4 << 30, compute_threads=1, plan_cache=None))
        step = pair.step
        assert not any(swaps_in(v) for v in step.plan.vertices), "nothing is copied"
        times = in_turn(
            rounds,
            {"eager": lambda pair=pair: pair.run(pair.eager), "planned": lambda pair=pair: pair.run(pair.planned)},
            bits_checked(pair),
            _STEPS_IN_A_ROW if shape.hidden <= 32 else 1,
        )
        rows.append(
            {
                "shape": str(shape),
                "kernels": sum(v.kind is VertexKind.KERNEL for v in step.plan.vertices),
                "eager": times["eager"],
                "planned": times["planned"],
                "kernels_alone": step.compute_seconds,
            }
        )
    return rows


def budget_of(shape: Shape) -> int:
    """Bytes: ``BUDGET`` of the frozen weights of ``shape``."""
    frozen = (p for p in lora_llama(shape).parameters() if not p.requires_grad)
    return int(BUDGET * sum(p.numel() * p.element_size() for p in frozen))


def throttled(shape: Shape, bandwidth: float, budget: int, planner: str) -> Pair:
    """A pair whose planned model runs under ``budget`` bytes over a link of ``bandwidth`` bytes/s each way."""
    config = DiscoConfig(
        memory_budget=budget, compute_threads=1, link_bandwidth=bandwidth, planner=planner, plan_cache=None
    )
    return Pair(shape, config)


def link_seconds(pair: Pair, bandwidth: float) -> float:
    """Seconds that the busier direction needs for the bytes of one step."""
    return max(swapped_bytes(pair.step.plan, way) for way in (swaps_in, swaps_out)) / bandwidth


def any_plan_seconds(pair: Pair, bandwidth: float, compute: float) -> float:
    """Seconds that no repeating plan in the captured order beats, if the kernels take ``compute`` seconds in all."""
    stretch = compute / pair.step.compute_seconds
    seconds = {v.id: stretch * (v.duration or 0.0) for v in pair.step.graph.vertices}
    return any_plan_of(
        pair.step, seconds, Machine(links={TO_DEVICE: Link(bandwidth, 0.0), TO_HOST: Link(bandwidth, 0.0)})
    )


def overlap(shape: Shape, bandwidths: Sequence[float], rounds: int, planner: str) -> list[dict[str, Any]]:
    """Rows of steps over links of several bandwidths: the default, the other modes, and the bound."""
    budget = budget_of(shape)
    rows = []
    for bandwidth in bandwidths:
        pair = throttled(shape, bandwidth, budget, planner)
        variants = [*MODES, Variant("resident", {"link_bandwidth": None}, pair.resident_plan())]
        with pair.executors(variants) as executors:
            compute: list[float] = []
            subjects = _subjects(pair, executors)

            def resident(pair: Pair = pair, run: Executor = executors["resident"], out: list[float] = compute) -> Any:
                out.append(pair.kernel_seconds(run))
                return pair.run_on(run)

            times = in_turn(rounds, {**subjects, "resident": resident}, bits_checked(pair))
        alone = Times(tuple(compute[1:]))
        link = link_seconds(pair, bandwidth)
        rows.append(
            {
                "bandwidth": bandwidth,
                "budget": budget,
                "reload_bytes": swapped_bytes(pair.step.plan, swaps_in),
                "offload_bytes": swapped_bytes(pair.step.plan, swaps_out),
                "compute_alone": alone,
                "link": link,
                "bound": max(alone.median, link),
                "any_plan": any_plan_seconds(pair, bandwidth, alone.median),
                "times": times,
            }
        )
    return rows


def _subjects(pair: Pair, executors: dict[str, Executor]) -> dict[str, Callable[[], tuple[float, float]]]:
    subjects: dict[str, Callable[[], tuple[float, float]]] = {"eager": lambda: pair.run(pair.eager)}
    for name, executor in executors.items():
        subjects[name] = lambda executor=executor: pair.run_on(executor)  # type: ignore[misc]
    return subjects


def jitter(shape: Shape, bandwidths: Sequence[float], rounds: int, planner: str) -> list[dict[str, Any]]:
    """Rows of steps whose copies each take between 1 - JITTER and 1 + JITTER of their time, the same for every mode."""
    budget = budget_of(shape)
    rows = []
    for bandwidth in bandwidths:
        pair = throttled(shape, bandwidth, budget, planner)
        variants = []
        for name, dispatch in (("dynamic", "priority"), ("fixed", "fixed")):
            variants.append(Variant(name, {"dispatch": dispatch}))
            variants.append(Variant(f"{name}, disturbed", {"dispatch": dispatch, "link_jitter": JITTER}))
        with pair.executors(variants) as executors:
            times = in_turn(rounds, _subjects(pair, executors), bits_checked(pair))
        rows.append({"bandwidth": bandwidth, "times": times})
    return rows


def cell(times: Times) -> str:
    """Median and spread in milliseconds."""
    return f"{times.median * 1e3:.1f} ±{times.spread * 1e3:.1f}"


def print_overhead(rows: Sequence[dict[str, Any]]) -> None:
    """One line a shape."""
    print("\n| step, nothing copied | kernels | eager, ms | planned, ms | eager / planned | kernels alone, ms |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        ratio = row["eager"].median / row["planned"].median
        print(
            f"| {row['shape']} | {row['kernels']} | {cell(row['eager'])} | {cell(row['planned'])} | {ratio:.2f} "
            f"| {row['kernels_alone'] * 1e3:.2f} |"
        )


def print_overlap(rows: Sequence[dict[str, Any]]) -> None:
    """One line a bandwidth and mode."""
    print("\n| link, GB/s | compute, ms | link, ms | lower bound | " + " | ".join(m.name for m in MODES) + " | eager |")
    print("|---" * (len(MODES) + 5) + "|")
    for row in rows:
        ratios = " | ".join(f"{row['times'][mode.name].median / row['bound']:.3f}" for mode in MODES)
        print(
            f"| {row['bandwidth'] / 1e9:g} | {cell(row['compute_alone'])} | {row['link'] * 1e3:.1f} "
            f"| {row['any_plan'] / row['bound']:.3f} | {ratios} | {row['times']['eager'].median / row['bound']:.3f} |"
        )
    print("\nEach column is the measured step over max(compute, link); eager has all of its memory.")
    print("`lower bound`: no plan in the captured order beats it (`disco-accel bound`); over the same.")


def print_jitter(rows: Sequence[dict[str, Any]]) -> None:
    """One line a bandwidth."""
    print(f"\n| link, GB/s | dynamic, ms | disturbed ±{JITTER:.0%} | loses | fixed, ms | disturbed | loses |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        cells = []
        for name in ("dynamic", "fixed"):
            calm, disturbed = row["times"][name], row["times"][f"{name}, disturbed"]
            cells += [cell(calm), cell(disturbed), f"{disturbed.median / calm.median - 1:+.1%}"]
        print(f"| {row['bandwidth'] / 1e9:g} | " + " | ".join(cells) + " |")


def print_loop(rows: Sequence[loop.Row]) -> None:
    """One line a case."""
    print(f"\n{loop.HEADER}")
    print("\n".join(loop.line(row) for row in rows))


SECTIONS: dict[str, tuple[Callable[[argparse.Namespace], Any], Callable[[Any], None]]] = {
    "overhead": (lambda args: overhead(OVERHEAD, 3 * args.rounds), print_overhead),
    "overlap": (lambda args: overlap(OVERLAP, BANDWIDTHS, args.rounds, args.planner), print_overlap),
    "jitter": (lambda args: jitter(OVERLAP, BANDWIDTHS, args.rounds, args.planner), print_jitter),
    "loop": (lambda args: loop.measure(args.rounds), print_loop),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Exit status 1 if a planned step has other bits than eager."""
    parser = argparse.ArgumentParser(prog="disco-accel bench engine", description=__doc__.split("\n")[0])
    parser.add_argument("--sections", default=",".join(SECTIONS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--planner", default=DiscoConfig().planner)
    parser.add_argument("-o", "--output", type=Path, help="all seconds as JSON")
    args = parser.parse_args(argv)
    wanted = args.sections.split(",")
    unknown = [name for name in wanted if name not in SECTIONS]
    if unknown or args.rounds < 1:
        parser.error(f"--sections takes {', '.join(SECTIONS)}; --rounds at least 1")
    torch.set_num_threads(1)
    results: dict[str, Any] = {"load_average": os.getloadavg()[0], "torch": torch.__version__}
    print(f"torch {torch.__version__}, one compute thread, {os.cpu_count()} cores, load {os.getloadavg()[0]:.2f}")
    try:
        for name in wanted:
            measure, show = SECTIONS[name]
            results[name] = measure(args)
            show(results[name])
    except Differs as error:
        print(f"bench engine: {error}", file=sys.stderr)
        return 1
    if args.output is not None:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(args.output, json.dumps(results, default=dataclasses.asdict).encode())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
