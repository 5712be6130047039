"""A plan in numbers (stats) and files (report_dir), after the first steady step.

python docs/examples/report.py
"""

from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from disco_accel import DiscoConfig, prepare, stats

model = AutoModelForCausalLM.from_pretrained("out/tiny")
model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
prepare(model, DiscoConfig(memory_budget="512KiB", report_dir="out/report"))
tokens = torch.arange(32).reshape(2, 16)
for _ in range(4):
    model(input_ids=tokens, labels=tokens).loss.backward()

numbers = stats(model)
for name in ("arena_bytes", "resident_weight_bytes", "reload_bytes", "offload_bytes", "step_seconds", "bound_seconds"):
    print(f"{name}: {numbers[name]}")
print(Path("out/report/report.txt").read_text())
print(sorted(path.name for path in Path("out/report").iterdir()))  # report.html shows it all
