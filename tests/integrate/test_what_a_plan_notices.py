"""Whatever a forward reads and a user changes between steps: planned steps stay equal to eager ones, to the bit.

Each change is made on a prepared model and on its unprepared twin after a planned step; three more steps follow.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from disco_accel import DiscoConfig, prepare, stats
from disco_accel.errors import CaptureError, ExecutionError

CONFIG = DiscoConfig(memory_budget="64MiB", device="cpu", plan_cache=None, planner="build")
THIS = sys.modules[__name__]

GAIN = 1.0
TABLE = {"gain": 1.0}
FACTORS = [1.0, 1.0]


def helper(x: torch.Tensor) -> torch.Tensor:
    return x * 1.0


def other_helper(x: torch.Tensor) -> torch.Tensor:
    return x * 3.0


class Settings:
    def __init__(self, gain: float = 1.0) -> None:
        self.gain = gain
        self.nested = types.SimpleNamespace(gain=1.0)


class Slotted:
    __slots__ = ("gain",)

    def __init__(self) -> None:
        self.gain = 1.0


class Doubling(torch.autograd.Function):
    """Reads a Python number in its backward."""

    factor = 1.0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, tangent: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return tangent * 2 * Doubling.factor


class Scaled(nn.Module):
    """A layer that reads whatever Python state there can be."""

    class_gain = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.drop = nn.Dropout(0.0)
        self.gain = 1.0
        self.size = 8
        self.flag = False
        self.items = [1.0, 2.0]
        self.table = {"gain": {"deep": 1.0}}
        self.chosen: set[str] = {"linear"}
        self.window = collections.deque([1.0, 1.0])
        self.settings = Settings()
        self.slotted = Slotted()
        self.plain = torch.ones(8)
        self.array = np.ones(8, dtype=np.float32)
        self.function: Callable[[torch.Tensor], torch.Tensor] = functools.partial(torch.mul, other=1.0)
        self.unread = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.linear(x)) if "linear" in self.chosen else x
        x = self.drop(x) * self.gain * self.class_gain * self.items[1] * self.table["gain"]["deep"] * self.window[0]
        x = (
            x
            * torch.ones((), device=x.device).to(x.dtype)
            * self.settings.gain
            * self.settings.nested.gain
            * self.slotted.gain
            * GAIN
            * TABLE["gain"]
            * FACTORS[0]
        )
        x = Doubling.apply(self.function(helper(x)) * self.plain * torch.tensor(self.array))
        return -x if self.flag else x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = Scaled()
        self.body.requires_grad_(False)
        self.head = nn.Linear(8, 4)
        self.adapter = nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.head(self.body(x * self.adapter)).square().mean()
        return loss


GLOBAL_HANDLES: list[Any] = []


def _of_all(module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor | None:
    return output * 2 if isinstance(module, nn.LayerNorm) else None


def _hook(_module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 1.5


def _pre_hook(_module: Any, args: Any) -> Any:
    return (args[0] * 0.5,)


def _backward_hook(_module: Any, gradients: Any, _outputs: Any) -> Any:
    return tuple(None if g is None else g * 2 for g in gradients)


def _set(path: str, value: Any) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        owner, _, name = path.rpartition(".")
        setattr(functools.reduce(getattr, owner.split("."), model) if owner else model, name, value)

    return change


def _replaced_forward(model: Any) -> None:
    layer, gain = model.body.linear, 0.25
    layer.forward = lambda x: nn.functional.linear(x, layer.weight) * gain


def _cell_of_forward(model: Any) -> None:
    """Changes what a closure holds, which was put there before the first step."""
    model.body.closed["set"](3.0)


def _with_closure(model: Any) -> None:
    inner, gain = model.body.linear, 1.0

    def forward(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, inner.weight) * gain

    def change(value: float) -> None:
        nonlocal gain
        gain = value

    inner.forward = forward
    model.body.closed = {"set": change}


def _hooked(model: Any) -> None:
    model.handle = model.body.linear.register_forward_hook(_hook)


def _swap_layer(model: Any) -> None:
    torch.manual_seed(5)
    model.body.linear = nn.Linear(8, 8).requires_grad_(False)


PREPARED: dict[str, Callable[[Any], None]] = {
    "closure variable": _with_closure,
    "forward hook removed": _hooked,
    "forward hook's table cleared": _hooked,
}
CHANGES: dict[str, Callable[[Any], Any]] = {
    "forward hook": lambda m: m.body.linear.register_forward_hook(_hook),
    "forward hook removed": lambda m: m.handle.remove(),
    "forward hook's table cleared": lambda m: m.body.linear._forward_hooks.clear(),
    "forward pre-hook": lambda m: m.body.norm.register_forward_pre_hook(_pre_hook),
    "forward hook with kwargs": lambda m: m.body.norm.register_forward_hook(
        lambda _m, _a, _k, output: output * 2, with_kwargs=True
    ),
    "full backward hook": lambda m: m.body.register_full_backward_hook(_backward_hook),
    "attribute, float": _set("body.gain", 2.0),
    "attribute, bool": _set("body.flag", True),
    "attribute, float for an int": _set("body.norm.eps", 0.5),
    "attribute deleted, class attribute behind it": _set("body.class_gain", 4.0),
    "class attribute": lambda m: setattr(Scaled, "class_gain", 3.0),
    "method of a class": lambda m: setattr(nn.LayerNorm, "forward", lambda self, x: x + 1),
    "list item": lambda m: m.body.items.__setitem__(1, 5.0),
    "list replaced": _set("body.items", [1.0, 7.0]),
    "nested dict": lambda m: m.body.table["gain"].update(deep=2.5),
    "set": lambda m: m.body.chosen.clear(),
    "deque": lambda m: m.body.window.rotate() or m.body.window.appendleft(3.0),
    "attribute of an object": _set("body.settings.gain", 0.5),
    "attribute of an object's object": _set("body.settings.nested.gain", 0.125),
    "object replaced": _set("body.settings", Settings(2.0)),
    "slot of an object": _set("body.slotted.gain", 6.0),
    "tensor attribute replaced": _set("body.plain", torch.full((8,), 2.0)),
    "numpy array in place": lambda m: m.body.array.fill(0.5),
    "numpy array replaced": _set("body.array", np.full(8, 2.0, dtype=np.float32)),
    "partial replaced": _set("body.function", functools.partial(torch.mul, other=4.0)),
    "function replaced": _set("body.function", torch.sin),
    "closure variable": _cell_of_forward,
    "forward of a submodule": _replaced_forward,
    "global number": lambda m: setattr(THIS, "GAIN", 2.0),
    "global dict": lambda m: TABLE.update(gain=0.5),
    "global list": lambda m: FACTORS.__setitem__(0, 0.75),
    "global function": lambda m: setattr(THIS, "helper", other_helper),
    "number in a backward": lambda m: setattr(Doubling, "factor", 5.0),
    "function of torch": lambda m: setattr(nn.functional, "layer_norm", lambda x, *a, **k: x * 2),
    "dropout, then eval": lambda m: m.eval(),
    "submodule replaced": _swap_layer,
    "parameter replaced": lambda m: setattr(
        m.body.linear, "weight", nn.Parameter(torch.full((8, 8), 0.25), requires_grad=False)
    ),
    "parameter unfrozen": lambda m: m.body.linear.requires_grad_(True),
    "parameter frozen": lambda m: [m.adapter.requires_grad_(False)],
    "buffer registered": lambda m: (
        m.body.__dict__.pop("plain") is None or m.body.register_buffer("plain", torch.zeros(8))
    ),
    "attribute that nobody reads": _set("body.unread", 1),
    "global hooks": lambda m: GLOBAL_HANDLES.append(nn.modules.module.register_module_forward_hook(_of_all)),
    "default dtype": lambda m: torch.set_default_dtype(torch.bfloat16),
    "deterministic algorithms": lambda m: torch.use_deterministic_algorithms(True),
    "matmul precision": lambda m: torch.set_float32_matmul_precision("medium"),
}


NEEDS_NO_PLAN = ("attribute that nobody reads",)
SAME_BITS = (
    *NEEDS_NO_PLAN,
    "default dtype",
    "deterministic algorithms",
    "matmul precision",
    "attribute, bool",
    "dropout, then eval",
)
"""Changes after which eager has the bits that it had before: the key changes all the same."""


@contextlib.contextmanager
def undone() -> Iterator[None]:
    """Puts back all that the changes reach beyond the models."""
    layer_norm, forward, function = nn.functional.layer_norm, nn.LayerNorm.forward, helper
    try:
        yield
    finally:
        nn.functional.layer_norm, nn.LayerNorm.forward = layer_norm, forward  # type: ignore[method-assign]
        THIS.helper = function
        THIS.GAIN = 1.0
        Scaled.class_gain = Doubling.factor = 1.0
        TABLE["gain"] = FACTORS[0] = 1.0
        while GLOBAL_HANDLES:
            GLOBAL_HANDLES.pop().remove()
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision("highest")


def _results(model: Any, batches: list[Any]) -> list[Any]:
    seen: list[Any] = []
    for batch in batches:
        model.zero_grad(set_to_none=True)
        output = model(**batch) if isinstance(batch, dict) else model(batch)
        loss = output if isinstance(output, torch.Tensor) else output.loss
        loss.backward()
        seen.append((loss.detach().clone(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
    return seen


def _assert_equal(got: list[Any], expected: list[Any]) -> None:
    for (loss, gradients), (other_loss, others) in zip(got, expected, strict=True):
        assert torch.equal(loss, other_loss)
        assert gradients.keys() == others.keys()
        assert all(torch.equal(gradients[n], others[n]) for n in others)


def _input(seed: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))


def _run(kind: str, *, planned: bool, change: bool = True) -> list[Any]:
    """Two steps, the change, three steps."""
    with undone():
        model = Net()
        PREPARED.get(kind, lambda _: None)(model)
        if planned:
            prepare(model, CONFIG)
        results = _results(model, [_input(0), _input(1)])
        if change:
            CHANGES[kind](model)
        results += _results(model, [_input(2), _input(3), _input(4)])
        if planned:
            counts = stats(model)
            assert (counts["steps_compiled"], counts["steps_eager"]) == (5, 0)
            # Whatever matters has a plan of its own, and nothing else costs one.
            assert counts["plans"] == (1 if kind in NEEDS_NO_PLAN else 2)
    return results


def test_a_number_that_a_backward_reads_may_not_change_before_it() -> None:
    """Eager mode would read the new one; a change that was taken back is none."""
    with undone():
        model = prepare(Net(), CONFIG)
        model(_input(0)).backward()
        loss = model(_input(1))
        Doubling.factor = 2.0
        Doubling.factor = 1.0
        loss.backward()
        loss = model(_input(2))
        Doubling.factor = 2.0
        with pytest.raises(ExecutionError, match=r"class Doubling, factor, which Python code .*changed"):
            loss.backward()


@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_between_steps_is_followed(kind: str) -> None:
    expected = _run(kind, planned=False)
    _assert_equal(_run(kind, planned=True), expected)
    if kind not in SAME_BITS:
        with pytest.raises(AssertionError):
            _assert_equal(_run(kind, planned=False, change=False), expected)


class Shrinking(nn.Module):
    """Halves its frozen weight at each forward, past every op."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.weight = nn.Parameter(torch.ones(8, 8), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data = self.weight.data * 0.5
        return ((x * self.scale) @ self.weight).sum()


def test_a_forward_that_puts_other_data_into_a_weight_is_refused() -> None:
    model = prepare(Shrinking(), CONFIG)
    with pytest.raises(CaptureError, match=r"puts other data into a tensor of shape \(8, 8\)"):
        model(torch.ones(2, 8))
    assert torch.equal(model.weight, torch.ones(8, 8))
