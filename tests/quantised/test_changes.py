"""What a user changes of a quantised model is followed with eager's bits, or refused: never silently wrong."""

from __future__ import annotations

import pytest

from tests.quantised.children import lines_of
from tests.quantised.edits import CHANGES, moments

BITSANDBYTES = ("bitsandbytes NF4", "bitsandbytes NF4, double", "bitsandbytes int8", "bitsandbytes NF4 experts")
FORMS = (*BITSANDBYTES, "torchao int8", "hqq 4 bits", "quanto int8")
REFUSED: dict[tuple[str, str], str] = {
    # The weight that it loads wants a gradient.
    ("quanto int8", "load_state_dict"): "cannot be trained under a plan; freeze it",
    ("bitsandbytes NF4", "state lost"): "q_proj.weight: this Params4bit has no quant_state",
    ("bitsandbytes int8", "state lost"): "q_proj.weight: this Int8Params has no SCB",
    ("bitsandbytes NF4 experts", "state lost"): "gate_up_proj.original: this Parameter has no quant_state",
    # Each of the two layers puts its own bytes under it, in turn.
    ("bitsandbytes int8", "other layer's Parameter"): "puts other data into a tensor of shape",
    # Only on CPUs for which bitsandbytes repacks weights, which pass no gradient on from then on.
    **{(form, "evaluated"): "no trainable parameter reaches the loss" for form in BITSANDBYTES},
    # Eager's own error: what is stored is of another dtype than what comes in.
    **{("hqq 4 bits", name): "same dtype" for name in ("to dtype", "float()")},
}
"""Form and change → a part of the message with which the step after it is refused, on some machines at least."""


@pytest.mark.parametrize("form", FORMS)
def test_each_change_of_a_quantised_layer_is_followed_or_refused(form: str) -> None:
    """Between two steps, between forward and backward, and some before ``prepare``; whatever came of it, the next step
    is right or refused."""
    results = lines_of("changes.py", form)
    wanted = [(name, moment) for name in CHANGES[form] for moment in moments(name)]
    assert [(r["change"], r["moment"]) for r in results] == wanted
    for result in results:
        what = result["form"], result["change"]
        refused = REFUSED.get(what, "no such refusal") in result["detail"]
        if result["moment"] == "before backward":
            refused = refused or "was changed in place between this step's forward and its backward" in result["detail"]
        # An error of the library's own, in eager mode too.
        assert result["verdict"] in ("followed", "no effect", "as eager") or refused, result
        assert result["after"] in ("followed", "no effect") or what in REFUSED, result
        assert result["eager"] == 0 and (result["planned"] > 0 or (refused and not result["plans"])), result
        if result["change"] == "state lost":
            assert refused and (result["planned"] > 0) is (result["moment"] != "before prepare"), result
