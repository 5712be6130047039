"""Run by test_loading.py in a process of its own: loads a checkpoint one way and prints what that cost at its peak."""

from __future__ import annotations

import json
import sys

import torch
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama  # noqa: F401  (what its import costs is not what is measured)
from transformers.utils.logging import disable_progress_bar

from disco_accel import DiscoConfig, prepare
from disco_accel.integrate.hf.checkpoint import load_into_arena
from disco_accel.native.extension import load_extension
from disco_accel.recipes.loading import add_adapter
from disco_accel.recipes.settings import parse_recipe


def status(key: str) -> int:
    """Bytes from /proc/self/status; VmHWM and VmRSS count the pages of mapped files too."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(key + ":")) * 1024


def main(way: str, directory: str, dtype: str) -> None:
    """``arena``, ``pretrained`` or ``twice`` (a plain copy kept, for the judge of this measurement)."""
    load_extension()
    disable_progress_bar()
    recipe = parse_recipe(
        {"model_name_or_path": directory, "dataset": "-", "output_dir": "-", "max_steps": 1, "lora_r": 1}
    )
    torch.ones(1, dtype=torch.bfloat16).float()
    before = status("VmRSS")
    if way == "pretrained":
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    else:
        model = load_into_arena(directory, dtype=dtype)
    kept = [p.detach().clone() for p in model.parameters()] if way == "twice" else []
    model = add_adapter(model, recipe)
    prepare(model, DiscoConfig(memory_budget="1GiB", device="cpu"))
    weights = sum(p.nbytes for p in model.parameters())
    print(json.dumps({"peak": status("VmHWM") - before, "weights": weights, "kept": len(kept)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
