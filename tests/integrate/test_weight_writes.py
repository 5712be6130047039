"""Writes to a part of a frozen weight that no version counter shows: eager's bits at any budget, by either watch."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy
import pytest
import torch

from disco_accel import DiscoConfig, prefill, prepare, restore, stats
from disco_accel.errors import BudgetTooSmall, ExecutionError
from disco_accel.integrate.hf.checkpoint import load_into_arena
from disco_accel.native.host_memory import HostMemory, writes_are_watched
from disco_accel.step.run.session import find_state
from tests.integrate.twins import SMALL, assert_same, assert_same_step, batch, config, step
from tests.support.models import tiny_lora
from tests.support.unwatched import without_watching_writes

WEIGHT = "base_model.model.model.layers.0.mlp.up_proj.base_layer.weight"
STRIDED = "base_model.model.model.layers.0.mlp.down_proj.base_layer.weight"
ADAPTER = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"
Write = Callable[[torch.Tensor], object]


def _element(weight: torch.Tensor) -> None:
    weight.data[5, 7] += 0.25


def _row(weight: torch.Tensor) -> None:
    weight.data[3] *= 1.5


def _mask(weight: torch.Tensor) -> None:
    chosen = torch.rand(weight.shape, generator=torch.Generator().manual_seed(1)) < 0.01
    weight.data[chosen] = 0.5


def _numpy(weight: torch.Tensor) -> None:
    weight.detach().numpy()[6, 2] = 1.25


def _last_byte(weight: torch.Tensor) -> None:
    """The exponent of the last element, but one bit."""
    weight.detach().numpy().reshape(-1).view(numpy.uint8)[-1] ^= 0x01


def _address(weight: torch.Tensor) -> None:
    ctypes.memset(weight.data_ptr() + 4 * 11, 0, 4)


def _kernel(weight: torch.Tensor) -> None:
    """A write of the kernel's own, straight into the pages."""
    reader, writer = os.pipe()
    os.write(writer, numpy.float32(0.75).tobytes())
    assert os.readv(reader, [memoryview(weight.detach().numpy().reshape(-1)[9:10])]) == 4
    os.close(reader)
    os.close(writer)


def _thread(weight: torch.Tensor) -> None:
    other = threading.Thread(target=_element, args=(weight,))
    other.start()
    other.join()


WRITES: dict[str, tuple[str, Write]] = {
    "element": (WEIGHT, _element),
    "row": (WEIGHT, _row),
    "mask": (WEIGHT, _mask),
    "numpy": (WEIGHT, _numpy),
    "one bit of the last byte": (WEIGHT, _last_byte),
    "address": (WEIGHT, _address),
    "kernel": (WEIGHT, _kernel),
    "thread": (WEIGHT, _thread),
    "strided element": (STRIDED, _element),
    "strided row": (STRIDED, _row),
}


def _model() -> torch.nn.Module:
    model = tiny_lora(**SMALL)
    weight = model.get_parameter(STRIDED)
    weight.data = weight.data.t().contiguous().t()
    return model


@functools.cache
def _smallest() -> int:
    with pytest.raises(BudgetTooSmall) as caught:
        prepare(_model(), DiscoConfig(memory_budget=1, device="cpu", planner="build"))(**batch())
    return caught.value.needed


def _prepared(model: torch.nn.Module, budget: str, kind: str = "") -> torch.nn.Module:
    keys = {} if budget == "ample" else {"memory_budget": _smallest()}
    model = prepare(model, config(**keys, share_weights=kind == "shared pages"))
    state = find_state(model)
    assert state is not None and len(state.placement.shared_arenas()) == (kind == "shared pages")
    return model


@contextlib.contextmanager
def _watch(kind: str) -> Iterator[None]:
    if kind != "hash":
        if not writes_are_watched():
            pytest.skip("this kernel does not tell which pages are written to")
        yield
    else:
        with without_watching_writes():
            yield


both = pytest.mark.parametrize("kind", ["pages", "hash"])
any_kind = pytest.mark.parametrize("kind", ["pages", "hash", "shared pages"])


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@any_kind
@pytest.mark.parametrize("budget", ["ample", "smallest"])
def test_a_partial_write_reaches_the_next_step(kind: str, budget: str) -> None:
    """Each kind of write changes the next step, to eager's bits, whatever stays on the device."""
    with _watch(kind):
        model, eager = _prepared(_model(), budget, kind), _model()
        before = step(model)
    assert_same(before, step(eager))
    weights = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    assert (stats(model)["resident_weight_bytes"] >= weights) == (budget == "ample")
    for name, (weight, write) in WRITES.items():
        for of in (model, eager):
            write(of.get_parameter(weight))
        after = step(model)
        assert_same(after, step(eager))
        assert not all(torch.equal(g, before[1][n]) for n, g in after[1].items()), name
        before = after
    assert stats(model)["plans"] == 1


@any_kind
@pytest.mark.parametrize("budget", ["ample", "smallest"])
def test_a_write_between_forward_and_backward_is_an_error(kind: str, budget: str) -> None:
    """At any budget; the step after it has eager's bits."""
    with _watch(kind):
        model, eager = _prepared(_model(), budget, kind), _model()
        assert_same_step(model, eager)
    for weight, write in (WRITES["element"], WRITES["kernel"], WRITES["strided element"]):
        loss = model(**batch()).loss
        for of in (model, eager):
            write(of.get_parameter(weight))
        with pytest.raises(ExecutionError, match="a frozen weight was changed in place between this step's forward"):
            loss.backward()
        model.zero_grad(set_to_none=True)
        assert_same_step(model, eager)


@any_kind
def test_nothing_is_loaded_again_for_writes_elsewhere(kind: str) -> None:
    """An optimizer step, the adapters' own writes and reads of the weights leave the watch as it is."""
    with _watch(kind):
        model = _prepared(_model(), "ample", kind)
        step(model)
    state = find_state(model)
    assert state is not None
    seen = state.loader.weights_seen
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    for seed in range(3):
        model(**batch(seed)).loss.backward()
        optimizer.step()
        assert all(torch.isfinite(t).all() for t in model.state_dict().values())
    assert state.loader.weights_seen is seen


LARGE = {"layers": 1, "hidden": 256, "vocabulary": 32, "attention_dropout": 0.1}
"""Weights of more than two MiB: where they must be read whole, other threads do that while the step runs."""


def test_large_weights_that_are_read_while_the_step_runs() -> None:
    """A write is noticed after the forward has run: it runs again, draws the same numbers, and nobody can tell."""
    with without_watching_writes():
        model = prepare(tiny_lora(**LARGE), config())
    eager = tiny_lora(**LARGE)
    torch.manual_seed(5)
    results = []
    for of in (model, eager):
        torch.manual_seed(5)
        made = [step(of)]
        for write in (_element, _kernel, _row):
            write(of.get_parameter(WEIGHT))
            made += [step(of), (torch.rand(3), {})]
        results.append(made)
    for got, expected in zip(*results, strict=True):
        assert_same(got, expected)
    state = find_state(model)
    assert state is not None and state.loader.weights_seen.hashed_bytes > 2 << 20
    for forwards in (1, 2):
        losses = [model(**batch(seed)).loss for seed in range(forwards)]
        _element(model.get_parameter(WEIGHT))
        for loss in losses:
            with pytest.raises(ExecutionError, match="a frozen weight was changed in place between this step's"):
                loss.backward()
        assert torch.isfinite(model(**batch()).loss)


@both
def test_a_prompt_is_read_with_the_weights_as_they_are(kind: str) -> None:
    """The same for a forward without a backward."""
    prompt = batch()["input_ids"]
    with _watch(kind):
        model, eager = prepare(tiny_lora(**LARGE).eval(), config()), tiny_lora(**LARGE).eval()
        for write in (None, _element, _row, None, _kernel):
            for of in (model, eager):
                if write is not None:
                    write(of.get_parameter(WEIGHT))
            with torch.no_grad():
                expected = eager(prompt, use_cache=True, logits_to_keep=1).logits
            assert torch.equal(prefill(model, prompt).logits, expected)


def test_a_single_element_of_an_adapter_changed_under_a_suspended_step() -> None:
    """The step would be run again from other weights than its forward's: an error, as for a whole adapter."""
    model = _prepared(_model(), "ample")
    first = model(**batch(0)).loss
    model(**batch(1)).loss.backward()
    model.get_parameter(ADAPTER).data[0, 3] += 0.5
    with pytest.raises(ExecutionError, match="a trainable parameter was changed in place"):
        first.backward()


class _Attribute(torch.nn.Module):
    """Reads a tensor that is neither a parameter nor a buffer, and a buffer that is a view with holes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen = torch.nn.Parameter(torch.randn(16, 16), requires_grad=False)
        self.trained = torch.nn.Parameter(torch.randn(16, 16))
        self.scale = torch.randn(16, 16)
        self.register_buffer("offset", torch.randn(16, 40)[:, 3:19], persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh((x @ self.frozen) * self.scale + self.offset) @ self.trained


@pytest.mark.parametrize("planner", ["build", "timed"])
def test_a_write_to_a_tensor_outside_the_arena(planner: str) -> None:
    """Plain attributes and strided buffers are followed too, element by element."""
    model = prepare(_Attribute(), DiscoConfig(memory_budget="16MiB", device="cpu", planner=planner, plan_cache=None))
    eager = _Attribute()
    x = torch.randn(16, 16)
    for of in (model, model, eager):
        of(x).sum().backward()
    for name in ("scale", "offset", "scale", "offset"):
        results = []
        for of in (model, eager):
            of.zero_grad(set_to_none=True)
            getattr(of, name).data[9, 13] += 0.5
            out = of(x)
            out.sum().backward()
            results.append((out.detach(), of.trained.grad))
        assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


@both
def test_a_trained_weight_beside_frozen_ones_in_one_arena(kind: str, tmp_path: Path) -> None:
    """Weights read straight into the arena share pages: an optimizer's writes to one of them are not the others'."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 32}
    LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes)).save_pretrained(tmp_path)
    with _watch(kind):
        model = load_into_arena(tmp_path)
    eager = LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    for of in (model, eager):
        of.train()
        for name, parameter in of.named_parameters():
            parameter.requires_grad_("layernorm" in name)
    prepare(model, config())
    optimizers = [torch.optim.SGD([p for p in of.parameters() if p.requires_grad], lr=0.1) for of in (model, eager)]
    assert_same_step(model, eager)
    state = find_state(model)
    assert state is not None
    seen = state.loader.weights_seen
    for seed in range(3):
        for of, optimizer in zip((model, eager), optimizers, strict=True):
            of(**batch(seed)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_same_step(model, eager, seed)
    assert state.loader.weights_seen is seen, "no frozen weight was loaded again"
    for of in (model, eager):
        _element(of.get_parameter("model.layers.0.mlp.up_proj.weight"))
    assert_same_step(model, eager)
    assert state.loader.weights_seen is not seen


@both
def test_restored_and_prepared_again(kind: str) -> None:
    """The arena is freed and another made, in this process and in a forked one; writes are followed in each."""
    with _watch(kind):
        model, eager = _prepared(_model(), "ample"), _model()
        assert_same_step(model, eager)
        for _ in range(2):
            restore(model)
            _element(model.get_parameter(WEIGHT))
            _element(eager.get_parameter(WEIGHT))
            _prepared(model, "ample")
            assert_same_step(model, eager)
            _element(model.get_parameter(WEIGHT))
            _element(eager.get_parameter(WEIGHT))
            assert_same_step(model, eager)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                _row(model.get_parameter(WEIGHT))
                restore(model)
                _row(eager.get_parameter(WEIGHT))
                _prepared(model, "ample")
                for _ in range(2):
                    assert_same_step(model, eager)
                    _element(model.get_parameter(WEIGHT))
                    _element(eager.get_parameter(WEIGHT))
                assert_same_step(model, eager)
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
    state = find_state(model)
    assert state is not None
    seen = state.loader.weights_seen
    assert_same_step(model, eager)
    assert state.loader.weights_seen is seen, "what the child wrote was its own"
    for of in (model, eager):
        _element(of.get_parameter(WEIGHT))
    assert_same_step(model, eager)


def test_arenas_hold_the_weights_under_watch() -> None:
    """Where the kernel tells, nothing of the frozen weights is read to find writes."""
    if not writes_are_watched():
        pytest.skip("this kernel does not tell which pages are written to")
    model = _prepared(_model(), "ample")
    step(model)
    state = find_state(model)
    assert state is not None
    buffers = sum(b.nbytes for b in model.buffers())
    assert state.loader.weights_seen.hashed_bytes <= buffers
    assert isinstance(state.placement._arenas[0], HostMemory)
