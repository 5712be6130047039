"""Outcomes of comparisons of fused kernels with their ops, kept beside the compiled libraries for later processes.

That a kernel has the bits of its ops is a fact of the library's bytes, of the ops, and of all that the ops' own bits
depend on. A file of outcomes names all of that, and its own hash. Where anything of it is different, the file damaged,
or not this user's own, kernels are compared again. Seconds are not kept: the next process may find the machine less
busy.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from disco_accel.errors import DiscoError
from disco_accel.fuse.call_json import kernel_name
from disco_accel.fuse.kernels import _LibraryKernel, library_kernel
from disco_accel.graph.files import write_atomically
from disco_accel.graph.strict_json import a_list, an_object, number, parse_json
from disco_accel.graph.taskgraph import OpCall
from disco_accel.native.arithmetic import arithmetic_of, kernels_of
from disco_accel.native.extension import load_extension
from disco_accel.native.library_file import read_own
from disco_accel.native.plain_library import sources_key

logger = logging.getLogger("disco_accel")

_ROOT = Path(__file__).parents[1]
_COMPARISON = (
    *("measure/fused_bits.py", "measure/drawn_values.py", "measure/kept_outcomes.py", "measure/record.py"),
    *("fuse/call_json.py", "fuse/evaluate.py", "fuse/kernels.py", "fuse/twins.py", "fuse/value_views.py"),
    *("graph/op_traits.py", "native/arithmetic.py", "native/op_encoding.py"),
)
"""Modules that decide how a kernel is compared, and with what."""
_MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class _Outcome:
    """``bits``: whether a kernel has the bits of its ops; ``over``: numbers of arguments that output 0 may be written
    over."""

    bits: bool
    over: tuple[int, ...] = ()


@dataclass
class _KeptOutcomes:
    """Outcomes on ``device`` with this thread's settings. ``amount``: numbers that say how much is compared."""

    device: torch.device
    amount: tuple[int, ...]
    _facts: dict[str, str] = field(init=False)
    _name: str = field(init=False)
    _read: dict[tuple[Path, str], dict[str, _Outcome]] = field(init=False, default_factory=dict)
    """By folder and hash of a library."""
    _new: dict[tuple[Path, str], dict[str, _Outcome]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        comparison = sources_key(_ROOT, [_ROOT / name for name in _COMPARISON], map(str, self.amount))
        engine = load_extension().parent.name
        self._facts = {**arithmetic_of(self.device), "comparison": comparison, "engine": engine}
        self._name = f"outcomes-{_digest(json.dumps(self._facts, sort_keys=True))[:16]}.json"

    def of(self, kernel: int, call: OpCall, half: torch.dtype) -> _Outcome | None:
        """The outcome of an earlier comparison of ``kernel`` with ``call``, with all numbers of ``half``; None: there
        is none that holds."""
        where = library_kernel(kernel)
        if where is None or where.name != kernel_name(call):
            return None
        place = where.folder, where.digest
        if place not in self._read:
            self._read[place] = self._load(*place)
        return self._read[place].get(self._key(where, call, half))

    def add(self, kernel: int, call: OpCall, half: torch.dtype, outcome: _Outcome) -> None:
        """Remember ``outcome`` until ``save``."""
        where = library_kernel(kernel)
        if where is not None and where.name == kernel_name(call):
            self._new.setdefault((where.folder, where.digest), {})[self._key(where, call, half)] = outcome

    def save(self) -> None:
        """Write what was added. Where that cannot be, the next process compares again."""
        for (folder, digest), new in self._new.items():
            # What another process has written meanwhile stays.
            found = {name: _to_object(each) for name, each in {**self._load(folder, digest), **new}.items()}
            body = json.dumps({"facts": self._facts, "library": digest, "outcomes": found}, sort_keys=True)
            try:
                write_atomically(folder / self._name, f"{_digest(body)}\n{body}\n".encode())
            except OSError as error:
                logger.debug("outcomes of fused kernels are not kept: %s", error)
        self._new.clear()

    def _key(self, where: _LibraryKernel, call: OpCall, half: torch.dtype) -> str:
        # A tensor's method is the op without an overload.
        ops = sorted({f"{inner.name}.{inner.overload}".removesuffix(".default") for inner in call.body})
        return _digest("\n".join((where.name, str(where.number), str(half), *kernels_of(ops, self.device))))

    def _load(self, folder: Path, digest: str) -> dict[str, _Outcome]:
        try:
            data = read_own(folder / self._name, _MOST_BYTES)
            return {} if data is None else self._parsed(data, digest)
        except (DiscoError, OSError, ValueError) as error:
            logger.debug("%s is not believed: %s", folder / self._name, error)
            return {}

    def _parsed(self, data: bytes, digest: str) -> dict[str, _Outcome]:
        """Raises GraphFileError, ValueError."""
        recorded, _, body = data.decode("ascii").removesuffix("\n").partition("\n")
        if recorded != _digest(body):
            raise ValueError("it is damaged")
        found: Any = parse_json(body.encode())
        if not isinstance(found, dict) or found.get("facts") != self._facts or found.get("library") != digest:
            raise ValueError("it is about another library or machine")
        return {name: _outcome_of(each) for name, each in an_object(found.get("outcomes"), "outcomes").items()}


def _to_object(outcome: _Outcome) -> list[object]:
    return [outcome.bits, list(outcome.over)]


def _outcome_of(data: object) -> _Outcome:
    """Raises GraphFileError, ValueError."""
    bits, over = a_list(data, "an outcome")
    if not isinstance(bits, bool):
        raise ValueError("it has no outcomes")
    return _Outcome(bits, tuple(number(each, "over") for each in a_list(over, "over")))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
