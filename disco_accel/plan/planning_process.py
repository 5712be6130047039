"""Plans that a process of its own makes, so that the one that trains keeps its interpreter and its cores.

A search is Python: in a thread it takes the interpreter's lock from the steps, which then take two to five times as
long (a captured step of 1,748 kernels, two cores). The process gets a graph and settings as JSON, runs at the lowest
priority, and answers with a plan or a refusal; the caller takes all vertices from its own graph and has to verify.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from disco_accel.errors import BudgetTooSmall, DiscoError, GraphFileError, PlanError
from disco_accel.graph.files import memgraph_from_json, taskgraph_from_json
from disco_accel.graph.graph_json import memgraph_to_object, taskgraph_to_object
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.spaces import ROUTE_OF
from disco_accel.graph.strict_json import parse_json
from disco_accel.graph.taskgraph import OpCall, OpResult, RngSite, TaskGraph, TensorSpec
from disco_accel.graph.value_numbering import graph_of_plan
from disco_accel.plan.infeasible import Infeasible
from disco_accel.plan.keep_or_recompute import decide
from disco_accel.plan.plan_cache import with_own_vertices
from disco_accel.plan.search_work import SearchWork
from disco_accel.simulate.machine import Link, Machine
from disco_accel.threads import start_thread

_LOWEST = 19
"""The lowest priority, as ``nice`` counts them."""

_RESULTS = {False: (), True: (OpResult(0, TensorSpec("uint8", (), ())),)}
"""In the place of a call's results, which the number of the call tells apart."""

_PROGRAM = "import sys; sys.path[:0] = sys.argv[1:]; from disco_accel.plan.planning_process import main; main()"


class PlanningProcess:
    """Runs one process at a time, each for one plan. ``stop`` ends it from another thread."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._lock, self._stopped = threading.Lock(), False

    def plan(
        self,
        graph: TaskGraph,
        *,
        planner: str,
        policy: str,
        machine: Machine | None,
        work: SearchWork,
        recompute: str,
        offered: Collection[int],
        host_memory: int,
    ) -> MemGraph:
        """As ``decide``; the plan is not verified, and of a graph that ``graph_of_plan`` tells.

        Raises:
            BudgetTooSmall: as ``decide``, and Infeasible.
            PlanError: the process ended without an answer, or was stopped.
        """
        request = {
            "graph": taskgraph_to_object(graph),
            "calls": _calls_to_list(graph),
            "planner": planner,
            "policy": policy,
            "seconds": work.limit,
            "names_needed": work.names_needed,
            "machine": None if machine is None else _machine_to_object(machine),
            "recompute": recompute,
            "offered": sorted(offered),
            "host_memory": host_memory,
        }
        top = parse_json(self._answer(json.dumps(request, separators=(",", ":")).encode()))
        if not isinstance(top, dict):
            raise GraphFileError("the answer of a planning process is no object")
        if (refusal := top.get("refused")) is not None:
            raise _refusal(refusal)
        plan = memgraph_from_json(top.get("plan"))
        if plan.devices != graph.devices or not plan.cyclic:
            raise PlanError("a planning process answered for other devices")
        work.cut = top.get("cut") is True
        return with_own_vertices(plan, graph_of_plan(graph, plan.vertices) or graph)

    def _answer(self, request: bytes) -> bytes:
        with self._lock:
            if self._stopped:
                raise PlanError("planning was stopped")
            command = [sys.executable, "-c", _PROGRAM, str(Path(__file__).parents[2])]
            try:
                self._child = child = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
                )
            except OSError as error:
                raise PlanError(f"no planning process can be started: {error.strerror or error}") from error
        answer, complaint = child.communicate(request)
        with self._lock:
            self._child = None
            if self._stopped:
                raise PlanError("planning was stopped")
        if child.returncode != 0:
            last = complaint.decode(errors="replace").strip().splitlines()[-1:]
            raise PlanError(f"a planning process ended with {child.returncode}: {''.join(last)}")
        return answer

    def stop(self) -> None:
        """End the process that runs, and start none any more."""
        with self._lock:
            self._stopped = True
            if self._child is not None:
                self._child.kill()


def _refusal(data: object) -> Exception:
    if not isinstance(data, Mapping) or data.get("kind") not in ("too small", "infeasible", "error"):
        return GraphFileError("the refusal of a planning process makes no sense")
    if data["kind"] == "infeasible":
        return Infeasible(0)
    if data["kind"] == "error":
        return PlanError(str(data.get("message")))
    needed, given, devices = data.get("needed"), data.get("given"), data.get("devices")
    if type(needed) is not int or type(given) is not int or not isinstance(devices, list):
        return GraphFileError("the refusal of a planning process names no sizes")
    return BudgetTooSmall(needed, given, devices=tuple(int(device) for device in devices))


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """The answer of the process to ``request``."""
    work = SearchWork(request["seconds"], names_needed=request["names_needed"])
    graph = replace(taskgraph_from_json(request["graph"]), ops=_calls(request["calls"]))
    machine = _machine(request["machine"])
    asked = {key: request[key] for key in ("policy", "planner", "recompute")}
    try:
        plan, _ = decide(graph, machine or Machine(), work, **asked, offered=frozenset(request["offered"]))
    except BudgetTooSmall as error:
        sizes = {"needed": error.needed, "given": error.given, "devices": list(error.devices)}
        return {"refused": {"kind": "too small", **sizes}}
    except Infeasible:
        return {"refused": {"kind": "infeasible"}}
    except DiscoError as error:
        return {"refused": {"kind": "error", "message": f"{type(error).__name__}: {error}"}}
    return {"plan": memgraph_to_object(plan), "cut": work.cut}


def _calls_to_list(graph: TaskGraph) -> list[list[Any]]:
    """The calls, as far as they tell which kernels compute the same values: the name, a number that equal ones share,
    the random numbers that it draws, and whether it has results. A call that changes memory of others has none."""
    numbers: dict[str, int] = {}
    calls: list[list[Any]] = []
    for vertex, call in graph.ops.items():
        text = repr((call.overload, call.args, call.results, call.body))
        rng = None if call.rng is None else [call.rng.slot, call.rng.replay]
        calls.append([vertex, call.name, numbers.setdefault(text, len(numbers)), rng, any(call.results)])
    return calls


def _calls(data: list[list[Any]]) -> dict[int, OpCall]:
    return {
        vertex: OpCall(name, str(number), (), _RESULTS[results], rng=None if rng is None else RngSite(*rng))
        for vertex, name, number, rng, results in data
    }


def _machine_to_object(machine: Machine) -> dict[str, Any]:
    links = {name: asdict(machine.link(route)) for name, route in ROUTE_OF.items()}
    return {"compute_streams": machine.compute_streams, "links": links, "joint": machine.joint}


def _machine(data: Mapping[str, Any] | None) -> Machine | None:
    if data is None:
        return None
    links = {ROUTE_OF[name]: Link(**_tuples(link)) for name, link in data["links"].items()}
    return Machine(data["compute_streams"], links, _tuples(data)["joint"])


def _tuples(data: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has lists where links have tuples of tuples."""
    return {
        key: tuple(tuple(each) for each in value) if isinstance(value, list) else value for key, value in data.items()
    }


def _end_with(parent: int, over: threading.Event) -> None:
    """Nobody reads the answer of a process whose parent was killed."""
    while not over.wait(1.0):
        if os.getppid() != parent:
            os._exit(1)


def main() -> None:
    """Read a request from stdin, plan, and write the answer to stdout."""
    with suppress(OSError):
        os.nice(_LOWEST)
    over = threading.Event()
    start_thread(_end_with, os.getppid(), over, name="disco-parent", stop=over.set)
    request = parse_json(sys.stdin.buffer.read())
    assert isinstance(request, dict)
    sys.stdout.buffer.write(json.dumps(answer(request), separators=(",", ":")).encode())
