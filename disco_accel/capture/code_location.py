"""Where in the model's code a trace ended."""

from __future__ import annotations

import linecache
import traceback
from pathlib import Path

import torch

_PACKAGE = str(Path(__file__).parent.parent)
_TORCH = str(Path(torch.__file__).parent)
# transformers' own checks, which say nothing of the model that makes them.
_HELPERS = ("import_utils.py", "generic.py")


def code_line(error: BaseException) -> str:
    """``" (modeling_x.py:210, `if n != m:`)"``, the innermost line outside torch and this package; '' without one."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        file = frame.f_code.co_filename
        if file.startswith((_PACKAGE, _TORCH, "<")) or Path(file).name in _HELPERS:
            continue
        return f" ({Path(file).name}:{line}, `{linecache.getline(file, line).strip()}`)"
    return ""
