"""The tensors of a local checkpoint, file by file: where each lies, and which data type they are to have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from disco_accel.errors import ConfigError
from disco_accel.integrate.hf.safetensors_file import StoredTensor, stored_tensors

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def checkpoint_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Name → tensor of all files of a local checkpoint, sharded or not. Where there is one file and an index of others,
    as a save over an older one leaves them, it is the one file, as for transformers.

    Raises:
        ConfigError: a file is missing or broken, or two files hold one name.
    """
    index = directory / _INDEX
    files = [_SINGLE]
    if not (directory / _SINGLE).is_file() and index.is_file():
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


def dtype_of(name: str, config: Any, stored: Mapping[str, StoredTensor]) -> torch.dtype:
    """The data type called ``name``; ``auto``: the config's, else that of the first weight with a fraction.

    Raises:
        ConfigError: PyTorch has none of that name.
    """
    if name != "auto":
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype):
            raise ConfigError(f"dtype: {name!r} is not a dtype of PyTorch; use auto, bfloat16, float16 or float32")
        return dtype
    configured = getattr(config, "dtype", None)
    if isinstance(configured, torch.dtype):
        return configured
    return next((s.dtype for s in stored.values() if s.dtype.is_floating_point), torch.float32)
