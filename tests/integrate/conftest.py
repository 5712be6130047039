"""Losses and gradients are compared bit for bit, whichever plan they come from."""

from __future__ import annotations

import pytest

from tests.support.one_thread import one_thread

__all__ = ["one_thread"]
SEARCHED_AS_FOR_USERS: tuple[str, ...] = ("test_growing_cache.py",)
"""Files whose tests say something of the plans that users get."""


@pytest.fixture(scope="module", autouse=True)
def search_no_longer_than_needed(request: pytest.FixtureRequest) -> None:
    """A plan that is found soon shows as much, in half of the time."""
    if request.path.name not in SEARCHED_AS_FOR_USERS:
        request.getfixturevalue("brief_search")
