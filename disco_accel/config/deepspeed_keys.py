"""DeepSpeed's config: which of its keys plans make needless, which go on to DeepSpeed, which cannot be had.

The keys and defaults are those of DeepSpeed 0.19. Nothing of DeepSpeed is imported here.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from disco_accel.errors import ConfigError, GraphFileError
from disco_accel.graph.strict_json import parse_json, plain, shown

REPLACED = "disco_accel is what replaces it: weights stay in host memory and every load of them is planned"
"""The message about ZeRO stage 3 and its parameter offload."""

_LARGEST_FILE = 1 << 20
_ZERO = "zero_optimization"

_PLANNED_ZERO = (
    "cpu_offload",
    "cpu_offload_param",
    "cpu_offload_use_pin_memory",
    "gather_16bit_weights_on_model_save",
    "max_live_parameters",
    "max_reuse_distance",
    "model_persistence_threshold",
    "module_granularity_threshold",
    "param_persistence_threshold",
    "prefetch_bucket_size",
    "stage3_allgather_sequential",
    "stage3_gather_16bit_weights_on_model_save",
    "stage3_gather_fp16_weights_on_model_save",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_model_persistence_threshold",
    "stage3_module_granularity_threshold",
    "stage3_param_persistence_threshold",
    "stage3_prefetch_bucket_size",
    "stage3_use_all_reduce_for_fetch_params",
    "sub_group_size",
)
"""Keys of ``zero_optimization`` that tune stage 3's fetching of weights."""

_REFUSED = {
    "zero_optimization.zenflow": "updates weights asynchronously, so losses would differ; leave it out",
    "zero_optimization.offload_optimizer.super_offload": "is for full fine-tuning, an adapter's optimizer state is "
    "small; leave it out",
    "compile.deepcompile": "compiles the model that the plan runs; leave it out",
    "zero_optimization.zero_quantized_weights": "changes the weights that steps see; leave it out",
    "zero_optimization.zero_quantized_nontrainable_weights": "changes the weights that steps see; leave it out",
    "zero_optimization.zero_quantized_gradients": "is for sharded weights; leave it out",
    "hybrid_engine.enabled": "replaces the model's modules; leave it out",
    "compression_training": "changes the weights that steps see; leave it out",
}
_ONE_ONLY = {
    "zero_optimization.zero_hpz_partition_size": "weights are not sharded",
    "zero_optimization.mics_shard_size": "weights are not sharded",
    "tensor_parallel.autotp_size": "each process runs the whole model",
    "sequence_parallel_size": "each process runs whole sequences",
}


def read_ds_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The content of a DeepSpeed config file.

    Raises:
        ConfigError: the file is missing, larger than 1 MiB, or no JSON object; or a key appears twice.
    """
    try:
        if Path(path).stat().st_size > _LARGEST_FILE:
            raise ConfigError(f"{path}: larger than 1 MiB, which no config is")
        content = parse_json(Path(path).read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except GraphFileError as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a JSON object of DeepSpeed's keys, got {shown(content)}")
    return content


def migrate(
    content: Mapping[str, Any], where: str = "DeepSpeed config"
) -> tuple[dict[str, Any], tuple[str, ...], Mapping[str, Any]]:
    """Divide a DeepSpeed config, which stays as it is, between DeepSpeed and the plans.

    Returns the config that is left for DeepSpeed, at stage 2 at most, nothing offloaded; a line for each key that plans
    replace; and the ``disco_config`` keys that the file had.

    Raises:
        ConfigError: a key asks for a thing that a plan cannot give, or has a value of the wrong kind; ``where`` leads
            the message.
    """
    engine = copy.deepcopy(dict(content))
    try:
        section = _object(engine, "disco_config", "")
        engine.pop("disco_config", None)
        _refuse(engine)
        planned = _without_offloading(engine)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None
    return engine, tuple(planned), section


def _refuse(engine: dict[str, Any]) -> None:
    for key, why in _REFUSED.items():
        if _look_up(engine, key) not in (None, False, "auto", {}):
            raise ValueError(f"{key}: does not work under plans, it {why}")
    for key, why in _ONE_ONLY.items():
        value = _look_up(engine, key)
        if value not in (None, 0, 1, -1, "auto"):
            raise ValueError(f"{key}: {shown(value)} does not work under plans, {why}; leave it out")
    both = [key for key in ("bf16", "fp16") if _flag(_object(engine, key, ""), "enabled", key)]
    if len(both) == 2:
        raise ValueError("bf16 and fp16 are both enabled; choose one")


def _without_offloading(engine: dict[str, Any]) -> list[str]:
    planned = []
    zero = _object(engine, _ZERO, "")
    stage = zero.get("stage", 0)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise ValueError(f"{_ZERO}.stage: {shown(stage)} does not work; use 0, 1, 2 or 3")
    if stage == 3:
        zero["stage"] = 2
        planned.append(f"{_ZERO}.stage: 3: planned instead, under stage 2; {REPLACED}")
    for name, kept in (("offload_param", "weights"), ("offload_optimizer", "optimizer state")):
        key = f"{_ZERO}.{name}"
        device = _object(zero, name, f"{_ZERO}.").get("device", "none")
        if device not in ("none", "cpu", "nvme"):
            raise ValueError(f"{key}.device: {shown(device)} does not work; use none or cpu")
        if device == "nvme" and name == "offload_param":
            raise ValueError(f"{key}.device: nvme does not work, weights stay in host memory; use cpu")
        if zero.pop(name, None) is not None and device != "none":
            where = "in host memory, loaded as planned" if kept == "weights" else "on the device, within memory_budget"
            planned.append(f"{key}: planned instead; {kept} stay{'s' * (kept != 'weights')} {where}")
    tuned = [name for name in _PLANNED_ZERO if name in zero]
    for name in tuned:
        del zero[name]
    if tuned:
        planned.append(f"{_ZERO}.{', '.join(tuned)}: planned instead; when to load a weight is the plan's to say")
    checkpointing = _object(engine, "activation_checkpointing", "")
    if _flag(checkpointing, "cpu_checkpointing", "activation_checkpointing"):
        checkpointing["cpu_checkpointing"] = False
        planned.append(
            "activation_checkpointing.cpu_checkpointing: planned instead; activations that do not fit are offloaded"
        )
    return planned


def _look_up(content: Mapping[str, Any], key: str) -> Any:
    value: Any = content
    for name in key.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(name)
    return value


def _object(content: Mapping[str, Any], name: str, before: str) -> dict[str, Any]:
    value = content.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{before}{plain(name)}: expected an object, got {shown(value)}")
    return value


def _flag(content: Mapping[str, Any], name: str, before: str) -> bool:
    value = content.get(name, False)
    if value not in (True, False, "auto", None) or (isinstance(value, int) and not isinstance(value, bool)):
        raise ValueError(f"{before}.{name}: expected true or false, got {shown(value)}")
    return value is True
