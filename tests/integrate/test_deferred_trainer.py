"""``update: deferred`` in a Trainer, and with optimizers whose updates are not put off."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator

from disco_accel import DiscoCallback, stats
from tests.integrate.deferred_updates import adamw, config, one_layer, prepared, train


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def hooked(model: torch.nn.Module) -> torch.optim.Optimizer:
    optimizer = adamw(model)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


def clipping(model: torch.nn.Module) -> torch.optim.Optimizer:
    optimizer = adamw(model)

    def clip(*_: Any) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)

    optimizer.register_step_pre_hook(clip)
    return optimizer


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (sgd, "SGD is not torch.optim.AdamW"),
        (hooked, "a hook that runs after step"),
        (clipping, "a hook that runs before step"),
        (lambda model: adamw(model, fused=False, foreach=False), "it is not fused"),
        (lambda model: adamw(model, amsgrad=True), "amsgrad=True"),
    ],
)
def test_other_optimizers_update_at_once_and_are_told(
    caplog: pytest.LogCaptureFixture, make: Callable[[torch.nn.Module], torch.optim.Optimizer], told: str
) -> None:
    """Once, by name."""
    model, eager = one_layer(), one_layer()
    prepared(model)
    ours, theirs = make(model), make(eager)
    assert all(map(torch.equal, train(model, ours), train(eager, theirs)))
    assert all(map(torch.equal, model.parameters(), eager.parameters()))
    assert stats(model)["updates_planned"] == 0
    assert sum(told in message for message in caplog.messages) == 1


def rows(count: int) -> list[dict[str, list[int]]]:
    ids = torch.randint(0, 96, (count, 12), generator=torch.Generator().manual_seed(1)).tolist()
    return [{"input_ids": row, "attention_mask": [1] * 12, "labels": row} for row in ids]


def arguments_for(folder: Path, steps: int, **keys: Any) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=steps,
        logging_steps=1,
        learning_rate=1e-2,
        optim="adamw_torch_fused",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **keys,
    )


def life(folder: Path, planned: bool) -> tuple[torch.nn.Module, list[Any]]:
    """A Trainer that saves and evaluates in the middle, and another that goes on from there."""
    log: list[Any] = []
    for steps, resume in ((3, None), (6, str(folder / "checkpoint-3"))):
        model: Any = one_layer()
        arguments = arguments_for(folder, steps, save_steps=3, eval_strategy="steps", eval_steps=2)
        data = {"train_dataset": rows(24), "eval_dataset": rows(4), "data_collator": default_data_collator}
        ours = [DiscoCallback(config())] if planned else []
        trainer = Trainer(model=model, args=arguments, callbacks=ours, **data)
        trainer.train(resume_from_checkpoint=resume)
        log += [
            [entry.get(key) for key in ("loss", "eval_loss", "grad_norm", "step")]
            for entry in trainer.state.log_history
        ]
    if planned:
        assert stats(model)["updates_planned"] > 0 and stats(model)["clips_deferred"] > 0
    return model, log


def test_a_trainer_saves_evaluates_and_resumes(tmp_path: Path) -> None:
    """Logs and weights are those of plain training, also read from the parameters when it has ended."""
    model, log = life(tmp_path / "planned", True)
    eager, expected = life(tmp_path / "plain", False)
    assert log == expected
    for (name, ours), theirs in zip(model.named_parameters(), eager.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


class Gradients(TrainerCallback):
    """Of somebody else: reads gradients between clipping and update."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def on_pre_optimizer_step(self, *args: Any, model: torch.nn.Module, **kwargs: Any) -> None:
        self.seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]


class Adding(Trainer):
    """Adds the callback behind the clipping of the fourth step."""

    late: Gradients

    def _clip_grad_norm(self, model: torch.nn.Module) -> Any:
        norm = super()._clip_grad_norm(model)
        if self.state.global_step == 3:
            self.add_callback(self.late)
        return norm


Adding.__module__ = "transformers.trainer"


@pytest.mark.parametrize("late", [False, True])
def test_callbacks_of_others_find_clipped_gradients(tmp_path: Path, late: bool) -> None:
    """Also one that comes when clipping has left its product to the update already."""
    seen = []
    for planned in (True, False):
        model: Any = one_layer()
        reader = Gradients()
        callbacks: list[Any] = [DiscoCallback(config())] if planned else []
        cls = Adding if late else Trainer
        trainer = cls(
            model=model,
            args=arguments_for(tmp_path, 5, save_strategy="no"),
            callbacks=callbacks if late else [*callbacks, reader],
            train_dataset=rows(24),
            data_collator=default_data_collator,
        )
        if isinstance(trainer, Adding):
            trainer.late = reader
        trainer.train()
        seen.append([*reader.seen, *model.parameters()])
        if planned:
            assert bool(stats(model)["clips_deferred"]) is late
    assert len(seen[0]) > len(list(model.parameters())) and all(map(torch.equal, *seen))
