"""optimum-quanto: wrapper subclasses, which name their own inner tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch._subclasses import FakeTensor

from disco_accel.quantised.library import QuantLibrary


def _dequantize(dequantize: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The library dequantises each input whose type is not ``torch.Tensor`` itself; of a plain tensor's twin that would
    be a float32 copy, which its own step does not make."""

    def dequantized(tensor: torch.Tensor) -> torch.Tensor:
        caller = sys._getframe(2).f_globals.get("__name__", "")
        if isinstance(tensor, FakeTensor) and not tensor.is_quantized and caller.startswith("optimum.quanto."):
            return tensor
        return dequantize(tensor)

    return dequantized


QUANTO = QuantLibrary(
    name="optimum-quanto",
    package="optimum-quanto",
    quant_method="quanto",
    module="optimum.quanto",
    needs_headers=True,
    tensor_patches={"dequantize": _dequantize},
)
