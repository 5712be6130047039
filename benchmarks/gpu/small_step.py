"""Two planned steps of a small model under a tight budget, for tools that watch a process."""

from __future__ import annotations

import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmarks.gpu.models import SMALL, arena_llama, batch_for, with_adapter
from disco_accel import DiscoConfig, prepare
from disco_accel.errors import BudgetTooSmall


def main(device: str = "cuda") -> int:
    """Run the steps under the least budget that works; prints the losses."""
    where = torch.device(device)
    base, _ = arena_llama(SMALL, dtype=torch.bfloat16, attention="sdpa", source=where)
    model = with_adapter(base, rank=4, checkpointing=True)
    batch = batch_for(SMALL["vocab_size"], 2, 32, where)
    budget = 1 << 20
    for _ in range(2):
        try:
            prepare(model, DiscoConfig(memory_budget=budget, device=device))
            losses = []
            for _ in range(2):
                loss = model(**batch).loss
                loss.backward()
                losses.append(float(loss.detach()))
            print(losses)
            return 0
        except BudgetTooSmall as error:
            budget = error.needed
    return 1


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
