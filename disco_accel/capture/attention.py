"""Attention while it is captured: without cuDNN's kernels, and with masks in rows of one length.

PyTorch prefers cuDNN's kernels for 16-bit numbers on some GPUs. cuDNN makes a handle and a workspace of its own for
each thread and stream, and a plan for each shape that it meets. No schedule has that memory. Steps are captured with
the kernels that PyTorch takes next, flash or the memory-efficient ones, whose allocations are all PyTorch's.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import fx

from disco_accel.capture.thread_patches import patched
from disco_accel.errors import CaptureError
from disco_accel.graph.op_traits import op_traits
from disco_accel.native.backend import backend_of

_lock = threading.RLock()
_switched_off = False
"""The process has it switched off for a call, and the user does not."""

_ALIGNED = 8
"""Numbers: rows of masks begin at multiples of these for PyTorch's memory-efficient attention."""
_OTHERS = ("_get_flash_sdp_enabled", "_get_mem_efficient_sdp_enabled", "_get_math_sdp_enabled")


def cudnn_attention_wanted() -> bool:
    """Whether the user lets PyTorch take cuDNN's attention; a capture may have switched it off meanwhile."""
    with _lock:
        return _switched_off or bool(torch._C._get_cudnn_sdp_enabled())


@contextmanager
def without_cudnn_attention(device: torch.device) -> Iterator[None]:
    """Attention that this thread computes on a CUDA ``device`` inside takes another kernel than cuDNN's.

    PyTorch has one switch for the process: it is off during each call of ``scaled_dot_product_attention`` alone.

    Raises:
        CaptureError: from such a call, where the user allows no other kernel.
    """
    if not backend_of(device).has_cudnn:
        yield
        return
    with patched(torch.nn.functional, "scaled_dot_product_attention", _switching):
        yield


@contextmanager
def cudnn_attention_off(device: torch.device) -> Iterator[None]:
    """The same for all threads of the process: a backward on a GPU, which recomputes, runs in PyTorch's own."""
    with _switched() if backend_of(device).has_cudnn else nullcontext():
        yield


@contextmanager
def masks_in_rows_of(columns: int) -> Iterator[None]:
    """Attention that this thread computes inside gets masks of up to so many columns in rows of that length.

    PyTorch's memory-efficient kernel needs rows that begin at multiples of eight numbers, and pads others: the ops of
    one forward would differ from length to length. The values are PyTorch's own."""
    with patched(torch.nn.functional, "scaled_dot_product_attention", functools.partial(_with_rows, columns)):
        yield


def _with_rows(columns: int, attention: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(attention)
    def attend(query: Any, key: Any, value: Any, attn_mask: Any = None, *args: Any, **kwargs: Any) -> Any:
        if attn_mask is not None and attn_mask.shape[-1] == key.shape[-2] <= columns:
            attn_mask = _in_rows(attn_mask, columns, query.dtype)
        return attention(query, key, value, attn_mask, *args, **kwargs)

    return attend


def _in_rows(mask: torch.Tensor, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """``mask`` as numbers that are added, those of ``dtype`` if it hides or shows."""
    hides = mask.dtype == torch.bool
    shape = *mask.shape[:-1], -(-columns // _ALIGNED) * _ALIGNED
    made = torch.zeros(shape, dtype=dtype if hides else mask.dtype, device=mask.device)[..., : mask.shape[-1]]
    return made.masked_fill_(mask.logical_not(), -torch.inf) if hides else made.copy_(mask)


def _switching(attention: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(attention)
    def attend(*args: Any, **kwargs: Any) -> Any:
        with _switched():
            return attention(*args, **kwargs)

    return attend


@contextmanager
def _switched() -> Iterator[None]:
    global _switched_off
    with _lock:
        if not torch._C._get_cudnn_sdp_enabled():
            yield
            return
        if not any(getattr(torch._C, reader)() for reader in _OTHERS):
            raise CaptureError(
                "sdpa_kernel: cuDNN's attention, the only one allowed, takes memory that a plan does not know; "
                "allow FLASH_ATTENTION or EFFICIENT_ATTENTION beside it"
            )
        _switched_off = True
        torch._C._set_sdp_use_cudnn(False)
        try:
            yield
        finally:
            torch._C._set_sdp_use_cudnn(True)
            _switched_off = False


def refuse_cudnn_attention(graph: fx.Graph) -> None:
    """For attention that is reached otherwise than by ``torch.nn.functional``.

    Raises:
        CaptureError: an op of the traced ``graph`` is refused, as cuDNN's attention is.
    """
    for node in graph.nodes:
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        reason = op_traits(node.target._schema.name).refused
        if reason:
            raise CaptureError(f"{node.target}: {reason}")
