"""Forwards without gradients that cannot run from a plan: results and side effects are eager's, and each says why."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from disco_accel import stats
from tests.integrate.forward_pairs import Plain, assert_equal, compare, counts, prepared, rows

_factor = 1.0


def test_a_budget_that_is_too_small_is_told_once_and_not_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    eager = Plain(lambda m, x, y: y @ y.t())
    planned = prepared(eager, 300)
    for seed in range(3):
        compare(planned, eager, rows(seed))
    assert counts(planned) == (0, 3)
    assert sum("capturing" in r.message for r in caplog.records) == 1
    (told,) = stats(planned)["fallbacks"]
    needed = int(told.partition("needs at least ")[2].split()[0])
    assert sum("runs without a plan" in r.message for r in caplog.records) == 1
    again = prepared(eager, needed)
    compare(again, eager, rows(0))
    assert counts(again) == (1, 0)


def test_shapes_that_never_repeat_have_eight_plans() -> None:
    """The ninth has none until it comes again. Then plans are made again."""
    eager = Plain(lambda m, x, y: y.relu())
    planned = prepared(eager)
    seen = []
    for count in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 9, 9, 11):
        compare(planned, eager, rows(count, count))
        seen.append(counts(planned))
    assert seen == [*((n, 0) for n in range(1, 9)), (8, 1), (8, 2), (9, 2), (10, 2), (11, 2)]
    (told,) = stats(planned)["fallbacks"]
    assert told.startswith("shapes: the last 8 forwards without gradients had other shapes each")


def _recorded(model: Any) -> list[Any]:
    found: list[Any] = []
    model.linear.register_forward_hook(lambda module, args, output: found.append(output.clone()))
    return found


def test_a_hook_that_collects_tensors_collects_real_ones() -> None:
    eager = Plain(lambda m, x, y: y.relu())
    planned = prepared(eager)
    compare(planned, eager, rows(0))
    ours, theirs = _recorded(planned), _recorded(eager)
    for seed in range(3):
        compare(planned, eager, rows(seed))
    assert_equal(ours, theirs)
    assert counts(planned) == (1, 3)


def _counter(module: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    module.calls = getattr(module, "calls", 0) + 1
    return y * module.calls


def _remembers(module: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    before = getattr(module, "before", torch.zeros_like(y))
    module.before = y.clone()
    return y + before


def _branches(module: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return y * 2 if float(y.sum()) > 0 else y


def _python_random(module: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return y * random.random()


def _writes_buffer(module: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    module.table.add_(1)
    return y * module.table


def _writes_weight(module: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    module.linear.weight.mul_(1.5)
    return y


def _writes_argument(module: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return y + x


def _values(module: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    return y, y.max().item()


def _data_shape(module: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return y[y > 0.2]


_EFFECTS = (_counter, _remembers, _branches, _python_random, _values, _data_shape)
_WRITES = (_writes_buffer, _writes_weight, _writes_argument)


@pytest.mark.parametrize("result", [*_EFFECTS, *_WRITES])
def test_side_effects_happen_at_each_forward(result: Callable[..., Any]) -> None:
    """What the forward leaves behind is eager's after each of five, and so are Python's random numbers."""
    eager = Plain(result)
    planned = prepared(eager)
    generators = []
    for model in (planned, eager):
        random.seed(3)
        values = []
        for seed in range(5):
            x = rows(seed)
            with torch.no_grad():
                values.append(model(x))
            values += [x, model.table.clone(), model.linear.weight.detach().clone()]
            values += [getattr(model, "calls", 0), getattr(model, "before", None)]
        generators.append([values, random.getstate()])
    assert_equal(*generators)
    ran = counts(planned)
    assert ran[0] + ran[1] == 5 and ran[1] >= 3 and stats(planned)["fallbacks"]


def _by_global(module: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return y * _factor


def test_a_global_that_changes_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    eager = Plain(_by_global)
    planned = prepared(eager)
    for factor in (1.0, 2.0, 1.0):
        monkeypatch.setitem(globals(), "_factor", factor)
        compare(planned, eager, rows(int(factor)))
    assert counts(planned) == (3, 0) and stats(planned)["plans"] == 2


def test_batch_norm_in_training_mode_moves_its_statistics() -> None:
    """Under no_grad, too. In evaluation it has a plan."""
    torch.manual_seed(0)
    eager = torch.nn.Sequential(torch.nn.Linear(8, 8).requires_grad_(False), torch.nn.BatchNorm1d(8)).train()
    planned = prepared(eager)
    for seed in range(3):
        compare(planned, eager, rows(seed))
    assert_equal(dict(planned.state_dict()), dict(eager.state_dict()))
    assert counts(planned) == (0, 3)
    planned.eval(), eager.eval()
    compare(planned, eager, rows(4))
    assert counts(planned) == (1, 3)


def test_a_mode_that_sees_every_op_sees_those_of_a_forward() -> None:
    eager = Plain(lambda m, x, y: y @ y.t())
    planned = prepared(eager)
    found = []
    for model in (planned, eager):
        with FlopCounterMode(display=False) as counter:
            compare(model, model, rows(0))
        found.append(counter.get_total_flops())
    assert found[0] == found[1] > 0
    assert counts(planned) == (0, 2)


def test_on_unsupported_error_is_about_training_steps() -> None:
    """A forward without gradients runs, and says why without a plan."""
    eager = Plain(_branches)
    planned = prepared(eager, on_unsupported="error")
    compare(planned, eager, rows(0))
    assert counts(planned) == (0, 1)
