"""``plan`` for packed frozen weights without the libraries that pack them: sizes are theirs, calls are kept."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config

from disco_accel.cli.main import main
from disco_accel.errors import BudgetTooSmall
from disco_accel.graph.check import check_taskgraph
from disco_accel.graph.copies import swaps_in
from disco_accel.graph.taskgraph import VertexKind
from disco_accel.graph.value_numbering import clones
from disco_accel.graph.values import host_copy_exists
from disco_accel.measure.costs import Estimated
from disco_accel.measure.quantised_estimate import packed_bytes, parts_of
from disco_accel.quantised.forms import PackedForm, PackedWeight
from disco_accel.recipes.lora import main as train
from disco_accel.recipes.outline import Outline, outline
from disco_accel.recipes.settings import LoraRecipe, parse_recipe, read_prefill_recipe
from disco_accel.step.compile.pipeline import PlannerSettings, plan_step, with_costs

FORMS = list(PackedForm)


@pytest.fixture
def recipe(values: dict[str, Any]) -> LoraRecipe:
    return parse_recipe({**values, "dtype": "bfloat16", "lora_dropout": 0.0})


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
    assert packed_bytes(PackedWeight(form, 4096, 11008, "bfloat16")) == bytes_


def test_odd_counts_round_up() -> None:
    """The last block has less in it; two numbers share a byte."""
    parts = parts_of(PackedWeight(PackedForm.NF4_NESTED, 3, 43, "float32"))
    assert [part.bytes for part in parts] == [65, 3, 4, 1024, 4, 64]


def budgeted(outlined: Outline, total: int, planner: str = "timed") -> Any:
    step, costs = with_costs(outlined.captured, Estimated("cuda"))
    budget = outlined.budget(total).split(costs.workspaces, in_blocks=costs.in_blocks)
    return plan_step(step, budget, PlannerSettings(planner))


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
    inside, own = (26, 11) if form is not PackedForm.FP8 else (0, 37)
    added = [call for id_, call in after.ops.items() if id_ not in before.ops]
    assert len(added) == inside + own * {PackedForm.NF4: 1, PackedForm.INT8: 2}.get(form, 3)
    assert sum(call.name.endswith(".dequantise") for call in added) == inside
    # Those inside a product are left out with it alone.
    assert not any(after.ops[clone.vertex].name.endswith(".dequantise") for clone in clones(after))
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
            if made[source].op in ("bitsandbytes::dequantize_4bit", "bitsandbytes::gemm_4bit.dequantise"):
                others = {s for s, _ in vertex.inputs if made[s].kind is VertexKind.KERNEL and s != source}
                assert {*others, *vertex.after} <= set(made[source].after) and others


def test_layers_that_store_inputs_first_are_packed_and_told_from_their_backward(
    values: dict[str, Any], tmp_path: Path
) -> None:
    """GPT-2's, one of which is square; no recomputation, and the first layer's input wants no gradient."""
    GPT2Config(n_layer=1, n_head=4, n_embd=32, n_positions=64, vocab_size=320).save_pretrained(tmp_path)
    keys = {**values, "model_name_or_path": str(tmp_path), "dtype": "bfloat16", "gradient_checkpointing": False}
    estimated = outline(parse_recipe(keys), PackedForm.NF4)
    calls = [call.name for call in estimated.captured.graph.ops.values() if call.name.startswith("bitsandbytes::")]
    assert estimated.packed is not None and estimated.packed.weights == 4
    assert calls.count("bitsandbytes::gemm_4bit.dequantise") == 4
    assert calls.count("bitsandbytes::dequantize_4bit") == 3
    assert estimated.packed.bytes == sum(n // 2 + 4 * (n // 64) + 64 for n in (32 * 96, 32 * 32, 32 * 128, 32 * 128))


def test_a_prefill_is_planned_with_packed_weights(checkpoint: Path, tmp_path: Path) -> None:
    """Each is dequantised once, inside its product."""
    file = tmp_path / "prefill.yaml"
    keys = {"model_name_or_path": str(checkpoint), "prompts": "p.txt", "max_length": 32, "load_in_8bit": True}
    file.write_text(json.dumps(keys))
    estimated = outline(read_prefill_recipe(file))
    assert estimated.packed is not None and (estimated.packed.form, estimated.packed.weights) == ("int8", 14)
    assert "model.layers.1.mlp.down_proj.weight.SCB" in estimated.names.values()
    calls = [call.name for call in estimated.captured.graph.ops.values()]
    assert calls.count("bitsandbytes::int8_scaled_mm.dequantise") == 14


@pytest.mark.parametrize("form", [PackedForm.NF4_NESTED, PackedForm.INT8, PackedForm.FP8])
def test_a_plan_of_packed_weights_is_verified_and_needs_less(recipe: LoraRecipe, form: PackedForm) -> None:
    """Half of what all takes at once; every plan that ``plan_step`` returns is verified."""
    plain, packed = outline(recipe, "none"), outline(recipe, form)
    with pytest.raises(BudgetTooSmall) as refused:
        budgeted(packed, 4096)
    total = refused.value.needed
    planned = budgeted(packed, total)
    assert planned.applied[0].name and "packed weights" in [each.name for each in packed.captured.passes]
    assert any(swaps_in(v) for v in planned.plan.vertices)
    frozen = [sum(v.sizes[0] for v in o.captured.graph.vertices if host_copy_exists(v)) for o in (plain, packed)]
    assert frozen[1] < frozen[0]


@pytest.fixture
def asked(values: dict[str, Any], tmp_path: Path) -> Callable[..., str]:
    """Writes a recipe with further keys."""

    def written(**keys: Any) -> str:
        file = tmp_path / "recipe.yaml"
        file.write_text(json.dumps({**values, "dtype": "bfloat16", "lora_dropout": 0.0, **keys}))
        return str(file)

    return written


def test_plan_names_the_form_and_its_bytes(
    asked: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the recipe's keys say, unless ``--quant`` says otherwise; a refusal has them too."""
    recipe = asked(load_in_4bit=True, use_bnb_nested_quant=True)
    assert main(["plan", "--json", recipe, "--memory", "2MiB", "-o", str(tmp_path / "plan")]) == 0
    quant = json.loads(capsys.readouterr().out)["quant"]
    assert (quant["form"], quant["weights"]) == ("nf4-nested", 14)
    assert quant["packed_bytes"] < quant["bytes_before"] == 2 * 2 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 128)
    report = (tmp_path / "plan" / "report.txt").read_text()
    assert re.search(r"of which 14 packed as nf4-nested +\S+KiB, before 144KiB", report)
    forecast = json.loads((tmp_path / "plan" / "forecast.json").read_text())
    names = {*forecast["resident"], *forecast["streamed"]}
    assert {"base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight" + part for part in NESTED} <= names
    assert main(["plan", "--json", recipe, "--memory", "2MiB", "--quant", "none"]) == 0
    assert "quant" not in json.loads(capsys.readouterr().out)
    assert main(["plan", "--json", recipe, "--memory", "20KiB", "--quant", "int8"]) == 1
    refused = json.loads(capsys.readouterr().out)
    assert refused["quant"]["form"] == "int8" and refused["needed_bytes"] > 20 << 10


NESTED = ("", ".absmax", ".state2.absmax", ".state2.code", ".offset")


def test_plan_on_the_host_device_says_which_ops_it_could_not_try(
    asked: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Ops of PyTorch's are tried as ever, the casts and products of float8 among them; a library's, where it is
    loaded; not what is a part of one in the forward and when that is run again."""
    there = hasattr(torch.ops.bitsandbytes, "dequantize_4bit")
    assert main(["plan", "--json", asked(load_in_4bit=True), "--memory", "2MiB", "--device", "cpu"]) == 0
    said = capsys.readouterr()
    count = 14 + 12 + (0 if there else 11)
    assert json.loads(said.out)["without_scratch_of"] == count
    assert f"{count} ops that no library here has" in said.err
    assert main(["plan", "--json", asked(), "--memory", "2MiB", "--device", "cpu", "--quant", "fp8"]) == 0
    assert json.loads(capsys.readouterr().out)["without_scratch_of"] == 0


@pytest.mark.parametrize(
    ("stored", "form"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "fp4"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "int8"),
        ({"quant_method": "mxfp4"}, None),
    ],
)
def test_a_checkpoint_that_is_packed_is_planned_as_it_is_or_refused(
    stored: dict[str, Any],
    form: str | None,
    checkpoint: Path,
    asked: Callable[..., str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Never as if its weights had 16 bits."""
    packed = tmp_path / "packed"
    packed.mkdir()
    config = json.loads((checkpoint / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps({**config, "quantization_config": stored}))
    status = main(["plan", "--json", asked(model_name_or_path=str(packed)), "--memory", "2MiB"])
    said = capsys.readouterr()
    if form is None:
        assert status == 2 and "packed by mxfp4" in said.err and "--quant" in said.err
    else:
        assert status == 0 and json.loads(said.out)["quant"]["form"] == form


def test_a_library_that_is_not_there_is_named_with_its_command(
    asked: Callable[..., str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By ``train`` before anything is written; ``plan`` needs none."""
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    for keys in ({"load_in_4bit": True}, {"load_in_8bit": True}):
        assert train([asked(**keys)]) == 2
        said = capsys.readouterr().err
        assert next(iter(keys)) in said and "pip install bitsandbytes" in said
