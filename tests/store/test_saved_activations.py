"""Activations in a store: bits, errors and lifetimes are those of plain PyTorch, and the device holds fewer of them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import disco_accel.store.saved_activations as module
from disco_accel.errors import ConfigError, StoreError, StoreFull, StoreGone
from disco_accel.store.client import Store
from disco_accel.store.saved_activations import saved_activations
from tests.store.serving import MIB, command, nothing_left, objects, serving, until
from tests.support.models import tiny_lora

KIB = 1 << 10


class Watched(Store):
    """A store that notes its calls."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.created: list[int] = []
        self.announced: list[float | None] = []

    def create(self, shape: Any, dtype: torch.dtype, device: str = "host") -> int:
        self.created.append(shape[0])
        return super().create(shape, dtype, device)

    def put(self, id: int, next_use: float | None = None) -> None:
        self.announced.append(next_use)
        super().put(id, next_use)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Watched]:
    with serving(tmp_path, device=2 * MIB) as server, Watched.connect(server.path) as made:
        yield made


def lora_steps(store: Store | None, steps: int, checkpointing: bool) -> list[torch.Tensor]:
    """Losses and gradients of a LoRA training."""
    model = tiny_lora(checkpointing=checkpointing)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    found: list[torch.Tensor] = []
    for _ in range(steps):
        ids = torch.randint(96, (2, 64), generator=generator)
        if store is None:
            loss = model(input_ids=ids, labels=ids).loss
        else:
            with saved_activations(store, min_bytes=KIB):
                loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in trained if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_has_the_bits_of_plain_pytorch_in_less_device_memory(tmp_path: Path, checkpointing: bool) -> None:
    plain = lora_steps(None, 3, checkpointing)
    device = 64 * KIB if checkpointing else 512 * KIB
    with serving(tmp_path, device=device, policy="next_use") as server, Watched.connect(server.path) as store:
        stored = lora_steps(store, 3, checkpointing)
        assert len(plain) == len(stored) > 3
        assert all(torch.equal(one, other) for one, other in zip(plain, stored, strict=True))
        # Each step saved more than the device has, so that some went over the link, both ways.
        assert sum(store.created) // 3 > device
        figures = store.stats()
        assert figures["device_bytes"] == device and figures["evicted"] and figures["loaded_bytes"]
        # The first step has nothing to go by, the others announce.
        assert any(seconds is not None for seconds in store.announced)
        nothing_left(store)


def gradients(work: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    leaf = x.clone().requires_grad_()
    out = work(leaf)
    (gradient,) = torch.autograd.grad(out, leaf, torch.ones_like(out))
    return gradient


SAVING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda x: (x * 2).t().sin(),
    "expanded": lambda x: (x * 2)[:1].expand(64, 64).exp().mul((x * 3)[:1].expand(64, 64)),
    "with gaps": lambda x: (x * 2)[:, 3:40].sin() * (x * 3)[:, 5:42],
    "chunks": lambda x: (lambda a, b: (a * b).sum(0))(*(x * 2).chunk(2, dim=1)),
    "complex": lambda x: torch.view_as_real(torch.fft.fft(x * 2) ** 2),
    "conjugate": lambda x: (lambda z: (z * z.conj()).real)(torch.complex(x * 2, x * 3)),
    "integers and booleans": lambda x: torch.where(x * 2 > 0, x * 2, x).gather(0, (x * 2).argsort(0)),
    "empty": lambda x: (x * 2)[:0].sin().sum() + (x * 3).exp().sum(),
    "half": lambda x: (x.bfloat16() * 2).sin().float(),
    "overlapping": lambda x: (x * 2).reshape(-1).unfold(0, 256, 1).sin(),
    "in place before it is saved": lambda x: (x * 2).add_(1).sin_().exp_(),
    "one storage, two types": lambda x: (x * 2).view(torch.int32).float() * (x * 2).sin(),
    "custom function": lambda x: _Cube.apply(x * 2),
}


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        out = x**3
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        x, out = ctx.saved_tensors
        return gradients[0] * 3 * out / x


@pytest.mark.parametrize("name", SAVING)
def test_every_kind_of_tensor_comes_back_as_it_was(store: Watched, name: str) -> None:
    """Also its strides and the bits behind it, seen by hooks that compare."""
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(2))
    seen: list[tuple[Any, ...]] = []

    def described(t: torch.Tensor) -> tuple[Any, ...]:
        return (t.dtype, t.size(), t.stride(), t.is_conj(), t.data_ptr() % 64, t.resolve_conj().contiguous().clone())

    def keep(t: torch.Tensor) -> tuple[torch.Tensor, tuple[Any, ...]]:
        return t.detach(), described(t)

    with saved_tensors_hooks(keep, lambda packed: (seen.append(packed[1]), packed[0])[1]):
        plain = gradients(SAVING[name], x)
    unpack, found = module._unpack, []

    def watched(packed: Any) -> torch.Tensor:
        tensor = unpack(packed)
        found.append(described(tensor))
        return tensor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_unpack", watched)
        with saved_activations(store, min_bytes=1):
            stored = gradients(SAVING[name], x)
    assert torch.equal(plain, stored)
    assert len(seen) == len(found) > 0
    for one, other in zip(seen, found, strict=True):
        assert one[:-1] == other[:-1]
        assert torch.equal(
            torch.view_as_real(one[-1]) if one[-1].is_complex() else one[-1],
            torch.view_as_real(other[-1]) if other[-1].is_complex() else other[-1],
        )
    assert store.created
    nothing_left(store)


def test_views_of_one_storage_are_stored_once_and_parameters_never(store: Watched) -> None:
    heads = [torch.nn.Linear(64, 64) for _ in range(3)]
    frozen = torch.nn.Linear(64, 64).requires_grad_(False)
    x = torch.randn(64, 64, requires_grad=True)
    with saved_activations(store, min_bytes=KIB):
        y = x * 2
        out = sum((head(y.view(64, 64)) for head in heads), frozen(y))
    assert len(store.created) == 1
    out.sum().backward()
    nothing_left(store)


def test_a_part_of_what_is_stored_is_found_in_it_and_gaps_are_not_stored(store: Watched) -> None:
    def part(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        return y.sin().sum() + y[9:, :].cos().sum()

    def narrow(x: torch.Tensor) -> torch.Tensor:
        return (x * 2)[:, 5:9].sin().sum()

    x = torch.randn(64, 64, requires_grad=True)
    for work, nbytes in ((part, 64 * 64 * 4), (narrow, 64 * 4 * 4)):
        store.created.clear()
        with saved_activations(store, min_bytes=64):
            out = work(x)
        assert store.created == [nbytes]
        assert torch.equal(torch.autograd.grad(out, x)[0], torch.autograd.grad(work(x), x)[0])
    nothing_left(store)


def test_a_graph_that_is_kept_lets_its_objects_be_evicted(store: Watched) -> None:
    x = torch.randn(64, 64, requires_grad=True)
    with saved_activations(store, min_bytes=KIB):
        y = x * 2
        out = (y.sin() + y.cos()).sum()
    for _ in range(2):
        torch.autograd.grad(out, x, retain_graph=True)
        until(lambda: store.stats()["device_idle"] == store.stats()["device_used"] > 0)


def test_a_storage_that_was_written_to_past_its_version_is_stored_anew(store: Watched) -> None:
    def work(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        z = y.sin()
        y.data.mul_(3)
        return z + y.cos()

    x = torch.randn(64, 64)
    leaf = x.clone().requires_grad_()
    with saved_activations(store, min_bytes=KIB):
        out = work(leaf)
    (gradient,) = torch.autograd.grad(out.sum(), leaf)
    assert len(store.created) == 2
    # The values that each op saw.
    assert torch.allclose(gradient, 2 * (2 * x).cos() - 2 * (6 * x).sin(), atol=1e-5)


@pytest.mark.parametrize("min_bytes", [1, MIB])
def test_a_write_between_forward_and_backward_is_the_error_that_it_is_in_pytorch(
    store: Watched, min_bytes: int
) -> None:
    """Of what is stored, of what stays, of a parameter, through a view of a tensor that is gone."""

    def through_a_view(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        out = y.sin()
        z = y.view(-1)
        del y
        z.mul_(2)
        return out

    def of_itself(x: torch.Tensor) -> torch.Tensor:
        y = (x * 2).exp()
        y.mul_(2)
        return y

    weight = torch.nn.Parameter(torch.randn(64, 64))

    def of_a_parameter(x: torch.Tensor) -> torch.Tensor:
        out = (x * 2) @ weight
        with torch.no_grad():
            weight.mul_(2)
        return out

    for work in (through_a_view, of_itself, of_a_parameter):
        for hooks in (contextlib.nullcontext(), saved_activations(store, min_bytes=min_bytes)):
            x = torch.randn(64, 64, requires_grad=True)
            with hooks:
                out = work(x)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                out.sum().backward()
            del out
    nothing_left(store)


def test_a_graph_is_used_twice_differentiated_twice_and_dropped(store: Watched) -> None:
    def losses(hooked: bool) -> list[torch.Tensor]:
        x = torch.linspace(-1, 1, 4096, requires_grad=True)
        if hooked:
            with saved_activations(store, min_bytes=KIB):
                out = ((x * 2).sin() * (x * 3).exp()).sum()
        else:
            out = ((x * 2).sin() * (x * 3).exp()).sum()
        first = torch.autograd.grad(out, x, retain_graph=True)[0]
        second = torch.autograd.grad(out, x, create_graph=True)[0]
        third = torch.autograd.grad(second.square().sum(), x)[0]
        return [first, second.detach(), third]

    assert all(torch.equal(a, b) for a, b in zip(losses(False), losses(True), strict=True))
    assert store.created
    nothing_left(store)
    x = torch.randn(4096, requires_grad=True)
    with saved_activations(store, min_bytes=KIB):
        out = (x * 2).sin()
    assert objects(store) == 1
    # The graph is seen by others than a backward.
    assert torch.equal(out.grad_fn._saved_self, x * 2)  # type: ignore[union-attr]
    kept = out.grad_fn._saved_self  # type: ignore[union-attr]
    del out
    # What was given stays readable when its object is gone.
    assert objects(store) == 0 and torch.equal(kept, x * 2)
    del kept
    nothing_left(store)


def test_an_error_in_the_middle_of_a_step_leaves_nothing(store: Watched) -> None:
    class Stop(Exception):
        pass

    def stop(_gradient: torch.Tensor) -> None:
        raise Stop

    x = torch.randn(4096, requires_grad=True)
    with pytest.raises(Stop), saved_activations(store, min_bytes=KIB):
        (x * 2).sin()
        raise Stop
    with saved_activations(store, min_bytes=KIB):
        middle = (x * 2).sin()
        middle.register_hook(stop)
        out = middle.exp()
    with pytest.raises(Stop):
        out.sum().backward()
    del out, middle
    nothing_left(store)


def test_checkpoints_inside_save_what_they_save_without(store: Watched) -> None:
    x = torch.randn(4096, requires_grad=True)

    def block(y: torch.Tensor) -> torch.Tensor:
        return y.sin().exp().cos()

    plain = torch.autograd.grad(checkpoint(block, x * 2, use_reentrant=False).sum(), x)[0]
    with saved_activations(store, min_bytes=KIB):
        out = checkpoint(block, x * 2, use_reentrant=False).sum()
    assert len(store.created) == 1
    assert torch.equal(plain, torch.autograd.grad(out, x)[0])
    nothing_left(store)


def test_threads_train_over_one_connection(store: Watched) -> None:
    wrong: list[object] = []

    def train(seed: int) -> None:
        try:
            x = torch.randn(64, 64, generator=torch.Generator().manual_seed(seed), requires_grad=True)
            plain = torch.autograd.grad(SAVING["with gaps"](x).sum(), x)[0]
            for _ in range(10):
                with saved_activations(store, min_bytes=KIB):
                    out = SAVING["with gaps"](x).sum()
                if not torch.equal(plain, torch.autograd.grad(out, x)[0]):
                    wrong.append("bits")
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=train, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and not any(thread.is_alive() for thread in threads)
    nothing_left(store)


def test_a_store_that_has_no_room_or_is_killed_says_so(tmp_path: Path) -> None:
    x = torch.randn(64, 256, requires_grad=True)

    def forward(store: Store, layers: int) -> torch.Tensor:
        y = x * 2
        with saved_activations(store, min_bytes=KIB):
            for _ in range(layers):
                y = y.sin() * 2
        return y.sum()

    process = command(tmp_path, "--host", "256KiB", "--device", "128KiB")
    try:
        store = Store.connect(tmp_path / "own" / "store")
        with pytest.raises(StoreFull):
            forward(store, 9)
        # Nothing is left of it, and what fits goes on.
        assert objects(store) == 0 and not module._step_of(store).live
        plain = torch.autograd.grad(x.mul(2).sin().mul(2).sin().mul(2).sum(), x)[0]
        assert torch.equal(plain, torch.autograd.grad(forward(store, 2), x)[0])
        out = forward(store, 5)
        process.kill()
        process.wait(30)
        with pytest.raises(StoreGone):
            out.backward()
        with pytest.raises(StoreGone):
            forward(store, 1)
        del out
    finally:
        process.kill()
        process.wait(30)


def test_arguments_that_cannot_work_are_refused(store: Watched) -> None:
    with pytest.raises(ConfigError, match="min_bytes"), saved_activations(store, min_bytes=0):
        pass
    # Meta tensors have no bytes to store.
    with saved_activations(store, min_bytes=1):
        torch.ones(8, device="meta", requires_grad=True).mul(2).sin().sum().backward()
    assert not store.created
    assert issubclass(StoreGone, StoreError)
