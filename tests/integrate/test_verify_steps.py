"""``verify_steps``: the first planned steps are compared with unplanned ones, and the training does not notice."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from disco_accel import DiscoConfig, prepare, stats
from disco_accel.config.settings import split_yaml
from disco_accel.errors import ConfigError, StepsDiffer
from disco_accel.execute.executor import Executor
from disco_accel.selfcheck.agreement import distance
from disco_accel.step.run.verify_steps import StepVerifier, _Compared
from tests.support.models import random_batch, tiny_lora

TIGHT = 400_000


def config(steps: int, **changes: Any) -> DiscoConfig:
    return DiscoConfig(changes.pop("memory", TIGHT), device="cpu", plan_cache=None, verify_steps=steps, **changes)


def model_of(**changes: Any) -> Any:
    return tiny_lora(**{"layers": 1, "checkpointing": True} | changes)


def train(model: Any, steps: int = 4, between: Callable[[int], None] = lambda _: None) -> list[torch.Tensor]:
    """Losses of steps with an optimizer, two batches accumulated for each, then the weights and the generator."""
    torch.manual_seed(5)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    seen = []
    for index in range(steps):
        for half in range(2):
            loss = model(**random_batch(seed=2 * index + half)).loss / 2
            loss.backward()
            seen.append(loss.detach())
        between(index)
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *(p.detach().clone() for p in model.parameters() if p.requires_grad), torch.get_rng_state()]


def test_the_training_does_not_notice_and_agreement_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """With dropout in recomputed layers, accumulated gradients and hooks on parameters: bits of eager, and one line."""
    called: list[list[int]] = []

    def hooked(model: Any) -> Any:
        counts = [0, 0]

        def count(gradient: torch.Tensor) -> torch.Tensor:
            counts[0] += 1
            return gradient * 0.5

        def accumulated(_: torch.Tensor) -> None:
            counts[1] += 1

        first = next(p for p in model.parameters() if p.requires_grad)
        first.register_hook(count)
        first.register_post_accumulate_grad_hook(accumulated)
        called.append(counts)
        return model

    eager = train(hooked(model_of(attention_dropout=0.1)))
    with caplog.at_level(logging.INFO, "disco_accel"):
        model = prepare(hooked(model_of(attention_dropout=0.1)), config(3))
        planned = train(model)
    assert all(torch.equal(a, b) for a, b in zip(eager, planned, strict=True))
    assert called[0] == called[1] == [8, 8]
    assert stats(model)["steps_compiled"] == 8 and stats(model)["steps_eager"] == 0
    assert stats(model)["plans"] == 1, "an unplanned forward in between asks for no other plan"
    lines = [r.getMessage() for r in caplog.records if "verify_steps" in r.getMessage()]
    assert len(lines) == 1 and "first planned 3 steps" in lines[0] and "bit for bit" in lines[0]


def test_steps_without_labels_and_bare_outputs_are_compared(caplog: pytest.LogCaptureFixture) -> None:
    class Bare(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = torch.nn.Linear(32, 32).requires_grad_(False)
            self.trained = torch.nn.Linear(32, 32)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return self.trained(self.frozen(rows).relu())

    with caplog.at_level(logging.INFO, "disco_accel"):
        bare = prepare(Bare(), config(1, memory="1MiB"))
        bare(torch.randn(4, 32)).square().sum().backward()
        model = prepare(model_of(), config(1, memory="4MiB"))
        batch = random_batch()
        del batch["labels"]
        model(**batch).logits.logsumexp(-1).sum().backward()
    assert caplog.text.count("verify_steps: the first planned step and the same without a plan agree bit for bit") == 2


def test_a_wrong_gradient_names_step_parameter_and_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine hands out gradients of which one is off by its last bits: from the second step on."""
    model = prepare(model_of(), config(2))
    real, calls = Executor.leave, 0

    def leave(self: Executor, group: int) -> list[torch.Tensor]:
        nonlocal calls
        copies = real(self, group)
        calls += len(copies) > 1
        if len(copies) > 1 and calls > 1:
            copies[-1].mul_(1 + 2e-7)
        return copies

    monkeypatch.setattr(Executor, "leave", leave)
    before = [p.detach().clone() for p in model.parameters() if p.requires_grad]
    model(**random_batch()).loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    last = list(grads)[-1]
    with pytest.raises(StepsDiffer, match=r"planned step 2 is not .*gradient of .*e-0[78] of its norm.*same bits") as e:
        model(**random_batch()).loss.backward()
    assert last in str(e.value) and "doctor --selftest" in str(e.value)
    assert all(torch.equal(p.grad, grads[n]) for n, p in model.named_parameters() if p.grad is not None)
    assert all(
        torch.equal(p, b) for p, b in zip((p for p in model.parameters() if p.requires_grad), before, strict=True)
    )


def test_a_wrong_loss_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = prepare(model_of(), config(1))
    real = Executor.leave

    def leave(self: Executor, group: int) -> list[torch.Tensor]:
        copies = real(self, group)
        return [copy + 1e-3 for copy in copies] if len(copies) == 1 else copies

    monkeypatch.setattr(Executor, "leave", leave)
    with pytest.raises(StepsDiffer, match=r"loss is .* of its norm apart \(of "):
        model(**random_batch()).loss.backward()


def test_a_gradient_too_many_or_too_few_is_found() -> None:
    one = torch.ones(3)
    assert distance(one, None) == float("inf")
    assert distance(one, one.double()) == float("inf")
    assert distance(one, torch.full((3,), torch.nan)) == float("inf")
    assert distance(torch.full((3,), torch.nan), torch.full((3,), torch.nan)) == 0.0
    assert 0 < distance(torch.zeros(3), -torch.zeros(3)) < 1e-200
    assert distance(one, one * 1.5) == pytest.approx(0.5)


def test_generator_and_buffers_are_as_after_one_step() -> None:
    """Dropout is drawn by the planned step and again by the unplanned one; the user sees one step's draws."""
    plain, model = model_of(attention_dropout=0.1), prepare(model_of(attention_dropout=0.1), config(1))
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    states = []
    for one in (plain, model):
        torch.manual_seed(1)
        one(**random_batch()).loss.backward()
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
    torch.manual_seed(1)
    assert not torch.equal(states[0], torch.get_rng_state()), "the step draws"
    assert all(torch.equal(b, buffers[n]) for n, b in model.named_buffers())


@pytest.mark.parametrize("given", [-1, 1.5, "two", True, None])
def test_the_key_takes_whole_numbers_from_0_on(given: Any, tmp_path: Path) -> None:
    assert DiscoConfig().verify_steps == 0 and not StepVerifier(0, *[None] * 5).active
    assert DiscoConfig.from_env(environ={"DISCO_VERIFY_STEPS": "2"}).verify_steps == 2
    page = tmp_path / "config.yaml"
    page.write_text("disco_config:\n  memory_budget: 1GiB\n  verify_steps: 3\n  self_check: off\n")
    read = split_yaml(page)[1]
    assert read is not None and (read.verify_steps, read.self_check) == (3, "off")
    with pytest.raises(ConfigError, match=r"verify_steps: .*whole number of at least 0"):
        DiscoConfig(verify_steps=given)


NOISE = torch.Generator().manual_seed(0)
"""Another than the step's."""


@torch.library.custom_op("disco_verify_steps::unordered", mutates_args=())
def unordered(gradient: torch.Tensor, size: float) -> torch.Tensor:
    """As a backward that adds up in any order: no two calls have the same bits."""
    return gradient * (1 + size * torch.randn(gradient.shape, generator=NOISE))


@unordered.register_fake
def _(gradient: torch.Tensor, size: float) -> torch.Tensor:
    return torch.empty_like(gradient)


class Unordered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, size: float) -> torch.Tensor:
        ctx.size = size
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return unordered(gradients[0], ctx.size), None


class Stack(torch.nn.Module):
    """The last layer's gradients repeat their bits, the other ones' do not if there is noise; dropout draws."""

    def __init__(self, noise: float) -> None:
        super().__init__()
        self.noise = noise
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(24, 24) for _ in range(6))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:-1]:
            rows = torch.nn.functional.dropout(layer(rows).tanh(), 0.1)
        loss: torch.Tensor = self.layers[-1](Unordered.apply(rows, self.noise)).square().mean()
        return loss


@pytest.fixture
def eager_runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many there were in each comparison."""
    runs: list[int] = []
    compare, once = _Compared.__call__, _Compared._unplanned

    def compared(self: _Compared, *given: Any) -> None:
        runs.append(0)
        compare(self, *given)

    def counted(self: _Compared, *given: Any) -> dict[str, torch.Tensor]:
        runs[-1] += 1
        return once(self, *given)

    monkeypatch.setattr(_Compared, "__call__", compared)
    monkeypatch.setattr(_Compared, "_unplanned", counted)
    return runs


@pytest.mark.parametrize(("noise", "runs"), [(0.0, [1, 1]), (1e-2, [3, 3])], ids=["without noise", "with noise"])
def test_where_eager_does_not_repeat_its_bits_three_runs_of_it_say_how_near_is_near(
    noise: float, runs: list[int], eager_runs: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """One run of eager is enough where bits agree; random numbers are those of one run."""
    states = []
    with caplog.at_level(logging.INFO, "disco_accel"):
        for model in (Stack(noise), prepare(Stack(noise), config(2, memory="1MiB", on_unsupported="error"))):
            torch.manual_seed(1)
            for _ in range(3):
                model(torch.randn(8, 24)).backward()
            states.append(torch.get_rng_state())
    assert eager_runs == runs and torch.equal(*states)
    told = r"agree to 0\.0\S+ of the norm \(eager runs to 0\.0\S+ with each other\)" if noise else "agree bit for bit"
    assert re.search(told, caplog.text)


def test_a_fault_is_found_in_the_noise(monkeypatch: pytest.MonkeyPatch, eager_runs: list[int]) -> None:
    """A gradient that is a tenth too large where two runs of eager are about a hundredth apart."""
    model = prepare(Stack(1e-2), config(1, memory="1MiB"))
    real = Executor.leave

    def leave(self: Executor, group: int) -> list[torch.Tensor]:
        copies = real(self, group)
        if len(copies) > 1:
            copies[0].mul_(1.1)
        return copies

    monkeypatch.setattr(Executor, "leave", leave)
    with pytest.raises(StepsDiffer, match=r"layers.0.weight is 0\.\d+ of its norm apart \(of 13.* 3 eager runs being"):
        model(torch.randn(8, 24)).backward()
    assert eager_runs == [3] and all(p.grad is None for p in model.parameters())
