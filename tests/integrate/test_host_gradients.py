"""Gradients of ``optimizer: host`` lie in memory that steps use again, and never again while somebody holds them."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from disco_accel import DiscoConfig, prepare, restore, stats
from disco_accel.errors import ConfigError, ExecutionError
from disco_accel.native.arena import is_arena
from disco_accel.sizes import format_size
from disco_accel.step.placement.gradient_memory import GradientMemory
from disco_accel.step.run.session import find_state

WIDTH, ROWS = 32, 24


class Net(torch.nn.Module):
    """Products, a bias whose gradient is a sum, and one whose gradient is one number, expanded."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(ROWS, WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.shift = torch.nn.Parameter(torch.randn(7))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        x = x + self.down(torch.relu(self.up(x)))
        return torch.nn.functional.cross_entropy(x @ self.embed.weight.t(), ids.roll(1)) + 0.01 * self.shift.sum()


WEIGHTS = sum(p.nbytes for p in Net().parameters())


def config(**keys: Any) -> DiscoConfig:
    usual = {"memory_budget": 1 << 24, "device": "cpu", "optimizer": "host", "plan_cache": None}
    return DiscoConfig(**(usual | keys))


def ids(seed: int, length: int = 12) -> torch.Tensor:
    return torch.randint(0, ROWS, (length,), generator=torch.Generator().manual_seed(seed))


def pair() -> tuple[torch.nn.Module, torch.nn.Module]:
    """(prepared, eager)."""
    return prepare(Net(), config()), Net()


def backward(model: torch.nn.Module, seed: int, length: int = 12) -> None:
    model(ids(seed, length)).backward()


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def memory_of(model: torch.nn.Module) -> GradientMemory:
    state = find_state(model)
    assert state is not None
    return state.gradients.memory


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def addresses(model: torch.nn.Module) -> dict[str, int]:
    """Of gradients that lie in ranges: one that is expanded does not."""
    return {name: gradient.data_ptr() for name, gradient in gradients(model).items() if name != "shift"}


def assert_same(model: torch.nn.Module, eager: torch.nn.Module) -> None:
    for (name, ours), theirs in zip(model.named_parameters(), eager.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
        assert (ours.grad is None) == (theirs.grad is None), name
        if ours.grad is not None:
            assert torch.equal(ours.grad, theirs.grad) and ours.grad.stride() == theirs.grad.stride(), name


def test_steps_use_the_same_memory_again() -> None:
    """One range for each weight, 64 bytes aligned; its page is the next gradient's as soon as ``.grad`` is None."""
    model, eager = pair()
    seen = []
    for seed in range(4):
        for of in (model, eager):
            backward(of, seed)
        assert_same(model, eager)
        assert all(is_arena(g) == (name != "shift") for name, g in gradients(model).items())
        seen.append(addresses(model))
        for of in (model, eager):
            with torch.no_grad():
                for parameter in of.parameters():
                    parameter.sub_(parameter.grad, alpha=0.1)
            of.zero_grad()
    assert seen[1:] == seen[:-1] and all(address % 64 == 0 for address in seen[0].values())
    assert len(set(seen[0].values())) == 4
    assert 0 < memory_of(model).nbytes <= WEIGHTS
    assert stats(model)["steps_eager"] == 0


Hold = Callable[[torch.Tensor], Callable[[], torch.Tensor]]
"""Holds something of a gradient; what is returned says what it is later."""


def _itself(gradient: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: gradient


def _view(gradient: torch.Tensor) -> Callable[[], torch.Tensor]:
    view = gradient.flatten()[3:9]
    return lambda: view


def _data(gradient: torch.Tensor) -> Callable[[], torch.Tensor]:
    data = gradient.data
    return lambda: data


def _array(gradient: torch.Tensor) -> Callable[[], torch.Tensor]:
    array = gradient.numpy()[:5]
    return lambda: torch.tensor(array)


def _storage(gradient: torch.Tensor) -> Callable[[], torch.Tensor]:
    storage = gradient.untyped_storage()
    return lambda: torch.tensor(storage.tolist())


def _capsule(gradient: torch.Tensor) -> Callable[[], torch.Tensor]:
    capsule = torch.utils.dlpack.to_dlpack(gradient)
    return lambda: torch.utils.dlpack.from_dlpack(capsule)


def _saved(gradient: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A graph of the user's own needs it in its backward."""
    factor = torch.ones_like(gradient, requires_grad=True)
    product = (factor * gradient).sum()

    def later() -> torch.Tensor:
        return torch.autograd.grad(product, factor)[0]

    return later


def _thread(gradient: torch.Tensor) -> Callable[[], torch.Tensor]:
    """It lives in the frame of another thread."""
    wanted, found = threading.Event(), []

    def wait(gradient: list[torch.Tensor]) -> None:
        mine = gradient.pop()
        wanted.wait()
        found.append(mine.clone())

    thread = threading.Thread(target=wait, args=([gradient],), daemon=True)
    thread.start()

    def later() -> torch.Tensor:
        wanted.set()
        thread.join()
        return found[0]

    return later


def _shared(gradient: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Its bytes move to memory that other processes may know, in the storage that it had."""
    other = torch.empty(0).set_(gradient.share_memory_())
    return lambda: other


HOLDS = (_itself, _view, _data, _array, _storage, _capsule, _saved, _thread, _shared)


@pytest.mark.parametrize("hold", HOLDS)
def test_what_is_held_keeps_its_values(hold: Hold) -> None:
    """Of one step's gradients, while others follow; its memory is used again once it is let go."""
    model, eager = pair()
    held: list[list[Callable[[], torch.Tensor]]] = []
    for of in (model, eager):
        backward(of, 0)
        held.append([hold(g) for name, g in gradients(of).items() if name != "shift"])
    first = addresses(model)
    for of in (model, eager):
        optimizer = sgd(of)
        for seed in range(1, 4):
            of.zero_grad()
            backward(of, seed)
            optimizer.step()
    assert_same(model, eager)
    now = addresses(model)
    if hold is not _shared:
        assert all(now[name] != address for name, address in first.items())
    results = [[later() for later in of] for of in held]
    assert all(map(torch.equal, *results))
    del results, held
    model.zero_grad()
    backward(model, 4)
    again = addresses(model)
    assert all(again[name] in (first[name], now[name]) for name in first)


def test_more_than_two_steps_held() -> None:
    """A list of all gradients: ranges for two of them, ordinary memory for the rest."""
    model, eager = pair()
    kept: list[list[torch.Tensor]] = []
    for of in (model, eager):
        mine = []
        for seed in range(5):
            of.zero_grad()
            backward(of, seed)
            mine += gradients(of).values()
        kept.append(mine)
    assert len({t.data_ptr() for t in kept[0]}) == len(kept[0])
    assert all(map(torch.equal, *kept))
    assert memory_of(model).nbytes <= 2 * WEIGHTS


def _accumulated(model: torch.nn.Module, _: torch.optim.Optimizer, seed: int) -> None:
    for part in range(3):
        backward(model, 10 * seed + part)


def _zeros(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    backward(model, seed)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    backward(model, seed + 50)


def _replaced(model: torch.nn.Module, _: torch.optim.Optimizer, seed: int) -> None:
    backward(model, seed)
    for parameter in model.parameters():
        parameter.grad = parameter.grad * 0.5
    backward(model, seed + 50)


def _own_data(model: torch.nn.Module, _: torch.optim.Optimizer, seed: int) -> None:
    backward(model, seed)
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.data = parameter.grad.data * 2
    backward(model, seed + 50)


def _twice(model: torch.nn.Module, _: torch.optim.Optimizer, seed: int) -> None:
    loss = model(ids(seed))
    loss.backward(retain_graph=True)
    loss.backward()


def _asked_for(model: torch.nn.Module, _: torch.optim.Optimizer, seed: int) -> None:
    parameters = list(model.parameters())
    for _half in range(2):
        found = torch.autograd.grad(model(ids(seed)), parameters)
        for parameter, gradient in zip(parameters, found, strict=True):
            parameter.grad = gradient if parameter.grad is None else torch.maximum(parameter.grad, gradient)


def _elsewhere(model: torch.nn.Module, _: torch.optim.Optimizer, seed: int) -> None:
    """The user makes tensors on another device meanwhile."""
    loss = model(ids(seed))
    with torch.device("meta"):
        loss.backward()


def _hooked(model: torch.nn.Module, _: torch.optim.Optimizer, seed: int) -> None:
    """Each gradient is clipped as it comes, in place or not."""
    hooks = [p.register_hook(lambda g: g.clamp(-0.01, 0.01)) for p in model.parameters()]
    backward(model, seed)
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("way", [_accumulated, _zeros, _replaced, _own_data, _twice, _asked_for, _elsewhere, _hooked])
def test_ways_to_make_gradients(way: Callable[..., None]) -> None:
    """Three updates each; two ranges for each weight are enough."""
    model, eager = pair()
    optimizers = sgd(model), sgd(eager)
    for seed in range(3):
        for of, optimizer in zip((model, eager), optimizers, strict=True):
            way(of, optimizer, seed)
            optimizer.step()
        assert_same(model, eager)
        for optimizer in optimizers:
            optimizer.zero_grad()
    assert memory_of(model).nbytes <= 2 * WEIGHTS


def test_plans_share_the_memory_and_models_do_not() -> None:
    """Batches of two lengths have plans of their own."""
    model, eager = pair()
    other, other_eager = pair()
    backward(model, 0)
    room, first = memory_of(model).nbytes, addresses(model)
    model.zero_grad()
    for seed, length in enumerate((9, 12, 9)):
        for of in (model, eager, other, other_eager):
            of.zero_grad()
            backward(of, seed, length)
        assert_same(model, eager)
        assert_same(other, other_eager)
        assert addresses(model) == first
        assert not set(first.values()) & set(addresses(other).values())
    assert memory_of(model).nbytes == room and stats(model)["plans"] == 2


def test_frozen_weights_and_another_dtype() -> None:
    """Ranges of another size each time, and none for a weight that is frozen."""
    model, eager = pair()
    for of in (model, eager):
        backward(of, 0)
        of.zero_grad()
        of.get_parameter("up.weight").requires_grad_(False)
        backward(of, 1)
        of.zero_grad()
        of.to(torch.bfloat16)
        backward(of, 2)
        of.zero_grad()
        of.to(torch.float32)
        backward(of, 3)
    assert_same(model, eager)
    assert model.get_parameter("up.weight").grad is None


def test_weights_that_take_turns() -> None:
    """Each half has ranges that stay, or, where ``host_memory`` is too small for both, until the other half trains."""
    used = []
    larger = WEIGHTS - Net().down.weight.nbytes
    for limit in (8 * WEIGHTS, WEIGHTS + 3 * larger + 256):
        model, eager = Net(), Net()
        for turn in range(4):
            for of in (model, eager):
                of.zero_grad()
                for name, parameter in of.named_parameters():
                    parameter.requires_grad_(name == "shift" or name.startswith("down") == (turn % 2 == 0))
            prepare(model, config(host_memory=limit))
            for of in (model, eager):
                backward(of, turn)
            assert_same(model, eager)
            assert all(is_arena(gradients(model)[name]) for name in addresses(model))
        used.append(memory_of(model).nbytes)
    assert used[1] < used[0] <= WEIGHTS


def test_copies_and_restored_models_have_gradients_of_their_own() -> None:
    model, eager = pair()
    for of in (model, eager):
        backward(of, 0)
    copied = copy.deepcopy(model)
    held = copy.deepcopy(gradients(model)["up.weight"])
    assert_same(copied, Net())
    memory = memory_of(model)
    restore(model)
    assert memory.nbytes == 0
    assert_same(model, eager)
    prepare(model, config())
    for of in (model, eager):
        backward(of, 1)
    assert_same(model, eager)
    eager.zero_grad()
    backward(eager, 0)
    assert torch.equal(held, gradients(eager)["up.weight"])


def _in_child(check: Callable[[], None]) -> int:
    if (child := os.fork()) == 0:
        try:
            check()
            os._exit(0)
        except BaseException as error:
            os.write(2, f"in the forked process: {error!r}\n".encode())
            os._exit(1)
    return child


def test_a_forked_process_has_its_own_gradients() -> None:
    """What one of the two writes or makes the other does not see; the child can go on after ``restore``."""
    model, eager = pair()
    for of in (model, eager):
        backward(of, 0)
    reading, writing = os.pipe()

    def child() -> None:
        os.read(reading, 1)
        assert_same(model, eager)
        with pytest.raises(ExecutionError, match="forked"):
            model(ids(1))
        restore(model)
        for of in (model, eager):
            backward(of, 2)
            for parameter in of.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(3)
        assert_same(model, eager)

    process = _in_child(child)
    for of in (model, eager):
        of.zero_grad()
        backward(of, 1)
    os.write(writing, b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
    assert_same(model, eager)
    for of in (model, eager):
        backward(of, 3)
    assert_same(model, eager)
    os.close(reading)
    os.close(writing)


def test_accumulation_beyond_the_host_memory_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    """Before the memory is taken, as ``prepare`` says; one backward for each update goes on. The plan cannot add where
    a hook wants the new part."""
    model = prepare(Net(), config(host_memory=4 * WEIGHTS + WEIGHTS // 2))
    more = f"; {format_size(WEIGHTS)} more where autograd adds to gradients"
    assert any(more in record.message for record in caplog.records)
    eager = Net()
    hooks = [p.register_hook(lambda gradient: gradient) for p in model.parameters()]
    backward(model, 0)
    room = memory_of(model).nbytes
    with pytest.raises(ConfigError, match=r"host_memory: .* is too small for gradients of two backwards at once"):
        backward(model, 1)
    assert memory_of(model).nbytes == room
    for hook in hooks:
        hook.remove()
    for of in (model, eager):
        of.zero_grad()
        backward(of, 2)
        backward(of, 3)
    assert_same(model, eager)
    assert memory_of(model).nbytes == room
