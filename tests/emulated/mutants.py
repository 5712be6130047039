"""``make emulated-mutants``: faults planted in the CUDA path, one at a time in a copy of the sources, must fail tests.

    python -m tests.emulated.mutants [--only NAME ...]

A mutant that does not compile, or whose text is no longer in the sources, is an error, and so is a test that fails
without any mutant. The table says which test caught what.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.emulated.build import HERE, ROOT, Libraries, build
from tests.emulated.modes import BUILD_ENGINE, PYTEST
from tests.emulated.mutant_list import MUTANTS, Mutant
from tests.emulated.run import run

_OUT = ROOT / "out" / "emulated"
_TREE = _OUT / "mutants" / "tree"
"""The same for every mutant: an object is kept for the folder that its source lies in."""
_FAILURES, _TOLD = ("FAILED ", "ERROR "), "E   "
"""How pytest's summary names a test that failed, or whose fixture found a complaint; and what it says of either."""
_TIMEOUT_S = 300
_FAILED_TESTS = 1
"""pytest's exit status."""


class MutantError(Exception):
    """A mutant that says nothing about the tests."""


@dataclass(frozen=True, slots=True)
class Catch:
    """The first test that failed, and what it said."""

    mutant: str
    test: str
    said: str


def copy_sources() -> None:
    """The files that git knows, as they are now."""
    shutil.rmtree(_TREE, ignore_errors=True)
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout
    for name in names.decode().rstrip("\0").split("\0"):
        source, target = ROOT / name, _TREE / name
        if source.is_file() or source.is_symlink():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)


def plant(mutant: Mutant) -> None:
    """Replace the mutant's texts. Raises MutantError unless each is there exactly once."""
    for file, old, new in ((mutant.file, mutant.old, mutant.new), *mutant.also):
        path = _TREE / file
        text = path.read_text()
        if text.count(old) != 1:
            raise MutantError(f"{mutant.name}: {file} has {text.count(old)} of {old!r}, not one")
        path.write_text(text.replace(old, new))


def restore(mutant: Mutant) -> None:
    """The sources as they are in the checkout."""
    for file in (mutant.file, *(file for file, _, _ in mutant.also)):
        (_TREE / file).write_bytes((ROOT / file).read_bytes())


def run_tests(mutant: Mutant, libraries: Libraries, log: Path) -> tuple[int, str]:
    """pytest's exit status for the mutant's tests in the copy, and its output."""
    settings = {
        **mutant.settings,
        "CXX": str(HERE / "kept_compiler.py"),
        "EMULATED_OBJECTS": str(_OUT / "objects"),
        "PYTHONPATH": str(_TREE),
        "PYTHONFAULTHANDLER": "1",
    }
    with log.open("w") as output:
        if run([sys.executable, "-c", BUILD_ENGINE], libraries, settings, output, _TREE) != 0:
            raise MutantError(f"{mutant.name}: the engine does not build; see {log}")
        words = [sys.executable, *PYTEST, "-x", "-rfE", "--show-capture=no", f"--timeout={_TIMEOUT_S}", *mutant.tests]
        status = run(words, libraries, settings, output, _TREE)
    return status, log.read_text(errors="replace")


def caught(mutant: Mutant, libraries: Libraries) -> Catch:
    """What caught the mutant. Raises MutantError if nothing did, or if it cannot be tried."""
    try:
        plant(mutant)
        log = _OUT / "mutants" / (mutant.name.replace(" ", "-") + ".log")
        status, text = run_tests(mutant, libraries, log)
    finally:
        restore(mutant)
    if status == 0:
        raise MutantError(f"{mutant.name}: NOT CAUGHT; see {log}")
    lines = text.splitlines()
    test = next((line.partition(" ")[2] for line in lines if line.startswith(_FAILURES) and "::" in line), "")
    said = next((line.removeprefix(_TOLD).strip() for line in lines if line.startswith(_TOLD)), "")
    if status != _FAILED_TESTS or not test:
        test, said = "the process ended", f"exit status {status}: {next((x for x in lines if 'atal' in x), '')}"
    return Catch(mutant.name, test.split(" - ")[0].rpartition("::")[2], said)


def main(argv: list[str] | None = None) -> int:
    """Command line; exit 0 when every mutant was caught."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=[m.name for m in MUTANTS], help="these mutants alone")
    args = parser.parse_args(argv)
    chosen = [m for m in MUTANTS if not args.only or m.name in args.only]
    libraries = build()
    copy_sources()
    begin, catches, errors = time.monotonic(), [], []
    for settings in {tuple(sorted(m.settings.items())) for m in chosen}:
        tests = tuple(
            dict.fromkeys(t for m in chosen if tuple(sorted(m.settings.items())) == settings for t in m.tests)
        )
        control = Mutant("no mutant", "README.md", "", "", tests, dict(settings))
        status, _ = run_tests(control, libraries, _OUT / "mutants" / "no-mutant.log")
        if status != 0:
            print(f"without any mutant the tests fail; see {_OUT / 'mutants' / 'no-mutant.log'}")
            return 1
    for mutant in chosen:
        try:
            catches.append(caught(mutant, libraries))
            print(f"{mutant.name}: caught by {catches[-1].test}", flush=True)
        except MutantError as error:
            errors.append(str(error))
            print(error, flush=True)
    print("\n| planted fault | caught by | which said |\n| --- | --- | --- |")
    for catch in catches:
        print(f"| {catch.mutant} | `{catch.test}` | {catch.said[:160]} |")
    print(f"{len(catches)} of {len(chosen)} caught, {time.monotonic() - begin:.0f} s")
    return int(bool(errors))


if __name__ == "__main__":
    sys.exit(main())
