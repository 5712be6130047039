"""transformers' Trainer on the emulated device: accumulation, clipping, workers and bf16, with the losses of eager."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import Trainer, TrainingArguments

from disco_accel import DiscoCallback, DiscoConfig, stats
from disco_accel.native.backend import workspace_bytes
from tests.emulated.models import CUDA
from tests.support.models import tiny_lora

VOCABULARY, ROWS = 96, 24


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, VOCABULARY, (16,), generator=torch.Generator().manual_seed(row))
        return {"input_ids": ids, "labels": ids.clone()}


def losses(folder: Path, planned: bool, **options: Any) -> tuple[list[float], dict[str, Any]]:
    transformers.set_seed(3)
    model = tiny_lora(layers=2, checkpointing=True, vocabulary=VOCABULARY)
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        max_steps=4,
        logging_steps=1,
        gradient_accumulation_steps=2,
        max_grad_norm=1.0,
        learning_rate=1e-2,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **options,
    )
    config = DiscoConfig(memory_budget=2 * workspace_bytes(CUDA) + (4 << 20), device="cuda")
    callbacks = [DiscoCallback(config)] if planned else []
    trainer = Trainer(model=model, args=arguments, train_dataset=Rows(), callbacks=callbacks)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], stats(model) if planned else {}


@pytest.mark.parametrize("options", [{}, {"dataloader_num_workers": 2}, {"bf16": True}], ids=str)
def test_trainers_losses_are_eagers(tmp_path: Path, options: dict[str, Any]) -> None:
    expected, _ = losses(tmp_path, False, **options)
    got, found = losses(tmp_path, True, **options)
    assert got == expected and len(got) == 4
    assert found["steps_eager"] == 0 and found["steps_compiled"] == 8
