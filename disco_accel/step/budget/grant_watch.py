"""A thread that looks at a grant while its job does something else than steps."""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

from disco_accel.step.budget.grant_source import GrantSource
from disco_accel.threads import start_thread

POLL_SECONDS = 0.02
"""Between two looks at a grant that is waited for, and at one that an idle job may have to give back."""


class Shrinking(Protocol):
    """What has a grant."""

    def shrink_if_idle(self) -> None:
        """Give memory back that is not granted any more, if no step is under way."""


def start_watch(budget: Shrinking, source: GrantSource) -> threading.Event:
    """Watch ``source`` for ``budget`` until the event that is returned is set, or ``budget`` is gone."""
    stop = threading.Event()
    start_thread(_watch, weakref.ref(budget), source, stop, name="disco-grant", stop=stop.set)
    return stop


def leave(source: GrantSource) -> None:
    """The job is over."""
    source.hold(0)
    source.want(0, 0)


def _watch(budget: weakref.ref[Shrinking], source: GrantSource, stop: threading.Event) -> None:
    """While a model does something else than steps, it gives back what others are to have; once it is gone, all."""
    while not stop.wait(POLL_SECONDS):
        own = budget()
        try:
            if own is not None:
                own.shrink_if_idle()
        except ReferenceError:
            own = None
        if own is None:
            # Here, and not where it is collected: a source may be in the middle of another call there.
            leave(source)
            return
        del own
