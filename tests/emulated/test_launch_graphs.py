"""Steps whose kernels are launched as graphs: eager's bits, whatever a user changes after they were recorded."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from threading import Thread
from typing import Any

import pytest
import torch

from benchmarks.gpu.models import SMALL, arena_llama, batch_for, with_adapter
from disco_accel import DiscoConfig, prepare, stats
from disco_accel.errors import DeviceLost
from disco_accel.native.backend import release_workspaces
from tests.emulated import device
from tests.emulated.models import CUDA, assert_same, assert_steady, least, step
from tests.emulated.test_engine import state_of

_WARM = 3
"""Steps after which all graphs are there: the first runs kernel by kernel, the second records."""


def llama(**keys: Any) -> Any:
    base, _ = arena_llama(SMALL, dtype=torch.float32, attention="eager", source=CUDA)
    return with_adapter(base, rank=4, checkpointing=True, **keys)


def batch(seed: int = 0, length: int = 16) -> dict[str, torch.Tensor]:
    return batch_for(SMALL["vocab_size"], 2, length, CUDA, seed=seed)


def pair(budget: str | None = None, warm: int = _WARM, **keys: Any) -> tuple[Any, Any]:
    """A planned model whose graphs are there, and the same in eager mode. ``budget``: the least if none is given."""
    model = llama(**keys)
    eager = copy.deepcopy(model).to(CUDA)
    if budget is None:
        least(model, lambda m: step(m, batch()))
    else:
        prepare(model, DiscoConfig(memory_budget=budget, device="cuda"))
    for _ in range(warm):
        step(model, batch())
    return model, eager


def graphs_of(model: Any) -> dict[str, Any]:
    return dict(stats(model)["launch_graphs"])


def assert_as_eager(model: Any, eager: Any, given: Mapping[str, torch.Tensor]) -> None:
    state = torch.cuda.get_rng_state()
    expected = step(eager, given)
    torch.cuda.set_rng_state(state)
    assert_same(step(model, given), expected)


@pytest.mark.parametrize("budget", ["1GiB", None])
def test_batches_at_addresses_of_their_own(budget: str | None) -> None:
    """What reads the batch is recorded anew once, and launched alone from then on."""
    model, eager = pair(budget)
    assert graphs_of(model)["graphs"] > 0
    kept = [batch(seed) for seed in range(8)]
    for given in kept:
        assert_as_eager(model, eager, given)
    assert graphs_of(model)["graphs"] > 0
    assert stats(model)["launches"] < 0.6 * stats(model)["kernels"]


@pytest.mark.parametrize("budget", ["1GiB", None])
def test_trained_weights_that_move(budget: str | None) -> None:
    """As a script does that loads a checkpoint by assigning tensors."""
    model, eager = pair(budget)
    kept = []
    for number in range(4):
        for planned, plain in zip(model.parameters(), eager.parameters(), strict=True):
            if planned.requires_grad:
                kept.append(planned.data)
                planned.data = planned.data * (1 + 0.01 * number)
                plain.data = planned.data.clone()
        assert_as_eager(model, eager, batch(number))


def test_dropout_draws_eagers_numbers_between_graphs() -> None:
    model, eager = pair(dropout=0.3)
    for number in range(4):
        assert_as_eager(model, eager, batch(number))
    assert 0 < graphs_of(model)["kernels"] < stats(model)["kernels"]


def test_an_optimizer_changes_weights_in_place() -> None:
    """AdamW, with losses read at the end."""
    model, eager = pair()
    losses: list[list[torch.Tensor]] = []
    for trained in (eager, model):
        optimizer = torch.optim.AdamW([p for p in trained.parameters() if p.requires_grad], lr=1e-2)
        losses.append([])
        for number in range(5):
            optimizer.zero_grad()
            loss = trained(**batch(number)).loss
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.detach())
    assert torch.equal(torch.stack(losses[0]), torch.stack(losses[1]))


def test_two_batch_shapes_have_graphs_of_their_own() -> None:
    model, eager = pair()
    for number in range(4):
        for length in (16, 12):
            assert_as_eager(model, eager, batch(number, length))
    assert graphs_of(model)["graphs"] > 0


def test_workspaces_that_are_given_back_stay_where_graphs_use_them() -> None:
    """Others take what PyTorch's allocator got back, and fill it."""
    model, eager = pair()
    release_workspaces(CUDA)
    torch.cuda.empty_cache()
    filled = [torch.full((1 << 20,), float("nan"), device=CUDA) for _ in range(16)]
    for number in range(3):
        assert_as_eager(model, eager, batch(number))
    del filled


def test_two_models_train_in_two_threads() -> None:
    """Their engines share streams: neither records what the other launches."""
    pairs = [pair(), pair(warm=0)]
    errors: list[BaseException] = []

    def train(model: Any) -> None:
        try:
            for number in range(6):
                got = step(model, batch(number))
                torch.cuda.current_stream().synchronize()
                results[id(model)].append(got)
        except BaseException as error:
            errors.append(error)

    results: dict[int, list[dict[str, torch.Tensor]]] = {id(model): [] for model, _ in pairs}
    threads = [Thread(target=train, args=(model,)) for model, _ in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    for model, eager in pairs:
        for number, got in enumerate(results[id(model)]):
            expected = step(eager, batch(number))
            assert_same({k: got[k] for k in got if k != "generator"}, {k: expected[k] for k in got if k != "generator"})


def test_settings_that_change_between_forward_and_backward() -> None:
    """Kernels behind the gate were recorded under the others: they are launched one by one."""
    model, eager = pair("1GiB", warm=6)
    few = stats(model)["launches"]
    expected = step(eager, batch())
    model.zero_grad(set_to_none=True)
    loss = model(**batch()).loss
    torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark
    try:
        loss.backward()
    finally:
        torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark
    got = {"loss": loss.detach(), **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}
    assert_same(got, {name: expected[name] for name in got})
    assert stats(model)["launches"] > 2 * few


def test_a_loss_that_is_dropped_leaves_nothing_in_flight() -> None:
    model, eager = pair()
    for number in range(3):
        loss = model(**batch(number)).loss
        del loss
        assert_as_eager(model, eager, batch(number))


def test_they_take_nothing_from_the_driver_once_they_are_there() -> None:
    model, _ = pair(warm=6)
    given = batch()
    assert_steady(lambda: step(model, given))


def test_off_launches_kernels_one_by_one() -> None:
    model = llama()
    prepare(model, DiscoConfig(memory_budget="1GiB", device="cuda", launch_graphs="off"))
    for _ in range(3):
        step(model, batch())
    figures = stats(model)
    assert figures["launches"] == figures["kernels"]
    assert figures["launch_graphs"] == {"graphs": 0, "kernels": 0, "bytes": 0, "refused": ""}


def test_a_trace_has_each_kernel() -> None:
    model, _ = pair()
    current = state_of(model).memory.current
    assert current is not None
    current.executor.set_tracing(True)
    step(model, batch())
    current.executor.set_tracing(False)
    events = [event for event in current.executor.events() if event.lane == "compute0"]
    assert len(events) == stats(model)["kernels"]
    assert all(event.end > event.start for event in events)


def test_a_fault_in_a_graph_names_its_kernels() -> None:
    model, _ = pair("1GiB")
    given = batch()
    device.inject_fault("aten::mm", nth=30)
    with pytest.raises(DeviceLost, match=r"in flight: vertex \d+ \(aten::.* in .*layers") as caught:
        step(model, given)
    assert "illegal memory access" in str(caught.value)
