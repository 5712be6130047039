"""``plan`` for packed frozen weights without the libraries that pack them: sizes are theirs, calls are kept."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from disco_accel.errors import BudgetTooSmall
from disco_accel.graph.check import check_taskgraph
from disco_accel.graph.taskgraph import VertexKind
from disco_accel.graph.values import host_copy_exists
from disco_accel.measure.costs import Estimated
from disco_accel.measure.quantised_estimate import PackedForm, PackedWeight
from disco_accel.recipes.outline import Outline, outline
from disco_accel.recipes.settings import LoraRecipe, parse_recipe
from disco_accel.step.pipeline import PlannerSettings, plan_step, with_costs

FORMS = list(PackedForm)


def installed(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")


@pytest.fixture
def recipe(values: dict[str, Any]) -> LoraRecipe:
    return parse_recipe({**values, "dtype": "bfloat16", "lora_dropout": 0.0})


def tensors_of(value: Any, seen: dict[int, int]) -> dict[int, int]:
    """Storage to bytes of every plain tensor in ``value``: a parameter, what hangs from it, and what it is made of."""
    if isinstance(value, torch.Tensor) and hasattr(value, "__tensor_flatten__"):
        for name in value.__tensor_flatten__()[0]:
            tensors_of(getattr(value, name), seen)
    elif isinstance(value, torch.Tensor):
        seen[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        for name in ("quant_state", "SCB"):
            tensors_of(getattr(value, name, None), seen)
    elif value is not None and type(value).__name__ == "QuantState":
        for held in vars(value).values():
            tensors_of(held, seen)
    return seen


def loaded(recipe: LoraRecipe, config: Any) -> dict[str, torch.nn.Parameter]:
    """The checkpoint's parameters that are not plain tensors, by name."""
    model = AutoModelForCausalLM.from_pretrained(
        recipe.model_name_or_path, dtype=torch.bfloat16, quantization_config=config, device_map={"": "cpu"}
    )
    plain = (torch.bfloat16, torch.float32)
    return {n: p for n, p in model.named_parameters() if hasattr(p, "__tensor_flatten__") or p.dtype not in plain}


def assert_sizes_agree(recipe: LoraRecipe, form: PackedForm, parameters: dict[str, torch.nn.Parameter]) -> None:
    estimated = outline(recipe, form)
    assert estimated.packed is not None and estimated.packed.weights == len(parameters) == 14
    sizes = {name: sum(tensors_of(p, {}).values()) for name, p in parameters.items()}
    assert estimated.packed.bytes == sum(sizes.values())
    names = set(estimated.names.values())
    for name in parameters:
        adapted = "base_model.model." + name.removesuffix("weight") + "base_layer.weight"
        assert adapted in names or f"{adapted}.qdata" in names


@installed("bitsandbytes")
@pytest.mark.parametrize("form", [form for form in FORMS if form is not PackedForm.FP8])
def test_the_bytes_are_those_that_bitsandbytes_keeps(recipe: LoraRecipe, form: PackedForm) -> None:
    config = (
        BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=form.value[:3], bnb_4bit_use_double_quant=form.nested)
        if form.in_four_bits
        else BitsAndBytesConfig(load_in_8bit=True)
    )
    assert_sizes_agree(recipe, form, loaded(recipe, config))


@installed("torchao")
def test_the_bytes_are_those_that_torchao_keeps(recipe: LoraRecipe) -> None:
    from torchao.quantization import Float8WeightOnlyConfig
    from transformers import TorchAoConfig

    assert_sizes_agree(recipe, PackedForm.FP8, loaded(recipe, TorchAoConfig(Float8WeightOnlyConfig())))


@pytest.mark.parametrize(
    ("form", "bytes_"),
    [
        (PackedForm.NF4, 4096 * 11008 // 2 + 4 * (4096 * 11008 // 64) + 64),
        (PackedForm.NF4_NESTED, 4096 * 11008 // 2 + 704512 + 4 * 2752 + 1024 + 4 + 64),
        (PackedForm.INT8, 4096 * 11008 + 4 * 4096),
        (PackedForm.FP8, 4096 * 11008 + 4 * 4096),
    ],
)
def test_a_weight_of_7b_takes_what_its_form_says(form: PackedForm, bytes_: int) -> None:
    assert PackedWeight(form, 4096, 11008, "bfloat16").bytes == bytes_


def test_odd_counts_round_up() -> None:
    """The last block has less in it; two numbers share a byte."""
    parts = PackedWeight(PackedForm.NF4_NESTED, 3, 43, "float32").parts
    assert [part.bytes for part in parts] == [65, 3, 4, 1024, 4, 64]


def budgeted(outlined: Outline, total: int, planner: str = "timed") -> Any:
    return plan_step(
        with_costs(outlined.captured.graph, Estimated("cuda")), outlined.facts(total), PlannerSettings(planner)
    )


@pytest.mark.parametrize("form", [f for f in FORMS if not f.value.startswith("fp4")])
def test_kernels_read_dequantised_weights_and_keep_their_calls(recipe: LoraRecipe, form: PackedForm) -> None:
    plain, packed = outline(recipe, "none"), outline(recipe, form)
    before, after = plain.captured.graph, check_taskgraph(packed.captured.graph)
    old = {v.id: v for v in before.vertices}
    made = {v.id: v for v in after.vertices}
    names = {id_: name for id_, name in plain.names.items() if "_proj.base_layer.weight" in name}
    assert len(names) == 14
    uses = 0
    for vertex in before.vertices:
        if vertex.kind is not VertexKind.KERNEL:
            continue
        assert after.ops[vertex.id] == before.ops[vertex.id]
        for (was, k), (now, _) in zip(vertex.inputs, made[vertex.id].inputs, strict=True):
            if was in names:
                uses += 1
                assert now not in old and made[now].sizes == (old[was].sizes[k],)
            else:
                assert now == was
    # Anew in the forward, in the recomputation (which stops before the last product of a layer), and in the backward
    # (where the first three products have an input that wants no gradient).
    assert uses == 14 + 12 + 11
    count = {PackedForm.NF4: 1, PackedForm.INT8: 2}.get(form, 3)
    assert len(after.ops) - len(before.ops) == uses * count
    parts = {v for v, name in packed.names.items() if "_proj.base_layer.weight" in name}
    assert all(host_copy_exists(made[v]) for v in parts)
    assert packed.packed is not None
    unread = 64 * 14 if form.in_four_bits else 0
    assert sum(made[v].sizes[0] for v in parts) == packed.packed.bytes - unread
    assert packed.packed.unpacked == sum(old[v].sizes[0] for v in names)
    specs = {b.vertex: b.spec for b in packed.captured.bindings}
    for v in parts:
        dtype = getattr(torch, specs[v].dtype)
        assert made[v].sizes == (torch.empty(specs[v].shape, dtype=dtype).nbytes,)


def test_no_weight_is_dequantised_before_its_layer_is_reached(recipe: LoraRecipe) -> None:
    """Each waits for the other operands of its reader: they hang from the loss's gradient where the reader does."""
    graph = outline(recipe, PackedForm.NF4).captured.graph
    made = {v.id: v for v in graph.vertices}
    for vertex in graph.vertices:
        for source, _ in vertex.inputs:
            if made[source].op == "bitsandbytes::dequantize_4bit":
                others = {s for s, _ in vertex.inputs if made[s].kind is VertexKind.KERNEL and s != source}
                assert {*others, *vertex.after} <= set(made[source].after) and others


@pytest.mark.parametrize("form", [PackedForm.NF4_NESTED, PackedForm.INT8, PackedForm.FP8])
def test_a_plan_of_packed_weights_is_verified_and_needs_less(recipe: LoraRecipe, form: PackedForm) -> None:
    """Half of what all takes at once; every plan that ``plan_step`` returns is verified."""
    plain, packed = outline(recipe, "none"), outline(recipe, form)
    with pytest.raises(BudgetTooSmall) as refused:
        budgeted(packed, 4096)
    total = refused.value.needed
    planned = budgeted(packed, total)
    assert planned.applied[0].name and "packed weights" in [each.name for each in packed.captured.passes]
    assert any(v.kind is VertexKind.RELOAD for v in planned.plan.vertices)
    frozen = [sum(v.sizes[0] for v in o.captured.graph.vertices if host_copy_exists(v)) for o in (plain, packed)]
    assert frozen[1] < frozen[0]
