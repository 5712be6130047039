"""Your own training loop: prepare() before it, nothing else. The losses are those without it, bit for bit.

python docs/examples/own_loop.py
"""

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from disco_accel import DiscoConfig, prepare, restore, stats


def losses(config: DiscoConfig | None) -> list[float]:
    """Train three steps from one seed; with a config, from a plan within its budget."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained("out/tiny")
    model = get_peft_model(model, LoraConfig(r=4, lora_dropout=0.1, target_modules="all-linear"))
    if config is not None:
        prepare(model, config)  # returns the same object, its forward patched
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    seen = []
    for tokens in torch.arange(96).reshape(3, 2, 16):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    if config is not None:
        print("steps from a plan:", stats(model)["steps_compiled"])
        restore(model)  # as it was
    return seen


assert losses(DiscoConfig(memory_budget="512KiB")) == losses(None)
print("losses have the same bits")
