"""The page of a step: one HTML file with all that it shows, which loads nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from disco_accel.errors import ConfigError
from disco_accel.graph.files import write_atomically
from disco_accel.observe.step_folder import _Step
from disco_accel.observe.step_model import step_model

_PAGE = Path(__file__).parent / "page"

SCRIPTS = ("vendor/uPlot.iife.min.js", "model.js", "timeline.js", "charts.js", "tables.js", "main.js")
STYLES = ("vendor/uPlot.min.css", "page.css")
"""Below ``page/``, in their order on the page."""


def write_step_page(path: str | os.PathLike[str], step: _Step) -> None:
    """Write the page of ``step``, all or nothing. Raises ConfigError if it cannot be written."""
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, page_of(step_model(step)).encode())
    except OSError as error:
        raise ConfigError(f"{target}: cannot be written: {error.strerror or error}") from None


def page_of(model: Mapping[str, Any]) -> str:
    """The page of ``model`` (``step_model``). A browser runs the scripts of this package on it and no others: the page
    names their hashes, and forbids it to load anything."""
    script = "\n".join(_text(name) for name in SCRIPTS)
    style = "\n".join(_text(name) for name in STYLES)
    policy = f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; base-uri 'none'"
    parts = {
        "POLICY": policy,
        "TITLE": html.escape(f"{model['title']}: one step"),
        "STYLE": style,
        "SCRIPT": script,
        "MODEL": _inert(json.dumps(model, separators=(",", ":"))),
    }
    # Text that is filled in is not searched for places again.
    pieces = _text("template.html").split("@@")
    return "".join(parts[piece] if number % 2 else piece for number, piece in enumerate(pieces))


def _text(name: str) -> str:
    return (_PAGE / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _inert(text: str) -> str:
    """JSON that ends no element and begins none."""
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
