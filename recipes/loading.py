"""From a checkpoint directory to a model with a LoRA adapter; what is wrong with it is found before training starts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from disco_accel.config.settings import DiscoConfig, shared_weights_folder
from disco_accel.errors import ConfigError
from disco_accel.integrate.hf.checkpoint import load_into_arena
from disco_accel.observe.log_to_stderr import show_messages
from disco_accel.recipes.preferences import give_log_probabilities
from disco_accel.recipes.quantised import packing_config
from disco_accel.recipes.settings import LoraRecipe, PrefillRecipe

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def meeting_place(config: DiscoConfig | None) -> Path | None:
    """Where processes meet that share weights, if ``config`` says so; whom they wait for is shown from now on."""
    if config is None or not (config.enabled and config.share_weights):
        return None
    show_messages(config.quiet)
    return shared_weights_folder()


def check_checkpoint(directory: Path) -> None:
    """Check that a local checkpoint is whole: config, index and every shard that the index names.

    Raises:
        ConfigError: names the missing or broken file.
    """
    key = f"model_name_or_path: {directory}"
    if not (directory / "config.json").is_file():
        raise ConfigError(f"{key}: has no config.json; give the directory of a Hugging Face checkpoint")
    index = directory / _INDEX
    shards = [_SINGLE]
    if index.is_file():
        try:
            shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise ConfigError(f"{key}: {_INDEX} is broken ({error}); download it again") from error
    elif not (directory / _SINGLE).is_file():
        raise ConfigError(f"{key}: has neither {_SINGLE} nor {_INDEX}; only safetensors weights are read")
    missing = [name for name in shards if not (directory / name).is_file()]
    if missing:
        raise ConfigError(f"{key}: lacks {', '.join(missing)}, which {_INDEX} names; download the checkpoint again")
    for name in shards:
        try:
            with safe_open(directory / name, framework="pt"):
                pass
        except SafetensorError as error:
            raise ConfigError(f"{key}: {name} is cut short or broken ({error}); download it again") from error


def load_tokenizer(recipe: LoraRecipe | PrefillRecipe) -> PreTrainedTokenizerBase:
    """The checkpoint's tokenizer.

    Raises:
        ConfigError: there is none.
    """
    if Path(recipe.model_name_or_path).exists():
        check_checkpoint(Path(recipe.model_name_or_path))
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(recipe.model_name_or_path)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"model_name_or_path: {recipe.model_name_or_path}: no tokenizer ({_first(error)})") from error
    return tokenizer


def load_model(recipe: LoraRecipe, shared: Path | None = None) -> Any:
    """The checkpoint as a PEFT model with a fresh LoRA adapter, frozen weights in the recipe's dtype. ``shared`` as for
    ``load_base``.

    Raises:
        ConfigError: the checkpoint, the dtype or ``lora_target_modules`` does not fit.
    """
    return add_adapter(load_base(recipe, shared), recipe)


def load_base(recipe: LoraRecipe | PrefillRecipe, shared: Path | None = None) -> Any:
    """The checkpoint alone, in eval mode, in the recipe's dtype.

    A local checkpoint is read straight into the host arena that plans use; others, and forms that nobody here reads,
    go through ``from_pretrained`` on the host. ``shared``: the folder where processes meet that hold one copy of it.

    Raises:
        ConfigError: the checkpoint or the dtype does not fit, or the library that packs is not installed.
    """
    name = recipe.model_name_or_path
    try:
        config = AutoConfig.from_pretrained(name)
        longest = getattr(config, "max_position_embeddings", None)
        if longest is not None and recipe.max_length > longest:
            raise ConfigError(f"max_length: {recipe.max_length} is more than the {longest} positions of {name}")
        packed = packing_options(recipe, config)
        if Path(name).is_dir():
            arena_model = load_into_arena(
                name,
                dtype=recipe.dtype,
                attn_implementation=recipe.attn_implementation,
                quantization_config=packed.get("quantization_config"),
                shared=shared,
            )
            if arena_model is not None:
                return arena_model
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            name,
            dtype=recipe.dtype,
            attn_implementation=recipe.attn_implementation,
            use_safetensors=True,
            output_loading_info=True,
            **packed,
        )
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"model_name_or_path: {name}: cannot be loaded ({_first(error)})") from error
    model, info = loaded
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise ConfigError(f"model_name_or_path: {name}: lacks {len(missing)} tensors, the first is {missing[0]}")
    _align(model)
    return model


def packing_options(recipe: LoraRecipe | PrefillRecipe, config: Any) -> dict[str, Any]:
    """What ``from_pretrained`` is told about packed weights: to make them, or that it finds them; empty if neither.

    They are packed, and stay, on the host: a plan brings them to its device. Raises ConfigError.
    """
    made = packing_config(recipe, config)
    if made is None and getattr(config, "quantization_config", None) is None:
        return {}
    return {"device_map": {"": "cpu"}} | ({} if made is None else {"quantization_config": made})


def add_adapter(model: Any, recipe: LoraRecipe) -> Any:
    """Add a LoRA adapter in ``adapter_dtype``, and checkpointing and the output of preferences if the recipe asks.

    Raises:
        ConfigError: ``lora_target_modules`` names no module of the model.
    """
    if recipe.loss != "sft":
        give_log_probabilities(model)
    lora = LoraConfig(
        r=recipe.lora_r,
        lora_alpha=recipe.lora_alpha,
        lora_dropout=recipe.lora_dropout,
        target_modules=recipe.lora_target_modules,
        task_type="CAUSAL_LM",
    )
    try:
        adapted = get_peft_model(model, lora)
    except ValueError as error:
        raise ConfigError(f"lora_target_modules: {_first(error)}") from error
    dtype = getattr(torch, recipe.adapter_dtype)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    adapted.config.use_cache = False
    if recipe.gradient_checkpointing:
        checkpoint_activations(adapted, recipe.gradient_checkpointing_kwargs)
    return adapted


def checkpoint_activations(model: Any, kwargs: Mapping[str, Any] | None = None) -> None:
    """Switch activation checkpointing on, with ``kwargs`` as of transformers."""
    kwargs = dict(kwargs or {"use_reentrant": False})
    # transformers renamed the switch in 5.18; both spellings are in use.
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=kwargs)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
    if kwargs.get("use_reentrant"):
        model.enable_input_require_grads()


def load_adapter(model: Any, directory: str) -> Any:
    """``model`` with the adapter of a folder that PEFT saved.

    Raises:
        ConfigError: the folder has no adapter in safetensors, or it does not fit the model.
    """
    missing = [n for n in ("adapter_config.json", "adapter_model.safetensors") if not (Path(directory) / n).is_file()]
    if missing:
        raise ConfigError(f"adapter_name_or_path: {directory}: has no {missing[0]}; give a folder that PEFT saved")
    try:
        return PeftModel.from_pretrained(model, directory)
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise ConfigError(f"adapter_name_or_path: {directory}: does not fit the model ({_first(error)})") from error


def _align(model: torch.nn.Module) -> None:
    """Give each weight an aligned storage of its own, in place of a view of the mapped file at any offset.

    CPU kernels choose their path by alignment: the same weights at another offset give other bits.
    """
    moved: dict[int, torch.Tensor] = {}
    for parameter in model.parameters():
        # What lies beside a packed weight names its memory, too.
        if type(parameter) is torch.nn.Parameter and parameter.device.type == "cpu" and parameter.data_ptr() % 64:
            parameter.data = moved.setdefault(parameter.data_ptr(), parameter.data.clone())


def _first(error: Exception) -> str:
    """The first line of a library's message, short enough for one line of ours."""
    text = str(error).strip().split("\n")[0]
    return text if len(text) <= 200 else text[:197] + "..."
