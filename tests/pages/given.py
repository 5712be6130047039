"""What the readers of Python blocks have at hand: a small model, rows to train on, a prompt."""

# ruff: noqa: F401
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, default_data_collator

base = AutoModelForCausalLM.from_pretrained("out/demo/checkpoint", dtype=torch.float32)
model = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
rows = [{"input_ids": [i + j for j in range(16)], "labels": [i + j for j in range(16)]} for i in range(8)]
arguments = TrainingArguments("out/trained", max_steps=1, per_device_train_batch_size=2, report_to=[], use_cpu=True)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
loader = DataLoader(rows, batch_size=2, collate_fn=default_data_collator)
input_ids = torch.arange(24).reshape(2, 12)
attention_mask = torch.ones_like(input_ids)
