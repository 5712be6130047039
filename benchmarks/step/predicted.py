"""Seconds of a step as its plan says them before it runs, beside the seconds of that step.

    python -m benchmarks.step.predicted [--families llama,qwen3,gpt2] [--budgets 0.35,0.6,0.9] [--rounds 9] [-o FILE]

LoRA steps of three families on the host device, behind a link that brings all weights in half an eager step. A budget
is a share of what the step takes with all weights on the device. The plan's seconds are those of a simulated step, from
kernels that were measured while the plan was made and the link's rate: the ``step_seconds`` of ``disco-accel plan``.
Rounds of all budgets are interleaved; a budget has the median and the quartiles of its own.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.any_plan import wait_for_plans
from benchmarks.common.provenance import provenance
from benchmarks.step.options import names_of, save
from disco_accel import DiscoConfig, prepare, stats
from disco_accel.capture.parts import frozen_parts
from disco_accel.simulate.simulator import Machine, simulate
from disco_accel.step.run.session import current_step
from tests.support.models import TEN_FAMILIES, family_lora, random_batch

_ROWS, _TOKENS = 2, 128
_SIZES: Mapping[str, Mapping[str, int]] = {
    "gpt2": {"n_embd": 512, "n_layer": 8, "n_head": 8, "n_positions": 256, "vocab_size": 2048},
    "": {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "vocab_size": 2048},
}
HEADER = "| family | budget | said, ms | took, ms | quartiles, ms | said / took |\n" + "|---" * 6 + "|"


@dataclass(frozen=True, slots=True)
class Row:
    """``said`` by the plan, ``took`` and the quartiles ``low`` and ``high`` of the rounds: seconds of a step."""

    family: str
    budget: int
    said: float
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

    def said(self) -> float:
        """Seconds of a step in the plan that runs."""
        step = current_step(self.model)
        assert step is not None, f"{self.family} ran in eager mode: {stats(self.model)['fallbacks']}"
        return simulate(step.plan, step.settings.machine or Machine()).makespan


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
        took = [[step.seconds() for step in steps] for _ in range(rounds)]
        for step, own in zip(steps, zip(*took, strict=True), strict=True):
            low, middle, high = statistics.quantiles(own, n=4)
            found.append(Row(family, step.budget or 0, step.said(), middle, low, high))
    return found


def table(result: Mapping[str, Any]) -> str:
    """Markdown, a line for each row."""
    lines = [
        f"| {r['family']} | {r['budget'] / 2**20:.0f} MiB | {1e3 * r['said']:.1f} | {1e3 * r['took']:.1f} "
        f"| {1e3 * r['low']:.1f} to {1e3 * r['high']:.1f} | {r['said'] / r['took']:.3f} |"
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
