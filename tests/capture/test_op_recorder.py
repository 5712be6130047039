"""What is recorded of a step is what ``make_fx`` traces of it, and modes of the user's own have their say first."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

from disco_accel.capture import result_memory
from disco_accel.capture.constants import tracing_mode
from disco_accel.capture.op_recorder import record_ops
from disco_accel.capture.result_memory import FakeResults
from disco_accel.capture.step import capture_forward
from disco_accel.capture.storages import tensor_spec, tensors_of
from disco_accel.capture.trace_log import TraceLog
from disco_accel.errors import CaptureError
from tests.capture.steps import feeds
from tests.support.interpret import interpret, view

Work = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_TABLE = torch.arange(12.0).reshape(3, 4)[1:]


def _views_and_lists(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    first, second = (x @ weight).split(2, dim=1)
    parts = torch.cat([second.t().contiguous(), first.t().contiguous()], dim=0)
    return parts.sort(dim=1).values.unsqueeze_(0).sum(0) + _TABLE[:1, :1]


def _in_place(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y = (x @ weight).clone()
    y[0].mul_(2.0)
    y.t_().add_(torch.tensor(3.0)).clamp_(min=0)
    return y


def _many_results(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y = functional.layer_norm(x @ weight, (4,))
    y = functional.dropout(y, 0.5)
    return functional.scaled_dot_product_attention(y[None, None], y[None, None], y[None, None])


def _recomputed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda given: functional.silu(given @ weight).sin(), x, use_reentrant=False)  # type: ignore[no-any-return]


def _known_number(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ weight * torch.tensor(2).item()


def _autocast(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return (x @ weight) @ weight


def _inference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        functional.linear(x, torch.ones(4, 4)).reshape(-1)
    return x @ weight


def _batched(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.vmap(lambda row: row @ weight)(x)


def _alike(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Calls that differ from an earlier one in what is easily overlooked."""
    y, counts = x @ weight, torch.ones(3, 4, dtype=torch.int64)
    made = [counts * 2, counts * 2.0, counts * 2, counts * True]
    made += [y.sum(0), y.sum(0, dtype=torch.float64), y.sum(0)]
    torch.set_default_dtype(torch.float64)
    made.append(counts / 2)
    torch.set_default_dtype(torch.float32)
    made.append(counts / 2)
    plain = y.detach()
    for turned in (plain.clone(), plain.clone().t_(), plain.clone().t_().unsqueeze_(1)):
        view = turned[1:]
        made += [turned.sum(0), view.sum(0), view.contiguous().sum(0)]
        turned.transpose_(0, -1)
        made += [turned.sum(0), view.sum(0), turned[1:].sum(0), *turned.sort(0), turned[1:].max(0).values]
    made += [torch.clamp(y, min=y.sum(0)), torch.clamp(y, max=y.sum(0)), y.real.sum(), y.expand(2, 3, 4).sum(0)]
    table = torch.zeros(8)
    made += [table.sum(), table.resize_(4, 2).sum(0), table.sum(0), y.detach().sum(0), y.data.sum(0)]
    return torch.stack([tensor.sum().to(y.dtype) for tensor in made])


_WORK = (
    _alike,
    _views_and_lists,
    _in_place,
    _many_results,
    _recomputed,
    _known_number,
    _autocast,
    _inference,
    _batched,
)


def _step(work: Work) -> Callable[..., list[torch.Tensor]]:
    def call(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        x, weight = tensors
        return list(torch.autograd.grad(work(x, weight).float().square().sum(), [weight]))

    return call


def _traced(work: Work, trace: Callable[..., Any]) -> Any:
    """In a fake mode of its own, as a capture does."""
    with tracing_mode(), torch.autograd.set_multithreading_enabled(False):
        return trace(_step(work), [torch.empty(3, 4), torch.empty(4, 4, requires_grad=True)])


def _recorded(call: Callable[..., Any], tensors: list[torch.Tensor]) -> TraceLog:
    log = TraceLog({})
    record_ops(call, [tensors], log)
    return log


def _ops(graph: fx.Graph) -> list[Any]:
    """Of each op its target, what each of its tensors is, and what it makes; in order.

    Tensors are numbered as they appear. ``make_fx`` takes a constant anew, and a result that is None, as well.
    """
    numbers: dict[Any, Any] = {}
    found = []

    def place(node: fx.Node) -> Any:
        if node.op == "get_attr":
            return "constant"
        if node.target is operator.getitem:
            return place(node.args[0]), node.args[1]  # type: ignore[arg-type]
        return numbers[node]

    for node in graph.nodes:
        if node.op == "placeholder" or (node.op == "call_function" and node.target is not operator.getitem):
            numbers[node] = len(numbers)
        if node.op == "get_attr" or node.op == "placeholder" or node.target is operator.getitem:
            continue
        arguments = fx.node.map_arg((node.args, node.kwargs), place)
        twins = [None if twin is None else tensor_spec(twin) for twin in tensors_of(node.meta.get("val"))]
        found.append((str(node.target), arguments, twins))
    return found


@pytest.mark.parametrize("work", _WORK)
def test_the_ops_are_those_that_make_fx_traces(work: Work) -> None:
    """Targets, arguments, layouts and order, of backward and recomputation as well."""
    recorded = _ops(_traced(work, _recorded).graph)
    traced = _ops(_traced(work, lambda call, tensors: make_fx(call, tracing_mode="real")(tensors)).graph)
    assert recorded == traced
    assert len(recorded) > 5


@pytest.mark.parametrize("work", _WORK)
def test_a_second_trace_finds_the_results_of_the_first(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the same ops under a mode of its own, and makes no result anew that the first could keep. A trace after
    all results were forgotten has the same ops, too."""
    first = _ops(_traced(work, _recorded).graph)
    kept: list[Any] = []
    monkeypatch.setattr(FakeResults, "keep", lambda self, key, tensors, returned: kept.append((key[0], returned)))
    assert _ops(_traced(work, _recorded).graph) == first
    assert [op for op, returned in kept if isinstance(returned, torch.Tensor)] == []
    monkeypatch.undo()
    monkeypatch.setattr(result_memory, "_MOST", -1)
    assert _ops(_traced(work, _recorded).graph) == first


class _Doubling(TorchDispatchMode):
    """Makes each product twice as large."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made * 2.0 if func is torch.ops.aten.mm.default else made


def test_a_mode_of_the_users_changes_the_step_as_it_changes_eagers() -> None:
    """It was entered before the capture; afterwards it is where it was."""
    model, x = torch.nn.Linear(4, 4, bias=False), torch.randn(2, 4)
    with _Doubling() as mode:
        expected = model(x)
        step = capture_forward(model, {"x": x}, forward=lambda x: {"y": model(x)})
        assert _get_current_dispatch_mode_stack() == [mode]
    output = step.outputs[0]
    got = view(interpret(step.graph, feeds(step, model, {"x": x}))[output.ref], output.spec)
    assert torch.equal(got, expected) and not torch.equal(got, model(x))


def test_an_op_that_takes_functions_is_refused() -> None:
    model, x = torch.nn.Linear(4, 4), torch.randn(2, 4)

    def forward(x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": torch.ops.higher_order.cond(x.sum() > 0, torch.sin, torch.cos, (model(x),))}

    with pytest.raises(CaptureError, match=r"cond in module \? is not an aten op"):
        capture_forward(model, {"x": x}, forward=forward)
