"""Whether the parts of bitsandbytes' packed weights fit each other, in the files and in the model made of them.

The library takes what it finds: with a block size that is off by a bit it computes other numbers, or reads behind a
scale's end.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from disco_accel.capture.parts import packed_beside_state
from disco_accel.errors import ConfigError
from disco_accel.integrate.hf.safetensors_file import LazyTensor, StoredTensor

_STATE = re.compile(r"(?P<weight>.+)\.quant_state\.bitsandbytes__(?P<form>\w+)")
_BESIDE_4BIT = re.compile(r"(?P<weight>.+)\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.\w+)")
_BESIDE_8BIT = re.compile(r"(?P<layer>.+)\.(SCB|weight_format)")
_FORMS = ("nf4", "fp4")
_BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Numbers under one scale that bitsandbytes has kernels for."""
_PLAIN_KEYS = {"quant_type", "blocksize", "dtype", "shape"}
_NESTED_KEYS = {"nested_blocksize", "nested_dtype", "nested_offset"}
_DTYPES = ("float16", "bfloat16", "float32")
_LAYERS = frozenset(("Linear4bit", "Linear8bitLt"))
_CODE = 16
"""Values of four bits."""
_NESTED_CODE = 256


def check_stored(stored: Mapping[str, StoredTensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check all packed weights of a checkpoint. ``shapes``: name → shape of the model's parameters before packing.

    Raises:
        ConfigError: a part is missing, has no weight, is no part of that form, or has another shape or type than the
            others say; names file and tensor.
    """
    states = {match["weight"]: (match["form"], stored[name]) for name in stored if (match := _STATE.fullmatch(name))}
    for name, tensor in stored.items():
        beside = _BESIDE_4BIT.fullmatch(name)
        if beside and beside["weight"] not in states:
            raise _wrong(tensor, f"is part of a packed weight, and {beside['weight']} has no quant_state")
        if beside and name.count("quant_state") and states[beside["weight"]][1] is not tensor:
            raise _wrong(tensor, f"is a second quant_state beside {states[beside['weight']][1].name}")
        layer = _BESIDE_8BIT.fullmatch(name)
        if layer and not _in_8_bits(stored, f"{layer['layer']}.weight"):
            raise _wrong(tensor, f"is part of a packed weight, and {layer['layer']}.weight is none of 8 bits")
    for weight, (form, tensor) in states.items():
        _check_4bit(stored, weight, form, tensor, shapes.get(weight))
    for name in stored:
        if name not in states and (name in shapes or _in_8_bits(stored, name)):
            _check_unpacked_or_8bit(stored, name, shapes.get(name))


def _in_8_bits(stored: Mapping[str, StoredTensor], name: str) -> bool:
    return name in stored and stored[name].dtype is torch.int8


def _check_4bit(
    stored: Mapping[str, StoredTensor], weight: str, form: str, tensor: StoredTensor, shape: tuple[int, ...] | None
) -> None:
    state = _state(tensor)
    if form not in _FORMS or state["quant_type"] != form:
        raise _wrong(tensor, f"quant_type is {state['quant_type']!r}; it is one of {_FORMS} and in the tensor's name")
    nested = not _NESTED_KEYS.isdisjoint(state)
    for key in ("blocksize", "nested_blocksize") if nested else ("blocksize",):
        if type(state[key]) is not int or state[key] not in _BLOCKS:
            raise _wrong(tensor, f"{key} is {state[key]!r}; bitsandbytes has kernels for {_BLOCKS}")
    if state["dtype"] not in _DTYPES:
        raise _wrong(tensor, f"dtype is {state['dtype']!r}; it is one of {_DTYPES}")
    if nested and (state["nested_dtype"] != "float32" or not _is_float32(state["nested_offset"])):
        written = f"nested_offset is {state['nested_offset']!r} of {state['nested_dtype']!r}"
        raise _wrong(tensor, f"{written}; it is a number of float32")
    given = state["shape"]
    if not isinstance(given, list) or not all(type(size) is int and size > 0 for size in given):
        raise _wrong(tensor, f"shape is {given!r}, which is none")
    if shape is not None and tuple(given) not in (shape, shape[::-1]):
        raise _wrong(tensor, f"shape is {given}, the model's config.json makes it {list(shape)}")
    numbers = math.prod(given)
    scales = -(-numbers // state["blocksize"])
    _part(stored, tensor, weight, -(-numbers // 2), None)
    _part(stored, tensor, f"{weight}.quant_map", _CODE * 4, torch.float32)
    if not nested:
        _part(stored, tensor, f"{weight}.absmax", scales * 4, torch.float32)
        for name in (f"{weight}.nested_absmax", f"{weight}.nested_quant_map"):
            if name in stored:
                raise _wrong(stored[name], f"is one too many: {tensor.name} says that scales are not packed")
        return
    _part(stored, tensor, f"{weight}.absmax", scales, torch.uint8)
    _part(stored, tensor, f"{weight}.nested_absmax", -(-scales // state["nested_blocksize"]) * 4, torch.float32)
    _part(stored, tensor, f"{weight}.nested_quant_map", _NESTED_CODE * 4, torch.float32)


def _state(tensor: StoredTensor) -> dict[str, Any]:
    """What a quant_state says, with exactly the keys that there are, each once."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in pairs}) != len(pairs):
            raise ValueError("it has a key twice")
        return dict(pairs)

    if tensor.dtype is not torch.uint8:
        raise _wrong(tensor, f"has data type {tensor.dtype}; it is JSON in bytes of uint8")
    try:
        state = json.loads(bytes(LazyTensor(tensor)[...].tolist()).decode("ascii"), object_pairs_hook=once)
    except ValueError as error:
        raise _wrong(tensor, f"is no JSON ({error})") from error
    if not isinstance(state, dict) or set(state) not in (_PLAIN_KEYS, _PLAIN_KEYS | _NESTED_KEYS):
        keys = sorted(state) if isinstance(state, dict) else type(state).__name__
        raise _wrong(tensor, f"has {keys}; it has {sorted(_PLAIN_KEYS)}, and {sorted(_NESTED_KEYS)} or none of these")
    return state


def _is_float32(value: Any) -> bool:
    """Whether a float32 was written as ``value``: a digit that changed makes it a number that needs more bits."""
    if type(value) is not float or not math.isfinite(value):
        return False
    try:
        return bool(torch.tensor(value, dtype=torch.float32).item() == value)
    except RuntimeError:
        return False


def _part(
    stored: Mapping[str, StoredTensor], state: StoredTensor, name: str, nbytes: int, dtype: torch.dtype | None
) -> None:
    if name not in stored:
        raise _wrong(state, f"{name} is missing in the checkpoint")
    tensor = stored[name]
    if tensor.nbytes != nbytes or dtype not in (None, tensor.dtype):
        wanted = f"{nbytes} bytes" + ("" if dtype is None else f" of {dtype}")
        raise _wrong(tensor, f"has {tensor.nbytes} bytes of {tensor.dtype}, {state.name} makes them {wanted}")


def _check_unpacked_or_8bit(stored: Mapping[str, StoredTensor], name: str, shape: tuple[int, ...] | None) -> None:
    tensor = stored[name]
    if tensor.dtype is torch.int8:
        scales = stored.get(f"{name.removesuffix('.weight')}.SCB")
        if scales is None:
            raise _wrong(tensor, f"has 8 bits, and {name.removesuffix('.weight')}.SCB is missing in the checkpoint")
        if scales.shape != tensor.shape[:1] or scales.dtype is not torch.float32:
            found = f"has shape {list(scales.shape)} of {scales.dtype}"
            raise _wrong(scales, f"{found}, {name} makes it {list(tensor.shape[:1])} of float32")
        written = stored.get(f"{name}_format")
        if written is not None and (written.nbytes != 1 or LazyTensor(written)[...].item() != 0):
            raise _wrong(written, "is not 0: bitsandbytes reads weights in rows alone; save the checkpoint again")
    elif shape is not None and not tensor.dtype.is_floating_point:
        raise _wrong(tensor, f"is packed ({tensor.dtype}), and its quant_state is missing in the checkpoint")
    if shape is not None and tensor.shape not in (shape, shape[::-1]):
        raise _wrong(tensor, f"has shape {list(tensor.shape)}, the model's config.json makes it {list(shape)}")


def check_loaded(directory: Path, model: torch.nn.Module) -> None:
    """Check that all packed weights of a model have their scales, as many as the layer's shape says.

    Raises:
        ConfigError: names the weight.
    """
    for name, module, weight in _packed(model):
        state = getattr(weight, "quant_state", None)
        scales = getattr(weight, "SCB", None)
        whole = False
        if state is not None:
            whole = (
                tuple(state.shape) == (module.out_features, module.in_features)
                and weight.nbytes == -(-math.prod(state.shape) // 2)
                and state.absmax.numel() == -(-math.prod(state.shape) // state.blocksize)
            )
        elif scales is not None:
            whole = weight.shape == (module.out_features, module.in_features) and scales.shape == weight.shape[:1]
        elif getattr(weight, "has_fp16_weights", False):
            whole = weight.dtype.is_floating_point
        if not whole:
            raise ConfigError(
                f"{directory}: {name} is a {type(weight).__name__} of shape {list(weight.shape)} whose scales are "
                "missing or do not fit its layer; the checkpoint and its quantization_config are not of one form"
            )


def _packed(model: torch.nn.Module) -> Iterator[tuple[str, Any, Any]]:
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            packing = not _LAYERS.isdisjoint(c.__name__ for c in type(module).__mro__) and name == "weight"
            if packing or (packed_beside_state(parameter) and hasattr(module, "out_features")):
                yield f"{path}.{name}", module, parameter


def _wrong(tensor: StoredTensor, what: str) -> ConfigError:
    return ConfigError(f"{tensor.file}: tensor {tensor.name}: {what}; download the checkpoint again")
