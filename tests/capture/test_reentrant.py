"""Reentrant checkpointing, and checkpoint functions of users: captured with eager's bits, or refused by name."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from disco_accel.capture.checkpointing import marked_below, never_reentrant
from disco_accel.capture.step import capture_step
from disco_accel.errors import CaptureError
from tests.capture.steps import Values, assert_same_bits, capture, run_captured, run_eager
from tests.support.models import family_lora, random_batch


def from_layers(checkpointing: Callable[..., Any]) -> Callable[..., Any]:
    """A plain function around a checkpoint function, as training frameworks have one: it looks at the layer that it is
    given, and makes the first input ask for a gradient where the layer trains."""

    def function(layer: Any, *args: Any, **options: Any) -> Any:
        owner = layer.func if isinstance(layer, functools.partial) else layer
        module = getattr(owner, "__self__", None) or layer.args[0]
        if not any(p.requires_grad for p in module.parameters()):
            return layer(*args, **options)
        next(a for a in args if isinstance(a, torch.Tensor) and a.is_floating_point()).requires_grad_(True)
        return checkpointing(layer, *args, **options)

    return function


class Holder:
    """A checkpoint function that is a method."""

    def run(self, layer: Any, *args: Any) -> Any:
        return checkpoint(layer, *args, use_reentrant=True)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "reentrant": functools.partial(checkpoint, use_reentrant=True),
    "left out": checkpoint,
    "plain": from_layers(functools.partial(checkpoint, use_reentrant=True)),
    "plain, not reentrant": from_layers(functools.partial(checkpoint, use_reentrant=False)),
    "partial of a closure": functools.partial(from_layers(checkpoint), use_reentrant=True),
    "method": Holder().run,
}


def switched_on(model: Any, function: Callable[..., Any]) -> Any:
    model.base_model.model._set_gradient_checkpointing(True, function)
    return model


def as_eager(model: Any, batch: dict[str, Any], region: Any = nullcontext) -> Any:
    """The captured step, after it has given eager's bits and drawn as often."""
    torch.manual_seed(4)
    before = torch.get_rng_state()
    with region():
        step = capture(model, batch)
    assert torch.equal(torch.get_rng_state(), before)
    expected = run_eager(model, batch, region())
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    assert_same_bits(run_captured(step, model, batch), expected)
    assert torch.equal(torch.get_rng_state(), after)
    return step


@pytest.mark.filterwarnings("ignore:torch.utils.checkpoint")
@pytest.mark.parametrize("kind", FUNCTIONS)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_any_function_that_ends_in_torchs_is_captured(family: str, kind: str) -> None:
    """With dropout; each layer is recomputed, as with non-reentrant checkpointing."""
    model = family_lora(family, lora_dropout=0.1, dropout=0.1)
    if not kind.startswith("p"):
        model.enable_input_require_grads()
    before = FUNCTIONS[kind]
    step = as_eager(switched_on(model, before), random_batch())
    plain = capture(family_lora(family, lora_dropout=0.1, dropout=0.1), random_batch())
    assert len(step.graph.ops) - len(plain.graph.ops) > 20, "two layers are computed twice"
    assert any(call.rng is not None and call.rng.replay for call in step.graph.ops.values())
    assert all(getattr(m, "_gradient_checkpointing_func", before) is before for m in model.modules())


@pytest.mark.parametrize("options", [{"preserve_rng_state": False}, {"autocast": True}], ids=["redrawn", "autocast"])
def test_options_of_reentrant_checkpointing_are_eagers(options: dict[str, bool]) -> None:
    """Where the generator is not set back, a recomputation to the end draws what nothing reads."""
    region = nullcontext
    if options.pop("autocast", False):
        region = functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16)
    model = family_lora("gpt2", lora_dropout=0.1, dropout=0.1)
    model.enable_input_require_grads()
    as_eager(switched_on(model, functools.partial(checkpoint, use_reentrant=True, **options)), random_batch(), region)


@pytest.mark.filterwarnings("ignore:None of the inputs")
def test_a_segment_that_eager_would_not_train_is_refused_with_the_way_out() -> None:
    model: Any = family_lora("llama")
    model.base_model.model._set_gradient_checkpointing(True, functools.partial(checkpoint, use_reentrant=True))
    with pytest.raises(CaptureError, match=r"no argument that requires a gradient.*enable_input_require_grads"):
        capture(model, random_batch())
    assert not model(**random_batch()).loss.requires_grad
    model.enable_input_require_grads()
    as_eager(model, random_batch())


class Recomputed(torch.autograd.Function):
    """Checkpointing of somebody's own."""

    @staticmethod
    def forward(ctx: Any, layer: Any, hidden: torch.Tensor) -> Any:
        ctx.layer = layer
        ctx.save_for_backward(hidden)
        with torch.no_grad():
            return layer(hidden)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        hidden = ctx.saved_tensors[0].detach().requires_grad_(True)
        with torch.enable_grad():
            output = ctx.layer(hidden)
        torch.autograd.backward(output, grad)
        return None, hidden.grad


def test_checkpointing_that_never_comes_to_torchs_is_refused() -> None:
    model = family_lora("llama")
    model.enable_input_require_grads()
    with pytest.raises(CaptureError, match=r"layers\.0 does not call torch\.utils\.checkpoint"):
        capture(switched_on(model, Recomputed.apply), random_batch())


def saved_away(layer: Any, *args: Any, **options: Any) -> Any:
    with torch.autograd.graph.save_on_cpu():
        return checkpoint(layer, *args, **options)


def rounded(layer: Any, *args: Any, **options: Any) -> Any:
    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.bfloat16, torch.Tensor.float):
        return checkpoint(layer, *args, **options)


def test_a_function_that_saves_on_the_host_is_captured_and_one_that_rounds_is_refused() -> None:
    model = family_lora("llama")
    model.enable_input_require_grads()
    as_eager(switched_on(model, functools.partial(saved_away, use_reentrant=False)), random_batch())
    with pytest.raises(CaptureError, match="saved_tensors_hooks"):
        capture(switched_on(model, functools.partial(rounded, use_reentrant=False)), random_batch())


class Toy(nn.Module):
    """``rule`` on two layers and the output of the first; what it gives is summed up to the loss."""

    def __init__(self, rule: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.rule = rule

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.rule(self.first(x), self.second, CHECKPOINT).sum()}


CHECKPOINT = functools.partial(checkpoint, use_reentrant=True)


def toy_eager(model: Toy, batch: dict[str, torch.Tensor]) -> Values:
    loss = model(**batch)["loss"]
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def skipped(h: torch.Tensor, layer: nn.Module, run: Any) -> torch.Tensor:
    """The argument is used three times in the segment and twice outside."""
    return h.exp() + run(lambda y: layer(y) * y.sin() + y.tanh(), h) * h.cos()


def nested(h: torch.Tensor, layer: nn.Module, run: Any) -> torch.Tensor:
    return run(lambda y: run(lambda z: layer(z).tanh() * z, y.sin()).exp(), h)


def several(h: torch.Tensor, layer: nn.Module, run: Any) -> torch.Tensor:
    """Two results, one that is no tensor, and an argument without gradient."""
    a, word, b = run(lambda y, scale, text: (layer(y).sin() * scale, text, y.exp().detach()), h, torch.ones(4), "b")
    return a + b if word == "b" else a


def drawn_late(h: torch.Tensor, layer: nn.Module, run: Any) -> torch.Tensor:
    """The last draw is not saved for the backward."""
    h = run(lambda y: layer(y).sin() + torch.rand(4), h, preserve_rng_state=False)
    return run(lambda y: functional.dropout(y, 0.5).exp(), h, preserve_rng_state=False).tanh()


@pytest.mark.parametrize("rule", [skipped, nested, several, drawn_late], ids=lambda rule: rule.__name__)
def test_reentrant_segments_of_any_shape_give_eagers_bits(rule: Any) -> None:
    model, batch = Toy(rule), {"x": torch.randn(3, 4)}
    with marked_below():
        step = capture_step(model, batch)
    torch.manual_seed(1)
    expected = toy_eager(model, batch)
    after = torch.get_rng_state()
    torch.manual_seed(1)
    assert_same_bits(run_captured(step, model, batch), expected)
    assert torch.equal(torch.get_rng_state(), after)


def captured_outside(h: torch.Tensor, layer: nn.Module, run: Any) -> torch.Tensor:
    other = h.sin()
    return run(lambda y: layer(y) * other, h)


def in_a_dict(h: torch.Tensor, layer: nn.Module, run: Any) -> torch.Tensor:
    return run(lambda y: {"out": layer(y)}, h)["out"]


def twice(h: torch.Tensor, layer: nn.Module, run: Any) -> torch.Tensor:
    return run(layer, run(layer, h).sin())


def outside_too(h: torch.Tensor, layer: nn.Module, run: Any) -> torch.Tensor:
    return layer(run(layer, h).sin())


def in_place(h: torch.Tensor, layer: nn.Module, run: Any) -> torch.Tensor:
    return run(lambda y, scale: layer(y) * scale.add_(1), h, torch.ones(4))


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (captured_outside, r"is no argument of it"),
        (in_a_dict, r"returns a dict"),
        (twice, r"second.* train the same parameter"),
        (outside_too, r"second.* train the same parameter"),
        (in_place, r"changes an argument"),
        (lambda h, layer, run: run(lambda y, scale: layer(y) * scale, h, scale=2.0), r"scale: .*no keyword"),
    ],
    ids=["captured tensor", "dict", "shared", "shared with the outside", "in place", "keyword"],
)
def test_reentrant_segments_that_eager_differentiates_otherwise_are_refused(rule: Any, message: str) -> None:
    with marked_below(), pytest.raises(CaptureError, match=message):
        capture_step(Toy(rule), {"x": torch.ones(3, 4)})


def kind_that_ran(found: list[list[bool]]) -> None:
    """Whether gradients are enabled when a reentrant segment runs, and when it runs again."""
    calls: list[bool] = []
    segment = lambda x: calls.append(torch.is_grad_enabled()) or x * 2  # noqa: E731
    CHECKPOINT(segment, torch.ones(2, requires_grad=True)).sum().backward()
    found.append(calls)


@pytest.mark.parametrize("context", [marked_below, never_reentrant])
def test_other_threads_and_later_calls_have_torchs_own_function(context: Any) -> None:
    found: list[list[bool]] = []
    with context():
        other = threading.Thread(target=kind_that_ran, args=(found,))
        other.start()
        other.join()
        kind_that_ran([])
    kind_that_ran(found)
    assert found == [[False, True], [False, True]], "eager's reentrant kind, first without gradients"


def test_what_replaces_reentrant_checkpointing_in_other_eager_steps_has_its_bits() -> None:
    """With it ``torch.autograd.grad`` gets the gradients that ``backward()`` gets without."""
    model, x = Toy(skipped), torch.randn(3, 4)
    loss, gradients = toy_eager(model, {"x": x})
    with never_reentrant():
        again = model(x)["loss"]
        by_name = torch.autograd.grad(again, list(model.parameters()))
    assert_same_bits((again.detach(), dict(zip(gradients, by_name, strict=True))), (loss, gradients))
