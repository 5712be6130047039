"""Executor: runs one MemGraph step after step on the C++ engine."""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, NoReturn

import torch

from disco_accel.errors import ExecutionError, Stalled
from disco_accel.execute.addresses import Memory
from disco_accel.execute.arenas import arena_bytes, arenas_of, places_of
from disco_accel.execute.early_end import HUNG, bring_home, failed_vertex, failure, last_error, stalled
from disco_accel.execute.engine_events import Event, events_of
from disco_accel.execute.engine_options import (
    DEFAULT_OPTIONS,
    EngineOptions,
    HostLink,
    engine_links,
    engine_settings,
    first_device,
)
from disco_accel.execute.externals import _EARLY, _LATE, _Externals, externals_of
from disco_accel.execute.kept_values import KeptValues
from disco_accel.execute.launch_graphs import launch_graphs_of
from disco_accel.execute.program import Tables, external_dtypes, lower
from disco_accel.execute.state_homes import StateHomes, homes_of
from disco_accel.execute.varying_kernels import _VaryingKernels, _VaryingPlan
from disco_accel.execute.vertex_names import Describer
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.taskgraph import OpCall, Ref, TensorSpec
from disco_accel.host_limits import require_left
from disco_accel.measure.record import OpRecord
from disco_accel.native.arena import host_arena, touched_bytes
from disco_accel.native.backend import backend_of
from disco_accel.native.engine_class import Engine, OpTable, make_engine, op_table
from disco_accel.native.engine_numbers import EngineStatus
from disco_accel.native.extension import load_extension
from disco_accel.native.host_memory import place_pages
from disco_accel.native.out_of_memory import typed_out_of_memory
from disco_accel.shortage import is_shortage

__all__ = ["EngineOptions", "Event", "Executor", "HostLink", "arena_bytes"]

_SLICE_SECONDS = 0.1
"""A wait returns to Python this often, so that Ctrl-C works."""
_DRAIN_SECONDS = 5.0
"""That a step which has stalled is given to end."""
_loaded: weakref.WeakSet[Executor] = weakref.WeakSet()
"""Executors whose steps are ended before the interpreter goes down, after which nobody can."""


def _engine_of(
    table: OpTable,
    tables: Tables,
    memory: Memory,
    graph: MemGraph,
    places: Mapping[int, torch.device],
    settings: dict[str, float],
    links: list[float],
) -> Engine:
    """The engine of the lowered plan ``tables``. Raises ExecutionError where it refuses them."""
    try:
        return make_engine(
            table,
            tables.vertices,
            tables.edges,
            tables.copied,
            [memory.devices[device.id] for device in graph.devices],
            memory.host,
            list(memory.clean.values()),
            list(memory.states.values()),
            settings,
            links,
            ["" if device.is_host_device else str(places[device.id]) for device in graph.devices],
        )
    except (ValueError, RuntimeError) as error:
        if is_shortage(error):
            raise
        raise ExecutionError(f"the plan cannot be run: {error}") from error


class Executor:
    """Holds the arenas and the engine of one plan.

    A step is ``begin``, ``wait_out``, ``deliver``, ``wait_end``; a plan without late inputs needs no ``deliver``. One
    thread drives it. A failed or abandoned step leaves it ready for the next ``begin``, unless it may have changed a
    state. In a process forked after it was made every use is an ExecutionError, except ``abandon`` and ``close``, which
    do nothing there. What holds of states: ``state_homes.py``.
    """

    @typed_out_of_memory("preparing the engine")
    def __init__(
        self,
        memgraph: MemGraph,
        ops: Mapping[int, OpCall],
        records: Mapping[int, OpRecord],
        *,
        clean: Mapping[int, torch.Tensor],
        states: Mapping[int, torch.Tensor] | None = None,
        options: EngineOptions = DEFAULT_OPTIONS,
        arena: torch.Tensor | Mapping[int, torch.Tensor] | None = None,
        names: Mapping[int, str] | None = None,
        specs: Mapping[int, TensorSpec] | None = None,
        varying: _VaryingPlan | None = None,
    ) -> None:
        """``clean``: INPUT id to a 1-d uint8 tensor over its host bytes, kept alive. ``states``: the same over the home
        of each value that steps change. Bytes of host-updated inputs may be written while no step is running: reloads
        and kernels of host devices read them, and ``wait_end``, ``run_end`` and ``abandon`` return when all have ended.
        ``arena``: device memory from ``device_arena``, at least ``arena_bytes(memgraph)``, or device id to memory; own
        ones where none is given. Executors may share one if one step runs at a time and ``invalidate`` follows
        another's use. On CUDA the caller pins an arena of a host device. ``names`` of INPUT vertices are for messages.
        ``specs`` of external inputs: dtype, shape and strides are checked; without one the dtype is, if all readers
        agree. ``varying``: what depends on a length, which is the longest at first. Raises ConfigError for a bad option
        and ExecutionError for a plan that lacks a call, an address or host bytes.
        """
        load_extension()
        count = sum(not device.is_host_device for device in memgraph.devices)
        settings, links = engine_settings(options), engine_links(options, count)
        device = first_device(options)
        backend = backend_of(device)
        backend.prepare()
        devices = backend.others(options.devices, count)
        self._backends = [backend_of(each) for each in dict.fromkeys(devices)]
        places = places_of(memgraph, devices)
        self._graph, self._options, self._pid = memgraph, options, os.getpid()
        self._describer = Describer(memgraph, ops, names or {})
        homes = homes_of(memgraph.vertices, states or {}, self._describer)
        arenas, made_here = arenas_of(memgraph, arena, places)
        require_left(memgraph.host.memory, "room for offloaded values")
        offloaded = host_arena(memgraph.host.memory)
        if backend.separate_memory:
            place_pages(offloaded, device)
        self._memory = Memory(arenas, offloaded, dict(clean), homes)
        self._pinned = [backend.pin(memory) for memory in (self._memory.host, *made_here)]
        table = op_table(device)
        tables = lower(memgraph, ops, records, self._memory, table, varying.shortest if varying else {})
        self._planned = tables.planned
        self._states = StateHomes(tables.states, homes, self._memory.devices, self._describer, cyclic=memgraph.cyclic)
        self._kept = KeptValues(memgraph, self._memory, self._states)
        self._externals = externals_of(tables.externals, memgraph)
        with backend.current():
            self._engine = _engine_of(table, tables, self._memory, memgraph, places, settings, links)
        self._expect_externals(tables.externals, external_dtypes(memgraph, ops), specs or {})
        self._varying = _VaryingKernels(varying, table, self._engine, tables.externals) if varying else None
        self._running = False
        self._gate_open = False
        _loaded.add(self)

    @property
    def running(self) -> bool:
        """Whether a step was begun that has neither ended nor been abandoned."""
        return self._running

    def set_length(self, length: int) -> None:
        """The next steps run at this length, if the plan is for several. Call between steps."""
        self._require_idle()
        assert self._varying is not None, "the plan is for one length"
        self._varying.set_length(length)

    def begin(self, externals: Mapping[int, torch.Tensor]) -> None:
        """Starts a step and returns at once. ``externals``: every external INPUT that is not late, kept until the end,
        and memory for each transfer to the user's that does not wait for a late one.

        Raises ExecutionError naming the input when one is missing or has another size, dtype or device than planned,
        and when states are not whole (see ``restore_states``).
        """
        self._prepare(externals)
        self._engine.begin()

    def run_out(self, externals: Mapping[int, torch.Tensor]) -> None:
        """``begin`` and ``wait_out`` in one, which lets the calling thread run kernels while it waits."""
        self._prepare(externals)
        self._wait(self._engine.wait_out, self._engine.run_out)

    def wait_out(self) -> None:
        """Returns when every ``out`` vertex has finished. Raises ExecutionError or Stalled. Ctrl-C abandons the
        step."""
        self._require_running()
        self._wait(self._engine.wait_out)

    def release_inputs(self, vertices: Collection[int]) -> None:
        """Once ``wait_out`` or ``run_out`` has returned: nothing that is still to run reads these external inputs."""
        self._require_running()
        self._engine.release([self._externals[_EARLY].storage[vertex] for vertex in vertices])

    def deliver(self, late: Mapping[int, torch.Tensor]) -> None:
        """Opens the gate: the late inputs have arrived, and the memory that transfers behind them write to. The tensors
        are kept until the step ends."""
        self._bind_late(late)
        self._engine.deliver()

    def run_end(self, late: Mapping[int, torch.Tensor]) -> None:
        """``deliver`` and ``wait_end`` in one, which lets the calling thread run kernels while it waits."""
        self._bind_late(late)
        self._wait(self._engine.wait_end, self._engine.run_end)
        self._finish()

    def wait_end(self) -> None:
        """Returns when every vertex has finished. Raises ExecutionError or Stalled; Ctrl-C abandons the step."""
        self._require_running()
        if not self._gate_open:
            raise ExecutionError("the step waits for its late inputs: call deliver() first")
        self._wait(self._engine.wait_end)
        self._finish()

    def abandon(self) -> None:
        """Stops launching and waits for running vertices. Does nothing when no step is running. States are torn if a
        vertex that changes one was launched, also where the step has ended by now. Raises Stalled when a device does
        not end its work; a later call finds out whether it has."""
        if not self._end():
            raise Stalled(f"the step before stopped making progress; {HUNG}")

    def _end(self) -> bool:
        """Whether the step that runs could be ended; if there is none, it could."""
        if self._running and self._pid != os.getpid():
            self._running = False
        while self._running:
            if self._engine.abort(_SLICE_SECONDS):
                self._finish(whole=False)
            elif last_error(self._engine).draining:
                return False
        return True

    def invalidate(self, in_place: Collection[int] = ()) -> None:
        """The host bytes of clean inputs or the arena changed: residents are copied again before the next step, but for
        inputs ``in_place``, whose offsets hold the bytes that the host has. If that step ends early, the one behind it
        copies all. Raises ExecutionError, and does nothing, while resident states are newer than their homes."""
        self._require_own_process()
        self._states.require_stored()
        positions = {vertex.id: i for i, vertex in enumerate(self._graph.vertices)} if in_place else {}
        self._engine.invalidate([positions[vertex] for vertex in in_place])

    def holds_residents(self) -> bool:
        """Whether the residents lie in the arena as the host had them when they were copied: the last step ran to its
        end, and nothing was invalidated since. No executor but this one may have used the arena."""
        return not self._running and self._pid == os.getpid() and bool(self._engine.holds_residents())

    def store_states(self) -> None:
        """Write resident states that are newer than their homes there, between steps: for checkpoints, and before
        others use the arena. Raises StatesTorn after a step that ended with some of its updates done."""
        self._require_idle()
        self._states.store()

    def restore_states(self) -> None:
        """The homes of all states hold right values: the next step starts with these. The device's copies are dropped.
        Call after writing to homes, and after a step that ended with some of its updates done."""
        self._require_idle()
        self._states.restore()
        self._engine.invalidate([])

    def value(self, ref: Ref, spec: TensorSpec) -> torch.Tensor:
        """A kept value, or a state's last version, where it lies after the step (``out`` values: after ``wait_out``).
        It aliases memory that the next step writes: the caller clones. Raises ExecutionError when the plan does not
        keep the value."""
        return self._kept[ref, spec]

    def add_leaving(self, values: Sequence[tuple[Ref, TensorSpec]]) -> int:
        """The number of a group of kept values (see ``value``) that ``leave`` copies out of the arena together."""
        return self._engine.add_leaving([self.value(ref, spec) for ref, spec in values])

    def leave(self, group: int) -> list[torch.Tensor]:
        """Copies of a group's values as the last step left them, on the run's device and nobody else's memory."""
        return self._engine.copies(group)

    def set_tracing(self, on: bool) -> None:
        """Whether the following steps record events. Call between steps."""
        self._require_own_process()
        self._engine.set_tracing(on)

    def events(self) -> list[Event]:
        """Events of the last step, by start; empty unless it was traced. Call between steps."""
        self._require_own_process()
        return events_of(self._engine.events(), self._graph, self._options.compute_streams)

    def counters(self) -> dict[str, int | float]:
        """Sizes in bytes, seconds and counts of the last step. Call between steps; ``touched_bytes`` walks the pages.

        Counts: steps, vertices, launches (of kernels; a graph of several is one), changes (vertices that change a
        state), c10_allocations, planned_allocations. Bytes: arena_bytes, touched_bytes, host_bytes (arenas of host
        devices too), offload_bytes to the host, reload_bytes from it, transfer_bytes between devices. Seconds:
        step_seconds, gate_seconds (waiting for ``deliver``), op_seconds (inside ops on the engine's own thread),
        engine_seconds (its own cost). The last two are measured while tracing, or with ``time_ops``; where ops have
        threads of their own (several devices or streams) they tell nothing.
        """
        self._require_own_process()
        measured = self._engine.counters()
        out: dict[str, int | float] = {k: v if k.endswith("seconds") else int(v) for k, v in measured.items()}
        on_host = {device.id for device in self._graph.devices if device.is_host_device}
        arenas = [arena for device, arena in self._memory.devices.items() if device not in on_host]
        out["arena_bytes"] = sum(arena.numel() for arena in arenas)
        out["host_bytes"] = self._memory.host.numel() + sum(self._memory.devices[i].numel() for i in on_host)
        out["touched_bytes"] = sum(touched_bytes(arena) for arena in arenas)
        out["planned_allocations"] = self._planned
        return out

    def launch_graphs(self) -> dict[str, Any]:
        """The graphs that the plan's kernels are launched as. Call between steps."""
        self._require_own_process()
        return launch_graphs_of(self._engine.launch_graphs())

    def close(self) -> None:
        """Abandons a running step, stores states, frees engine and arenas. Values handed out keep their arena alive."""
        if hasattr(self, "_engine"):
            # Work that a device never ends was told of when it stalled; the engine leaves its memory behind.
            ended = self._end()
            try:
                if ended:
                    # The caller's copies out of the arena, whose memory is others' from now on. Here, where other
                    # threads can run meanwhile; a device that is lost makes none.
                    with suppress(torch.AcceleratorError):
                        for backend in self._backends:
                            backend.synchronize()
                    if self._pid == os.getpid():
                        self._states.store_if_whole()
            finally:
                del self._engine, self._memory, self._states, self._kept

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _require_own_process(self) -> None:
        if self._pid != os.getpid():
            raise ExecutionError(
                f"the engine was started in process {self._pid}, before this process was forked from it, and its "
                "threads stayed there; prepare the model in the process that trains it, or start workers with 'spawn'"
            )

    def _require_idle(self) -> None:
        self._require_own_process()
        if self._running:
            raise ExecutionError("a step is running: wait for its end or abandon it before the next one")

    def _require_running(self) -> None:
        self._require_own_process()
        if not self._running:
            raise ExecutionError("no step is running: call begin() first")

    def _prepare(self, externals: Mapping[int, torch.Tensor]) -> None:
        self._require_idle()
        self._states.before_step()
        self._bind(self._externals[_EARLY], externals)
        self._running, self._gate_open = True, not self._externals[_LATE].vertices

    def _finish(self, whole: bool = True) -> None:
        self._running = False
        self._engine.release_externals()
        if whole:
            self._states.after_step()
        elif self._states.planned.version:
            self._states.after_early_end(int(self._engine.counters()["changes"]))
        if self._states.loads_each_step:
            self._engine.invalidate([])

    def _bind(self, externals: _Externals, given: Mapping[int, torch.Tensor]) -> None:
        try:
            tensors = [given[vertex] for vertex in externals.vertices]
        except KeyError as missing:
            name = self._describer.external(missing.args[0])
            raise ExecutionError(f"no tensor was given for {name}") from None
        refused = self._engine.bind(externals.storages, tensors)
        if refused is not None:
            position, reason = refused
            raise ExecutionError(f"the tensor for {self._describer.external(externals.vertices[position])} {reason}")

    def _expect_externals(
        self, storages: Mapping[int, int], dtypes: Mapping[int, str], specs: Mapping[int, TensorSpec]
    ) -> None:
        for vertex, storage in storages.items():
            spec = specs.get(vertex)
            if spec is not None:
                self._engine.expect_layout(storage, spec.dtype, spec.shape, spec.stride)
            elif vertex in dtypes:
                self._engine.expect_dtype(storage, dtypes[vertex])

    def _bind_late(self, late: Mapping[int, torch.Tensor]) -> None:
        self._require_running()
        if self._gate_open:
            raise ExecutionError("the late inputs of this step were delivered already, or the plan has none")
        self._bind(self._externals[_LATE], late)
        self._gate_open = True

    def _wait(self, poll: Callable[[float], int], first: Callable[[float], int] | None = None) -> None:
        try:
            status = (first or poll)(_SLICE_SECONDS)
            while status == EngineStatus.TIMEOUT:
                status = poll(_SLICE_SECONDS)
        except BaseException:
            self._end()
            raise
        if status != EngineStatus.DONE:
            self._fail()

    def bring_home(self) -> frozenset[int]:
        """After a step that ended early: see ``early_end.bring_home``."""
        self._require_idle()
        ran = [self._engine.ran(i) for i in range(len(self._graph.vertices))]
        return bring_home(self._graph, ran, self._memory.devices, self._states)

    def ops_run_on_host(self) -> int:
        """Kernels of host devices that the last step has run to their end, a step that ended early included."""
        hosts = (i for i, device in enumerate(self._graph.devices) if device.is_host_device)
        return sum(self._engine.ops_run(i) for i in hosts)

    def failed_vertex(self) -> int | None:
        """Id of the vertex whose failure ended the last step; None if it was ended otherwise, or nobody knows."""
        return failed_vertex(last_error(self._engine), self._graph)

    def _fail(self) -> NoReturn:
        error = last_error(self._engine)
        if error.status == EngineStatus.STALLED:
            # A device that hangs may never end its work: it gets some time, and the user the account in any case.
            raise stalled(error, self._describer, self._engine.abort(_DRAIN_SECONDS) and self._end())
        self._end()
        # Whether the device is lost is known when the step has drained.
        raise failure(last_error(self._engine), self._graph, self._describer)


def _end_steps() -> None:
    for executor in list(_loaded):
        executor._end()


atexit.register(_end_steps)
