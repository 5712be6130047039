"""What autograd saves for a backward, away from the device: frozen weights where they lie, all else copied to the host.

With it an unplanned forward and backward on a device take no more of its memory than a module and its activations do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch

_SMALL = 4096
"""Bytes of a tensor that stays on the device."""


@contextmanager
def saved_on_host(
    device: torch.device, visitors: Mapping[int, torch.Tensor], staying: Iterable[torch.Tensor]
) -> Iterator[None]:
    """Inside, tensors on ``device`` are saved on the host; each comes back with its bits and strides.

    ``visitors``: address of a storage on the device to the tensor on the host that it is a copy of, at this moment.
    ``staying``: what lies on the device in any case, and is saved as it is.
    """
    stay = {tensor.untyped_storage().data_ptr() for tensor in staying}

    def pack(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        address = tensor.untyped_storage().data_ptr()
        original = visitors.get(address)
        if tensor.device != device or address in stay:
            return lambda: tensor
        if original is not None and original.dtype == tensor.dtype:
            size, stride, offset = tensor.size(), tensor.stride(), tensor.storage_offset()
            return lambda: original.detach().to(device).as_strided(size, stride, offset)
        if tensor.nbytes <= _SMALL:
            return lambda: tensor
        return _away(tensor.detach())

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda back: back()):
        yield


def _away(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A copy on the host, and how it comes back. Strides decide about kernels, and kernels about bits: they stay."""
    device, shape = tensor.device, tensor.shape
    once = tensor
    for dimension, stride in enumerate(tensor.stride()):
        if stride == 0:
            once = once.narrow(dimension, 0, 1)
    if torch._debug_has_internal_overlap(once) != 0:
        return lambda: tensor
    size, strides = once.size(), once.stride()
    host = torch.empty_strided(size, strides, dtype=once.dtype, device="cpu").copy_(once)
    return lambda: torch.empty_strided(size, strides, dtype=host.dtype, device=device).copy_(host).expand(shape)
