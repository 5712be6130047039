"""Numbers that Python and the engine share are compared when its library is loaded."""

from __future__ import annotations

import pytest
import torch

from disco_accel.native.engine_numbers import check_numbers, expected_numbers
from disco_accel.native.extension import load_extension
from disco_accel.native.plain_library import ExtensionError


def test_the_loaded_library_has_pythons_numbers() -> None:
    load_extension()
    assert dict(torch.ops.disco_accel.engine_numbers()) == expected_numbers()


@pytest.mark.parametrize("name", expected_numbers())
def test_each_number_that_differs_is_refused_by_name(name: str) -> None:
    """One that has changed, one that the library lacks, and one that it alone has."""
    ours = expected_numbers()
    without = {other: number for other, number in ours.items() if other != name}
    for theirs in ({**ours, name: ours[name] + 1}, without, {**ours, f"{name}_new": 0}):
        with pytest.raises(ExtensionError, match=name.replace(".", r"\.")) as caught:
            check_numbers(theirs, "/somewhere/engine.so")
        assert "/somewhere/engine.so" in str(caught.value) and "built again" in str(caught.value)
    check_numbers(dict(ours), "/somewhere/engine.so")
