"""The step that a command line asks about: a recipe's, or that of a model by its name; nothing of it runs.

Heavy libraries are imported once the names are known to be right.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from disco_accel.errors import ConfigError
from disco_accel.native.device_types import DEVICE_TYPES
from disco_accel.quantised.forms import PackedForm

if TYPE_CHECKING:
    import torch

    from disco_accel.config.settings import DiscoConfig
    from disco_accel.recipes.model_names import FoundModel
    from disco_accel.recipes.outline import Outline
    from disco_accel.recipes.settings import LoraRecipe, PrefillRecipe

TASKS = ("lora", "full", "prefill", "decode")


@dataclass(frozen=True)
class _Step:
    """``recipe`` of a step of ``model``, under ``config``. ``task``: one of ``TASKS``; ``decode`` is a token of each of
    ``decoded`` rows behind the others of ``max_length``."""

    model: FoundModel
    recipe: LoraRecipe | PrefillRecipe
    config: DiscoConfig
    task: str = "lora"
    decoded: int = 1

    @property
    def rows(self) -> int:
        """Of a batch."""
        return getattr(self.recipe, "per_device_train_batch_size", self.decoded)

    @property
    def tokens(self) -> int:
        """Of a step, padding among them."""
        from disco_accel.recipes.settings import PAIRED

        if self.task == "decode":
            return self.rows
        answers = 2 if getattr(self.recipe, "loss", "") in PAIRED else 1
        return self.rows * answers * self.recipe.max_length

    @property
    def devices(self) -> int:
        """``devices`` of a machine that need not be this one. Raises ConfigError."""
        count = self.config.devices
        if isinstance(count, str):
            raise ConfigError("devices: auto asks this machine, which need not be the one that trains; give --devices")
        return len(count) if isinstance(count, tuple) else count

    @property
    def parallel(self) -> str:
        """The way that is asked for, or that ``auto`` means."""
        return "layers" if self.config.parallel == "auto" else self.config.parallel

    def with_config(self, **changes: Any) -> _Step:
        """This step with other values of ``config``; those that are None change nothing."""
        return replace(self, config=replace(self.config, **{k: v for k, v in changes.items() if v is not None}))


def device_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare ``--device`` and ``--quant``."""
    kinds = tuple(DEVICE_TYPES)[::-1]
    parser.add_argument(
        "--device",
        choices=kinds,
        default=kinds[0],
        help="whose speed is estimated: cuda is an A100 behind PCIe 4",
    )
    parser.add_argument(
        "--quant",
        choices=(*PackedForm, "none"),
        help="form of the frozen weights; no library of it is needed (default: what the recipe's keys say)",
    )


def of_recipe(path: str, rows: int | None = None, length: int | None = None) -> _Step:
    """The step of a recipe file, of ``rows`` of ``length`` tokens in the place of its own. Raises ConfigError."""
    from disco_accel.config.settings import DiscoConfig
    from disco_accel.config.strict_yaml import read_yaml
    from disco_accel.recipes.model_names import find_model
    from disco_accel.recipes.settings import read_any_recipe

    keys = read_yaml(path)
    name = keys.get("model_name_or_path")
    found = find_model(name) if isinstance(name, str) and name else None
    if "prompts" in keys and "dataset" not in keys:
        _require_one_row(rows or 1)
        rows = None
    given = {"per_device_train_batch_size": rows, "max_length": length}
    recipe = read_any_recipe(path, {key: value for key, value in given.items() if value is not None})
    assert found is not None, "a recipe without a model's name was refused"
    task = "lora" if hasattr(recipe, "lora_r") else "prefill"
    return _Step(found, recipe, DiscoConfig.from_env(DiscoConfig.from_dict(recipe.disco_config or {})), task)


def of_model(name: str, task: str, rows: int, length: int) -> _Step:
    """A step of ``rows`` of ``length`` tokens, with the recipes' defaults for all else: of decoding the last token of
    each. Raises ConfigError."""
    from disco_accel.config.settings import DiscoConfig
    from disco_accel.recipes.model_names import find_model
    from disco_accel.recipes.settings import LoraRecipe, PrefillRecipe

    found = find_model(name, "--model")
    attention = found.attention or "sdpa"
    config = DiscoConfig.from_env(DiscoConfig())
    if task in ("prefill", "decode"):
        if task == "prefill":
            _require_one_row(rows)
        prompt = PrefillRecipe(model_name_or_path=name, prompts="-", max_length=length, attn_implementation=attention)
        return _Step(found, prompt, config, task, rows)
    recipe = LoraRecipe(
        model_name_or_path=name,
        dataset="-",
        output_dir="-",
        max_steps=1,
        per_device_train_batch_size=rows,
        max_length=length,
        attn_implementation=attention,
    )
    return _Step(found, recipe, config, task)


def _require_one_row(rows: int) -> None:
    """Refuse a prompt of several rows. Raises ConfigError."""
    if rows != 1:
        raise ConfigError(f"--batch: {rows}: a prompt is one row; leave it out")


def outlined(step: _Step, quant: str | None, budget: Callable[[], int], device: torch.device | None = None) -> Outline:
    """``step`` as captured. ``budget``: bytes, asked for once the model is known. ``device``: the one that its kernels
    are for, if that is here. Raises ConfigError, CaptureError."""
    # transformers warns about its own calls from inside PEFT, and PEFT about its own patterns of fused experts; nobody
    # here can act on that.
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="peft")
    from disco_accel.recipes.outline import outline

    if step.task == "decode" and step.devices > 1:
        raise ConfigError("--devices: tokens with a static cache run on one device; leave it out")
    by_rows = step.config.parallel == "batch" and step.devices > 1
    return outline(
        step.recipe,
        quant,
        config=step.config,
        budget=budget,
        parts=step.devices if by_rows else step.config.micro_batches,
        ranks=step.devices if step.config.parallel == "tensor" else 1,
        task=step.task,
        rows=step.decoded,
        device=device,
    )
