"""Seconds of a step as its plan says them before it runs, beside the seconds of that step.

    python -m benchmarks.step.predicted [--families llama,qwen3,gpt2] [--budgets 0.35,0.6,0.9] [--rounds 9] [-o FILE]

LoRA steps of three families on the host device, behind a link that brings all weights in half an eager step. A budget
is a share of what the step takes with all weights on the device. The plan's seconds are those of a simulated step, from
kernels that were measured while the plan was made and the link's rate: the ``step_seconds`` of ``disco-accel plan``.
Rounds of all budgets are interleaved; a budget has the median and the quartiles of its own. The kernels of each plan
are measured again in every round, for a machine's speed may be another in the next minute: ``again`` is what the plan
would say by the medians of those.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.any_plan import wait_for_plans
from benchmarks.common.provenance import provenance
from benchmarks.step.options import names_of, save
from disco_accel import DiscoConfig, prepare, stats
from disco_accel.capture.parts import frozen_parts
from disco_accel.graph.taskgraph import VertexKind
from disco_accel.measure.record import record
from disco_accel.simulate.simulator import Machine, simulate
from disco_accel.step.compile.compiled_step import CompiledStep
from disco_accel.step.run.session import current_step
from tests.support.models import TEN_FAMILIES, family_lora, random_batch

_ROWS, _TOKENS = 2, 128
_SIZES: Mapping[str, Mapping[str, int]] = {
    "gpt2": {"n_embd": 512, "n_layer": 8, "n_head": 8, "n_positions": 256, "vocab_size": 2048},
    "": {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "vocab_size": 2048},
}
HEADER = (
    "| family | budget | said, ms | said again, ms | took, ms | quartiles, ms | said / took | again / took |\n"
    + "|---" * 8
    + "|"
)


@dataclass(frozen=True, slots=True)
class Row:
    """Seconds of a step: ``said`` by the plan, ``again`` by kernels measured in the rounds, ``took`` and the quartiles
    ``low`` and ``high`` of the rounds."""

    family: str
    budget: int
    said: float
    again: float
    took: float
    low: float
    high: float


class _Step:
    """A model of ``family`` under ``budget`` bytes; None: eager."""

    def __init__(self, family: str, budget: int | None = None, bandwidth: float | None = None) -> None:
        self.family, self.budget = family, budget
        self.model: Any = family_lora(family, checkpointing=True, **_SIZES.get(family, _SIZES[""]))
        self.batch = random_batch(batch=_ROWS, length=_TOKENS)
        if budget is None:
            return
        config = DiscoConfig(
            memory_budget=budget, device="cpu", plan_cache=None, compute_threads=1, link_bandwidth=bandwidth
        )
        self.model = prepare(self.model, config)
        self.seconds()
        wait_for_plans(self.model, self.seconds)

    def seconds(self) -> float:
        """Of a forward and its backward."""
        began = time.perf_counter()
        self.model(**self.batch).loss.backward()
        took = time.perf_counter() - began
        self.model.zero_grad()
        return took

    def step(self) -> CompiledStep:
        """The one that runs."""
        step = current_step(self.model)
        assert step is not None, f"{self.family} ran in eager mode: {stats(self.model)['fallbacks']}"
        return step

    def said(self, pace: float = 1.0) -> float:
        """Seconds of a step in the plan that runs, if its kernels took ``pace`` times the seconds that it has."""
        step = self.step()
        vertices = tuple(
            replace(v, duration=v.duration * pace) if v.kind is VertexKind.KERNEL else v for v in step.plan.vertices
        )
        return simulate(replace(step.plan, vertices=vertices), step.settings.machine or Machine()).makespan

    def pace(self) -> float:
        """Seconds of the plan's kernels, but for fused ones, measured now, over those when it was made."""
        step = self.step()
        single = step.records.keys() - step.fused.keys()
        before = {v.id: step.records[v.id] for v in step.graph.vertices if v.id in single}
        graph = step.captured.graph
        bare = tuple(
            replace(v, sizes=v.sizes[:-1]) if v.id in step.records and step.records[v.id].scratch_bytes else v
            for v in graph.vertices
        )
        now = record(replace(graph, vertices=bare), compute_threads=1, only=frozenset(before))
        return sum(r.seconds for r in now.values()) / sum(r.seconds for r in before.values())


def rows(families: Sequence[str], shares: Sequence[float], rounds: int) -> list[Row]:
    """A row for each family and budget."""
    torch.set_num_threads(1)
    found = []
    for family in families:
        eager = _Step(family)
        frozen = sum(part.nbytes for part in frozen_parts(eager.model).values())
        bandwidth = 2 * frozen / statistics.median([eager.seconds() for _ in range(5)][1:])
        whole = _Step(family, 16 << 30, bandwidth)
        used = int(stats(whole.model)["peak_bytes"])
        steps = [_Step(family, int(share * used), bandwidth) for share in shares]
        took = [[(step.seconds(), step.pace()) for step in steps] for _ in range(rounds)]
        for step, own in zip(steps, zip(*took, strict=True), strict=True):
            low, middle, high = statistics.quantiles([seconds for seconds, _ in own], n=4)
            again = step.said(statistics.median([pace for _, pace in own]))
            found.append(Row(family, step.budget or 0, step.said(), again, middle, low, high))
    return found


def table(result: Mapping[str, Any]) -> str:
    """Markdown, a line for each row."""
    lines = [
        f"| {r['family']} | {r['budget'] / 2**20:.0f} MiB | {1e3 * r['said']:.1f} | {1e3 * r['again']:.1f} "
        f"| {1e3 * r['took']:.1f} | {1e3 * r['low']:.1f} to {1e3 * r['high']:.1f} | {r['said'] / r['took']:.3f} "
        f"| {r['again'] / r['took']:.3f} |"
        for r in result["rows"]
    ]
    return "\n".join([HEADER, *lines])


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--families", type=lambda text: names_of(tuple(TEN_FAMILIES), text), default=["llama", "qwen3", "gpt2"]
    )
    parser.add_argument(
        "--budgets", type=lambda text: [float(part) for part in text.split(",")], default=[0.35, 0.6, 0.9]
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("-o", "--output", type=Path, help="everything as JSON")
    args = parser.parse_args(words)
    found = [asdict(row) for row in rows(args.families, args.budgets, args.rounds)]
    head = provenance("python -m benchmarks.step.predicted", words, "cpu")
    result = {"benchmark": "predicted", **head, "batch": _ROWS, "tokens": _TOKENS, "rows": found}
    print(table(result))
    save(args.output, result)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
