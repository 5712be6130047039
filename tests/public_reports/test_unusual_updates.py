"""Scripts of kinds that offloaders are reported to break: losses, gradients, optimizers and what a script keeps."""

from __future__ import annotations

import copy
import io
import threading
from typing import Any

import pytest
import torch
from peft.optimizers import create_loraplus_optimizer
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn
from transformers.trainer_pt_utils import LabelSmoother

from disco_accel.errors import ExecutionError
from tests.public_reports.rig import PLENTY, Run, adamw, batch, case, llama, lora, run, trained


@case(3)
def test_averages_of_weights(run: Run) -> None:
    """pytorch #82070, ema-pytorch #6: a copy for the average, and the average put in for an evaluation."""
    model = run.prepare(lora(llama()))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = adamw(model)
    schedule = SWALR(optimizer, swa_lr=0.05)
    for seed in range(3):
        run.step(model, optimizer, **batch(seed))
        average.update_parameters(model)
        schedule.step()
        own = [p.detach().clone() for p in trained(model)]
        with torch.no_grad():
            for parameter, mean in zip(trained(model), trained(average.module), strict=True):
                parameter.copy_(mean)
            model.eval()
            run.see("evaluation", model(**batch(9)).loss)
            model.train()
            for parameter, value in zip(trained(model), own, strict=True):
                parameter.copy_(value)
    with torch.no_grad():
        run.see("average", average(**batch(9)).loss)
    run.end(model, optimizer)


@case(4)
def test_two_backwards_for_an_update(run: Run) -> None:
    """pytorch_optimizer #66, davda54/sam #3: SAM moves the weights, and back after a second backward."""
    model = run.prepare(lora(llama()))
    optimizer = adamw(model)
    for seed in range(2):
        run.backward(model, model(**batch(seed)).loss)
        moves = [0.05 * p.grad for p in trained(model) if p.grad is not None]
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_add_(trained(model), moves)
        run.backward(model, model(**batch(seed)).loss)
        with torch.no_grad():
            torch._foreach_sub_(trained(model), moves)
        optimizer.step()
        optimizer.zero_grad()
    run.end(model, optimizer)


def test_a_backward_through_moved_weights_is_refused() -> None:
    """pytorch_optimizer #66: SAM's second backward through the first forward is an error, as in plain PyTorch."""

    def script(run: Run) -> None:
        model = run.prepare(lora(llama()))
        loss = model(**batch(0)).loss
        loss.backward(retain_graph=True)
        with torch.no_grad():
            torch._foreach_add_(trained(model), 0.1)
        loss.backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run(script)
    with pytest.raises(ExecutionError, match="was changed in place between this step's forward and its backward"):
        run(script, memory_budget=PLENTY)


def test_a_second_derivative_is_refused_by_name() -> None:
    """pytorch #102223: a gradient penalty needs ``create_graph``."""

    def script(run: Run) -> None:
        model = run.prepare(lora(llama(attn_implementation="eager")))
        gradients = torch.autograd.grad(model(**batch(0)).loss, trained(model), create_graph=True)
        torch.stack([g.pow(2).sum() for g in gradients]).sum().backward()
        run.end(model)

    run(script)
    with pytest.raises(ExecutionError, match="create_graph=True: a planned step has no second derivative"):
        run(script, memory_budget=PLENTY)


@case(3)
def test_gradients_that_are_asked_for(run: Run) -> None:
    """pytorch #102223: ``torch.autograd.grad`` and ``backward(inputs=)`` in place of ``backward()``."""
    model = run.prepare(lora(llama()))
    optimizer = adamw(model)
    for seed in range(2):
        gradients = torch.autograd.grad(model(**batch(seed)).loss, trained(model))
        run.see("gradients", gradients)
        for parameter, gradient in zip(trained(model), gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
        optimizer.zero_grad()
    run.backward(model, model(**batch(2)).loss, inputs=trained(model)[:2])
    optimizer.step()
    run.end(model, optimizer)


@case(3, long=True)
def test_lbfgs_calls_the_script(run: Run) -> None:
    """davda54/sam #66: an optimizer that needs a closure and evaluates it several times in a step."""
    model = run.prepare(lora(llama()))
    optimizer = torch.optim.LBFGS(trained(model), lr=0.1, max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(**batch(0)).loss
        loss.backward()
        return loss

    for _ in range(2):
        run.see("loss", optimizer.step(closure))
    run.end(model)


@case(3)
def test_rates_and_scales_of_adapters(run: Run) -> None:
    """peft #1504, #2733: LoRA+ has a rate for each matrix; rsLoRA's scale changes in training."""
    model = run.prepare(lora(llama(), use_rslora=True, task_type="CAUSAL_LM"))
    optimizer = create_loraplus_optimizer(model, torch.optim.AdamW, lr=1e-3, loraplus_lr_ratio=16)
    run.step(model, optimizer, **batch(0))
    adapted = [module for module in model.modules() if hasattr(module, "scale_layer")]
    for module in adapted:
        module.scale_layer(0.5)
    run.step(model, optimizer, **batch(1))
    for module in adapted:
        module.unscale_layer()
    run.step(model, optimizer, **batch(2))
    run.end(model, optimizer)


@case(2, long=True)
def test_label_smoothing_outside_of_the_model(run: Run) -> None:
    """transformers #17960, #27161: the Trainer's smoother takes the labels away and shifts them itself."""
    model = run.prepare(lora(llama()))
    optimizer = adamw(model)
    for seed in range(2):
        outputs = model(input_ids=batch(seed)["input_ids"])
        run.backward(model, LabelSmoother(0.1)(outputs, batch(seed)["labels"], shift_labels=True))
        optimizer.step()
        optimizer.zero_grad()
    run.end(model, optimizer)


@case(4)
def test_two_models_in_one_loss(run: Run) -> None:
    """torchtune #1698, composer #1819: a teacher and two students, one optimizer, one clipping, a head around one."""
    teacher = llama().eval().requires_grad_(False)
    first, second = run.prepare(lora(llama())), run.prepare(lora(llama()))
    head = nn.Linear(128, 3)
    optimizer = torch.optim.AdamW([*trained(first), *trained(second), *head.parameters()], lr=1e-2)
    for seed in range(2):
        ids = batch(seed)["input_ids"]
        with torch.no_grad():
            target = teacher(input_ids=ids).logits.softmax(-1)
        logits = first(input_ids=ids).logits
        answers = F.cross_entropy(head(second(input_ids=ids).logits[:, -1]), torch.tensor([0, 2]))
        run.backward(first, answers - (target * logits.log_softmax(-1)).sum(-1).mean())
        run.see("norm", nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.1))
        optimizer.step()
        optimizer.zero_grad()
    run.end(first, optimizer)
    run.end(second)


@case(4)
def test_saving_amid_accumulation_and_in_a_thread(run: Run) -> None:
    """transformers #29518: a checkpoint between two backwards, written while the next step runs."""
    model = run.prepare(lora(llama()))
    optimizer = adamw(model)
    for seed in range(4):
        run.backward(model, model(**batch(seed)).loss / 2)
        state, file = {name: value.clone() for name, value in model.state_dict().items()}, io.BytesIO()
        run.see("state", state)
        writer = threading.Thread(target=torch.save, args=(state, file))
        writer.start()
        if seed % 2:
            optimizer.step()
            optimizer.zero_grad()
        run.see("moments", copy.deepcopy(optimizer.state_dict()["state"]))
        writer.join()
        run.see("written", len(file.getvalue()))
    run.end(model, optimizer)


@case(3, long=True)
def test_what_a_script_keeps(run: Run) -> None:
    """transformers #29518: gradients and losses of earlier steps, zeroed gradients that stay, a random state
    that is set back."""
    model = run.prepare(lora(llama(), lora_dropout=0.2))
    optimizer = adamw(model)
    kept: list[Any] = []
    state = torch.get_rng_state()
    for seed in range(3):
        outputs = model(**batch(seed))
        outputs.loss.backward()
        kept += [outputs.loss, [p.grad for p in trained(model)]]
        optimizer.step()
        optimizer.zero_grad(set_to_none=seed != 1)
        torch.set_rng_state(state)
    run.see("kept", kept)
    run.end(model, optimizer)
