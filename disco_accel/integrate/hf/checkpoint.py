"""A Hugging Face checkpoint straight into a host arena: each weight exists once, from the first byte read."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from disco_accel.errors import ConfigError
from disco_accel.integrate.hf.safetensors_file import StoredTensor, conversion_buffer, opened, read_into, stored_tensors
from disco_accel.native.host_memory import HostMemory
from disco_accel.step.placement import keep_arena

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"

_Slot = tuple[torch.nn.Module, str]


def checkpoint_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Name → tensor of all files of a local checkpoint, sharded or not.

    Raises:
        ConfigError: a file is missing or broken, or two files hold one name.
    """
    index = directory / _INDEX
    files = [_SINGLE]
    if index.is_file():
        try:
            files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise ConfigError(f"{index}: is broken ({error}); download it again") from error
    by_name: dict[str, StoredTensor] = {}
    for name in files:
        if Path(name).name != name:
            raise ConfigError(f"{index}: names {name!r}, which is no file beside it")
        if not (directory / name).is_file():
            raise ConfigError(f"{directory}: lacks {name}; download the checkpoint again")
        for stored in stored_tensors(directory / name):
            if stored.name in by_name:
                raise ConfigError(f"{stored.file}: tensor {stored.name} is in {by_name[stored.name].file.name} too")
            by_name[stored.name] = stored
    return by_name


def load_into_arena(directory: str | Path, *, dtype: str = "auto", attn_implementation: str = "sdpa") -> Any:
    """The causal language model of a local checkpoint, its weights in a host arena that ``prepare`` uses as it is.

    ``dtype`` is a torch name, or ``auto``: the config's, else the first weight's. As from ``from_pretrained``, it is
    in eval mode, tied weights are tied, buffers have their values. None where the checkpoint's tensors are not the
    model's parameters one by one (quantized, renamed or merged on loading): ``from_pretrained`` can load those.

    Raises:
        ConfigError: a file is missing, cut short or malformed, or a tensor has another shape than the config says.
    """
    directory = Path(directory)
    stored = checkpoint_tensors(directory)
    config = AutoConfig.from_pretrained(directory)
    if getattr(config, "quantization_config", None) is not None:
        return None
    wanted = _dtype_of(dtype, config, stored)
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=wanted, attn_implementation=attn_implementation)
    model.tie_weights()
    slots = _slots(model)
    if not _one_by_one(model, slots, stored):
        return None
    _read_all(model, slots, stored)
    if (directory / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory)
    return model.eval()


def _dtype_of(name: str, config: Any, stored: Mapping[str, StoredTensor]) -> torch.dtype:
    if name != "auto":
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype):
            raise ConfigError(f"dtype: {name!r} is not a dtype of PyTorch; use auto, bfloat16, float16 or float32")
        return dtype
    configured = getattr(config, "dtype", None)
    if isinstance(configured, torch.dtype):
        return configured
    return next((s.dtype for s in stored.values() if s.dtype.is_floating_point), torch.float32)


def _slots(model: torch.nn.Module) -> list[list[tuple[str, _Slot]]]:
    """For each parameter and persistent buffer all the names it goes by, with the tables that hold it."""
    groups: dict[int, list[tuple[str, _Slot]]] = defaultdict(list)
    for prefix, module in model.named_modules():
        persistent = {n: b for n, b in module._buffers.items() if n not in module._non_persistent_buffers_set}
        for name, tensor in (*module._parameters.items(), *persistent.items()):
            if tensor is not None:
                groups[id(tensor)].append((f"{prefix}.{name}" if prefix else name, (module, name)))
    return list(groups.values())


def _one_by_one(
    model: PreTrainedModel, slots: list[list[tuple[str, _Slot]]], stored: Mapping[str, StoredTensor]
) -> bool:
    if getattr(model, "_keep_in_fp32_modules", None) or getattr(model, "_keep_in_fp32_modules_strict", None):
        return False
    return all(any(name in stored for name, _ in group) for group in slots)


def _read_all(model: torch.nn.Module, slots: list[list[tuple[str, _Slot]]], stored: Mapping[str, StoredTensor]) -> None:
    sources = [next(stored[name] for name, _ in group if name in stored) for group in slots]
    current = [_tensor(*group[0][1]) for group in slots]
    memory = HostMemory(HostMemory.room_for(current))
    buffer = conversion_buffer()
    order = sorted(range(len(slots)), key=lambda i: (sources[i].file, sources[i].offset))
    for file in sorted({source.file for source in sources}):
        with opened(file) as descriptor:
            for i in order:
                if sources[i].file == file:
                    _fill(descriptor, sources[i], slots[i], current[i], memory, buffer)
    keep_arena(model, memory)


def _tensor(module: torch.nn.Module, name: str) -> torch.Tensor:
    tensor: torch.Tensor | None = module._parameters.get(name)
    if tensor is None:
        tensor = module._buffers[name]
    assert tensor is not None
    return tensor


def _fill(
    descriptor: int,
    source: StoredTensor,
    group: list[tuple[str, _Slot]],
    like: torch.Tensor,
    memory: HostMemory,
    buffer: torch.Tensor,
) -> None:
    if source.shape != tuple(like.shape):
        raise ConfigError(
            f"{source.file}: tensor {source.name} has shape {list(source.shape)}, "
            f"the model's config.json makes it {list(like.shape)}"
        )
    target = memory.allocate(like.shape, like.dtype)
    read_into(descriptor, source, target, buffer)
    if isinstance(like, torch.nn.Parameter):
        target = torch.nn.Parameter(target, requires_grad=like.requires_grad)
    for _, (module, name) in group:
        table = module._parameters if name in module._parameters else module._buffers
        table[name] = target  # type: ignore[assignment]
