"""The cost of the largest kernels: the bound as it is, and as it were if they took no more than others."""

from __future__ import annotations

import numpy as np

from disco_accel.graph.taskgraph import TaskGraph
from disco_accel.plan.bound.device_facts import DeviceFacts
from disco_accel.plan.bound.least_copies import least_loads
from disco_accel.plan.bound.ordered_starts import Precedence
from disco_accel.plan.bound.step_program import StepProgram
from disco_accel.simulate.machine import Machine

_SHARE = 0.99


def bound_without_peaks(graph: TaskGraph, machine: Machine) -> float:
    """Return the bound of ``graph`` if no kernel took more bytes than the largest but one in a hundred. A loss in
    chunks has about this bound."""
    precedence = Precedence.of(graph, machine)
    most = 0.0
    for device in graph.devices:
        facts = DeviceFacts(graph, machine, device.id, device.memory)
        if not facts.end or not device.memory:
            continue
        facts.needed = np.minimum(facts.needed, _usual(facts))
        seconds, _ = least_loads(facts)
        most = max(most, sum(facts.seconds) / facts.streams, seconds, StepProgram(facts, precedence).seconds())
    return most


def usual_need(graph: TaskGraph, machine: Machine) -> int:
    """Return the bytes that suffice for ninety-nine in a hundred kernels of ``graph``, inputs and outputs together, on
    the device where these are the most."""
    devices = (device for device in graph.devices if not device.is_host_device)
    every = (DeviceFacts(graph, machine, device.id, device.memory) for device in devices)
    return max((_usual(facts) for facts in every if facts.end), default=0)


def _usual(facts: DeviceFacts) -> int:
    return int(np.quantile(facts.needed, _SHARE))
