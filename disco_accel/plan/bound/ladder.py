"""A ladder from a plan's simulated step down to the bound: each rung is free of one constraint more, and the
differences are the rows of a sum.

The upper rungs run the plan again in the order in which it ran (``plan_replay.py``). The lower ones are the step
program with the plan's kept values, with whole values, and with parts of them (``program_of_plan.py``). No rung is
above the one before: each schedule of one is a schedule of the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from disco_accel.errors import ConfigError
from disco_accel.graph.carried_values import taskgraph_of
from disco_accel.graph.copies import swaps_in, swaps_out
from disco_accel.graph.memgraph import MemGraph
from disco_accel.plan.bound.link_time import LinkTime, link_times
from disco_accel.plan.bound.lower_bound import Bound, bound_of, bound_within_memory
from disco_accel.plan.bound.peak_kernel_cost import bound_without_peaks
from disco_accel.plan.bound.plan_replay import Replay, without_latency
from disco_accel.plan.bound.program_of_plan import one_stream, program_of_plan
from disco_accel.plan.bound.waits import Wait, waits_for_copies
from disco_accel.plan.summary import swapped_bytes
from disco_accel.simulate.machine import Machine
from disco_accel.simulate.simulator import simulate

ROWS = {
    "addresses": "copies and kernels wait for a given place where the bytes would fit elsewhere",
    "offloads": "offloads: what follows them waits",
    "whole_places": "a load takes all of its place from its start, not as its bytes come",
    "latency": "latency of more copies than the bound has",
    "load_order": "whole loads one after the other: pieces of several would come at better times",
    "choice": "what is kept: other whole values would need fewer loads, or at better times",
    "whole_values": "values are whole or away: parts of them could be kept",
    "kernel_order": "kernels in the plan's order, where dependencies leave another open",
    "rest": "loads beyond the bound's, their order, and the order of kernels",
}
"""The rows in words."""

_WHOLE_SECONDS = 10.0
_WHOLE_PART = 2000
"""The search over whole values takes so long at most; values below such a part of the memory may be in parts."""


@dataclass(frozen=True, slots=True)
class Why:
    """``step``: the plan's simulated seconds; ``bound``: of its graph, all parts; ``rows``: seconds by the names of
    ``ROWS``, the sum of which is ``step`` less ``bound.bound``. ``reload_bytes``: the plan's. ``links``: the time of
    each link that loads. ``waits``: the longest of kernels for copies, and ``waited`` all of them together. ``dip``:
    seconds that the bound loses if no kernel takes more bytes than 99 in 100 do."""

    step: float
    bound: Bound
    rows: dict[str, float]
    reload_bytes: int
    offload_bytes: int
    links: Sequence[LinkTime]
    waits: Sequence[Wait]
    waited: float
    dip: float

    @property
    def distance(self) -> float:
        """Seconds."""
        return self.step - self.bound.bound

    @property
    def sentence(self) -> str:
        """The largest cost, in words."""
        bound = self.bound.bound
        if self.distance <= 1e-4 * self.step or not bound:
            return f"The plan takes {self.step:.4g} s, which no plan beats by more than a ten thousandth."
        name = max(self.rows, key=self.rows.__getitem__)
        share = self.rows[name] / self.distance
        return (
            f"The plan takes {self.step:.4g} s, {self.step / bound:.3f} times the bound; {share:.0%} of the distance: "
            f"{ROWS[name]}."
        )


def explain(plan: MemGraph, machine: Machine | None = None, *, search: float = _WHOLE_SECONDS, longest: int = 5) -> Why:
    """Return the distance between ``plan``, which has been verified, and the bound of its graph on ``machine``.

    ``search``: seconds for the best choice of whole values; ``longest``: so many waits are named.

    Raises ConfigError: the plan is not run step after step, or its graph has no kernels.
    """
    machine = machine or Machine()
    if not plan.cyclic:
        raise ConfigError("--why: the bound is of plans that are run step after step; plan with --cyclic")
    run = simulate(plan, machine)
    graph = taskgraph_of(plan)
    bound = bound_of(graph, machine)
    instant = without_latency(machine)
    alone = one_stream(plan, machine)
    # Latencies are on no chain of kernels.
    without = bound_within_memory(graph, instant, bound.critical_path) if alone else bound_of(graph, instant)
    floor = without.bound
    replay = Replay(plan, machine, run)
    rungs = [run.makespan]
    rungs.append(min(rungs[-1], replay.seconds(anywhere=True)))
    rungs.append(min(rungs[-1], replay.seconds(anywhere=True, free_offloads=True)))
    rungs.append(min(rungs[-1], replay.seconds(anywhere=True, free_offloads=True, fine=True)))
    instantly = replay.seconds(anywhere=True, free_offloads=True, fine=True, no_latency=True)
    streamed = max(floor, min(rungs[-1], instantly))
    rows = dict(zip(("addresses", "offloads", "whole_places"), _differences(rungs), strict=True))
    rows["latency"] = (rungs[-1] - streamed) - (bound.bound - floor)
    if alone:
        started = sorted(run.starts, key=lambda vertex: run.starts[vertex])
        program, keeps = program_of_plan(plan, instant, started)
        parts = max(floor, program.seconds())
        kept = max(parts, program.seconds(keeps))
        whole_above = plan.devices[0].memory // _WHOLE_PART
        whole = min(kept, max(parts, program.seconds(whole_above=whole_above, limit=search)))
        lower = [streamed, kept, whole, parts, floor]
        names = ("load_order", "choice", "whole_values", "kernel_order")
        rows |= dict(zip(names, _differences(lower), strict=True))
    else:
        rows["rest"] = streamed - floor
    waits, waited = waits_for_copies(plan, machine, run)
    return Why(
        step=run.makespan,
        bound=bound,
        rows=rows,
        reload_bytes=swapped_bytes(plan, swaps_in),
        offload_bytes=swapped_bytes(plan, swaps_out),
        links=link_times(plan, machine, run),
        waits=waits[:longest],
        waited=waited,
        dip=max(0.0, bound.bound - bound_without_peaks(graph, machine)),
    )


def _differences(rungs: Sequence[float]) -> list[float]:
    return [above - below for above, below in pairwise(rungs)]
