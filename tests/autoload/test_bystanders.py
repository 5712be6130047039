"""Programs that have nothing to do with this package, and users whose home cannot be used."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest

from disco_accel.config import settings
from disco_accel.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """An environment in which this package is installed, with the entry points of its pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = tmp_path / "site" / f"disco_accel-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: disco-accel\nVersion: {project['version']}\n")
    # As an install maps it: a checkout alone has no module of this name.
    (info.parent / "disco_accel_autoload").symlink_to(ROOT / "disco_accel" / "autoload")
    points = project["entry-points"]["torch.backends"]
    lines = "".join(f"{name} = {value}\n" for name, value in points.items())
    (info / "entry_points.txt").write_text(f"[torch.backends]\n{lines}")
    clean = {k: v for k, v in os.environ.items() if not k.startswith("DISCO_")}
    return clean | {"PYTHONPATH": f"{info.parent}{os.pathsep}{ROOT}"}


def run(script: Path, text: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(text)
    return subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, cwd=script.parent
    )


@pytest.mark.parametrize("beside", ["module", "package", "the script itself"])
def test_a_users_own_disco_accel_does_not_break_import_torch(
    beside: str, installed: dict[str, str], tmp_path: Path
) -> None:
    """Whatever has our name beside a script, torch imports, and what is there is not run on our behalf."""
    here = tmp_path / "mine"
    here.mkdir()
    own = "raise SystemExit('run on behalf of torch')\n"
    if beside == "module":
        (here / "disco_accel.py").write_text(own)
    elif beside == "package":
        (here / "disco_accel").mkdir()
        (here / "disco_accel" / "__init__.py").write_text(own)
    script = here / ("disco_accel.py" if beside == "the script itself" else "train.py")
    done = run(script, "import torch; print(torch.ones(2).sum().item())\n", installed)
    assert (done.returncode, done.stdout, done.stderr) == (0, "2.0\n", "")


def test_the_entry_point_reaches_the_hook(installed: dict[str, str], tmp_path: Path) -> None:
    """With nothing in the way, a launched process gets its patches as before."""
    text = "import sys, torch\nprint('disco_accel.integrate.accelerate.patches' in sys.modules)\n"
    for variables, loaded in (({}, "False\n"), ({"DISCO_CONFIG_FILE": "/nowhere/disco.yaml"}, "True\n")):
        done = run(tmp_path / "script.py", text, installed | variables)
        assert (done.stdout, done.stderr) == (loaded, "")


STEP = """
import os, sys
import torch
from accelerate import Accelerator
model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
model[0].requires_grad_(False)
accelerator = Accelerator(cpu=True)
for _ in range(2):
    model = accelerator.prepare(model)
accelerator.backward(model(torch.ones(1, 2)).sum())
print("trained", "_disco_state" in vars(model))
"""


@pytest.mark.parametrize(("variable", "launcher"), [("DISCO_CONFIG_FILE", None), ("DISCO_DS_CONFIG", str(1 << 23))])
def test_an_inherited_config_that_is_gone_ends_no_other_program(
    variable: str, launcher: str | None, installed: dict[str, str], tmp_path: Path
) -> None:
    """It trains as it would without us, with one line of warning."""
    left = {variable: str(tmp_path / "gone.yaml")} | ({} if launcher is None else {"DISCO_LAUNCHER": launcher})
    done = run(tmp_path / "script.py", STEP, installed | left)
    assert (done.returncode, done.stdout) == (0, "trained False\n"), done.stderr
    assert [line for line in done.stderr.splitlines() if "gone.yaml" in line] == done.stderr.splitlines()
    assert done.stderr.count("\n") == 1


def test_a_launched_process_whose_config_is_gone_says_so(installed: dict[str, str], tmp_path: Path) -> None:
    """To train without the budget that the launcher was given would be worse than an error."""
    launched = {"DISCO_CONFIG_FILE": str(tmp_path / "gone.yaml"), "DISCO_LAUNCHER": str(os.getpid())}
    done = run(tmp_path / "script.py", STEP, installed | launched)
    assert done.returncode == 2 and "ConfigError" in done.stderr and "gone.yaml" in done.stderr
    done = subprocess.run(
        [sys.executable, "-m", "disco_accel.run", "script.py"],
        env=installed | {"DISCO_CONFIG_FILE": str(tmp_path / "gone.yaml")},
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 2 and "gone.yaml" in done.stderr and "Traceback" not in done.stderr


def test_doors_note_who_launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """This process and its children count as launched by it."""
    for name in (settings.CONFIG_FILE_VARIABLE, settings.DS_CONFIG_VARIABLE, settings.LAUNCHER_VARIABLE):
        monkeypatch.setenv(name, "")
    settings.set_launch_config_file(tmp_path / "gone.yaml")
    assert os.environ[settings.LAUNCHER_VARIABLE] == str(os.getpid()) and settings.inherited_file_gone() is None
    monkeypatch.setenv(settings.LAUNCHER_VARIABLE, str(os.getppid()))
    assert settings.inherited_file_gone() is None
    monkeypatch.setenv(settings.LAUNCHER_VARIABLE, "0")
    assert settings.inherited_file_gone() == str(tmp_path / "gone.yaml")


HOMELESS = """
import os, pwd, sys
def missing(uid): raise KeyError(uid)
pwd.getpwuid = missing
from disco_accel.integrate.launch import exit_status
exit_status.install()
if sys.argv[1] == "plan_cache":
    from disco_accel import DiscoConfig
    DiscoConfig()
else:
    from disco_accel.native.plain_library import load_plain
    load_plain("disco_place", "plan/place.cpp")
"""


@pytest.mark.parametrize(
    ("home", "wants", "says"),
    [
        (None, "plan_cache", "plan_cache"),
        (None, "library", "set HOME, or TORCH_EXTENSIONS_DIR"),
        ("a file", "library", "TORCH_EXTENSIONS_DIR"),
        ("/proc/home", "library", "TORCH_EXTENSIONS_DIR"),
    ],
)
def test_a_home_that_cannot_be_used_is_one_line(
    home: str | None, wants: str, says: str, installed: dict[str, str], tmp_path: Path
) -> None:
    """Unset, a file, or read-only: the message names what to set, and there is no traceback."""
    environment = {k: v for k, v in installed.items() if k not in ("HOME", "TORCH_EXTENSIONS_DIR")}
    if home is not None:
        (tmp_path / "a file").touch()
        environment["HOME"] = str(tmp_path / home)
    command = [sys.executable, "-c", HOMELESS, wants]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and says in done.stderr, done.stderr


BOMB = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{name}: &{name} [{', '.join(['*' + before] * 9)}]\n" for before, name in pairwise("abcdefghijklm")
)
MERGED = "{0}: &{0} {{<<: [{1}]}}\n"


@pytest.mark.parametrize(
    "text",
    [
        BOMB + "disco_config: {memory_budget: *m}\n",
        BOMB + "disco_config: *m\n",
        "disco_config: &a\n  memory_budget: *a\n",
        "a: &a {x: 1}\n" + "".join(MERGED.format(b, ", ".join(["*" + a] * 9)) for a, b in pairwise("abcdefghi")),
    ],
)
def test_aliases_that_expand_without_end_are_refused(text: str, tmp_path: Path) -> None:
    """Half a kilobyte of YAML that stands for 10^12 values; each reader of the project reads through this one."""
    file = tmp_path / "bomb.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match="aliases"):
        settings.DiscoConfig.from_yaml(file)
    with pytest.raises(ConfigError, match="aliases"):
        settings.split_yaml(file)


def test_a_few_aliases_are_read(tmp_path: Path) -> None:
    """What YAML files of people use."""
    file = tmp_path / "few.yaml"
    file.write_text("x: &budget 1GiB\ndisco_config: &ours\n  memory_budget: *budget\ny: {<<: *ours, z: 1}\n")
    assert settings.DiscoConfig.from_yaml(file).memory_budget == 1 << 30
