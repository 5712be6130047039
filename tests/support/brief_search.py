"""Plans of steps whose results are compared, and not their seconds, are searched for until one is good enough.

As good as is enough here is less than for users. Whether there is a plan at all, and the memory that a refusal names,
come of the same search as theirs.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

_ENOUGH = 1.25
"""A plan that takes at most so many times as long as is hoped for ends a search."""

_FINEST = 1.0
"""Prices of memory are compared as long as they differ by so many halvings."""

_RESIDENTS = 2_500
"""Vertices planned in all by BUILDMEMGRAPH, in its search for inputs that had better stay."""


@pytest.fixture(scope="module")
def brief_search() -> Iterator[None]:
    """For the tests of a file."""
    from disco_accel.plan import keep_or_recompute, select
    from disco_accel.plan.buildmemgraph import residents
    from disco_accel.plan.timed import search

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "_GOOD", _ENOUGH)
        patch.setattr(select, "_GOOD", _ENOUGH)
        patch.setattr(select, "_NEAR", _ENOUGH)
        patch.setattr(keep_or_recompute, "_AS_PROMISED", _ENOUGH)
        patch.setattr(keep_or_recompute, "_FINEST", _FINEST)
        patch.setattr(residents, "EFFORT", _RESIDENTS)
        yield
