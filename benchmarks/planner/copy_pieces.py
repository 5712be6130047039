"""What whole copies that are queued on a link cost a step, and pieces of them, in simulation.

    python -m benchmarks.planner.copy_pieces [--only NAME ...] [--plans FOLDER]

The engine hands a link two copies at once, so that it never idles. A copy that becomes ready waits for both, were it
wanted before them. Each plan of ``python -m benchmarks.planner --why`` is simulated with one copy on the link at a
time, as planners assume, with two, and with two pieces of at most 16 MiB. Of each step: seconds over the first.
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.planner.why_cases import why_cases
from disco_accel.graph.files import read_memgraph
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.spaces import TO_DEVICE
from disco_accel.native.cuda_backend import GPU_COPY_PIECE
from disco_accel.plan import make_plan
from disco_accel.simulate.simulator import Machine, Simulator, _Run
from disco_accel.simulate.step_boundary import CrossStepDependencies
from disco_accel.sizes import parse_size

DEPTH = 2


class _QueuedCopies(_Run):
    """Links take up to ``DEPTH`` copies, or pieces of at most ``piece`` seconds, and run them first in, first out."""

    def __init__(self, plan: Simulator, piece: float) -> None:
        super().__init__(plan, "priority", random.Random(0), 0.0, 1, CrossStepDependencies())
        self.piece = piece
        self.left_of = list(self.queues.seconds)
        self.is_link = [not name.startswith("compute") for name in plan.lane_names]
        self.queued: list[list[tuple[int, float, bool]]] = [[] for _ in plan.lane_names]
        """By link: vertex, seconds, whether it is the last piece."""

    def makespan(self) -> float:
        """Seconds of a step."""
        lanes = self.queues
        for i in [i for i, waits in enumerate(self.waiting) if not waits]:
            self._ready(i)
        self._launch()
        while lanes.running:
            self.now = now = lanes.running[0][0]
            while lanes.running and lanes.running[0][0] <= now:
                _, i = heapq.heappop(lanes.running)
                lane = self.plan.lanes[i]
                lanes.stirred.add(lane)
                last = self._end_piece(lane) if self.is_link[lane] else True
                lanes.free[lane] += not self.is_link[lane]
                if last:
                    self._done(i)
            self._launch()
        return self.now

    def _end_piece(self, lane: int) -> bool:
        queued = self.queued[lane]
        *_, last = queued.pop(0)
        if queued:
            heapq.heappush(self.queues.running, (self.now + queued[0][1], queued[0][0]))
        return last

    def _launch(self) -> None:
        lanes = self.queues
        for lane in [lane for lane in lanes.stirred if self.is_link[lane]]:
            lanes.stirred.discard(lane)
            ready, queued = lanes.queues[lane], self.queued[lane]
            while ready and len(queued) < DEPTH:
                i = ready[0][1]
                seconds = min(self.piece, self.left_of[i])
                self.left_of[i] -= seconds
                last = self.left_of[i] <= 0.0
                if last:
                    heapq.heappop(ready)
                queued.append((i, seconds, last))
                if len(queued) == 1:
                    heapq.heappush(lanes.running, (self.now + seconds, i))
        lanes.launch(self.now, self.starts)


def rows(plans: Iterator[tuple[str, MemGraph]], machine: Machine) -> Iterator[tuple[str, float, float, float]]:
    """Of each plan its name, seconds with one copy at a time, and how many times that with two and with pieces."""
    piece = GPU_COPY_PIECE / machine.link(TO_DEVICE).bandwidth
    for name, plan in plans:
        simulator = Simulator(plan, machine)
        one = simulator.run().makespan
        two, pieces = (_QueuedCopies(simulator, longest).makespan() for longest in (float("inf"), piece))
        yield name, one, two / one, pieces / one


def _planned(only: Sequence[str], folder: Path | None, machine: Machine) -> Iterator[tuple[str, MemGraph]]:
    for graph, memory in why_cases(only):
        file = None if folder is None else folder / f"{graph.name.replace(' ', '-')}@{memory}.memgraph.json"
        if file is not None and file.exists():
            plan = read_memgraph(file)
        else:
            plan = make_plan(graph, memory=parse_size(memory), planner="timed", cyclic=True, machine=machine)
        yield f"{graph.name}, {memory}", plan


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these graphs alone")
    parser.add_argument("--plans", type=Path, help="a folder with plans, NAME@MEMORY.memgraph.json")
    args = parser.parse_args(argv)
    machine = Machine()
    print("| plan | one copy at a time, s | two whole copies | two pieces |\n|---|---|---|---|")
    for name, one, two, pieces in rows(_planned(args.only, args.plans, machine), machine):
        print(f"| {name} | {one:.4g} | {two:.3f} | {pieces:.3f} |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
