"""Called by torch at the end of its import: ``autoload`` of ``integrate/launch/import_hook.py``, if ``disco_accel`` is
ours.

A module of its own, because torch ends with an error where an entry point cannot be imported. A script named
``disco_accel.py``, or a folder of that name beside a script, comes before the installed package on the path. Neither is
run from here.
"""

from __future__ import annotations

import importlib.util
import os
import sys

_HOOK = ("integrate", "launch", "import_hook.py")


def autoload() -> None:
    """Entry point of the ``torch.backends`` group. Never raises; does nothing beside another ``disco_accel``."""
    if not _ours():
        return
    from disco_accel.integrate.launch.import_hook import autoload

    autoload()


def _ours() -> bool:
    """Whether ``import disco_accel`` gives the package with ``import_hook.py``; found out without running it."""
    loaded = sys.modules.get("disco_accel")
    try:
        spec = None if loaded is not None else importlib.util.find_spec("disco_accel")
        folders = getattr(loaded, "__path__", None) if spec is None else spec.submodule_search_locations
        return any(os.path.isfile(os.path.join(folder, *_HOOK)) for folder in folders or ())
    except (ImportError, ValueError, TypeError, OSError):
        return False
