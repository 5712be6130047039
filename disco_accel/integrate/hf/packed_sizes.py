"""How much memory a model's parameters take once transformers has had them packed, before any of them is read."""

from __future__ import annotations

from typing import Any

import torch

from disco_accel.capture.parts import leaves
from disco_accel.native.host_memory import HostMemory, place


def room_when_packed(model: Any, quantizer: Any, dtype: torch.dtype) -> int:
    """Bytes of an arena for the parameters of ``model``, which is on ``meta`` and gets the quantizer's layers here.
    Weights that are packed are of ``dtype`` before.

    Sizes are the library's own: of each shape one weight, of ones, is packed.
    """
    quantizer.preprocess_model(model=model, device_map={"": "cpu"}, dtype=dtype, checkpoint_files=None)
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
