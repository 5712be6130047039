"""Batches of many lengths run from few plans, with the numbers that eager gives without padding."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from disco_accel import DiscoConfig, prepare, restore, stats
from disco_accel.errors import BudgetTooSmall, ExecutionError
from disco_accel.integrate.hf.buckets import next_length
from disco_accel.step.run.session import current_step
from tests.integrate.generators import gradients
from tests.support.models import family_lora, random_batch, tiny_lora

Batch = dict[str, Any]
BUCKETS = (24, 40)


def config(buckets: Any = BUCKETS, memory: int = 1 << 30, **keys: Any) -> DiscoConfig:
    return DiscoConfig(memory_budget=memory, device="cpu", planner="build", plan_cache=None, buckets=buckets, **keys)


def padded(batch: Batch, length: int) -> Batch:
    """The batch as the documentation says it is padded, written down once more."""
    extra = length - batch["input_ids"].shape[1]
    result = dict(batch) | {"input_ids": F.pad(batch["input_ids"], (0, extra), value=0)}
    if "labels" in batch:
        result["labels"] = F.pad(batch["labels"], (0, extra), value=-100)
    if "attention_mask" in batch:
        result["attention_mask"] = F.pad(batch["attention_mask"], (0, extra), value=1)
    return result


def full(length: int) -> Batch:
    return random_batch(length=length, seed=length)


def right(length: int) -> Batch:
    """The second row is shorter, as collators leave it."""
    batch = full(length)
    batch["attention_mask"][1, -5:], batch["labels"][1, -5:], batch["input_ids"][1, -5:] = 0, -100, 0
    return batch


def left(length: int) -> Batch:
    batch = full(length)
    batch["attention_mask"][1, :5], batch["labels"][1, :5] = 0, -100
    return batch


def with_positions(length: int) -> Batch:
    """Counted from an offset, and a normaliser of the user's own."""
    return full(length) | {"position_ids": torch.arange(3, length + 3)[None].repeat(2, 1), "num_items_in_batch": 17}


def bare(length: int) -> Batch:
    batch = full(length)
    return {"input_ids": batch["input_ids"], "labels": batch["labels"]}


def step(model: torch.nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    loss = model(**batch).loss
    loss.backward()
    return {"loss": loss.detach(), **gradients(model)}


def assert_close(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-6, msg=name)


KINDS: dict[str, list[Callable[[int], Batch]]] = {
    "llama": [full, right, left, bare],
    "gemma3_text": [full, left],
    "gpt2": [right],
    "mixtral": [right],
}


@pytest.mark.parametrize("family", KINDS)
def test_padding_changes_a_step_by_rounding_alone(family: str) -> None:
    """Whatever the mask: eager's bits on the padded batch, eager's numbers on the batch itself."""
    shape = {"n_layer" if family == "gpt2" else "num_hidden_layers": 2 if family == "gemma3_text" else 1}
    eager = family_lora(family, **shape)
    planned = prepare(copy.deepcopy(eager), config())
    for make in KINDS[family]:
        for length in (31, 33):
            batch = make(length)
            got, expected = step(planned, batch), step(eager, padded(batch, 40))
            assert all(torch.equal(got[n], v) for n, v in expected.items()) and got.keys() == expected.keys()
            assert_close(got, step(eager, batch))
    assert stats(planned)["buckets"]["padded_steps"] == 2 * len(KINDS[family]) and stats(planned)["steps_eager"] == 0


def test_positions_go_on_and_the_normaliser_stays() -> None:
    eager = family_lora("gpt2")
    planned = prepare(copy.deepcopy(eager), config())
    for length in (17, 33, 38):
        assert_close(step(planned, with_positions(length)), step(eager, with_positions(length)))
    assert stats(planned)["buckets"]["padded_to"] == [24, 40]


def test_one_length_or_two_stay_as_they_are() -> None:
    """``auto`` pads from the third length on; the first two keep eager's bits also afterwards."""
    eager, planned = _small(), prepare(_small(), config("auto"))
    for length in (19, 30, 19, 23, 30):
        got, expected = step(planned, full(length)), step(eager, full(length))
        assert_close(got, expected)
        assert length == 23 or all(torch.equal(got[n], v) for n, v in expected.items())
    assert stats(planned)["buckets"] == {"lengths": 3, "padded_to": [32], "padded_steps": 1, "padding": 9 / 32}


def test_a_data_set_of_very_different_lengths_trains_with_few_plans(caplog: pytest.LogCaptureFixture) -> None:
    """Two dozen lengths, accumulated and clipped: the losses are eager's, and the user is told what happens, once."""
    lengths = [int(n) for n in torch.randperm(60, generator=torch.Generator().manual_seed(1))[:24] + 4]

    def train(model: torch.nn.Module) -> list[float]:
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        losses = []
        for index, length in enumerate(lengths):
            loss = model(**right(length + 6)).loss
            (loss / 2).backward()
            losses.append(loss.item())
            if index % 2:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        return losses

    planned = prepare(_small(), config("auto"))
    with caplog.at_level(logging.INFO, "disco_accel"):
        torch.testing.assert_close(train(planned), train(_small()), rtol=1e-3, atol=1e-4)
    seen = stats(planned)
    assert seen["buckets"]["lengths"] == 24 and seen["plans"] <= 7
    assert seen["plan_hits"] >= 17 and seen["buckets"]["padding"] < 0.2
    assert sum("batches differ in length" in r.getMessage() for r in caplog.records) == 1


def test_logits_come_back_at_the_users_length() -> None:
    """Without labels they carry the gradient, beside a loss they are read: eager's shape, layout and numbers."""
    eager, planned = _small(), prepare(_small(), config())
    for length in (19, 20, 21, 22):
        batch = right(length)
        labels = batch.pop("labels")
        found = []
        for model in (planned, eager):
            model.zero_grad(set_to_none=True)
            logits = model(**batch).logits
            assert logits.is_contiguous() and logits.shape[:2] == (2, length)
            loss = F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.flatten())
            loss.backward()
            read = model(**batch, labels=labels).logits
            found.append({"logits": logits.detach(), "read": read.detach(), **gradients(model)})
        assert_close(*found)
    assert stats(planned)["plans"] == 3, "one for logits, one for a loss, one for a loss with logits"


def test_other_fields_are_cut_or_refused() -> None:
    """Hidden states lose their padding; what cannot is an error that says so, not a wrong shape."""
    eager, planned = _small(), prepare(_small(), config())
    batch = full(19) | {"output_hidden_states": True}
    got, expected = planned(**batch), eager(**batch)
    for a, b in zip(got.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(a, b)
    with pytest.raises(ExecutionError, match="buckets: off"):
        _ = got.past_key_values


def test_a_field_that_padding_stays_in_is_read_of_every_length() -> None:
    """As scripts that add a field to a causal model's output do: once it is read, no batch is padded any more."""
    eager, planned = _small(), _small()
    for model in (eager, planned):
        base: Any = model.get_base_model()  # type: ignore[operator]

        def forward(own: Any = base.forward, **kwargs: Any) -> Any:
            output = own(**kwargs)
            output["means"] = output.logits.mean(-1)
            return output

        base.forward = forward
    prepare(planned, config("auto"))
    for length in (17, 18, 19, 20):
        got, expected = planned(**full(length)), eager(**full(length))
        assert torch.equal(got.means, expected.means) and torch.equal(got.loss, expected.loss)
    assert stats(planned)["plans"] == 4 and stats(planned)["buckets"]["padded_steps"] == 0


def test_the_budget_counts_the_copy_without_padding() -> None:
    planned = prepare(tiny_lora(), config())
    batch = {"input_ids": full(19)["input_ids"]}
    logits = planned(**batch).logits
    step_ = current_step(planned)
    assert step_ is not None
    assert step_.budget.outputs == 4 * logits.nbytes // 19 * 24


def _packed(batch: Batch) -> None:
    batch["position_ids"] = torch.cat([torch.arange(9), torch.arange(10)])[None].repeat(2, 1)


def _at_the_end(batch: Batch) -> None:
    batch["position_ids"] = torch.arange(44, 63)[None].repeat(2, 1)


def _small() -> torch.nn.Module:
    return tiny_lora(layers=1, hidden=32)


def _own_model() -> torch.nn.Module:
    model: Any = _small()
    base = model.get_base_model()
    base.__class__ = type("MyForCausalLM", (type(base),), {})
    return model  # type: ignore[no-any-return]


def _own_loss() -> torch.nn.Module:
    model: Any = _small()

    def loss(logits: torch.Tensor, labels: torch.Tensor, **_: Any) -> torch.Tensor:
        return logits.float().square().mean()

    model.get_base_model().loss_function = loss
    return model  # type: ignore[no-any-return]


UNPADDABLE: dict[str, tuple[Callable[[], Any], Callable[[Batch], Any]]] = {
    "rows are packed": (lambda: family_lora("llama"), _packed),
    "beyond the model's 64 positions": (lambda: family_lora("gpt2"), _at_the_end),
    "router's loss": (lambda: family_lora("mixtral", output_router_logits=True), lambda b: None),
    "rope_type": (
        lambda: family_lora("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
        lambda b: None,
    ),
    "not known what padding": (_small, lambda b: b.update(cache_position=torch.arange(19))),
    "not of the shape of input_ids": (
        _small,
        lambda b: b.update(attention_mask=torch.ones(2, 1, 19, 19).tril().bool()),
    ),
    "not a causal language model": (_own_model, lambda b: None),
    "loss function": (_own_loss, lambda b: None),
}


@pytest.mark.parametrize("reason", UNPADDABLE)
def test_what_is_not_understood_keeps_its_length(reason: str, caplog: pytest.LogCaptureFixture) -> None:
    """The batch runs as it is, with eager's bits, and the reason is told once."""
    make, change = UNPADDABLE[reason]
    eager = make()
    planned = prepare(copy.deepcopy(eager), config(on_unsupported="eager"))
    with caplog.at_level(logging.INFO, "disco_accel"):
        for _ in range(2):
            batch = full(19)
            change(batch)
            expected = step(eager, batch)
            got = step(planned, batch)
            assert all(torch.equal(got[n], v) for n, v in expected.items())
    assert sum(reason in r.getMessage() for r in caplog.records) == 1
    assert stats(planned)["buckets"]["padded_steps"] == 0


def test_off_is_off() -> None:
    planned = prepare(_small(), config(False))
    for length in (17, 18, 19):
        planned(**full(length))
    assert stats(planned)["plans"] == 3 and stats(planned)["buckets"]["padded_to"] == []


def test_a_bucket_that_exceeds_the_budget_does_not_refuse_a_batch_that_fits(caplog: pytest.LogCaptureFixture) -> None:
    eager = _small()
    planned = prepare(_small(), config("off", 4096))
    with pytest.raises(BudgetTooSmall) as caught:
        planned(**full(25))
    prepare(restore(planned), config((128,), caught.value.needed))
    with caplog.at_level(logging.INFO, "disco_accel"):
        for _ in range(2):
            got, expected = step(planned, full(25)), step(eager, full(25))
            assert all(torch.equal(got[n], v) for n, v in expected.items())
    assert sum("exceed memory_budget" in r.getMessage() for r in caplog.records) == 1
    assert stats(planned)["buckets"]["padding"] == 0.0
    with pytest.raises(BudgetTooSmall):
        planned(**full(120))


@given(st.integers(1, 1 << 17))
def test_lengths_are_few_and_padding_is_bounded(length: int) -> None:
    """Four lengths in each doubling; less than a quarter of a batch is padding, or 15 tokens where it is short."""
    target = next_length(length)
    assert target >= length and next_length(target) == target
    assert target - length < max(16, length / 4)
    assert next_length(length + 1) >= target
