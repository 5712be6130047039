"""An evaluation forward under a budget, alone and in turn with training steps, beside eager in memory.

    python -m benchmarks.prefill.evaluation [--hidden 512 --layers 8 --batch 4 --tokens 128] [--rounds 9]

Random weights with LoRA, the host device, a throttled link, one thread. Budgets are half of the weights and the least
that an evaluation has a plan for. All times are of the same rounds, each of which starts with another subject, and go
to the very end, with the loads of weights for the next forward. ``bound`` is the larger of eager's seconds in memory
and the seconds that the plan's loads take of the link. Losses and logits have eager's bits, or the benchmark fails.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

from benchmarks.common.subjects import Shape, Times, lora_llama
from disco_accel import DiscoConfig, prepare, restore, stats
from disco_accel.errors import BudgetTooSmall
from disco_accel.integrate.hf.planned_forward import planned_forward
from disco_accel.sizes import format_size
from disco_accel.step.run.session import current_step, find_state


class Evaluated:
    """A LoRA Llama, prepared with ``budget`` bytes, and one batch. ``loads``: bytes of weights for each forward."""

    def __init__(self, shape: Shape, budget: int, bandwidth: float) -> None:
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(0, shape.vocabulary, (shape.batch, shape.tokens), generator=generator)
        self.batch = {"input_ids": ids, "labels": ids.clone()}
        self.model = lora_llama(shape)
        config = DiscoConfig(memory_budget=budget, compute_threads=1, link_bandwidth=bandwidth, plan_cache=None)
        prepare(self.model, config)
        state = find_state(self.model)
        assert state is not None, "the model is prepared"
        self.state = state

    def plan(self) -> None:
        """Make the plan of the evaluation. Raises BudgetTooSmall."""
        self.model.eval()
        with torch.no_grad():
            planned_forward(self.state, self.model, self.batch)
        self.settle()
        self.loads = stats(self.model)["reload_bytes"]

    def settle(self) -> None:
        """Wait for the end of what the last step loads."""
        step = current_step(self.model)
        if step is not None:
            step.settle()

    def evaluate(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss and logits of one evaluation, to its very end."""
        self.model.eval()
        with torch.no_grad():
            output = self.model(**self.batch)
        self.settle()
        return output.loss, output.logits

    def forward_and_backward(self) -> None:
        """One training step."""
        self.model.train()
        self.model.zero_grad(set_to_none=True)
        self.model(**self.batch).loss.backward()

    def train(self) -> None:
        """One training step, to its very end."""
        self.forward_and_backward()
        self.settle()

    def in_turn(self) -> None:
        """A training step and an evaluation behind it."""
        self.forward_and_backward()
        self.evaluate()


def seconds_of(run: Callable[[], Any]) -> float:
    """Seconds of one call."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def least(shape: Shape, bandwidth: float) -> Evaluated:
    """With the smallest budget that has a plan; which is the smallest depends on measured times."""
    budget = 1 << 16
    while True:
        subject = Evaluated(shape, budget, bandwidth)
        try:
            subject.plan()
        except BudgetTooSmall as error:
            restore(subject.model)
            budget = error.needed
        else:
            return subject


def measure(shape: Shape, bandwidth: float, rounds: int) -> dict[str, Any]:
    """Seconds of all subjects. Raises AssertionError for other bits than eager's."""
    eager = lora_llama(shape).eval()
    weights = sum(p.nbytes for p in eager.parameters())
    half = Evaluated(shape, weights // 2, bandwidth)
    half.plan()
    subjects = {"half": half, "least": least(shape, bandwidth)}

    def in_memory() -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            output = eager(**half.batch)
        return output.loss, output.logits

    wanted = in_memory()
    for _ in range(3):
        half.in_turn()
    seconds: dict[str, list[float]] = {}

    def evaluation(name: str, subject: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> None:
        subject()
        found: list[tuple[torch.Tensor, torch.Tensor]] = []
        seconds.setdefault(name, []).append(seconds_of(lambda: found.append(subject())))
        assert all(map(torch.equal, found[0], wanted)), f"{name}: other bits than eager's"

    def training() -> None:
        half.train()
        seconds.setdefault("train", []).append(seconds_of(half.train))

    def in_turn() -> None:
        half.in_turn()
        seconds.setdefault("pair", []).append(seconds_of(half.in_turn))

    turns: list[Callable[[], None]] = [lambda: evaluation("in memory", in_memory), training, in_turn]
    for name, subject in subjects.items():
        turns.append(lambda name=name, subject=subject: evaluation(name, subject.evaluate))  # type: ignore[misc]
    for number in range(rounds):
        for turn in turns[number % len(turns) :] + turns[: number % len(turns)]:
            turn()
    return {
        "weights": weights,
        "budgets": {name: subject.state.setup.settings.memory_budget for name, subject in subjects.items()},
        "loads": {name: subject.loads for name, subject in subjects.items()},
        "unplanned": sum(stats(s.model)["forwards_unplanned"] for s in subjects.values()),
        "seconds": {name: Times(tuple(taken)) for name, taken in seconds.items()},
    }


def show(found: dict[str, Any], bandwidth: float) -> str:
    """The table, and the seconds of a step and an evaluation in turn."""
    seconds: dict[str, Times] = found["seconds"]
    compute = seconds["in memory"]
    lines = [
        f"eager in memory {compute.median:.3f} s ±{compute.spread:.3f}; weights {format_size(found['weights'])}",
        "| budget | evaluation, s | loads | link alone, s | evaluation / max(compute, link) |",
        "|---|---|---|---|---|",
    ]
    for name, loads in found["loads"].items():
        link, took = loads / bandwidth, seconds[name]
        ratios = [each / max(eager, link) for each, eager in zip(took.seconds, compute.seconds, strict=True)]
        budget = f"{name}, {format_size(found['budgets'][name])}"
        lines.append(
            f"| {budget} | {took.median:.3f} ±{took.spread:.3f} | {format_size(loads)} | {link:.3f} | "
            f"{took.median / max(compute.median, link):.3f} (by round {median(ratios):.3f}, up to {max(ratios):.3f}) |"
        )
    train, alone, pair = seconds["train"], seconds["half"], seconds["pair"]
    lines.append(
        f"\nin turn: step {train.median:.3f} s + evaluation {alone.median:.3f} s alone; the pair {pair.median:.3f} s "
        f"±{pair.spread:.3f}, {pair.median / (train.median + alone.median):.3f} of the sum"
    )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Exit status 1 if a forward has other bits than eager's, or has run without a plan."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prefill.evaluation")
    for name, value in {"hidden": 512, "layers": 8, "batch": 4, "tokens": 128, "vocabulary": 4096, "rounds": 9}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--bandwidth", type=float, default=0.4e9, help="of the link, bytes per second each way")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    shape = Shape(args.hidden, args.layers, args.tokens, args.batch, args.vocabulary)
    print(f"torch {torch.__version__}, {shape}, {args.bandwidth / 1e9:g} GB/s, load {os.getloadavg()[0]:.2f}")
    found = measure(shape, args.bandwidth, args.rounds)
    print(show(found, args.bandwidth))
    if found["unplanned"]:
        print(f"{found['unplanned']} forwards ran without a plan", file=sys.stderr)
    return int(found["unplanned"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
