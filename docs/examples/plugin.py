"""A plugin in a loop of Accelerate's, in any engine of the accelerator: one process, DDP, DeepSpeed.

python docs/examples/plugin.py
"""

import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from disco_accel import DiscoPlugin, stats

model = AutoModelForCausalLM.from_pretrained("out/tiny")
model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
loader = torch.utils.data.DataLoader(torch.arange(128).reshape(8, 16), batch_size=2)

accelerator = Accelerator(gradient_accumulation_steps=2)
# In the place of accelerator.prepare(model, optimizer, loader):
model, optimizer, loader = DiscoPlugin(memory_budget="512KiB").prepare(accelerator, model, optimizer, loader)

for tokens in loader:
    with accelerator.accumulate(model):
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
print("steps from a plan:", stats(model)["steps_compiled"])
