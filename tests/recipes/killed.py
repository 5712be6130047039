"""Kills a training run at random moments, again and again, and compares each resumed run with one that never stopped.

    python -m tests.recipes.killed FOLDER COUNT SEED

Goes on until COUNT runs were killed before they ended, and prints one JSON object. Each run is forked from this
process, which has imported what takes seconds to import.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file

import disco_accel.integrate.prepare  # noqa: F401, or each run would import it
from disco_accel.recipes.lora import main as run_recipe
from disco_accel.recipes.metrics import METRICS_NAME
from disco_accel.recipes.saving import STAGING
from tests.recipes.conftest import SHAPE, TEXT, write_checkpoint

STEPS = 20
STATE = "trainer_state.json"


def write_recipe(folder: Path) -> Path:
    """A tiny model with dropout, saved at every step and kept thrice, trained under a budget."""
    (folder / "text.txt").write_text(TEXT)
    write_checkpoint(
        folder / "model", replace(SHAPE, num_hidden_layers=1), shard_size="60KB", corpus=folder / "text.txt"
    )
    recipe = {
        "model_name_or_path": str(folder / "model"),
        "dataset": str(folder / "text.txt"),
        "output_dir": str(folder / "straight"),
        "max_steps": STEPS,
        "max_length": 16,
        "per_device_train_batch_size": 2,
        "lora_r": 4,
        "lora_dropout": 0.1,
        "learning_rate": 1e-2,
        "num_threads": 1,
        "save_steps": 1,
        "save_total_limit": 3,
        # Capture takes most of the time: a small graph is killed where it matters more often.
        "lora_target_modules": ["q_proj"],
        "gradient_checkpointing": False,
        "disco_config": {"memory_budget": "4MiB", "device": "cpu", "plan_cache": str(folder / "plans")},
    }
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe))
    return file


def start(recipe: Path, output: Path, resume: bool) -> int:
    """Train in a process of its own; its id."""
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        log = os.open(output.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        code = run_recipe([str(recipe), "--output_dir", str(output), *(["--resume_from_checkpoint"] if resume else [])])
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def wait(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_after(child: int, seconds: float) -> float | None:
    """Kill the run when it has gone on for that long. None, or the seconds it took where it ended before."""
    began = time.monotonic()
    while (spent := time.monotonic() - began) < seconds:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            assert status == 0, f"a run that nobody killed ended with {os.waitstatus_to_exitcode(status)}"
            return spent
        time.sleep(min(1e-3, seconds - spent))
    os.kill(child, signal.SIGKILL)
    code = wait(child)
    assert code in (0, -signal.SIGKILL), f"a run that nobody killed ended with {code}"
    return None if code else seconds


def half_files(folder: Path) -> Iterator[str]:
    """Files and checkpoint folders under their final names that cannot be read, or lack a part."""
    for checkpoint in folder.rglob("checkpoint-*"):
        names = {"adapter_model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", STATE}
        if STAGING not in checkpoint.parts and not names <= {p.name for p in checkpoint.iterdir()}:
            yield str(checkpoint)
    for path in folder.rglob("*"):
        if not path.is_file() or STAGING in path.parts or path.name.startswith("."):
            continue
        try:
            if path.suffix == ".json":
                json.loads(path.read_text())
            elif path.suffix == ".safetensors":
                load_file(path)
            elif path.suffix in (".pt", ".pth") and zipfile.ZipFile(path).testzip() is not None:
                yield str(path)
        except Exception as error:
            yield f"{path}: {error}"


def outcome(output: Path) -> tuple[list[str], dict[str, torch.Tensor]]:
    """Losses by step, at full precision, and the adapter."""
    steps = json.loads((output / METRICS_NAME).read_text())["steps"]
    return [s["loss_hex"] for s in steps], load_file(output / "adapter_model.safetensors")


def main() -> None:
    """See the module."""
    folder, count, rng = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
    torch.set_num_threads(1)
    recipe = write_recipe(folder)
    began = time.monotonic()
    assert wait(start(recipe, folder / "straight", resume=False)) == 0, (folder / "straight.log").read_text()
    seconds = time.monotonic() - began
    losses, adapter = outcome(folder / "straight")
    assert len(losses) == STEPS
    found: dict[str, Any] = {"killed": 0, "ended": 0, "from_start": 0, "resumed_at": {}, "different": [], "half": []}
    while found["killed"] < count:
        output = folder / f"run{found['killed'] + found['ended']}"
        ended = kill_after(start(recipe, output, resume=False), rng.uniform(0, seconds))
        found["killed" if ended is None else "ended"] += 1
        # The first run made the plan, which later ones read: they may take less.
        seconds = min(seconds, ended or seconds)
        found["half"] += half_files(output) if output.is_dir() else []
        found["half"] += half_files(folder / "plans")
        saved = sorted(int(c.name.rpartition("-")[2]) for c in output.glob("checkpoint-*"))
        resume = bool(saved)
        found["from_start"] += not resume
        if resume:
            found["resumed_at"][saved[-1]] = found["resumed_at"].get(saved[-1], 0) + 1
        code = wait(start(recipe, output, resume))
        if code != 0:
            found["different"].append(f"{output}: exit {code}: {output.with_suffix('.log').read_text()[-500:]}")
            continue
        got, trained = outcome(output)
        same = adapter.keys() == trained.keys() and all(torch.equal(trained[n], t) for n, t in adapter.items())
        first = saved[-1] if resume else 0
        if not same or (got[-(STEPS - first) :] != losses[first:] and first < STEPS):
            found["different"].append(str(output))
        found["half"] += half_files(output)
        shutil.rmtree(output)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
