"""Names of models: presets have the published shapes, and a wrong name is refused without trying a network for long."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from transformers import AutoModelForCausalLM

from disco_accel.errors import ConfigError
from disco_accel.recipes import model_names
from disco_accel.recipes.model_names import find_model, preset_names
from disco_accel.recipes.outline import model_config

ROOT = Path(__file__).resolve().parents[2]
ROWS: dict[str, Any] = json.loads((ROOT / "recipes" / "data" / "presets.json").read_text())["presets"]


def parameters(name: str, layers: int) -> int:
    found = find_model(name)
    config = model_config(found)
    config.num_hidden_layers = layers
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=found.attention or "sdpa")
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", ROWS)
def test_a_preset_has_as_many_parameters_as_were_published(name: str) -> None:
    """All layers of these models have equally many, so that two are enough to count those of all."""
    one, two = parameters(name, 1), parameters(name, 2)
    layers = ROWS[name]["config"]["num_hidden_layers"]
    assert one + (layers - 1) * (two - one) == ROWS[name]["parameters"]


def test_a_preset_is_found_by_its_names_on_the_hub() -> None:
    assert preset_names() == tuple(ROWS)
    for name, row in ROWS.items():
        assert row["hub"], name
        for hub in row["hub"]:
            assert find_model(hub).config == find_model(name.upper()).config == row["config"]
            assert find_model(hub).source == f"preset {name}"


def test_a_folder_comes_before_a_preset_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen3-8b").mkdir()
    (tmp_path / "qwen3-8b" / "config.json").write_text('{"model_type": "llama"}')
    found = find_model("qwen3-8b")
    assert found.config == {"model_type": "llama"} and found.folder == Path("qwen3-8b")


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "it has no config.json"), ("{", "config.json: Expecting"), ("[]", "config.json holds no object")],
)
def test_a_folder_without_a_config_is_refused(content: str | None, reason: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=f"--model: {tmp_path}: has no config that can be read: {reason}"):
        find_model(str(tmp_path), "--model")


@pytest.mark.parametrize(
    ("name", "hint"),
    [("qwen3-8", "did you mean qwen3-8b?"), ("Qwen/Qwen3-15B", "did you mean qwen3-14b?"), ("/no/such", "Presets: ")],
)
@pytest.mark.parametrize("offline", [False, True])
def test_a_name_that_nothing_has_is_refused_with_the_presets(
    name: str, hint: str, offline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the hub does not answer its client, which tries for half a minute, is not asked."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(model_names, "getproxies", dict)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_, **__: pytest.fail("the network was tried"))
    with pytest.raises(ConfigError, match=r"Presets: llama-2-7b, llama-3\.1-8b, ") as refused:
        find_model(name)
    assert hint in str(refused.value)
    if offline and not name.startswith("/"):
        assert "HF_HUB_OFFLINE" in str(refused.value)


def test_a_name_in_the_hub_s_cache_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: str(tmp_path / "config.json"))
    found = find_model("some/model")
    assert found.config == {"model_type": "gpt2"} and found.folder == tmp_path and "cache" in found.source
