"""Forwards and steps without a plan whose weights stream through a ring, beside the same model in eager mode."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from disco_accel.native.host_memory import writes_are_watched
from disco_accel.native.loads import Loading, host_loads
from disco_accel.step.placement.model_placement import Placement
from disco_accel.step.placement.streamed_eager import StreamedEager, own_leaves
from disco_accel.step.placement.weight_ring import WeightRing
from tests.support.models import random_batch, tiny_lora

BATCH = random_batch()


class Ringed:
    """A model whose weights visit memory of ``room`` bytes. ``live``: bytes of all copies that anything still holds."""

    def __init__(self, model: nn.Module, room: int | None = None) -> None:
        self.model, self.placement = model, Placement(model, torch.device("cpu"))
        self.placement.gather()
        self.total = sum(p.nbytes for p in model.parameters())
        self.room = self.total // 2 if room is None else room
        self.loads: list[torch.Tensor] = []
        """What was loaded, or copied when it was read."""
        self.at_once: list[torch.Tensor] = []
        self.said: list[str] = []
        self.most_live = 0
        self._copies: list[tuple[StorageWeakRef, int]] = []
        self._load = host_loads(None)
        self.ring = WeightRing(own_leaves(model), self.load, lambda wanted: self.room, self.said.append)
        self.streamed = StreamedEager(model, self.visit, (), self.ring)

    def visit(self, tensor: torch.Tensor) -> torch.Tensor:
        self.at_once.append(tensor)
        return (tensor if tensor.requires_grad else tensor.detach()).clone()

    def load(self, source: torch.Tensor) -> Loading:
        self.loads.append(source)
        loading = self._load(source)
        self._copies.append((StorageWeakRef(loading.tensor.untyped_storage()), loading.tensor.nbytes))
        self._copies = [(one, nbytes) for one, nbytes in self._copies if not one.expired()]
        self.most_live = max(self.most_live, self.live)
        return loading

    @property
    def live(self) -> int:
        return sum(nbytes for one, nbytes in self._copies if not one.expired())

    def __call__(self, **inputs: Any) -> Any:
        with self.streamed.visiting(self.model):
            return self.model(**inputs)

    def loaded(self, run: Callable[[], object]) -> int:
        """Bytes of weights in the arena that ``run`` loads."""
        before = len(self.loads)
        run()
        return sum(source.nbytes for source in self.loads[before:] if self.placement.holds(source))


def pair(room: int | None = None, **config: Any) -> tuple[nn.Module, Ringed]:
    return tiny_lora(layers=4, **config), Ringed(tiny_lora(layers=4, **config), room)


def assert_same_step(plain: nn.Module, ringed: Ringed, **inputs: Any) -> None:
    """Loss and every gradient."""
    batch = {**BATCH, **inputs}
    plain.zero_grad()
    ringed.model.zero_grad()
    expected, got = plain(**batch).loss, ringed(**batch).loss
    assert torch.equal(expected, got)
    expected.backward()
    got.backward()
    compared = 0
    for (name, a), b in zip(plain.named_parameters(), ringed.model.parameters(), strict=True):
        assert (a.grad is None) is (b.grad is None), name
        if a.grad is not None and b.grad is not None:
            assert torch.equal(a.grad, b.grad), name
            compared += 1
    assert compared


def assert_same_values(plain: nn.Module, ringed: Ringed) -> None:
    with torch.no_grad():
        assert torch.equal(plain(**BATCH).logits, ringed(**BATCH).logits)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_steps_have_eagers_gradients_within_the_room(checkpointing: bool) -> None:
    """Of all weights, and after a first step in module order in an order that was learned."""
    plain, ringed = pair(checkpointing=checkpointing)
    for _ in range(3):
        assert_same_step(plain, ringed)
    assert ringed.most_live <= ringed.room and ringed.ring.most_held <= ringed.room
    assert not ringed.at_once and not ringed.said


@pytest.mark.parametrize("checkpointing", [False, True])
def test_all_weights_may_be_trained(checkpointing: bool) -> None:
    plain, ringed = pair(checkpointing=checkpointing)
    for one in (plain, ringed.model):
        one.requires_grad_(True)
    for _ in range(2):
        assert_same_step(plain, ringed)
        for one in (plain, ringed.model):
            torch.optim.SGD(one.parameters(), lr=0.1).step()
    assert ringed.ring.most_held <= ringed.room


@pytest.mark.skipif(not writes_are_watched(), reason="no weight stays where the kernel tells of no writes")
def test_what_fits_stays_and_the_rest_is_loaded_once() -> None:
    plain, ringed = pair()
    for _ in range(2):
        assert_same_values(plain, ringed)
    ringed.loads.clear()
    seconds = [ringed.loaded(lambda: assert_same_values(plain, ringed)) for _ in range(3)]
    window = ringed.ring._window
    assert window < ringed.room < ringed.total
    assert len(set(seconds)) == 1 and seconds[0] <= ringed.total - (ringed.room - window) * 0.75
    assert ringed.ring.held <= ringed.room - window
    first: Any = ringed.model.get_input_embeddings()  # type: ignore[operator]
    addresses = [source.data_ptr() for source in ringed.loads]
    assert first.weight.data_ptr() not in addresses, "nothing overlaps its load"
    ringed.room = 2 * ringed.total
    for _ in range(2):
        assert_same_values(plain, ringed)
    assert ringed.loaded(lambda: assert_same_values(plain, ringed)) == 0


def test_weights_are_loaded_before_they_are_read_in_the_order_of_the_last_forward() -> None:
    """The order of modules is not that of the forward: at first weights are loaded out of turn, later each once."""

    class Reversed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(12))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in reversed(self.layers):
                x = layer(x).tanh()
            return x

    torch.manual_seed(0)
    plain = Reversed().requires_grad_(False)
    model = Reversed().requires_grad_(False)
    model.load_state_dict(plain.state_dict())
    ringed, x = Ringed(model, 0), torch.randn(3, 16)
    for _ in range(3):
        ringed.loads.clear()
        assert torch.equal(plain(x), ringed(x=x))
    addresses = [source.data_ptr() for source in ringed.loads]
    assert addresses == [p.data_ptr() for layer in reversed(model.layers) for p in layer.parameters()]
    assert ringed.ring.most_held <= ringed.ring._window


class Reads(nn.Module):
    """Reads tensors of its children in its own forward, calls one twice, and has a weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.norm = nn.Linear(16, 16), nn.Linear(16, 16), nn.BatchNorm1d(16)
        self.tied = nn.Linear(16, 16, bias=False)
        self.tied.weight = self.first.weight
        self.first.register_buffer("shift", torch.randn(16))
        self.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x * self.scale)) + self.first.shift
        x = self.second(self.second(x).tanh()).tanh()
        x = nn.functional.linear(x, self.second.weight, self.first.bias)
        loss: torch.Tensor = self.tied(x).square().mean() + self.norm.running_mean.sum()
        return loss


def reads() -> tuple[Reads, Ringed]:
    return Reads(), Ringed(Reads(), 0)


def both_reads(plain: Reads, ringed: Ringed) -> None:
    x = torch.randn(8, 16)
    for one in (plain, ringed.model):
        one.zero_grad()
    expected, got = plain(x), ringed(x=x)
    assert torch.equal(expected, got)
    expected.backward()
    got.backward()
    assert torch.equal(plain.scale.grad, ringed.model.scale.grad)  # type: ignore[arg-type]
    for (name, a), b in zip(plain.named_buffers(), ringed.model.buffers(), strict=True):
        assert torch.equal(a, b), name


def test_reads_out_of_order_and_writes_to_buffers() -> None:
    plain, ringed = reads()
    for _ in range(4):
        both_reads(plain, ringed)
        plain.train(not plain.training)
        ringed.model.train(plain.training)


def test_a_hook_that_reads_weights_of_other_modules() -> None:
    plain, ringed = pair()
    for one in (plain, ringed.model):
        layers = one.base_model.model.model.layers

        def hook(module: nn.Module, args: Any, output: Any, other: Any = layers[3]) -> Any:
            return output + other.mlp.up_proj.base_layer.weight.mean()

        layers[0].mlp.register_forward_hook(hook)
    for _ in range(2):
        assert_same_step(plain, ringed)


def weight_of(model: Any) -> nn.Parameter:
    return model.base_model.model.model.layers[2].mlp.down_proj.base_layer.weight  # type: ignore[no-any-return]


def _in_place(model: nn.Module) -> None:
    with torch.no_grad():
        weight_of(model).mul_(1.5)


def _past_the_count(model: nn.Module) -> None:
    weight_of(model).data[0, :4] = 3.0


def _numpy(model: nn.Module) -> None:
    weight_of(model).detach().numpy()[1] *= 2


def _other_data(model: nn.Module) -> None:
    weight_of(model).data = weight_of(model).data * 2


def _replaced(model: Any) -> None:
    layer = model.base_model.model.model.layers[2].mlp.down_proj.base_layer
    layer.weight = nn.Parameter(layer.weight.detach() * 0.5, requires_grad=False)


@pytest.mark.parametrize("change", [_in_place, _past_the_count, _numpy, _other_data, _replaced])
@pytest.mark.parametrize("share", [0.5, 2.0])
def test_a_weight_changed_between_forwards(change: Callable[[nn.Module], None], share: float) -> None:
    """Whether it streams or stays."""
    plain, ringed = pair()
    ringed.room = int(share * ringed.total)
    for _ in range(2):
        assert_same_values(plain, ringed)
    for one in (plain, ringed.model):
        change(one)
    assert_same_values(plain, ringed)
    assert_same_step(plain, ringed)
    assert_same_step(plain, ringed)


def test_a_weight_changed_before_the_backward_is_refused_as_by_pytorch() -> None:
    plain, ringed = pair()
    for loss in (plain(**BATCH).loss, ringed(**BATCH).loss):
        _in_place(plain)
        _in_place(ringed.model)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    assert_same_step(plain, ringed)


def test_a_write_past_the_count_in_a_forward_is_told() -> None:
    if not writes_are_watched():
        pytest.skip("nothing tells of writes")
    plain, ringed = pair()
    assert_same_values(plain, ringed)
    weight = weight_of(ringed.model)

    def write(*_: Any) -> None:
        weight.data[0, 0] += 1

    handle = ringed.model.base_model.model.model.layers[0].register_forward_hook(write)  # type: ignore[union-attr]
    ringed(**BATCH)
    handle.remove()
    assert len(ringed.said) == 1 and "past PyTorch's count" in ringed.said[0]
    weight_of(plain).data[0, 0] += 1
    assert_same_values(plain, ringed)


def test_adapters_are_switched() -> None:
    plain, ringed = pair()
    for one in (plain, ringed.model):
        torch.manual_seed(1)
        one.add_adapter("second", one.peft_config["default"])  # type: ignore[operator, index, union-attr]
    for name in ("second", "default", "second"):
        for one in (plain, ringed.model):
            one.set_adapter(name)  # type: ignore[operator]
        assert_same_values(plain, ringed)
        assert_same_step(plain, ringed)
    for one in (plain, ringed.model):
        one.merge_adapter()  # type: ignore[operator]
    assert_same_values(plain, ringed)


class _Stop(Exception):
    pass


@pytest.mark.parametrize("error", [_Stop, KeyboardInterrupt])
@pytest.mark.parametrize("outside", [False, True])
def test_a_forward_that_is_interrupted(error: type[BaseException], outside: bool) -> None:
    """In ``visiting``, or in the call of a module of the model's, as in generation."""
    plain, ringed = pair()
    assert_same_values(plain, ringed)
    homes = [p.data_ptr() for p in ringed.model.parameters()]
    inner: Any = ringed.model.base_model.model  # type: ignore[union-attr]

    def stop(*_: Any) -> None:
        raise error

    handle = inner.model.layers[1].mlp.register_forward_hook(stop)
    for _ in range(2):
        with pytest.raises(error):
            inner(**BATCH) if outside else ringed(**BATCH)
    handle.remove()
    assert [p.data_ptr() for p in ringed.model.parameters()] == homes
    assert_same_values(plain, ringed)
    assert_same_step(plain, ringed)
    assert ringed.ring.most_held <= ringed.room


@pytest.mark.parametrize("way", ["a growing cache", "prompt lookup", "an assistant"])
def test_generations_without_a_plan_stream_within_the_room(way: str) -> None:
    plain, ringed = pair()
    guesses: dict[str, Any] = {
        "a growing cache": {},
        "prompt lookup": {"prompt_lookup_num_tokens": 2},
        "an assistant": {"assistant_model": tiny_lora(seed=1).get_base_model()},  # type: ignore[operator]
    }[way]
    keys = {"max_new_tokens": 8, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    ids = BATCH["input_ids"][:1]
    found: list[Any] = [
        one.eval().generate(input_ids=ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **keys, **guesses)
        for one in (plain, ringed.model)
    ]
    assert torch.equal(found[0].sequences, found[1].sequences)
    assert all(torch.equal(a, b) for a, b in zip(found[0].logits, found[1].logits, strict=True))
    assert 0 < ringed.ring.most_held <= ringed.room and 0 < ringed.most_live <= ringed.room
    assert not any(map(ringed.placement.holds, ringed.at_once)) and not ringed.said


def test_two_threads_evaluate_at_the_same_time() -> None:
    """One of them has the ring; the other copies what it reads, and nobody waits for the other's forward."""
    plain, ringed = pair()
    with torch.no_grad():
        expected = plain(**BATCH).logits
    meeting, wrong = threading.Barrier(2, timeout=60), list[str]()

    def meet(*_: Any) -> None:
        meeting.wait()

    ringed.model.base_model.model.model.layers[2].register_forward_hook(meet)  # type: ignore[union-attr]

    def evaluate() -> None:
        with torch.no_grad():
            for _ in range(3):
                if not torch.equal(ringed(**BATCH).logits, expected):
                    wrong.append("other logits")

    threads = [threading.Thread(target=evaluate) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and ringed.loads and ringed.at_once
    assert ringed.ring.most_held <= ringed.room


def test_what_a_forward_keeps_of_a_weight_is_never_overwritten() -> None:
    plain, ringed = pair()
    kept: list[torch.Tensor] = []
    layer: Any = ringed.model.base_model.model.model.layers[2].mlp.down_proj.base_layer  # type: ignore[union-attr]
    handle = layer.register_forward_hook(lambda module, *_: kept.append(module.weight))
    for _ in range(2):
        assert_same_values(plain, ringed)
    handle.remove()
    assert all(torch.equal(one, weight_of(plain)) for one in kept)
    with torch.no_grad():
        kept[-1].zero_()
    kept[0].data.zero_()
    for _ in range(2):
        assert_same_values(plain, ringed)


def test_a_failed_copy_is_raised_where_the_weight_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, ringed = pair()
    fail = True
    copy = torch.Tensor.copy_

    def failing(self: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if fail and threading.current_thread().name == "disco-visits":
            raise RuntimeError("no copy today")
        return copy(self, *args, **options)

    monkeypatch.setattr(torch.Tensor, "copy_", failing)
    with pytest.raises(RuntimeError, match="no copy today"):
        ringed(**BATCH)
    fail = False
    assert_same_values(plain, ringed)


def test_the_copying_thread_ends_with_its_model() -> None:
    before = set(threading.enumerate())
    plain, ringed = pair()
    assert_same_values(plain, ringed)
    (thread,) = set(threading.enumerate()) - before
    assert thread.name == "disco-visits"
    del plain, ringed
    gc.collect()
    thread.join(timeout=60)
    assert not thread.is_alive()
