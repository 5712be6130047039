"""``make outside``: other projects' own tests without us and with us, from their source distributions.

    python -m benchmarks.outside [--only accelerate,scripts,peft,transformers,trl] [--out FILE]

Fetches the source distribution of each installed version from the package index and unpacks it below ``out/outside``,
beside an environment that has, on top of this one, what those tests import, TRL among it. Runs each suite with the
pytest plugin ``disco_accel.testing.pytest_plugin`` off and on, and Accelerate's scripts under ``accelerate launch``
with and without our section. Prints one table. Exit code 1 if a test that passes without us does not pass with us.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import time
import venv
from collections import Counter
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "out" / "outside"
PYTHON = OUT / "venv" / "bin" / "python"
TRL = "1.16.0"
TEST_NEEDS = ("datasets==5.2.0", "diffusers==0.42.1", "parameterized==0.9.0", f"trl=={TRL}")
MINUTES = 30
_ACCELERATE = (
    "accelerator grad_sync optimizer scheduler hooks offload memory_utils state_checkpointing kwargs_handlers "
    "dataclasses compile"
)
_SECTION = {"memory_budget": "64MiB", "device": "cpu", "plan_cache": None, "on_unsupported": "eager"}
_LAUNCH: dict[str, dict[str, Any]] = {
    "one process": {"distributed_type": "NO", "num_processes": 1},
    "two processes": {"distributed_type": "MULTI_CPU", "num_machines": 1, "num_processes": 2},
}


@dataclass(frozen=True)
class Suite:
    """A part of a project's tests. ``modes``: what the plugin routes through plans, see its docstring. ``part``: its
    name where the project has several."""

    project: str
    files: tuple[str, ...]
    modes: tuple[str, ...]
    options: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    part: str = ""

    @property
    def name(self) -> str:
        """As the table has it."""
        return f"{self.project} {self.part}".rstrip()


_TRL_PARTS = {
    "SFTTrainer": "SFT and not cuda",
    "DPOTrainer": "DPO and not cuda",
    "KTOTrainer": "KTO",
    "GRPOTrainer": "GRPO",
    "GRPOTrainer, static cache": "rollouts",
    "RewardTrainer": "Reward",
    "as on CUDA": "cuda",
}
SUITES = (
    Suite("accelerate", tuple(f"tests/test_{name}.py" for name in _ACCELERATE.split()), ("launch", "models")),
    # The joined form: an expression that starts with a dash is no option.
    Suite("peft", ("tests/test_custom_models.py",), ("models",), ("-k-LoraConfig-",)),
    Suite(
        "transformers",
        (str(Path(__file__).with_name("families.py")),),
        ("models",),
        environment={"RUN_TRAINING_TESTS": "1"},
    ),
    *(
        Suite("trl", (str(Path(__file__).with_name("trl.py")),), ("callback",), ("-k", tests), part=part)
        for part, tests in _TRL_PARTS.items()
    ),
)
SCRIPTS = ("test_script", "test_sync", "test_ops", "test_cli")


@dataclass
class Row:
    """One run beside the run without us. ``worse``: what passes without us alone."""

    what: str
    without: str
    passed: str
    worse: list[str]
    trained: str = ""
    steps: str = ""
    eager: str = ""
    seconds: float = 0.0
    reasons: Counter[str] = field(default_factory=Counter)


def announce(text: str) -> None:
    """Say what comes next."""
    print(f"-- {text}", flush=True)


def pip(*arguments: str) -> None:
    """Run pip for the environment of the tests, which sees all that this one has.

    Raises:
        SystemExit: it failed; with its own message.
    """
    own = importlib.util.find_spec("pip") is not None
    command = [sys.executable if own else "python3", "-m", "pip", "--python", str(PYTHON), *arguments, "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"outside: pip {arguments[0]} failed: {done.stderr.strip()}")


def set_up(projects: list[str]) -> None:
    """The environment on top of this one, and the unpacked sources of ``projects``."""
    if not PYTHON.exists():
        announce(f"an environment with {', '.join(TEST_NEEDS)}")
        venv.create(PYTHON.parents[1], with_pip=False)
        packages = PYTHON.parents[1] / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
        line = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
        (packages / "this_project.pth").write_text(line, encoding="utf-8")
    pip("install", "-c", str(ROOT / "constraints.txt"), *TEST_NEEDS)
    for project in projects:
        if source(project).exists():
            continue
        announce(f"the source of {project} {version(project)}")
        archives = str(OUT / "sdist")
        pin = f"{project}=={version(project)}"
        pip("download", "--no-deps", "--no-binary", ":all:", "--no-build-isolation", "-d", archives, pin)
        with tarfile.open(OUT / "sdist" / f"{project}-{version(project)}.tar.gz") as archive:
            archive.extractall(OUT / "source", filter="data")
        if project == "peft":
            # Its tests import their helpers as a package, whose file the source distribution leaves out.
            (source(project) / "tests" / "__init__.py").touch()


def source(project: str) -> Path:
    """Where the source of the installed version of ``project`` is unpacked. TRL's own tests need the hub: ours have no
    folder of their own."""
    if project == "trl":
        return OUT
    return OUT / "source" / f"{project}-{version(project)}"


def write_configs() -> None:
    """An accelerate config for each kind of launch, without and with our section. JSON is YAML."""
    for name, launch in _LAUNCH.items():
        config = {"compute_environment": "LOCAL_MACHINE", "use_cpu": True, **launch}
        config_of(name, False).write_text(json.dumps(config), encoding="utf-8")
        config_of(name, True).write_text(json.dumps({**config, "disco_config": _SECTION}), encoding="utf-8")


def config_of(launch: str, ours: bool) -> Path:
    """The config file of a kind of launch."""
    return OUT / f"{'disco' if ours else 'accelerate'}-{launch.replace(' ', '-')}.yaml"


def environment(project: str, extra: dict[str, str]) -> dict[str, str]:
    """Offline, one thread, our package from this tree; the project's helpers can be imported."""
    path = os.pathsep.join((str(source(project) / "tests"), str(ROOT)))
    ours = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"}
    return {**os.environ, **ours, **extra}


def run_suite(suite: Suite, mode: str) -> tuple[dict[str, Any], float]:
    """What each test came to (see the plugin's ``Ran``), and seconds."""
    announce(f"{suite.name}: {'without us' if mode == 'off' else mode}")
    report, log = (OUT / f"{suite.name.replace(' ', '-')}-{mode}.{kind}" for kind in ("json", "log"))
    report.unlink(missing_ok=True)
    command = [str(PYTHON), "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(source(suite.project))]
    command += ["-p", "no:cacheprovider", "-W", "ignore", "-p", "disco_accel.testing.pytest_plugin"]
    command += [f"--disco={mode}", f"--disco-config={config_of('one process', True)}", f"--disco-report={report}"]
    began = time.monotonic()
    with log.open("w", encoding="utf-8") as stream:
        subprocess.run(
            [*command, *suite.options, *suite.files],
            cwd=source(suite.project),
            env=environment(suite.project, suite.environment),
            stdout=stream,
            stderr=subprocess.STDOUT,
            timeout=60 * MINUTES,
        )
    tests = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}
    if not any(ran["outcome"] == "passed" for ran in tests.values()):
        raise SystemExit(f"outside: {suite.name} did not run to its end, or no test of it passed; see {log}")
    return tests, time.monotonic() - began


def compare(what: str, without: dict[str, Any], ours: dict[str, Any], seconds: float) -> Row:
    """One line of the table. A test that is gone with us is worse."""
    passes = {name for name, ran in without.items() if ran["outcome"] == "passed"}
    still = {name for name, ran in ours.items() if ran["outcome"] == "passed"}
    trained = sum(ran["backwards"] > 0 for ran in ours.values())
    ran = sum(ran["forwards"] > 0 for ran in ours.values())
    return Row(
        what,
        outcomes(without),
        outcomes(ours),
        sorted(passes - still),
        f"{trained} / {ran}",
        f"{sum(ran['forwards'] for ran in ours.values())} / {sum(ran['backwards'] for ran in ours.values())}",
        str(sum(ran["eager"] for ran in ours.values())),
        seconds,
        Counter(reason for ran in ours.values() for reason in ran["fallbacks"]),
    )


def outcomes(tests: dict[str, Any]) -> str:
    """Passed, skipped, failed."""
    counts = Counter(ran["outcome"] for ran in tests.values())
    return " / ".join(str(counts[outcome]) for outcome in ("passed", "skipped", "failed"))


def run_scripts() -> list[Row]:
    """Accelerate's own scripts under its launcher: their exit codes without and with our section."""
    spec = importlib.util.find_spec("accelerate")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent / "test_utils" / "scripts"
    rows = []
    for launch in _LAUNCH:
        found: dict[bool, dict[str, Any]] = {}
        began = time.monotonic()
        for ours in (False, True):
            announce(f"accelerate launch, {launch}: {'with' if ours else 'without'} our section")
            option = ["--config" if ours else "--config_file", str(config_of(launch, ours))]
            command = [str(PYTHON), "-m", "accelerate.commands.accelerate_cli", "launch", *option]
            found[ours] = {name: launched([*command, str(folder / f"{name}.py")], name) for name in SCRIPTS}
        row = compare(f"accelerate launch, {launch}", found[False], found[True], time.monotonic() - began)
        row.trained = row.steps = row.eager = ""
        rows.append(row)
    return rows


def launched(command: list[str], name: str) -> dict[str, Any]:
    """What a script came to, in the plugin's terms."""
    with (OUT / f"{name}.log").open("a", encoding="utf-8") as log:
        env = environment("accelerate", {})
        done = subprocess.run(command, env=env, stdout=log, stderr=subprocess.STDOUT, timeout=60 * MINUTES)
    outcome = "passed" if done.returncode == 0 else "failed"
    return {"outcome": outcome, "forwards": 0, "backwards": 0, "eager": 0, "fallbacks": []}


def render(rows: list[Row]) -> str:
    """The table in Markdown, then what got worse and why forwards ran in eager mode."""
    versions = ", ".join(f"{p} {version(p)}" for p in ("accelerate", "peft", "transformers", "torch")) + f", trl {TRL}"
    lines = [
        f"# make outside, {time.strftime('%Y-%m-%d')}; {versions}; host device",
        "",
        "| suite | without us: passed / skipped / failed | with us | worse | tests that trained / ran forwards by plan "
        "| planned forwards / backwards | forwards in eager mode | s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = (row.what, row.without, row.passed, len(row.worse), row.trained, row.steps, row.eager)
        lines.append(f"| {' | '.join(map(str, cells))} | {row.seconds:.0f} |")
    for row in rows:
        lines += [f"\n{row.what}: worse: {name}" for name in row.worse]
        if row.reasons:
            lines += [f"\n{row.what}: why forwards ran in eager mode:\n"]
            lines += [f"- {times} x {reason}" for reason, times in row.reasons.most_common()]
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    """See the module's docstring."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m benchmarks.outside", description=__doc__.split("\n")[0])
    names = [*dict.fromkeys(suite.project for suite in SUITES), "scripts"]
    parser.add_argument("--only", default=",".join(names), help="comma-separated: " + ", ".join(names))
    parser.add_argument("--out", type=Path, help="also write the table here")
    args = parser.parse_args(argv)
    wanted = args.only.split(",")
    if unknown := set(wanted) - set(names):
        parser.error(f"--only: {sorted(unknown)[0]!r} is none of {', '.join(names)}")
    OUT.mkdir(parents=True, exist_ok=True)
    set_up(sorted({"accelerate" if name == "scripts" else name for name in wanted}))
    write_configs()
    rows = []
    for suite in SUITES:
        if suite.project in wanted:
            without, _ = run_suite(suite, "off")
            for mode in suite.modes:
                rows.append(compare(f"{suite.name}, {mode}", without, *run_suite(suite, mode)))
    if "scripts" in wanted:
        rows += run_scripts()
    table = render(rows)
    print(table)
    if args.out is not None:
        args.out.write_text(table, encoding="utf-8")
    return 1 if any(row.worse for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
