"""The wheel puts one package into site-packages, with all that it needs inside; a checkout works without installing."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = ("disco_accel", "recipes", "runtime_ext")
IGNORED = shutil.ignore_patterns("__pycache__", "*.pyc")
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


def run(command: list[str], folder: Path, **environment: str) -> str:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=folder, env=clean | environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's content, built without a network."""
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for name in SHIPPED:
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=IGNORED)
    run([sys.executable, "-c", BUILD, str(folder)], tree)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def test_a_wheel_puts_the_package_and_its_entry_point_into_site_packages(unpacked: Path) -> None:
    names = {path.name for path in unpacked.iterdir() if path.suffix != ".dist-info"}
    assert names == {"disco_accel", "disco_accel_autoload"}


def test_a_wheel_has_every_file_of_package_recipes_and_engine(unpacked: Path) -> None:
    wanted = set()
    for name in SHIPPED:
        inside = Path() if name == "disco_accel" else Path("disco_accel")
        # Links to folders are not followed: what they lead to is listed by its own name.
        for folder, _, files in os.walk(ROOT / name):
            if "__pycache__" not in folder:
                wanted |= {(inside / Path(folder).relative_to(ROOT) / file).as_posix() for file in files}
    # The entry point has a name of its own beside the package.
    wanted = {name.replace("disco_accel/autoload/", "disco_accel_autoload/") for name in wanted}
    there = {path.relative_to(unpacked).as_posix() for path in unpacked.rglob("*") if path.is_file()}
    assert wanted and wanted <= there, sorted(wanted - there)


def test_an_unpacked_wheel_is_whole(unpacked: Path, tmp_path: Path) -> None:
    """Recipes load, and the engine's sources are those of the checkout: the library built from either serves both."""
    program = (
        "import json, sys\n"
        f"sys.path.insert(0, {str(unpacked)!r})\n"
        "from disco_accel.cli import main\n"
        "from disco_accel.native import extension, plain_library\n"
        "from disco_accel.recipes import lora, lora_training\n"
        "files = [str(p) for p in (main.__file__, lora.__file__, lora_training.__file__, plain_library.ROOT)]\n"
        "status = main.main(['bench', 'engine'])\n"
        "print(json.dumps([files, extension._key(extension.sources(), ()), status]))\n"
    )
    printed = run([sys.executable, "-I", "-c", program], tmp_path)
    files, key, status = json.loads(printed.splitlines()[-1])
    assert all(Path(file).is_relative_to(unpacked) for file in files), files
    assert status == 2, "benchmarks are not in the wheel"
    from disco_accel.native import extension

    assert key == extension._key(extension.sources(), ())


def test_benchmarks_start_in_a_checkout_whatever_is_on_the_path(tmp_path: Path) -> None:
    """An editable install finds the package alone: neither its neighbours nor the working folder are on the path."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "disco_accel").symlink_to(ROOT / "disco_accel")
    program = "import sys; from disco_accel.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "bench", "scale", "--help"]
    assert "--vertices" in run(command, tmp_path, PYTHONPATH=str(tmp_path / "site"), PYTHONSAFEPATH="1")


def test_nothing_imports_what_a_wheel_lacks() -> None:
    """``recipes`` can be imported in a checkout alone, ``disco_accel.recipes`` everywhere."""
    wrong = []
    for path in [p for name in ("disco_accel", "recipes") for p in (ROOT / name).rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            wrong += [
                f"{path}: {n}" for n in names if n.split(".")[0] in ("recipes", "runtime_ext", "benchmarks", "tests")
            ]
    assert not wrong
