"""``devices``: one step on several host devices, with eager's bits where the same kernels run."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from disco_accel import DiscoConfig, prepare, stats
from disco_accel.errors import BudgetTooSmall, ConfigError
from disco_accel.graph.copies import is_transfer
from disco_accel.graph.taskgraph import VertexKind
from disco_accel.graph.values import host_copy_exists
from disco_accel.step.compile.compiled_step import shared_weights
from disco_accel.step.compile.fitted_batch import FittedBatch
from disco_accel.step.run import shared_batches, step_plans
from disco_accel.step.run.session import Session, current_step, find_state
from disco_accel.step.run.shared_batches import _faster_than, _NotFaster
from tests.integrate.generators import assert_same, assert_same_step, gradients
from tests.support.models import TEN_FAMILIES, family_full, family_lora, random_batch

BF16, FP32 = torch.bfloat16, torch.float32
pytestmark = pytest.mark.usefixtures("random_order")


def config(devices: int, parallel: str, budget: int | str = "4MiB", **keys: Any) -> DiscoConfig:
    ours = {"device": "cpu", "devices": devices, "parallel": parallel, "memory_budget": budget, "plan_cache": None}
    return DiscoConfig(**(ours | keys))


def least(model: torch.nn.Module, devices: int, parallel: str, batch: Mapping[str, Any], **keys: Any) -> Any:
    """``model`` prepared with about the least budget for a step on ``batch``."""
    budget = 64 << 10
    for _ in range(6):
        prepare(model, config(devices, parallel, budget, **keys))
        state = torch.get_rng_state()
        try:
            model(**batch).loss.backward()
        except BudgetTooSmall as error:
            budget = error.needed
        else:
            model.zero_grad()
            return model
        finally:
            torch.set_rng_state(state)
    raise AssertionError(f"no plan in {budget} bytes, which was said to be enough")


def kernels_by_device(model: torch.nn.Module) -> list[int]:
    step = current_step(model)
    assert step is not None
    used = [v.space for v in step.plan.vertices if v.kind is VertexKind.KERNEL]
    return [used.count(device.id) for device in step.plan.devices if not device.is_host_device]


def uneven(rows: int = 4, seed: int = 0) -> dict[str, torch.Tensor]:
    """Rows of which some have far fewer labels than others."""
    batch = random_batch(batch=rows, seed=seed)
    del batch["attention_mask"]
    batch["labels"][0, :13] = -100
    batch["labels"][-1, 3:] = -100
    return batch


def accumulated(model: torch.nn.Module, batch: Mapping[str, torch.Tensor], parts: int) -> dict[str, torch.Tensor]:
    """Losses and gradients of the parts of ``batch`` added up by eager mode, and where the generator ends."""
    model.zero_grad(set_to_none=True)
    items, total = (batch["labels"][:, 1:] != -100).sum(), None
    for part in range(parts):
        rows = {name: value.chunk(parts)[part] for name, value in batch.items()}
        loss = model(**rows, num_items_in_batch=items).loss
        loss.backward()
        total = loss.detach() if total is None else total + loss.detach()
    assert total is not None
    return {"loss": total, **gradients(model), "generator": torch.get_rng_state()}


def planned_step(model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    loss = model(**batch).loss
    loss.backward()
    return {"loss": loss.detach(), **gradients(model), "generator": torch.get_rng_state()}


@pytest.mark.parametrize(
    ("family", "dtype", "devices"), [(f, (FP32, BF16)[k % 2], 2 + k % 2) for k, f in enumerate(TEN_FAMILIES)]
)
def test_layers_in_a_row_have_the_bits_of_eager(family: str, dtype: torch.dtype, devices: int) -> None:
    """With checkpointing and dropout, at the least budget and behind a slow link, ops dispatched at random."""
    eager = family_lora(family, dtype=dtype, checkpointing=True, lora_dropout=0.1)
    planned = least(copy.deepcopy(eager), devices, "layers", random_batch(), link_bandwidth=1e9)
    for seed in range(3):
        assert_same_step(eager, planned, random_batch(seed=seed))
    assert all(kernels_by_device(planned)) and len(kernels_by_device(planned)) == devices
    assert stats(planned)["steps_eager"] == 0 and stats(planned)["engine"]["c10_allocations"] == 0


@pytest.mark.parametrize(
    ("family", "dtype", "devices"), [("llama", FP32, 2), ("gpt2", FP32, 4), ("gemma3_text", BF16, 2)]
)
def test_parts_of_a_batch_have_the_bits_of_accumulation(family: str, dtype: torch.dtype, devices: int) -> None:
    """A mean over all tokens, though the parts have different numbers of them; dropout drawn part by part."""
    eager = family_lora(family, dtype=dtype, checkpointing=True, lora_dropout=0.1)
    planned = least(copy.deepcopy(eager), devices, "batch", uneven(), link_bandwidth=1e9)
    for seed in range(3):
        start = torch.get_rng_state()
        expected = accumulated(eager, uneven(seed=seed), devices)
        torch.set_rng_state(start)
        assert_same(planned_step(planned, uneven(seed=seed)), expected)
    assert all(kernels_by_device(planned)) and stats(planned)["steps_eager"] == 0


@pytest.mark.parametrize("devices", [2, 4])
def test_weights_from_neighbours_are_those_of_now(devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits of accumulation, with every weight sent on by the one device that loads it; a weight that is written to
    between two steps is another one on all devices."""
    monkeypatch.setattr("disco_accel.decompose.decomposition._GAIN", float("inf"))
    eager = family_lora("llama", lora_dropout=0.1)
    planned = prepare(copy.deepcopy(eager), config(devices, "batch", "150KiB", link_bandwidth=1e9))
    for seed in range(3):
        if seed == 2:
            for model in (eager, planned):
                for name, weight in model.named_parameters():
                    if not weight.requires_grad:
                        weight.data.mul_(1.5 if "norm" in name else -1.25)
        start = torch.get_rng_state()
        expected = accumulated(eager, uneven(seed=seed), devices)
        torch.set_rng_state(start)
        assert_same(planned_step(planned, uneven(seed=seed)), expected)
    step = current_step(planned)
    assert step is not None and stats(planned)["steps_eager"] == 0
    weights = {v.id for v in step.graph.vertices if host_copy_exists(v) and v.sizes[0]}
    assert weights.isdisjoint(step.captured.copies)
    sent = [v for v in step.graph.vertices if is_transfer(v) and v.inputs[0][0] in weights]
    assert len(sent) >= (devices - 1) * len(weights)
    assert len({v.space for v in step.graph.vertices if v.id in weights}) == devices


def test_what_cannot_be_shared_out_runs_by_layers_and_is_told(caplog: pytest.LogCaptureFixture) -> None:
    eager = family_lora("llama")
    planned = prepare(copy.deepcopy(eager), config(2, "batch"))
    for rows in (3, 1):
        assert_same_step(eager, planned, random_batch(batch=rows))
    assert all(kernels_by_device(planned))
    assert [r.getMessage() for r in caplog.records].count(
        "parallel: batch: this batch is not shared out, its layers are, as its 3 rows are not a multiple of 2"
    ) == 1
    planned(**random_batch(), cache_position=torch.arange(16)).loss.backward()
    assert "first dimension of cache_position" in caplog.text


def test_logits_of_a_shared_out_batch_are_those_of_the_whole() -> None:
    eager = family_lora("llama")
    planned = prepare(copy.deepcopy(eager), config(2, "batch"))
    batch = uneven()
    for _ in range(4):
        ours = planned(**batch)
        assert torch.equal(ours.logits, eager(**batch).logits)
        ours.loss.backward()
    assert stats(planned)["steps_eager"] == 0


@pytest.mark.parametrize("parallel", ["layers", "batch"])
def test_verify_steps_compares_with_eager_mode(parallel: str) -> None:
    planned = prepare(family_lora("llama", lora_dropout=0.1), config(2, parallel, verify_steps=2))
    for seed in range(3):
        planned(**uneven(seed=seed)).loss.backward()
    assert stats(planned)["steps_compiled"] == 3


@pytest.mark.parametrize(
    ("parallel", "update", "tied"),
    [
        ("layers", "step", True),
        ("layers", "deferred", True),
        ("layers", "deferred", False),
        ("batch", "deferred", False),
    ],
)
def test_all_weights_are_trained_with_an_optimizer_on_the_host(parallel: str, update: str, tied: bool) -> None:
    """Accumulation and clipping too. Updates of a weight that several devices load are not put off."""
    eager = family_full("qwen3", tie_word_embeddings=tied)
    keys = {"optimizer": "host", "update": update}
    planned = prepare(copy.deepcopy(eager), config(2, parallel, "1GiB", **keys))
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True) for m in (planned, eager))
    for step in range(3):
        for part in range(2):
            batch = uneven(seed=2 * step + part)
            loss = planned(**batch).loss
            loss.backward()
            if parallel == "layers":
                expected = eager(**batch).loss
                expected.backward()
            else:
                expected = whole(eager, batch)
            assert torch.equal(loss, expected)
        for model, optimizer in ((planned, ours), (eager, theirs)):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    weights, made = planned.state_dict(), stats(planned)
    if update == "deferred":
        assert (made["updates_planned"] > 0) == (parallel == "layers" and not tied)
    assert all(torch.equal(weights[name], value) for name, value in eager.state_dict().items())


def whole(model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The gradients of two parts of ``batch`` added up, and then to those that are there; returns the sum of losses."""
    before = {name: p.grad for name, p in model.named_parameters()}
    made = accumulated(model, batch, 2)
    for name, parameter in model.named_parameters():
        if before[name] is not None:
            parameter.grad = before[name] + parameter.grad
    return made["loss"]


def test_devices_are_checked() -> None:
    for wrong in (0, -1, [0, 0], [], "two", True, 1.5):
        with pytest.raises(ConfigError, match="devices"):
            DiscoConfig(devices=wrong)
    with pytest.raises(ConfigError, match="parallel"):
        DiscoConfig(parallel="pipeline")
    with pytest.raises(ConfigError, match="update_on: auto is for a step on one device"):
        prepare(family_full("llama"), config(2, "layers", optimizer="host", update="deferred", update_on="auto"))
    assert DiscoConfig(devices=[1, 3], device="cpu", memory_budget="1MiB").resolve().devices == 2
    whole_machine, half = (DiscoConfig(device="cpu", devices=n).resolve().memory_budget for n in (1, 2))
    assert half <= whole_machine // 2 + 1


def test_auto_takes_the_way_that_is_simulated_fastest(caplog: pytest.LogCaptureFixture) -> None:
    """One row cannot be shared out; of four rows the step runs that is said to take least. A layer that is frozen makes
    another step, for which a way is chosen anew."""
    caplog.set_level("INFO")
    planned = prepare(family_lora("llama"), config(2, "auto"))
    ran = []
    for rows in (1, 4, 4, 1):
        planned(**random_batch(batch=rows, length=32)).loss.backward()
        step = current_step(planned)
        assert step is not None
        ran.append("batch" if step.parts > 1 else "tensor" if shared_weights(step.captured) else "layers")
        if len(ran) == 3:
            next(p for p in planned.parameters() if p.requires_grad).requires_grad_(False)
    told = [r.getMessage() for r in caplog.records if "parallel: auto:" in r.getMessage()]
    assert ran[1] == ran[2] and len(told) == 3
    for line, way in zip(told, (ran[0], ran[1], ran[3]), strict=True):
        seconds = {name: float(took) for name, took in re.findall(r"(\w+) ([0-9.e-]+) s a step", line)}
        assert min(seconds, key=seconds.__getitem__) == way and f"auto: {way} (" in line
        assert seconds.keys() == {"layers", "batch", "tensor"} - ({"batch"} if line != told[1] else set())
        assert ("round" in line) == (way != "layers")


def test_auto_tries_tensor_where_the_others_have_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """And makes no copies of parts of weights where another way is faster."""
    planned = prepare(family_lora("llama"), config(2, "auto"))
    state = find_state(planned)
    assert state is not None
    made = step_plans.compiled

    def compiled(state: Session, model: torch.nn.Module, fitted: FittedBatch, *rest: Any, **more: Any) -> Any:
        if fitted.parallel != "tensor":
            raise BudgetTooSmall(2, 1, "memory_budget", "")
        return made(state, model, fitted, *rest, **more)

    fitted = FittedBatch(random_batch(batch=1, length=32))
    with pytest.raises(_NotFaster):
        made(state, planned, dataclasses.replace(fitted, parallel="tensor"), ("loss",), check=_faster_than(0.0))
    assert not state.memory.plans and state.loader.shards is not None and not state.loader.shards._copies
    monkeypatch.setattr(shared_batches, "compiled", compiled)
    assert shared_batches.shared_out(state, planned, fitted).parallel == "tensor" and state.loader.shards._copies


def test_auto_takes_the_way_that_fits() -> None:
    """In the smaller of both least budgets only one does; GPT-2 has no third."""
    batch = random_batch(batch=4, length=32)
    budgets = {way: least_budget(way, batch) for way in ("layers", "batch")}
    tight = min(budgets, key=budgets.__getitem__)
    assert budgets["layers"] != budgets["batch"]
    planned = prepare(family_lora("gpt2"), config(2, "auto", budgets[tight]))
    planned(**batch).loss.backward()
    step = current_step(planned)
    assert step is not None and (step.parts > 1) == (tight == "batch")


def least_budget(parallel: str, batch: Mapping[str, Any]) -> int:
    with pytest.raises(BudgetTooSmall) as refusal:
        prepare(family_lora("gpt2"), config(2, parallel, 66 << 10))(**batch)
    return refusal.value.needed
