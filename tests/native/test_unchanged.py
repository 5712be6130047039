"""Looks at tensors and objects see what they are meant to see."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from disco_accel.native.change_watch import (
    ABSENT,
    ANYTHING,
    Kind,
    WatchedContainers,
    executed_code,
    no_zero,
    watched_layouts,
)

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
    same = watched_layouts(parameters)
    with torch.no_grad():
        parameters[which].mul_(2)
    assert same()
    CHANGES[change](parameters[which])
    assert not same() and watched_layouts(parameters)()


class Owner:
    def __init__(self) -> None:
        self.value: Any = 1.5
        self.other: Any = "x"


def _cell(value: Any) -> Any:
    return (lambda: value).__closure__[0]  # type: ignore[index]


def _snapshots() -> dict[Kind, tuple[Any, list[Any], Callable[[Any], Any]]]:
    """A container of each kind, what it holds, and a change that leaves it equal by ``==`` but not by identity."""
    owner, item = Owner(), [1]
    return {
        Kind.ATTRIBUTES: (owner, ["value", owner.value, "other", "x"], lambda o: setattr(o, "value", float("1.5"))),
        Kind.DICT: ({"a": item}, ["a", item], lambda d: d.update(a=[1])),
        Kind.LIST: ([item], [item], lambda items: items.__setitem__(0, [1])),
        Kind.CELL: (_cell(item), [item], lambda cell: setattr(cell, "cell_contents", [1])),
        Kind.NAMES: ({"a": item, "b": 2}, ["a", item, "c", ABSENT], lambda d: d.update(c=None)),
        Kind.EQUAL: ({1, 2}, [{1, 2}], lambda items: items.add(3)),
    }


@pytest.mark.parametrize("kind", list(Kind))
def test_containers_are_compared_by_identity(kind: Kind) -> None:
    """Each kind; the first change is told by its index, and a snapshot that was taken over counts from then on."""
    owner, snapshot, change = _snapshots()[kind]
    watched = WatchedContainers()
    watched.append(Kind.LIST, [], [])
    watched.append(kind, owner, snapshot)
    assert watched.first_change() == -1
    change(owner)
    assert watched.first_change() == 1 and watched.first_change(1) == 1 and watched.first_change(2) == -1
    watched.replace(1, kind, owner, [] if kind is Kind.NAMES else [*snapshot, "more"])
    assert (watched.first_change() == -1) == (kind is Kind.NAMES)


def test_entries_are_compared_in_their_order() -> None:
    table = {"a": 1, "b": 2}
    watched = WatchedContainers()
    watched.append(Kind.DICT, table, ["a", 1, "b", ANYTHING])
    table["b"] = 5
    assert watched.first_change() == -1
    table["a"] = table.pop("a")
    assert watched.first_change() == 0
    table.clear()
    assert watched.first_change() == 0


def test_a_watch_keeps_nothing_alive_beyond_itself() -> None:
    """An owner that is watched from itself can be collected."""
    owner = Owner()
    owner.value = watched = WatchedContainers()
    watched.append(Kind.ATTRIBUTES, owner, ["value", watched, "other", owner.other])
    alive = weakref.ref(owner)
    del owner, watched
    gc.collect()
    assert alive() is None


def test_executed_code_is_logged_once_with_its_globals() -> None:
    """Of this thread, while it is asked for, and not where another profiler would be cut off."""

    def called() -> int:
        return 1

    with executed_code() as executed:
        called()
        called()
    [(code, namespace, in_backward)] = [entry for entry in executed if entry[0].co_name == "called"]
    assert code is called.__code__ and namespace is globals() and not in_backward
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda _: called() and None)
    with torch.autograd.set_multithreading_enabled(False), executed_code() as executed:
        called()
        x.backward(torch.ones(1))
    assert [entry[2] for entry in executed if entry[0] is called.__code__] == [False, True]
    sys.setprofile(lambda *_: None)
    try:
        with executed_code() as executed:
            called()
        assert executed == [] and sys.getprofile() is not None
    finally:
        sys.setprofile(None)
