"""Packed weights into a host arena, one by one: packed as they are read, or read as they were packed.

transformers and the library choose the layers, pack them and build the model. The functions here give them the
checkpoint tensor by tensor, and move each parameter into the arena when it is made.
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

from disco_accel.capture.parts import leaves
from disco_accel.config.hf_environment import transformers_reads_in_turn
from disco_accel.errors import ConfigError
from disco_accel.integrate.hf.adopted_parameters import adopt_rest, freed_at_once, parameters_adopted
from disco_accel.integrate.hf.safetensors_file import StoredTensor, files_read_unmapped
from disco_accel.native.host_memory import ALIGNMENT, HostMemory, place
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

    ``stored``: its tensors. ``options``: of ``from_pretrained``, ``dtype``, a torch.dtype, among them.

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
        room = _room_when_packed(plain, quantizer, options["dtype"])
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
            model, info = type(plain).from_pretrained(None, config=config, state_dict=dict(stored), **told)
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


def _room_when_packed(model: Any, quantizer: Any, dtype: torch.dtype) -> int:
    """Bytes of an arena for the parameters of ``model``, which is on ``meta`` and gets the quantizer's layers here.
    Weights that are packed are of ``dtype`` before.

    Sizes are the library's own: of each shape one weight, of ones, is packed.
    """
    quantizer.preprocess_model(model=model, device_map=_ON_HOST, dtype=dtype, checkpoint_files=None)
    model.tie_weights()
    known: dict[tuple[Any, ...], int] = {}
    total = 0
    for name, parameter in list(model.named_parameters()):
        if not quantizer.param_needs_quantization(model, name):
            like = torch.empty(parameter.shape, dtype=_loaded_as(model, name, parameter, dtype), device="meta")
            total += HostMemory.room_for([like])
            continue
        module = model.get_submodule(name.rpartition(".")[0])
        kind = type(module), tuple(parameter.shape), parameter.dtype
        if kind not in known:
            known[kind] = _room_of_one(model, quantizer, name, dtype)
        total += known[kind]
    return total


def _loaded_as(model: Any, name: str, parameter: torch.Tensor, dtype: torch.dtype) -> torch.dtype:
    """Not the data type on ``meta``: new layers have PyTorch's default there."""
    if not parameter.is_floating_point():
        return parameter.dtype
    lists = (getattr(model, key, None) or () for key in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"))
    return torch.float32 if any(kept in name for names in lists for kept in names) else dtype


def _room_of_one(model: Any, quantizer: Any, name: str, dtype: torch.dtype) -> int:
    path, _, key = name.rpartition(".")
    module = model.get_submodule(path)
    shape = module._parameters[key].shape
    # Layers that are stored with inputs first are turned before they are packed.
    ones = torch.ones(shape[::-1] if _inputs_first(module) else shape, dtype=dtype)
    made = quantizer.get_quantize_ops().convert({name: [ones]}, model=model, full_layer_name=name, missing_keys=set())
    packed = made.get(name)
    if packed is None:
        packed = module._parameters[key]
    # One view of the same bytes is one part, as it will be in the arena.
    distinct = {place(leaf): leaf for _, leaf in leaves(packed[0] if isinstance(packed, list) else packed)}
    return HostMemory.room_for(list(distinct.values()))


def _inputs_first(module: torch.nn.Module) -> bool:
    return getattr(getattr(module, "source_cls", None), "__name__", "") == "Conv1D"


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
