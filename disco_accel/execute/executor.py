"""Executor: runs one MemGraph step after step on the C++ engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType

import torch

from disco_accel.errors import ConfigError, ExecutionError, Stalled
from disco_accel.execute.arena import alias, device_arena, host_arena, touched_bytes
from disco_accel.execute.build_ext import load_extension
from disco_accel.execute.cuda import pin, prepare_device, run_device
from disco_accel.execute.encode import label
from disco_accel.execute.program import Lowering, Memory
from disco_accel.execute.record import OpRecord
from disco_accel.execute.residence import Residence, final_residence
from disco_accel.memgraph import MemGraph
from disco_accel.taskgraph import OpCall, Ref, TensorSpec, VertexKind

_DISPATCH = {"priority": 0, "random": 1, "fixed": 2, "synchronous": 3}
_DONE, _TIMEOUT, _FAILED, _STALLED, _ABORTED, _IDLE = range(6)
_SLICE_SECONDS = 0.1
"""A wait returns to Python this often, so that Ctrl-C works."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How the engine runs a plan. The results never depend on it, only their timing."""

    device: str = "cpu"
    """``cpu`` (host device) or ``cuda``."""
    lookahead: int = 2
    """Kernels queued on a stream beyond the running one; 0 launches after completion, as in the paper."""
    dispatch: str = "priority"
    """``priority``, ``random``, ``fixed``, or ``synchronous`` (one vertex at a time in serial order)."""
    seed: int = 0
    """Of random dispatch."""
    link_bandwidth: float | None = None
    """Bytes per second and direction, host device only; None = as fast as memcpy."""
    link_latency: float = 0.0
    """Seconds per copy, host device only."""
    compute_threads: int | None = None
    """Intra-op threads of a compute stream; None = torch.get_num_threads()."""
    compute_streams: int = 1
    stall_timeout: float = 120.0
    """Seconds without any progress after which a step counts as stalled."""


@dataclass(frozen=True, slots=True)
class Event:
    """One vertex of a traced step. ``lane`` is ``compute<n>``, ``h2d``, ``d2h`` or ``p2p``.

    Times are seconds from begin.
    """

    vertex: int
    lane: str
    issue: float
    start: float
    end: float
    bytes: int


def arena_bytes(memgraph: MemGraph) -> int:
    """Bytes of device memory that the plan uses: the end of its highest slot."""
    return max((slot.addr + slot.size for slot in memgraph.slots.values()), default=0)


class Executor:
    """Holds the arenas and the engine of one plan.

    A step is ``begin``, ``wait_out``, ``deliver``, ``wait_end``; a plan without late inputs needs no ``deliver``. One
    thread drives it. A failed or abandoned step leaves it ready for the next ``begin``.
    """

    def __init__(
        self,
        memgraph: MemGraph,
        ops: Mapping[int, OpCall],
        records: Mapping[int, OpRecord],
        *,
        clean: Mapping[int, torch.Tensor],
        options: EngineOptions = EngineOptions(),
        arena: torch.Tensor | None = None,
    ) -> None:
        """``clean``: INPUT id to a 1-d uint8 tensor over its host bytes, kept alive.

        ``arena``: device memory to use, at least ``arena_bytes(memgraph)``; None = an own one. Executors may share one
        as long as one step runs at a time and ``invalidate`` is called when another has used it in between.
        Raises ConfigError for a bad option and ExecutionError for a plan that lacks a call, an address or host bytes.
        """
        load_extension()
        settings = _settings(options)
        device = run_device(options.device)
        if device.type == "cuda":
            prepare_device(device)
        self._graph, self._calls, self._options = memgraph, ops, options
        if arena is None:
            arena = device_arena(arena_bytes(memgraph), device)
        elif arena.numel() < arena_bytes(memgraph):
            raise ExecutionError(f"the arena has {arena.numel()} bytes, the plan needs {arena_bytes(memgraph)}")
        self._memory = Memory(arena, host_arena(memgraph.host_memory), dict(clean))
        self._pinned = pin(self._memory.host) if device.type == "cuda" else None
        self._table = torch.classes.disco_accel.Ops(str(device))
        tables = Lowering(memgraph, ops, records, self._memory, self._table).run()
        self._planned = tables.planned
        late = {v.id for v in memgraph.vertices if v.late}
        self._early = {k: s for k, s in tables.externals.items() if k not in late}
        self._late = {k: s for k, s in tables.externals.items() if k in late}
        keep = [self._memory.device, self._memory.host, *self._memory.clean.values()]
        try:
            self._engine = torch.classes.disco_accel.Engine(self._table, tables.vertices, tables.edges, keep, settings)
        except (ValueError, RuntimeError) as error:
            raise ExecutionError(f"the plan cannot be run: {error}") from error
        self._values: dict[tuple[Ref, TensorSpec], torch.Tensor] = {}
        self._where: dict[Ref, Residence] = {}
        self._running = False
        self._gate_open = False

    @property
    def running(self) -> bool:
        """Whether a step was begun that has neither ended nor been abandoned."""
        return self._running

    def begin(self, externals: Mapping[int, torch.Tensor]) -> None:
        """Starts a step and returns at once. ``externals``: every external INPUT that is not late, kept until the end.

        Raises ExecutionError naming the input when one is missing or has another size or device than planned.
        """
        if self._running:
            raise ExecutionError("a step is running: wait for its end or abandon it before the next one")
        self._bind(self._early, externals)
        self._running, self._gate_open = True, not self._late
        self._engine.begin()

    def wait_out(self) -> None:
        """Returns when every ``out`` vertex has finished. Raises ExecutionError or Stalled.

        Ctrl-C abandons the step.
        """
        self._require_running()
        self._wait(self._engine.wait_out)

    def deliver(self, late: Mapping[int, torch.Tensor]) -> None:
        """Opens the gate: the late inputs have arrived. The tensors are kept until the step ends."""
        self._require_running()
        if self._gate_open:
            raise ExecutionError("the late inputs of this step were delivered already, or the plan has none")
        self._bind(self._late, late)
        self._gate_open = True
        self._engine.deliver()

    def wait_end(self) -> None:
        """Returns when every vertex has finished. Raises ExecutionError or Stalled; Ctrl-C abandons the step."""
        self._require_running()
        if not self._gate_open:
            raise ExecutionError("the step waits for its late inputs: call deliver() first")
        self._wait(self._engine.wait_end)
        self._finish()

    def abandon(self) -> None:
        """Stops launching and waits for what runs. Does nothing when no step is running."""
        if self._running:
            while not self._engine.abort(_SLICE_SECONDS):
                pass
            self._finish()

    def invalidate(self) -> None:
        """The host bytes of clean inputs changed: residents are copied again before the next step."""
        self._engine.invalidate()

    def value(self, ref: Ref, spec: TensorSpec) -> torch.Tensor:
        """A kept value where it lies after the step (for ``out`` values: after ``wait_out``).

        It aliases memory that the next step writes: the caller clones. Raises ExecutionError when the plan does not
        keep the value.
        """
        cached = self._values.get((ref, spec))
        if cached is None:
            where = self._where.get(ref) or final_residence(self._graph, ref)
            self._where[ref] = where
            arena = self._memory.host if where.on_host else self._memory.device
            cached = self._values[ref, spec] = alias(arena, where.offset, where.size, spec)
        return cached

    def set_tracing(self, on: bool) -> None:
        """Whether the following steps record events. Call between steps."""
        self._engine.set_tracing(on)

    def events(self) -> list[Event]:
        """Events of the last step, by start; empty unless it was traced. Call between steps."""
        streams = self._options.compute_streams
        lanes = [*(f"compute{i}" for i in range(streams)), "h2d", "d2h", "p2p"]
        ids = [v.id for v in self._graph.vertices]
        return [
            Event(ids[v], lanes[stream], issue * 1e-9, start * 1e-9, end * 1e-9, nbytes)
            for v, _, stream, issue, start, end, nbytes in self._engine.events().tolist()
        ]

    def counters(self) -> dict[str, int | float]:
        """Sizes in bytes, seconds and counts of the last step. Call between steps; ``touched_bytes`` walks the pages.

        Keys: steps, vertices, arena_bytes, touched_bytes, host_bytes, offload_bytes, reload_bytes, c10_allocations,
        planned_allocations, step_seconds, gate_seconds (waiting for ``deliver``), op_seconds, engine_seconds (the
        engine's own time; like op_seconds it is measured while tracing).
        """
        measured = self._engine.counters()
        out: dict[str, int | float] = {k: v if k.endswith("seconds") else int(v) for k, v in measured.items()}
        out["arena_bytes"] = self._memory.device.numel()
        out["host_bytes"] = self._memory.host.numel()
        out["touched_bytes"] = touched_bytes(self._memory.device)
        out["planned_allocations"] = self._planned
        return out

    def close(self) -> None:
        """Abandons a running step and frees engine and arenas. Values handed out keep their arena alive."""
        if hasattr(self, "_engine"):
            self.abandon()
            del self._engine, self._table, self._memory
            self._values.clear()

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _require_running(self) -> None:
        if not self._running:
            raise ExecutionError("no step is running: call begin() first")

    def _finish(self) -> None:
        self._running = False
        self._engine.release_externals()

    def _bind(self, storages: Mapping[int, int], given: Mapping[int, torch.Tensor]) -> None:
        missing = [k for k in storages if k not in given]
        if missing:
            raise ExecutionError(f"no tensor was given for external input {missing[0]}")
        ids = list(storages)
        try:
            self._engine.bind([storages[k] for k in ids], [given[k] for k in ids])
        except RuntimeError as error:
            position, _, message = str(error).partition(":")
            if not position.isdigit():
                raise
            raise ExecutionError(f"the tensor for external input {ids[int(position)]} {message}") from error

    def _wait(self, poll: Callable[[float], int]) -> None:
        try:
            status = poll(_SLICE_SECONDS)
            while status == _TIMEOUT:
                status = poll(_SLICE_SECONDS)
        except BaseException:
            self.abandon()
            raise
        if status != _DONE:
            self._fail()

    def _fail(self) -> None:
        status, position, message = self._engine.last_error()
        self.abandon()
        if status == _STALLED:
            raise Stalled(f"the step stopped making progress: {self._name_vertices(message)}")
        if position < 0:
            raise ExecutionError(f"the step was ended early: {message}")
        vertex = self._graph.vertices[position]
        what = vertex.op or vertex.kind.name.lower()
        # The op's own message already begins with its name and module.
        detail = message if vertex.kind is VertexKind.KERNEL else f"{what}: {message}"
        raise ExecutionError(f"vertex {vertex.id} failed: {detail}")

    def _name_vertices(self, message: str) -> str:
        """Explains the first few positions that the engine's message mentions by id and op."""
        known: list[str] = []
        for word in message.replace(",", " ").replace(";", " ").split():
            if word.isdigit() and int(word) < len(self._graph.vertices) and len(known) < 8:
                vertex = self._graph.vertices[int(word)]
                call = self._calls.get(vertex.id)
                known.append(f"{word} = vertex {vertex.id} {label(call) if call else vertex.kind.name.lower()}")
        return f"{message} ({'; '.join(known)})" if known else message


def _settings(options: EngineOptions) -> dict[str, float]:
    """The options as the numbers that the engine reads. Raises ConfigError naming the option."""
    if options.dispatch not in _DISPATCH:
        raise ConfigError(f"dispatch is '{options.dispatch}', but it is one of {', '.join(_DISPATCH)}")
    for name in ("lookahead", "seed", "link_latency", "stall_timeout"):
        if getattr(options, name) < 0:
            raise ConfigError(f"{name} is {getattr(options, name)}, but it cannot be negative")
    if options.link_bandwidth is not None and options.link_bandwidth <= 0:
        raise ConfigError(f"link_bandwidth is {options.link_bandwidth}, but it is bytes per second above 0, or None")
    threads = torch.get_num_threads() if options.compute_threads is None else options.compute_threads
    if threads < 1 or options.compute_streams < 1:
        raise ConfigError("compute_threads and compute_streams are at least 1")
    return {
        "dispatch": float(_DISPATCH[options.dispatch]),
        "seed": float(options.seed),
        "lookahead": float(options.lookahead),
        "stall_timeout": options.stall_timeout,
        "time_ops": 0.0,
        "compute_threads": float(threads),
        "compute_streams": float(options.compute_streams),
        "link_bandwidth": options.link_bandwidth or 0.0,
        "link_latency": options.link_latency,
    }
