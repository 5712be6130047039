"""Looks at tensors and objects see what they are meant to see."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from disco_accel.execute.unchanged import WatchedAttributes, WatchedEntries, WatchedLayouts, no_zero

DTYPES = (torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64, torch.float32, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_zero_anywhere_is_seen(dtype: torch.dtype) -> None:
    """As by torch itself, also in views, in empty tensors, and where most bytes of a number are zero."""
    base = torch.full((3, 5), 1 if dtype is torch.bool else 128, dtype=dtype)
    assert no_zero(base) and no_zero(base.t()) and no_zero(base[:0]) and no_zero(base[:, 1:])
    for place in range(base.numel()):
        tensor = base.clone()
        tensor.view(-1)[place] = 0
        assert not no_zero(tensor) and not no_zero(tensor.t())
        assert no_zero(tensor[:, 1:]) == bool(tensor[:, 1:].all())


CHANGES: dict[str, Callable[[torch.nn.Parameter], object]] = {
    "gradient": lambda p: p.requires_grad_(False),
    "dtype": lambda p: setattr(p, "data", p.data.bfloat16()),
    "shape": lambda p: setattr(p, "data", p.data.view(3, 2)),
    "dimensions": lambda p: setattr(p, "data", p.data.view(6)),
}


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("change", CHANGES)
def test_layouts_are_compared(change: str, which: int) -> None:
    parameters = [torch.nn.Parameter(torch.ones(2, 3)) for _ in range(2)]
    look = WatchedLayouts(parameters)
    with torch.no_grad():
        parameters[which].mul_(2)
    assert look.same()
    CHANGES[change](parameters[which])
    assert not look.same() and WatchedLayouts(parameters).same()


def test_attributes_are_compared_by_identity() -> None:
    """Absent ones too; attributes that were not asked for do not count."""
    module = torch.nn.Linear(1, 1)
    look = WatchedAttributes([torch.nn.Linear(1, 1), module], ("training", "gate"))
    module.other = 1  # type: ignore[assignment]
    assert look.same()
    module.gate = 1  # type: ignore[assignment]
    assert not look.same()
    del module.gate
    assert look.same()
    module.eval()
    assert not look.same()


def test_entries_are_compared_by_identity_and_order() -> None:
    values = [[1], [1]]
    table, empty = {"a": values[0], "b": 2}, dict[str, int]()
    look = WatchedEntries([table, empty])
    assert look.same()
    table["a"] = values[1]
    assert not look.same()
    table["a"] = values[0]
    assert look.same()
    empty["c"] = 3
    assert not look.same()
    empty.clear()
    table["a"] = table.pop("a")
    assert not look.same()
    table.clear()
    assert not look.same()
