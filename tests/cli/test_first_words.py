"""Commands that need PyTorch say something before they load it, which takes five seconds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WITHOUT = "import sys; sys.modules['torch'] = None; from disco_accel.cli.main import main; sys.exit(main())"
RECIPES = {"train": "lora_demo.yaml", "prefill": "prefill_demo.yaml"}


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT, *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=1500, check=False)


@pytest.mark.parametrize("command", RECIPES)
def test_a_wrong_recipe_is_told_without_pytorch(command: str, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("max_lenght: 3\n")
    for path, says in ((tmp_path / "none.yaml", "cannot be read"), (wrong, "max_length")):
        done = run(command, str(path))
        assert done.returncode == 2 and says in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert "usage" in run(command, "--help").stdout


@pytest.mark.parametrize("command", RECIPES)
def test_a_right_one_is_told_what_takes_so_long(command: str) -> None:
    done = run(command, f"configs/{RECIPES[command]}")
    assert "loading PyTorch and transformers" in done.stderr.splitlines()[0], done.stderr
    assert "import of torch halted" in done.stderr
