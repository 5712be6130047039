"""The linear layers of a model in the packed forms of bitsandbytes, torchao, hqq and optimum-quanto, where they lie.

Each library is imported by the form that is asked for. Sizes of layers must suit it: a multiple of 128 suits all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Quantise = Callable[[torch.nn.Module], None]
"""Packs a model's linear layers in place."""

_OUTPUT = "lm_head"
"""Stays as it is, as in transformers."""


def _each_linear(model: torch.nn.Module, packed: Callable[[torch.nn.Linear], torch.nn.Module]) -> None:
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is torch.nn.Linear and name != _OUTPUT:
                setattr(module, name, packed(child))


def bnb_4bit(quant_type: str = "nf4", nested: bool = False) -> Quantise:
    """bitsandbytes' 4-bit weights, ``nested``: with quantised scales."""

    def packed(layer: torch.nn.Linear) -> torch.nn.Module:
        from bitsandbytes.nn import Linear4bit, Params4bit

        bias = layer.bias is not None
        options = {"compress_statistics": nested, "quant_type": quant_type}
        # Weights of its own, which it would draw on one core, never exist.
        made = Linear4bit(
            layer.in_features, layer.out_features, bias, layer.weight.dtype, device=torch.device("meta"), **options
        )
        made.weight = Params4bit(layer.weight.data, requires_grad=False, module=made, **options)
        if bias:
            made.bias = layer.bias
        return made.to(layer.weight.device)  # type: ignore[no-any-return]

    def quantise(model: torch.nn.Module) -> None:
        _each_linear(model, packed)
        # As transformers marks what it has loaded: PEFT then puts its own layers for such weights around them.
        model.__dict__["is_loaded_in_4bit"] = True

    return quantise


def bnb_int8(threshold: float = 6.0) -> Quantise:
    """bitsandbytes' 8-bit weights; ``threshold`` for outliers is transformers' default."""

    def packed(layer: torch.nn.Linear) -> torch.nn.Module:
        from bitsandbytes.nn import Int8Params, Linear8bitLt

        bias = layer.bias is not None
        kind = {"has_fp16_weights": False, "threshold": threshold, "device": torch.device("meta")}
        made = Linear8bitLt(layer.in_features, layer.out_features, bias, **kind)
        made.weight = Int8Params(layer.weight.data, requires_grad=False, has_fp16_weights=False)
        if bias:
            made.bias = layer.bias
        return made.to(layer.weight.device)  # type: ignore[no-any-return]

    def quantise(model: torch.nn.Module) -> None:
        _each_linear(model, packed)
        model.__dict__["is_loaded_in_8bit"] = True

    return quantise


def bnb_experts(nested: bool = False) -> Quantise:
    """bitsandbytes' NF4 for the fused experts of a mixture, the other linear layers too."""

    def quantise(model: torch.nn.Module) -> None:
        from bitsandbytes.nn.parametrize import replace_parameter_4bit

        for module in list(model.modules()):
            for name, parameter in list(module.named_parameters(recurse=False)):
                if parameter.dim() == 3:
                    replace_parameter_4bit(module, name, compress_statistics=nested, quant_type="nf4")
        bnb_4bit(nested=nested)(model)

    return quantise


def torchao(config: str) -> Quantise:
    """torchao's tensor subclasses; ``config``: the name of one of its configurations."""

    def quantise(model: torch.nn.Module) -> None:
        import torchao.quantization

        settings = getattr(torchao.quantization, config)()
        torchao.quantization.quantize_(model, settings, filter_fn=_is_linear)

    return quantise


def _is_linear(module: torch.nn.Module, name: str) -> bool:
    return type(module) is torch.nn.Linear and not name.endswith(_OUTPUT)


def quanto(weights: str) -> Quantise:
    """optimum-quanto's tensor subclasses; ``weights``: such as qint4."""

    def quantise(model: torch.nn.Module) -> None:
        from optimum import quanto as library

        library.quantize(model, weights=getattr(library, weights), exclude=_OUTPUT)
        library.freeze(model)

    return quantise


def hqq_4bit() -> Quantise:
    """hqq's layers, 4 bits in groups of 64."""

    def packed(layer: torch.nn.Linear) -> torch.nn.Module:
        from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

        settings: Any = BaseQuantizeConfig(nbits=4, group_size=64)
        where, dtype = str(layer.weight.device), layer.weight.dtype
        return HQQLinear(layer, settings, compute_dtype=dtype, device=where)  # type: ignore[no-any-return]

    return lambda model: _each_linear(model, packed)


FORMS: dict[str, Quantise] = {
    "bitsandbytes NF4": bnb_4bit(),
    "bitsandbytes NF4, double": bnb_4bit(nested=True),
    "bitsandbytes FP4": bnb_4bit("fp4"),
    "bitsandbytes int8": bnb_int8(),
    "torchao int8": torchao("Int8WeightOnlyConfig"),
    "torchao float8": torchao("Float8WeightOnlyConfig"),
    "torchao intx": torchao("IntxWeightOnlyConfig"),
    "hqq 4 bits": hqq_4bit(),
    "quanto int8": quanto("qint8"),
    "quanto float8": quanto("qfloat8"),
    "quanto int4": quanto("qint4"),
}
"""Forms that a training step was seen to go through, by library and name."""
