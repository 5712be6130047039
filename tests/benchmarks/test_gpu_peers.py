"""Peers come from a folder of wheels, seen by their run alone."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from benchmarks.gpu import peers as gpu_peers
from benchmarks.gpu.wheels import unpacked
from benchmarks.prefill import peers as prefill_peers
from benchmarks.step import suite as step


def test_a_folder_without_wheels_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"WHEELS: .* has no .whl files"):
        gpu_peers.main(["--wheels", str(tmp_path)])


def test_wheels_are_unpacked_into_the_folder_without_their_needs(tmp_path: Path) -> None:
    wheels, folder = tmp_path / "wheels", tmp_path / "site"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "planted-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("planted.py", "VALUE = 1\n")
        about = "Metadata-Version: 2.1\nName: planted\nVersion: 1.0\nRequires-Dist: no-such-package-anywhere\n"
        wheel.writestr("planted-1.0.dist-info/METADATA", about)
        wheel.writestr("planted-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("planted-1.0.dist-info/RECORD", "planted.py,,\n")
    before = os.environ.get("PYTHONPATH")
    with unpacked(wheels, folder):
        seen = subprocess.run([sys.executable, "-c", "import planted; print(planted.VALUE)"], capture_output=True)
    assert (folder / "planted.py").read_text() == "VALUE = 1\n"
    assert seen.stdout == b"1\n" and os.environ.get("PYTHONPATH") == before


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_steps_and_prompts_share_the_time(device: str, tmp_path: Path) -> None:
    """Both command lines are ones that their benchmarks take."""
    runs = gpu_peers.commands(device, "in-memory,zero3", 100.0, tmp_path)
    parsed = [
        parser().parse_args(run[3:]) for parser, run in zip((step.parser, prefill_peers.parser), runs, strict=True)
    ]
    assert sum(args.seconds for args in parsed) == 100.0
    assert [args.device for args in parsed] == [device] * 2
    assert [args.output.name for args in parsed] == ["step_peers.json", "prefill_peers.json"]
    assert "zero-inference" in parsed[1].engines and parsed[0].engines == ["in-memory", "zero3"]
