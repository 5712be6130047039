"""A recipe file is read strictly: what is wrong is named, with what would work."""

from __future__ import annotations

import pytest

from disco_accel.errors import ConfigError
from disco_accel.recipes.settings import _FREQUENT, _library_choices, parse_recipe, read_recipe

GOOD = {"model_name_or_path": "m", "dataset": "d.txt", "output_dir": "o", "max_steps": 3}


def test_a_recipe_with_the_four_needed_keys_is_complete():
    recipe = parse_recipe(GOOD)
    assert recipe.max_steps == 3
    assert recipe.lora_target_modules == "all-linear"


def test_frequent_names_are_those_of_the_library():
    for key, names in _FREQUENT.items():
        known = _library_choices(key, "another")
        assert known is not None and set(names) < set(known)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"learning_rat": 1e-4}, ["learning_rat", "'learning_rate'"]),
        ({"zzzz": 1}, ["zzzz", "known keys"]),
        ({"max_steps": "many"}, ["max_steps", "many", "int"]),
        ({"max_steps": True}, ["max_steps", "True"]),
        ({"max_steps": 0}, ["max_steps", "at least 1"]),
        ({"max_length": 1}, ["max_length", "at least 2"]),
        ({"lora_r": 0}, ["lora_r", "at least 1"]),
        ({"lora_dropout": 1.0}, ["lora_dropout", "less than 1"]),
        ({"learning_rate": -1.0}, ["learning_rate", "at least 0"]),
        ({"learning_rate": float("nan")}, ["learning_rate", "at least 0"]),
        ({"dtype": "bflaot16"}, ["dtype", "'bfloat16'"]),
        ({"adapter_dtype": "int8"}, ["adapter_dtype", "float32"]),
        ({"lora_target_modules": [1]}, ["lora_target_modules", "str or list"]),
        ({"dataset": ""}, ["dataset", "path"]),
        ({"packing": "yes please"}, ["packing", "bool"]),
        ({"disco_config": "12GiB"}, ["disco_config", "dict"]),
        ({"load_in_4bit": True, "load_in_8bit": True}, ["load_in_4bit", "load_in_8bit", "leave one out"]),
        ({"bnb_4bit_quant_type": "fp4"}, ["bnb_4bit_quant_type", "load_in_4bit: true"]),
        ({"use_bnb_nested_quant": True, "load_in_8bit": True}, ["use_bnb_nested_quant", "load_in_4bit: true"]),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf3"}, ["bnb_4bit_quant_type", "'nf4'"]),
        ({"load_in_4bit": "yes please"}, ["load_in_4bit", "bool"]),
        ({"loss": "dpu"}, ["loss", "did you mean 'dpo'"]),
        ({"beta": 0.2}, ["beta", "loss: dpo"]),
        ({"loss": "dpo", "beta": 0.0}, ["beta", "more than 0"]),
        ({"loss": "dpo", "beta": float("nan")}, ["beta", "more than 0"]),
        ({"loss": "dpo", "loss_type": "sigmoids"}, ["loss_type", "'sigmoid'"]),
        ({"loss": "dpo", "lora_dropout": 0.1}, ["lora_dropout", "set it to 0"]),
        ({"loss": "dpo", "packing": True}, ["packing", "leave it out"]),
        ({"loss": "dpo", "assistant_only_loss": True}, ["assistant_only_loss", "leave it out"]),
        ({"loss": "orpo", "completion_only_loss": False}, ["completion_only_loss", "leave it out"]),
        ({"loss": "orpo", "loss_type": "ipo"}, ["loss_type", "loss: dpo", "leave it out"]),
        ({"loss": "dpo", "desirable_weight": 2.0}, ["desirable_weight", "loss: kto", "leave it out"]),
        ({"loss": "kto", "undesirable_weight": -1.0}, ["undesirable_weight", "at least 0"]),
        ({"loss": "kto"}, ["per_device_train_batch_size", "loss: kto", "2 or more"]),
    ],
)
def test_a_wrong_key_or_value_is_named_with_what_would_work(change, words):
    with pytest.raises(ConfigError) as caught:
        parse_recipe({**GOOD, **change}, source="r.yaml")
    for word in ["r.yaml", *words]:
        assert word in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 2


def test_missing_keys_are_all_named():
    with pytest.raises(ConfigError, match=r"dataset, output_dir.* must be given"):
        parse_recipe({"model_name_or_path": "m", "max_steps": 1})


@pytest.mark.parametrize("written", ["2e-4", "0.0002", "2.0e-4"])
def test_a_number_is_a_number_however_yaml_reads_it(tmp_path, written):
    file = tmp_path / "r.yaml"
    lines = [f"{key}: {value}" for key, value in GOOD.items()]
    file.write_text("\n".join([*lines, f"learning_rate: {written}"]))
    assert read_recipe(file).learning_rate == 2e-4


def test_overrides_replace_keys_and_are_checked_too(tmp_path):
    file = tmp_path / "r.yaml"
    file.write_text("\n".join(f"{key}: {value}" for key, value in GOOD.items()))
    assert read_recipe(file, {"max_steps": 7}).max_steps == 7
    with pytest.raises(ConfigError, match="max_steps"):
        read_recipe(file, {"max_steps": -7})


@pytest.mark.parametrize(
    "text", ["", "- a\n- b\n", "a: [1\n", "max_steps: 1\nmax_steps: 2\n", "a: !!python/object:os.system {}\n"]
)
def test_a_file_that_is_no_plain_mapping_is_refused(tmp_path, text):
    file = tmp_path / "r.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"r\.yaml"):
        read_recipe(file)


@pytest.mark.parametrize("name", ["lora_demo.yaml", "lora_7b.yaml"])
def test_the_recipes_that_ship_are_valid(name, request):
    recipe = read_recipe(request.config.rootpath / "configs" / name)
    assert recipe.gradient_checkpointing
