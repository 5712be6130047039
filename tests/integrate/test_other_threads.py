"""What other threads do while one thread captures a step is what they do alone, to the bit.

Every change that a capture makes outside of itself is listed in disco_accel/capture/thread_patches.py; each row has a
case here. The other thread works while the capturing one stands still in the middle of the traced forward.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from disco_accel import prepare, pure, stats
from disco_accel.errors import CaptureError
from disco_accel.step.capture_lock import Gate
from tests.integrate.twins import SMALL, config
from tests.support.models import random_batch, tiny_lora

_inside: list[Callable[[], None]] = []


class _Paused(nn.Module):
    """Stands still in its forward, once, for as long as what ``_inside`` holds takes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8)
        for parameter in self.frozen.parameters():
            parameter.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.frozen(self.first(x))
        while _inside:
            _inside.pop()()
        return (self.frozen(y) ** 2).mean()


class _Threaded(nn.Module):
    """Runs one of its layers in a thread."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.frozen = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(self.frozen, y).result().sum()


def _in_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:
            results.append(repr(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, results


def _during_a_capture(work: Callable[[], Any], model: nn.Module | None = None) -> Any:
    """What ``work`` returns in a thread that runs in the middle of a capture, of ``model``."""
    found: list[Any] = []

    def meanwhile() -> None:
        thread, results = _in_thread(work)
        thread.join(timeout=600)
        found.extend(results)

    model = prepare(_Paused() if model is None else model, config())
    _inside.append(pure(meanwhile))
    model(torch.ones(2, 8)).backward()
    # A step that is planned for logits is traced twice, each time from the same state.
    assert stats(model)["steps_compiled"] == 1 and found
    return found[0]


def _padded() -> dict[str, torch.Tensor]:
    batch = random_batch(32, length=8)
    batch["attention_mask"][0, :3] = 0
    return batch


def _training(**keys: Any) -> list[torch.Tensor]:
    model = tiny_lora(**SMALL, **keys)
    loss = model(**_padded()).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def _packed() -> list[torch.Tensor]:
    batch = random_batch(32, length=8)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]]).repeat(2, 1)
    model = tiny_lora(**SMALL)
    with torch.no_grad():
        given = {"input_ids": batch["input_ids"], "position_ids": positions, "use_cache": False}
        return [model(**given).logits]


def _traced() -> str:
    graph = make_fx(lambda x: (x.sin() @ x).sum())(torch.ones(3, 3)).graph
    assert not any("disco_accel" in node.meta for node in graph.nodes)
    return str(graph)


def _symbolic() -> str:
    return str(fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU())).graph)


def _grouped() -> str:
    with FakeTensorMode():
        ends = torch.tensor([2, 4], dtype=torch.int32)
        try:
            return str(tuple(torch._grouped_mm(torch.ones(4, 8), torch.ones(2, 8, 16), offs=ends).shape))
        except RuntimeError as error:
            return str(error)


def _logged() -> list[str]:
    seen: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addHandler(handler)
    logger.error("from another thread")
    logger.removeHandler(handler)
    return seen


def _values() -> list[Any]:
    return [torch.ones(2).tolist(), torch.ones(2).numpy().sum()]


def _modes() -> list[bool]:
    return [torch.is_grad_enabled(), torch.autograd.is_multithreading_enabled()]  # type: ignore[attr-defined]


WORK: dict[str, Callable[[], Any]] = {
    "masks": _training,
    "packed rows": _packed,
    "checkpointing": lambda: _training(checkpointing=True),
    "make_fx": _traced,
    "fx.symbolic_trace": _symbolic,
    "fake kernels": _grouped,
    "messages": _logged,
    "values": _values,
    "modes": _modes,
}


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, list):
        return isinstance(other, list) and len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("work", WORK.values(), ids=WORK.keys())
def test_another_thread_computes_what_it_computes_alone(work: Callable[[], Any]) -> None:
    alone = work()
    assert _same(_during_a_capture(work), alone), "a capture in another thread changed it"


def test_draws_of_another_thread_are_neither_undone_nor_taken_for_the_models() -> None:
    """The generator goes on from where the other thread left it."""
    prepared = prepare(_Paused(), config())
    torch.manual_seed(5)
    drawn: list[torch.Tensor] = []

    def meanwhile() -> None:
        thread, results = _in_thread(lambda: torch.randn(4))
        thread.join()
        drawn.extend(results)

    _inside.append(pure(meanwhile))
    prepared(torch.ones(2, 8)).backward()
    drawn.append(torch.randn(4))
    torch.manual_seed(5)
    assert len(drawn) > 1 and _same(drawn, [torch.randn(4) for _ in drawn])


def test_another_thread_may_seed_the_generator() -> None:
    assert _during_a_capture(lambda: torch.manual_seed(11).initial_seed()) == 11
    torch.manual_seed(11)
    expected = torch.randn(3)
    _during_a_capture(lambda: torch.manual_seed(11).initial_seed())
    assert torch.equal(torch.randn(3), expected)


@pytest.mark.parametrize("part", ["the model", "a module of it"])
def test_a_forward_of_the_model_that_is_captured_waits_and_is_right(part: str) -> None:
    """In its modules lies meanwhile what the traced forward leaves there. The step is traced twice, each time from the
    same state, and the thread, which waits from the first trace on, must not go on in the second."""
    model, x = prepare(_Paused(), config()), torch.ones(2, 8)
    of: Callable[[], nn.Module] = (lambda: model) if part == "the model" else (lambda: model.first)
    with torch.no_grad():
        expected = of()(x)
    threads: list[tuple[threading.Thread, list[Any]]] = []
    came_back: list[bool] = []

    def evaluate() -> torch.Tensor:
        with torch.no_grad():
            return of()(x)

    def meanwhile() -> None:
        if not threads:
            threads.append(_in_thread(evaluate))
        # Where it comes back before the capture is over it has seen too much; where it is too slow nothing is shown.
        threads[0][0].join(timeout=0.3)
        came_back.append(bool(threads[0][1]))

    _inside.append(pure(meanwhile))
    model(x).backward()
    thread, results = threads[0]
    thread.join()
    assert came_back == [False, False]
    assert _same(results, [expected])


def test_a_forward_on_fake_tensors_of_another_threads_own_waits_too() -> None:
    model = prepare(_Paused(), config())

    def size() -> tuple[int, ...]:
        with FakeTensorMode(allow_non_fake_inputs=True):
            return tuple(model.first(torch.ones(2, 8)).shape)

    threads = []

    def meanwhile() -> None:
        threads.append(_in_thread(size))
        threads[-1][0].join(timeout=0.1)

    _inside.append(pure(meanwhile))
    model(torch.ones(2, 8)).backward()
    for thread, _ in threads:
        thread.join()
    assert threads and all(results == [(2, 8)] for _, results in threads)


class _Slow(nn.Linear):
    """Reads its weight when ``_slowed`` lets it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _slowed()
        return super().forward(x)


_begun, _go_on = threading.Event(), threading.Event()


@pure
def _slowed() -> None:
    if threading.current_thread() is not threading.main_thread():
        _begun.set()
        _go_on.wait()


def test_a_forward_of_a_module_that_has_begun_goes_on_with_the_weights() -> None:
    model, x = _Paused(), torch.ones(2, 8)
    model.first = _Slow(8, 8)
    expected = nn.functional.linear(x, model.first.weight, model.first.bias).detach()
    prepare(model, config())
    thread, results = _in_thread(lambda: model.first(x).detach())
    _begun.wait()

    def meanwhile() -> None:
        _go_on.set()
        thread.join()

    _inside.append(pure(meanwhile))
    model(x).backward()
    assert _same(results, [expected])


READS: dict[str, Callable[[nn.Module], Any]] = {
    "state_dict": lambda model: list(model.state_dict().values()),
    "parameters": lambda model: list(model.parameters()),
    "an attribute": lambda model: model.first.weight,
    "the tables": lambda model: [*model.first._parameters.values(), *dict(model.first._parameters).values()],
    "a copy": lambda model: list(copy.deepcopy(model.first).parameters()),
    "what a pickle would hold": lambda model: [value for _, value in model.first._parameters.__reduce_ex__(4)[4]],
}


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_another_thread_reads_the_weights_and_no_twins(read: Callable[[nn.Module], Any]) -> None:
    model = _Paused()
    expected = read(model)
    assert _same(_during_a_capture(lambda: read(model), model), expected)


def test_what_another_thread_puts_into_a_module_stays() -> None:
    """The step that is captured meanwhile has no twin of it, and is not planned; the next one is."""
    model, added = prepare(_Paused(), config()), nn.Parameter(torch.ones(3))

    def meanwhile() -> None:
        thread, _ = _in_thread(lambda: model.first.register_parameter("added", added))
        thread.join()

    _inside.append(pure(meanwhile))
    with pytest.raises(CaptureError, match=r"shape \(3,\) was put into the model.*between steps"):
        model(torch.ones(2, 8))
    assert model.first.added is added and list(model.first._parameters) == ["weight", "bias", "added"]
    assert type(model.first._parameters) is dict
    model(torch.ones(2, 8)).backward()
    assert stats(model)["steps_compiled"] == 1


def test_a_forward_that_runs_a_module_in_a_thread_is_not_captured() -> None:
    model = _Threaded()
    eager = copy.deepcopy(model)
    prepare(model, config(on_unsupported="eager"))
    for each in (model, eager):
        each(torch.ones(2, 8)).backward()
    assert stats(model)["steps_compiled"] == 0
    assert _same([p.grad for p in model.parameters()], [p.grad for p in eager.parameters()])


def test_a_capture_waits_for_forwards_that_have_begun() -> None:
    gate, order, begun, go_on = Gate(), [], threading.Event(), threading.Event()

    def evaluate() -> None:
        with gate.eager():
            begun.set()
            go_on.wait()
            order.append("forward")

    def capture() -> None:
        with gate.tracing():
            order.append("trace")

    evaluating, _ = _in_thread(evaluate)
    begun.wait()
    capturing, _ = _in_thread(capture)
    capturing.join(timeout=0.1)
    go_on.set()
    evaluating.join()
    capturing.join()
    assert order == ["forward", "trace"]


def test_nothing_of_a_capture_stays() -> None:
    """Classes, modules and registries have what they had, whether the capture succeeds or not."""
    from transformers import masking_utils

    watched: list[tuple[Any, str]] = [
        (masking_utils, "_ignore_causal_mask_sdpa"),
        (masking_utils, "find_packed_sequence_indices"),
        *((torch, n) for n in ("manual_seed", "seed", "get_rng_state", "set_rng_state")),
        *((torch.Tensor, n) for n in ("tolist", "numpy", "__deepcopy__")),
    ]
    before = [getattr(owner, name) for owner, name in watched]
    _during_a_capture(_values)

    def fail() -> None:
        raise RuntimeError("planted")

    _inside.append(fail)
    with pytest.raises(Exception, match="planted"):
        prepare(_Paused(), config())(torch.ones(2, 8))
    assert [getattr(owner, name) for owner, name in watched] == before
    assert "tolist" not in vars(torch.Tensor) and not nn.modules.module._global_forward_pre_hooks
