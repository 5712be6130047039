"""Scripts of kinds that offloaders are reported to break: batches, masks, layers, hooks and tools."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.stateless import _reparametrize_module
from transformers.integrations.neftune import neftune_post_forward_hook

from disco_accel.errors import CaptureError
from tests.public_reports.rig import PLENTY, Run, adamw, assert_same, batch, case, llama, lora, run, trained


@case(4)
def test_batches_of_any_shape(run: Run) -> None:
    """trl #6668: rows of one token, and rows without any label, whose loss is nan; ids of 32 bits, transposed ids."""
    model = run.prepare(lora(llama()))
    optimizer = adamw(model)
    for ids in (batch(0, length=1)["input_ids"], batch(1, rows=16, length=2)["input_ids"].t()):
        run.step(model, optimizer, input_ids=ids, labels=ids)
    run.step(model, optimizer, input_ids=batch(2)["input_ids"].int(), labels=batch(2)["labels"])
    run.backward(model, model(input_ids=batch(3)["input_ids"], labels=torch.full((2, 16), -100)).loss)
    optimizer.zero_grad()
    run.step(model, optimizer, **batch(3))
    run.end(model, optimizer)


@case(3)
def test_masks_and_positions(run: Run) -> None:
    """transformers #27539, #39814: left padding, packed rows, masks of four dimensions, no mask at all."""
    model = run.prepare(lora(llama()))
    optimizer = adamw(model)
    padded = torch.ones(2, 16, dtype=torch.long)
    padded[0, :5] = 0
    seen = torch.ones(16, 16).tril().bool()
    seen[8:, :4] = False
    added = torch.zeros(2, 1, 16, 16).masked_fill(~seen, torch.finfo(torch.float32).min)
    inputs: list[dict[str, torch.Tensor]] = [
        {"attention_mask": padded, "position_ids": (padded.cumsum(-1) - 1).clamp(min=0)},
        {"position_ids": torch.cat([torch.arange(7), torch.arange(9)]).expand(2, -1)},
        {"attention_mask": added},
        {"attention_mask": seen[None, None].expand(2, 1, 16, 16)},
        {},
    ]
    for seed, more in enumerate(inputs):
        run.step(model, optimizer, **batch(seed), **more)
    run.end(model, optimizer)


@case(4, long=True)
def test_logits_of_some_positions(run: Run) -> None:
    """trl #2770, #3681: ``logits_to_keep`` as a number and as places, a loss of the script's own."""
    model = run.prepare(lora(llama()))
    optimizer = adamw(model)
    for keep in (4, 1, 0, torch.tensor([2, 5, 9])):
        logits = model(input_ids=batch(1)["input_ids"], logits_to_keep=keep).logits
        run.backward(model, logits.logsumexp(-1).mean())
        optimizer.step()
        optimizer.zero_grad()
    run.end(model, optimizer)


@case(4)
def test_layers_that_are_left_out(run: Run) -> None:
    """accelerate #1191, pytorch #90171: layers are skipped at random, their parameters have no gradient."""
    model = run.prepare(lora(llama(num_hidden_layers=3)))
    optimizer = adamw(model)
    inner = model.base_model.model.model
    every = list(inner.layers)
    for seed, kept in enumerate(((0, 2), (1,), (0, 1, 2), (0, 2))):
        inner.layers = nn.ModuleList([every[place] for place in kept])
        run.step(model, optimizer, **batch(seed))
    inner.layers = nn.ModuleList(every)
    run.end(model, optimizer)


def test_a_layer_that_draws_whether_it_runs_is_refused() -> None:
    """accelerate #1191: the same with a draw inside the forward: refused with its line, and eager as without us."""

    def script(run: Run) -> None:
        model = lora(llama(num_hidden_layers=2))
        layer = model.base_model.model.model.layers[1]
        forward = layer.forward
        layer.forward = lambda x, **keys: x if torch.rand(()) < 0.5 else forward(x, **keys)
        model = run.prepare(model)
        optimizer = adamw(model)
        for seed in range(3):
            run.step(model, optimizer, **batch(seed))
        run.end(model, optimizer)

    with pytest.raises(CaptureError, match=r"torch.rand.*depends on the data"):
        run(script, memory_budget=PLENTY)
    assert_same(run(script, memory_budget=PLENTY, on_unsupported="eager"), run(script))


@case(5)
def test_layers_thaw_one_after_another(run: Run) -> None:
    """composer #1002: parameters are unfrozen and added to the optimizer in training, others frozen."""
    base = llama(num_hidden_layers=2).requires_grad_(False)
    base.lm_head.requires_grad_(True)
    model = run.prepare(base)
    optimizer = torch.optim.AdamW(model.lm_head.parameters(), lr=1e-2)
    run.step(model, optimizer, **batch(0))
    for place, layer in enumerate(reversed(list(model.model.layers))):
        layer.requires_grad_(True)
        optimizer.add_param_group({"params": list(layer.parameters()), "lr": 1e-3, "weight_decay": 0.1 * place})
        run.step(model, optimizer, **batch(place + 1))
    model.lm_head.requires_grad_(False)
    for seed in (5, 6):
        run.step(model, optimizer, **batch(seed))
    run.end(model, optimizer)


@case(3, long=True)
def test_another_dtype_in_training(run: Run) -> None:
    """pytorch #43706, OpenTau #184: moments loaded in bf16, then the whole model in bf16."""
    model = run.prepare(lora(llama()))
    optimizer = adamw(model)
    run.step(model, optimizer, **batch(0))
    state = copy.deepcopy(optimizer.state_dict())
    for moments in state["state"].values():
        moments.update(exp_avg=moments["exp_avg"].bfloat16(), exp_avg_sq=moments["exp_avg_sq"].bfloat16())
    optimizer = adamw(model)
    optimizer.load_state_dict(state)
    run.step(model, optimizer, **batch(1))
    model.bfloat16()
    optimizer = adamw(model)
    run.step(model, optimizer, **batch(2))
    run.end(model, optimizer)


@case(4)
def test_noisy_embeddings(run: Run) -> None:
    """trl #1837, unsloth #1078: NEFTune's hook in training and evaluation, with another strength, removed."""
    model = run.prepare(lora(llama()))
    optimizer = adamw(model)
    embeddings = model.get_input_embeddings()
    embeddings.neftune_noise_alpha = 5.0
    hook = embeddings.register_forward_hook(neftune_post_forward_hook)
    for seed in range(2):
        run.step(model, optimizer, **batch(seed))
    model.eval()
    with torch.no_grad():
        run.see("evaluation", model(**batch(5)).loss)
    model.train()
    embeddings.neftune_noise_alpha = 1.0
    run.step(model, optimizer, **batch(6))
    hook.remove()
    run.step(model, optimizer, **batch(7))
    run.end(model, optimizer)


@case(3)
def test_tools_around_a_step(run: Run) -> None:
    """pytorch #60158, transformers #28461: profiler, default dtype, deterministic ops, Ctrl-C in a forward."""
    model = run.prepare(lora(llama()))
    optimizer = adamw(model)
    with torch.profiler.profile(record_shapes=True, profile_memory=True) as profile:
        run.step(model, optimizer, **batch(0))
        profile.step()
    try:
        torch.use_deterministic_algorithms(True)
        torch.set_default_dtype(torch.float64)
        run.step(model, optimizer, **batch(1))
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_default_dtype(torch.float32)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = model.base_model.model.model.layers[0].register_forward_pre_hook(interrupted)
    with pytest.raises(KeyboardInterrupt):
        model(**batch(2))
    hook.remove()
    run.step(model, optimizer, **batch(2))
    run.end(model, optimizer)


@case(3, long=True)
def test_modules_that_are_not_plain(run: Run) -> None:
    """descript-audio-codec #81: a weight that is computed (weight_norm), a layer under no_grad, a padding row."""
    base = llama(pad_token_id=5, num_hidden_layers=2)
    weight_norm(base.model.layers[1].mlp.up_proj)
    base.model.layers[0].forward = torch.no_grad()(base.model.layers[0].forward)
    model = run.prepare(base)
    optimizer = adamw(model)
    for seed in range(3):
        inputs = batch(seed)
        inputs["input_ids"][:, 12:] = 5
        run.step(model, optimizer, **inputs)
    run.end(model, optimizer)


@case(2)
def test_hooks_of_parameters(run: Run) -> None:
    """opacus #9: hooks that clip each gradient as it is made, and hooks that run after it was added."""
    model = run.prepare(lora(llama()))
    optimizer = adamw(model)
    finite: list[bool] = []
    hooks = [p.register_hook(lambda g: g * (0.01 / (g.norm() + 0.01))) for p in trained(model)]
    hooks += [
        p.register_post_accumulate_grad_hook(lambda p: finite.append(bool(p.grad.isfinite().all())))  # type: ignore[union-attr]
        for p in trained(model)
    ]
    for seed in range(2):
        run.step(model, optimizer, **batch(seed))
    for hook in hooks:
        hook.remove()
    run.step(model, optimizer, **batch(2))
    run.see("finite", finite)
    run.end(model, optimizer)


def test_a_prompt_that_is_trained_outside_of_the_model_is_refused() -> None:
    """peft #2191: soft tokens before ``inputs_embeds``: a plan has no gradient for them."""

    def script(run: Run) -> None:
        model = run.prepare(lora(llama()))
        soft = nn.Parameter(torch.randn(1, 4, 64) * 0.02)
        optimizer = torch.optim.AdamW([soft, *trained(model)], lr=1e-2)
        for seed in range(2):
            words = model.get_input_embeddings()(batch(seed)["input_ids"])
            labels = torch.cat([torch.full((2, 4), -100), batch(seed)["labels"]], 1)
            run.backward(model, model(inputs_embeds=torch.cat([soft.expand(2, -1, -1), words], 1), labels=labels).loss)
            optimizer.step()
            optimizer.zero_grad()
        run.see("soft", soft)
        run.end(model, optimizer)

    with pytest.raises(CaptureError, match="make part of the model what is trained before it"):
        run(script, memory_budget=PLENTY)
    assert_same(run(script, memory_budget=PLENTY, on_unsupported="eager"), run(script))


@case(3, long=True)
def test_fast_weights(run: Run) -> None:
    """pytorch #88851, pytorch-maml #8: other weights are put in for one forward, leaves and computed ones."""
    model = run.prepare(lora(llama()))
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    weights = dict(model.named_parameters())
    fast = {name: (weights[name].detach() + 0.1).requires_grad_() for name in names}
    with _reparametrize_module(model, fast):
        run.see("gradients", torch.autograd.grad(model(**batch(0)).loss, list(fast.values())))
    with _reparametrize_module(model, {name: weights[name] * 0.9 for name in names}):
        model(**batch(1)).loss.backward()
    run.see("through", {name: weights[name].grad for name in names})
    loss = torch.func.functional_call(model, fast, (), batch(2)).loss
    run.see("called", torch.autograd.grad(loss, list(fast.values())))
    run.end(model)


@case(2)
def test_generation_makes_the_batch(run: Run) -> None:
    """trl #2731: tokens are sampled by the model that trains, then weighed by their advantages."""
    model = run.prepare(lora(llama()))
    optimizer = adamw(model)
    for seed in range(2):
        model.eval()
        with torch.no_grad():
            prompt = batch(seed, length=4)["input_ids"]
            tokens = model.generate(input_ids=prompt, max_new_tokens=6, do_sample=True, use_cache=True)
        model.train()
        run.see("tokens", tokens)
        logits = model(input_ids=tokens).logits[:, :-1]
        chosen = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
        run.backward(model, -(torch.exp(chosen - chosen.detach()) * torch.tensor([[1.0], [-0.5]])).mean())
        optimizer.step()
        optimizer.zero_grad()
    run.end(model, optimizer)
