"""Fine-tune and prefill language models far larger than device memory: planned ahead, executed dynamically."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "DiscoCallback",
    "DiscoConfig",
    "DiscoPlugin",
    "__version__",
    "prefill",
    "prepare",
    "pure",
    "restore",
    "stats",
]

if TYPE_CHECKING:
    from disco_accel.config import DiscoConfig
    from disco_accel.integrate.accelerate_plugin import DiscoPlugin
    from disco_accel.integrate.callback import DiscoCallback
    from disco_accel.integrate.plugin import prepare, restore, stats
    from disco_accel.integrate.prefill import prefill
    from disco_accel.integrate.pure import pure

_HOME = {
    "DiscoConfig": "disco_accel.config",
    "DiscoCallback": "disco_accel.integrate.callback",
    "DiscoPlugin": "disco_accel.integrate.accelerate_plugin",
    "prefill": "disco_accel.integrate.prefill",
    "prepare": "disco_accel.integrate.plugin",
    "pure": "disco_accel.integrate.pure",
    "restore": "disco_accel.integrate.plugin",
    "stats": "disco_accel.integrate.plugin",
}


def __getattr__(name: str) -> Any:
    # Planner and verifier users import this package without torch, so the public names load on first use.
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOME[name]), name)
