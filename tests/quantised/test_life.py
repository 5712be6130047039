"""A prepared quantised model is placed, saved, copied, restored, shared and compared like one of plain weights."""

from __future__ import annotations

import pytest

from tests.quantised.children import lines_of

FORMS = ("bitsandbytes NF4, double", "bitsandbytes int8", "torchao int8", "hqq 4 bits", "quanto int4")


@pytest.mark.parametrize("form", FORMS)
def test_the_life_of_a_prepared_quantised_model(form: str) -> None:
    """The script's own names say what each entry is about."""
    (result,) = lines_of("life.py", form)
    seen = result["seen"]
    assert "error" not in seen, seen["error"]
    wrong = {what: how for what, how in seen.items() if how is not True and not str(how).startswith("not to be copied")}
    assert not wrong and len(seen) > 10
