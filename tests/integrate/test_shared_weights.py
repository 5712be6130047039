"""``parallel: tensor``: devices with a part of each large weight, close to one device, and the same in any order."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from disco_accel import DiscoConfig, prefill, prepare, restore, stats
from disco_accel.capture.captured_step import InputSource
from disco_accel.decompose.tensor.ranks import on_ranks
from disco_accel.errors import CaptureError, ConfigError, ExecutionError
from disco_accel.graph.copies import is_transfer
from disco_accel.step.compile.compiled_step import CompiledStep, shared_weights
from disco_accel.step.run.session import current_step
from tests.integrate.generators import assert_same, gradients, run
from tests.integrate.test_several_devices import accumulated, config, kernels_by_device, planned_step, uneven
from tests.support.models import family_full, family_lora, random_batch
from tests.support.unwatched import without_watching_writes

BF16, FP32 = torch.bfloat16, torch.float32
pytestmark = pytest.mark.usefixtures("random_order")
FINE = 3e-6
"""Of gradients in fp32: one device is up to as far from float64."""
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text")


def tensor(devices: int = 2, budget: int | str = "1MiB", **keys: Any) -> DiscoConfig:
    return config(devices, "tensor", budget, on_unsupported="error", **keys)


def model_for(devices: int, family: str = "llama", **options: Any) -> torch.nn.Module:
    heads = {"num_key_value_heads": 4} if devices == 4 else {}
    return family_lora(family, **({"num_hidden_layers": 1} | heads | options))


def apart(got: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """The norm of the difference of all gradients as a part of theirs; the loss must be close, and
    the generator's state the same."""
    assert got.keys() == expected.keys() and torch.equal(got["generator"], expected["generator"])
    names = expected.keys() - {"generator", "loss"}
    if "loss" in expected:
        assert torch.allclose(got["loss"], expected["loss"], rtol=1e-3)
    assert all(got[n].dtype == expected[n].dtype and got[n].shape == expected[n].shape for n in names)
    difference = sum((got[n].double() - expected[n].double()).square().sum() for n in names)
    return float((difference / sum(expected[n].double().square().sum() for n in names)) ** 0.5)


def from_exact(got: Mapping[str, torch.Tensor], exact: Mapping[str, torch.Tensor]) -> float:
    names = exact.keys() - {"generator", "loss"}
    apart = sum((got[n].double() - exact[n]).square().sum() for n in names)
    return float((apart / sum(exact[n].square().sum() for n in names)) ** 0.5)


def step_of(model: torch.nn.Module) -> CompiledStep:
    step = current_step(model)
    assert step is not None
    return step


def assert_close(planned: torch.nn.Module, eager: torch.nn.Module, batch: Mapping[str, Any], most: float) -> None:
    start = torch.get_rng_state()
    expected = run(eager, batch)
    torch.set_rng_state(start)
    assert apart(run(planned, batch), expected) <= most


@pytest.mark.parametrize(
    ("family", "dtype", "devices"), [(f, (FP32, BF16)[k % 2], (2, 4)[k // 3]) for k, f in enumerate(FAMILIES)]
)
def test_a_step_is_that_of_one_device_but_for_rounding(family: str, dtype: torch.dtype, devices: int) -> None:
    """With checkpointing, in little memory behind a slow link, ops dispatched at random: the same bits each time.

    Of two layers where these differ from each other, and of the first family.
    """
    layers = 2 if family == "llama" or family.startswith("gemma") else 1
    eager = model_for(devices, family, dtype=dtype, checkpointing=True, num_hidden_layers=layers)
    batch = uneven(2)
    expected = run(eager, batch)
    planned = prepare(copy.deepcopy(eager), tensor(devices, "150KiB", link_bandwidth=1e9))
    first = run(planned, batch)
    if dtype is FP32:
        assert apart(first, expected) <= FINE and torch.allclose(first["loss"], expected["loss"], rtol=1e-6)
    else:
        # One device's gradients are about as far from exact ones.
        exact = {name: value.double() for name, value in run(copy.deepcopy(eager).double(), batch).items()}
        ours, one = (from_exact(made, exact) for made in (first, expected))
        assert one <= 0.2 and ours <= 2.5 * one
    for _ in range(3):
        assert_same(run(planned, batch), first)
    assert all(kernels_by_device(planned)) and len(kernels_by_device(planned)) == devices
    assert stats(planned)["steps_eager"] == 0 and stats(planned)["engine"]["c10_allocations"] == 0
    # Each device has its part of the large weights alone.
    cut = shared_weights(step_of(planned).captured)
    biases = 3 * layers * (family == "qwen2")
    assert len(cut) == devices * (layers * 7 + (1 if family.startswith("gemma") else 2) + biases)


@pytest.mark.parametrize(("devices", "dtype"), [(2, FP32), (4, BF16)])
def test_every_schedule_has_the_same_bits(devices: int, dtype: torch.dtype) -> None:
    batch, made = random_batch(), []
    for seed in range(4):
        planned = prepare(model_for(devices, dtype=dtype), tensor(devices))
        run(planned, batch)
        step = step_of(planned)
        options = {"dispatch": "random", "seed": seed, "lookahead": seed % 3}
        made.append(run_as(planned, step, batch, options))
        restore(planned)
    for other in made[1:]:
        assert_same(other, made[0])


def run_as(
    model: torch.nn.Module, step: CompiledStep, batch: Mapping[str, Any], options: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """A step with the engine's ``options`` in the place of the plan's own."""

    before = step.use(step.make_executor(dataclasses.replace(step.engine, **options)))
    assert before is not None
    before.close()
    return run(model, batch)


def test_sums_in_slices_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for what is large: each device adds up a slice, and sends it to the others."""
    whole = run(prepare(model_for(4), tensor(4)), random_batch())
    monkeypatch.setattr("disco_accel.step.compile.stages.on_ranks", functools.partial(on_ranks, in_slices=64))
    planned = prepare(model_for(4), tensor(4))
    for _ in range(2):
        assert_same(run(planned, random_batch()), whole)
    assert any(v.op == "aten::slice_copy" and v.space for v in step_of(planned).graph.vertices)


def test_dropout_is_that_of_one_device() -> None:
    """Its numbers are drawn for whole tensors: the generator is where eager mode leaves it."""
    eager = model_for(2, lora_dropout=0.1, checkpointing=True)
    planned = prepare(copy.deepcopy(eager), tensor())
    for seed in range(3):
        assert_close(planned, eager, random_batch(seed=seed), FINE)


@pytest.mark.parametrize("watched", [True, False])
def test_a_changed_weight_is_followed_into_its_parts(watched: bool) -> None:
    """Rows are views of the weight; columns are copies, which are made anew: by writes, by another tensor in place."""
    eager = model_for(2)
    with contextlib.nullcontext() if watched else without_watching_writes():
        planned = prepare(copy.deepcopy(eager), tensor())
    batch = random_batch()
    layer = "base_model.model.model.layers.0."
    assert_close(planned, eager, batch, FINE)
    assert stats(planned)["plans"] == 1
    for name in (f"{layer}mlp.down_proj.base_layer.weight", f"{layer}mlp.up_proj.base_layer.weight"):
        for change in (write_one, write_all, replace_data):
            for model in (planned, eager):
                change(model.get_parameter(name))
            assert_close(planned, eager, batch, FINE)
    with pytest.raises(ExecutionError, match="frozen"):
        loss = planned(**batch).loss
        write_all(planned.get_parameter(f"{layer}self_attn.o_proj.base_layer.weight"))
        loss.backward()


def write_one(weight: torch.nn.Parameter) -> None:
    weight.data.view(-1)[-3] += 1.5


def write_all(weight: torch.nn.Parameter) -> None:
    weight.data.mul_(1.25)


def replace_data(weight: torch.nn.Parameter) -> None:
    weight.data = weight.data * 0.5


def test_plans_share_copies_of_columns() -> None:
    """Two lengths have a plan each, and one copy of each part together; a change is in both."""
    eager = model_for(2)
    planned = prepare(copy.deepcopy(eager), tensor(buckets="off"))
    lengths = [random_batch(length=n) for n in (16, 12)]
    placed = []
    for batch in lengths:
        assert_close(planned, eager, batch, FINE)
        step = step_of(planned)
        placed.append({b.name: step.clean[b.vertex].data_ptr() for b in shared_weights(step.captured)})
    assert placed[0] == placed[1]
    for batch in (*lengths, *reversed(lengths)):
        for model in (planned, eager):
            write_all(model.get_parameter("base_model.model.model.layers.0.self_attn.o_proj.base_layer.weight"))
        assert_close(planned, eager, batch, FINE)


def test_copies_of_columns_count_as_host_memory() -> None:
    """Their bytes are told and refused like other weights'."""
    planned = prepare(model_for(2, num_hidden_layers=2), tensor(host_memory="120KiB"))
    with pytest.raises(ConfigError, match="24KiB for copies of columns of weights that devices share"):
        planned(**random_batch())


def test_micro_batches_run_on_parts_of_weights() -> None:
    eager = model_for(2, lora_dropout=0.1)
    planned = prepare(copy.deepcopy(eager), tensor(micro_batches=2))
    for seed in range(2):
        start = torch.get_rng_state()
        expected = accumulated(eager, uneven(seed=seed), 2)
        torch.set_rng_state(start)
        assert apart(planned_step(planned, uneven(seed=seed)), expected) <= FINE
    assert step_of(planned).parts == 2


def test_logits_and_other_losses_are_whole() -> None:
    eager = model_for(2)
    planned = prepare(copy.deepcopy(eager), tensor())
    batch = random_batch()
    labels = batch.pop("labels")
    made = []
    for model in (planned, eager):
        model.zero_grad()
        logits = model(**batch).logits
        assert logits.is_contiguous() and logits.shape == (2, 16, 96)
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
        made.append({"logits": logits.detach(), **gradients(model), "generator": torch.get_rng_state()})
    assert apart(*made) <= FINE and stats(planned)["steps_eager"] == 0


def test_prompts_are_read_by_all_devices() -> None:
    eager = model_for(2, "gemma2").eval()
    ids = random_batch()["input_ids"]
    expected = eager(input_ids=ids, use_cache=True)
    planned = prepare(copy.deepcopy(eager), tensor())
    got = prefill(planned, ids)
    assert torch.allclose(got.logits[:, -1], expected.logits[:, -1], rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(got.past_key_values.layers, expected.past_key_values.layers, strict=True):
        assert torch.allclose(ours.keys, theirs.keys, rtol=1e-5, atol=1e-5) and ours.keys.shape == theirs.keys.shape
    assert all(kernels_by_device(planned)) and shared_weights(step_of(planned).captured)


def test_trained_weights_are_cut_from_the_whole_ones() -> None:
    """All weights trained, by an optimizer on the host, with accumulation."""
    eager = family_full("qwen3")
    planned = prepare(copy.deepcopy(eager), tensor(budget="4MiB", optimizer="host"))
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=1e-2) for m in (planned, eager))
    for step in range(2):
        for model, optimizer in ((planned, ours), (eager, theirs)):
            for part in range(2):
                model(**random_batch(seed=2 * step + part)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    for name, value in eager.state_dict().items():
        assert torch.allclose(planned.state_dict()[name], value, rtol=1e-5, atol=1e-7), name
    assert not shared_weights(step_of(planned).captured) and step_of(planned).vertices_of(InputSource.TRAINABLE)


def test_tokens_outside_of_the_vocabulary_are_errors() -> None:
    """A rank takes them for no other rank's."""
    planned = prepare(model_for(2), tensor())
    planned(**random_batch())
    for key, value in (("input_ids", 96), ("input_ids", -1), ("labels", 96), ("labels", -3)):
        batch = random_batch()
        batch[key][0, 3] = value
        with pytest.raises((IndexError, ExecutionError)):
            planned(**batch).loss.backward()
    assert torch.isfinite(planned(**random_batch()).loss)


def test_verify_steps_knows_the_rounding_of_sums() -> None:
    for dtype in (FP32, BF16):
        planned = prepare(model_for(2, dtype=dtype), tensor(verify_steps=1))
        for _ in range(2):
            planned(**random_batch()).loss.backward()


@pytest.mark.parametrize(
    ("model", "devices", "message"),
    [
        (lambda: family_lora("phi3"), 2, "Phi3ForCausalLM is none of llama, .*use parallel: layers or batch"),
        (lambda: family_lora("llama"), 4, "num_key_value_heads is 2, which 4 devices do not divide"),
        (lambda: family_lora("llama"), 3, "num_attention_heads is 4, which 3 devices do not divide"),
        (lambda: family_lora("llama", intermediate_size=63), 2, "intermediate_size is 63, which 2 devices"),
    ],
)
def test_what_cannot_be_cut_is_refused(model: Any, devices: int, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        prepare(model(), tensor(devices))(**random_batch())


def test_an_odd_vocabulary_stays_whole() -> None:
    eager = model_for(2, vocab_size=97)
    planned = prepare(copy.deepcopy(eager), tensor())
    assert_close(planned, eager, random_batch(), FINE)
    assert not any("lm_head" in b.name or "embed" in b.name for b in shared_weights(step_of(planned).captured))


def test_transfers_carry_sums_and_no_frozen_weight() -> None:
    planned = prepare(model_for(2), tensor())
    run(planned, random_batch())
    step = step_of(planned)
    frozen = {b.vertex for b in step.vertices_of(InputSource.FROZEN)}
    sent = [v for v in step.graph.vertices if is_transfer(v)]
    assert sent and not any(producer in frozen for v in sent for producer, _ in v.inputs)
