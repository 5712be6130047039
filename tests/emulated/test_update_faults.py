"""Optimizers on the host beside a GPU: page-locked copies alone, and a GPU that fails or hangs between updates."""

from __future__ import annotations

import pytest
import torch

from disco_accel.errors import DeviceLost, Stalled, StatesTorn
from disco_accel.execute.executor import EngineOptions, Executor
from disco_accel.native.engine_class import op_table
from tests.emulated import device
from tests.emulated.models import CUDA
from tests.execute.host_programs import FORMS, Homes, HostRun
from tests.execute.programs import Builder, assert_bits, build, bump_plan, measured, step

_OPTIONS = EngineOptions(device="cuda", stall_timeout=0.5)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_and_weights_move_between_page_locked_memory_alone(form: str) -> None:
    """The arena of the host device is page-locked by whoever makes it, so that no copy holds the launches up."""
    with HostRun(FORMS[form], "least", _OPTIONS, Homes.pinned(CUDA)) as run:
        run.step(0)
        externals = run.training.externals(1)
        torch.cuda.synchronize()
        device.reset()
        run.executor.begin(externals)
        run.executor.wait_end()
        copies = {name: count for name, count in device.counts().items() if name.startswith("copy")}
        assert copies and not any("pageable" in name for name in copies), copies


def test_what_ops_of_the_gpu_allocate_on_the_host_is_no_part_of_their_plans() -> None:
    """Fused attention makes two numbers there, and a product with a number may copy that: once a host device was used,
    the allocator there asks for planned addresses, too."""
    op_table(CUDA).set_host()

    def program(b: Builder, g: torch.Generator) -> None:
        query = b.input(torch.randn(1, 2, 8, 16, generator=g))
        attended = b.call("_scaled_dot_product_efficient_attention", query, query, query, None, True)[0]
        b.call("mul.Tensor", attended, 2.0, keep="doubled")

    first = build(program, 0, CUDA)
    graph, records = measured(first)
    for record in records.values():
        assert not {a.output for a in record.allocations} & {None, *record.elsewhere}, records
    with Executor(bump_plan(graph), graph.ops, records, clean={}, options=_OPTIONS) as executor:
        for seed in range(3):
            inputs = build(program, seed, CUDA)
            assert_bits(step(executor, inputs), inputs)
        assert executor.counters()["c10_allocations"] == 0


def test_a_lost_gpu_leaves_updates_of_its_step_torn() -> None:
    """The first layer's update came before the product that fails."""
    with HostRun(FORMS["head"], "least", _OPTIONS, Homes.pinned(CUDA)) as run:
        run.step(0)
        externals = run.training.externals(1)
        torch.cuda.synchronize()
        device.inject_fault("aten::mm", nth=1)
        run.executor.begin(externals)
        with pytest.raises(DeviceLost, match="illegal memory access"):
            run.executor.wait_end()
        with pytest.raises(StatesTorn, match="begun to change"):
            run.executor.begin(externals)


def test_a_gpu_that_hangs_is_reported_and_its_step_can_be_done_again() -> None:
    """Updates of that step were done: they are put right, and training goes on."""
    with HostRun(FORMS["head"], "least", _OPTIONS, Homes.pinned(CUDA)) as run:
        run.step(0)
        externals = run.training.externals(1)
        torch.cuda.synchronize()
        device.inject_hang("aten::mm", nth=1)
        run.executor.begin(externals)
        with pytest.raises(Stalled, match=r"in flight .*aten::mm.*has not ended that work"):
            run.executor.wait_end()
        device.release()
        run.executor.abandon()
        with pytest.raises(StatesTorn, match="begun to change"):
            run.executor.begin(externals)
        run.restore()
        run.step(1)
        run.assert_homes()
