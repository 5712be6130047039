"""What the first steps of a LoRA Llama take on the host device before they run: capture, plan and load.

    python -m benchmarks.step.first --layers 22 --budget 64MiB --lengths 64,48

Prints a line for each length: CPU seconds of its first step and of the step after it, and seconds on the clock of
capture, plan and load. To compare two versions run this in both in turn: layers so narrow spend next to nothing in
kernels.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence

import torch

from disco_accel import DiscoConfig, prepare
from disco_accel.step.run.session import find_state
from tests.support.models import random_batch, tiny_lora


def first_steps(layers: int, budget: str, lengths: Sequence[int]) -> Iterator[dict[str, float]]:
    """``first``, ``second``: CPU seconds of two steps of each length, of one model in bf16; ``capture``, ``plan`` and
    ``load``: seconds on the clock of these parts of the first, as the product counts them."""
    torch.set_num_threads(1)
    model = tiny_lora(layers=layers, hidden=64).to(torch.bfloat16)
    model = prepare(model, DiscoConfig(memory_budget=budget, device="cpu", plan_cache=None))
    state = find_state(model)
    assert state is not None
    for length in lengths:
        batch, spent = random_batch(length=length), []
        for _ in range(2):
            began = time.process_time()
            model(**batch).loss.backward()
            spent.append(time.process_time() - began)
        parts = next(reversed(state.memory.plans.values())).seconds
        yield {"length": length, "first": spent[0], "second": spent[1]} | {
            name: parts[name] for name in ("capture", "plan", "load")
        }


def main(argv: Sequence[str] | None = None) -> int:
    """Print the lines; returns 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--budget", default="64MiB")
    parser.add_argument("--lengths", default="64,48", help="tokens of each row, in the order of the batches")
    options = parser.parse_args(argv)
    for row in first_steps(options.layers, options.budget, [int(each) for each in options.lengths.split(",")]):
        print(json.dumps({name: round(value, 2) for name, value in row.items()}), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
