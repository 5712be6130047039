"""Outcomes of comparisons on disk: the next process believes them where nothing that they hang by is different."""

from __future__ import annotations

import errno
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from disco_accel.fuse import kernels
from disco_accel.fuse.call_json import kernel_name
from disco_accel.fuse.kernels import compile_kernels, kernel_of, load_kernels
from disco_accel.graph.taskgraph import OpCall
from disco_accel.measure import fused_bits, kept_outcomes
from disco_accel.measure.fused_bits import FusedRecord, measure_fused
from disco_accel.measure.kept_outcomes import _KeptOutcomes, _Outcome
from tests.support.fused_calls import gated, scaled

CALLS = (scaled(2.0), scaled(3.0), gated("mul"))
"""The last one has functions and 16-bit numbers: it is compared in float32, too."""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory, compiler_of_our_priority: None) -> Iterator[Path]:
    """A folder with two libraries, one for the second of the kernels, all compared once."""
    folder = tmp_path_factory.mktemp("libraries")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "cache_root", lambda: folder)
        patch.setattr(kernels, "_known", {})
        patch.setattr(kernels, "_TOGETHER", {"host": (3, 3)})
        compile_kernels(CALLS, "cpu")
        measured(CALLS)
    yield folder


class Process:
    """As if another process had begun, on a copy of the ``libraries``. ``compared``: draws since then."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.root, self.compared, same = root, 0, fused_bits._Beside.same

        def counted(beside: fused_bits._Beside, kind: str, draw: int) -> bool:
            self.compared += 1
            return same(beside, kind, draw)

        patch.setattr(kernels, "cache_root", lambda: root)
        patch.setattr(fused_bits._Beside, "same", counted)
        self._patch = patch

    def measure(self, *calls: OpCall, threads: int | None = 1) -> list[FusedRecord]:
        """Load the kernels of ``calls`` and measure them, as the first of this process."""
        self._patch.setattr(kernels, "_known", {})
        self.compared = 0
        load_kernels(calls, "cpu")
        return measured(calls, threads)

    def folder(self, call: OpCall) -> Path:
        """Where the library of ``call`` is."""
        names = {path.parent: path.read_text().split() for path in self.root.glob("*/fused.names")}
        return next(folder for folder, found in names.items() if kernel_name(call) in found)

    def outcomes(self, call: OpCall) -> Path:
        (path,) = self.folder(call).glob("outcomes-*.json")
        return path


@pytest.fixture
def process(libraries: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Process:
    root = tmp_path / "copy"
    shutil.copytree(libraries, root)
    return Process(root, monkeypatch)


def measured(calls: tuple[OpCall, ...], threads: int | None = 1) -> list[FusedRecord]:
    return measure_fused([(call, kernel_of(call) or "none") for call in calls], "cpu", threads)


def test_the_next_process_compares_one_draw_of_each_kernel(process: Process) -> None:
    """And finds the same, which it would find with all draws."""
    known = process.measure(*CALLS)
    assert process.compared == len(CALLS)
    for path in process.root.glob("*/outcomes-*.json"):
        path.unlink()
    fresh = process.measure(*CALLS)
    assert process.compared > 10 * len(CALLS)
    assert [(r.refused, r.differs, r.over) for r in known] == [(r.refused, r.differs, r.over) for r in fresh]
    assert all(r.record is not None and r.record.seconds > 0 for r in known)
    process.measure(*CALLS)
    assert process.compared == len(CALLS)


def test_each_fact_is_part_of_the_key(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the device, the processor, libraries, threads, settings, the comparison itself and the engine."""
    call = CALLS[0]
    process.measure(call)
    assert process.compared == 1
    facts = kept_outcomes.arithmetic_of(torch.device("cpu"))
    assert {
        "device device",
        "processor",
        "libraries",
        "libc",
        "torch",
        "vectors",
        "threads",
        "denormals",
    } < facts.keys()
    changes: list[tuple[object, str, object]] = [
        (kept_outcomes, "arithmetic_of", lambda _, name=name: {**facts, "threads": "1", name: "other"})
        for name in facts
    ]
    changes += [
        (kept_outcomes, "sources_key", lambda *_: "other"),
        (kept_outcomes, "load_extension", lambda: Path("other/library.so")),
        (kept_outcomes, "kernels_of", lambda *_: ["CPU: registered by another library"]),
        (fused_bits, "RESULTS", fused_bits.RESULTS - 1),
        (fused_bits, "_MOST_DRAWS", fused_bits._MOST_DRAWS - 1),
    ]
    for module, name, value in changes:
        with monkeypatch.context() as patch:
            patch.setattr(module, name, value)
            assert process.measure(call)[0].record is not None
        assert process.compared > 1, name
    process.measure(call)
    assert process.compared == 1


def test_settings_of_the_process_are_facts(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that change the bits of PyTorch's ops, or the parts in which threads work."""
    call = CALLS[0]
    process.measure(call, threads=2)
    assert process.compared > 1
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    process.measure(call)
    assert process.compared > 1
    monkeypatch.delenv("MKL_CBWR")
    if torch.set_flush_denormal(True):
        try:
            process.measure(call)
        finally:
            torch.set_flush_denormal(False)
        assert process.compared > 1
    process.measure(call)
    assert process.compared == 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-20]),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"\xff" * 300),
        lambda path: path.write_bytes(path.read_bytes().replace(b"true", b"false")),
        lambda path: path.write_bytes(b"1" * (2 << 20)),
        lambda path: path.chmod(0o666),
        lambda path: (path.unlink(), path.mkdir()),
        lambda path: (path.rename(path.with_suffix(".other")), path.symlink_to(path.with_suffix(".other"))),
    ],
    ids=["truncated", "empty", "no text", "another outcome", "large", "others may write", "a folder", "a link"],
)
def test_a_file_that_is_not_as_it_was_written_says_nothing(process: Process, damage: Callable[[Path], object]) -> None:
    """The kernel is compared again, and used."""
    call = CALLS[2]
    process.measure(call)
    damage(process.outcomes(call))
    (found,) = process.measure(call)
    assert process.compared > 1 and found.record is not None


def test_a_flipped_bit_anywhere_is_noticed(process: Process) -> None:
    """Of the file of outcomes, one byte of seven in turn."""
    call = CALLS[0]
    process.measure(call)
    path, kept = process.outcomes(call), _KeptOutcomes(torch.device("cpu"), (1,))
    kernel = kernel_of(call)
    assert isinstance(kernel, int)
    kept.add(kernel, call, torch.bfloat16, _Outcome(True, (0,)))
    kept.save()
    path = next(p for p in path.parent.glob("outcomes-*.json") if p.name == kept._name)
    data = path.read_bytes()
    for place in range(0, len(data) - 1, 7):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        found = _KeptOutcomes(torch.device("cpu"), (1,)).of(kernel, call, torch.bfloat16)
        assert found is None, place
    path.write_bytes(data)
    assert _KeptOutcomes(torch.device("cpu"), (1,)).of(kernel, call, torch.bfloat16) == _Outcome(True, (0,))


def test_the_library_of_another_kernel_in_its_place_is_refused(process: Process) -> None:
    """With a record that fits it: its bytes are not those that were compared."""
    other, one = CALLS[:2]
    assert process.folder(one) != process.folder(other)
    for name in ("fused.so", "fused.sha256"):
        shutil.copy(process.folder(other) / name, process.folder(one) / name)
    (found,) = process.measure(one)
    assert found.record is None and found.differs


def test_a_library_with_a_flipped_bit_is_not_loaded(process: Process) -> None:
    call = CALLS[0]
    library = process.folder(call) / "fused.so"
    data = bytearray(library.read_bytes())
    data[len(data) // 2] ^= 1
    library.write_bytes(bytes(data))
    (found,) = process.measure(call)
    assert kernel_of(call) is None and found.record is None


def test_a_kernel_that_lies_about_its_library_is_refused(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one whose code in memory is damaged: the draw that is left finds it."""
    one, other = CALLS[:2]
    process.measure(one, other)
    right, wrong = kernel_of(one), kernel_of(other)
    assert isinstance(right, int) and isinstance(wrong, int)
    monkeypatch.setitem(kernels._origins, wrong, kernels._origins[right])
    (found,) = measure_fused([(one, wrong)], "cpu", 1)
    assert found.record is None and found.differs


def test_a_refusal_is_kept_too(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a kernel is not run again."""
    call = CALLS[0]
    with monkeypatch.context() as patch:
        patch.setattr(fused_bits, "_same_values", lambda *_: False)
        for path in process.root.glob("*/outcomes-*.json"):
            path.unlink()
        process.measure(call)
    (found,) = process.measure(call)
    assert process.compared == 0 and found.record is None and found.differs


def test_processes_that_write_at_once_leave_a_whole_file(process: Process) -> None:
    """With the outcomes of one of them at least; of one after the other with those of both."""
    call, device = CALLS[0], torch.device("cpu")
    process.measure(call)
    kernel = kernel_of(call)
    assert isinstance(kernel, int)

    def write(half: torch.dtype) -> None:
        for _ in range(20):
            own = _KeptOutcomes(device, (2,))
            own.add(kernel, call, half, _Outcome(True))
            own.save()
            assert any(own._load(*place) for place in [(own_folder, digest)])

    origin = kernels.library_kernel(kernel)
    assert origin is not None
    own_folder, digest = origin.folder, origin.digest
    failed: list[BaseException] = []

    def caught(half: torch.dtype) -> None:
        try:
            write(half)
        except BaseException as error:
            failed.append(error)

    halves = (torch.bfloat16, torch.float16)
    threads = [threading.Thread(target=caught, args=(half,)) for half in halves]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    write(halves[0])
    write(halves[1])
    both = _KeptOutcomes(device, (2,))
    assert all(both.of(kernel, call, half) == _Outcome(True) for half in halves)


def test_where_nothing_can_be_written_kernels_are_compared(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, "read-only file system")

    monkeypatch.setattr(kept_outcomes, "write_atomically", refuse)
    call = CALLS[0]
    for path in process.root.glob("*/outcomes-*.json"):
        path.unlink()
    for _ in range(2):
        (found,) = process.measure(call)
        assert process.compared > 1 and found.record is not None
