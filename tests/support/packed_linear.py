"""4-bit weights written by hand: the form in which libraries pack and dequantise them, without a library."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

_GROUP = 16


def dequantised(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The weight of ``shape`` in bf16 from two codes to a byte: a buffer filled in place, a shift, a mask, and
    ``(codes - zeros) * scales`` by groups of 16."""
    half = codes.shape[0]
    wide = torch.empty((2 * half, codes.shape[1]), dtype=torch.bfloat16, device=codes.device)
    wide[:half] = codes >> 4
    wide[half:] = codes & 0x0F
    return ((wide - zeros) * scales).reshape(shape)


class _Product(torch.autograd.Function):
    """``x @ weight.T`` whose backward dequantises the weight again instead of saving it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *packed: Any) -> torch.Tensor:
        ctx.packed = packed
        return x @ dequantised(*packed).t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient @ dequantised(*ctx.packed), None, None, None, None


class PackedLinear(torch.nn.Module):
    """A frozen product of a 4-bit weight, and a trainable low-rank one beside it. ``saves``: autograd keeps the
    dequantised weight for the backward, which else dequantises it again."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor

    def __init__(self, inputs: int, outputs: int, *, saves: bool = False) -> None:
        super().__init__()
        self.shape, self.saves = torch.Size((outputs, inputs)), saves
        groups = outputs * inputs // _GROUP
        self.register_buffer("codes", torch.randint(0, 256, (_GROUP // 2, groups), dtype=torch.uint8))
        self.register_buffer("scales", (torch.rand(1, groups) / 64).bfloat16())
        self.register_buffer("zeros", torch.full((1, groups), 7.5).bfloat16())
        self.down = torch.nn.Parameter(torch.randn(4, inputs).bfloat16() / 8)
        self.up = torch.nn.Parameter(torch.randn(outputs, 4).bfloat16() / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        packed = self.codes, self.scales, self.zeros, self.shape
        again = _Product.apply
        product = x @ dequantised(*packed).t() if self.saves else again(x, *packed)  # type: ignore[no-untyped-call]
        adapted: torch.Tensor = product + (x @ self.down.t()) @ self.up.t()
        return adapted


class PackedLayers(torch.nn.Module):
    """Blocks of two products each, wide in between, whose forward returns a loss.

    ``checkpointed``: each block is recomputed in the backward.
    """

    def __init__(
        self, width: int = 128, layers: int = 4, *, checkpointed: bool = False, saves: bool = False, seed: int = 0
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.checkpointed = checkpointed
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(
                PackedLinear(width, 4 * width, saves=saves),
                torch.nn.SiLU(),
                PackedLinear(4 * width, width, saves=saves),
            )
            for _ in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + (
                checkpoint(block, x, use_reentrant=False, preserve_rng_state=False) if self.checkpointed else block(x)
            )
        return x.float().square().mean()
