"""Damaged files against the command line: every one is answered with status 0, 1 or 2, soon, and within bounds.

    python -m tests.cli.fuzz [--count 1000] [--seed 0] [--keep FOLDER]

What is wrong is printed and kept in FOLDER; the exit status is 1 then. Each damaged file goes through the commands
that read its kind. A plan that ``compile`` makes must pass ``verify``. One that passes must stay in the memory it was
given, run in ``simulate``, and give the right values in an adversarial order.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import resource
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from disco_accel.cli.main import main as disco_accel
from disco_accel.errors import Stalled, VerifyError
from disco_accel.graph.files import read_memgraph, read_taskgraph, write_taskgraph
from disco_accel.graph.spaces import HOST, Space, SpaceKind
from disco_accel.graph.taskgraph import TaskGraph
from disco_accel.graph.values import host_copy_exists
from disco_accel.simulate.machine_file import IGNORED
from disco_accel.sizes import parse_size
from tests.cli.mutate import mutate
from tests.support.graphs.update_graph import UpdateShape, host_update_graph
from tests.support.oracles.adversary import run_reference

SECONDS = 20
"""A command that takes longer on a file of a few thousand bytes hangs."""

MEMORY = 6 << 30
"""Address space of the process: an allocation that a file talks it into fails."""

INSTANCE = (
    b'{"memory": 4e8, "bandwidth": 1e10, "a0": 1e6, "layers": ['
    b'{"u_f": 0.01, "u_b": 0.02, "w": 1e8, "a": 1e7, "repeat": 4}, {"u_f": 0.02, "u_b": 0.02, "w": 5e7, "a": 1e7}]}'
)
MACHINE = (
    b'{"compute_streams": 1, "links": [{"kinds": ["h2d", "d2h"], "bandwidth": 2e10, "latency": 1e-5},'
    b' {"kinds": ["p2p"], "bandwidth": 2e11, "scope": "pair"}]}'
)


class Hang(BaseException):
    """A command took longer than ``SECONDS``."""


@dataclass(frozen=True, slots=True)
class Seed:
    """A good file: ``kind`` is task, plan, machine or instance; ``task`` is the file of a plan's graph, ``memory`` what
    the plan was made for."""

    kind: str
    data: bytes
    task: Path | None = None
    memory: str = ""


def seeds(graphs: Path, folder: Path) -> list[Seed]:
    """Return good files of every kind: those of ``graphs`` and plans of them, written to ``folder``."""
    found = [Seed("machine", MACHINE), Seed("instance", INSTANCE)]
    found += [Seed("machine", (graphs / "intro.machine.json").read_bytes())]
    on_host = folder / "on_host.taskgraph.json"
    write_taskgraph(host_update_graph(UpdateShape(layers=2), 4 << 20, at_head=True), on_host)
    on_disk = folder / "on_disk.taskgraph.json"
    write_taskgraph(_on_disk(read_taskgraph(graphs / "chain8.taskgraph.json")), on_disk)
    files = [(graphs / f"{name}.taskgraph.json", name) for name in ("toy", "chain8", "intro_n10")]
    files += [(on_host, "on_host"), (on_disk, "on_disk")]
    for (task, name), memory in zip(files, ("1280", "8MiB", "2MiB", "4MiB", "8MiB"), strict=True):
        plan = folder / f"{name}.json"
        for options in ([], ["--cyclic"]):
            status, printed = run(["compile", str(task), "-o", str(plan), "--memory", memory, *options])
            assert status == 0, printed
            found += [Seed("plan", plan.read_bytes(), task, memory)]
        found += [Seed("task", task.read_bytes())] * 2
    found += [Seed("plan", (graphs / "intro_n10.memgraph.json").read_bytes(), graphs / "intro_n10.taskgraph.json")]
    return found


def _on_disk(graph: TaskGraph) -> TaskGraph:
    """``graph`` with the homes of its values in storage."""
    vertices = [replace(vertex, source=-2) if host_copy_exists(vertex) else vertex for vertex in graph.vertices]
    storage = Space(-2, kind=SpaceKind.STORAGE)
    return replace(graph, spaces=(*graph.spaces, storage), vertices=tuple(vertices))


def run(arguments: Sequence[str]) -> tuple[int, str]:
    """Run a command; return its status and what it printed to stderr. Whatever it raises goes through."""
    errors = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        try:
            status = disco_accel(arguments)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    return status, errors.getvalue()


def judge(seed: Seed, file: Path, graphs: Path, turn: int) -> Iterator[tuple[str, str]]:
    """Run the commands that read ``file``. Yield (command, what is wrong with its answer); an empty text is right.

    Options take turns, so that ``turn`` after ``turn`` all are tried.
    """
    plan = file.with_suffix(".plan")
    toy, intro = str(graphs / "toy.taskgraph.json"), str(graphs / "intro_n10.memgraph.json")
    if seed.kind == "instance":
        yield "weights", _answered(["weights", str(file), "--milp", "1"])[1]
    elif seed.kind == "machine":
        yield "bound", _answered(["bound", toy, "--machine", str(file)])[1]
        yield "simulate", _answered(["simulate", intro, "--machine", str(file)])[1]
    elif seed.kind == "plan":
        allowed = ["--memory", seed.memory] if seed.memory else []
        status, wrong, _ = _answered(["verify", str(seed.task), str(file), *allowed])
        yield "verify", wrong or ("" if status else _unsafe(seed, file))
        options = (["--steps", "2"], ["--dispatch", "fixed"], ["--dispatch", "random", "--jitter", "0.5"])[turn % 3]
        _, wrong, said = _answered(["simulate", str(file), *options])
        stalled = status == 0 and "cannot run to its end" in said
        yield "simulate", wrong or ("a plan that verifies does not run" if stalled else "")
    else:
        options = ([], ["--cyclic", "--planner", "timed"], ["--cyclic", "--planner", "build"])[turn % 3]
        status, wrong, _ = _answered(["compile", str(file), "-o", str(plan), *options])
        yield "compile", wrong
        if status == 0:
            verified, wrong, _ = _answered(["verify", str(file), str(plan)])
            yield "verify", wrong or ("its plan does not verify" if verified else "")
        yield "bound", _answered(["bound", str(file)])[1]


def _unsafe(seed: Seed, file: Path) -> str:
    """What is wrong with a plan that verified: bytes outside the memory that was given, or a wrong value in a run."""
    assert seed.task is not None
    graph, plan = read_taskgraph(seed.task), read_memgraph(file)
    given = {d.id: parse_size(seed.memory) if seed.memory and not d.is_host_device else d.memory for d in graph.devices}
    sizes = {(vertex.id, k): size for vertex in plan.vertices for k, size in enumerate(vertex.sizes)}
    given[HOST] = plan.host.memory
    outside = [ref for ref, slot in plan.slots.items() if not 0 <= slot.offset <= given[slot.space] - sizes[ref]]
    if outside:
        return f"a plan that verifies has {outside[:3]} outside their space"
    try:
        run_reference(graph, plan, len(plan.slots))
    except (VerifyError, Stalled) as error:
        return f"a plan that verifies goes wrong: {error}"
    return ""


def _answered(arguments: Sequence[str]) -> tuple[int, str, str]:
    """Return the status, what is wrong with the way it was given, and the message."""
    status, errors = run(arguments)
    wrong = ""
    if status not in (0, 1, 2):
        wrong = f"status {status}"
    elif status and (not errors.startswith("disco-accel ") or errors.count("\n") != 1 or len(errors) > 2000):
        wrong = f"its message is {errors[:300]!r}"
    elif status == 0 and errors and not (errors.startswith(IGNORED) and errors.count("\n") == 1):
        wrong = f"it succeeds but says {errors[:300]!r}"
    return status, wrong, errors


def fuzz(count: int, seed: int, graphs: Path, keep: Path | None) -> list[str]:
    """Damage ``count`` files; return what is wrong, one line each, and print how the commands answered."""
    rng = random.Random(seed)
    wrong: list[str] = []
    answers: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        good = seeds(graphs, Path(folder))
        for number in range(count):
            chosen = rng.choice(good)
            damaged = mutate(chosen.data, rng)
            file = Path(folder) / "damaged.json"
            file.write_bytes(damaged)
            found = _found(chosen, file, graphs, number)
            answers[f"{chosen.kind}: {'answered' if found is None else 'WRONG'}"] += 1
            if number % 5000 == 4999:
                print(f"{number + 1} of {count}, {len(wrong)} wrong", file=sys.stderr, flush=True)
            if found is not None:
                wrong.append(f"mutation {number} of seed {seed}, a {chosen.kind}: {found}")
                print(wrong[-1], flush=True)
                if keep is not None:
                    keep.mkdir(parents=True, exist_ok=True)
                    (keep / f"{chosen.kind}-{seed}-{number}.json").write_bytes(damaged)
    print(json.dumps({"mutations": count, "seed": seed, "wrong": len(wrong), **dict(sorted(answers.items()))}))
    return wrong


def _found(seed: Seed, file: Path, graphs: Path, turn: int) -> str | None:
    try:
        for command, wrong in judge(seed, file, graphs, turn):
            if wrong:
                return f"{command}: {wrong}"
    except Hang:
        return f"hangs: {traceback.format_exc(limit=-3)}"
    except (Exception, SystemExit):
        # Whatever it is, it reached the user as a traceback.
        return traceback.format_exc(limit=-4)
    return None


def _hang(signum: int, frame: FrameType | None) -> None:
    raise Hang


def main(argv: Sequence[str] | None = None) -> int:
    """Fuzz as the options say; returns 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path)
    options = parser.parse_args(argv)
    signal.signal(signal.SIGALRM, _hang)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    graphs = Path(__file__).resolve().parents[2] / "tests" / "data" / "graphs"
    return 1 if fuzz(options.count, options.seed, graphs, options.keep) else 0


if __name__ == "__main__":
    sys.exit(main())
