"""What layers of quantisation libraries do to their own weights at their first forward, done before it is captured.

Such a layer assigns to ``weight.data`` or ``bias.data``, which no graph can say; afterwards it does so no more.
Recognised by the names of classes and attributes: the libraries need not be there.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

_CONVERT = "_convert_weight_packed_for_cpu"
"""bitsandbytes' own function: another order of the packed bytes, for a kernel of CPUs with AVX512 for bfloat16."""


def run_first_forward_changes(model: torch.nn.Module, device: torch.device, *, gradients: bool) -> None:
    """Leave the layers of ``model`` as their first forward on ``device`` would. ``gradients``: of a training step."""
    for module in model.modules():
        if any(c.__name__ == "Linear4bit" for c in type(module).__mro__):
            _cast_bias(module)
            if device.type == "cpu" and not (gradients or module.training):
                _repack(module)


def _cast_bias(layer: Any) -> None:
    dtype, bias = getattr(layer, "compute_dtype", None), layer.bias
    if dtype is not None and bias is not None and bias.dtype is not dtype and not bias.requires_grad:
        bias.data = bias.data.to(dtype)


def _repack(layer: Any) -> None:
    state = getattr(layer.weight, "quant_state", None)
    if state is None or getattr(state, "packing_format_for_cpu", False):
        return
    convert = getattr(sys.modules.get(type(state).__module__), _CONVERT, None)
    if getattr(layer, "support_avx512bf16_for_cpu", False) and convert is not None:
        layer.weight.data, layer.weight.quant_state = convert(layer.weight.data, state)
