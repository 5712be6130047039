"""Reports about gradients, clipping, learning rates, accumulation and losses of a user's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from disco_accel import set_memory_budget
from tests.public_reports.rig import (
    PLENTY,
    Run,
    adamw,
    assert_same,
    batch,
    case,
    compare,
    least_budget,
    llama,
    lora,
    run,
)

CLIPS: dict[str, Callable[[Any], Any]] = {
    "norm": lambda ps: torch.nn.utils.clip_grad_norm_(ps, 0.01),
    "infinite norm": lambda ps: torch.nn.utils.clip_grad_norm_(ps, 0.001, norm_type=float("inf")),
    "not foreach": lambda ps: torch.nn.utils.clip_grad_norm_(ps, 0.01, foreach=False),
    "value": lambda ps: torch.nn.utils.clip_grad_value_(ps, 1e-4),
}


@case(5)
def test_clipping_reaches_the_optimizer(run: Run) -> None:
    """InternEvo #398, pytorch #148532, axolotl #3058: one copy was clipped, the optimizer read another."""
    model = run.prepare(lora(llama()))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = adamw(model)
    for seed, clip in enumerate(CLIPS.values()):
        run.backward(model, model(**batch(seed)).loss)
        run.see("norm", clip(trained))
        run.see("clipped", [p.grad for p in trained])
        optimizer.step()
        optimizer.zero_grad()
    model(**batch(5)).loss.backward()
    trained[1].grad[0, 0] = float("inf")
    with pytest.raises(RuntimeError, match="non-finite"):
        torch.nn.utils.clip_grad_norm_(trained, 1.0, error_if_nonfinite=True)
    run.see("left", [p.grad for p in trained])
    run.end(model, optimizer)


@case(4)
def test_a_scaler_skips_and_goes_on(run: Run) -> None:
    """pytorch #148532: after a skipped step scale, moments and weights are those of plain training."""
    model = run.prepare(lora(llama()))
    optimizer = adamw(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    for seed in range(4):
        scaler.scale(model(**batch(seed)).loss).backward()
        if seed == 1:
            next(p for p in model.parameters() if p.grad is not None).grad[0, 0] = float("inf")
        scaler.unscale_(optimizer)
        run.see("norm", torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        run.see("scale", scaler.get_scale())
    run.end(model, optimizer)


@pytest.mark.parametrize("optimizer", ["device", "host", pytest.param("planned", marks=pytest.mark.long)])
def test_settings_changed_by_hand_are_the_next_updates(optimizer: str) -> None:
    """OpenTau #182, ao #959, #1209: the learning rate never reached the inner optimizer."""

    def script(run: Run) -> None:
        model = run.prepare(llama())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        for seed in range(3):
            model(**batch(seed)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.param_groups[0].update(lr=1e-3 * (seed + 1), betas=(0.8, 0.9), weight_decay=0.1 * seed)
        run.see("weights", model.state_dict())
        run.end(model, optimizer)

    compare(script, "plenty", optimizer, planned=3)


class Uneven(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows with another number of labels each."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        made = {name: value[0] for name, value in batch(row, rows=1).items()}
        made["labels"][: 2 * row] = -100
        return made


@pytest.mark.parametrize("signature", ["with kwargs", pytest.param("without", marks=pytest.mark.long)])
def test_the_trainer_normalises_as_without_us(signature: str, tmp_path: Path) -> None:
    """transformers #37766: ``num_items_in_batch`` depends on the signature of ``forward``."""

    def script(run: Run) -> None:
        base = llama()
        if signature == "without":
            plain = base.forward

            def forward(input_ids: Any = None, attention_mask: Any = None, labels: Any = None) -> Any:
                return plain(input_ids=input_ids, attention_mask=attention_mask, labels=labels)

            base.forward = forward
        model = run.prepare(lora(base))
        keys = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "num_train_epochs": 1}
        quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1, "use_cpu": True}
        arguments = TrainingArguments(output_dir=str(tmp_path), learning_rate=1e-2, **keys, **quiet)
        trainer = Trainer(model=model, args=arguments, train_dataset=Uneven())
        run.see("accepts", trainer.model_accepts_loss_kwargs)
        trainer.train()
        run.see("losses", [line["loss"] for line in trainer.state.log_history if "loss" in line])
        run.end(model, trainer.optimizer.optimizer)

    compare(script, "plenty", "device", planned=8)


class Fused(torch.autograd.Function):
    """A loss whose gradient is made in its forward."""

    @staticmethod
    def forward(context: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            inner = logits.detach().requires_grad_()
            losses = torch.nn.functional.cross_entropy(inner, labels, reduction="none")
            context.save_for_backward(torch.autograd.grad(losses.sum(), inner)[0])
        return losses.detach()

    @staticmethod
    def backward(context: Any, *tangents: torch.Tensor) -> Any:
        return context.saved_tensors[0] * tangents[0][:, None], None


@case(2)
def test_a_loss_that_makes_its_gradient_in_the_forward(run: Run) -> None:
    """Liger #968: reduction none, times a mask; the gradient in the forward knew nothing of it."""
    base = llama()

    def loss(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **keys: Any) -> torch.Tensor:
        mask = (labels[:, 1:] > 40).flatten()
        losses: torch.Tensor = Fused.apply(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return (losses * mask).sum() / mask.sum()

    base.loss_function = loss
    model = run.prepare(lora(base))
    optimizer = adamw(model)
    for seed in range(2):
        run.step(model, optimizer, **batch(seed))
    run.end(model, optimizer)


class Views(torch.nn.Module):
    """Saves a square matrix, its transpose and a shifted view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.first(input_ids.float() / 128)
        y = torch.tanh(x) @ torch.sigmoid(x.t())
        z = torch.exp(x[:, 1:] * 0.1) * x[:, :-1]
        return {"loss": (self.second(y * x.t()).pow(2).mean() + z.sin().sum())}


def test_saved_views_of_one_storage_keep_apart() -> None:
    """axolotl #3833, trl #7195, ms-swift #10157, Megatron #7398: views of one storage were mixed up when offloaded,
    and only the first step was wrong. With a slow link, and budgets that move."""

    def script(run: Run) -> None:
        model = run.prepare(Views())
        optimizer = adamw(model)
        for seed in range(5):
            ids = batch(seed, rows=16)["input_ids"]
            run.backward(model, model(input_ids=ids)["loss"])
            optimizer.step()
            optimizer.zero_grad()
            if run.keys is not None:
                set_memory_budget(model, PLENTY if seed % 2 else run.keys["memory_budget"])
        run.end(model, optimizer)

    slow = {"optimizer": "device", "link_bandwidth": "50MB/s"}
    got = run(script, memory_budget=least_budget(script, **slow), **slow)
    assert_same(got, run(script))
