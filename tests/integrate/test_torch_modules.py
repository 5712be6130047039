"""Modules of torch.nn: each trains from a plan with eager's bits, or is refused by name and eager mode takes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from disco_accel import prepare, stats
from disco_accel.errors import CaptureError, ExecutionError
from disco_accel.measure import record as recording
from tests.integrate.twins import config

Call = Callable[[Any, torch.Tensor], Any]
TOKENS, IMAGE, SIGNAL, ROWS, VOLUME = (2, 6, 8), (2, 3, 8, 8), (2, 4, 12), (4, 8), (2, 2, 4, 6, 8)


class _Does(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


class _Trains(nn.Module):
    """A small trainable layer, then the frozen module in question."""

    def __init__(self, frozen: nn.Module, width: int, call: Call) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.linear = nn.Linear(width, width)
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value = self.call(self.frozen, self.linear(x))
        while isinstance(value, (tuple, list)):
            value = value[0]
        return (value.float() ** 2).mean()


def _plain(module: Any, x: torch.Tensor) -> Any:
    return module(x)


def _itself(module: Any, x: torch.Tensor) -> Any:
    return module(x, x, x)


def _turned(module: Any, x: torch.Tensor) -> Any:
    return module(x, x.flip(0))


def _classes(module: Any, x: torch.Tensor) -> Any:
    return module(x, torch.arange(len(x)))


def _targets(module: Any, x: torch.Tensor) -> Any:
    return module(x.log_softmax(-1), torch.tensor([[1, 2], [2, 3]]), torch.tensor([4, 4]), torch.tensor([2, 2]))


def _looked_up(module: Any, x: torch.Tensor) -> Any:
    return module(torch.tensor([[1, 2, 1], [3, 0, 2]])).sum() * x


_Case = tuple[Callable[[], nn.Module], tuple[int, ...]] | tuple[Callable[[], nn.Module], tuple[int, ...], Call]
PLANNED: dict[str, _Case] = {
    "F.pad": (lambda: _Does(lambda x: F.pad(x, (2, 3))), TOKENS),
    "F.pad that cuts": (lambda: _Does(lambda x: F.pad(x, (-2, -3))), TOKENS),
    "F.pad that does both": (lambda: _Does(lambda x: F.pad(x, (2, -3, 1, 0))), TOKENS),
    "F.pad of a sequence": (lambda: _Does(lambda x: F.pad(x, (0, 0, 0, 5))), TOKENS),
    "F.pad of columns": (lambda: _Does(lambda x: F.pad(x.transpose(1, 2), (5, -1))), TOKENS),
    "ReflectionPad2d": (lambda: nn.ReflectionPad2d(2), IMAGE),
    "CircularPad2d": (lambda: nn.CircularPad2d(1), IMAGE),
    "LSTM, projected": (lambda: nn.LSTM(8, 5, proj_size=3), TOKENS),
    "GRU": (lambda: nn.GRU(8, 5, batch_first=True), TOKENS),
    "RNN": (lambda: nn.RNN(8, 5, nonlinearity="relu"), TOKENS),
    "LSTMCell": (lambda: nn.LSTMCell(8, 5), ROWS),
    "Conv1d": (lambda: nn.Conv1d(4, 6, 3, padding=1), SIGNAL),
    "Conv1d, causal": (lambda: nn.Conv1d(4, 4, 4, groups=4, padding=3), SIGNAL),
    "Conv1d, reflecting": (lambda: nn.Conv1d(4, 6, 3, padding=1, padding_mode="reflect"), SIGNAL),
    "Conv2d": (lambda: nn.Conv2d(3, 6, 3, stride=2, dilation=2, groups=3, padding=2), IMAGE),
    "Conv3d": (lambda: nn.Conv3d(2, 3, 3), VOLUME),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(4, 3, 3, stride=2), SIGNAL),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(3, 4, 3, stride=2, output_padding=1), IMAGE),
    "Embedding": (lambda: nn.Embedding(10, 8, padding_idx=1), TOKENS, _looked_up),
    "Embedding, sparse": (lambda: nn.Embedding(10, 8, sparse=True), TOKENS, _looked_up),
    "EmbeddingBag": (lambda: nn.EmbeddingBag(10, 8, mode="max"), TOKENS, _looked_up),
    "LayerNorm": (lambda: nn.LayerNorm(8), TOKENS),
    "RMSNorm": (lambda: nn.RMSNorm(8), TOKENS),
    "GroupNorm": (lambda: nn.GroupNorm(3, 3), IMAGE),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(3, affine=True), IMAGE),
    "weight_norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 4)), ROWS),
    "MaxPool2d": (lambda: nn.MaxPool2d(3, 2, 1), IMAGE),
    "AvgPool3d": (lambda: nn.AvgPool3d(2), VOLUME),
    "FractionalMaxPool2d": (lambda: nn.FractionalMaxPool2d(2, output_size=4), IMAGE),
    "AdaptiveAvgPool2d": (lambda: nn.AdaptiveAvgPool2d((3, 5)), IMAGE),
    "AdaptiveMaxPool1d": (lambda: nn.AdaptiveMaxPool1d(3), SIGNAL),
    "MultiheadAttention": (lambda: nn.MultiheadAttention(8, 2, dropout=0.2), TOKENS, _itself),
    "TransformerEncoderLayer": (lambda: nn.TransformerEncoderLayer(8, 2, 16), TOKENS),
    "TransformerDecoderLayer": (lambda: nn.TransformerDecoderLayer(8, 2, 16), TOKENS, _turned),
    "Upsample, bilinear": (lambda: nn.Upsample(scale_factor=2, mode="bilinear"), IMAGE),
    "Upsample, bicubic": (lambda: nn.Upsample(size=(5, 7), mode="bicubic", align_corners=True), IMAGE),
    "PixelShuffle": (lambda: nn.PixelShuffle(2), (2, 4, 4, 4)),
    "Bilinear": (lambda: nn.Bilinear(8, 8, 4), ROWS, _turned),
    "CosineSimilarity": (lambda: nn.CosineSimilarity(), ROWS, _turned),
    "Unfold": (lambda: nn.Unfold(3, padding=1), IMAGE),
    "Fold": (lambda: nn.Fold((4, 4), 2, stride=2), (2, 8, 4)),
    "CrossEntropyLoss": (lambda: nn.CrossEntropyLoss(torch.rand(8), ignore_index=1), ROWS, _classes),
    "MultiMarginLoss": (lambda: nn.MultiMarginLoss(), ROWS, _classes),
    "HuberLoss": (lambda: nn.HuberLoss(), ROWS, _turned),
    "KLDivLoss": (lambda: nn.KLDivLoss(log_target=True, reduction="batchmean"), ROWS, _turned),
    "TripletMarginLoss": (lambda: nn.TripletMarginLoss(), ROWS, lambda m, x: m(x, x.flip(0), x.roll(1, 0))),
    "Dropout2d": (lambda: nn.Dropout2d(0.3), IMAGE),
    "FeatureAlphaDropout": (lambda: nn.FeatureAlphaDropout(0.3), IMAGE),
    "RReLU": (lambda: nn.RReLU(), TOKENS),
    "PReLU": (lambda: nn.PReLU(), TOKENS),
    "GLU": (lambda: nn.GLU(), TOKENS),
    "Mish": (lambda: nn.Mish(), TOKENS),
    "fft": (lambda: _Does(lambda x: torch.fft.irfft(torch.fft.rfft(x) * 2)), TOKENS),
    "sort": (lambda: _Does(lambda x: x.sort(-1)[0] * x), TOKENS),
}
REFUSED: dict[str, tuple[_Case, str]] = {
    "LSTM": ((lambda: nn.LSTM(8, 5, batch_first=True), TOKENS), r"mkldnn_rnn_layer in frozen.*mkldnn\.set_flags"),
    "LSTM of two layers": (
        (lambda: nn.LSTM(8, 5, num_layers=2, bidirectional=True, dropout=0.3), TOKENS),
        "mkldnn_rnn_layer in frozen",
    ),
    "BatchNorm2d": ((lambda: nn.BatchNorm2d(3), IMAGE), "frozen changes an input"),
    "spectral_norm": ((lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 4)), ROWS), "changes an input"),
    "orthogonal": (
        (lambda: nn.utils.parametrizations.orthogonal(nn.Linear(8, 8)), ROWS),
        r"linalg_matrix_exp in frozen.* allocates memory according to the values",
    ),
    "Embedding, max_norm": ((lambda: nn.Embedding(10, 8, max_norm=1.0), TOKENS, _looked_up), "embedding_renorm_"),
    "CTCLoss": ((lambda: nn.CTCLoss(), (4, 2, 8), _targets), "_ctc_loss.* in module frozen"),
    "prod": ((lambda: _Does(lambda x: x.prod(-1)), TOKENS), "ProdBackward1 in module frozen"),
    "masked_scatter": (
        (lambda: _Does(lambda x: torch.zeros(2, 6, 8).masked_scatter(x.detach() > -9, x)), TOKENS),
        "masked_scatter_backward in frozen allocates memory according to the values",
    ),
}


def _built(case: _Case) -> nn.Module:
    torch.manual_seed(0)
    return _Trains(case[0](), case[1][-1], case[2] if len(case) > 2 else _plain)


def _trained(model: nn.Module, shape: tuple[int, ...]) -> list[torch.Tensor]:
    """Losses and gradients of two steps."""
    values = []
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for seed in range(2):
        torch.manual_seed(seed)
        loss = model(torch.randn(shape))
        loss.backward()
        values += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return values


def _assert_same(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("case", PLANNED.values(), ids=PLANNED.keys())
def test_a_module_trains_from_a_plan_to_eagers_bits(case: _Case) -> None:
    model = prepare(_built(case), config())
    _assert_same(_trained(model, case[1]), _trained(_built(case), case[1]))
    assert stats(model)["steps_eager"] == 0


@pytest.mark.parametrize(("case", "said"), REFUSED.values(), ids=REFUSED.keys())
def test_a_module_that_cannot_be_planned_is_refused_by_name_and_trains_in_eager_mode(case: _Case, said: str) -> None:
    with pytest.raises(CaptureError, match=said):
        _trained(prepare(_built(case), config()), case[1])
    model = prepare(_built(case), config(on_unsupported="eager"))
    _assert_same(_trained(model, case[1]), _trained(_built(case), case[1]))
    assert stats(model)["steps_eager"] == 2


@pytest.mark.parametrize("error", [RuntimeError, IndexError, ValueError, TypeError])
def test_whatever_goes_wrong_while_an_op_is_measured_names_it(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """Eager mode takes the step; a shortage of memory is no property of the step, and stays an error of its own."""

    def fail(*_: Any) -> Any:
        raise error("planted")

    monkeypatch.setattr(recording, "_steady", fail)
    case = PLANNED["LayerNorm"]
    with pytest.raises(CaptureError, match=r"measuring aten::\w+ in \w+ failed: planted"):
        _trained(prepare(_built(case), config()), case[1])
    model = prepare(_built(case), config(on_unsupported="eager"))
    _assert_same(_trained(model, case[1]), _trained(_built(case), case[1]))


def test_memory_that_runs_out_while_an_op_is_measured_is_not_taken_for_the_models_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case, steady = PLANNED["LayerNorm"], recording._steady
    model = prepare(_built(case), config(on_unsupported="eager"))

    def fail(*_: Any) -> Any:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(recording, "_steady", fail)
    with pytest.raises(ExecutionError, match="ran out of memory"):
        _trained(model, case[1])
    monkeypatch.setattr(recording, "_steady", steady)
    _assert_same(_trained(model, case[1]), _trained(_built(case), case[1]))
    assert stats(model)["steps_eager"] == 0
