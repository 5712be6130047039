"""Trained weights in host memory: what users do to them between steps has eager mode's effect, at any budget."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from disco_accel import DiscoConfig, prepare, restore, stats
from disco_accel.errors import BudgetTooSmall, ConfigError, ExecutionError
from disco_accel.integrate.accelerate.patches import prepare_for_training
from disco_accel.native.host_memory import WatchedTensors, writes_are_watched
from disco_accel.step.run.session import find_state
from tests.support.models import tiny_lora
from tests.support.unwatched import without_watching_writes

WIDTH, ROWS = 32, 24


class Tower(torch.nn.Module):
    """An embedding that is the head, too, and two layers between: a loss of token ids."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(ROWS, WIDTH)
        self.first, self.second = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.head = torch.nn.Linear(WIDTH, ROWS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        x = self.norm(x + self.second(torch.relu(self.first(x))))
        return torch.nn.functional.cross_entropy(self.head(x)[:-1], ids[1:])


WEIGHTS = sum(p.nbytes for p in Tower().parameters())


def config(**keys: Any) -> DiscoConfig:
    tight = {"memory_budget": 3 * WEIGHTS // 2, "device": "cpu", "optimizer": "host", "plan_cache": None}
    return DiscoConfig(**(tight | keys))


def in_its_budget(run: Callable[[torch.nn.Module], Any], **keys: Any) -> Any:
    """``run`` of a prepared tower, in the least budget where kernels of the machine take more scratch."""
    try:
        return run(prepare(Tower(), config(**keys)))
    except BudgetTooSmall as error:
        return run(prepare(Tower(), config(**keys, memory_budget=error.needed)))


def ids(seed: int) -> torch.Tensor:
    return torch.randint(0, ROWS, (12,), generator=torch.Generator().manual_seed(seed))


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=True)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> torch.Tensor:
    loss: torch.Tensor = model(ids(seed))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def assert_same(model: torch.nn.Module, eager: torch.nn.Module) -> None:
    named = dict(eager.named_parameters())
    assert dict(model.named_parameters()).keys() == named.keys()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, named[name]), name
        assert parameter.requires_grad == named[name].requires_grad


Change = Callable[[torch.nn.Module, torch.optim.Optimizer], None]


def _copy(model: torch.nn.Module, _: Any) -> None:
    model.get_parameter("first.weight").data.copy_(torch.full((4 * WIDTH, WIDTH), 0.01))


def _element(model: torch.nn.Module, _: Any) -> None:
    ctypes.memset(model.get_parameter("second.weight").data_ptr() + 4 * 33, 0, 4)


def _assign(model: torch.nn.Module, _: Any) -> None:
    weight = model.get_parameter("second.weight")
    weight.data = weight.data * 0.5


def _load(model: torch.nn.Module, _: Any) -> None:
    model.load_state_dict({name: value * 0.75 for name, value in model.state_dict().items()})


def _swap(model: torch.nn.Module, _: Any) -> None:
    """As averages of weights do for an evaluation, and back: what is left is the third."""
    for parameter in model.parameters():
        kept = parameter.detach().clone()
        parameter.data.copy_(kept * 1.5)
        model(ids(50)).backward()
        model.zero_grad()
        parameter.data.copy_(kept * 1.25)


def _own_update(model: torch.nn.Module, _: Any) -> None:
    model(ids(60)).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(parameter.grad, alpha=0.1)
    model.zero_grad()


def _freeze(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.get_parameter("first.weight").requires_grad_(False)
    step(model, optimizer, 70)


def _thaw(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.get_parameter("first.weight").requires_grad_(True)
    step(model, optimizer, 71)


def _replace(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.manual_seed(3)
    new = torch.nn.Parameter(torch.randn(WIDTH) * 0.1)
    optimizer.add_param_group({"params": [new]})
    model.get_submodule("second").bias = new


def _flat(model: torch.nn.Module, _: Any) -> None:
    """Weights become pieces of a vector, which is what is written to from then on."""
    pieces = [model.get_parameter(f"{layer}.bias") for layer in ("first", "second", "norm")]
    flat = torch.cat([piece.detach() for piece in pieces])
    at = 0
    for piece in pieces:
        piece.data = flat[at : at + piece.numel()]
        at += piece.numel()
    step(model, adam(model), 80)
    flat.mul_(0.5)


CHANGES: dict[str, Change] = {
    "data.copy_": _copy,
    "one element by its address": _element,
    "data =": _assign,
    "load_state_dict": _load,
    "average swapped in": _swap,
    "own update": _own_update,
    "frozen": _freeze,
    "trained again": _thaw,
    "parameter replaced": _replace,
    "pieces of a vector": _flat,
}


@pytest.mark.parametrize("budget", ["tight", "ample"])
def test_changes_between_steps_are_followed(budget: str) -> None:
    """One after the other on one model, a step after each; no step is eager."""
    keys = {} if budget == "tight" else {"memory_budget": 1 << 24}
    model, eager = prepare(Tower(), config(**keys)), Tower()
    optimizers = adam(model), adam(eager)
    for seed, (name, change) in enumerate(CHANGES.items()):
        for of, optimizer in zip((model, eager), optimizers, strict=True):
            change(of, optimizer)
        assert torch.equal(*(step(m, o, seed) for m, o in zip((model, eager), optimizers, strict=True))), name
        assert_same(model, eager)
    assert stats(model)["steps_eager"] == 0 and stats(model)["optimizer"] == "host"


def test_another_dtype_is_followed() -> None:
    model, eager = prepare(Tower(), config(memory_budget=1 << 24)), Tower()
    for of in (model, eager):
        step(of, adam(of), 0)
        of.to(torch.bfloat16)
        step(of, adam(of), 1)
    assert_same(model, eager)
    assert stats(model)["plans"] == 2


@contextlib.contextmanager
def _watch(kind: str) -> Iterator[None]:
    if kind == "pages" and not writes_are_watched():
        pytest.skip("this kernel does not tell which pages are written to")
    with without_watching_writes() if kind == "hash" else contextlib.nullcontext():
        yield


@pytest.mark.parametrize("kind", ["pages", "hash"])
def test_a_write_between_forward_and_backward_is_an_error(kind: str) -> None:
    """Of one element or of an optimizer, also to a weight that the backward has yet to load; later steps are right."""
    with _watch(kind):
        model, eager = prepare(Tower(), config()), Tower()
    optimizers = adam(model), adam(eager)
    for seed, change in enumerate((_element, _copy, lambda _, optimizer: optimizer.step())):
        losses = [m(ids(seed)) for m in (model, eager)]
        for of, optimizer in zip((model, eager), optimizers, strict=True):
            for parameter in of.parameters():
                parameter.grad = torch.ones_like(parameter)
            change(of, optimizer)
            optimizer.zero_grad()
        with pytest.raises(ExecutionError, match="was changed in place between this step's forward and its backward"):
            losses[0].backward()
        for of, optimizer in zip((model, eager), optimizers, strict=True):
            step(of, optimizer, seed + 10)
        assert_same(model, eager)


def test_an_optimizer_ends_the_watch_of_pages() -> None:
    """Whoever looks at the weights hears of an update before its first write; other weights are watched on."""
    if not writes_are_watched():
        pytest.skip("this kernel does not tell which pages are written to")
    model = prepare(Tower(), config())
    other = prepare(Tower(), config())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    watches = [WatchedTensors(list(m.parameters())) for m in (model, other)]
    assert [w.changed() for w in watches] == [False, False]
    optimizer.step()
    assert [w.changed() for w in watches] == [True, False]


def test_several_forwards_before_their_backwards() -> None:
    model, eager = prepare(Tower(), config()), Tower()
    for of in (model, eager):
        losses = [of(ids(seed)) for seed in range(3)]
        for loss in reversed(losses):
            loss.backward()
        adam(of).step()
    assert_same(model, eager)


def test_two_backwards_of_one_forward() -> None:
    model, eager = prepare(Tower(), config()), Tower()
    for of in (model, eager):
        loss = of(ids(0))
        loss.backward(retain_graph=True)
        loss.backward()
        adam(of).step()
    assert_same(model, eager)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("update", ["step", "deferred"])
def test_a_scaler_skips_updates_whose_gradients_are_infinite(update: str, half: bool) -> None:
    """The same scales, the same skipped updates, the same weights as in eager mode, in fp16 too."""

    def run(of: torch.nn.Module) -> tuple[torch.nn.Module, list[float], list[bool]]:
        optimizer = adam(of)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=2, backoff_factor=2.0**-60)
        scales, moved = [], []
        for seed in range(6):
            before = of.get_parameter("first.weight").detach().clone()
            with torch.autocast("cpu", torch.float16, enabled=half):
                loss = of(ids(seed))
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(of.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
            moved.append(not torch.equal(before, of.get_parameter("first.weight")))
        return of, scales, moved

    (model, scales, moved), (eager, eager_scales, eager_moved) = in_its_budget(run, update=update), run(Tower())
    assert scales == eager_scales and moved == eager_moved
    assert False in moved and True in moved
    assert_same(model, eager)


def test_updates_inside_the_backward() -> None:
    """An optimizer for each weight that steps when its gradient is there."""
    model, eager = prepare(Tower(), config()), Tower()
    for of in (model, eager):
        optimizers = {p: torch.optim.AdamW([p], lr=1e-2, fused=True) for p in of.parameters()}

        def update(parameter: torch.Tensor, optimizers: dict[Any, Any] = optimizers) -> None:
            optimizers[parameter].step()
            parameter.grad = None

        for parameter in of.parameters():
            parameter.register_post_accumulate_grad_hook(update)
        for seed in range(3):
            of(ids(seed)).backward()
    assert_same(model, eager)


def test_copies_restored_models_and_other_threads() -> None:
    """A copy trains on its own; another thread may evaluate; after restore the values are there, in ordinary memory."""
    model, eager = prepare(Tower(), config()), Tower()
    optimizers = adam(model), adam(eager)
    for of, optimizer in zip((model, eager), optimizers, strict=True):
        step(of, optimizer, 0)
    copied = copy.deepcopy(model)
    step(prepare(copied, config()), adam(copied), 1)
    assert_same(model, eager)
    state = find_state(model)
    assert state is not None and all(state.placement.holds(p) for p in model.parameters())
    seen: list[torch.Tensor] = []
    loss = model(ids(2))
    with torch.no_grad():
        thread = threading.Thread(target=lambda: seen.append(copied(ids(2)).detach()))
        thread.start()
        evaluated = model(ids(2))
        thread.join()
    assert torch.equal(evaluated, loss) and len(seen) == 1
    loss.backward()
    eager(ids(2)).backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    restore(model)
    assert not any(state.placement.holds(p) for p in model.parameters())
    assert model.get_parameter("head.weight") is model.get_parameter("embed.weight")
    assert torch.equal(*(step(m, o, 3) for m, o in zip((model, eager), optimizers, strict=True)))
    assert_same(model, eager)


def test_host_memory_that_is_too_small_is_refused() -> None:
    """Four times the trained weights are needed: themselves, gradients, two moments."""
    with pytest.raises(ConfigError, match=r"host_memory: .* is too small for optimizer: host, which needs .* of two"):
        prepare(Tower(), config(host_memory=4 * WEIGHTS - 1))
    step(model := prepare(Tower(), config(host_memory=5 * WEIGHTS)), adam(model), 0)


def test_auto_goes_by_the_budget() -> None:
    """The host where weights, gradients and moments take more than half of it."""
    homes = []
    for budget in (8 * WEIGHTS - 1, 8 * WEIGHTS):
        state = find_state(prepare(Tower(), config(optimizer="auto", memory_budget=budget)))
        assert state is not None
        homes.append(state.setup.optimizer.value)
    assert homes == ["host", "device"]
    adapter = find_state(prepare(tiny_lora(), config(optimizer="auto", memory_budget=1024)))
    assert adapter is not None and adapter.setup.optimizer.value == "device", "an adapter is not most of the weights"


def test_several_processes_on_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from disco_accel.step.optimizer_home import optimizer_home

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    settings, gpu = config().resolve(), torch.device("cuda", 0)
    with pytest.raises(ConfigError, match="optimizer: host works for one process on cuda, this run has 2"):
        optimizer_home(Tower(), config(), settings, gpu)
    assert optimizer_home(Tower(), config(optimizer="auto"), settings, gpu).value == "device"


def test_launched_scripts_train_whole_models_where_the_host_updates() -> None:
    """Else the model is left alone with a word; engines that update weights themselves are no place for it."""
    model = Tower()
    with pytest.warns(UserWarning, match="all parameters of Tower are trainable.*optimizer: host trains them"):
        prepare_for_training(model, config(optimizer="device"))
    assert find_state(model) is None
    deepspeed = SimpleNamespace(distributed_type="DEEPSPEED")
    with pytest.raises(ConfigError, match="optimizer: host does not work with distributed_type: DEEPSPEED"):
        prepare_for_training(model, config(), deepspeed)
    with pytest.warns(UserWarning, match="are trainable"):
        prepare_for_training(model, config(optimizer="auto"), deepspeed)
    assert find_state(model) is None
    prepare_for_training(model, config())
    assert find_state(model) is not None


def test_the_other_planner_is_refused() -> None:
    with pytest.raises(ConfigError, match="optimizer: host needs planner: timed"):
        prepare(Tower(), config(planner="build"))
    state = find_state(prepare(Tower(), config(planner="build", optimizer="auto", memory_budget=4 * WEIGHTS)))
    assert state is not None and state.setup.optimizer.value == "device"
