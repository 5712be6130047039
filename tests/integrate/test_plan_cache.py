"""A second run of the same training plans nothing, and a plan that does not fit is never used."""

from __future__ import annotations

import json
import logging
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from disco_accel import DiscoConfig, prepare, restore, stats
from disco_accel.plan import plan_cache as module
from tests.support import forkserver
from tests.support.models import random_batch, tiny_lora

MEMORY = 500_000
PROGRAM = """
import json, sys, torch
from disco_accel import DiscoConfig, prepare, stats
from tests.support.models import random_batch, tiny_lora
torch.set_num_threads(1)
folder, planner, layers = sys.argv[1], sys.argv[2], int(sys.argv[3])
config = DiscoConfig(memory_budget=500_000, device="cpu", planner=planner, plan_cache=folder)
model = prepare(tiny_lora(checkpointing=True, layers=layers), config)
loss = model(**random_batch()).loss
loss.backward()
seen = stats(model)
grads = [p.grad.double().sum().item() for p in model.parameters() if p.grad is not None]
print(json.dumps({"cache": seen["plan_cache"], "plan": seen["compile_seconds"]["plan"], "loss": loss.item(),
                  "reloads": seen["reload_bytes"], "grads": grads}))
"""


def result(folder: Path, planner: str, layers: int) -> dict[str, Any]:
    """What the program printed, run in a process of its own."""
    command = forkserver.program(PROGRAM, folder.parent, str(folder), planner, str(layers))
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(autouse=True)
def nothing_said_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_said", set())


def step(folder: Path | None, memory: int = MEMORY, **changes: Any) -> dict[str, Any]:
    """Statistics of one training step of a fresh model."""
    cache = None if folder is None else str(folder)
    settings = {"planner": "timed", "device": "cpu", "plan_cache": cache} | changes
    shape = {key: settings.pop(key) for key in ("layers", "dtype", "length") if key in settings}
    length = shape.pop("length", 16)
    model = prepare(tiny_lora(checkpointing=True, **({"layers": 1} | shape)), DiscoConfig(memory, **settings))
    loss = model(**random_batch(length=length)).loss
    loss.backward()
    seen = stats(model) | {"loss": loss.item()}
    restore(model)
    return seen


def test_a_second_process_plans_nothing(tmp_path: Path) -> None:
    """The same bits from a plan that was loaded in a fraction of the time it took to make."""
    first, second = (result(tmp_path / "kept", "build", layers=2) for _ in range(2))
    assert (first["cache"], second["cache"]) == ("miss", "hit")
    assert second["plan"] < first["plan"] / 2
    assert first["reloads"] > 0
    same = ("loss", "grads", "reloads")
    assert [first[key] for key in same] == [second[key] for key in same]


def test_what_the_plan_was_made_for_must_be_the_same(tmp_path: Path) -> None:
    """Another budget, model, shape, dtype, planner or link is a miss; the first training still hits afterwards."""
    assert step(tmp_path)["plan_cache"] == "miss"
    for change in (
        {"memory": MEMORY + 4096},
        {"layers": 2},
        {"length": 24},
        {"dtype": torch.bfloat16},
        {"planner": "build"},
        {"link_bandwidth": 1e9},
    ):
        assert step(tmp_path, **change)["plan_cache"] == "miss", change
    assert step(tmp_path)["plan_cache"] == "hit"


def test_another_torch_never_hits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step(tmp_path)
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert step(tmp_path)["plan_cache"] == "miss"


def test_off_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert step(None)["plan_cache"] == "off"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["cut", "unsafe"])
def test_a_tampered_plan_is_planned_anew(damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One line, the right bits, and a whole file for the next run."""
    before = step(tmp_path)
    (path,) = (tmp_path / "plans").glob("*.json")
    text = path.read_text()
    if damage == "cut":
        path.write_text(text[: len(text) // 2])
    else:
        data = json.loads(text)
        data["edges"]["memory"] = []
        path.write_text(json.dumps(data))
    with caplog.at_level(logging.WARNING, "disco_accel"):
        after = step(tmp_path)
    assert after["plan_cache"] == "miss" and after["loss"] == before["loss"]
    assert len([r for r in caplog.records if "plan cache" in r.getMessage()]) == 1
    assert step(tmp_path)["plan_cache"] == "hit"
