"""Answers of the self-check on disk, beside the plans, so that a device is checked once; and reports of what failed.

A file per key (see ``identity.py``), in a folder of the plan cache's own. Only a check that passed is kept. A file
counts if every byte of it is as it was written, for this very key; else it is as good as absent, and that is said.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from disco_accel.errors import GraphFileError
from disco_accel.graph.strict_json import parse_json
from disco_accel.plan.cache_folder import ForeignFolder, Unusable, own_folder, read_private, remove_oldest, write_file
from disco_accel.selfcheck.outcome import Outcome

logger = logging.getLogger("disco_accel")

MOST_BYTES = 1 << 20
"""Of a file."""
MOST_FILES = 64
"""Files beyond this many are removed, oldest first, when a new one is stored."""
_FOLDER = "checks"


class PassedChecks:
    """Answers in ``folder``/checks, for this user alone."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder) / _FOLDER

    def path(self, key: str) -> Path:
        """Where the answer under ``key`` is."""
        return self.folder / f"{key}.json"

    def passed(self, key: str) -> bool:
        """Whether a check under ``key`` has passed before."""
        path = self.path(key)
        try:
            data = read_private(path, MOST_BYTES)
            if data is None:
                return False
            _require(data, key)
            return True
        except OSError as error:
            _say(path, f"cannot be read: {error.strerror or error}")
        except (GraphFileError, Unusable) as error:
            _say(path, str(error))
        return False

    def store(self, key: str, outcome: Outcome) -> bool:
        """Keep an ``outcome`` that passed; False where that is not possible, which is said."""
        assert outcome.passed, "what failed is checked again by the next process"
        path = self.path(key)
        try:
            with own_folder(self.folder) as handle:
                write_file(handle, path.name, _render({"key": key, "self_check": outcome.as_dict()}))
                remove_oldest(handle, MOST_FILES)
            return True
        except OSError as error:
            _say(path, f"cannot be written: {error.strerror or error}")
        except ForeignFolder as error:
            _say(self.folder, str(error))
        return False

    def forget(self, key: str) -> None:
        """Remove the answer under ``key``: the device has failed since."""
        with contextlib.suppress(OSError, ForeignFolder):
            if self.path(key).exists():
                with own_folder(self.folder) as handle:
                    os.unlink(f"{key}.json", dir_fd=handle)


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


def _require(data: bytes, key: str) -> None:
    """Raises GraphFileError or Unusable unless ``data`` is an answer under ``key``, every byte as it was written."""
    content = parse_json(data)
    if not isinstance(content, dict) or content.pop("sha256", None) is None or _render(content) != data:
        raise Unusable("damaged")
    outcome = content.get("self_check")
    if content.get("key") != key or not isinstance(outcome, dict) or outcome.get("passed") is not True:
        raise Unusable("made for something else")


def _say(path: Path, reason: str) -> None:
    logger.warning("self-check: %s: %s; checked again", path, reason.splitlines()[0])
