"""What recording finds out about an op, and that the plan's extra outputs follow from it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from disco_accel.errors import CaptureError, ExecutionError
from disco_accel.execute.executor import Executor
from disco_accel.graph.taskgraph import VertexKind
from disco_accel.measure.record import OpRecord, _Allocation, apply, record
from disco_accel.native import host_backend
from disco_accel.native.op_encoding import out_overload
from tests.execute import samples
from tests.execute.programs import Builder, assert_bits, build, bump_plan, measured, step


def _record_of(name: str, *args: object, **kwargs: Any) -> OpRecord:
    builder = Builder()
    given = [builder.input(a) if isinstance(a, torch.Tensor) else a for a in args]
    builder.call(name, *given, **kwargs)
    return record(builder.graph())[len(builder.vertices) - 1]


def test_native_out_overloads_allocate_nothing() -> None:
    """mm, add, softmax, cat and reductions write straight into their slot."""
    x = torch.randn(16, 16)
    for name, args in [
        ("mm", (x, x)),
        ("add.Tensor", (x, x)),
        ("_softmax", (x, -1, False)),
        ("sum.dim_IntList", (x, [0], True)),
        ("rsqrt", (x,)),
    ]:
        found = _record_of(name, *args)
        assert (found.native_out, found.allocations, found.scratch_bytes) == (True, (), 0), name
        assert found.seconds > 0


def test_generated_out_overloads_are_not_used() -> None:
    """They call the functional op and copy, so the functional call is planned instead."""
    assert out_overload("aten::_to_copy", "default") is None
    assert out_overload("aten::embedding", "default") is None
    found = _record_of("_to_copy", torch.randn(8, 8), dtype=torch.bfloat16)
    assert not found.native_out
    assert found.allocations == (_Allocation(128, 0),)


def test_outputs_and_temporaries_are_told_apart() -> None:
    """Layer norm's three outputs are its own; flash attention's buffers go to the scratch, apart from each other."""
    norm = _record_of("native_layer_norm", torch.randn(4, 8), [8], torch.randn(8), torch.randn(8), 1e-5)
    assert [a.output for a in norm.allocations] == [0, 1, 2] and norm.scratch_bytes == 0
    q = torch.randn(1, 2, 16, 8)
    attention = _record_of("_scaled_dot_product_flash_attention_for_cpu", q, q, q, 0.0, True)
    temporary = [a for a in attention.allocations if a.output is None]
    assert sorted(a.output for a in attention.allocations if a.output is not None) == [0, 1]
    assert temporary and attention.scratch_bytes >= max(a.offset + a.nbytes for a in temporary)
    assert attention.scratch_bytes % 64 == 0


def test_temporaries_that_live_together_do_not_overlap() -> None:
    """A sort allocates several temporaries; those alive at once get disjoint room, later ones reuse it."""
    found = _record_of("sort.stable", torch.randn(64, 32).t(), stable=True, dim=0, descending=False)
    assert not found.native_out or found.scratch_bytes >= 0
    total = sum(a.nbytes for a in found.allocations if a.output is None)
    assert found.scratch_bytes <= -(-total // 64) * 64 + 64 * len(found.allocations)


def test_equal_signatures_share_one_record() -> None:
    """Layers of the same shape are measured once."""
    graph = build(samples.dense).graph()
    records = record(graph)
    mms = [records[v.id] for v in graph.vertices if v.op == "aten::mm" and graph.ops[v.id].module]
    assert len(mms) == 4 and all(r is mms[0] for r in mms)


def _products(size: int, weights: int) -> Builder:
    builder = Builder()
    x = builder.input(torch.randn(4, size))
    for _ in range(weights):
        x = builder.call("mm", x, builder.weight(torch.randn(size, size)))
    return builder


def test_kernels_of_a_step_that_does_not_fit_the_cache_are_timed_with_cold_ones() -> None:
    """All graphs that share records have the caches of the first. For cold ones all bytes of a buffer larger than the
    cache are written before each of 5 to 15 runs."""
    backend, found = host_backend.HostBackend(torch.device("cpu")), list[bool]()
    assert not backend.displaces(3 * 4 * 64 * 64)
    many = next(n for n in range(4, 1 << 16) if backend.displaces(n * 4 * 64 * 64))
    backend.release_memory()
    for first, second in ((many, 2), (2, many)):
        known: dict[Any, OpRecord] = {}
        for weights in (first, second):
            record(_products(64, weights).graph(), known=known)
        found += [cold for _, _, cold, _ in known]
    assert found == [True, False]
    others = host_backend._others(2 * host_backend._core_cache_bytes() * torch.get_num_threads())
    assert 5 <= int(others[0]) <= 15 and bool((others == others[0]).all())
    assert backend.displaces(others.nbytes)


def test_apply_appends_scratch_and_durations() -> None:
    """Vertices that need scratch get one more output; every kernel gets a duration; nothing else changes."""
    builder = build(samples.language_model)
    graph, records = measured(builder)
    for before, after in zip(builder.vertices, graph.vertices, strict=True):
        if before.kind is not VertexKind.KERNEL:
            assert before == after
            continue
        scratch = records[before.id].scratch_bytes
        assert after.sizes == before.sizes + ((scratch,) if scratch else ())
        assert after.duration == pytest.approx(records[before.id].seconds, rel=0.05)
        assert after.duration == float(f"{after.duration:.1e}")
    assert any(r.scratch_bytes for r in records.values())
    assert apply(builder.graph(), {}) == builder.graph()


def test_an_op_that_fails_while_measured_names_itself_and_its_module() -> None:
    """mm over shapes that do not fit, as a broken capture would give."""
    builder = Builder()
    x = builder.input(torch.randn(4, 8))
    builder.call("mm", x, x.view(lambda t: t.t()), module="model.q_proj")
    call = builder.ops[1]
    builder.ops[1] = replace(call, args=(call.args[0], call.args[0]))
    with pytest.raises(CaptureError, match=r"measuring aten::mm in model\.q_proj failed: .*shapes"):
        record(builder.graph())


def test_a_result_of_another_shape_or_dtype_than_captured_is_an_error() -> None:
    """The captured spec is a promise: an op that returns something else is refused by name."""
    builder = Builder()
    builder.call("embedding", builder.input(torch.randn(4, 8)), builder.input(torch.zeros(3, dtype=torch.int64)))
    call = builder.ops[2]
    first = call.results[0]
    assert first is not None
    wrong = replace(first, spec=replace(first.spec, shape=(6, 4), stride=(4, 1)))
    builder.ops[2] = replace(call, results=(wrong,))
    with pytest.raises(CaptureError, match=r"aten::embedding returned float32\[3, 8\], but float32\[6, 4\]"):
        record(builder.graph())


def test_a_result_in_another_layout_is_copied_into_its_slot() -> None:
    """Where the op lays its result out otherwise than captured, the planned layout holds the same values."""

    def program(b: Builder, g: torch.Generator) -> None:
        x = b.input(torch.randn(4, 6, generator=g).t())
        b.call("embedding", x, b.input(torch.tensor([1, 3])), keep="y")

    builder = build(program)
    kernel = builder.vertices[-1].id
    result = builder.ops[kernel].results[0]
    assert result is not None
    turned = replace(result, spec=replace(result.spec, stride=(1, 2)))
    builder.ops[kernel] = replace(builder.ops[kernel], results=(turned,))
    graph, records = measured(builder)
    assert records[kernel].scratch_bytes > 0
    with Executor(bump_plan(graph), graph.ops, records, clean=builder.clean) as executor:
        step(executor, builder)
        got = executor.value((kernel, 0), turned.spec)
        assert got.stride() == (1, 2)
        assert torch.equal(got, builder.results["y"].tensor)


def test_a_call_that_allocates_otherwise_than_recorded_fails_by_name() -> None:
    """Sizes that do not match the record stop the step: no silent fallback to the allocator."""
    builder = build(samples.language_model)
    graph, records = measured(builder)
    kernel = next(v.id for v in graph.vertices if v.op == "aten::embedding")
    wrong = replace(records[kernel], allocations=(_Allocation(64, 0),))
    more = replace(records[kernel], allocations=(*records[kernel].allocations, _Allocation(64, 0)))
    for record_, message in ((wrong, "asks for 4096 bytes where 64 were recorded"), (more, "1 allocations where 2")):
        changed = {**records, kernel: record_}
        executor = Executor(bump_plan(graph), graph.ops, changed, clean=builder.clean)
        with executor, pytest.raises(ExecutionError, match=f"aten::embedding in embed: .*{message}"):
            step(executor, builder)
    with Executor(bump_plan(graph), graph.ops, records, clean=builder.clean) as executor:
        assert_bits(step(executor, builder), builder)
