"""Weights in a store: training has the bits of plain PyTorch, and no write is lost."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import safetensors.torch
import torch
from torch import nn

from disco_accel.config.settings import DiscoConfig
from disco_accel.errors import ConfigError, StoreError, StoreFull, StoreGone
from disco_accel.integrate.prepare import prepare, restore
from disco_accel.store.client import Store
from disco_accel.store.offload import OffloadedWeight, _Weight, _WeightUses
from tests.store.serving import MIB, command, nothing_left, serving
from tests.support.models import family_lora, tiny_lora

KIB = 1 << 10


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with serving(tmp_path, device=2 * MIB) as server, Store.connect(server.path) as made:
        yield made


def steps(model: nn.Module, store: Store | None, count: int = 3) -> list[torch.Tensor]:
    """Losses and gradients of a training whose optimizer has the frozen parameters too."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    found: list[torch.Tensor] = []
    for _ in range(count):
        ids = torch.randint(96, (2, 64), generator=generator)
        with contextlib.nullcontext() if store is None else store.saved_activations(min_bytes=KIB):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in trained if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return found


def test_a_prepared_model_beside_it_has_its_optimizer_and_no_other(tmp_path: Path) -> None:
    """Each optimizer's step is compared with the weights of all prepared models: an offloaded one is none of them."""
    keys: dict[str, Any] = {"optimizer": "host", "update": "deferred", "plan_cache": None, "quiet": True}
    beside = prepare(tiny_lora(), DiscoConfig(memory_budget="64MiB", device="cpu", **keys))
    plain = steps(tiny_lora(), None)
    model = tiny_lora()
    with (
        serving(tmp_path, device=64 * KIB) as server,
        Store.connect(server.path) as store,
        store.offload(model, min_bytes=KIB),
    ):
        assert all(torch.equal(a, b) for a, b in zip(plain, steps(model, None), strict=True))
    restore(beside)


@pytest.mark.parametrize(
    ("make", "activations"),
    [
        (tiny_lora, False),
        (tiny_lora, True),
        (lambda: tiny_lora(checkpointing=True), True),
        (lambda: family_lora("gpt2", tie_word_embeddings=True), False),
        (lambda: tiny_lora(dtype=torch.bfloat16), False),
    ],
    ids=["weights", "and activations", "and checkpoints", "tied", "bfloat16"],
)
def test_training_has_the_bits_of_plain_pytorch_in_less_device_memory(
    tmp_path: Path, make: Callable[[], nn.Module], activations: bool
) -> None:
    reference = make()
    plain = steps(reference, None)
    model = make()
    device = (128 if activations else 64) * KIB
    with serving(tmp_path, device=device, policy="next_use") as server, Store.connect(server.path) as store:
        weights = sum(p.nbytes for p in model.parameters() if not p.requires_grad and p.nbytes >= KIB)
        assert weights > device
        with store.offload(model, min_bytes=KIB) as handle:
            assert len(handle.names) > 4
            stored = steps(model, store if activations else None)
            figures = store.stats()
            assert figures["evicted"] and figures["loaded_bytes"] > weights
        assert len(plain) == len(stored) > 3
        assert all(torch.equal(one, other) for one, other in zip(plain, stored, strict=True))
        nothing_left(store)
    # The module is as it was, without the store.
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), reference.parameters(), strict=True))
    assert torch.equal(steps(model, None)[0], steps(reference, None)[0])


class Two(nn.Module):
    """Two frozen layers and a trained one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(64, 64, bias=False) for _ in range(3))
        self.first.requires_grad_(False)
        self.second.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(self.first(x).relu()).relu())


def test_what_a_program_does_with_weights_reads_the_weight(store: Store) -> None:
    model, x = Two(), torch.randn(4, 64)
    kept, before, weight = model.first.weight, copy.deepcopy(model), model.first.weight.detach().clone()
    handle = store.offload(model, min_bytes=1)
    assert handle.names == ["first.weight", "second.weight"]
    # Who held the parameter holds the offloaded one.
    assert kept is model.first.weight and isinstance(kept, nn.Parameter) and isinstance(kept, OffloadedWeight)
    assert kept.shape == (64, 64) and kept.stride() == (64, 1) and kept.device.type == "cpu" and not kept.requires_grad
    assert torch.equal(model.first.weight, weight)
    assert torch.equal(torch.cat([kept, kept])[64:, 1], weight[:, 1])
    assert torch.equal(kept.t()[3:7].clone(), weight.t()[3:7]) and kept.tolist() == weight.tolist()
    assert torch.equal(kept.view(torch.int32).clone(), weight.view(torch.int32))
    assert all(torch.equal(a, b.clone()) for a, b in zip(weight.chunk(3), kept.chunk(3), strict=True))
    # Copies and files have plain tensors.
    for copied in (copy.deepcopy(model), _through_a_file(model)):
        assert all(type(p) is nn.Parameter for p in copied.parameters())
        assert torch.equal(copied(x), before(x))
    assert torch.equal(model.to(torch.float32).to("cpu")(x), before(x))
    assert "first.weight" in repr(kept)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(x), before(x))
    with torch.inference_mode():
        assert torch.equal(model(x), before(x))
    model.second.weight = nn.Parameter(torch.eye(64), requires_grad=False)
    handle.remove()
    assert type(kept) is nn.Parameter and torch.equal(kept, weight) and torch.equal(model.second.weight, torch.eye(64))
    nothing_left(store)


def _through_a_file(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    made = Two()
    # Tensors alone: weights_only.
    made.load_state_dict(torch.serialization.load(file, weights_only=True))
    return made


def _assign(weight: Any) -> None:
    weight[0] = 0


WRITES: dict[str, Callable[[nn.Parameter], object]] = {
    "in place": lambda w: w.mul_(2),
    "through data": lambda w: w.data.mul_(2),
    "to data": lambda w: setattr(w, "data", torch.zeros(64, 64)),
    "through a view": lambda w: w.detach().view(-1)[:3].zero_(),
    "an element": _assign,
    "out": lambda w: torch.add(w, w, out=w),
    "a list": lambda w: torch._foreach_mul_([w], 2.0),
    "init": lambda w: nn.init.zeros_(w),
    "numpy": lambda w: w.detach().numpy().fill(0),
    "array": lambda w: numpy.asarray(w).fill(0),
    "dlpack": lambda w: torch.from_dlpack(w).mul_(2),
    "pointer": lambda w: w.data_ptr(),
    "storage": lambda w: w.untyped_storage().fill_(0),
    "safetensors": lambda w: safetensors.torch.save({"w": w.detach()}),
}


def test_a_write_is_refused_by_name(store: Store) -> None:
    model = Two()
    before = model.first.weight.detach().clone()
    with store.offload(model, min_bytes=1):
        for name, write in WRITES.items():
            with torch.no_grad(), pytest.raises(StoreError, match=r"first\.weight.*remove"):
                write(model.first.weight)
                print(name)
        with pytest.raises(RuntimeError, match=r"first\.weight"):
            model.load_state_dict(Two().state_dict())
        with pytest.raises(StoreError, match=r"first\.weight"):
            model.half()
        # One that is trained from now on has a gradient, and no optimizer can write to it.
        model.first.weight.requires_grad_()
        model(torch.randn(4, 64)).sum().backward()
        with pytest.raises(StoreError, match=r"first\.weight"):
            torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert torch.equal(model.first.weight, before)
    nothing_left(store)


def test_parameters_that_cannot_be_moved_are_refused_by_name(store: Store) -> None:
    def refused(change: Callable[[Two], object], reason: str) -> None:
        model = Two()
        kept = change(model)
        with pytest.raises(ConfigError, match=reason):
            store.offload(model, min_bytes=1)
        assert not any(isinstance(p, OffloadedWeight) for p in model.parameters())
        del kept

    def share(model: Two) -> None:
        model.second.weight = nn.Parameter(model.first.weight.data[:32], requires_grad=False)

    def trained(model: Two) -> None:
        model.last.weight = nn.Parameter(model.first.weight.data)

    def buffer(model: Two) -> None:
        model.register_buffer("mirror", model.first.weight.data.view(-1)[5:6])

    refused(share, "'(first|second).weight' shares memory with '(first|second).weight'")
    refused(trained, "'last.weight' shares memory with 'first.weight'|'first.weight' shares")
    refused(buffer, "'mirror' shares memory with 'first.weight'")
    refused(lambda m: setattr(m.first.weight, "grad", torch.zeros(64, 64)), "'first.weight' has a gradient")
    refused(lambda m: m.first.to("meta"), "'first.weight' is on meta")
    refused(lambda m: setattr(m.first, "weight", _Other(torch.ones(64, 64), False)), "'first.weight' is a _Other")
    refused(lambda m: m.first.to(torch.complex64), "'first.weight' is complex")
    with pytest.raises(ConfigError, match="min_bytes"):
        store.offload(Two(), min_bytes=0)
    model = Two()
    with store.offload(model, min_bytes=1), pytest.raises(ConfigError, match=r"'first\.weight' is offloaded already"):
        store.offload(model, min_bytes=1)
    # Between forward and backward a graph holds the weight.
    model = Two()
    model.second.weight.requires_grad_()
    out = model(torch.randn(4, 64, requires_grad=True))
    model.second.weight.requires_grad_(False)
    with pytest.raises(StoreError, match=r"'first\.weight' is held by a graph"):
        store.offload(model, min_bytes=1)
    assert all(type(p) is nn.Parameter for p in model.parameters())
    out.sum().backward()
    nothing_left(store)


class _Other(nn.Parameter):
    pass


def test_a_store_without_room_leaves_the_module_as_it_was(tmp_path: Path) -> None:
    with serving(tmp_path, host=16 * KIB, device=24 * KIB) as server, Store.connect(server.path) as store:
        model, x = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).requires_grad_(False), torch.randn(4, 64)
        plain = model(x)
        with pytest.raises(StoreFull):
            store.offload(model, min_bytes=KIB)
        assert all(type(p) is nn.Parameter for p in model.parameters())
        assert torch.equal(plain, model(x))
        nothing_left(store)


def test_a_store_that_is_killed_says_so(tmp_path: Path) -> None:
    process = command(tmp_path, "--host", "8MiB", "--device", "8MiB")
    try:
        model = Two()
        handle = Store.connect(tmp_path / "own" / "store").offload(model, min_bytes=1)
        out = model(torch.randn(4, 64, requires_grad=True))
        process.kill()
        process.wait(30)
        for work in (out.sum().backward, lambda: model(torch.randn(4, 64)), handle.remove):
            with pytest.raises(StoreGone):
                work()
    finally:
        process.kill()
        process.wait(30)


def test_uses_are_announced_as_they_came_in_the_step_before() -> None:
    """Times of a clock of the test's own; the order wraps into the next step; another order announces nothing."""
    clock = [0.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("disco_accel.store.offload.time.monotonic", lambda: clock[0])
        uses = _WeightUses()
        a, b, c = (_Weight(name, None, None) for name in "abc")  # type: ignore[arg-type]

        def step(order: str) -> list[tuple[float | None, str]]:
            uses.begin_step()
            found = []
            for name in order:
                seconds, soon = uses.use({"a": a, "b": b, "c": c}[name])
                found.append((seconds, "".join(w.name for w in soon)))
                clock[0] += 1
            return found

        assert step("abcba") == [(None, "")] * 5
        # Each gap, also that into the next step, which is known once its use has come.
        assert [seconds for seconds, _ in step("abcba")] == [4, 2, 5, 3, 1]
        assert [soon for _, soon in step("abcba")] == ["bc", "a", "b", "c", "b"]
        assert step("acbba")[1] == (None, "")
