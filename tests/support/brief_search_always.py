"""Whoever imports this searches briefly for plans until its process ends."""

import pytest

from tests.support.brief_search import shorten

shorten(pytest.MonkeyPatch())
