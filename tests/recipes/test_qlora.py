"""Recipes with packed weights, where the libraries are installed: sizes, names and bits are theirs."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from disco_accel.capture.parts import named_parts
from disco_accel.cli.main import main
from disco_accel.quantised.forms import PackedForm
from disco_accel.recipes.loading import load_model
from disco_accel.recipes.lora import main as train
from disco_accel.recipes.metrics import METRICS_NAME
from disco_accel.recipes.outline import outline
from disco_accel.recipes.settings import LoraRecipe, parse_recipe


def installed(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")


@pytest.fixture
def recipe(values: dict[str, Any]) -> LoraRecipe:
    return parse_recipe({**values, "dtype": "bfloat16", "lora_dropout": 0.0})


def assert_sizes_agree(recipe: LoraRecipe, form: PackedForm, config: Any) -> None:
    """Each tensor that a packed layer of the library has is in the estimate, of as many bytes, under the same name; the
    table of 4-bit numbers is counted, but read by no kernel."""
    model = AutoModelForCausalLM.from_pretrained(
        recipe.model_name_or_path, dtype=torch.bfloat16, quantization_config=config, device_map={"": "cpu"}
    )
    parts = {p.name: p.tensor.untyped_storage().nbytes() for p in named_parts(model) if "_proj.weight" in p.name}
    estimated = outline(recipe, form)
    assert estimated.packed is not None and estimated.packed.weights == 14
    assert estimated.packed.bytes == sum(parts.values())
    sizes = {v.id: v.sizes[0] for v in estimated.captured.graph.vertices}
    names = {n.replace("base_model.model.", "").replace("base_layer.", ""): v for v, n in estimated.names.items()}
    read = {name: size for name, size in parts.items() if not name.endswith(".weight.code")}
    assert read == {name: sizes[v] for name, v in names.items() if "_proj.weight" in name}
    assert len(read) < len(parts) if form.in_four_bits else read == parts


@installed("bitsandbytes")
@pytest.mark.parametrize("form", [form for form in PackedForm if form is not PackedForm.FP8])
def test_the_bytes_are_those_that_bitsandbytes_keeps(recipe: LoraRecipe, form: PackedForm) -> None:
    four = {"load_in_4bit": True, "bnb_4bit_quant_type": form.value[:3], "bnb_4bit_use_double_quant": form.nested}
    assert_sizes_agree(recipe, form, BitsAndBytesConfig(**(four if form.in_four_bits else {"load_in_8bit": True})))


@installed("torchao")
def test_the_bytes_are_those_that_torchao_keeps(recipe: LoraRecipe) -> None:
    from torchao.quantization import Float8WeightOnlyConfig
    from transformers import TorchAoConfig

    assert_sizes_agree(recipe, PackedForm.FP8, TorchAoConfig(Float8WeightOnlyConfig()))


@installed("bitsandbytes")
def test_a_recipe_s_model_is_packed_as_trl_packs_it(recipe: LoraRecipe) -> None:
    """On the host; products in the recipe's dtype; the output layer and all that is small as it was."""
    model = load_model(replace(recipe, load_in_4bit=True, use_bnb_nested_quant=True))
    packed = {n: p for n, p in model.named_parameters() if p.dtype is torch.uint8}
    assert len(packed) == 14 and all("_proj.base_layer.weight" in name for name in packed)
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    layer = model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj.base_layer")
    assert layer.compute_dtype is torch.bfloat16 and layer.weight.quant_state.nested
    assert layer.weight.quant_state.quant_type == "nf4"
    kept = {p.dtype for p in model.parameters() if not p.requires_grad and p.dtype is not torch.uint8}
    assert kept == {torch.bfloat16}
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}


@installed("bitsandbytes")
@pytest.mark.parametrize(
    "keys", [{"load_in_4bit": True, "use_bnb_nested_quant": True}, {"load_in_8bit": True}], ids=str
)
def test_a_recipe_of_packed_weights_trains_from_plans_to_eager_s_bits(
    keys: dict[str, Any], values: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three steps under less memory than all takes at once; ``plan`` had named about the least budget that works."""
    recipe = {**values, "dtype": "bfloat16", "max_steps": 3, "load_in_4bit": True, "use_bnb_nested_quant": True}
    disco = {"device": "cpu", "compute_threads": 1, "plan_cache": None}

    def run(name: str, budget: str | None) -> int:
        output = {"output_dir": str(tmp_path / name)}
        planned = {} if budget is None else {"disco_config": {**disco, "memory_budget": budget}}
        (tmp_path / "recipe.yaml").write_text(json.dumps({**recipe, **output, **planned}))
        return train([str(tmp_path / "recipe.yaml")])

    assert run("refused", "30KiB") == 2
    needed = int(capsys.readouterr().err.split("at least ")[1].split(" ")[0])
    assert main(["plan", "--json", str(tmp_path / "recipe.yaml"), "--device", "cpu"]) == 1
    assert json.loads(capsys.readouterr().out)["needed_bytes"] == pytest.approx(needed, rel=0.05)
    assert run("eager", None) == 0
    assert run("planned", str(needed * 5 // 4)) == 0
    metrics = json.loads((tmp_path / "planned" / METRICS_NAME).read_text())["disco"]
    assert (metrics["steps_compiled"], metrics["steps_eager"]) == (3, 0) and metrics["reload_bytes"] > 0
    eager, planned = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("eager", "planned"))
    assert eager.keys() == planned.keys() and all(torch.equal(eager[k], planned[k]) for k in eager)
