"""The table of op traits names ops of PyTorch, and says of each what PyTorch and the engine say."""

from __future__ import annotations

import pytest
import torch

from disco_accel.graph.op_traits import OP_TRAITS, _OpTraits, op_traits
from disco_accel.native.extension import load_extension
from disco_accel.native.op_encoding import op_overload, out_overload


def test_every_name_in_the_table_is_an_op_of_pytorch() -> None:
    """Or of bitsandbytes, where that is installed (tests/emulated/test_quantised.py)."""
    schemas = {schema.name for schema in torch._C._jit_get_all_schemas()}
    assert not {name for name in OP_TRAITS if not name.startswith("bitsandbytes::")} - schemas
    assert op_traits("aten::no_such_op") == _OpTraits()


def test_every_row_says_something() -> None:
    assert all(traits != _OpTraits() for traits in OP_TRAITS.values())


def test_every_overload_that_the_table_names_exists() -> None:
    for name, traits in OP_TRAITS.items():
        for overload in (*traits.direct, *traits.same_calls):
            op_overload(name, overload)
        for overload, (other, other_overload) in traits.same_calls.items():
            assert out_overload(other, other_overload) is not None, f"{name}.{overload} gains nothing"


def test_an_op_that_moves_elements_is_computed_directly() -> None:
    """Nothing else runs its generated out overload."""
    for name, traits in OP_TRAITS.items():
        if traits.moves:
            assert traits.direct == ("out",), name
            assert torch.Tag.generated in op_overload(name, "out").tags, name


def test_the_engine_knows_by_name_what_the_table_says() -> None:
    load_extension()
    direct = {f"{name}.{overload}" for name, traits in OP_TRAITS.items() for overload in traits.direct}
    assert set(torch.ops.disco_accel.direct_ops()) == direct
    wrapped = {name for name, traits in OP_TRAITS.items() if traits.wraps_numbers}
    assert set(torch.ops.disco_accel.number_wrapping_ops()) == wrapped


@pytest.mark.parametrize("name", [name for name, traits in OP_TRAITS.items() if traits.same_calls])
def test_an_op_and_the_one_that_stands_for_it_give_the_same_bits(name: str) -> None:
    x = torch.randn(3, 5)
    for overload, same in op_traits(name).same_calls.items():
        args = (x, 0.1) if overload == "Scalar" else (x,)
        assert torch.equal(op_overload(name, overload)(*args), op_overload(*same)(*args))
