"""cuDNN's attention stays out of a capture: switched off for each call, put back, and refused where it is the only one.

The device is a CUDA one in name alone: the switches are the process's, and a CPU build of PyTorch has them too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import fx
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from disco_accel.capture.attention import cudnn_attention_wanted, refuse_cudnn_attention, without_cudnn_attention
from disco_accel.errors import CaptureError
from disco_accel.step.state.step_key import ambient_state

CUDA = torch.device("cuda", 0)
ORIGINAL = F.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = torch._C._get_cudnn_sdp_enabled()
    torch._C._set_sdp_use_cudnn(True)
    yield
    torch._C._set_sdp_use_cudnn(before)
    assert F.scaled_dot_product_attention is ORIGINAL


def attend() -> torch.Tensor:
    query = torch.randn(1, 1, 4, 8)
    return F.scaled_dot_product_attention(query, query, query)


def during_a_call(monkeypatch: pytest.MonkeyPatch, ask: Callable[[], Any]) -> list[Any]:
    """What ``ask`` answers while attention is computed inside a capture on CUDA."""
    seen = []

    def kernel(*args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(ask())
        return ORIGINAL(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", kernel)
        with without_cudnn_attention(CUDA):
            attend()
    return seen


def test_it_is_off_during_the_call_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert during_a_call(monkeypatch, torch._C._get_cudnn_sdp_enabled) == [False]
    with without_cudnn_attention(CUDA):
        assert torch._C._get_cudnn_sdp_enabled()
        with pytest.raises(RuntimeError):
            F.scaled_dot_product_attention(torch.ones(2, 3, 4), torch.ones(2, 3, 5), torch.ones(2, 3, 4))
        assert torch._C._get_cudnn_sdp_enabled(), "put back after an error, too"


def test_a_plans_key_does_not_see_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither this thread's nor another's, which waits for the end of the call; the user's own choice is seen."""
    before = ambient_state()
    assert during_a_call(monkeypatch, ambient_state) == [before]

    def start() -> tuple[threading.Thread, list[Any]]:
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(ambient_state()))
        thread.start()
        return thread, found

    ((thread, found),) = during_a_call(monkeypatch, start)
    thread.join(60)
    assert found == [before]
    torch._C._set_sdp_use_cudnn(False)
    assert ambient_state() != before and not cudnn_attention_wanted()


def test_other_threads_and_other_devices_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def kernel(*args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(torch._C._get_cudnn_sdp_enabled())
        return ORIGINAL(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", kernel)
        with without_cudnn_attention(CUDA):
            thread = threading.Thread(target=attend)
            thread.start()
            thread.join(60)
        with without_cudnn_attention(torch.device("cpu")):
            attend()
    assert seen == [True, True]


def test_what_the_user_switched_off_stays_off(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._C._set_sdp_use_cudnn(False)
    assert during_a_call(monkeypatch, torch._C._get_cudnn_sdp_enabled) == [False]
    assert not torch._C._get_cudnn_sdp_enabled()


def test_cudnn_alone_is_refused_with_what_to_allow() -> None:
    with without_cudnn_attention(CUDA), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        with pytest.raises(CaptureError, match=r"sdpa_kernel: .* allow FLASH_ATTENTION or EFFICIENT_ATTENTION"):
            attend()
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]):
            attend()


def test_attention_that_went_another_way_is_refused() -> None:
    """As a function that somebody imported from torch.nn.functional by name before."""
    graph = fx.Graph()
    query = graph.placeholder("query")
    op = torch.ops.aten._scaled_dot_product_cudnn_attention.default
    graph.call_function(torch.ops.aten.mul.Tensor, (query, query))
    refuse_cudnn_attention(graph)
    graph.call_function(op, (query, query, query, None, False))
    with pytest.raises(CaptureError, match="enable_cudnn_sdp"):
        refuse_cudnn_attention(graph)
