"""A prepared model trains exactly like the unprepared one, whatever the budget and the schedule."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from disco_accel import DiscoConfig, prepare, restore, stats
from disco_accel.errors import BudgetTooSmall, ConfigError, ExecutionError
from disco_accel.observe.step_folder import read_step
from disco_accel.step.run.session import Session, current_step
from tests.support.models import random_batch, tiny_lora

AMPLE = 1 << 30
Run = tuple[list[float], dict[str, torch.Tensor]]


def config(memory: int = AMPLE, **keys: Any) -> DiscoConfig:
    return DiscoConfig(memory_budget=str(memory), device="cpu", planner="build", **keys)


def train(model: torch.nn.Module, steps: int = 3, accumulate: int = 1) -> Run:
    """Losses and final trainable parameters of a short AdamW run with clipping."""
    trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trainable.values(), lr=1e-2)
    losses = []
    for step in range(steps):
        for micro in range(accumulate):
            loss = model(**random_batch(seed=10 * step + micro)).loss
            losses.append(loss.item())
            (loss / accumulate).backward()
        torch.nn.utils.clip_grad_norm_(trainable.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {n: p.detach().clone() for n, p in trainable.items()}


def assert_same(one: Run, other: Run) -> None:
    assert one[0] == other[0]
    assert one[1].keys() == other[1].keys()
    for name, value in one[1].items():
        assert torch.equal(value, other[1][name]), name


def least_budget(model: torch.nn.Module) -> int:
    """The smallest budget that works, as the error of a hopeless one says."""
    prepare(model, config(4096))
    with pytest.raises(BudgetTooSmall) as caught:
        model(**random_batch())
    restore(model)
    return caught.value.needed


@functools.cache
def least_of_two_layers() -> int:
    """``least_budget`` of a checkpointed Llama with two layers."""
    return least_budget(tiny_lora(checkpointing=True, layers=2))


# Every two of the three choices meet.
@pytest.mark.parametrize(
    ("family", "checkpointing", "dtype"),
    [
        ("llama", False, torch.float32),
        ("llama", True, torch.bfloat16),
        ("qwen2", True, torch.float32),
        ("qwen2", False, torch.bfloat16),
    ],
)
def test_training_is_bitwise_eager_at_three_budgets(family: str, checkpointing: bool, dtype: torch.dtype) -> None:
    """Losses and adapters after three optimizer steps are equal to the bit: just feasible, half way, everything."""
    make = lambda: tiny_lora(family, dtype=dtype, checkpointing=checkpointing)  # noqa: E731
    expected = train(make())
    least = least_budget(make())
    for memory in (least, 2 * least, AMPLE):
        model = prepare(make(), config(memory))
        assert_same(train(model), expected)
        seen = stats(model)
        assert seen["steps_compiled"] == 3 and seen["steps_eager"] == 0
        assert seen["peak_bytes"] <= memory
    assert seen["reload_bytes"] == 0


def test_least_budget_reloads_weights() -> None:
    """At the least budget the step really streams weights, and a tenth less is refused. In one byte less there may be a
    plan that keeps a value: the refusal names a budget in which all is computed again."""
    make = lambda: tiny_lora(checkpointing=True, layers=2)  # noqa: E731
    least = least_budget(make())
    model = prepare(make(), config(least))
    train(model, steps=1)
    assert stats(model)["reload_bytes"] > 0
    restore(model)
    prepare(model, config(9 * least // 10))
    with pytest.raises(BudgetTooSmall):
        model(**random_batch())


@pytest.mark.parametrize(
    ("dispatch", "lookahead"), [("priority", 0), ("random", 0), ("random", 2), ("fixed", 2), ("synchronous", 0)]
)
def test_any_schedule_gives_the_same_bits(dispatch: str, lookahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan fixes the numbers; dispatch order and look-ahead do not."""
    make = lambda: tiny_lora(checkpointing=True, layers=2)  # noqa: E731
    model = prepare(make(), config(2 * least_of_two_layers(), lookahead=lookahead))
    monkeypatch.setattr(Session, "engine", {"dispatch": dispatch})
    assert_same(train(model), train(make()))


def test_gradient_accumulation() -> None:
    """Micro-batches accumulate into .grad as in eager; no gradient aliases the arena."""
    model = prepare(tiny_lora(), config())
    assert_same(train(model, accumulate=3), train(tiny_lora(), accumulate=3))


def _two_losses(model: torch.nn.Module, order: tuple[int, int]) -> dict[str, torch.Tensor]:
    losses = [model(**random_batch(seed=s)).loss for s in (1, 2)]
    for index in order:
        losses[index].backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_forwards_before_their_backwards(order: tuple[int, int]) -> None:
    """A second forward suspends the first step; its backward reruns it and gives eager's gradients."""
    expected = _two_losses(tiny_lora(), order)
    found = _two_losses(prepare(tiny_lora(), config()), order)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[n], found[n]) for n in expected)


def test_two_shapes_alternate() -> None:
    """Plans of several shapes live side by side and stay within one budget."""
    model, eager = prepare(tiny_lora(), config()), tiny_lora()
    for length in (8, 16, 8, 16):
        batch = random_batch(length=length)
        assert torch.equal(model(**batch).loss, eager(**batch).loss)
    assert stats(model)["plans"] == 2 and stats(model)["plan_hits"] == 2


def test_forward_without_backward_is_harmless() -> None:
    """A loss that is thrown away frees the engine and leaves no trace in the next step."""
    model = prepare(tiny_lora(), config())
    loss = model(**random_batch(seed=9)).loss
    step = current_step(model)
    assert step is not None and step.executor.running
    del loss
    gc.collect()
    assert not step.executor.running
    assert_same(train(model), train(tiny_lora()))


def test_second_backward_with_retain_graph() -> None:
    """retain_graph=True: the second backward reruns the step and adds the same gradient again."""
    model, eager = prepare(tiny_lora(), config()), tiny_lora()
    for m in (model, eager):
        loss = m(**random_batch()).loss
        loss.backward(retain_graph=True)
        loss.backward()
    for (name, a), (_, b) in zip(model.named_parameters(), eager.named_parameters(), strict=True):
        if b.grad is not None:
            assert torch.equal(a.grad, b.grad), name


def test_create_graph_is_refused() -> None:
    """A second derivative is a typed error, not a wrong number."""
    model = prepare(tiny_lora(), config())
    loss = model(**random_batch()).loss
    with pytest.raises(ExecutionError, match="create_graph"):
        loss.backward(create_graph=True)


@pytest.mark.parametrize("suspended", [False, True])
@pytest.mark.parametrize("trainable", [False, True])
def test_weights_changed_before_the_backward_are_refused(suspended: bool, trainable: bool) -> None:
    """As in eager mode, a backward whose weights changed since the forward is an error; the next step trains on."""
    model = prepare(tiny_lora(), config())
    first = model(**random_batch(seed=1)).loss
    if suspended:
        model(**random_batch(seed=2)).loss.backward()
    with torch.no_grad():
        next(p for p in model.parameters() if p.requires_grad is trainable).add_(1.0)
    with pytest.raises(ExecutionError, match="changed in place"):
        first.backward()
    model.zero_grad()
    model(**random_batch(seed=2)).loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("through_data", [False, True])
def test_changed_frozen_weight_is_noticed(through_data: bool) -> None:
    """Writing a frozen weight in place reaches the resident copy before the next step, also behind autograd's back."""
    model, eager = prepare(tiny_lora(), config()), tiny_lora()
    model(**random_batch())
    for m in (model, eager):
        weight = m.get_parameter("base_model.model.model.layers.0.mlp.up_proj.base_layer.weight")
        with torch.no_grad():
            (weight.data if through_data else weight).mul_(1.5)
    assert torch.equal(model(**random_batch()).loss, eager(**random_batch()).loss)


def test_deepcopy_is_unprepared() -> None:
    """A copy trains on its own weights, in eager mode, and never the original's."""
    model = prepare(tiny_lora(), config())
    model(**random_batch())
    twin = copy.deepcopy(model)
    assert stats(twin) == {}
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    assert_same(train(twin), train(tiny_lora()))
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_prepare_twice_and_restore() -> None:
    """Preparing twice changes nothing; restore gives back the model's own forward and ordinary storages."""
    model = tiny_lora()
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    signature = inspect.signature(model.forward)
    assert prepare(model, config()) is model
    patched = model.forward
    assert prepare(model, config()).forward is patched
    assert inspect.signature(model.forward) == signature
    model(**random_batch())
    restore(model)
    assert "forward" not in model.__dict__ and stats(model) == {}
    assert all(torch.equal(p, weights[n]) for n, p in model.named_parameters())
    assert_same(train(model), train(tiny_lora()))


def test_evaluation_between_forward_and_backward_changes_neither() -> None:
    """Under no_grad the output is eager's, logits included, and a pending step survives it."""
    model, eager = prepare(tiny_lora(), config()), tiny_lora()
    loss = model(**random_batch()).loss
    with torch.no_grad():
        assert torch.equal(model(**random_batch(seed=5)).logits, eager(**random_batch(seed=5)).logits)
    loss.backward()
    eager(**random_batch()).loss.backward()
    for (name, a), (_, b) in zip(model.named_parameters(), eager.named_parameters(), strict=True):
        if b.grad is not None:
            assert torch.equal(a.grad, b.grad), name


def test_logits_are_computed_when_read() -> None:
    """The planned output has a loss; reading logits costs one forward and gives eager's."""
    model, eager = prepare(tiny_lora(), config()), tiny_lora()
    output = model(**random_batch())
    assert torch.equal(output.logits, eager(**random_batch()).logits)
    assert torch.equal(output["loss"], output[0])


def test_a_model_without_trainable_parameters_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """It may be a mistake: forwards alone have plans."""
    prepare(tiny_lora().requires_grad_(False), config())
    assert "no parameter is trained" in caplog.text


def test_report_dir_shows_a_step_in_steady_state(tmp_path: Path) -> None:
    """With report_dir the third step is traced and drawn, and its numbers do not change."""
    model = prepare(tiny_lora(), config(report_dir=str(tmp_path / "report")))
    assert_same(train(model, steps=4), train(tiny_lora(), steps=4))
    names = {p.name for p in (tmp_path / "report").iterdir()}
    assert {"plan.json", "trace.json", "stats.json", "report.txt", "report.html"} <= names
    step = read_step(tmp_path / "report")
    assert step.source == "measured" and any("q_proj" in name for name in step.facts.names.values())
    assert any("q_proj" in module for module in step.facts.modules.values())
    assert json.loads((tmp_path / "report" / "trace.json").read_text())["traceEvents"]


def test_host_memory_too_small_is_named() -> None:
    """Weights that do not fit host_memory are refused before anything runs."""
    model = prepare(tiny_lora(), config(host_memory="4096"))
    with pytest.raises(ConfigError, match="host_memory"):
        model(**random_batch())
