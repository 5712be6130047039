"""A Hugging Face checkpoint straight into a host arena: each weight exists once, from the first byte read."""

from __future__ import annotations

import hashlib
import json
import logging
from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from disco_accel.errors import ConfigError
from disco_accel.integrate.hf.checkpoint_files import checkpoint_tensors, dtype_of
from disco_accel.integrate.hf.packed_checkpoint import has_loader, load_packed
from disco_accel.integrate.hf.safetensors_file import StoredTensor, conversion_buffer, opened, read_into
from disco_accel.native.file_arena import FileArena
from disco_accel.native.file_keys import key_of_file
from disco_accel.native.host_memory import HostMemory
from disco_accel.native.rendezvous import NotSharedError, Rendezvous
from disco_accel.native.shared_copies import layout_of, shared_copy
from disco_accel.observe.log_to_stderr import say_everywhere
from disco_accel.sizes import format_size
from disco_accel.step.placement.model_placement import keep_arena

logger = logging.getLogger("disco_accel")

_Slot = tuple[torch.nn.Module, str]


def load_into_arena(
    directory: str | Path,
    *,
    dtype: str = "auto",
    attn_implementation: str = "sdpa",
    quantization_config: Any = None,
    shared: Path | None = None,
) -> Any:
    """The causal language model of a local checkpoint, its weights in a host arena that ``prepare`` uses as it is.

    ``dtype`` is a torch name, or ``auto``: the config's, else the first weight's. As from ``from_pretrained``, it is in
    eval mode, tied weights are tied, buffers have their values. ``quantization_config`` is transformers' and packs each
    weight on the host once it is read; packed checkpoints are read as they are. None where only ``from_pretrained`` can
    load the checkpoint. That is so for packed weights of a library without a ``quant_method`` in ``quantised/``, and
    for plain tensors that are not the model's parameters one by one. It is so where the config names the file of the
    weights (``transformers_weights``), too.

    With ``shared``, the folder where processes of this user meet (``shared_weights_folder``), weights that are not
    packed lie in a copy that all of them map: it is read from the files once.

    Raises:
        ConfigError: a file is missing, cut short or malformed, or a tensor has another shape than the config says. The
            parts of a packed weight do not fit each other, or the library that packs is not installed.
    """
    directory = Path(directory)
    stored = checkpoint_tensors(directory)
    config = AutoConfig.from_pretrained(directory)
    if getattr(config, "transformers_weights", None) is not None:
        return None
    if quantization_config is not None or getattr(config, "quantization_config", None) is not None:
        if not has_loader(config, quantization_config):
            return None
        options = {"dtype": dtype_of(dtype, config, stored), "attn_implementation": attn_implementation}
        return load_packed(directory, config, stored, quantization_config, options)
    wanted = dtype_of(dtype, config, stored)
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=wanted, attn_implementation=attn_implementation)
    model.tie_weights()
    slots = _slots(model)
    if not _one_by_one(model, slots, stored):
        return None
    _read_all(model, slots, stored, shared)
    if (directory / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory)
    return model.eval()


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


def _read_all(
    model: torch.nn.Module,
    slots: list[list[tuple[str, _Slot]]],
    stored: Mapping[str, StoredTensor],
    shared: Path | None,
) -> None:
    sources = [next(stored[name] for name, _ in group if name in stored) for group in slots]
    current = [_tensor(*group[0][1]) for group in slots]
    for source, like in zip(sources, current, strict=True):
        _require_shape(source, like)
    memory, placed = _in_shared_memory(sources, current, shared) or _in_own_memory(sources, current)
    for group, like, tensor in zip(slots, current, placed, strict=True):
        _install(group, like, tensor)
    keep_arena(model, memory)


def _in_shared_memory(
    sources: list[StoredTensor], current: list[torch.Tensor], shared: Path | None
) -> tuple[HostMemory, list[torch.Tensor]] | None:
    if shared is None:
        return None
    try:
        return _read_shared(sources, current, shared)
    except NotSharedError as error:
        logger.warning("share_weights: this process keeps frozen weights of its own: %s", error)
        return None


def _read_shared(
    sources: list[StoredTensor], current: list[torch.Tensor], folder: Path
) -> tuple[FileArena, list[torch.Tensor]]:
    """A tensor for each of ``current``, laid out alike and contiguous, with the bytes of the same of ``sources``.

    ``folder``: where processes meet. Read from the files, unless another process holds a copy of them.

    Raises:
        ConfigError: a file ends too early; the folder is another user's, a link, or open to others.
        NotSharedError: nothing can be shared here.
    """
    meeting = Rendezvous(folder)
    files = sorted({source.file for source in sources})
    keys = {file: key_of_file(file, meeting, say_everywhere) for file in files}
    rows = [[keys[s.file], s.offset, s.nbytes, str(s.dtype)] for s in sources]
    text = json.dumps(["checkpoint", layout_of(current), rows])
    key = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    # Along the files; the same in every process, because the key has it.
    order = sorted(range(len(sources)), key=lambda i: rows[i][:2])
    placed, room = list(current), HostMemory.room_for(current)

    def unchanged(_: list[torch.Tensor]) -> bool:
        return all(key_of_file(file, meeting, logger.info) == keys[file] for file in files)

    with ExitStack() as open_files, shared_copy(folder, key, room, unchanged, say_everywhere, logger.warning) as copy:
        descriptors = {file: open_files.enter_context(opened(file)) for file in files} if copy.is_new else {}
        buffer = conversion_buffer()
        for i in order:
            tensor = current[i]
            if copy.is_new:
                tensor = torch.empty(tensor.shape, dtype=tensor.dtype)
                read_into(descriptors[sources[i].file], sources[i], tensor, buffer)
            placed[i] = copy.put(tensor)
    logger.info("share_weights: %s of the checkpoint, shared: %s", format_size(room), copy.origin)
    return copy.arena, placed


def _in_own_memory(sources: list[StoredTensor], current: list[torch.Tensor]) -> tuple[HostMemory, list[torch.Tensor]]:
    memory = HostMemory(HostMemory.room_for(current))
    buffer = conversion_buffer()
    placed = list(current)
    order = sorted(range(len(sources)), key=lambda i: (sources[i].file, sources[i].offset))
    for file in sorted({source.file for source in sources}):
        with opened(file) as descriptor:
            for i in order:
                if sources[i].file == file:
                    placed[i] = memory.allocate(current[i].shape, current[i].dtype)
                    read_into(descriptor, sources[i], placed[i], buffer)
    return memory, placed


def _tensor(module: torch.nn.Module, name: str) -> torch.Tensor:
    tensor: torch.Tensor | None = module._parameters.get(name)
    if tensor is None:
        tensor = module._buffers[name]
    assert tensor is not None
    return tensor


def _require_shape(source: StoredTensor, like: torch.Tensor) -> None:
    if source.shape != tuple(like.shape):
        raise ConfigError(
            f"{source.file}: tensor {source.name} has shape {list(source.shape)}, "
            f"the model's config.json makes it {list(like.shape)}"
        )


def _install(group: list[tuple[str, _Slot]], like: torch.Tensor, target: torch.Tensor) -> None:
    if isinstance(like, torch.nn.Parameter):
        target = torch.nn.Parameter(target, requires_grad=like.requires_grad)
    for _, (module, name) in group:
        table = module._parameters if name in module._parameters else module._buffers
        table[name] = target  # type: ignore[assignment]
