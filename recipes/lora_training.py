"""A LoRA fine-tuning as a recipe says: loaded, trained and saved."""

from __future__ import annotations

import functools
import json
import logging
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import TrainingArguments, default_data_collator, set_seed
from transformers.trainer_utils import get_last_checkpoint

from disco_accel.config.settings import DiscoConfig, launch_config, launched
from disco_accel.errors import ConfigError
from disco_accel.observe.log_to_stderr import AboveTheBar
from disco_accel.recipes.corpus import Blocks, build_blocks
from disco_accel.recipes.loading import load_model, load_tokenizer, meeting_place
from disco_accel.recipes.metrics import (
    METRICS_NAME,
    Ledger,
    earlier_steps,
    peak_resident_set_bytes,
    plan_stats,
    write_metrics,
)
from disco_accel.recipes.preferences import build_preferences, preference_trainer
from disco_accel.recipes.progress import Progress, StopAtStepEnd
from disco_accel.recipes.recording_trainer import RecordingTrainer
from disco_accel.recipes.saving import STAGING, clear, publish
from disco_accel.recipes.settings import PAIRED, LoraRecipe
from disco_accel.sizes import format_size


def train(recipe: LoraRecipe) -> int:
    """Load, train and save as ``recipe`` says; returns 0, or 128 + the signal that stopped it.

    Raises:
        ConfigError: something given is wrong; nothing was written.
        DiscoError: the memory plan or a planned step failed.
    """
    if recipe.num_threads is not None:
        torch.set_num_threads(recipe.num_threads)
    config = DiscoConfig.from_env(DiscoConfig.from_dict(recipe.disco_config)) if recipe.disco_config else None
    checkpoint = find_checkpoint(recipe)
    tokenizer = load_tokenizer(recipe)
    data = _rows(recipe, tokenizer)
    set_seed(recipe.seed)
    wanted = config or (launch_config() if launched() else None)
    model = load_model(recipe, meeting_place(wanted))
    if config is not None:
        from disco_accel import prepare

        prepare(model, config)
    output = Path(recipe.output_dir)
    fresh = not output.exists()
    try:
        return _fit(recipe, model, tokenizer, data, checkpoint)
    except BaseException:
        # Trainer makes the folder before the first step; a run that never saved anything leaves no trace.
        if fresh and output.is_dir() and not any(output.iterdir()):
            output.rmdir()
        raise


def _rows(recipe: LoraRecipe, tokenizer: Any) -> Blocks:
    if recipe.loss != "sft":
        return build_preferences(recipe, tokenizer)
    return build_blocks(
        recipe.dataset,
        tokenizer,
        max_length=recipe.max_length,
        packing=recipe.packing,
        completion_only_loss=recipe.completion_only_loss,
        assistant_only_loss=recipe.assistant_only_loss,
    )


def _fit(recipe: LoraRecipe, model: Any, tokenizer: Any, data: Any, checkpoint: Path | None) -> int:
    ledger = Ledger()
    progress = Progress(ledger)
    stop = StopAtStepEnd()
    kind = RecordingTrainer if recipe.loss == "sft" else functools.partial(preference_trainer, recipe)
    trainer = kind(
        model=model,
        args=training_arguments(recipe),
        train_dataset=data,
        # Trainer's own would pad what needs no padding, and so add a mask of ones.
        data_collator=default_data_collator,
        processing_class=tokenizer,
        callbacks=[progress, stop],
    )
    trainer.ledger = ledger
    trainer.remove_callback(transformers.PrinterCallback)
    if trainer.is_world_process_zero():
        print(opening_line(recipe, model, len(data)), file=sys.stderr)
    began = time.perf_counter()
    # Asked now: when training ends, the checkpoint that it started from may be gone.
    first = _step_of(checkpoint) if checkpoint else 0
    try:
        with stop:
            if checkpoint is not None and first >= recipe.max_steps:
                # Trainer would add a step to a run that was killed after its last one.
                trainer._load_from_checkpoint(str(checkpoint))
            else:
                trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    finally:
        progress.close()
    if trainer.is_world_process_zero():
        seconds = time.perf_counter() - began
        _save(recipe, trainer, first, seconds, stop.signal)
    if stop.signal is None:
        return 0
    print(f"stopped by {signal.Signals(stop.signal).name}; go on with --resume_from_checkpoint", file=sys.stderr)
    return 128 + stop.signal


def training_arguments(recipe: LoraRecipe) -> TrainingArguments:
    """The transformers arguments of a recipe; checkpointing is switched on when the model is loaded, not here."""
    return TrainingArguments(
        output_dir=recipe.output_dir,
        per_device_train_batch_size=recipe.per_device_train_batch_size,
        gradient_accumulation_steps=recipe.gradient_accumulation_steps,
        learning_rate=recipe.learning_rate,
        lr_scheduler_type=recipe.lr_scheduler_type,
        warmup_steps=recipe.warmup_steps,
        weight_decay=recipe.weight_decay,
        max_grad_norm=recipe.max_grad_norm,
        max_steps=recipe.max_steps,
        optim=recipe.optim,
        save_strategy="steps" if recipe.save_steps else "no",
        save_steps=recipe.save_steps or recipe.max_steps,
        save_total_limit=recipe.save_total_limit,
        logging_strategy="steps",
        logging_steps=1,
        report_to=recipe.report_to,
        seed=recipe.seed,
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=torch.cuda.is_available(),
    )


def opening_line(recipe: LoraRecipe, model: Any, rows: int) -> str:
    """One line on what is about to be trained, and what the adapter's dtype costs."""
    frozen = sum(p.numel() * p.element_size() for p in model.parameters() if not p.requires_grad)
    adapter = [p for p in model.parameters() if p.requires_grad]
    adapter_bytes = sum(p.numel() * p.element_size() for p in adapter)
    tokens = recipe.per_device_train_batch_size * recipe.gradient_accumulation_steps * recipe.max_length
    paired = recipe.loss in PAIRED
    if paired:
        tokens *= 2
    what = "pairs" if paired else "rows"
    line = (
        f"{recipe.model_name_or_path}: {format_size(frozen)} frozen, adapter {format_size(adapter_bytes)} in "
        f"{recipe.adapter_dtype}, {rows} {what} of {recipe.max_length} tokens, {tokens} tokens a step, "
        f"{torch.get_num_threads()} threads"
    )
    base = next(p.dtype for p in model.parameters() if not p.requires_grad)
    if adapter[0].dtype is torch.float32 and base is not torch.float32:
        line += (
            f"\nthe adapter's matmuls run in float32 over a {str(base)[6:]} base: exact small updates, slower matmuls"
        )
    return line


def find_checkpoint(recipe: LoraRecipe) -> Path | None:
    """The checkpoint to resume from, if the recipe asks for one.

    Raises:
        ConfigError: there is none, or it is incomplete.
    """
    asked = recipe.resume_from_checkpoint
    if asked is False:
        return None
    if asked is True:
        output = Path(recipe.output_dir)
        last = get_last_checkpoint(str(output)) if output.is_dir() else None
        while last is not None and not _is_complete(Path(last)):
            # A process that was killed while it saved leaves its last checkpoint without a state.
            earlier = [c for c in output.glob("checkpoint-*") if _is_complete(c)]
            last = str(max(earlier, key=_step_of)) if earlier else None
        if last is None:
            raise ConfigError(f"resume_from_checkpoint: no checkpoint in {output}; leave the key out to start anew")
        return Path(last)
    path = Path(asked)
    if not _is_complete(path):
        raise ConfigError(
            f"resume_from_checkpoint: {path} is not a complete checkpoint (no trainer_state.json or adapter)"
        )
    return path


def _step_of(checkpoint: Path) -> int:
    return int(json.loads((checkpoint / "trainer_state.json").read_text())["global_step"])


def _is_complete(checkpoint: Path) -> bool:
    # The state is the last file that Trainer writes.
    return all((checkpoint / name).is_file() for name in ("trainer_state.json", "adapter_model.safetensors"))


def _save(recipe: LoraRecipe, trainer: RecordingTrainer, first: int, seconds: float, by: int | None) -> None:
    output = Path(recipe.output_dir)
    model = trainer.accelerator.unwrap_model(trainer.model)
    if by is None:
        clear(output / STAGING)
        model.save_pretrained(output / STAGING, safe_serialization=True)
        assert trainer.processing_class is not None
        trainer.processing_class.save_pretrained(output / STAGING)
        publish(output / STAGING, output)
    planned = plan_stats(model)
    write_metrics(
        output / METRICS_NAME,
        {
            "format": "lora-metrics",
            "version": 1,
            "steps": earlier_steps(output / METRICS_NAME, first) + [s.as_dict() for s in trainer.ledger.steps],
            "train_seconds": seconds,
            "threads": torch.get_num_threads(),
            "interrupted": by is not None,
            "peak_rss_bytes": peak_resident_set_bytes(),
            "disco": planned,
        },
    )
    if planned:
        print(f"disco: {planned['steps_compiled']} planned steps, {planned['steps_eager']} eager", file=sys.stderr)


def quiet_libraries() -> None:
    """Messages of libraries that nobody here can act on are not shown; those of disco_accel are."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    # transformers warns about its own calls from inside PEFT; nobody here can act on that.
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    ours = logging.getLogger("disco_accel")
    if not ours.handlers:
        handler = AboveTheBar()
        handler.setFormatter(logging.Formatter("disco: %(message)s"))
        ours.addHandler(handler)
