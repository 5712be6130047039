"""What a user changes of a quantised model is followed with eager's bits, or refused: never silently wrong."""

from __future__ import annotations

import pytest

from tests.quantised.children import lines_of
from tests.quantised.edits import CHANGES

REFUSED: dict[tuple[str, str], str] = {}
"""Form and change → a pattern of the message, where the step after it is refused."""


@pytest.mark.parametrize("form", CHANGES)
def test_each_change_of_a_quantised_layer_is_followed_or_refused(form: str) -> None:
    """Between two steps, and between forward and backward; whatever came of it, the next step is right."""
    results = lines_of("changes.py", form)
    assert [r["change"] for r in results] == [name for name in CHANGES[form] for _ in range(2)]
    for result in results:
        what = form, result["change"], result["moment"]
        if result["verdict"] == "as eager":
            continue
        assert result["verdict"] in ("followed", "no effect", "refused"), (what, result)
        assert result["after"] in ("followed", "no effect"), (what, result)
        assert result["eager"] == 0 and result["planned"] > 0, (what, result)
