"""Ops of language models, as PyTorch's own database samples them, give eager's bits in a planned step.

``DISCO_OPINFO=n`` takes n samples of each op and dtype; ``python -m tests.execute.opinfo`` takes nearly all.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
import torch

from tests.execute import opinfo

_MOST = int(os.environ.get("DISCO_OPINFO", "0"))


def _dtypes(name: str) -> tuple[torch.dtype, ...]:
    """All where asked for; else one, so that the tests take half a minute."""
    if _MOST:
        return opinfo.DTYPES
    supported = opinfo.database()[name].supported_dtypes("cpu")
    return tuple(d for d in opinfo.DTYPES[len(name) % 2 :] if d in supported)[:1]


@pytest.mark.parametrize("name", opinfo.NAMES)
def test_samples_give_eagers_bits(name: str) -> None:
    """Forward and backward, in the least memory, at random order, on poisoned memory, without an allocation."""
    if name not in opinfo.database():
        pytest.skip("not in this PyTorch's database")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, wrong = opinfo.sweep(name, _dtypes(name), max(_MOST, 1))
    assert not wrong, "\n".join(wrong)


def _random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype).requires_grad_()


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)[0]


def _rotary(x: torch.Tensor, cos: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * cos


def _in_place(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = x * 2
    z.unsqueeze_(0)
    z.add_(y)
    return z.squeeze_(0).mul_(y)


def _repeat_by_tensor(x: torch.Tensor, repeats: torch.Tensor) -> torch.Tensor:
    return torch.repeat_interleave(x, repeats, 0, output_size=5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("call", "args"),
    [
        (_attention, (_random(2, 4, 16, 8), _random(2, 4, 16, 8), _random(2, 4, 16, 8))),
        (_rotary, (_random(2, 4, 6, 8), _random(6, 8))),
        (_in_place, (_random(3, 4), _random(3, 4))),
        (torch.rms_norm, (_random(3, 5, 8), [8], _random(8), 1e-6)),
        (torch._grouped_mm, (_random(12, 16), _random(3, 16, 8), torch.tensor([2, 7, 12], dtype=torch.int32))),
        (torch.softmax, (_random(), 0)),
        (torch.repeat_interleave, (_random(2, 3), 3, 1)),
        (_repeat_by_tensor, (_random(5), torch.tensor([1, 0, 2, 1, 1]))),
    ],
    ids=[
        "flash_attention",
        "rotary",
        "in_place",
        "rms_norm",
        "grouped_mm",
        "scalar_softmax",
        "repeat",
        "repeat_by_tensor",
    ],
)
def test_calls_that_the_database_lacks(call: Any, args: tuple[Any, ...], dtype: torch.dtype) -> None:
    """Attention as we capture it, rotary embeddings, in-place ops that reshape, mixtures of experts."""
    if call is torch._grouped_mm and dtype is torch.float32:
        pytest.skip("its shape function takes bfloat16 alone, so fp32 cannot be traced")
    given = [
        a.detach().to(dtype).requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() else a
        for a in args
    ]
    opinfo.check(opinfo.sample_of(call.__name__, call, *given))


def test_the_judge_can_fail() -> None:
    """A step whose memory is not what it should be is told from eager's."""
    sample = opinfo.sample_of("mul", torch.mul, _random(4, 4), _random(4, 4))
    traced = opinfo.trace(sample)
    with pytest.raises(AssertionError, match="differs from eager"):
        opinfo.assert_bits(torch.zeros(4, 4), sample.eager()[0].detach(), "result 0")  # type: ignore[union-attr]
    assert traced.values


def test_what_cannot_be_planned_is_said_by_name() -> None:
    """Allocations that depend on values are a typed error that names the op, never a wrong result."""
    counts, wrong = opinfo.sweep("masked_scatter", (torch.float32,), 4)
    assert not wrong and counts["values"] > 0
