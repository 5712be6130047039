"""Parts of packed weights that do not fit each other are refused with file and tensor, before the library sees them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from disco_accel.errors import ConfigError
from disco_accel.integrate.hf.checkpoint import load_into_arena
from disco_accel.integrate.hf.checkpoint_files import checkpoint_tensors
from disco_accel.integrate.hf.packed_checkpoint import has_loader
from disco_accel.quantised.bitsandbytes import BITSANDBYTES

WEIGHT = "q_proj.weight"
STATE = f"{WEIGHT}.quant_state.bitsandbytes__nf4"
SHAPES = {WEIGHT: (64, 96), "k_proj.weight": (64, 64), "norm.weight": (64,)}
Tensors = dict[str, torch.Tensor]


def state(**changes: object) -> torch.Tensor:
    """As bitsandbytes writes it: JSON in bytes."""
    offset = torch.tensor(0.0123).item()
    said = {
        "quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [64, 96],
        "nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset,
    }  # fmt: skip
    said = {key: value for key, value in (said | changes).items() if value is not None}
    return torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)


def whole() -> Tensors:
    """A weight of 4 bits with packed scales, one of 8 bits, and one that is not packed."""
    return {
        WEIGHT: torch.zeros(64 * 96 // 2, 1, dtype=torch.uint8),
        f"{WEIGHT}.absmax": torch.zeros(96, dtype=torch.uint8),
        f"{WEIGHT}.quant_map": torch.zeros(16),
        f"{WEIGHT}.nested_absmax": torch.zeros(1),
        f"{WEIGHT}.nested_quant_map": torch.zeros(256),
        STATE: state(),
        "k_proj.weight": torch.zeros(64, 64, dtype=torch.int8),
        "k_proj.SCB": torch.zeros(64),
        "k_proj.weight_format": torch.tensor(0, dtype=torch.uint8),
        "norm.weight": torch.zeros(64, dtype=torch.bfloat16),
    }


def check(directory: Path, tensors: Tensors) -> None:
    save_file(tensors, directory / "model.safetensors")
    BITSANDBYTES.check_stored(checkpoint_tensors(directory), SHAPES)


def test_parts_that_fit_pass(tmp_path: Path) -> None:
    check(tmp_path, whole())
    plain = state(nested_blocksize=None, nested_dtype=None, nested_offset=None)
    kept = {name: tensor for name, tensor in whole().items() if "nested" not in name}
    check(tmp_path, {**kept, STATE: plain, f"{WEIGHT}.absmax": torch.zeros(96)})


def without(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def put(name: str, tensor: torch.Tensor) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: tensor})


FAULTS = {
    "no scales": (without(f"{WEIGHT}.absmax"), rf"{STATE}: {WEIGHT}\.absmax is missing"),
    "no table": (without(f"{WEIGHT}.quant_map"), rf"{STATE}: {WEIGHT}\.quant_map is missing"),
    "no scales of scales": (without(f"{WEIGHT}.nested_absmax"), rf"{STATE}: {WEIGHT}\.nested_absmax is missing"),
    "no weight": (without(WEIGHT), rf"{STATE}: {WEIGHT} is missing"),
    "no state": (without(STATE), rf"{WEIGHT}\.\w+: is part of a packed weight, and {WEIGHT} has no quant_state"),
    "few scales": (put(f"{WEIGHT}.absmax", torch.zeros(95, dtype=torch.uint8)), r"absmax: has 95 bytes of torch.uint8"),
    "scales of another type": (put(f"{WEIGHT}.absmax", torch.zeros(96)), r"absmax: has 384 bytes of torch.float32"),
    "short weight": (
        put(WEIGHT, torch.zeros(3071, 1, dtype=torch.uint8)),
        rf"{WEIGHT}: has 3071 bytes .* makes them 3072",
    ),
    "nested parts too many": (
        put(STATE, state(nested_blocksize=None, nested_dtype=None, nested_offset=None)),
        r"absmax: has 96 bytes of torch.uint8, .* 384 bytes of torch.float32",
    ),
    "another shape": (put(STATE, state(shape=[96, 65])), r"shape is \[96, 65\], .*config.json makes it \[64, 96\]"),
    "two states": (put(STATE.replace("nf4", "fp4"), state(quant_type="fp4")), r"is a second quant_state beside"),
    "another key": (put(STATE, state(extra=1)), r"has \[.*'extra'"),
    "no JSON": (put(STATE, torch.zeros(9, dtype=torch.uint8)), rf"{STATE}: is no JSON"),
    "surplus": (put("v_proj.weight.absmax", torch.zeros(3)), r"v_proj.weight.absmax: is part of a packed weight"),
    "8 bits without scales": (without("k_proj.SCB"), r"k_proj.weight: has 8 bits, and k_proj.SCB is missing"),
    "few scales of 8 bits": (put("k_proj.SCB", torch.zeros(63)), r"k_proj.SCB: has shape \[63\]"),
    "scales of no weight": (put("v_proj.SCB", torch.zeros(3)), r"v_proj.SCB: is part of a packed weight"),
    "columns": (put("k_proj.weight_format", torch.tensor(1, dtype=torch.uint8)), r"weight_format: is not 0"),
    "8 bits of another shape": (
        lambda tensors: tensors.update({"k_proj.weight": torch.zeros(64, 63, dtype=torch.int8)}),
        r"k_proj.weight: has shape \[64, 63\]",
    ),
    "a plain weight of another shape": (put("norm.weight", torch.zeros(63)), r"norm.weight: has shape \[63\]"),
    "packed without anything": (put("norm.weight", torch.zeros(64, dtype=torch.uint8)), r"norm.weight: is packed"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_with_file_and_tensor(tmp_path: Path, fault: str) -> None:
    change, message = FAULTS[fault]
    tensors = whole()
    change(tensors)
    with pytest.raises(ConfigError, match=rf"model\.safetensors: tensor .*{message}"):
        check(tmp_path, tensors)


def test_every_bit_of_a_quant_state_counts(tmp_path: Path) -> None:
    """Flipped one at a time; digits of the offset too, which bitsandbytes writes in full."""
    check(tmp_path, whole())
    stored = checkpoint_tensors(tmp_path)
    tensor = stored[STATE]
    text = state().numpy().tobytes()
    with tensor.file.open("r+b", buffering=0) as file:
        for at in range(tensor.nbytes):
            for bit in range(8):
                file.seek(tensor.offset + at)
                file.write(bytes([text[at] ^ 1 << bit]))
                with pytest.raises(ConfigError, match=rf"model\.safetensors: tensor {WEIGHT}"):
                    BITSANDBYTES.check_stored(stored, SHAPES)
            file.seek(tensor.offset + at)
            file.write(text[at : at + 1])
    BITSANDBYTES.check_stored(stored, SHAPES)


def test_a_library_that_is_not_there_is_named_as_pip_calls_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is read, by what the checkpoint's config or the caller says."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    written = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    config = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, quantization_config=written)
    config.save_pretrained(tmp_path)
    save_file({"norm.weight": torch.ones(32)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"bitsandbytes packs these weights, and is not installed: pip install bits"):
        load_into_arena(tmp_path)
    with pytest.raises(ConfigError, match="pip install optimum-quanto"):
        has_loader(LlamaConfig(), {"quant_method": "quanto", "weights": "int8"})


@pytest.mark.parametrize("method", ["gptq", "mxfp4", "of the future"])
def test_other_forms_are_left_to_transformers(method: str) -> None:
    assert not has_loader(LlamaConfig(quantization_config={"quant_method": method}))
    assert not has_loader(LlamaConfig(), {"quant_method": "torchao", "dequantize": True})


def test_a_packed_weight_without_its_scales_is_no_model(tmp_path: Path) -> None:
    """What libraries make of a checkpoint and a config of two forms."""

    class Params4bit(torch.nn.Parameter):
        quant_state: object = None

    layer = torch.nn.Linear(8, 8)
    layer.weight = Params4bit(torch.zeros(32, 1, dtype=torch.uint8), requires_grad=False)
    model = torch.nn.Sequential(layer)
    with pytest.raises(ConfigError, match=r"0\.weight is a Params4bit of shape \[32, 1\] whose scales are missing"):
        BITSANDBYTES.check_loaded(tmp_path, model)
    layer.weight.quant_state = SimpleNamespace(shape=(8, 8), absmax=torch.zeros(1), blocksize=64)
    BITSANDBYTES.check_loaded(tmp_path, model)
    layer.weight.quant_state = SimpleNamespace(shape=(8, 8), absmax=torch.zeros(2), blocksize=64)
    with pytest.raises(ConfigError, match="do not fit its layer"):
        BITSANDBYTES.check_loaded(tmp_path, model)
