"""Settings of PyTorch's that are no part of a model and decide which kernels its step runs."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch.utils import _python_dispatch
from torch.utils._device import DeviceContext

from disco_accel.capture.attention import cudnn_attention_wanted
from disco_accel.capture.autocast import autocast_state
from disco_accel.errors import CaptureError
from disco_accel.native.backend import backend_of_kind
from disco_accel.native.device_types import DEVICE_TYPES

_READERS = (
    "_get_flash_sdp_enabled",
    "_get_mem_efficient_sdp_enabled",
    "_get_math_sdp_enabled",
    "_get_overrideable_sdp_enabled",
    "_get_math_sdp_allow_fp16_bf16_reduction",
    "_get_sdp_priority_order",
    "_get_deterministic_algorithms",
    "_get_deterministic_algorithms_warn_only",
    "_get_deterministic_fill_uninitialized_memory",
    *(name for kind in DEVICE_TYPES for name in backend_of_kind(kind).switches),
)
"""Of ``torch._C``; versions of PyTorch that lack one do not have the setting."""
_OF_BACKENDS = (backend_of_kind(kind).precisions for kind in DEVICE_TYPES)
_PRECISIONS = (("generic", "all"), *((b, op) for b in _OF_BACKENDS for op in ("matmul", "conv", "rnn")))

_readers: tuple[Callable[[], Any], ...] = tuple(
    reader for name in _READERS if callable(reader := getattr(torch._C, name, None))
)
_precision: Callable[[str, str], Any] | None = getattr(torch._C, "_get_fp32_precision_getter", None)


def ambient_state() -> tuple[Hashable, ...]:
    """What is set for the process or for this thread, as part of a step's key.

    Raises:
        CaptureError: a mode is active that sees every op, or anomaly detection; what a plan runs would escape it.
    """
    _refuse_modes()
    settings = [reader() for reader in _readers]
    settings.append(cudnn_attention_wanted())
    precisions = () if _precision is None else tuple([_precision(*which) for which in _PRECISIONS])
    return (
        autocast_state(),
        torch.get_float32_matmul_precision(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.backends.mha._is_fastpath_enabled if hasattr(torch.backends, "mha") else None,
        _default_device(),
        tuple([tuple(s) if type(s) is list else s for s in settings]),
        precisions,
    )


def _default_device() -> str:
    device = getattr(torch.utils._device, "CURRENT_DEVICE", None)
    return "" if device is None else str(device)


def _refuse_modes() -> None:
    for index in range(torch._C._len_torch_function_stack()):
        mode = torch._C._get_function_stack_at(index)
        if not isinstance(mode, DeviceContext):
            raise CaptureError(_mode_message(mode))
    if torch._C._len_torch_dispatch_stack():
        raise CaptureError(_mode_message(_python_dispatch._get_current_dispatch_mode()))
    if torch.is_anomaly_enabled():
        raise CaptureError(
            "detect_anomaly: a planned step runs its kernels without autograd, which could name no op; "
            "look for the anomaly with restore(model), or leave detect_anomaly out"
        )


def _mode_message(mode: object) -> str:
    return (
        f"{type(mode).__name__}: this mode sees every op that runs inside it, and a planned step's ops run elsewhere; "
        "leave the mode out around planned steps, or use it with restore(model)"
    )
