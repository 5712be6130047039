"""A checkpoint that several processes load is read once, and never taken for what it was before a write."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from disco_accel import prepare
from disco_accel.integrate.hf import checkpoint as loader
from disco_accel.integrate.hf.checkpoint import load_into_arena
from disco_accel.native import file_keys
from disco_accel.native.file_arena import FileArena
from disco_accel.native.file_keys import key_of_file
from disco_accel.native.rendezvous import Rendezvous
from disco_accel.step.run.session import find_state
from tests.integrate.twins import SMALL, config
from tests.support.models import tiny_lora


@pytest.fixture
def meeting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    # A test's files are younger than what is remembered.
    monkeypatch.setattr(file_keys, "_COARSE", -60.0)
    monkeypatch.setattr(file_keys, "_shows_writes", lambda _: True)
    return tmp_path / "disco_accel" / "weights"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    model: Any = tiny_lora(**SMALL)
    model.unload().save_pretrained(tmp_path / "base", safe_serialization=True)
    return tmp_path / "base"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was read from files: weights, and whole files for their keys."""
    seen: list[str] = []

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            seen.append(name)
            return function(*args)

        return call

    monkeypatch.setattr(loader, "read_into", counted("weight", loader.read_into))
    monkeypatch.setattr(file_keys, "_read", counted("file", file_keys._read))
    return seen


def arena_of(model: torch.nn.Module) -> FileArena:
    arena = model.__dict__["_disco_host_memory"]
    assert isinstance(arena, FileArena)
    return arena


def test_the_second_process_reads_nothing(meeting: Path, checkpoint: Path, reads: list[str]) -> None:
    """It maps what the first has read, which ``prepare`` uses as it is; in another dtype it is another copy."""
    plain = load_into_arena(checkpoint)
    first = load_into_arena(checkpoint, shared=meeting)
    assert reads.count("file") == 1 and reads.count("weight") > 5
    reads.clear()
    second = load_into_arena(checkpoint, shared=meeting)
    assert not reads
    assert os.fstat(arena_of(first).file).st_ino == os.fstat(arena_of(second).file).st_ino
    for model in (first, second):
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    half = load_into_arena(checkpoint, dtype="bfloat16", shared=meeting)
    assert os.fstat(arena_of(half).file).st_ino != os.fstat(arena_of(first).file).st_ino
    assert reads.count("file") == 0 and "weight" in reads
    for parameter in second.parameters():
        parameter.requires_grad_(False)
    second.scale = torch.nn.Parameter(torch.ones(1))
    prepared = prepare(second, config(share_weights=True))
    state = find_state(prepared)
    assert state is not None and state.placement.shared_arenas() == [arena_of(second)]


def test_an_arena_of_its_own_is_given_up_for_a_shared_one(meeting: Path, checkpoint: Path) -> None:
    models = [load_into_arena(checkpoint), load_into_arena(checkpoint)]
    files = []
    for model in models:
        values = {n: p.detach().clone() for n, p in model.named_parameters()}
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        model.scale = torch.nn.Parameter(torch.ones(1))
        prepare(model, config(share_weights=True))
        state = find_state(model)
        assert state is not None
        (arena,) = state.placement.shared_arenas()
        assert "_disco_host_memory" not in model.__dict__ and state.placement._arenas == [arena]
        assert all(torch.equal(model.get_parameter(name), value) for name, value in values.items())
        files.append(os.fstat(arena.file).st_ino)
    assert files[0] == files[1]


def test_a_changed_file_is_another_checkpoint(meeting: Path, checkpoint: Path, reads: list[str]) -> None:
    """One bit of a weight, the size kept and the time put back: what is loaded is what the file has now."""
    first = load_into_arena(checkpoint, shared=meeting)
    file = checkpoint / "model.safetensors"
    times, content = file.stat(), bytearray(file.read_bytes())
    content[-1] ^= 1
    with file.open("r+b") as stream:
        stream.write(content)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    reads.clear()
    second = load_into_arena(checkpoint, shared=meeting)
    assert "file" in reads and "weight" in reads
    plain = load_into_arena(checkpoint)
    assert all(torch.equal(a, b) for a, b in zip(second.parameters(), plain.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(second.parameters(), first.parameters(), strict=True))


def test_a_key_is_not_remembered_where_somebody_may_write(
    meeting: Path, checkpoint: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is open for writing or mapped so, that was just written, or whose file system's times say little."""
    file, place = checkpoint / "model.safetensors", Rendezvous(meeting.parent.parent / "disco_accel" / "weights")
    key = key_of_file(file, place, reads.append)
    key_of_file(file, place, reads.append)
    assert reads == ["file"], "remembered"
    with file.open("r+b"):
        assert key_of_file(file, place, reads.append) == key
    assert len(reads) == 2
    mapped = torch.from_file(str(file), shared=True, size=file.stat().st_size, dtype=torch.uint8)
    key_of_file(file, place, reads.append)
    assert len(reads) == 3
    mapped[-1] ^= 1
    assert key_of_file(file, place, reads.append) != key
    mapped[-1] ^= 1
    del mapped
    gc.collect()
    with monkeypatch.context() as patched:
        patched.setattr(file_keys, "_COARSE", 3600.0)
        file.touch()
        reads.clear()
        for _ in range(2):
            assert key_of_file(file, place, reads.append) == key
        assert len(reads) == 2, "too young"
        patched.setattr(file_keys, "_shows_writes", lambda _: False)
        key_of_file(file, place, reads.append)
        assert len(reads) == 3


def test_a_damaged_memory_is_forgotten(meeting: Path, checkpoint: Path, reads: list[str]) -> None:
    """Any flipped bit of what is remembered: the file is read again, for the same key."""
    file, place = checkpoint / "model.safetensors", Rendezvous(meeting)
    key = key_of_file(file, place, reads.append)
    (note,) = meeting.glob("files-*.json")
    good, chosen = note.read_bytes(), random.Random(0)
    for at in range(len(good)):
        damaged = bytearray(good)
        damaged[at] ^= 1 << chosen.randrange(8)
        note.write_bytes(damaged)
        reads.clear()
        assert key_of_file(file, place, reads.append) == key
        assert reads == ["file"]
