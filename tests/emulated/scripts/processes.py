"""Trains in a process that a launcher started: eager, then planned, on this process's device; writes how they compare.

``processes.py ddp FOLDER`` or ``processes.py deepspeed FOLDER``.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DeepSpeedPlugin, InitProcessGroupKwargs

from disco_accel import DiscoConfig, prepare, stats
from disco_accel.native.backend import workspace_bytes
from tests.support.models import random_batch, tiny_lora

STEPS, ACCUMULATE, VOCABULARY = 3, 2, 32


def accelerator(kind: str) -> Accelerator:
    AcceleratorState._reset_state()
    GradientState._reset_state()
    gloo: dict[str, Any] = {"kwargs_handlers": [InitProcessGroupKwargs(backend="gloo")]}
    if kind == "ddp":
        return Accelerator(gradient_accumulation_steps=ACCUMULATE, **gloo)
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": ACCUMULATE,
        "gradient_clipping": 0.1,
        "zero_optimization": {"stage": 1},
        "steps_per_print": 10**6,
    }
    return Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=settings), **gloo)


def train(kind: str, planned: bool) -> tuple[list[str], dict[str, torch.Tensor], dict[str, Any]]:
    """Losses, trained weights and what the plans did."""
    made = accelerator(kind)
    rank, device = dist.get_rank(), made.device
    model: Any = tiny_lora(layers=1, hidden=32, vocabulary=VOCABULARY)
    if planned:
        prepare(model, DiscoConfig(memory_budget=2 * workspace_bytes(device) + (2 << 20), device="cuda"))
    inner = model
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model, optimizer = made.prepare(model, optimizer)
    losses = []
    for step in range(STEPS * ACCUMULATE):
        batch = random_batch(VOCABULARY, length=8, seed=100 * rank + step)
        with made.accumulate(model):
            loss = model(**{name: tensor.to(device) for name, tensor in batch.items()}).loss
            made.backward(loss)
            if made.sync_gradients:
                made.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item().hex())
    trained = {n: p.detach().cpu() for n, p in inner.named_parameters() if p.requires_grad}
    return losses, trained, stats(inner) if planned else {}


def hook_losses_alone() -> None:
    """DeepSpeed 0.18.6 hooks the loss and the logits that it is made of, and each hook divides by the number of steps.

    So its gradients are divided twice, those of plans once.
    """
    import deepspeed
    from deepspeed.runtime.utils import OutputBackwardHookManager

    if not deepspeed.__version__.startswith("0.18."):
        return
    hook = OutputBackwardHookManager._traverse_and_register_hooks

    def of_losses(self: Any, outputs: Any, first: Any) -> None:
        if not isinstance(outputs, torch.Tensor) or outputs.dim() == 0:
            hook(self, outputs, first)

    OutputBackwardHookManager._traverse_and_register_hooks = of_losses


def main() -> None:
    kind, folder = sys.argv[1], Path(sys.argv[2])
    if kind == "deepspeed":
        hook_losses_alone()
    expected, found = train(kind, False), train(kind, True)
    result = {
        "same": found[0] == expected[0] and all(torch.equal(found[1][n], expected[1][n]) for n in expected[1]),
        "losses": found[0],
        "planned": found[2]["steps_compiled"],
        "eager": found[2]["steps_eager"],
        "device": torch.cuda.current_device(),
        "processes": dist.get_world_size(),
    }
    (folder / f"result-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(result))
    torch.cuda.synchronize()
    dist.destroy_process_group()


main()
