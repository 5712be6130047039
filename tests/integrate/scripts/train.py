"""A user's script: LoRA in a raw Accelerate loop and again with Trainer. Only its last lines know of us."""

# accelerate first: then it is accelerate's import, half done, in which torch is imported.
from accelerate import Accelerator  # isort: skip
import hashlib
import json
import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, default_data_collator

STEPS = 4
ROWS, LENGTH, VOCABULARY = 2, 16, 96


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=64,
    )
    adapter = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(LlamaForCausalLM(config), adapter)


def make_rows() -> list[dict[str, list[int]]]:
    ids = torch.randint(0, VOCABULARY, (STEPS * ROWS, LENGTH), generator=torch.Generator().manual_seed(1)).tolist()
    return [{"input_ids": row, "attention_mask": [1] * LENGTH, "labels": row} for row in ids]


def raw_loop(model: torch.nn.Module) -> list[str]:
    accelerator = Accelerator()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    loader = DataLoader(make_rows(), batch_size=ROWS, collate_fn=default_data_collator)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    losses = []
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    return losses


def with_trainer(model: torch.nn.Module) -> list[str]:
    arguments = TrainingArguments(
        output_dir="trainer",
        per_device_train_batch_size=ROWS,
        max_steps=STEPS,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=0,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=make_rows(), data_collator=default_data_collator)
    trainer.train()
    return [entry["loss"].hex() for entry in trainer.state.log_history if "loss" in entry]


def digest(model: torch.nn.Module) -> dict[str, str]:
    trainable = {name: p.detach().numpy().tobytes() for name, p in model.named_parameters() if p.requires_grad}
    return {name: hashlib.sha256(content).hexdigest() for name, content in trainable.items()}


raw_model, trainer_model = make_model(), make_model()
result = {"arguments": sys.argv[1:], "steps": STEPS}
result |= {"raw": raw_loop(raw_model), "trainer": with_trainer(trainer_model)}
result |= {"adapters": [digest(raw_model), digest(trainer_model)]}
if "disco_accel.integrate.prepare" in sys.modules:
    from disco_accel import stats

    result["planned_steps"] = [stats(m)["steps_compiled"] for m in (raw_model, trainer_model)]
Path("result.json").write_text(json.dumps(result))
