"""Two ranks of DDP on the host device, whose budgets move: ``ranks.py FOLDER MODE``, RANK in the environment.

Writes what it found to FOLDER/result-RANK.json; see ``test_ranks_budget.py``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from disco_accel import DiscoConfig, prepare, restore, set_memory_budget, stats
from disco_accel.plan.planning_process import PlanningProcess
from disco_accel.step.budget import grant_source
from disco_accel.step.run.session import find_state
from disco_accel.store import shared_budgets
from tests.step.moving_budgets import LARGE, SMALL, Layers, answer_here, batch
from tests.support.file_ledger import FileLedger

FOLDER, MODE, RANK = Path(sys.argv[1]), sys.argv[2], int(os.environ["RANK"])
STEPS = 8


def train(budget: int | str, before: Callable[[Any, int], None], **keys: Any) -> tuple[list[str], dict[str, Any]]:
    """Bits of all losses and weights, and ``stats``. ``before`` is called with the model and the number of each
    step."""
    inner = Layers()
    prepare(
        inner, DiscoConfig(**({"memory_budget": budget, "device": "cpu", "plan_cache": None, "quiet": True} | keys))
    )
    model = DistributedDataParallel(inner)
    optimizer = torch.optim.AdamW(inner.parameters(), lr=1e-2)
    bits = []
    for step in range(STEPS):
        before(inner, step)
        loss = model(batch(2 * step + RANK))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        bits.append(loss.item().hex())
    bits += [value.hex() for value in inner.scale.tolist()]
    figures = stats(inner)
    restore(inner)
    return bits, figures


def by_hand(model: torch.nn.Module, step: int) -> None:
    """Each rank's budget changes before steps of its own."""
    if step in (2 + RANK, 5 + RANK):
        set_memory_budget(model, SMALL if step < 5 else LARGE)


def by_ledger(model: torch.nn.Module, step: int) -> None:
    ledger = FileLedger(FOLDER / f"ledger-{RANK}")
    if step in (2 + RANK, 5 + 2 * RANK):
        ledger.set_total(SMALL if step < 5 else LARGE)
    ledger.leave()


def meet(name: str) -> None:
    """Tell the test that this rank has come to ``name``, and wait until it says go on."""
    (FOLDER / f"{name}-{RANK}").touch()
    while not (FOLDER / f"{name}-go").exists():
        time.sleep(0.005)


def with_store(model: torch.nn.Module, step: int) -> None:
    """The store ends before one step and is back before another."""

    def until(connected: bool) -> None:
        source = find_state(model).budgets.grant.source
        while source.connected != connected:
            source.granted()
            time.sleep(0.005)

    if step == 2:
        meet("first")
    elif step == 4:
        until(False)
        meet("alone")
    elif step == 6:
        until(True)
        meet("back")


def waiting(model: torch.nn.Module, step: int) -> None:
    """From a step on there is room for one rank."""
    if step == 2:
        meet("crowded")


def crowded() -> dict[str, Any]:
    train("shared", waiting)
    return {}


def endless() -> dict[str, Any]:
    """Budgets are claimed again and again, until somebody ends this."""
    (FOLDER / f"begun-{RANK}").touch()
    while True:
        train("shared", lambda model, step: find_state(model).memory.unload())


def moving() -> dict[str, Any]:
    fixed, _ = train(LARGE, lambda *_: None)
    given, _ = train(LARGE, by_hand)
    path = FOLDER / f"ledger-{RANK}"
    FileLedger.create(path, LARGE)
    grant_source.use_grants(lambda: FileLedger(path))
    granted, figures = train("shared", by_ledger)
    devices, two = train("shared", by_ledger_again, devices=2, parallel="layers")
    return {
        "bits": [bits == fixed for bits in (given, granted, devices)],
        "moves": [figures["budget_moves"], two["budget_moves"]],
        "losses": fixed[:STEPS],
        "weights": fixed[STEPS:],
        "planned": figures["steps_compiled"],
    }


def by_ledger_again(model: torch.nn.Module, step: int) -> None:
    if step == 0:
        ledger = FileLedger(FOLDER / f"ledger-{RANK}")
        ledger.set_total(LARGE)
        ledger.leave()
    by_ledger(model, step)


def store() -> dict[str, Any]:
    shared_budgets.RECONNECT_SECONDS = 0.0
    fixed, _ = train(LARGE, lambda *_: None)
    granted, figures = train("shared", with_store)
    return {"bits": [granted == fixed], "planned": figures["steps_compiled"], "held": figures["held_bytes"]}


def main() -> None:
    torch.set_num_threads(1)
    # At this process's priority: how long another one waits for a core is not tested here.
    PlanningProcess._answer = answer_here
    dist.init_process_group("gloo", init_method=f"file://{FOLDER}/meeting", rank=RANK, world_size=2)
    modes = {"moving": moving, "store": store, "crowded": crowded, "endless": endless}
    found = modes[MODE]()
    (FOLDER / f"result-{RANK}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
