"""Masks of attention in rows of one length, whatever their own: the same values, for the capturing thread alone."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from disco_accel.capture.attention import masks_in_rows_of

MASKS = {
    "of rows": lambda n: torch.rand(2, 1, 1, n) > 0.3,
    "of heads": lambda n: torch.randn(2, 3, 1, n),
    "of all": lambda n: torch.rand(1, n) > 0.3,
    "one number a row": lambda n: torch.randn(2, 1, 1, 1),
}


class _Strides(TorchDispatchMode):
    """Collects the strides of masks that attention's kernels are given."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "attention" in str(func):
            self.found += [value.stride() for value in (kwargs or {}).values() if isinstance(value, torch.Tensor)]
        return func(*args, **(kwargs or {}))


def attended(mask: torch.Tensor, tokens: int) -> tuple[torch.Tensor, list[tuple[int, ...]]]:
    torch.manual_seed(1)
    query, key, value = torch.randn(2, 3, 1, 16), torch.randn(2, 3, tokens, 16), torch.randn(2, 3, tokens, 16)
    with torch.no_grad(), _Strides() as strides:
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask), strides.found


@pytest.mark.parametrize("tokens", [5, 8, 11])
@pytest.mark.parametrize("kind", MASKS)
def test_attention_has_the_bits_and_rows_begin_at_multiples_of_eight(kind: str, tokens: int) -> None:
    torch.manual_seed(0)
    mask = MASKS[kind](tokens)
    expected, _ = attended(mask, tokens)
    with masks_in_rows_of(11):
        got, strides = attended(mask, tokens)
    assert torch.equal(got, expected)
    if mask.shape[-1] == tokens:
        assert strides and all(step % 8 == 0 for *rows, last in strides for step in rows) and strides[0][-1] == 1


def test_another_thread_and_longer_masks_are_left_alone() -> None:
    mask, found = MASKS["of heads"](12), []
    with masks_in_rows_of(16):
        thread = threading.Thread(target=lambda: found.append(attended(mask, 12)[1]))
        thread.start()
        thread.join()
    with masks_in_rows_of(11):
        found.append(attended(mask, 12)[1])
    assert found == [[mask.stride()], [mask.stride()]]
