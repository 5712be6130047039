"""Times of one training step, taken in turn: eager, planned, the same plan one vertex after another, and all resident.

    export LD_PRELOAD=$(python -m tests.support.malloc_watch)
    python -m benchmarks.demo.interleaved configs/lora_demo.yaml --config configs/disco.yaml --rounds 5 -o out/step

Prints one JSON object: a list of seconds for each variant, the sizes of the plan, and what the engine counted. With
``-o`` it also writes plan.json, trace.json (Perfetto, chrome://tracing), step.png and more of one planned step.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.compare import same_bits
from benchmarks.common.resident_plan import resident_plan
from benchmarks.demo.training import Workload, load_workload
from disco_accel import prepare, stats
from disco_accel.config.settings import DiscoConfig
from disco_accel.execute.executor import Event, Executor
from disco_accel.observe.report import write_report
from disco_accel.plan.summary import link_bytes
from disco_accel.sizes import parse_size
from disco_accel.step.compile.compiled_step import CompiledStep
from tests.support import malloc_watch


def synchronous_twin(step: CompiledStep) -> Executor:
    """An executor of the same plan, in an arena of its own, that runs one vertex at a time in serial order."""
    return step.make_executor(dataclasses.replace(step.engine, dispatch="synchronous"))


def resident_twin(step: CompiledStep, config: DiscoConfig) -> Executor:
    """An executor of the same step with memory for everything: kernels alone, no copies."""
    return step.make_executor(step.engine, plan=resident_plan(step, config))


def kernel_seconds(events: Sequence[Event]) -> float:
    """Time spent inside kernels."""
    return sum(e.end - e.start for e in events if e.lane.startswith("compute"))


class Variants:
    """Eager and planned model side by side, with the same weights, adapters and batches."""

    def __init__(self, recipe: str, config: DiscoConfig) -> None:
        print("loading the model, capturing and planning a step", file=sys.stderr)
        self.eager = load_workload(recipe)
        self.planned = load_workload(recipe)
        prepare(self.planned.model, config)
        self.planned.step(0)
        self.step = self.planned.compiled()
        self.executors = {
            "planned": self.step.executor,
            "synchronous": synchronous_twin(self.step),
            "resident": resident_twin(self.step, config),
        }

    def run(self, name: str, number: int) -> tuple[float, float]:
        """Loss and seconds of one step: ``eager``, ``planned``, ``synchronous`` or ``resident``."""
        if name == "eager":
            return self.eager.timed_step(number)
        self.step.use(self.executors[name])
        try:
            return self.planned.timed_step(number)
        finally:
            self.step.use(self.executors["planned"])

    def traced(self, name: str, number: int) -> list[Event]:
        """The events of one step."""
        executor = self.executors[name]
        executor.set_tracing(True)
        self.run(name, number)
        events = executor.events()
        executor.set_tracing(False)
        return events

    def same_gradients(self) -> bool:
        """Whether the last eager and the last planned step left gradients with the same bits."""
        left, right = (_gradients(w) for w in (self.eager, self.planned))
        return left.keys() == right.keys() and all(same_bits(left[n], right[n]) for n in left)


def _gradients(workload: Workload) -> dict[str, Any]:
    return {n: p.grad for n, p in workload.model.named_parameters() if p.grad is not None}


def measure(variants: Variants, rounds: int) -> dict[str, Any]:
    """Warm up, then ``rounds`` times one step of each variant in turn, each round beginning with another one."""
    names = ["eager", *variants.executors]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    compute: list[float] = []
    engine: list[float] = []
    large = 0
    same = True
    for name in names:
        variants.run(name, 0)
    for number in range(1, rounds + 1):
        print(f"round {number} of {rounds}: eager, planned, one vertex after another, all resident", file=sys.stderr)
        losses = {"eager": variants.eager.timed_step(number)[0]}
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            malloc_watch.reset()
            losses[name], taken = variants.run(name, number)
            large += malloc_watch.count() if name == "planned" else 0
            seconds[name].append(taken)
            same = same and (name == "eager" or variants.same_gradients())
        same = same and len({loss.hex() for loss in losses.values()}) == 1
        compute.append(kernel_seconds(variants.traced("resident", number)))
        variants.traced("planned", number)
        counters = variants.executors["planned"].counters()
        engine.append(counters["engine_seconds"] / counters["vertices"])
    return {
        "seconds": seconds | {"compute_alone": compute},
        "link_seconds": link_seconds(variants.step),
        "engine_seconds_per_vertex": engine,
        "large_allocations": large,
        "same_bits": same,
        "load_average": os.getloadavg()[0],
        "counters": variants.executors["planned"].counters(),
        "stats": stats(variants.planned.model),
    }


def link_seconds(step: CompiledStep) -> float:
    """Time that the busier direction of the link needs for the bytes of one step."""
    if step.engine.link_bandwidth is None:
        return 0.0
    return max(link_bytes(step.plan)) / step.engine.link_bandwidth


def main(argv: list[str] | None = None) -> int:
    """Command line; one JSON object on stdout."""
    parser = argparse.ArgumentParser(description="one training step: eager, planned, synchronous, in turn")
    parser.add_argument("recipe")
    parser.add_argument("--config", required=True, help="YAML file with a disco_config section")
    parser.add_argument("--budget", help="replaces memory_budget")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--in-memory-peak", type=int, help="bytes, for the picture")
    parser.add_argument("-o", "--output", type=Path, help="folder for plan.json, trace.json and step.png")
    args = parser.parse_args(argv)
    config = dataclasses.replace(DiscoConfig.from_yaml(args.config), plan_cache=None)
    if args.budget is not None:
        config = dataclasses.replace(config, memory_budget=parse_size(args.budget))
    if not malloc_watch.active():
        parser.error(
            "run it as LD_PRELOAD=$(python -m tests.support.malloc_watch) python -m benchmarks.demo.interleaved ..."
        )
    variants = Variants(args.recipe, config)
    result = measure(variants, args.rounds)
    if args.output is not None:
        events = variants.traced("planned", 1)
        plan, counted = variants.step.plan, stats(variants.planned.model)
        write_report(args.output, plan, events, counted, in_memory_peak=args.in_memory_peak)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
