"""``optimizer: host``: all weights of a model are trained in host memory, to the bits of eager mode."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import Trainer, TrainingArguments, default_data_collator

from disco_accel import DiscoCallback, DiscoConfig, prepare, stats
from disco_accel.errors import BudgetTooSmall
from tests.integrate.fp32_copies import Copies, assert_same
from tests.support.models import family_full, random_batch

STEPS, ACCUMULATED = 5, 2
TWICE_LLAMA = 2 * 98944
"""Bytes: twice the weights of the small Llama."""


def config(budget: int = 1 << 30, **keys: Any) -> DiscoConfig:
    return DiscoConfig(**({"memory_budget": budget, "device": "cpu", "optimizer": "host", "plan_cache": None} | keys))


def full(family: str, dtype: torch.dtype = torch.float32, checkpointing: bool = False) -> torch.nn.Module:
    tied = {"tie_word_embeddings": True} if family == "qwen3" else {}
    return family_full(family, dtype=dtype, checkpointing=checkpointing, **tied)


def prepared(model: torch.nn.Module, budget: int) -> torch.nn.Module:
    """``model`` prepared with ``budget`` bytes, or the least that a plan needs, which depends on measured times."""
    for _ in range(6):
        prepare(model, config(budget))
        try:
            model(**random_batch())
        except BudgetTooSmall as error:
            budget = error.needed
        else:
            return model
    raise AssertionError(f"no plan in {budget} bytes, which was said to be enough")


def train(model: torch.nn.Module) -> tuple[list[torch.Tensor], dict[str, tuple[torch.Tensor, ...]]]:
    """Losses, then each weight, with both of its moments if it is trained."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
    losses = []
    for step in range(STEPS):
        for part in range(ACCUMULATED):
            loss = model(**random_batch(seed=step * ACCUMULATED + part)).loss / ACCUMULATED
            loss.backward()
            losses.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    states: Any = {p: (s["exp_avg"], s["exp_avg_sq"]) for p, s in optimizer.state.items()}
    return losses, {n: (p, *states.get(p, ())) for n, p in model.named_parameters()}


def assert_same_training(model: torch.nn.Module, eager: torch.nn.Module) -> None:
    (losses, weights), (eager_losses, eager_weights) = train(model), train(eager)
    assert all(map(torch.equal, losses, eager_losses))
    for name, expected in eager_weights.items():
        assert len(weights[name]) == len(expected) and all(map(torch.equal, weights[name], expected)), name


CASES = {
    ("llama", torch.float32): False,
    ("gpt2", torch.bfloat16): True,
    ("qwen3", torch.float32): True,
    ("qwen3", torch.bfloat16): False,
    ("gemma2", torch.bfloat16): False,
}
"""Family and dtype → activation checkpointing."""


@pytest.mark.parametrize("budget", ["least", "half", "all"])
@pytest.mark.parametrize(("family", "dtype"), CASES)
def test_weights_and_moments_are_eager_ones(family: str, dtype: torch.dtype, budget: str) -> None:
    """Accumulation, clipping and a schedule; tied embeddings (GPT-2, Gemma 2, Qwen3 here)."""
    checkpointing = CASES[family, dtype]
    eager = full(family, dtype, checkpointing)
    weights = sum(p.nbytes for p in eager.parameters())
    model = prepared(full(family, dtype, checkpointing), {"least": 1, "half": weights // 2, "all": 1 << 30}[budget])
    assert_same_training(model, eager)
    figures = stats(model)
    assert figures["optimizer"] == "host" and figures["steps_eager"] == 0
    parts = figures["budget"]
    assert parts["adapters"] == parts["gradients"] == parts["optimizer"] == 0
    assert figures["peak_bytes"] <= figures["budget_bytes"]
    assert figures["reload_bytes"] >= weights and figures["resident_weight_bytes"] < weights // 10


def _last_layer(model: torch.nn.Module) -> torch.nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1." in name or "norm" in name.rpartition(".layers")[0])
    return model


def _biases(model: torch.nn.Module) -> torch.nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    return model


def _embeddings(model: torch.nn.Module) -> torch.nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("embed" in name)
    return model


def _lora_and_head(model: torch.nn.Module) -> torch.nn.Module:
    torch.manual_seed(1)
    adapter = LoraConfig(
        r=4, target_modules=["q_proj", "up_proj"], modules_to_save=["lm_head"], init_lora_weights=False
    )
    return get_peft_model(model, adapter)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("family", "choose"),
    [("llama", _last_layer), ("gpt2", _biases), ("qwen3", _embeddings), ("llama", _lora_and_head)],
)
def test_any_part_of_a_model_may_be_trained(family: str, choose: Callable[..., torch.nn.Module]) -> None:
    """Frozen weights and trained ones side by side in host memory."""
    model, eager = choose(full(family)), choose(full(family))
    prepared(model, sum(p.nbytes for p in model.parameters()) // 2)
    assert_same_training(model, eager)
    assert stats(model)["optimizer"] == "host" and stats(model)["steps_eager"] == 0


def rows(count: int) -> list[dict[str, list[int]]]:
    ids = torch.randint(0, 96, (count, 12), generator=torch.Generator().manual_seed(1)).tolist()
    return [{"input_ids": row, "attention_mask": [1] * 12, "labels": row} for row in ids]


def life(folder: Path, planned: bool) -> tuple[torch.nn.Module, list[Any]]:
    """A Trainer that saves in the middle, and another one that goes on from there, with a model of its own."""
    log: list[Any] = []
    for steps, resume in ((2, None), (4, str(folder / "checkpoint-2"))):
        model: Any = full("llama")
        arguments = TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_steps=steps,
            save_steps=2,
            eval_strategy="steps",
            eval_steps=2,
            logging_steps=1,
            learning_rate=1e-2,
            warmup_steps=2,
            optim="adamw_torch_fused",
            lr_scheduler_type="constant_with_warmup",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        data = {"train_dataset": rows(24), "eval_dataset": rows(4), "data_collator": default_data_collator}
        ours = [DiscoCallback(config(TWICE_LLAMA))] if planned else []
        trainer = Trainer(model=model, args=arguments, callbacks=ours, **data)
        trainer.train(resume_from_checkpoint=resume)
        kept = ("loss", "eval_loss", "grad_norm", "learning_rate", "step")
        log += [[entry.get(key) for key in kept] for entry in trainer.state.log_history]
    trainer.save_model(str(folder / "final"))
    if planned:
        assert stats(model)["optimizer"] == "host" and stats(model)["steps_eager"] == 0
    return model, log


def test_a_trainer_saves_and_resumes(tmp_path: Path) -> None:
    """Logs, weights, the saved model and the saved optimizer are those of plain training."""
    model, log = life(tmp_path / "planned", True)
    eager, expected = life(tmp_path / "plain", False)
    assert log == expected
    for (name, ours), theirs in zip(model.named_parameters(), eager.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    files = [load_file(tmp_path / kind / "final" / "model.safetensors") for kind in ("planned", "plain")]
    assert files[0].keys() == files[1].keys() and all(torch.equal(files[0][n], t) for n, t in files[1].items())


def _train_by_ddp(model: torch.nn.Module, optimizer: Any, rank: int) -> list[torch.Tensor]:
    """Weights behind three steps of two parts, clipped, whose first part is not reduced."""
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    for step in range(3):
        for part in range(2):
            with wrapped.no_sync() if part == 0 else contextlib.nullcontext():
                wrapped(**random_batch(seed=10 * step + 2 * part + rank)).loss.backward()
        torch.nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)
        optimizer.step()
        wrapped.zero_grad()
    return [p.detach() for p in model.parameters()]


def _in_two_processes(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "LOCAL_WORLD_SIZE": "2"}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for dtype, masters in ((torch.float32, "auto"), (torch.bfloat16, "fp32")):
        planned, plain = full("llama", dtype), full("llama", dtype)
        prepare(planned, config(TWICE_LLAMA, master_weights=masters))
        optimizer = torch.optim.AdamW(planned.parameters(), lr=1e-2, fused=True)
        copies = Copies(plain, lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True))
        found, expected = (_train_by_ddp(m, o, rank) for m, o in ((planned, optimizer), (plain, copies)))
        assert all(map(torch.equal, found, expected))
        if masters == "fp32":
            assert_same(planned, optimizer, copies)
        assert stats(planned)["optimizer"] == "host" and stats(planned)["steps_compiled"] == 6
    dist.destroy_process_group()


def test_two_processes_reduce_gradients_on_the_host(tmp_path: Path) -> None:
    """DDP with gloo over all weights, with fp32 masters of bf16 ones too: each process has eager DDP's bits."""
    torch.multiprocessing.spawn(_in_two_processes, (str(tmp_path),), nprocs=2)  # type: ignore[no-untyped-call]
