"""The long hunt for a bound that a plan beats.

    python -m benchmarks.planner.bound_hunt [--graphs 10000] [--first 0] [--minutes M]

Random graphs and chains of weights that do not fit, each planned by both planners and verified. Every part of the bound
of the plan's order is compared with the plan in simulated time: one step, with kernels in the order of the list, of
readiness and at random, and what a further step takes. Exit status 1 if a plan is faster by more than a billionth.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

from disco_accel.errors import BudgetTooSmall, ConfigError, PlanError
from disco_accel.graph.carried_values import taskgraph_of
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.spaces import TO_DEVICE, TO_HOST
from disco_accel.plan import make_plan
from disco_accel.plan.bound.lower_bound import Bound, bound_of
from disco_accel.simulate.simulator import Link, Machine, Simulator
from disco_accel.verify.static import verify
from tests.support.graphs.strategies import Shape, random_taskgraph, with_room
from tests.support.graphs.weight_chains import tight_chain
from tests.support.plans.host_updated_plans import HOST_UPDATED_SHAPES
from tests.support.plans.state_plans import TIMED_SHAPES

PARTS = tuple(field.name for field in fields(Bound) if field.name != "lp_reload_bytes")
SHAPES = (
    Shape(keep=0.05),
    Shape(devices=1, keep=0.0),
    Shape(vertices=48, devices=2),
    Shape(gate=False, keep=0.3),
    Shape(vertices=12, inplace=0.4),
    *HOST_UPDATED_SHAPES,
    *TIMED_SHAPES,
)
_EXACT = 1e-9


@dataclass(frozen=True, slots=True)
class Trial:
    """A verified plan on a machine, and the bound of its order."""

    seed: int
    planner: str
    plan: MemGraph
    machine: Machine
    bound: Bound

    def beaten(self) -> Iterator[str]:
        """Yield each part of the bound that a run of the plan beats, with by how much."""
        simulator = Simulator(self.plan, self.machine)
        once = simulator.run().makespan
        runs = {"priority": once, "fifo": simulator.run(dispatch="fifo").makespan}
        runs |= {f"random {s}": simulator.run(dispatch="random", seed=s).makespan for s in range(2)}
        if self.plan.cyclic:
            runs["a further step"] = (simulator.run(steps=4).makespan - once) / 3
        for name, seconds in runs.items():
            for part in PARTS:
                least = getattr(self.bound, part)
                if least > seconds * (1 + _EXACT):
                    above = f"{least / seconds - 1:.2e} above the step"
                    yield f"seed {self.seed}, {self.planner}, {name}: {part} is {above}"


def trials(seed: int) -> Iterator[Trial]:
    """Yield what the planners make of the graph of ``seed``."""
    rng = random.Random(seed)
    if seed % 2:
        graph = tight_chain(rng)
    else:
        graph = with_room(random_taskgraph(rng, rng.choice(SHAPES)), rng.choice((0.5, 0.65, 0.8, 1.2, 3.0)))
    bandwidth, latency = rng.choice((3e6, 1e7, 1e9)), rng.choice((0.0, 1e-6, 1e-5))
    link = Link(bandwidth, latency)
    joint = (("h2d", "d2h"),) if rng.random() < 0.2 else ()
    machine = Machine(compute_streams=rng.choice((1, 1, 1, 2)), joint=joint, links={TO_DEVICE: link, TO_HOST: link})
    for planner in ("timed", "build"):
        try:
            plan = make_plan(graph, cyclic=True, planner=planner, machine=machine)
        except (BudgetTooSmall, ConfigError, PlanError):
            continue
        verify(graph, plan)
        yield Trial(seed, planner, plan, machine, bound_of(taskgraph_of(plan), machine))


def main(argv: Sequence[str] | None = None) -> int:
    """Print what was found; returns 1 if a plan beats its bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    options = parser.parse_args(argv)
    largest: Counter[str] = Counter()
    graphs = plans = wrong = 0
    began = time.monotonic()
    for seed in range(options.first, options.first + options.graphs):
        if time.monotonic() - began > 60 * options.minutes:
            break
        graphs += 1
        for trial in trials(seed):
            plans += 1
            largest.update(part for part in PARTS if getattr(trial.bound, part) >= trial.bound.bound * (1 - _EXACT) > 0)
            for line in trial.beaten():
                wrong += 1
                print(line, flush=True)
    share = ", ".join(f"{part} {number}" for part, number in sorted(largest.items()))
    print(f"{graphs} graphs, {plans} plans in {time.monotonic() - began:.0f} s; largest part: {share}")
    print(f"{wrong} times a plan was faster than a part of its bound")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
