"""The file of results, written after each row. A row says in which run it was made, and a run by which planner."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import fields
from hashlib import sha256
from pathlib import Path
from typing import Any

from benchmarks.common.provenance import provenance
from benchmarks.common.speeds import speed_as_json
from benchmarks.simulated_devices.cells import SPEEDS, Cell, cell_of
from benchmarks.simulated_devices.rows import Row
from disco_accel.errors import ConfigError
from disco_accel.graph.files import write_atomically

COMMAND = "python -m benchmarks.simulated_devices"
NAME = "simulated-devices"
ROOT = Path(__file__).resolve().parents[2]
_SOURCES = ("disco_accel", "runtime_ext", "recipes")
_FIGURES = {field.name for field in fields(Row)} - {"cell"}
_RUNS = ("run", "bound_run")


class ResultsFile:
    """Rows by cell, and the ``runs`` that made them: each row's ``run``, and ``bound_run`` where its bound is younger,
    is a position there. ``path``: None to write nothing; ``keep``: begin with what is there.

    Raises:
        ConfigError: what is there is not to be kept, or is no such file.
    """

    def __init__(self, path: Path | None, words: Sequence[str], *, keep: bool = False) -> None:
        self.path = path
        self._written = _bytes(path)
        if self._written and not keep:
            raise ConfigError(f"{path}: is there, and took long to make; give --add, or another file")
        there = _read(path, self._written) if self._written else {"runs": [], "rows": []}
        self.runs: list[dict[str, Any]] = there["runs"]
        self._rows = {cell_of(row): row for row in there["rows"]}
        device = f"simulated: {', '.join(speed.name for speed in SPEEDS.values())}"
        self._run = {**provenance(COMMAND, words, device), "planner": planner_commit()}

    def row_of(self, cell: Cell) -> dict[str, Any] | None:
        """What is known of ``cell``."""
        return self._rows.get(cell)

    def is_old(self, row: dict[str, Any], *, bound: bool = False) -> bool:
        """Whether ``row``, or its ``bound`` alone, is of another planner than that of this run."""
        run = row.get("bound_run", row["run"]) if bound else row["run"]
        return bool(self.runs[run]["planner"] != self._run["planner"])

    def put(self, row: dict[str, Any], *, bound_only: bool = False) -> None:
        """Keep ``row``, of which this run has made all, or the bound alone, and write the file.

        Raises:
            ConfigError: somebody else has written to the file.
        """
        if self._run not in self.runs:
            self.runs.append(self._run)
        run = self.runs.index(self._run)
        self._rows[cell_of(row)] = {**row, "bound_run": run} if bound_only else {**row, "run": run}
        if self.path is None:
            return
        if _bytes(self.path) != self._written:
            raise ConfigError(f"{self.path}: somebody else has written to it; run one process at a time, with --add")
        self._written = (json.dumps(self.as_json(), indent=1) + "\n").encode()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path, self._written)

    def as_json(self) -> dict[str, Any]:
        """The whole file: its head is that of the last run, its rows are in the order of the tables."""
        used = {row[key] for row in self._rows.values() for key in _RUNS if key in row}
        position = {run: place for place, run in enumerate(sorted(used))}
        rows = []
        for cell in sorted(self._rows, key=lambda cell: cell.place):
            row = self._rows[cell]
            rows.append({**row, **{key: position[row[key]] for key in _RUNS if key in row}})
        head = {**self._run, "command": COMMAND}
        speeds = {gpu: speed_as_json(speed) for gpu, speed in SPEEDS.items()}
        runs = [self.runs[run] for run in sorted(used)]
        return {"benchmark": NAME, **head, "speeds": speeds, "runs": runs, "rows": rows}


def planner_commit(root: Path = ROOT) -> str:
    """The last commit that changed the package or its native code, ``unknown`` outside a checkout; where files differ
    from it, a digest of how follows."""
    commit = _git(root, "log", "-1", "--format=%h", "--", *_SOURCES)
    if not commit:
        return "unknown"
    changes = _git(root, "diff", "HEAD", "--", *_SOURCES)
    for name in _git(root, "ls-files", "--others", "--exclude-standard", "--", *_SOURCES).splitlines():
        changes += f"{name}\n{(root / name).read_bytes()!r}\n"
    return f"{commit}+{sha256(changes.encode()).hexdigest()[:7]}" if changes else commit


def _git(root: Path, *words: str) -> str:
    command = ["git", "-C", str(root), *words]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def _bytes(path: Path | None) -> bytes:
    return path.read_bytes() if path is not None and path.exists() else b""


def _read(path: Path | None, data: bytes) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(data)
        runs, rows = found["runs"], found["rows"]
        for row in rows:
            cell_of(row), [row[key] for key in _FIGURES], [runs[row[key]]["planner"] for key in _RUNS if key in row]
        speeds = json.loads(json.dumps({gpu: speed_as_json(speed) for gpu, speed in SPEEDS.items()}))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ConfigError(f"{path}: no results of {COMMAND} to keep ({error!r}); write to another file") from error
    if rows and found.get("speeds") != speeds:
        raise ConfigError(f"{path}: its rows are of GPUs with other speeds than today's; write to another file")
    return found
