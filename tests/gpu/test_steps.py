"""Small LoRA models under a tight budget on the run's device, beside the same model in eager mode on that device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.gpu.models import SMALL, arena_llama, batch_for, with_adapter
from disco_accel import DiscoConfig, prepare, restore, stats
from disco_accel.capture.attention import cudnn_attention_off
from disco_accel.errors import BudgetTooSmall, DiscoError
from disco_accel.native.backend import workspace_bytes
from disco_accel.selfcheck.agreement import RUNS, agreement, distance

CASES = [
    # Flash attention on CUDA for bf16, the memory-efficient kernel for fp32, plain products for eager attention.
    pytest.param(torch.bfloat16, "sdpa", True, id="bf16-sdpa-checkpointed"),
    pytest.param(torch.float32, "sdpa", False, id="fp32-sdpa"),
    pytest.param(torch.float32, "eager", True, id="fp32-eager-checkpointed"),
    pytest.param(torch.bfloat16, "eager", False, id="bf16-eager"),
]


def lora(device: torch.device, dtype: torch.dtype, attention: str, checkpointing: bool, dropout: float = 0.0) -> Any:
    base, _ = arena_llama(SMALL, dtype=dtype, attention=attention, source=device)
    return with_adapter(base, rank=4, checkpointing=checkpointing, dropout=dropout)


def tight(model: Any, batch: dict[str, torch.Tensor], device: torch.device) -> Any:
    """The model prepared with less memory than its weights take, the libraries' workspaces aside."""
    width = next(p.dtype.itemsize for p in model.parameters() if not p.requires_grad)
    budget = width * (256 << 10) + 2 * workspace_bytes(device)
    prepare(model, DiscoConfig(memory_budget=budget, device=device.type))
    try:
        model(**batch)
    except BudgetTooSmall as error:
        # Kernels of another device may want more scratch.
        restore(model)
        prepare(model, DiscoConfig(memory_budget=error.needed, device=device.type))
    return model


def roomy(device: torch.device) -> DiscoConfig:
    """A budget of more than the small models take, beside the libraries' workspaces, which differ from GPU to GPU."""
    return DiscoConfig(memory_budget=(64 << 20) + 2 * workspace_bytes(device), device=device.type)


def step(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def expect(wanted: torch.Tensor, got: torch.Tensor, what: str) -> None:
    """``got`` is on the same device, of the same dtype, and has the same bits."""
    assert distance(wanted, got) == 0, f"{what}: {distance(wanted, got):.3g} apart"


@pytest.mark.parametrize(("dtype", "attention", "checkpointing"), CASES)
def test_losses_and_gradients_are_eagers(
    device: torch.device, dtype: torch.dtype, attention: str, checkpointing: bool
) -> None:
    """The same kernels give the same bits; flash attention's backward adds in any order: eager says how near."""
    batch = batch_for(SMALL["vocab_size"], 2, 16, device)
    eager = lora(device, dtype, attention, checkpointing).to(device)
    planned = tight(lora(device, dtype, attention, checkpointing), batch, device)

    def run(model: Any) -> dict[str, torch.Tensor]:
        loss, gradients = step(model, batch)
        return {"loss": loss, **gradients}

    for _ in range(3):
        with cudnn_attention_off(device):
            found = agreement(run(planned), (run(eager) for _ in range(RUNS)), outputs=("loss",))
        assert not found.wrong, f"{found}: {found.wrong}"
        assert found.bits or (device.type == "cuda" and attention == "sdpa")
    figures = stats(planned)
    assert figures["steps_eager"] == 0 and figures["steps_compiled"] >= 3
    assert figures["reload_bytes"] > 0, "the budget is tight: weights move"


def test_optimizer_and_batch_on_the_callers_stream_come_before_the_step(device: torch.device) -> None:
    """Training for some steps, with the parameters updated right before each: a race would show as another loss."""
    batches = [batch_for(SMALL["vocab_size"], 2, 16, torch.device("cpu"), seed=i) for i in range(12)]
    losses = []
    for prepared in (False, True):
        model = lora(device, torch.float32, "eager", True)
        model = tight(model, batches[0], device) if prepared else model.to(device)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        run = []
        for batch in batches:
            there = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
            loss = model(**there).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.append(loss.detach())
        losses.append(torch.stack(run).cpu())
    expect(losses[0], losses[1], "losses")


def test_a_batch_on_the_host_is_taken_to_the_device(device: torch.device) -> None:
    batch = batch_for(SMALL["vocab_size"], 2, 16, torch.device("cpu"))
    model = prepare(lora(device, torch.float32, "eager", True), roomy(device))
    assert model(**batch).loss.device == device


def test_dropout_is_eagers_and_the_generator_ends_where_eagers_does(device: torch.device) -> None:
    batch = batch_for(SMALL["vocab_size"], 2, 16, device)
    states = torch.cuda if device.type == "cuda" else torch
    results = []
    for prepared in (False, True):
        model = lora(device, torch.float32, "eager", True, dropout=0.1)
        model = tight(model, batch, device) if prepared else model.to(device)
        torch.manual_seed(7)
        model.zero_grad()
        got = [step(model, batch) for _ in range(2)]
        results.append((got, states.get_rng_state()))
    (eager, state), (planned, our_state) = results
    assert torch.equal(state, our_state)
    for (loss, gradients), (ours, our_gradients) in zip(eager, planned, strict=True):
        expect(loss, ours, "loss")
        for name, gradient in gradients.items():
            expect(gradient, our_gradients[name], name)


def test_weights_stay_on_the_host_and_the_adapter_goes_to_the_device(cuda: torch.device) -> None:
    """Also when somebody moves the whole prepared model; restore() puts everything back."""
    model = lora(cuda, torch.bfloat16, "sdpa", True)
    prepare(model, roomy(cuda))
    model.to(cuda)
    for name, parameter in model.named_parameters():
        assert parameter.device.type == ("cuda" if parameter.requires_grad else "cpu"), name
        assert parameter.requires_grad or parameter.is_pinned(), name
    restore(model)
    assert {p.device.type for p in model.parameters()} == {"cpu"}


def test_a_model_on_the_device_is_taken_back_to_the_host(cuda: torch.device) -> None:
    """As Trainer leaves it, which moves the model before its callbacks can."""
    batch = batch_for(SMALL["vocab_size"], 2, 16, cuda)
    eager = step(lora(cuda, torch.float32, "eager", True).to(cuda), batch)[0]
    model = prepare(lora(cuda, torch.float32, "eager", True).to(cuda), roomy(cuda))
    assert not any(p.is_cuda for p in model.parameters() if not p.requires_grad)
    expect(eager, step(model, batch)[0], "loss")


def test_evaluation_and_logits_are_eagers(device: torch.device) -> None:
    """What has no plan runs with the weights visiting the device."""
    batch = batch_for(SMALL["vocab_size"], 2, 16, device)
    eager = lora(device, torch.float32, "eager", True).to(device)
    model = tight(lora(device, torch.float32, "eager", True), batch, device)
    logits = model(**batch).logits
    expect(eager(**batch).logits.detach(), logits, "logits")
    for one in (eager, model):
        one.eval()
    with torch.no_grad():
        expect(eager(**batch).logits, model(**batch).logits, "logits of an evaluation")
        expect(eager(**batch).loss, model(**batch).loss, "loss of an evaluation")


def test_a_steady_step_allocates_nothing(device: torch.device) -> None:
    """No cudaMalloc and no cudaFree, and the engine's threads ask PyTorch's allocator for nothing at all."""
    batch = batch_for(SMALL["vocab_size"], 2, 16, device)
    model = tight(lora(device, torch.bfloat16, "sdpa", True), batch, device)
    for _ in range(3):
        step(model, batch)
    before = _device_calls(device)
    for _ in range(5):
        step(model, batch)
        assert stats(model)["engine"]["c10_allocations"] == 0
    assert _device_calls(device) == before


def _device_calls(device: torch.device) -> tuple[int, ...]:
    if device.type == "cpu":
        return ()
    found = torch.cuda.memory_stats(device)
    return tuple(found[key] for key in ("num_device_alloc", "num_device_free", "num_alloc_retries"))


def test_the_device_holds_no_more_than_the_budget(cuda: torch.device) -> None:
    batch = batch_for(SMALL["vocab_size"], 2, 16, cuda)
    model = tight(lora(cuda, torch.bfloat16, "sdpa", True), batch, cuda)
    step(model, batch)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step(model, batch)
    # The batch, the loss and blocks rounded up to 512 bytes.
    assert torch.cuda.max_memory_allocated() <= stats(model)["budget_bytes"] + (1 << 20)


def test_a_call_that_fails_leaves_the_model_usable(device: torch.device) -> None:
    """A batch that does not fit together is refused, and the next step is as before."""
    batch = batch_for(SMALL["vocab_size"], 2, 16, device)
    model = tight(lora(device, torch.float32, "eager", False), batch, device)
    first = step(model, batch)[0]
    with pytest.raises((RuntimeError, ValueError, DiscoError)):
        model(input_ids=batch["input_ids"][:, :8], labels=batch["labels"])
    expect(first, step(model, batch)[0], "loss")
