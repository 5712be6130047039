"""The static judge's demands of values that live over steps and change: the contents of their homes over time.

Each such value has one home, memory of its own on the host. When a step starts it holds the value's first version;
every swap-out of a version writes it, and swap-ins read it; kernels of a host device do both. As in any memory, a
content is read before the next is written. When the step ends it holds the last version, unless the next step finds
that on the device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Set
from functools import partial

from disco_accel.errors import VerifyError
from disco_accel.graph.copies import swaps_in, swaps_out
from disco_accel.graph.taskgraph import Ref
from disco_accel.graph.values import arrives_at_gate, handed_out_at_gate
from disco_accel.verify.judged_plan import Claims, JudgedPlan


def writes_home(plan: JudgedPlan, ref: Ref) -> bool:
    """Whether ``ref`` is a version of a value that changes over steps which its vertex, a swap-out or a kernel of a
    host device, writes at home."""
    goes_home = swaps_out(plan.vertex[ref[0]]) and plan.carried[ref] in plan.state
    return goes_home or ref in plan.home_uses.written


def check_homes(plan: JudgedPlan, order: Mapping[int, int], before: Claims, behind_gate: Set[int]) -> Mapping[Ref, Ref]:
    """Claim that no home is written before its content was read. Returns for each value whose home is written, its
    INPUT's, the swap-out that writes there last. Raises VerifyError."""
    readers = _home_readers(plan)
    has_gate = any(arrives_at_gate(vertex) for vertex in plan.graph.vertices)
    last: dict[Ref, Ref] = {}
    # Invariant: last has the last writer of each home so far; claims say that all users of every former content end
    # before the next is written.
    writes = [(v.id, k) for v in plan.vertex.values() for k in range(len(v.sizes)) if writes_home(plan, (v.id, k))]
    for ref in sorted(writes, key=lambda ref: (order[ref[0]], ref[1])):
        writer, state = ref[0], plan.state[plan.carried[ref]]
        if not plan.size(state):
            continue
        if state not in last and handed_out_at_gate(plan.task[state[0]]) and has_gate and writer not in behind_gate:
            raise VerifyError(f"{plan.name(writer)} overwrites {plan.name(state[0])} before it is handed out")
        former = last.get(state, state)
        for reader in readers[former]:
            # A kernel reads the bytes that it writes over.
            if reader != writer:
                before.claim(reader, writer, partial(_share, plan, reader, writer, state))
        if former != state and not readers[former]:
            before.claim(former[0], writer, partial(_share, plan, former[0], writer, state))
        last[state] = ref
    return last


def check_written_back(plan: JudgedPlan, home_writers: Mapping[Ref, Ref]) -> None:
    """Raise VerifyError unless the next step finds each value that this one changed. Residents of a plan that repeats
    are found on the device; its check is that of weights that do not change."""
    readers = _home_readers(plan)
    for state, versions in plan.versions.items():
        stays = plan.mem.cyclic and state in plan.mem.slots and not readers[state]
        if len(versions) == 1 or stays or not plan.size(state):
            continue
        writer = home_writers.get(state)
        if writer is None or plan.carried[writer] != versions[-1]:
            raise VerifyError(
                f"{plan.name(state[0])} is changed, and its home does not have its last version when the step ends"
            )


def _home_readers(plan: JudgedPlan) -> Mapping[Ref, list[int]]:
    """Return the readers of each content of a home: of a swap-out's or a kernel's, or of that from before the step (an
    INPUT)."""
    readers: dict[Ref, list[int]] = defaultdict(list)
    for vertex in plan.mem.vertices:
        for position, ref in enumerate(vertex.inputs):
            reloads = swaps_in(vertex)
            if (reloads or plan.reads_at_home(vertex.id, position)) and plan.carried[ref] in plan.state:
                readers[ref].append(vertex.id)
    return readers


def _share(plan: JudgedPlan, first: int, then: int, state: Ref) -> str:
    return f"{plan.name(first)} and {plan.name(then)} share the home of {plan.name(state[0])}"
