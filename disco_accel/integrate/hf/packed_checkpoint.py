"""Packed weights into a host arena, one by one: packed as they are read, or read as they were packed.

transformers and the library do the work: which layers, how, what the model is like. What is here gives them the
checkpoint tensor by tensor, and moves each parameter into the arena when it is made.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.quantizers.auto import AutoHfQuantizer

from disco_accel.config.hf_environment import transformers_reads_in_turn
from disco_accel.errors import ConfigError
from disco_accel.integrate.hf.adopted_parameters import adopt_rest, freed_at_once, parameters_adopted
from disco_accel.integrate.hf.packed_sizes import room_when_packed
from disco_accel.integrate.hf.safetensors_file import LazyTensor, StoredTensor
from disco_accel.integrate.hf.unmapped_files import files_read_unmapped
from disco_accel.native.host_memory import ALIGNMENT, HostMemory
from disco_accel.quantised.libraries import library_of_config, value_of
from disco_accel.step.placement.model_placement import keep_arena

_ON_HOST = {"": "cpu"}


def has_loader(config: Any, quantization_config: Any = None) -> bool:
    """Whether ``load_packed`` loads the form that a checkpoint's ``config`` names, or the one that is asked for.

    Raises:
        ConfigError: it would, but the library is not installed.
    """
    stored = getattr(config, "quantization_config", None)
    library = library_of_config(quantization_config if stored is None else stored)
    if library is None or value_of(quantization_config, "dequantize") or value_of(stored, "dequantize"):
        return False
    if not _installed(library.module):
        raise ConfigError(
            f"quantization_config: {library.quant_method} packs these weights, and is not installed: pip install "
            f"{library.package}"
        )
    return True


def load_packed(
    directory: Path,
    config: Any,
    stored: Mapping[str, StoredTensor],
    quantization_config: Any,
    options: dict[str, Any],
) -> Any:
    """The model of a checkpoint for which ``has_loader`` is true, its parameters in one host arena, in eval mode.

    ``stored``: its tensors. ``options``: ``dtype``, a torch.dtype, and what else ``from_pretrained`` is told.

    Raises:
        ConfigError: a tensor is missing or cut short, the parts of a packed weight do not fit each other, or
            transformers wants another version of the library.
    """
    try:
        with freed_at_once():
            return _loaded(directory, config, stored, quantization_config, options)
    except ImportError as error:
        raise ConfigError(f"quantization_config: {error}") from error


def _loaded(
    directory: Path,
    config: Any,
    stored: Mapping[str, StoredTensor],
    quantization_config: Any,
    options: dict[str, Any],
) -> Any:
    plain = _on_meta(config, options)
    before = getattr(config, "quantization_config", None)
    library = library_of_config(quantization_config if before is None else before)
    assert library is not None
    if before is None:
        quantizer = AutoHfQuantizer.from_config(quantization_config, pre_quantized=False)
        quantizer.validate_environment(device_map=_ON_HOST)
        room = room_when_packed(plain, quantizer, options["dtype"])
    else:
        library.check_stored(stored, {name: tuple(p.shape) for name, p in plain.named_parameters()})
        room = _room_as_stored(stored, options["dtype"])
    memory = HostMemory(room)
    told = {**options, "device_map": _ON_HOST, "output_loading_info": True}
    if quantization_config is not None:
        told["quantization_config"] = quantization_config
    with parameters_adopted(memory), transformers_reads_in_turn():
        if before is not None and library.needs_headers:
            with files_read_unmapped(stored.values()):
                model, info = type(plain).from_pretrained(directory, **told)
        else:
            tensors = {name: LazyTensor(tensor) for name, tensor in stored.items()}
            model, info = type(plain).from_pretrained(None, config=config, state_dict=tensors, **told)
    adopt_rest(model, memory)
    _require_whole(directory, info)
    library.check_loaded(directory, model)
    model.name_or_path = model.config.name_or_path = str(directory)
    if (directory / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory)
    keep_arena(model, memory)
    return model


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _on_meta(config: Any, options: dict[str, Any]) -> Any:
    with init_empty_weights(include_buffers=False):
        return AutoModelForCausalLM.from_config(config, **options)


def _room_as_stored(stored: Mapping[str, StoredTensor], dtype: torch.dtype) -> int:
    """Bytes of an arena for all that the files hold, where tensors that are not packed are of the wider data type."""
    total = 0
    for tensor in stored.values():
        # A tensor of one byte a number is part of a packed weight, also where these are fractions.
        wider = max(tensor.dtype.itemsize, dtype.itemsize if tensor.dtype.itemsize > 1 else 1)
        nbytes = tensor.nbytes // tensor.dtype.itemsize * wider
        # A quant_state, whose bytes are no part, stands for the offset in it, which is one.
        total += -(-nbytes // ALIGNMENT) * ALIGNMENT
    return total


def _require_whole(directory: Path, info: Mapping[str, Any]) -> None:
    missing = sorted(info["missing_keys"])
    if missing:
        raise ConfigError(f"{directory}: lacks {len(missing)} tensors, the first is {missing[0]}")
    for name, found, wanted in sorted(info["mismatched_keys"]):
        raise ConfigError(
            f"{directory}: tensor {name} has shape {list(found)}, the model's config.json makes it {list(wanted)}"
        )
