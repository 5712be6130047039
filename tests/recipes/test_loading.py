"""A loaded model has aligned weights of its own, an adapter in the asked dtype, and checkpointing as asked."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from benchmarks.demo.make_checkpoint import Shape, write_checkpoint
from disco_accel import DiscoConfig, prepare, restore
from disco_accel.errors import ConfigError
from disco_accel.integrate.hf.checkpoint import load_into_arena
from disco_accel.recipes.loading import load_model
from disco_accel.recipes.settings import parse_recipe

PEAK = Path(__file__).with_name("peak_of_loading.py")


@pytest.mark.parametrize("adapter_dtype", ["float32", "bfloat16"])
def test_the_base_keeps_the_checkpoints_dtype_and_the_adapter_gets_its_own(values, adapter_dtype):
    model = load_model(parse_recipe({**values, "adapter_dtype": adapter_dtype}))
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}
    assert {str(p.dtype) for p in model.parameters() if p.requires_grad} == {f"torch.{adapter_dtype}"}


def test_every_weight_is_aligned_wherever_the_file_has_it(values):
    assert all(p.data_ptr() % 64 == 0 for p in load_model(parse_recipe(values)).parameters())


@pytest.mark.parametrize("on", [True, False])
def test_checkpointing_is_as_the_recipe_says(values, on):
    model = load_model(parse_recipe({**values, "gradient_checkpointing": on}))
    layers = [m for m in model.modules() if hasattr(m, "gradient_checkpointing")]
    assert layers
    assert any(layer.gradient_checkpointing for layer in layers) is on


def test_all_linear_reaches_every_projection_but_the_head(values):
    names = {n.split(".")[-4] for n, p in load_model(parse_recipe(values)).named_parameters() if p.requires_grad}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize("dtype", ["auto", "float32", "float16"])
def test_a_model_read_into_an_arena_is_the_one_that_transformers_loads(checkpoint, dtype):
    """Names, bits, dtypes, buffers, mode and generation settings."""
    ours = load_into_arena(checkpoint, dtype=dtype)
    theirs = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype)
    for read in (lambda model: model.state_dict(), lambda model: dict(model.named_buffers())):
        got, wanted = read(ours), read(theirs)
        assert list(got) == list(wanted)
        assert all(torch.equal(got[k], wanted[k]) and got[k].dtype is wanted[k].dtype for k in wanted)
    assert (ours.training, ours.dtype, ours.name_or_path) == (theirs.training, theirs.dtype, theirs.name_or_path)
    assert ours.generation_config.to_dict() == theirs.generation_config.to_dict()


def test_prepare_leaves_weights_of_an_arena_where_they_are(values):
    """Also restore() does; without an arena they move into one, and tied weights stay tied either way."""
    model = load_model(parse_recipe(values))
    before = {n: p.data_ptr() for n, p in model.named_parameters() if not p.requires_grad}
    prepare(model, DiscoConfig(memory_budget="1GiB", device="cpu"))
    assert before == {n: p.data_ptr() for n, p in model.named_parameters() if not p.requires_grad}
    restore(model)
    assert before == {n: p.data_ptr() for n, p in model.named_parameters() if not p.requires_grad}


def tied(directory: Path, **changes) -> Path:
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=48,
        tie_word_embeddings=True, **changes,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def test_tied_weights_are_one_tensor(tmp_path):
    model = load_into_arena(tied(tmp_path))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.model.embed_tokens.weight.abs().sum() > 0


def rewrite(directory: Path, change) -> Path:
    """The file with its header changed by ``change``; the data stays."""
    file = directory / "model.safetensors"
    raw = file.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])
    return directory


NORM = "model.norm.weight"
FAULTS = {
    "unknown dtype": (lambda h: h[NORM].update(dtype="F4"), rf"{NORM}: dtype 'F4' is unknown"),
    "wrong size": (lambda h: h[NORM].update(shape=[33]), rf"{NORM}: F32 of shape \[33\] has 132 bytes, .* 128"),
    "no shape": (lambda h: h[NORM].pop("shape"), rf"{NORM}: lacks dtype, shape or data_offsets"),
    "negative": (lambda h: h[NORM].update(shape=[-32]), rf"{NORM}: shape \[-32\] .* makes no sense"),
    "behind the end": (
        lambda h: h[NORM].update(data_offsets=[1 << 40, (1 << 40) + 128]),
        rf"{NORM}: ends \d+ bytes behind",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_header_that_lies_is_refused_with_file_and_tensor(tmp_path, fault):
    change, message = FAULTS[fault]
    with pytest.raises(ConfigError, match=rf"model\.safetensors: tensor {message}"):
        load_into_arena(rewrite(tied(tmp_path), change))


def test_another_shape_than_the_configs_is_refused(tmp_path):
    directory = tied(tmp_path)
    tensors = load_file(directory / "model.safetensors")
    save_file({**tensors, NORM: torch.ones(16)}, directory / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"tensor {NORM} has shape \[16\], the model's config.json makes it \[32\]"):
        load_into_arena(directory)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a whole safetensors file"),
        (b"\x05\0\0\0\0\0\0\0{nope", "its header is no JSON"),
        (b"\xff" * 64, "not a whole"),
    ],
    ids=["empty", "no JSON", "no length"],
)
def test_a_file_that_is_no_safetensors_is_named(tmp_path, content, message):
    (tied(tmp_path) / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=rf"model\.safetensors: {message}"):
        load_into_arena(tmp_path)


def test_a_missing_shard_or_a_cut_one_is_named(checkpoint, tmp_path):
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-10])
    with pytest.raises(ConfigError, match=rf"{shard.name}: tensor \S+: ends 10 bytes behind the end of the file"):
        load_into_arena(tmp_path)
    shard.unlink()
    with pytest.raises(ConfigError, match=f"lacks {shard.name}"):
        load_into_arena(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(shard.name, "../" + shard.name))
    with pytest.raises(ConfigError, match="which is no file beside it"):
        load_into_arena(tmp_path)


def test_a_checkpoint_with_other_names_is_left_to_transformers(tmp_path):
    directory = tied(tmp_path)
    tensors = load_file(directory / "model.safetensors")
    save_file({f"other.{name}": t for name, t in tensors.items()}, directory / "model.safetensors")
    assert load_into_arena(directory) is None


def peak(way: str, directory: Path, dtype: str) -> dict[str, int]:
    command = [sys.executable, str(PEAK), way, str(directory), dtype]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, check=False, cwd=PEAK.parents[2])
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    """423 MB of bf16 in five shards."""
    directory = tmp_path_factory.mktemp("large") / "checkpoint"
    write_checkpoint(directory, Shape(num_hidden_layers=28, vocab_size=8192), shard_size="100MB")
    return directory


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_loading_peaks_at_the_weights_and_five_percent(large, dtype):
    """Resident memory at its highest, mapped files included, from the imports on; also where the dtype changes."""
    found = peak("arena", large, dtype)
    assert found["weights"] <= found["peak"] <= 1.05 * found["weights"]


@pytest.mark.long
def test_the_measurement_of_the_peak_sees_a_second_copy(large):
    found = peak("twice", large, "bfloat16")
    assert found["peak"] >= 1.9 * found["weights"]


def test_the_files_are_those_that_transformers_takes(checkpoint, tmp_path):
    """One file beside an index of older shards; and a config that names another, which is left to transformers."""
    directory = shutil.copytree(checkpoint, tmp_path / "both")
    assert (directory / "model.safetensors.index.json").is_file()
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory)).save_pretrained(tmp_path / "new")
    shutil.copy(tmp_path / "new" / "model.safetensors", directory)
    ours, theirs = load_into_arena(directory), AutoModelForCausalLM.from_pretrained(directory)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"transformers_weights": "other.safetensors"}))
    assert load_into_arena(directory) is None
