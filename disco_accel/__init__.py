"""Fine-tune and prefill language models far larger than device memory: planned ahead, executed dynamically."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from disco_accel.version import __version__

__all__ = [
    "DiscoCallback",
    "DiscoConfig",
    "DiscoPlugin",
    "__version__",
    "prefill",
    "prepare",
    "pure",
    "restore",
    "set_memory_budget",
    "settle",
    "stats",
]

if TYPE_CHECKING:
    from disco_accel.config.settings import DiscoConfig
    from disco_accel.integrate.accelerate.callback import DiscoCallback
    from disco_accel.integrate.accelerate.plugin import DiscoPlugin
    from disco_accel.integrate.hf.prefill import prefill
    from disco_accel.integrate.prepare import prepare, restore, set_memory_budget, settle, stats
    from disco_accel.step.state.forward_code import pure

_HOME = {
    "DiscoConfig": "disco_accel.config.settings",
    "DiscoCallback": "disco_accel.integrate.accelerate.callback",
    "DiscoPlugin": "disco_accel.integrate.accelerate.plugin",
    "prefill": "disco_accel.integrate.hf.prefill",
    "prepare": "disco_accel.integrate.prepare",
    "pure": "disco_accel.step.state.forward_code",
    "restore": "disco_accel.integrate.prepare",
    "set_memory_budget": "disco_accel.integrate.prepare",
    "settle": "disco_accel.integrate.prepare",
    "stats": "disco_accel.integrate.prepare",
}


def __getattr__(name: str) -> Any:
    # Planner and verifier users import this package without torch, so the public names load on first use.
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOME[name]), name)
