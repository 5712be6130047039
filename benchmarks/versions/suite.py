"""``make versions``: the tests that lean on Hugging Face's libraries and DeepSpeed, on old and new versions of those.

    python -m benchmarks.versions out/versions [ROW ...]

For each row of ``ROWS`` a virtual environment below the folder: pip resolves this package with the row's versions,
which fails if a pin refuses them, and the tests run there. One table at the end. An environment is removed after its
row unless ``--keep`` is given; one with a PyTorch of its own takes 6 GB where the index has CUDA builds alone.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("expecttest", "hypothesis", "pytest", "pytest-instafail", "pytest-timeout", "pytest-xdist")
"""What runs the tests, in the versions of ``constraints.txt`` in every row."""
_FOR_BUILDS = ("ninja", "numpy", "packaging", "psutil", "py-cpuinfo", "setuptools>=77")
"""Not pinned: torch 2.11 refuses the setuptools of ``constraints.txt``; one before 77 builds no wheels by itself."""
LIBRARIES = ("torch", "transformers", "peft", "accelerate", "deepspeed")

TESTS = {
    "tests/integrate/test_families.py": "LoRA steps of ten families: checkpointing, dropout, padding, caches",
    "tests/integrate/test_checkpoint_functions.py": "reentrant checkpointing, wrapped functions, accumulation",
    "tests/integrate/test_prefill.py": "prefill and generate: caches, chunks, beams, sampling",
    "tests/integrate/test_callback.py": "Trainer with the callback",
    "tests/integrate/test_trainer_life.py": "saving, loading, resuming, merging",
    "tests/integrate/test_accelerate_plugin.py": "Accelerator with the plugin",
    "tests/integrate/test_plugin.py": "pytest plugin and hooks of accelerate",
    "tests/integrate/test_deepspeed_launch.py": "DeepSpeed's engine and config",
    "tests/integrate/test_entry_points.py": "scripts launched unchanged",
    "tests/recipes/test_budget.py": "the recipe: training, resuming, refusals",
}
"""Each of these, since it reaches into the libraries where they differ between versions, and what it covers."""


@dataclass(frozen=True)
class Row:
    """Versions to install. An empty one is the newest; ``torch`` may be ``OWN``, which is not installed but shared."""

    name: str
    transformers: str = ""
    peft: str = ""
    accelerate: str = ""
    deepspeed: str = ""
    torch: str = "own"

    def requirements(self) -> list[str]:
        """What pip is asked for, besides this package."""
        pinned = {library: getattr(self, library) for library in LIBRARIES}
        return [f"{name}=={pin}" if pin else name for name, pin in pinned.items() if pin != OWN]


OWN = "own"
ROWS = (
    Row("oldest", "5.6.0", "0.18.1", "1.11.0", "0.18.6", "2.11.0"),
    Row("LLaMA-Factory's", "5.6.0", "0.18.1", "1.11.0", "0.18.6"),
    Row("axolotl's", "5.16.1", "0.20.0", "1.13.0", "0.18.9"),
    Row("ms-swift's", "5.19.0", "0.20.0", "1.15.0", "0.19.8"),
    Row("newest", torch=""),
)


@dataclass(frozen=True)
class Outcome:
    """How many tests ended in which way."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0

    @property
    def well(self) -> bool:
        """Whether tests ran and none failed."""
        return self.passed > 0 and self.failed == 0


def outcome(output: str) -> Outcome:
    """From the last line of pytest's output that counts tests; errors are failures."""
    counts: dict[str, int] = {}
    for line in output.splitlines():
        found = re.findall(r"(\d+) (passed|failed|skipped|errors?)\b", line)
        if found and re.search(r" in [\d.]+s", line):
            counts = {word.removesuffix("s"): int(number) for number, word in found}
    return Outcome(counts.get("passed", 0), counts.get("failed", 0) + counts.get("error", 0), counts.get("skipped", 0))


def pinned_tools(constraints: str) -> list[str]:
    """Requirements of ``TOOLS``, with the versions that ``constraints`` gives."""
    lines = dict(line.split("==", 1) for line in constraints.splitlines() if "==" in line and line[0] != "#")
    return [f"{tool}=={lines[tool]}" for tool in TOOLS]


def emulated_requirements(name: str) -> list[str]:
    """What pip is asked for in an environment of ``make emulated``: PyTorch first, then the other libraries.

    ``name``: a row, or a version of PyTorch, beside which the others are the pinned ones.
    """
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {library: line.split("==")[1] for line in lines for library in LIBRARIES if line.startswith(f"{library}==")}
    row = next((row for row in ROWS if row.name == name), Row(name, **{**pins, "torch": name}))
    return (replace(row, torch=pins["torch"]) if row.torch == OWN else row).requirements()


def environment(row: Row, folder: Path) -> Path:
    """The Python of a new virtual environment in ``folder`` with this package, editable, and the row's versions.

    Raises:
        subprocess.CalledProcessError: pip finds no versions that fit together.
    """
    subprocess.run([sys._base_executable, "-m", "venv", str(folder)], check=True)  # type: ignore[attr-defined]
    python = folder / "bin" / "python"
    if row.torch == OWN:
        # Behind the environment's own packages: what is installed there is found first.
        site = folder / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
        (site / "zz_shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    # DeepSpeed's build imports torch, which would load this package's entry point before it is installed there.
    quiet = {**os.environ, "DS_BUILD_OPS": "0", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    tools = pinned_tools((ROOT / "constraints.txt").read_text(encoding="utf-8"))
    first = [] if row.torch == OWN else [f"torch=={row.torch}" if row.torch else "torch"]
    subprocess.run([*pip, *tools, *_FOR_BUILDS, *first], check=True, env=quiet)
    libraries = [each for each in row.requirements() if each not in first]
    # Their commands belong into this environment also where the shared one has the same version.
    subprocess.run([*pip, "--no-build-isolation", "--no-deps", "--ignore-installed", *libraries], check=True, env=quiet)
    wanted = ["--no-build-isolation", "-e", f"{ROOT}[deepspeed,bench]", *row.requirements()]
    subprocess.run([*pip, *wanted], check=True, env=quiet)
    return python


def installed(python: Path) -> dict[str, str]:
    """Version of each of ``LIBRARIES`` in that environment."""
    code = "import sys\nfrom importlib.metadata import version\nprint(*(version(n) for n in sys.argv[1:]))"
    done = subprocess.run([str(python), "-c", code, *LIBRARIES], check=True, capture_output=True, text=True)
    return dict(zip(LIBRARIES, done.stdout.split(), strict=True))


def tested(python: Path, tests: Sequence[str]) -> tuple[Outcome, str]:
    """The outcome of ``tests``, and what pytest printed."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    # Compiled before the first test, whose time would not be enough for it on a slow machine.
    subprocess.run([str(python), "-m", "disco_accel.native.extension"], cwd=ROOT, env=variables, check=True)
    command = [str(python), "-m", "pytest", "-p", "no:cacheprovider", "-n", "2", "--dist", "loadfile", "--tb", "short"]
    done = subprocess.run([*command, *tests], cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    return outcome(done.stdout), done.stdout + done.stderr


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table; 1 if a test fails or a row's versions cannot be installed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, help="for the environments and pytest's output")
    parser.add_argument("rows", nargs="*", help=f"default: all of {', '.join(row.name for row in ROWS)}")
    parser.add_argument("--tests", nargs="*", default=list(TESTS), help="default: the files of TESTS")
    parser.add_argument("--keep", action="store_true", help="leave the environments")
    parser.add_argument("--requirements", metavar="ROW", help="print what an environment of make emulated installs")
    options = parser.parse_args(argv)
    if options.requirements:
        print("\n".join(emulated_requirements(options.requirements)))
        return 0
    if options.folder is None:
        parser.error("a folder for the environments is missing")
    unknown = set(options.rows) - {row.name for row in ROWS}
    if unknown:
        parser.error(f"no row {', '.join(sorted(unknown))}")
    options.folder.mkdir(parents=True, exist_ok=True)
    lines, well = [], True
    for row in ROWS:
        if options.rows and row.name not in options.rows:
            continue
        folder = options.folder / row.name.replace(" ", "-").replace("'", "")
        shutil.rmtree(folder, ignore_errors=True)
        try:
            python = environment(row, folder)
            versions = installed(python)
            result, output = tested(python, options.tests)
        except subprocess.CalledProcessError as error:
            print(f"{row.name}: {error}", file=sys.stderr)
            lines.append(f"| {row.name} | {' | '.join(row.requirements())} | not installed |")
            well = False
            continue
        folder.with_suffix(".log").write_text(output, encoding="utf-8")
        counts = f"{result.passed} | {result.failed} | {result.skipped}"
        lines.append(f"| {row.name} | {' | '.join(versions[name] for name in LIBRARIES)} | {counts} |")
        print(lines[-1], flush=True)
        well &= result.well
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
    print(f"\n| versions | {' | '.join(LIBRARIES)} | passed | failed | skipped |\n|{' --- |' * (len(LIBRARIES) + 4)}")
    print("\n".join(lines))
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
