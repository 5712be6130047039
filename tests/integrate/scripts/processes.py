"""Trains in a process that an entry point started, each case without plans and then with them, and compares.

``processes.py ddp CASE...``, or ``deepspeed`` or ``alone`` in place of ``ddp``; each process writes
``result-<rank>.json``. The case ``home`` compares weights that stay home.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DeepSpeedPlugin, DistributedDataParallelKwargs, InitProcessGroupKwargs
from transformers import Trainer, TrainingArguments, default_data_collator

from disco_accel import stats
from disco_accel.errors import ConfigError
from disco_accel.step.placement.distributed import check_same, exclude_from_collectives, frozen_tensors
from disco_accel.step.run.session import find_state
from tests.support.models import random_batch, tiny_lora

STEPS, ACCUMULATE = 2, 2
VOCABULARY, LENGTH = 32, 8
Losses = list[str]
Run = tuple[Losses, dict[str, torch.Tensor], dict[str, Any]]

torch.set_num_threads(1)


def accelerator_of(accumulate: int = ACCUMULATE, **options: Any) -> Accelerator:
    AcceleratorState._reset_state()
    GradientState._reset_state()
    return Accelerator(gradient_accumulation_steps=accumulate, **options)


def model_of(rank: int) -> torch.nn.Module:
    # Other weights in each process: only what rank 0 broadcasts makes them equal.
    return tiny_lora(layers=1, hidden=32, vocabulary=VOCABULARY, seed=rank)


def train(accelerator: Accelerator, model: Any, optimizer: Any, steps: range, read: bool = False) -> Losses:
    rank, losses = dist.get_rank(), []
    for step in steps:
        batch = random_batch(VOCABULARY, length=LENGTH, seed=100 * rank + step)
        with accelerator.accumulate(model):
            output = model(**batch)
            if read:
                losses.append(output.logits.sum().item().hex())
            accelerator.backward(output.loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(output.loss.item().hex())
    return losses


def outcome(losses: Losses, model: Any) -> Run:
    inner = getattr(model, "module", model)
    return losses, {n: p.detach().clone() for n, p in inner.named_parameters()}, stats(model)


def prepared(accelerator: Accelerator, rank: int) -> tuple[Any, Any]:
    model = model_of(rank)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return accelerator.prepare(model, optimizer)  # type: ignore[no-any-return]


def loop(read: bool = False, rank: int | None = None, **options: Any) -> Run:
    accelerator = accelerator_of(**options)
    model, optimizer = prepared(accelerator, dist.get_rank() if rank is None else rank)
    return outcome(train(accelerator, model, optimizer, range(STEPS * ACCUMULATE), read), model)


def resumed(options: Callable[[], dict[str, Any]]) -> Run:
    """Losses of a run that was saved half way, of its end alone after loading that, and the weights of the latter."""
    half, whole = range(STEPS * ACCUMULATE // 2), range(STEPS * ACCUMULATE // 2, STEPS * ACCUMULATE)
    accelerator = accelerator_of(**options())
    model, optimizer = prepared(accelerator, dist.get_rank())
    train(accelerator, model, optimizer, half)
    accelerator.save_state("saved")
    uninterrupted = outcome(train(accelerator, model, optimizer, whole), model)
    accelerator = accelerator_of(**options())
    model, optimizer = prepared(accelerator, 7 + dist.get_rank())
    accelerator.load_state("saved")
    found = outcome(train(accelerator, model, optimizer, whole), model)
    assert same(found, uninterrupted), "a resumed run is not the uninterrupted one"
    return found


def trainer(**options: Any) -> Run:
    AcceleratorState._reset_state()
    GradientState._reset_state()
    arguments = TrainingArguments(
        output_dir="trainer",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=ACCUMULATE,
        max_steps=STEPS,
        logging_steps=1,
        learning_rate=1e-2,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        ddp_backend="gloo",
        **options,
    )
    columns = random_batch(VOCABULARY, batch=16, length=LENGTH, seed=3)
    rows = [{name: column[row] for name, column in columns.items()} for row in range(16)]
    model = model_of(dist.get_rank())
    made = Trainer(model=model, args=arguments, train_dataset=rows, data_collator=default_data_collator)
    made.train()
    return outcome([entry["loss"].hex() for entry in made.state.log_history if "loss" in entry], model)


def ds_options(stage: int, bf16: bool = False) -> dict[str, Any]:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": ACCUMULATE,
        "gradient_clipping": 0.1,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": bf16},
        "steps_per_print": 10**6,
    }
    return {"deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=config), **gloo()}


def gloo() -> dict[str, Any]:
    return {"kwargs_handlers": [InitProcessGroupKwargs(backend="gloo")]}


def ddp(**keys: Any) -> dict[str, Any]:
    return {"kwargs_handlers": [DistributedDataParallelKwargs(**keys)]}


def same(a: Run, b: Run) -> bool:
    return a[0] == b[0] and a[1].keys() == b[1].keys() and all(torch.equal(a[1][n], b[1][n]) for n in a[1])


def home(**options: Any) -> dict[str, Any]:
    """What an engine does to a model that stays home, whose base is another in each process."""
    accelerator = accelerator_of(**options)
    model = model_of(dist.get_rank())
    before = {name: tensor.detach().clone() for name, tensor in frozen_tensors(model)}
    exclude_from_collectives(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    accelerator.prepare(model, optimizer)
    cpu, said = torch.device("cpu"), ""
    try:
        check_same(frozen_tensors(model), cpu)
    except ConfigError as error:
        said = str(error)
    check_same(frozen_tensors(model_of(0)), cpu)
    return {
        "kept": all(torch.equal(tensor, before[name]) for name, tensor in frozen_tensors(model)),
        "adapter": [float(p.detach().double().sum()).hex() for p in model.parameters() if p.requires_grad],
        "said": said,
    }


def on_shared_weights(**options: Any) -> Run:
    """From one base in all processes, of which they hold one copy: that is compared instead of broadcast."""
    os.environ["DISCO_SHARE_WEIGHTS"] = "true"
    try:
        accelerator = accelerator_of(**options)
        model, optimizer = prepared(accelerator, 0)
    finally:
        del os.environ["DISCO_SHARE_WEIGHTS"]
    found = outcome(train(accelerator, model, optimizer, range(STEPS * ACCUMULATE)), model)
    state = find_state(model)
    assert state is not None
    (arena,) = state.placement.shared_arenas()
    copy = torch.tensor([os.fstat(arena.file).st_ino])
    dist.broadcast(copy, 0)
    assert copy.item() == os.fstat(arena.file).st_ino, "the processes hold a copy each"
    frozen = [p for p in state.placement.model.parameters() if not p.requires_grad]
    assert not any(arena.differs(frozen)), "a process has written to its copy"
    return found


def on_two_devices() -> Run:
    os.environ |= {"DISCO_DEVICES": "2", "DISCO_PARALLEL": "layers"}
    try:
        found = loop()
    finally:
        del os.environ["DISCO_DEVICES"], os.environ["DISCO_PARALLEL"]
    assert found[2]["devices"] == 2
    return found


Case = tuple[Callable[[], Run], Callable[[], Run]]
"""The run without plans and the one with them."""

DDP: dict[str, Case] = {
    "accumulation": (loop, loop),
    "unused parameters": (lambda: loop(True, **ddp(find_unused_parameters=True)),) * 2,
    # Without accumulation: torch's static graph does not go with no_sync.
    "static graph": (lambda: loop(accumulate=1, **ddp(static_graph=True)),) * 2,
    "bucket views": (lambda: loop(**ddp(gradient_as_bucket_view=True, broadcast_buffers=False)),) * 2,
    "trainer": (trainer, trainer),
    "devices": (loop, on_two_devices),
    "shared weights": (lambda: loop(rank=0), on_shared_weights),
}
DEEPSPEED: dict[str, Case] = {
    "stage 0": (lambda: loop(**ds_options(0)),) * 2,
    "bf16 over fp32 weights": (lambda: loop(**ds_options(2, bf16=True)),) * 2,
    "shared weights": (lambda: loop(rank=0, **ds_options(1)), lambda: on_shared_weights(**ds_options(1))),
    "stage 1 resumed": (lambda: resumed(lambda: ds_options(1)),) * 2,
    "stage 2 resumed": (lambda: resumed(lambda: ds_options(2)),) * 2,
    # The launcher's config asks for stage 3 with everything offloaded.
    "migrated": (lambda: loop(**ds_options(2)), lambda: loop(**gloo())),
}
ALONE = {name: DEEPSPEED[name] for name in ("stage 0", "stage 1 resumed", "stage 2 resumed")}


def main() -> None:
    results: dict[str, Any] = {}
    entry, *cases = sys.argv[1:]
    for name in cases:
        if name == "home":
            results[name] = home(**(ds_options(1) if entry == "deepspeed" else {}))
            continue
        plain, planned = {"ddp": DDP, "deepspeed": DEEPSPEED, "alone": ALONE}[entry][name]
        os.environ["DISCO_ENABLED"] = "false"
        expected = plain()
        os.environ["DISCO_ENABLED"] = "true"
        found = planned()
        results[name] = {
            "same": same(found, expected),
            "alone": expected[2] == {},
            "eager": found[2]["steps_eager"],
            "planned": found[2]["steps_compiled"],
            "plans": found[2]["plans"],
            "losses": found[0],
            "weights": [float(p.double().sum()).hex() for p in found[1].values()],
        }
    results["processes"] = dist.get_world_size()
    Path(f"result-{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.destroy_process_group()
    # A thread of gloo that still holds a tensor of Python's when the interpreter goes down aborts the process
    # (pytorch/pytorch#179291): while this one sleeps, it can let go.
    time.sleep(0.5)


main()
