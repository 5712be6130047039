"""Values on which kernels are compared, and the memory that their ops take meanwhile."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from disco_accel.fuse.evaluate import evaluate
from disco_accel.fuse.fused_runs import FUSED, NOT_WRITTEN
from disco_accel.graph.taskgraph import OpCall, OpResult, TensorArg, TensorSpec
from disco_accel.measure.drawn_values import KINDS, PATTERNS, Pools, fill, fill_patterns

ELEMENTS = 20_000
"""Of each input; no divisor of 2**16."""


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_input_gets_all_numbers_of_16_bits(half: torch.dtype, dtype: torch.dtype) -> None:
    """Each in its turn, beside normal ones; an input with fewer elements than a result too, as many as they need."""
    everything = torch.arange(PATTERNS, dtype=torch.int32).to(torch.int16).view(half).to(dtype)
    wanted = set(everything[~everything.isnan()].tolist())
    pools: Pools = {}
    for turn, elements in (((0, 3), ELEMENTS), ((2, 3), ELEMENTS), ((1, 3), ELEMENTS // 10)):
        seen: set[float] = set()
        plain = 0
        for draw in range(-(-3 * PATTERNS // ELEMENTS) if elements == ELEMENTS else 70):
            values = torch.empty(elements, dtype=dtype)
            fill(values, "all 16 bits", turn[0], draw, pools)
            before = values.clone()
            fill_patterns(values, half, turn, draw, ELEMENTS, pools)
            seen.update(values[values != before].tolist() + values[values == before].tolist())
            plain += int((values == before).sum())
        assert wanted <= seen
        assert plain > PATTERNS / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_draws_differ_from_each_other_and_between_inputs(dtype: torch.dtype) -> None:
    """Of whole numbers and of truth values too."""
    pools: Pools = {}
    for kind in KINDS:
        drawn = [torch.empty(ELEMENTS, dtype=dtype) for _ in range(3)]
        for values, (number, draw) in zip(drawn, ((0, 0), (0, 1), (1, 0)), strict=True):
            fill(values, kind, number, draw, pools)
        assert not torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
        if kind == "any magnitude" and dtype.is_floating_point:
            assert drawn[0].isnan().any() and drawn[0].isinf().any() and (drawn[0] == 0).any()


class Living(TorchDispatchMode):
    """Counts the memories of results that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[weakref.ref[Any]] = []
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.made.append(weakref.ref(found))
        alive = [tensor for each in self.made if (tensor := each()) is not None]
        self.most = max(self.most, len({tensor.untyped_storage().data_ptr() for tensor in alive}))
        return found


def test_values_inside_a_run_are_released_after_their_last_reader() -> None:
    """A chain of ops holds two of them at a time, and the result that is written."""
    spec = TensorSpec("float32", (8,), (1,))
    outputs = [0 if number == 3 else NOT_WRITTEN for number in range(20)]
    body = [
        OpCall("aten::neg", "default", (TensorArg(number, spec),), (OpResult(output, spec),))
        for number, output in enumerate(outputs)
    ]
    body.append(OpCall("aten::add", "Tensor", (TensorArg(20, spec), TensorArg(1, spec), 1), (OpResult(1, spec),)))
    results = tuple(r for call in body for r in call.results if r is not None and r.output >= 0)
    run = OpCall(FUSED, "default", (TensorArg(0, spec),), results, body=tuple(body))
    given = torch.arange(8.0)
    with Living() as living:
        kept, total = evaluate(run, [given])
    assert torch.equal(kept, given) and torch.equal(total, given - given)
    # The first result is read at the end, and one is written on the way.
    assert living.most == 4
