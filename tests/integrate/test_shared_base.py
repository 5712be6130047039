"""``share_weights``: one copy of frozen weights, the bits of weights of one's own, and writes that stay at home."""

from __future__ import annotations

import copy
import errno
import gc
import os
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from disco_accel import DiscoConfig, prefill, prepare, restore
from disco_accel.native import file_arena
from disco_accel.native.file_arena import FileArena
from disco_accel.step.placement import model_placement as placements
from disco_accel.step.placement.distributed import FrozenSharing
from disco_accel.step.placement.model_placement import Placement
from disco_accel.step.placement.streamed_eager import StreamedEager
from disco_accel.step.run.session import find_state
from tests.integrate.twins import SMALL, assert_same, assert_same_step, batch, config, step
from tests.support.models import tiny_lora

WEIGHT = "base_model.model.model.layers.0.mlp.up_proj.base_layer.weight"
NORM = "base_model.model.model.norm.weight"


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "disco_accel" / "weights"


def sharing(model: torch.nn.Module, **keys: Any) -> torch.nn.Module:
    return prepare(model, config(**keys, share_weights=True))


def arena_of(model: torch.nn.Module) -> FileArena:
    state = find_state(model)
    assert state is not None
    (arena,) = state.placement.shared_arenas()
    return arena


def copy_of(model: torch.nn.Module) -> int:
    return os.fstat(arena_of(model).file).st_ino


def frozen(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p for p in model.parameters() if not p.requires_grad]


def test_two_trainings_hold_one_copy_and_reach_the_bits_of_their_own(caplog: pytest.LogCaptureFixture) -> None:
    """Three steps of each with updates, in turn; one then writes to the base: the other, and a third that comes later,
    do not see it, and a line says so once."""
    caplog.set_level("INFO", "disco_accel")
    first, second, plain = sharing(tiny_lora(**SMALL)), sharing(tiny_lora(**SMALL)), tiny_lora(**SMALL)
    assert copy_of(first) == copy_of(second)
    assert caplog.text.count("shared: loaded for all processes of this user") == 1
    assert caplog.text.count("shared: loaded before") == 1
    models = (first, second, plain)
    optimizers = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2) for m in models]
    for seed in range(3):
        expected = None
        for model, optimizer in zip(models, optimizers, strict=True):
            loss = model(**batch(seed)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            assert expected in (None, loss.item())
            expected = loss.item()
    for seed in range(2):
        for model in (second, plain):
            model.get_parameter(WEIGHT).data[seed] *= 2
        assert_same_step(second, plain)
    assert caplog.text.count(f"this process has written to {WEIGHT}, which it shares") == 1
    before = tiny_lora(**SMALL)
    assert torch.equal(first.get_parameter(WEIGHT), before.get_parameter(WEIGHT))
    assert not any(arena_of(first).differs(frozen(first)))
    third = sharing(tiny_lora(**SMALL))
    assert copy_of(third) == copy_of(first)
    assert_same(step(third), step(before))


def test_restored_weights_are_the_models_own(own_folder: Path) -> None:
    """Values kept, nothing open any more, the folder cleared by whoever shares next; prepared again it shares again."""
    model = sharing(tiny_lora(**SMALL))
    model.get_parameter(NORM).data.mul_(3)
    file, values = arena_of(model).file, [p.detach().clone() for p in model.parameters()]
    restore(model)
    gc.collect()
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        os.fstat(file)
    assert all(map(torch.equal, model.parameters(), values))
    sharing(model)
    assert len(list(own_folder.glob("*.lock"))) == 1
    eager = tiny_lora(**SMALL)
    eager.get_parameter(NORM).data.mul_(3)
    assert_same_step(model, eager)


def test_what_comes_later_is_followed(caplog: pytest.LogCaptureFixture) -> None:
    """A state dict that is loaded, a weight that is replaced or unfrozen and trained; a copy's memory is its own."""
    model, eager = sharing(tiny_lora(**SMALL)), tiny_lora(**SMALL)
    witness = sharing(tiny_lora(**SMALL))
    assert_same_step(model, eager)
    other = {n: t.clone() for n, t in tiny_lora(**SMALL, seed=3).state_dict().items()}
    for of in (model, eager):
        of.load_state_dict(other)
    assert_same_step(model, eager)
    for of in (model, eager):
        of.get_parameter(WEIGHT).data = other[WEIGHT] * 2
    assert_same_step(model, eager)
    copied = copy.deepcopy(model)
    copied.get_parameter(WEIGHT).data.zero_()
    for of in (model, eager):
        of.get_parameter(NORM).requires_grad_(True)
        optimizer = torch.optim.SGD([of.get_parameter(NORM)], lr=0.1)
        of(**batch()).loss.backward()
        optimizer.step()
    assert_same_step(model, eager)
    assert_same_step(witness, tiny_lora(**SMALL))


def test_trained_weights_on_the_host_stay_the_processes_own() -> None:
    model, eager = sharing(tiny_lora(**SMALL), optimizer="host", planner="timed"), tiny_lora(**SMALL)
    arena = arena_of(model)
    assert all(arena.holds(p) is not p.requires_grad for p in model.parameters())
    for of in (model, eager):
        optimizer = torch.optim.SGD([p for p in of.parameters() if p.requires_grad], lr=0.1)
        for seed in range(2):
            of(**batch(seed)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same_step(model, eager)


def test_a_prompt_is_read_with_shared_weights() -> None:
    model, eager = tiny_lora(**SMALL).eval(), tiny_lora(**SMALL).eval()
    prepare(model, config(share_weights=True))
    assert arena_of(model).used > 0
    prompt = batch()["input_ids"]
    with torch.no_grad():
        expected = eager(prompt, use_cache=True, logits_to_keep=1).logits
    assert torch.equal(prefill(model, prompt).logits[:, -1:], expected)


@pytest.mark.parametrize("fault", ["no files in memory", "no memory", "a folder that cannot be made"])
def test_where_nothing_can_be_shared_training_goes_on(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As without the key, and told once why."""

    def refused(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if fault == "a folder that cannot be made":
        monkeypatch.setenv("XDG_RUNTIME_DIR", "/proc/nowhere")
    else:
        monkeypatch.setattr(os, "memfd_create" if fault == "no files in memory" else "posix_fallocate", refused)
    model = sharing(tiny_lora(**SMALL))
    state = find_state(model)
    assert state is not None and not state.placement.shared_arenas()
    assert caplog.text.count("share_weights: this process keeps frozen weights of its own: ") == 1
    if fault == "no memory":
        assert_same_step(model, tiny_lora(**SMALL))


def test_a_device_with_memory_of_its_own_never_loads_stale_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its copies read the pages that were page-locked, for reading alone: a weight that this process writes to moves
    to memory of its own before the next load, a visit in eager mode reads what was written; the others stay."""
    locked: list[bool] = []

    def pin(tensor: torch.Tensor, device: Any = None, *, read_only: bool = False) -> object:
        locked.append(read_only)
        return object()

    monkeypatch.setattr(file_arena, "pin", pin)
    monkeypatch.setattr("disco_accel.native.host_memory.pin", pin)
    monkeypatch.setattr(placements, "backend_of", lambda _: types.SimpleNamespace(separate_memory=True))
    monkeypatch.setattr(Placement, "_pinned", types.SimpleNamespace(gather=lambda *_: None), raising=False)
    model, said = tiny_lora(**SMALL), list[str]()
    placement = Placement(model, torch.device("cpu"), sharing=FrozenSharing(tmp_path / "run" / "weights", said.append))
    placement.gather()
    assert locked == [True]
    (arena,) = placement.shared_arenas()
    weight = model.get_parameter(WEIGHT)
    weight.data[1, 2] += 1
    values = weight.detach().clone()
    visitor = placement.visitor()(weight)
    assert visitor.data_ptr() != weight.data_ptr() and torch.equal(visitor, values)
    assert placement.visitor()(model.get_parameter(NORM)) is model.get_parameter(NORM)
    placement.leave_written(model)
    assert not arena.holds(weight) and placement.holds(weight) and torch.equal(weight, values)
    assert all(arena.holds(p) for p in frozen(model) if p is not weight)
    placement.gather()
    assert locked == [True, False], "its new memory is page-locked as any other"
    assert len(said) == 1


def test_a_model_whose_shared_weights_visit_a_device_is_copied_and_saved(tmp_path: Path) -> None:
    """Copy and file have weights of their own, with the values of the model's."""
    model = tiny_lora(**SMALL)
    placement = Placement(model, torch.device("cpu"), sharing=FrozenSharing(tmp_path / "run" / "weights", print))
    placement.gather()
    streamed = StreamedEager(model, placement.visitor())
    copied = copy.deepcopy(model)
    torch.save(model, tmp_path / "whole.pt")
    streamed.remove(model)
    assert torch.equal(copied(**batch()).loss, model(**batch()).loss)
    assert not any(map(placement.holds, copied.parameters()))


def test_the_key_is_off_unless_asked_for() -> None:
    assert DiscoConfig().share_weights is False
    with pytest.raises(Exception, match="share_weights: 1 does not work; use true or false"):
        DiscoConfig(share_weights=1)  # type: ignore[arg-type]
