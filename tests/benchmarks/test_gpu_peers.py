"""Peers come from a folder of wheels, seen by their run alone."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from benchmarks import gpu_peers


def test_a_folder_without_wheels_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_peers.main(["--wheels", str(tmp_path)]) == 2
    assert "WHEELS" in capsys.readouterr().out


def test_wheels_are_unpacked_into_the_folder_without_their_needs(tmp_path: Path) -> None:
    wheels, folder = tmp_path / "wheels", tmp_path / "site"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "planted-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("planted.py", "VALUE = 1\n")
        about = "Metadata-Version: 2.1\nName: planted\nVersion: 1.0\nRequires-Dist: no-such-package-anywhere\n"
        wheel.writestr("planted-1.0.dist-info/METADATA", about)
        wheel.writestr("planted-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("planted-1.0.dist-info/RECORD", "planted.py,,\n")
    gpu_peers.install(wheels, folder)
    assert (folder / "planted.py").read_text() == "VALUE = 1\n"
