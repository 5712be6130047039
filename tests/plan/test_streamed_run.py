"""A streamed run loads, and lets leave, the weights that a look at all kernels and weights chooses."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator

import pytest

from disco_accel.graph.order import serial_order
from disco_accel.graph.spaces import BETWEEN_DEVICES, TO_DEVICE, TO_HOST
from disco_accel.graph.taskgraph import TaskGraph
from disco_accel.plan.common import streamed_run
from disco_accel.plan.common.streamed_run import _StreamedRun, _Weights, streamed_starts
from disco_accel.simulate.machine import Link, Machine
from tests.support.graphs.pipeline_graph import PipelineShape, pipeline_graph
from tests.support.graphs.strategies import Shape, random_taskgraph, with_working_sets

SLOW = Machine(links={TO_DEVICE: Link(2e3, 1e-3), TO_HOST: Link(2e3, 1e-3), BETWEEN_DEVICES: Link(1e4, 1e-3)})


class PlainRun(_StreamedRun):
    """Looks at each device after each event, at all kernels of its window and at all weights there."""

    left = 0
    """Weights that have left so far."""

    def _go_on(self) -> None:
        for own in self.weights.values():
            own.settled = False
        super()._go_on()

    def _load(self, device: int, own: _Weights) -> None:
        waiting = [at for at in own.kernels if self.plan.ids[at] not in self.started_ids][: streamed_run._WINDOW]
        at = next((at for at in waiting if not own.there.issuperset(self.reads[at])), None)
        if at is None:
            return
        missing = next(each for each in self.reads[at] if each not in own.there)
        idle = [each for each in own.there if not own.used[each] and own.next_reader(each) > at]
        idle.sort(key=lambda each: (own.next_reader(each), each))
        while own.room < self.size[missing] and idle:
            out = idle.pop()
            own.there.discard(out)
            own.room += self.size[out]
            self.left += 1
        if own.room >= self.size[missing]:
            own.room -= self.size[missing]
            own.coming = missing
            seconds = self.machine.link(TO_DEVICE).seconds(self.size[missing], device)
            heapq.heappush(self.events, (self.now + seconds, -1, device))

    @property
    def started_ids(self) -> set[int]:
        return {self.plan.ids[at] for at in self.started}


def plain_run(graph: TaskGraph, machine: Machine) -> PlainRun:
    order = serial_order(graph)
    room = {device.id: device.memory - streamed_run._others(order, device.id) for device in graph.devices}
    return PlainRun(graph, order, machine, room)


def graphs() -> Iterator[tuple[TaskGraph, Machine]]:
    for seed in range(60):
        rng = random.Random(seed)
        shape = rng.choice((Shape(vertices=48, devices=3), Shape(vertices=60, devices=8), Shape(vertices=30)))
        yield with_working_sets(random_taskgraph(rng, shape), rng.choice((1.0, 1.3, 2.0))), SLOW
    pipeline = PipelineShape(stages=2, parts=4, layers=6, weight=256 << 20)
    for share in (0.3, 0.6):
        yield pipeline_graph(pipeline, int(share * pipeline.held)), Machine()


@pytest.mark.parametrize("window", [2, 5, 256])
def test_it_starts_what_a_look_at_everything_starts(monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    monkeypatch.setattr(streamed_run, "_WINDOW", window)
    streamed = left = 0
    for graph, machine in graphs():
        starts = streamed_starts(graph, machine)
        if starts is None:
            continue
        plain = plain_run(graph, machine)
        assert starts == plain.starts()
        streamed, left = streamed + 1, left + plain.left
    assert streamed >= 20 and left >= 20
