"""How much memory does a training step of a recipe need: without a plan, and at least with one?

    python -m benchmarks.demo.probe configs/lora_demo.yaml --config configs/disco.yaml

Prints one JSON object, sizes in bytes: ``in_memory_peak`` (weights, adapters, gradients, AdamW state, activations and
temporaries of an eager step, from the allocations that torch made), ``weights``, ``least_budget``, ``all_budget``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import Any

import torch

from benchmarks.demo.training import Workload, load_workload
from disco_accel import prepare
from disco_accel.config.settings import DiscoConfig
from disco_accel.errors import BudgetTooSmall
from disco_accel.native.extension import load_extension
from disco_accel.step.compile.compiled_step import CompiledStep
from disco_accel.step.compile.pipeline import PlannerSettings, plan_step


def in_memory_peak(workload: Workload, steps: int = 3) -> int:
    """The most bytes that torch holds in the CPU allocator during an eager training step with AdamW."""
    load_extension()
    counters = torch.ops.disco_accel
    before = sum(p.numel() * p.element_size() for p in workload.model.parameters())
    counters.set_live_tracking(True)
    for parameter in workload.model.parameters():
        # Weights that were loaded before tracking began are counted from here on.
        parameter.data = parameter.data.clone()
    optimizer = torch.optim.AdamW([p for p in workload.model.parameters() if p.requires_grad])
    for step in range(steps):
        if step == 1:
            counters.reset_peak_live_bytes()
        workload.step(step)
        optimizer.step()
        optimizer.zero_grad()
    peak = int(counters.peak_live_bytes())
    counters.set_live_tracking(False)
    assert peak > before, "an eager step holds its weights"
    return peak


def least_budget(step: CompiledStep, config: DiscoConfig) -> int:
    """The smallest whole budget for which the planner finds a plan of ``step``."""
    settings = PlannerSettings(config.planner, config.policy, recompute=config.recompute)
    try:
        plan_step(step.captured, step.budget.within(1), settings)
    except BudgetTooSmall as error:
        return error.needed
    raise AssertionError("no step fits one byte")


def measure(recipe: str, config_file: str) -> dict[str, Any]:
    """All figures of this probe for a recipe under the planner of ``config_file``."""
    print("counting the bytes of steps without a plan", file=sys.stderr)
    workload = load_workload(recipe)
    weights = sum(p.numel() * p.element_size() for p in workload.model.parameters() if not p.requires_grad)
    peak = in_memory_peak(workload)
    config = dataclasses.replace(DiscoConfig.from_yaml(config_file), memory_budget=4 * peak, link_bandwidth=None)
    print("looking for the least budget", file=sys.stderr)
    prepare(workload.model, config)
    workload.step(0)
    step = workload.compiled()
    return {
        "in_memory_peak": peak,
        "weights": weights,
        "least_budget": least_budget(step, config),
        "all_budget": 2 * peak,
    }


def main(argv: list[str] | None = None) -> int:
    """Command line; one JSON object on stdout."""
    parser = argparse.ArgumentParser(description="memory that a recipe's step needs")
    parser.add_argument("recipe")
    parser.add_argument("--config", required=True, help="YAML file with a disco_config section")
    args = parser.parse_args(argv)
    print(json.dumps(measure(args.recipe, args.config)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
