"""Checkpoint files that one thread's load reads without mapping them: safetensors' tensors, and nothing for others."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import modeling_utils

from disco_accel.errors import ConfigError
from disco_accel.integrate.hf.safetensors_file import files_read_unmapped, stored_tensors

TENSORS = {
    "rows": torch.arange(24, dtype=torch.bfloat16).reshape(4, 6),
    "packed": torch.arange(-60, 60, dtype=torch.int8).reshape(2, 3, 20),
    "scale": torch.tensor(0.5),
    "float8": torch.ones(3, 2).to(torch.float8_e4m3fn),
    "none": torch.zeros(0, 3),
}
KEYS: tuple[Any, ...] = (0, -1, slice(1, 2), slice(None, -1), (slice(None), slice(1, 3)), (1, 2), (..., 0))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt", "rows": "said"})
    return tmp_path / "model.safetensors"


def bits(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tuple(tensor.shape), tensor.contiguous().view(-1).view(torch.uint8).tolist()


def test_every_tensor_and_slice_is_safetensors_own_and_no_file_is_mapped(file: Path) -> None:
    with files_read_unmapped(stored_tensors(file)), modeling_utils.safe_open(str(file), framework="pt") as ours:
        slices = {name: ours.get_slice(name) for name in ours.keys()}  # noqa: SIM118 - no dict
        read = {name: (part.get_shape(), part.get_dtype(), bits(part[...])) for name, part in slices.items()}
        sliced = [bits(slices[name][key]) for name in ("rows", "packed") for key in KEYS]
        assert str(file) not in Path("/proc/self/maps").read_text()
        assert ours.metadata() == {"format": "pt", "rows": "said"}
        assert bits(ours.get_tensor("packed")) == bits(TENSORS["packed"])
        with pytest.raises(IndexError):
            slices["rows"][4]
        with pytest.raises(Exception, match="other"):
            ours.get_slice("other")
    with safe_open(file, framework="pt") as theirs:
        parts = {name: theirs.get_slice(name) for name in theirs.keys()}  # noqa: SIM118 - no dict
        assert list(slices) == list(parts)
        assert read == {name: (p.get_shape(), p.get_dtype(), bits(p[...])) for name, p in parts.items()}
        assert sliced == [bits(parts[name][key]) for name in ("rows", "packed") for key in KEYS]


def test_a_slice_holds_no_more_than_its_own_bytes(file: Path) -> None:
    rows = next(tensor for tensor in stored_tensors(file) if tensor.name == "rows")
    assert rows[1:2].untyped_storage().nbytes() == 12


def test_other_files_frameworks_and_threads_get_safetensors_own(file: Path, tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "other.safetensors")
    (tmp_path / "linked.safetensors").symlink_to(file)
    opened: dict[str, Any] = {}

    def open_as(name: str, at: Path, framework: str = "pt", **options: Any) -> None:
        opened[name] = modeling_utils.safe_open(at, framework, **options)

    with files_read_unmapped(stored_tensors(file)):
        open_as("file", file, device="cpu")
        open_as("link", tmp_path / "linked.safetensors")
        open_as("other", tmp_path / "other.safetensors")
        open_as("framework", file, "numpy")
        thread = threading.Thread(target=open_as, args=("thread", file))
        thread.start()
        thread.join()
    open_as("after", file)
    own = {name for name, pointer in opened.items() if type(pointer) is safe_open}
    assert own == opened.keys() - {"file", "link"} and modeling_utils.safe_open is safe_open


def test_after_an_error_and_without_the_name_all_is_as_before(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = stored_tensors(file)
    whole = file.read_bytes()
    with pytest.raises(ConfigError, match=r"rows: the file ends \d+ bytes too early"), files_read_unmapped(stored):
        rows = modeling_utils.safe_open(file, framework="pt").get_slice("rows")
        file.write_bytes(whole[: stored[0].offset])
        rows[...]
    assert modeling_utils.safe_open is safe_open
    monkeypatch.delattr(modeling_utils, "safe_open")
    with files_read_unmapped(stored):
        assert not hasattr(modeling_utils, "safe_open")
