"""The keys of a recipe file, with the names that TRL and transformers use, read strictly."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from disco_accel.config.strict_yaml import read_yaml
from disco_accel.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraRecipe:
    """One LoRA fine-tuning run. Relative paths are relative to the working directory.

    ``dataset`` is a ``.jsonl`` file of ``messages``, ``prompt``/``completion`` or ``text`` records, or any plain text
    file. ``messages`` go through the tokenizer's chat template; ``assistant_only_loss`` needs one with generation tags.
    ``max_length`` is in tokens. With ``packing`` documents are joined and cut into blocks of exactly ``max_length``;
    without it each record is cut or padded to ``max_length``. ``adapter_dtype`` is the dtype of the LoRA weights.
    ``save_steps`` 0 saves only at the end. ``num_threads`` is the number of CPU threads of an eager op.
    ``load_in_4bit`` and ``load_in_8bit`` pack the frozen weights, ``use_bnb_nested_quant`` the scales of 4-bit weights
    as well. With ``loss: dpo`` and ``orpo`` the dataset has ``prompt``/``chosen``/``rejected`` records, with ``kto``
    ``prompt``/``completion``/``label``; ``beta``, ``loss_type`` and the two weights are TRL's of these losses.
    """

    model_name_or_path: str
    dataset: str
    output_dir: str
    max_steps: int
    dtype: str = "auto"
    attn_implementation: str = "sdpa"
    load_in_4bit: bool = False
    load_in_8bit: bool = False
    bnb_4bit_quant_type: str = "nf4"
    use_bnb_nested_quant: bool = False
    loss: str = "sft"
    beta: float = 0.1
    loss_type: str = "sigmoid"
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    lora_r: int = 16
    lora_alpha: int = 32
    lora_dropout: float = 0.0
    lora_target_modules: str | list[str] = "all-linear"
    adapter_dtype: str = "float32"
    per_device_train_batch_size: int = 1
    gradient_accumulation_steps: int = 1
    gradient_checkpointing: bool = True
    gradient_checkpointing_kwargs: dict[str, Any] | None = None
    max_length: int = 1024
    packing: bool = True
    completion_only_loss: bool = True
    assistant_only_loss: bool = False
    learning_rate: float = 2e-4
    lr_scheduler_type: str = "constant"
    warmup_steps: int = 0
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    optim: str = "adamw_torch"
    save_steps: int = 0
    save_total_limit: int | None = None
    seed: int = 42
    num_threads: int | None = None
    resume_from_checkpoint: bool | str = False
    report_to: str | list[str] = "none"
    disco_config: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillRecipe:
    """Prompts to read. Relative paths are relative to the working directory.

    ``prompts`` is a ``.jsonl`` file of ``prompt`` (or ``text``) records, or any plain text file, which is one prompt.
    ``adapter_name_or_path`` is a folder with a LoRA adapter. ``chunk`` tokens are read at a time; none = all at once.
    ``max_length`` in tokens: a longer prompt is an error, and what ``plan`` and ``capture`` take a prompt to have.
    ``num_threads`` is the number of CPU threads of an eager op. ``load_in_4bit`` and so on as in ``LoraRecipe``.
    """

    model_name_or_path: str
    prompts: str
    adapter_name_or_path: str | None = None
    dtype: str = "auto"
    attn_implementation: str = "sdpa"
    load_in_4bit: bool = False
    load_in_8bit: bool = False
    bnb_4bit_quant_type: str = "nf4"
    use_bnb_nested_quant: bool = False
    max_length: int = 4096
    chunk: int | None = None
    num_threads: int | None = None
    disco_config: dict[str, Any] | None = None


Recipe = TypeVar("Recipe", LoraRecipe, PrefillRecipe)

_AT_LEAST = {
    "chunk": 1,
    "max_steps": 1,
    "lora_r": 1,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "max_length": 2,
    "num_threads": 1,
    "save_total_limit": 1,
    "warmup_steps": 0,
    "save_steps": 0,
    "seed": 0,
    "learning_rate": 0.0,
    "lora_dropout": 0.0,
    "weight_decay": 0.0,
    "max_grad_norm": 0.0,
    "desirable_weight": 0.0,
    "undesirable_weight": 0.0,
}
_CHOICES = {
    "loss": ("sft", "dpo", "orpo", "kto"),
    "loss_type": ("sigmoid", "hinge", "ipo"),
    "dtype": ("auto", "bfloat16", "float16", "float32"),
    "adapter_dtype": ("float32", "bfloat16", "float16"),
    "attn_implementation": ("sdpa", "eager", "flash_attention_2"),
    "bnb_4bit_quant_type": ("nf4", "fp4"),
}
_FREQUENT = {
    "lr_scheduler_type": ("linear", "cosine", "constant", "constant_with_warmup"),
    "optim": ("adamw_torch", "adamw_torch_fused"),
}
"""Names that transformers knows, as it does others. A recipe with these is read without it, which loads in three
seconds."""
PAIRED = ("dpo", "orpo")
"""The losses whose records hold two answers, so that each is two rows of a batch."""
_LOSSES_WITH = {
    "beta": ("dpo", "orpo", "kto"),
    "loss_type": ("dpo",),
    "desirable_weight": ("kto",),
    "undesirable_weight": ("kto",),
}
"""Keys of some losses alone → these."""


def read_recipe(path: str | Path, overrides: Mapping[str, Any] | None = None) -> LoraRecipe:
    """Read a recipe file; ``overrides`` replace keys of the file.

    Raises:
        ConfigError: the file is missing or not YAML, a key is unknown, missing or twice there, or a value is wrong.
    """
    values = {**read_yaml(path), **(overrides or {})}
    return parse_recipe(values, source=str(path))


def read_any_recipe(path: str | Path, overrides: Mapping[str, Any] | None = None) -> LoraRecipe | PrefillRecipe:
    """Read a recipe file of either kind: one with ``prompts`` is a prefill. ``overrides`` and ConfigError as
    ``read_recipe``."""
    values = {**read_yaml(path), **(overrides or {})}
    if "prompts" in values and "dataset" not in values:
        return _parse(PrefillRecipe, values, str(path))
    return parse_recipe(values, source=str(path))


def read_prefill_recipe(path: str | Path) -> PrefillRecipe:
    """Read a prefill's recipe file. Raises ConfigError as ``read_recipe``."""
    return _parse(PrefillRecipe, read_yaml(path), str(path))


def parse_recipe(values: Mapping[str, Any], *, source: str = "recipe") -> LoraRecipe:
    """Check every key and value and fill in the defaults.

    Raises:
        ConfigError: names ``source``, the key, what was given and what would work.
    """
    return _parse(LoraRecipe, values, source)


def _parse(kind: type[Recipe], values: Mapping[str, Any], source: str) -> Recipe:
    hints = typing.get_type_hints(kind)
    for key in values:
        if key not in hints:
            near = difflib.get_close_matches(str(key), hints, n=1, cutoff=0.5)
            suggestion = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(hints)}"
            raise ConfigError(f"{source}: unknown key {key!r}; {suggestion}")
    missing = [
        field.name
        for field in dataclasses.fields(kind)
        if field.name not in values and field.default is dataclasses.MISSING
    ]
    if missing:
        raise ConfigError(f"{source}: {', '.join(missing)} must be given")
    checked = {key: _coerce(source, key, value, hints[key]) for key, value in values.items()}
    for key, value in checked.items():
        _check_range(source, key, value)
    _check_bits(source, checked)
    _check_loss(source, checked)
    return kind(**checked)


def _check_bits(source: str, given: Mapping[str, Any]) -> None:
    if given.get("load_in_4bit") and given.get("load_in_8bit"):
        raise ConfigError(f"{source}: load_in_4bit, load_in_8bit: weights have one of both; leave one out")
    for key in ("bnb_4bit_quant_type", "use_bnb_nested_quant"):
        if given.get(key) and not given.get("load_in_4bit"):
            raise ConfigError(f"{source}: {key}: says how 4-bit weights are stored; give load_in_4bit: true with it")


def _check_loss(source: str, given: Mapping[str, Any]) -> None:
    loss = given.get("loss", "sft")
    for key, losses in _LOSSES_WITH.items():
        if key in given and loss not in losses:
            raise ConfigError(
                f"{source}: {key}: is not of loss: {loss}; give loss: {' or '.join(losses)}, or leave it out"
            )
    if loss == "sft":
        return
    if not given.get("beta", 1.0) > 0:
        raise ConfigError(f"{source}: beta: {given['beta']!r} is too small; give more than 0, such as 0.1")
    if given.get("lora_dropout"):
        raise ConfigError(f"{source}: lora_dropout: loss: {loss} trains without dropout, as TRL does; set it to 0")
    if given.get("packing"):
        raise ConfigError(f"{source}: packing: with loss: {loss} each answer is a row of its own; leave it out")
    if given.get("completion_only_loss") is False or given.get("assistant_only_loss"):
        key = "assistant_only_loss" if given.get("assistant_only_loss") else "completion_only_loss"
        raise ConfigError(f"{source}: {key}: loss: {loss} itself says which tokens count; leave it out")
    if loss == "kto" and given.get("per_device_train_batch_size", 1) < 2:
        raise ConfigError(
            f"{source}: per_device_train_batch_size: loss: kto compares each prompt with the completion of another row "
            "of its batch; give 2 or more"
        )


def _coerce(source: str, key: str, value: Any, hint: Any) -> Any:
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for option in options:
        kind = typing.get_origin(option) or option
        if kind is float and not isinstance(value, bool):
            # YAML 1.1 reads 2e-4 (no dot) as text; every user means the number.
            try:
                return float(value)
            except (TypeError, ValueError):
                continue
        if type(value) is kind:
            if kind is list and not all(type(item) is str for item in value):
                continue
            return value
    wanted = " or ".join("none" if o is types.NoneType else str(getattr(o, "__name__", o)) for o in options)
    raise ConfigError(f"{source}: {key}: {value!r} is not a valid value; give {wanted}")


def _library_choices(key: str, value: Any) -> tuple[str, ...] | None:
    if key not in _FREQUENT or value in _FREQUENT[key]:
        return None
    from transformers import SchedulerType
    from transformers.training_args import OptimizerNames

    if key == "lr_scheduler_type":
        return tuple(str(kind.value) for kind in SchedulerType)
    return tuple(str(kind.value) for kind in OptimizerNames)


def _check_range(source: str, key: str, value: Any) -> None:
    least = _AT_LEAST.get(key)
    if least is not None and value is not None and not value >= least:
        raise ConfigError(f"{source}: {key}: {value!r} is too small; give at least {least}")
    if key == "lora_dropout" and value >= 1.0:
        raise ConfigError(f"{source}: {key}: {value!r} is too large; give less than 1")
    choices = _CHOICES.get(key) or _library_choices(key, value)
    if choices is not None and value not in choices:
        near = difflib.get_close_matches(value, choices, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"{source}: {key}: {value!r} is not known; {hint}give one of {', '.join(choices)}")
    if key in ("model_name_or_path", "dataset", "output_dir", "prompts", "adapter_name_or_path") and value == "":
        raise ConfigError(f"{source}: {key}: is empty; give a path")
