"""``DiscoCallback``: an HF Trainer with the callback trains like one without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from disco_accel import DiscoCallback, DiscoConfig, stats
from tests.support.models import random_batch, tiny_lora


class _Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self) -> None:
        self.columns = random_batch(batch=16, seed=3)

    def __len__(self) -> int:
        return len(self.columns["labels"])

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {name: column[row] for name, column in self.columns.items()}


def _train(
    model: torch.nn.Module, folder: Path, callbacks: list[Any], bf16: bool
) -> tuple[list[float], dict[str, torch.Tensor]]:
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=3,
        logging_steps=1,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        bf16=bf16,
        save_strategy="no",
        disable_tqdm=True,
        seed=1,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=_Rows(), callbacks=callbacks)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("bf16", [False, True])
def test_trainer_with_the_callback_is_bitwise_eager(tmp_path: Path, bf16: bool) -> None:
    """Accumulation, clipping, the schedule and autocast are the Trainer's; every micro-batch runs from a plan."""
    expected = _train(tiny_lora(), tmp_path / "plain", [], bf16)
    model = tiny_lora()
    callback = DiscoCallback(DiscoConfig(memory_budget="1GiB", device="cpu"))
    found = _train(model, tmp_path / "planned", [callback], bf16)
    assert found[0] == expected[0] and len(found[0]) == 3
    assert all(torch.equal(found[1][name], value) for name, value in expected[1].items())
    assert stats(model)["steps_compiled"] == 6 and stats(model)["steps_eager"] == 0
