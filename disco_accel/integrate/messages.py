"""What this package says, shown to users of a script that sets up no logging."""

from __future__ import annotations

import logging


def show_messages() -> None:
    """Write the package's messages to stderr, once for all processes of a run, unless the script handles them."""
    ours = logging.getLogger("disco_accel")
    if ours.handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("disco: %(message)s"))
    handler.addFilter(_wanted)
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)


def _wanted(record: logging.LogRecord) -> bool:
    if logging.getLogger().handlers:
        # The script's own logging gets the record, too.
        return False
    import torch.distributed as dist

    first = not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
    return first or record.levelno >= logging.WARNING
