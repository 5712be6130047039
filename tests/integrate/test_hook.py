"""What importing torch sets off: patches arrive in any import order, where they are wanted, and never break torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from disco_accel.config import settings
from disco_accel.errors import ConfigError
from disco_accel.integrate.accelerate import patches
from disco_accel.integrate.launch import exit_status, import_hook, launcher, run_script


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], str]]:
    """Writes a throw-away module and returns its name; everything is forgotten afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    finders = list(sys.meta_path)

    def write(name: str, source: str) -> str:
        (tmp_path / f"{name}.py").write_text(source)
        return name

    yield write
    for name in set(sys.modules) - before:
        del sys.modules[name]
    sys.meta_path[:] = finders


def mark(module: ModuleType) -> None:
    module.patched = getattr(module, "patched", 0) + 1  # type: ignore[attr-defined]


def test_a_module_imported_later_is_patched_once(package: Callable[[str, str], str]) -> None:
    name = package("later_module", "class Thing: pass\n")
    waiting = import_hook.AfterImport()
    waiting.add(name, "Thing", mark)
    module = __import__(name)
    assert module.patched == 1
    assert waiting not in sys.meta_path


def test_a_module_imported_before_is_patched_at_once(package: Callable[[str, str], str]) -> None:
    module = __import__(package("earlier_module", "class Thing: pass\n"))
    waiting = import_hook.AfterImport()
    waiting.add("earlier_module", "Thing", mark)
    assert module.patched == 1
    assert waiting not in sys.meta_path


def test_a_module_under_way_is_patched_once_its_class_exists(package: Callable[[str, str], str]) -> None:
    """As when a script's first import is accelerate, which imports torch, which calls us, before Accelerator exists."""
    waiting = import_hook.AfterImport()
    fake_torch = ModuleType("fake_torch_that_autoloads")
    fake_torch.start = lambda: waiting.add("half_module", "Thing", mark)  # type: ignore[attr-defined]
    sys.modules[fake_torch.__name__] = fake_torch
    package("half_rest", "")
    package(
        "half_module",
        "import fake_torch_that_autoloads as t\nt.start()\nclass Thing: pass\nimport half_rest\nseen = patched\n",
    )
    module = __import__("half_module")
    assert module.seen == module.patched == 1
    assert waiting not in sys.meta_path


def test_a_missing_module_stays_missing(package: Callable[[str, str], str]) -> None:
    waiting = import_hook.AfterImport()
    waiting.add("module_that_is_nowhere", "Thing", mark)
    with pytest.raises(ModuleNotFoundError, match="module_that_is_nowhere"):
        __import__("module_that_is_nowhere")


@pytest.mark.parametrize(
    ("argv", "ours"),
    [
        (["accelerate", "launch", "--config", "disco.yaml", "t.py"], True),
        (["/bin/accelerate", "launch", "--config=disco.yaml", "t.py"], True),
        (["accelerate", "launch", "--config_file", "disco.yaml", "t.py"], True),
        (["accelerate-launch", "--config-file", "disco.yaml", "t.py"], True),
        (["accelerate", "launch", "--config", "section.yaml", "t.py"], True),
        (["accelerate", "launch", "--config", "one_line.json", "t.py"], True),
        (["accelerate", "launch", "--config_file", "flow.yaml", "t.py"], True),
        (["accelerate", "launch", "--config_file", "plain.json", "t.py"], False),
        (["accelerate", "launch", "--config", "missing.yaml", "t.py"], True),
        (["accelerate", "launch", "--config_file", "plain.yaml", "-m", "disco_accel.run", "t.py"], True),
        (["accelerate", "launch", "--config_file", "plain.yaml", "t.py"], False),
        (["accelerate", "launch", "--config_file", "missing.yaml", "t.py"], False),
        (["accelerate", "launch", "--config", "plain.yaml", "t.py"], False),
        (["accelerate", "launch", "t.py"], False),
        (["accelerate", "env", "--config_file", "disco.yaml"], False),
        (["train.py", "--config", "disco.yaml"], False),
        ([], False),
    ],
)
def test_only_launches_that_name_our_section_are_touched(
    argv: list[str], ours: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plain.yaml").write_text("distributed_type: 'NO'\n# disco_config comes later\n")
    Path("disco.yaml").write_text("distributed_type: 'NO'\ndisco_config:\n  memory_budget: 1GiB\n")
    Path("section.yaml").write_text("memory_budget: 1GiB\n")
    accelerates = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "NO"}
    Path("plain.json").write_text(json.dumps(accelerates))
    Path("one_line.json").write_text(json.dumps(accelerates | {"disco_config": {"memory_budget": "1GiB"}}))
    Path("flow.yaml").write_text("{distributed_type: 'NO', disco_config: {memory_budget: 1GiB}}\n")
    assert import_hook.is_our_launch(argv) is ours


def test_python_m_is_known_by_its_original_arguments(tmp_path: Path) -> None:
    file = tmp_path / "disco.yaml"
    file.write_text("disco_config: {}\n")
    argv = ["-m", "--config", str(file), "t.py"]
    assert import_hook.is_our_launch(argv, ["python", "-m", "accelerate.commands.launch", *argv[1:]])
    assert not import_hook.is_our_launch(argv, ["python", "-m", "somebody.else", *argv[1:]])


def test_a_fault_of_ours_does_not_break_import_torch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> bool:
        raise RuntimeError("boom")

    monkeypatch.setattr(settings, "autoload_wanted", broken)
    import_hook.autoload()
    assert "not loaded with torch: RuntimeError: boom" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variables", "loaded"),
    [
        ({}, False),
        ({"DISCO_CONFIG_FILE": "/nowhere/disco.yaml"}, True),
        ({"DISCO_CONFIG_FILE": "/nowhere/disco.yaml", "DISCO_AUTOLOAD": "0"}, False),
        ({"DISCO_CONFIG_FILE": "/nowhere/disco.yaml", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, False),
    ],
)
def test_import_torch_loads_the_patches_only_for_a_launched_process(variables: dict[str, str], loaded: bool) -> None:
    program = "import torch, sys; print('disco_accel.integrate.accelerate.patches' in sys.modules)"
    clean = {k: v for k, v in os.environ.items() if not k.startswith("DISCO_")}
    done = subprocess.run(
        [sys.executable, "-c", program], env=clean | variables, capture_output=True, text=True, timeout=1500
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, str(loaded), "")


class FakeAccelerator:
    """Stands for accelerate's class, whose state and two methods are all that the patch touches."""

    state = SimpleNamespace(distributed_type="NO")

    def prepare(self, *args: Any) -> Any:
        return args

    def prepare_model(self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        return model


class FakeTrainer:
    def _move_model_to_device(self, model: Any, device: Any) -> None:
        model.moved = str(device)


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.nn.Module, settings.DiscoConfig]]:
    """Collects what the patches hand to ``prepare.prepare``, under a config file as a launcher leaves it."""
    from disco_accel.integrate import prepare

    file = tmp_path / "disco.yaml"
    file.write_text("disco_config:\n  memory_budget: 1GiB\n")
    monkeypatch.setenv(settings.CONFIG_FILE_VARIABLE, str(file))
    calls: list[tuple[torch.nn.Module, settings.DiscoConfig]] = []
    monkeypatch.setattr(prepare, "prepare", lambda model, settings: calls.append((model, settings)))
    return calls


def adapter_model() -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[0].requires_grad_(False)
    return model


def patched_accelerator() -> FakeAccelerator:
    cls = type("Accelerator", (FakeAccelerator,), dict(vars(FakeAccelerator)))
    module: Any = SimpleNamespace(Accelerator=cls)
    patches.patch_accelerator(module)
    once = cls.prepare
    patches.patch_accelerator(module)
    assert cls.prepare is once, "patching twice would prepare twice"
    return cls()  # type: ignore[no-any-return]


def test_prepare_gets_every_adapter_model_and_the_file_with_environment(
    prepared: list[tuple[torch.nn.Module, settings.DiscoConfig]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISCO_LOOKAHEAD", "5")
    model = adapter_model()
    assert patched_accelerator().prepare("loader", model) == ("loader", model)
    assert prepared == [(model, settings.DiscoConfig(memory_budget="1GiB", lookahead=5))]


def test_prepare_model_is_a_way_in_but_evaluation_models_are_left_alone(
    prepared: list[tuple[torch.nn.Module, settings.DiscoConfig]],
) -> None:
    accelerator, model = patched_accelerator(), adapter_model()
    accelerator.prepare_model(model, evaluation_mode=True)
    assert prepared == []
    accelerator.prepare_model(model)
    assert [m for m, _ in prepared] == [model]


def test_a_model_without_frozen_or_without_trainable_parameters_runs_as_it_is_and_says_so(
    prepared: list[tuple[torch.nn.Module, settings.DiscoConfig]],
) -> None:
    with pytest.warns(UserWarning, match="all parameters of Linear are trainable"):
        patched_accelerator().prepare(torch.nn.Linear(2, 2))
    with pytest.warns(UserWarning, match="all parameters of Linear are frozen"):
        patched_accelerator().prepare(torch.nn.Linear(2, 2).requires_grad_(False))
    assert prepared == []


def test_enabled_false_switches_everything_off(
    prepared: list[tuple[torch.nn.Module, settings.DiscoConfig]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISCO_ENABLED", "false")
    patched_accelerator().prepare(adapter_model())
    assert prepared == []


def test_trainer_prepares_before_it_moves_a_model_to_another_device(
    prepared: list[tuple[torch.nn.Module, settings.DiscoConfig]],
) -> None:
    cls: Any = type("Trainer", (FakeTrainer,), dict(vars(FakeTrainer)))
    module: Any = SimpleNamespace(Trainer=cls)
    patches.patch_trainer(module)
    model: Any = adapter_model()
    cls()._move_model_to_device(model, torch.device("cpu"))
    assert (prepared, model.moved) == ([], "cpu")
    cls()._move_model_to_device(model, torch.device("cuda", 0))
    assert ([m for m, _ in prepared], model.moved) == ([model], "cuda:0")


def test_the_names_that_we_patch_exist_with_the_signatures_we_expect() -> None:
    import inspect

    from accelerate import Accelerator
    from accelerate.commands import config as commands_config
    from accelerate.commands.utils import CustomArgumentParser
    from transformers import Trainer

    assert list(inspect.signature(Accelerator.prepare).parameters)[:2] == ["self", "args"]
    expected = ["self", "model", "device_placement", "evaluation_mode"]
    assert list(inspect.signature(Accelerator.prepare_model).parameters) == expected
    assert list(inspect.signature(Trainer._move_model_to_device).parameters) == ["self", "model", "device"]
    assert list(inspect.signature(commands_config.load_config_from_file).parameters) == ["config_file"]
    assert callable(CustomArgumentParser.add_argument)


def test_user_errors_end_with_status_2_and_one_line() -> None:
    program = (
        "from disco_accel.integrate.launch import exit_status; exit_status.install()\n"
        "from disco_accel.errors import BudgetTooSmall; raise BudgetTooSmall(3, 2)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=1500)
    assert done.returncode == 2
    assert done.stderr.startswith("disco-accel: BudgetTooSmall: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "status", "quiet"), [("CalledProcessError(130, 'x')", 130, True), ("OSError", 1, False)]
)
def test_a_child_that_spoke_is_not_repeated_and_other_errors_keep_their_traceback(
    error: str, status: int, quiet: bool
) -> None:
    program = (
        "from disco_accel.integrate.launch import exit_status; exit_status.install()\n"
        f"from subprocess import CalledProcessError; raise {error}"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=1500)
    assert done.returncode == status
    assert ("Traceback" in done.stderr) is not quiet


def test_disco_accel_launch_runs_the_script_through_our_module(tmp_path: Path) -> None:
    file = tmp_path / "disco.yaml"
    file.write_text("disco_config: {}\n")
    args = launcher._parse(["--config", str(file), "--cpu", "train.py", "--config", "theirs.yaml"])
    assert (args.module, args.training_script, args.config_file) == (True, "disco_accel.run", str(file))
    assert args.training_script_args == ["train.py", "--config", "theirs.yaml"]
    args = launcher._parse(["--config", str(file), "-m", "package.train", "-x"])
    assert args.training_script_args == ["-m", "package.train", "-x"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["train.py"], "--config is missing"),
        (["--config", "none.yaml", "train.py"], "none.yaml: cannot be read"),
        (["--config", "plain.yaml", "train.py"], "no disco_config section"),
        (["--config", "disco.yaml", "--no_python", "train.sh"], "--no_python"),
    ],
)
def test_disco_accel_launch_refuses_in_one_line(
    argv: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plain.yaml").write_text("distributed_type: 'NO'\n")
    Path("disco.yaml").write_text("disco_config: {}\n")
    assert launcher.main(argv) == exit_status.BAD_INPUT
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_accelerates_own_complaint_names_the_users_file(tmp_path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    file = tmp_path / "disco.yaml"
    with pytest.raises(ConfigError, match="unknown keys") as caught:
        launcher._load_rest(load_config_from_file, str(file), {"distributed_type": "NO", "num_proceses": 2})
    assert str(file) in str(caught.value) and "num_proceses" in str(caught.value)


def test_run_refuses_a_missing_script_and_a_missing_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setenv(settings.CONFIG_FILE_VARIABLE, "")
    with pytest.raises(ConfigError, match="names no config file"):
        run_script.main(["train.py"])
    file = tmp_path / "disco.yaml"
    file.write_text("disco_config: {}\n")
    with pytest.raises(ConfigError, match=r"script 'none.py' does not exist"):
        run_script.main(["--config", str(file), "none.py"])
