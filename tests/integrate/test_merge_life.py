"""A merge that ends early leaves nothing that looks whole, and the same command goes on where it stopped."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from disco_accel.errors import ConfigError
from disco_accel.integrate.hf.merge import merge_adapter
from disco_accel.integrate.hf.merge_output import merge_folder
from tests.integrate.merge_cases import FAMILIES, differing_files, make_case, merge_with_peft
from tests.support import forkserver

SHARD = "40KB"
KILLED = """
import os, signal, sys
from disco_accel.integrate.hf import merge, merge_output

owner, name, number, folder = getattr(merge_output, sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
original, calls = getattr(owner, name), []

def called(*args, **kwargs):
    calls.append(name)
    if len(calls) == number:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*args, **kwargs)

setattr(owner, name, called)
merge.merge_adapter(folder + "/adapter", folder + "/ours", max_shard_size="40KB")
"""
LIMITED = """
import resource, sys
from disco_accel.cli.main import main

resource.setrlimit(resource.RLIMIT_FSIZE, (35000, 35000))
folder = sys.argv[1]
sys.exit(main(["merge", folder + "/adapter", "-o", folder + "/ours", "--max-shard-size", "40KB"]))
"""
MOMENTS = {
    "before the first tensor": ("_ShardWriter", "put_pieces", 1, 0),
    "in the middle of a shard": ("_ShardWriter", "put", 5, 2),
    "before a shard is recorded": ("_MergeFolder", "keep", 3, 2),
    "before the folder gets its name": ("_MergeFolder", "publish", 1, None),
    "after it": ("_MergeFolder", "remove", 1, None),
}
"""Where a process is killed: class, method and how often it was called; how many shards are kept, None: all."""


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("merge")
    make_case(folder, *FAMILIES["llama"], torch.bfloat16, SHARD)
    merge_with_peft(folder, SHARD)
    return folder


@pytest.fixture
def folder(case: Path, tmp_path: Path) -> Path:
    """A copy of the case, where a test may change files."""
    for name in ("base", "adapter", "peft"):
        shutil.copytree(case / name, tmp_path / name)
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(config.read_text().replace(str(case), str(tmp_path)))
    return tmp_path


def merge(folder: Path, **options: Any) -> Any:
    return merge_adapter(folder / "adapter", folder / "ours", max_shard_size=SHARD, **options)


def kill(folder: Path, moment: str) -> None:
    words = [str(word) for word in MOMENTS[moment][:3]]
    done = subprocess.run(forkserver.program(KILLED, folder, *words, str(folder)), capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_merge_goes_on_where_it_stopped(folder: Path, moment: str) -> None:
    kill(folder, moment)
    published = moment == "after it"
    assert (folder / "ours").exists() == published
    assert (folder / ".ours.merging").is_dir()
    report = merge(folder)
    kept = MOMENTS[moment][3]
    assert report.kept == (report.shards if kept is None else kept)
    assert differing_files(folder / "ours", folder / "peft") == []
    assert not (folder / ".ours.merging").exists()


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-7] ^= 4
    file.write_bytes(content)


@pytest.mark.parametrize("damage", ["a flipped bit", "cut short", "another header", "lost"])
def test_a_finished_shard_that_was_damaged_is_written_again(folder: Path, damage: str) -> None:
    kill(folder, "before a shard is recorded")
    first, *_ = sorted((folder / ".ours.merging" / "model").glob("*.safetensors"))
    if damage == "a flipped bit":
        _flip(first)
    elif damage == "cut short":
        os.truncate(first, first.stat().st_size - 1)
    elif damage == "another header":
        save_file(load_file(first), first, {"format": "np"})
    else:
        first.unlink()
    assert merge(folder).kept == 1
    assert differing_files(folder / "ours", folder / "peft") == []


@pytest.mark.parametrize("change", ["base", "adapter", "config", "option"])
def test_changed_inputs_start_anew(folder: Path, change: str) -> None:
    """A change that keeps a file's size and time of change, too."""
    kill(folder, "before a shard is recorded")
    if change == "option":
        merge_with_peft_again(folder, "60KB")
        report = merge_adapter(folder / "adapter", folder / "ours", max_shard_size="60KB")
    else:
        pattern = "adapter_config.json" if change == "config" else "*.safetensors"
        file = sorted((folder / ("base" if change == "base" else "adapter")).glob(pattern))[0]
        before = file.stat()
        if change == "config":
            file.write_text(file.read_text().replace('"lora_alpha": 8', '"lora_alpha": 7'))
        else:
            _flip(file)
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
        merge_with_peft_again(folder, SHARD)
        report = merge(folder)
    assert report.kept == 0
    assert differing_files(folder / "ours", folder / "peft") == []


def merge_with_peft_again(folder: Path, shard: str) -> None:
    shutil.rmtree(folder / "peft")
    merge_with_peft(folder, shard)


def test_two_merges_into_one_folder_the_second_is_refused(folder: Path) -> None:
    with merge_folder(folder / "ours", "a key"), pytest.raises(ConfigError, match="another merge writes"):
        merge(folder)
    assert merge(folder).kept == 0
    assert differing_files(folder / "ours", folder / "peft") == []


def test_a_folder_with_files_is_refused_and_an_empty_one_taken(folder: Path) -> None:
    ours = folder / "ours"
    ours.mkdir()
    (ours / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="ours exists and is not an empty folder"):
        merge(folder)
    assert [path.name for path in ours.iterdir()] == ["notes.txt"]
    assert not (folder / ".ours.merging").exists()
    (ours / "notes.txt").unlink()
    merge(folder)
    assert differing_files(ours, folder / "peft") == []


def test_files_put_there_meanwhile_are_not_touched(folder: Path) -> None:
    kill(folder, "before the folder gets its name")
    (folder / "ours").mkdir()
    (folder / "ours" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="exists and is not an empty folder"):
        merge(folder)
    shutil.rmtree(folder / "ours")
    assert merge(folder).kept == 5


def test_a_place_where_nothing_can_be_written_is_named(folder: Path) -> None:
    (folder / "file").write_text("")
    with pytest.raises(ConfigError, match=r"-o: .* cannot be written: .*; name another folder"):
        merge_adapter(folder / "adapter", folder / "file" / "ours")
    with pytest.raises(ConfigError, match=r"-o: .* cannot be written: .*; name another folder"):
        merge_adapter(folder / "adapter", "/proc/self/ours")


def test_a_disk_without_room_is_told_and_whole_shards_are_kept(folder: Path) -> None:
    """Files of that process may not grow beyond the size of the first shard."""
    done = subprocess.run(forkserver.program(LIMITED, folder, str(folder)), capture_output=True, text=True)
    assert done.returncode == 2
    assert "model-00002-of-00005.safetensors: File too large; make room there, and run the same" in done.stderr
    assert not (folder / "ours").exists()
    assert merge(folder).kept == 1
    assert differing_files(folder / "ours", folder / "peft") == []


def test_the_command_prints_what_it_wrote(folder: Path) -> None:
    def told(*more: str) -> subprocess.CompletedProcess[str]:
        words = ["merge", str(folder / "adapter"), "-o", str(folder / "ours"), "--max-shard-size", SHARD, *more]
        program = str(forkserver.start() / "disco-accel")
        return subprocess.run([program, *words], capture_output=True, text=True)

    refused = told("--memory", "8KiB")
    assert refused.returncode == 2 and "give --memory 1MiB" in refused.stderr
    done = told("--memory", "1MiB")
    report = json.loads(done.stdout.splitlines()[-1])
    assert (report["shards"], report["kept"], report["limit"]) == (5, 0, 1 << 20)
    assert 0 < report["peak"] <= 1 << 20
    assert "disco: merge: " in done.stderr and "5 of 5" in done.stderr
    assert differing_files(folder / "ours", folder / "peft") == []
    shutil.rmtree(folder / "ours")
    assert "merge:" not in told("--quiet").stderr
