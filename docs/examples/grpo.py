"""GRPO: rollouts, reference and steps of one prepared model; tokens and losses are those without it, bit for bit.

python docs/examples/grpo.py
"""

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from disco_accel import DiscoConfig, prepare, set_memory_budget, stats


def run(config: DiscoConfig, seen: list[float]) -> list[float]:
    """Two updates, each on four answers to one prompt; ``seen`` gets tokens and losses."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained("out/tiny")
    model = prepare(get_peft_model(model, LoraConfig(r=4, target_modules="all-linear")), config)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for prompt in torch.arange(16).reshape(2, 1, 8) + 3:
        tokens = model.generate(prompt.repeat(4, 1), do_sample=True, max_new_tokens=8)
        if config.enabled:
            set_memory_budget(model, "256KiB")  # a reward model, or another engine's rollouts, may use the device
        rewards = torch.tensor([float(len(set(answer))) for answer in tokens[:, 8:].tolist()])
        advantages = ((rewards - rewards.mean()) / (rewards.std() + 1e-4))[:, None, None]
        if config.enabled:
            set_memory_budget(model, config.memory_budget)
        with torch.no_grad(), model.disable_adapter():
            reference = model(tokens).logits[:, 7:-1].log_softmax(-1).gather(2, tokens[:, 8:, None])
        policy = model(tokens).logits[:, 7:-1].log_softmax(-1).gather(2, tokens[:, 8:, None])
        away = reference - policy
        loss = (0.04 * (away.exp() - away - 1) - (policy - policy.detach()).exp() * advantages).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen += [*tokens.flatten().tolist(), loss.item()]
    print({name: count for name, count in stats(model).items() if name in ("forwards_planned", "forwards_unplanned")})
    return seen


assert run(DiscoConfig(memory_budget="1MiB"), []) == run(DiscoConfig(enabled=False), [])
