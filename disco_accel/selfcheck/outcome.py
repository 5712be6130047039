"""Answers of the self-check: their data, their files beside the plans, and the key that they hold for.

A file per key, in a folder of the plan cache's own, so that a device is checked once. Only a check that passed is kept.
A file counts if every byte of it is as it was written, for this very key; any other is ignored with a warning.

The key names the device, its driver, PyTorch and this package's own sources: a change of any of these asks for a new
check. The model is no part of it: plans are verified by themselves.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import platform
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from disco_accel.errors import GraphFileError
from disco_accel.graph.strict_json import parse_json
from disco_accel.native.backend import backend_of
from disco_accel.plan.cache_folder import ForeignFolder, Unusable, own_folder, read_private, remove_oldest, write_file
from disco_accel.selfcheck.agreement import Tensors, agreement, distance
from disco_accel.version import __version__

logger = logging.getLogger("disco_accel")

MOST_BYTES = 1 << 20
"""Of a file."""
MOST_FILES = 64
"""Files beyond this many are removed, oldest first, when a new one is stored."""
_FOLDER = "checks"
_PACKAGE = Path(__file__).resolve().parents[1]
_PARTS = ("capture", "execute", "graph", "measure", "native", "plan", "runtime_ext", "selfcheck", "simulate", "verify")
_KINDS = (".py", ".cpp", ".h", ".cu")
_SHOWN = 4


@dataclass(frozen=True, slots=True)
class Difference:
    """In ``part`` of the check ``what`` was to be ``expected``, and ``got`` came. ``apart``: how far, for tensors."""

    part: str
    what: str
    expected: str
    got: str
    apart: str = ""

    def __str__(self) -> str:
        if self.apart:
            return f"{self.part}: {self.what}: {self.apart}"
        return f"{self.part}: {self.what} is {self.got} instead of {self.expected}"

    def as_dict(self) -> dict[str, str]:
        """For JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass
class Outcome:
    """``figures``: measurements, rates in bytes/s. ``seconds``: of the whole check."""

    identity: Mapping[str, str]
    differences: list[Difference] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether nothing differed."""
        return not self.differences

    def as_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {
            "passed": self.passed,
            "seconds": round(self.seconds, 3),
            "identity": dict(self.identity),
            "figures": self.figures,
            "differences": [difference.as_dict() for difference in self.differences],
        }


def compare(part: str, runs: Sequence[Tensors], got: Tensors) -> list[Difference]:
    """A difference for each tensor of ``got``, by name, that does not agree with the ``runs`` of eager mode."""
    found = agreement(got, runs, outputs=("loss",))
    beside = f" of plain PyTorch's, which is up to {found.spread:.3g} from itself" if found.spread else ""
    differences = []
    for name in found.wrong:
        wanted, came = runs[0].get(name), got.get(name)
        apart = _apart(wanted, came)
        differences.append(Difference(part, name, _first(wanted), _first(came), apart + beside))
    return differences


def _apart(expected: torch.Tensor | None, got: torch.Tensor | None) -> str:
    """How far two fp32 tensors that are not equal are apart, in words."""
    if expected is None or got is None:
        return "nothing came" if got is None else "nothing was to come"
    if (expected.shape, expected.dtype, expected.device) != (got.shape, got.dtype, got.device):
        return f"{tuple(got.shape)} of {got.dtype} on {got.device} instead of {tuple(expected.shape)} of " + (
            f"{expected.dtype} on {expected.device}"
        )
    wrong = int((_bits(expected) != _bits(got)).sum())
    return f"{wrong} of {expected.numel()} elements differ in their bits, by {distance(expected, got):.3g} of the norm"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(torch.int32)


def _first(tensor: torch.Tensor | None) -> str:
    """The first elements, and how many there are."""
    if tensor is None:
        return "nothing"
    values = tensor.detach().reshape(-1)[:_SHOWN].tolist()
    return f"{values} of {tensor.numel()}" if tensor.numel() > _SHOWN else str(values)


def identity_of(device: torch.device) -> dict[str, str]:
    """The facts that a check on ``device`` holds for, for people to read and for ``key_of``."""
    software = {
        "disco_accel": __version__,
        "sources": _sources_digest(),
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
    }
    return {**backend_of(device).identity(), **software}


def key_of(identity: Mapping[str, str]) -> str:
    """The sha256 of ``identity``, in hex."""
    return hashlib.sha256(json.dumps(dict(sorted(identity.items()))).encode()).hexdigest()


@functools.cache
def _sources_digest() -> str:
    """A hash of the sources that capture, plan and run, Python and C++."""
    digest = hashlib.sha256()
    for part in _PARTS:
        # The last part may be a link to another folder, which rglob would not follow.
        folder = (_PACKAGE / part).resolve()
        for path in sorted(p for p in folder.rglob("*") if p.suffix in _KINDS and p.is_file()):
            digest.update(f"{part}/{path.relative_to(folder)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def answer_path(folder: str, key: str) -> Path:
    """The file below ``folder`` with the answer under ``key``, for this user alone."""
    return Path(folder) / _FOLDER / f"{key}.json"


def kept_outcome(folder: str, key: str) -> dict[str, Any] | None:
    """``Outcome.as_dict`` of a check under ``key`` that has passed before; None if there is none to be used."""
    path = answer_path(folder, key)
    try:
        data = read_private(path, MOST_BYTES)
        return None if data is None else _require(data, key)
    except OSError as error:
        _say(path, f"cannot be read: {error.strerror or error}")
    except (GraphFileError, Unusable) as error:
        _say(path, str(error))
    return None


def records(folder: str) -> list[tuple[float, dict[str, Any]]]:
    """The checks that have passed and are kept below ``folder``: when, in seconds since 1970, and ``Outcome.as_dict``.
    Files that cannot be used are left out."""
    found = []
    for path in sorted((Path(folder) / _FOLDER).glob("*.json")):
        with contextlib.suppress(OSError, GraphFileError, Unusable):
            data = read_private(path, MOST_BYTES)
            if data is not None:
                found.append((path.stat().st_mtime, _require(data, path.stem)))
    return found


def store(folder: str, key: str, outcome: Outcome) -> bool:
    """Keep an ``outcome`` that passed; False, with a warning, where that is not possible."""
    assert outcome.passed, "what failed is checked again by the next process"
    path = answer_path(folder, key)
    try:
        with own_folder(path.parent) as handle:
            write_file(handle, path.name, _render({"key": key, "self_check": outcome.as_dict()}))
            remove_oldest(handle, MOST_FILES)
        return True
    except OSError as error:
        _say(path, f"cannot be written: {error.strerror or error}")
    except ForeignFolder as error:
        _say(path.parent, str(error))
    return False


def forget(folder: str, key: str) -> None:
    """Remove the answer under ``key``: the device has failed since."""
    path = answer_path(folder, key)
    with contextlib.suppress(OSError, ForeignFolder):
        if path.exists():
            with own_folder(path.parent) as handle:
                os.unlink(path.name, dir_fd=handle)


def write_report(folder: str | os.PathLike[str] | None, outcome: Outcome, more: Mapping[str, Any]) -> Path | None:
    """A new file with all that a bug report needs, in ``folder`` or, where that cannot be, in the temporary one.

    ``more`` goes into it beside the outcome. None where no file can be written.
    """
    content = json.dumps({**outcome.as_dict(), **more}, indent=1)
    for place in (folder, None):
        try:
            if place is not None:
                Path(place).mkdir(mode=0o700, parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(prefix="failed-self-check-", suffix=".json", dir=place, text=True)
            with os.fdopen(handle, "w") as stream:
                stream.write(content + "\n")
            return Path(name)
        except OSError:
            continue
    return None


def _render(content: Mapping[str, Any]) -> bytes:
    """``content`` and its own digest, in the one way to write it."""
    body = json.dumps(content, sort_keys=True)
    digest = hashlib.sha256(body.encode()).hexdigest()
    return json.dumps({**content, "sha256": digest}, sort_keys=True, indent=1).encode() + b"\n"


def _require(data: bytes, key: str) -> dict[str, Any]:
    """The outcome in ``data``. Raises GraphFileError or Unusable unless that is an answer under ``key``, every byte as
    it was written."""
    content = parse_json(data)
    if not isinstance(content, dict) or content.pop("sha256", None) is None or _render(content) != data:
        raise Unusable("damaged")
    outcome = content.get("self_check")
    if content.get("key") != key or not isinstance(outcome, dict) or outcome.get("passed") is not True:
        raise Unusable("made for something else")
    return outcome


def _say(path: Path, reason: str) -> None:
    logger.warning("self-check: %s: %s; checked again", path, reason.splitlines()[0])
