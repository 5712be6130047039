"""Which weights of a Hugging Face model tensor parallelism cuts, and how: the model's own plan, and LoRA's with it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from disco_accel.errors import CaptureError
from disco_accel.step.run.arguments import base_model

_FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text")
_COLWISE = ("colwise", "colwise_rep", "colwise_gather_output")
_ROWWISE = ("rowwise", "rowwise_rep")
_INSTEAD = "use parallel: layers or batch"


def tensor_plan(model: torch.nn.Module, count: int) -> dict[str, int]:
    """Name of a weight, as in ``model.named_parameters()``, → the dimension along which ``count`` devices cut it.

    A column-wise layer has a part of its outputs on each device, and so has its adapter's B; a row-wise one a part of
    its inputs, and so has its adapter's A. A weight that is in no plan is whole on every device.

    Raises:
        CaptureError: another family, heads or sizes that ``count`` does not divide, packed weights.
    """
    base = base_model(model)
    config: Any = base.config
    if config.model_type not in _FAMILIES:
        raise CaptureError(
            f"parallel: tensor: {type(base).__name__} is none of {', '.join(_FAMILIES)}, whose plans are known; "
            f"{_INSTEAD}"
        )
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        number = getattr(config, key)
        if number % count:
            raise CaptureError(
                f"parallel: tensor: {key} is {number}, which {count} devices do not divide; use another number of "
                f"devices, or {_INSTEAD.removeprefix('use ')}"
            )
    styles = _styles(base)
    names: dict[int, str] = {id(parameter): name for name, parameter in model.named_parameters()}
    prefix = next(name for name, module in model.named_modules() if module is base)
    shards: dict[str, int] = {}
    for path, module in model.named_modules():
        style = _style_of(path.removeprefix(prefix).lstrip("."), styles)
        if style is not None:
            shards |= {names[id(parameter)]: dim for parameter, dim in _cuts(path, module, style)}
    _cut_vocabulary(names, base, count, shards)
    return shards


def _styles(base: Any) -> dict[str, str]:
    """Pattern of a module's name inside ``base`` → how it is cut."""
    prefix = base.base_model_prefix
    inner = {f"{prefix}.{name}": style for name, style in (base.config.base_model_tp_plan or {}).items()}
    return inner | dict(type(base)._tp_plan or {})


def _style_of(path: str, styles: Mapping[str, str]) -> str | None:
    return styles.get(re.sub(r"\.\d+\.", ".*.", path))


def _cuts(path: str, module: torch.nn.Module, style: str) -> list[tuple[torch.nn.Parameter, int]]:
    """The parameters of one layer of the plan that are cut, its adapters' among them."""
    if style not in (*_COLWISE, *_ROWWISE):
        return []
    found: list[tuple[torch.nn.Parameter, int]] = []
    for name, parameter in module.named_parameters():
        adapter = re.search(r"lora_(A|B|embedding_A|embedding_B|magnitude_vector)\b", name)
        matrix = parameter.dim() == 2
        if not parameter.is_floating_point():
            raise CaptureError(f"parallel: tensor: {path}.{name} is packed, and is not cut; {_INSTEAD}")
        if adapter is None and "." in name.removeprefix("base_layer."):
            raise CaptureError(f"parallel: tensor: it is not known how {path}.{name} is cut; {_INSTEAD}")
        if style in _COLWISE and (adapter is None or adapter[1] == "B"):
            found.append((parameter, 0))
        elif style in _ROWWISE and matrix and (adapter is None or adapter[1] == "A"):
            found.append((parameter, 1))
    return found


def _cut_vocabulary(names: Mapping[int, str], base: Any, count: int, shards: dict[str, int]) -> None:
    """The rows of the embedding and the head, of which a head may be tied to it; where ``count`` does not divide them,
    or where they are trained, they stay whole."""
    table, head = base.get_input_embeddings().weight, base.get_output_embeddings()
    for weight in (table, *(() if head is None else (head.weight,))):
        name = names[id(weight)]
        if weight.requires_grad or weight.shape[0] % count:
            shards.pop(name, None)
        else:
            shards[name] = 0
