"""Whether a command that a page names exists: the program, the target, the sub-command, the module, each option."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import io
import re
import shlex
from pathlib import Path

from disco_accel.cli import main

ROOT = Path(__file__).resolve().parents[2]
_ASSIGNMENT = re.compile(r"[A-Z_]+=\S*")


def commands_of(text: str) -> list[str]:
    """The commands of a shell block, one a line: comments dropped, lines that end with a backslash joined."""
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    return [" ".join(words) for line in lines if (words := shlex.split(line, comments=True))]


def command_fault(command: str) -> str | None:
    """What does not exist of ``command``, or None. Programs of others (git, pip) are taken as they are."""
    words = [word for word in command.split() if not _ASSIGNMENT.fullmatch(word)]
    program = Path(words[0]).name if words else ""
    rest = words[1:]
    if program == "make":
        missing = [target for target in rest if target not in targets()]
        return f"{command}: the Makefile has no {missing[0]}" if missing else None
    if program == "disco-accel":
        return _of_ours(command, rest)
    if program == "python" and rest[:1] == ["-m"] and rest[1].startswith(("benchmarks", "disco_accel", "tests")):
        return _of_module(command, rest[1], rest[2:])
    return None


@functools.cache
def targets() -> frozenset[str]:
    """What ``make`` can make here."""
    return frozenset(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def _of_ours(command: str, words: list[str]) -> str | None:
    if not words:
        return None
    known = {made.name: made for made in main.COMMANDS}
    if words[0] not in known:
        return f"{command}: no sub-command {words[0]}"
    if words[0] == "bench":
        names = [word for word in words[1:2] if re.fullmatch(r"[a-z]+", word)]
        if names and names[0] not in main.BENCHMARKS:
            return f"{command}: no benchmark {names[0]}"
        return _of_module(command, f"benchmarks.{main.BENCHMARKS[names[0]]}", words[2:]) if names else None
    if known[words[0]].arguments is None:
        return None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        # The second word may be a sub-command of its own.
        main.main([*words[: 1 if words[1:2] == [] or words[1].startswith("-") else 2], "--help"])
    missing = [option for option in _options(words) if option not in printed.getvalue()]
    return f"{command}: no option {missing[0]}" if missing else None


def _of_module(command: str, module: str, words: list[str]) -> str | None:
    if importlib.util.find_spec(module) is None:
        return f"{command}: no module {module}"
    missing = [option for option in _options(words) if option not in _help_of(module)]
    return f"{command}: no option {missing[0]}" if missing else None


@functools.cache
def _help_of(module: str) -> str:
    printed = io.StringIO()
    spec = importlib.util.find_spec(module)
    program = f"{module}.__main__" if spec is not None and spec.submodule_search_locations else module
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        importlib.import_module(program).main(["--help"])
    return printed.getvalue()


def _options(words: list[str]) -> list[str]:
    return [word.split("=")[0].strip("[]") for word in words if word.strip("[").startswith("--")]
