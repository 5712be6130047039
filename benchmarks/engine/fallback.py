"""What our hooks cost a step that runs in eager mode after all: prepared and unprepared, step by step in turn.

python -m benchmarks.engine.fallback [--steps 300] [--hidden 128] [--layers 4]
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from disco_accel import DiscoConfig, prepare, stats
from tests.support.models import random_batch, tiny_lora


def seconds(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> float:
    """Of one step, forward and backward; of the processor, since others may be at work on this machine."""
    began = time.process_time()
    model(**batch).loss.backward()
    elapsed = time.process_time() - began
    model.zero_grad(set_to_none=True)
    return elapsed


def _kept(layer: Callable[..., Any], *args: Any) -> Any:
    """Checkpointing under hooks that a capture does not know."""
    with torch.autograd.graph.saved_tensors_hooks(_same, _same):
        return checkpoint(layer, *args, use_reentrant=False)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def main(argv: Sequence[str] | None = None) -> None:
    """Print medians and the median ratio of neighbouring steps with its quartiles."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    shape = {"layers": args.layers, "hidden": args.hidden, "vocabulary": 512}
    # A checkpoint function under unknown hooks cannot be captured: each step of the prepared model falls back.
    models = [tiny_lora(**shape) for _ in range(3)]
    for model in models:
        model.enable_input_require_grads()  # type: ignore[operator]
        model.base_model.model._set_gradient_checkpointing(True, _kept)  # type: ignore[operator, union-attr]
    prepare(models[0], DiscoConfig(memory_budget=1 << 30, device="cpu", on_unsupported="eager", plan_cache=None))
    batch = random_batch(512, batch=2, length=64)
    times: list[list[float]] = [[], [], []]
    gc.disable()
    for step in range(args.steps + 5):
        for i in (0, 1, 2) if step % 2 else (2, 1, 0):
            times[i].append(seconds(models[i], batch))
    ours, plain, again = (column[5:] for column in times)
    assert stats(models[0])["steps_eager"] == args.steps + 5
    print(f"{'':24}{'median ms':>10}{'ratio':>8}{'quartiles':>16}")
    for name, column in (("prepared, falls back", ours), ("plain", plain), ("plain, once more", again)):
        ratios = [a / b for a, b in zip(column, plain, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4) if column is not plain else (1.0, 1.0, 1.0)
        median = statistics.median(column) * 1e3
        print(f"{name:24}{median:10.3f}{middle:8.3f}{f'{low:.3f}-{high:.3f}':>16}")


if __name__ == "__main__":
    main()
