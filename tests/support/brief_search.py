"""Plans of steps whose results are compared, and not their seconds, get a tenth of the work of a user's search.

All is tried that a whole search tries, with less of each. Tests in the folders of ``WHOLE`` search whole.
A server that forks for commands (tests/support/forkserver.py) does the same once ``tests.support.brief_search_always``
is among its modules.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

WHOLE = ("benchmarks", "cli", "graph", "observe", "plan", "simulate", "verify")
"""Below tests/: their subject is how good plans are, or what a search costs."""

_SHARE = 0.1
"""Of a tiny step a whole search takes seconds, and its plan is hardly faster for them."""


def shorten(patch: pytest.MonkeyPatch) -> None:
    """Until ``patch`` is undone. The work is counted: plans are the same on any machine, as they are of whole ones."""
    from disco_accel.plan import search_work
    from disco_accel.plan.buildmemgraph import residents

    for name in ("_BASE_SECONDS", "_SECONDS_PER_VERTEX", "_MAX_SECONDS"):
        patch.setattr(search_work, name, _SHARE * getattr(search_work, name))
    patch.setattr(residents, "EFFORT", int(_SHARE * residents.EFFORT))


@pytest.fixture(autouse=True, scope="module")
def brief_search(request: pytest.FixtureRequest) -> Iterator[None]:
    """For the tests of a file that is in none of the folders of ``WHOLE``."""
    with pytest.MonkeyPatch.context() as patch:
        if request.path.parent.name not in WHOLE:
            shorten(patch)
        yield
