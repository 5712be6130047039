"""Gradients whose clipping is left to a deferred update: whoever looks at one finds it clipped, once."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils._python_dispatch import TorchDispatchMode

from disco_accel import restore, settle
from disco_accel.errors import ExecutionError
from disco_accel.step.run.session import find_state
from tests.integrate.clipped_pair import LOW, Pair, as_bytes, as_they_lie, backward, gradients, same, to_low
from tests.integrate.fp32_copies import batches


@pytest.fixture
def pair() -> Pair:
    """Whose next clipping is left to the update."""
    return Pair()


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    yield
    gc.collect()
    assert "grad" not in vars(torch.nn.Parameter), "the property is there as long as it is needed"


def in_a_thread(read: Callable[[], Any]) -> Any:
    seen: list[Any] = []
    thread = threading.Thread(target=lambda: seen.append(read()))
    thread.start()
    thread.join()
    return seen[0]


def in_a_fork(model: Any) -> list[torch.Tensor]:
    """What a child process sees, past the property first: it has no threads to multiply with."""
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        try:
            seen = [*as_they_lie(model), model.first.weight.grad]
            os.write(theirs, b"".join(bytes(as_bytes(g).tolist()) for g in seen))
        finally:
            os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as pipe:
        sent = pipe.read()
    os.waitpid(child, 0)
    return [torch.frombuffer(bytearray(sent), dtype=torch.uint8)]


def evaluated(model: Any) -> list[torch.Tensor]:
    with torch.no_grad():
        model.first(torch.ones(1, 24))
    return as_they_lie(model)


LOOKS: dict[str, Callable[[Any], list[torch.Tensor]]] = {
    "one": lambda model: [model.last.weight.grad.clone()],
    "all": lambda model: [p.grad.clone() for p in model.parameters()],
    "by its other name": lambda model: [p._grad.clone() for p in model.parameters()],
    "getattr": lambda model: [getattr(p, "grad", None).clone() for p in model.parameters()],
    "a thread": lambda model: [in_a_thread(lambda: model.first.bias.grad.clone())],
    "a fork": in_a_fork,
    "settle": lambda model: (settle(model), as_they_lie(model))[1],
    "a forward": evaluated,
    "another clipping": lambda model: [clip_grad_norm_(model.parameters(), LOW / 2)],
    "clipping by value": lambda model: [clip_grad_value_(model.parameters(), 1e-3), *as_they_lie(model)][1:],
    "to": lambda model: as_they_lie(model.to(torch.float32)),
    "clipped again": lambda model: (
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), LOW, torch.tensor(1.0)),
        [p.grad.clone() for p in model.parameters()],
    )[1],
}


@pytest.mark.parametrize("look", LOOKS)
def test_whoever_looks_before_the_step_finds_clipped_gradients(pair: Pair, look: str) -> None:
    """And the update is that of what they found."""
    seen = []
    before = pair.deferred
    for model, optimizer in pair.both:
        backward(model, 20)
        to_low(model)
        seen.append(LOOKS[look](model))
        optimizer.step()
        model.zero_grad()
    assert same(*seen) and pair.deferred > before
    pair.go_on(2)
    pair.assert_same()


def test_whoever_looks_behind_the_step_finds_clipped_gradients(pair: Pair) -> None:
    """Before the update has run, behind it, and where the next gradients are added; nothing is multiplied twice."""
    for read in ((True, False), (False, True), (True, True), (False, False)):
        seen: list[list[torch.Tensor]] = []
        for model, optimizer in pair.both:
            backward(model, 30)
            to_low(model)
            optimizer.step()
            shown = [p.grad.clone() for p in model.parameters()] if read[0] else []
            loss = model(**batches(model, 31)[0])
            shown += [p.grad.clone() for p in model.parameters()] if read[1] else []
            loss.backward()
            seen.append([*shown, *(p.grad.clone() for p in model.parameters())])
            optimizer.step()
            model.zero_grad()
        assert same(*seen)
        pair.go_on()
    pair.assert_same()


def test_zero_grad_multiplies_nothing(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the optimizer's nor the model's, before or behind the update."""
    state = find_state(pair.model)
    assert state is not None and state.updates.deferral is not None
    multiplied: list[int] = []
    unscaled = state.updates.deferral.unscaled
    real = unscaled.multiply
    monkeypatch.setattr(unscaled, "multiply", lambda: (multiplied.append(len(unscaled.notes())), real())[1])
    for clear in ("model", "optimizer", "late"):
        for model, optimizer in pair.both:
            backward(model, 50)
            to_low(model)
            optimizer.step()
            if clear == "late":
                loss = model(**batches(model, 51)[0])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            (model if clear == "model" else optimizer).zero_grad()
        assert "grad" not in vars(torch.nn.Parameter)
    assert not sum(multiplied)
    pair.assert_same()
    for model, optimizer in pair.both:
        backward(model, 52)
        to_low(model)
        optimizer.zero_grad(set_to_none=False)
        backward(model, 53)
        optimizer.step()
        model.zero_grad()
    assert sum(multiplied)
    pair.assert_same()


def weak(model: Any) -> list[Any]:
    return [weakref.ref(p.grad) for p in model.parameters()]


HELD: dict[str, Callable[[Any], Any]] = {
    "gradients": lambda model: [p.grad for p in model.parameters()],
    "views": lambda model: [p.grad.view(-1)[:1] for p in model.parameters()],
    "data": lambda model: [p.grad.data for p in model.parameters()],
    "arrays": lambda model: [p.grad.numpy() for p in model.parameters()],
    "storages": lambda model: [p.grad.untyped_storage() for p in model.parameters()],
    "capsules": lambda model: [p.grad.__dlpack__() for p in model.parameters()],
    "weak references": weak,
}


@pytest.mark.parametrize("what", HELD)
def test_what_somebody_holds_is_multiplied_at_once(pair: Pair, what: str) -> None:
    """They would not come by ``.grad`` again."""
    before, lie = pair.deferred, []
    for model, optimizer in pair.both:
        backward(model, 60)
        held = HELD[what](model)
        to_low(model)
        lie.append(as_they_lie(model))
        optimizer.step()
        model.zero_grad()
        del held
    assert same(*lie) and pair.deferred == before
    pair.go_on(2)
    assert pair.deferred == before + 2
    pair.assert_same()


def test_a_reader_that_interrupts_another_is_refused(pair: Pair) -> None:
    """Nothing is multiplied twice, or seen in between."""

    class Reader(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.ops.aten.mul_.Tensor:
                seen.append(pair.model.last.weight.grad)
            return function(*args, **(kwargs or {}))

    seen: list[Any] = []
    for model, _ in pair.both:
        backward(model, 65)
        to_low(model)
    with Reader(), pytest.raises(ExecutionError, match="read it later"):
        _ = pair.model.first.weight.grad
    assert not seen and same(*gradients(pair))
    for model, _ in pair.both:
        model.zero_grad()


def test_an_attribute_of_somebody_else_stays(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """``grad`` of all parameters is theirs."""
    before = pair.deferred
    attribute: Any = torch.Tensor.grad
    theirs = property(attribute.__get__, attribute.__set__)
    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.Parameter, "grad", theirs, raising=False)
        pair.go_on()
        assert vars(torch.nn.Parameter)["grad"] is theirs and pair.deferred == before
    pair.go_on()
    pair.assert_same()


def test_part_of_the_gradients_may_be_held(pair: Pair) -> None:
    """The others are left to the update."""
    before = pair.deferred
    for model, optimizer in pair.both:
        backward(model, 61)
        held = model.first.weight.grad
        clip_grad_norm_(model.parameters(), LOW)
        if model is pair.model:
            assert torch.equal(held, as_they_lie(model)[0]) and pair.deferred == before + 1
        optimizer.step()
        model.zero_grad()
        del held
    pair.go_on(2)
    pair.assert_same()


def test_a_gradient_that_is_replaced_is_read_as_it_is(pair: Pair) -> None:
    """Between clipping and step, or removed."""
    for model, optimizer in pair.both:
        backward(model, 80)
        to_low(model)
        model.first.weight.grad = torch.full((24, 24), 0.5)
        model.last.weight.grad = None
        del model.first.bias.grad
        assert model.first.weight.grad.eq(0.5).all() and model.last.weight.grad is None
        with pytest.raises(RuntimeError):
            model.last.bias.grad = torch.zeros(3)
        optimizer.step()
        model.zero_grad()
    pair.go_on(2)
    pair.assert_same()


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_backward_in_between_is_refused_or_right(pair: Pair) -> None:
    """One of a plan finds clipped gradients; one that no plan runs is told, until the gradients are cleared."""
    for model, optimizer in pair.both:
        backward(model, 100)
        to_low(model)
        backward(model, 101)
        optimizer.step()
        model.zero_grad()
    pair.assert_same()
    for create_graph in (False, True):
        backward(pair.model, 102)
        to_low(pair.model)
        pair.model.first.weight.square().sum().backward(create_graph=create_graph)
        attempts: tuple[Callable[[], Any], ...] = (
            lambda: pair.model.first.weight.grad,
            pair.ours.step,
            lambda: settle(pair.model),
            lambda: to_low(pair.model),
            lambda: backward(pair.model, 103),
        )
        for attempt in attempts:
            with pytest.raises(ExecutionError, match=r"of shape \[24, 24\] was clipped, and then changed"):
                attempt()
        pair.ours.zero_grad()
        pair.go_on(2)
    pair.assert_same()


def test_an_exception_in_between_loses_nothing(pair: Pair) -> None:
    """Whoever goes on finds clipped gradients, or clears them."""
    for model, _ in pair.both:
        backward(model, 120)
        with pytest.raises(KeyError):
            raise KeyError(float(to_low(model)))
    assert same(*gradients(pair))
    for model, _ in pair.both:
        model.zero_grad()
    pair.go_on(2)
    pair.assert_same()


def test_the_end_of_the_preparation_leaves_clipped_gradients() -> None:
    """By ``restore``, and when the model is gone and its parameters are not."""
    for end in ("restore", "gone"):
        pair = Pair()
        parameters, theirs = list(pair.model.parameters()), pair.eager
        for model, optimizer in pair.both:
            backward(model, 130)
            to_low(model)
            if end == "gone":
                optimizer.step()
        expected = [p.grad.clone() for p in theirs.parameters() if p.grad is not None]
        if end == "restore":
            state = find_state(pair.model)
            assert state is not None
            state.updates.remove()
            assert same(as_they_lie(pair.model), expected)
            restore(pair.model)
        else:
            pair.model = pair.ours = model = optimizer = None
            gc.collect()
        # Without its model the update stays with the parameters, and so do gradients that it multiplies.
        assert end == "gone" or "grad" not in vars(torch.nn.Parameter)
        assert same([p.grad for p in parameters if p.grad is not None], expected)


def test_a_model_that_is_forgotten_in_a_trace_leaves_the_trace_alone(pair: Pair) -> None:
    """Python may collect it whenever it likes. The trace has its own op alone; the gradients are clipped."""
    theirs = pair.eager
    for model, _ in pair.both:
        backward(model, 140)
        to_low(model)
    parameters = list(pair.model.parameters())

    def traced(x: torch.Tensor) -> torch.Tensor:
        pair.model = pair.ours = None
        gc.collect()
        return x + 1

    model = None
    graph = make_fx(traced, tracing_mode="fake")(torch.ones(2)).graph
    assert [node.target for node in graph.nodes if node.op == "call_function"] == [torch.ops.aten.add.Tensor]
    found, expected = ([p.grad for p in each if p.grad is not None] for each in (parameters, theirs.parameters()))
    assert same(found, expected)
