"""Messages of this package, shown to users of a script that sets up no logging."""

from __future__ import annotations

import logging
import sys

from disco_accel.config.settings import process_rank

_EVERYWHERE = "disco_everywhere"
"""The attribute of a record that each process of a run shows."""


class AboveTheBar(logging.Handler):
    """Prints records on the stderr of the moment, without tearing a progress bar apart."""

    own_level: int | None = None
    """The logger's level as ``show_messages`` set it, to tell it from one that the user chose."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            write_line(self.format(record))
        except Exception:
            self.handleError(record)


def write_line(text: str) -> None:
    """A line on stderr, above the progress bars of tqdm that are on the screen."""
    if sys.stderr is None:
        return
    tqdm = sys.modules.get("tqdm")
    if tqdm is not None and hasattr(tqdm, "tqdm"):
        tqdm.tqdm.write(text, file=sys.stderr)
    else:
        sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def show_messages(quiet: bool = False) -> None:
    """Write the package's messages to stderr, once for all processes of a run, unless the script handles them.

    ``quiet``: warnings alone. A level or a handler that the user gave the ``disco_accel`` logger stays as it is.
    """
    ours = logging.getLogger("disco_accel")
    handler = next((h for h in ours.handlers if isinstance(h, AboveTheBar)), None)
    if handler is None:
        if ours.handlers:
            return
        handler = AboveTheBar()
        handler.setFormatter(logging.Formatter("disco: %(message)s"))
        handler.addFilter(_wanted)
        ours.addHandler(handler)
    if ours.level in (logging.NOTSET, handler.own_level):
        handler.own_level = logging.WARNING if quiet else logging.INFO
        ours.setLevel(handler.own_level)


def say(text: str) -> None:
    """One line for the user, of one process of a run."""
    level = logging.INFO if first_process() else logging.DEBUG
    logging.getLogger("disco_accel").log(level, "%s", text)


def say_everywhere(text: str) -> None:
    """One line for the user in whichever process of a run it is said: by those that speak for themselves, or for those
    of their machine."""
    logging.getLogger("disco_accel").info("%s", text, extra={_EVERYWHERE: True})


def first_process() -> bool:
    """Whether this process speaks for a run of several."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return int(dist.get_rank()) == 0
    return process_rank() == 0


def _wanted(record: logging.LogRecord) -> bool:
    if logging.getLogger().handlers:
        # The script's own logging gets the record, too.
        return False
    return record.levelno >= logging.WARNING or hasattr(record, _EVERYWHERE) or first_process()
