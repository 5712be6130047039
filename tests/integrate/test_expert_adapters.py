"""LoRA on experts' weights, which PEFT takes out of their module for each forward and sets to themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import MixtralConfig, MixtralForCausalLM

from disco_accel import DiscoConfig, prepare, restore, stats
from disco_accel.errors import ExecutionError

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 48, "num_local_experts": 3}
READS = ("nothing", "logits", "aux_loss", "evaluation", "reference", "module")


def mixtral(checkpointing: bool) -> Any:
    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    base = MixtralForCausalLM(MixtralConfig(**SIZES, **heads, use_cache=False, output_router_logits=True))
    if checkpointing:
        base.gradient_checkpointing_enable({"use_reentrant": False})
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    return get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], target_parameters=targets)).train()


def batch(seed: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(48, (2, 6), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def loss_of(model: Any, read: str, seed: int) -> torch.Tensor:
    """Of a forward after which something of the model is read or run."""
    output = model(**batch(seed))
    loss: torch.Tensor = output.loss
    if read in ("logits", "aux_loss"):
        return loss + 0.1 * output[read].float().mean()
    with torch.no_grad():
        if read == "evaluation":
            model(**batch(99))
        if read == "reference":
            with model.disable_adapter():
                model(**batch(seed))
        if read == "module":
            model.base_model.model.model.layers[0](torch.ones(1, 6, 16), position_embeddings=(torch.ones(1, 6, 8),) * 2)
    return loss


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("unsupported", ["error", "eager"])
def test_fields_and_forwards_between_a_forward_and_its_backward_change_nothing(
    unsupported: str, checkpointing: bool
) -> None:
    """Losses and gradients have eager mode's bits, whatever is read or run; a weight that is written to is noticed."""
    keys: dict[str, Any] = {"device": "cpu", "plan_cache": None, "quiet": True, "on_unsupported": unsupported}
    eager, model = mixtral(checkpointing), prepare(mixtral(checkpointing), DiscoConfig(memory_budget="64MiB", **keys))
    names = [name for name, _ in model.named_parameters()]
    for seed, read in enumerate(READS):
        losses = [loss_of(one, read, seed) for one in (eager, model)]
        assert torch.equal(*losses), read
        for one, loss in zip((eager, model), losses, strict=True):
            one.zero_grad()
            loss.backward()
        for (name, ours), (_, theirs) in zip(model.named_parameters(), sorted_as(names, eager), strict=True):
            assert (ours.grad is None) is (theirs.grad is None), (read, name)
            assert ours.grad is None or torch.equal(ours.grad, theirs.grad), (read, name)
    assert stats(model)["steps_eager"] == 0
    assert [name for name, _ in model.named_parameters()] == names
    for read in ("nothing", "evaluation"):
        loss = loss_of(model, read, 0)
        weight = next(p for name, p in model.named_parameters() if "experts" in name and not p.requires_grad)
        with torch.no_grad():
            weight[0, 0, 0] += 1
        with pytest.raises(ExecutionError, match="a frozen weight was changed"):
            loss.backward()
    restore(model)


def sorted_as(names: list[str], model: Any) -> list[tuple[str, torch.nn.Parameter]]:
    """Parameters in the order of ``names``: a forward in eager mode moves those that it takes out to the end."""
    parameters = dict(model.named_parameters())
    return [(name, parameters[name]) for name in names]
