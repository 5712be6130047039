"""Programs that start fast: a process that has imported PyTorch and transformers once, and forks for each command.

    python tests/support/forkserver.py FOLDER [--nested] MODULE...

imports the modules, listens on FOLDER/socket and writes FOLDER/bin with ``python``, ``disco-accel``, ``accelerate`` and
``deepspeed``, which run here what the installed ones run. What those start in turn (a launcher's script, say) is a
process of its own and imports anew, unless ``--nested`` makes ``sys.executable`` name FOLDER/bin/python there. A
command that Python takes as text (``-c``), or that looks for modules where the server does not, runs in the installed
Python. What importing PyTorch sets off under a program's environment and command line is done again for it; that it may
happen while accelerate is being imported, only a cold start shows. Serves until its standard input ends.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import faulthandler
import functools
import gc
import hashlib
import importlib
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HEAVY = (
    "torch",
    "transformers.trainer",
    "transformers.models.llama.modeling_llama",
    "peft.utils.transformers_weight_conversion",
    "accelerate",
)
"""Libraries of others that nearly every program imports, in seconds."""
PROGRAMS = {
    "accelerate": ("accelerate.commands.accelerate_cli", "main"),
    "deepspeed": ("deepspeed.launcher.runner", "main"),
    "disco-accel": ("disco_accel.cli.main", "main"),
    "python": ("", ""),
}
_CLIENT = """#!{python} -IS
import array, json, os, signal, socket, sys
words = sys.argv[1:]
paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
first = words[words[:1] == ["-u"]]
if {program!r} == "python" and (first.startswith("-") and first != "-m" or not {{*paths}} <= {paths!r}):
    os.execv({python!r}, [{python!r}, *words])
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    request = json.dumps([{program!r}, words, os.getcwd(), dict(os.environ)])
    server.sendmsg([request.encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))])
    server.shutdown(socket.SHUT_WR)
    status = int(server.makefile().read())
if status < 0:
    signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
    os.kill(os.getpid(), -status)
sys.exit(status)
"""


@functools.cache
def start(paths: tuple[str, ...] = (str(ROOT),), modules: Sequence[str] = HEAVY, nested: bool = True) -> Path:
    """The folder of a server's programs, one for each set of arguments, until this process ends.

    ``paths``: PYTHONPATH of the server, which is that of its programs too.
    """
    folder = tempfile.TemporaryDirectory(prefix="disco-served-")
    server = serve(Path(folder.name), {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, modules, nested)
    atexit.register(folder.cleanup)
    atexit.register(server.kill)
    return Path(folder.name) / "bin"


def program(source: str, folder: Path, *words: str) -> list[str]:
    """The command that runs ``source``, which ``folder`` keeps, where this tree's modules are found."""
    file = folder / f"program-{hashlib.sha256(source.encode()).hexdigest()[:8]}.py"
    file.write_text(source)
    return [str(start() / "python"), str(file), *words]


def serve(folder: Path, environment: Mapping[str, str], modules: Sequence[str], nested: bool) -> subprocess.Popen[str]:
    """A server that takes commands already."""
    command = [sys.executable, __file__, str(folder), *(["--nested"] if nested else []), *modules]
    server = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    assert any(line == "ready\n" for line in server.stdout), "the server that forks for commands ended"
    return server


def main(folder: Path, modules: Sequence[str], nested: bool) -> None:
    """Serve until standard input ends; prints ``ready`` when commands can come."""
    for name in modules:
        importlib.import_module(name)
    gc.collect()
    # No search for garbage in a program writes to what all of them share.
    gc.freeze()
    address = str(folder / "socket")
    (folder / "bin").mkdir(exist_ok=True)
    # Children of the server end by themselves; nobody waits for them.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen()
        paths = {"", *os.environ.get("PYTHONPATH", "").split(os.pathsep)}
        for program in PROGRAMS:
            client = folder / "bin" / program
            client.write_text(_CLIENT.format(python=sys.executable, address=address, program=program, paths=paths))
            client.chmod(0o755)
        if nested:
            sys.executable = str(folder / "bin" / "python")
        print("ready", flush=True)
        while server in select.select([server, sys.stdin], [], [])[0]:
            connection, _ = server.accept()
            if os.fork() == 0:
                server.close()
                _serve(connection)
            connection.close()


def _serve(connection: socket.socket) -> None:
    """Run one request in a fork of its own and answer with its exit status. Ends it when the client is gone."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    message, passed, _, _ = connection.recvmsg(1, socket.CMSG_SPACE(12))
    message += b"".join(iter(lambda: connection.recv(1 << 16), b""))
    files = array.array("i", passed[0][2])
    child = os.fork()
    if child:
        # Here too, or it might be told to end before it has a group.
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpgid(child, child)
        for file in files:
            os.close(file)
        poll = select.poll()
        # The client has ended its side of the connection: more than that is a client that has ended.
        poll.register(connection, 0)
        poll.register(os.pidfd_open(child), select.POLLIN)
        if all(file == connection.fileno() for file, _ in poll.poll()):
            os.killpg(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        with contextlib.suppress(BrokenPipeError):
            connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())
        os._exit(0)
    connection.close()
    with contextlib.suppress(PermissionError):
        os.setpgid(0, 0)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    program, words, folder, environment = json.loads(message)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = [program, *words]
    _finish(program, words, folder)


def _finish(program: str, words: list[str], folder: str) -> None:
    """Run the program; what it raises ends this process as it would end the program's own."""
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    for imported in entry_points(group="torch.backends") if "torch" in sys.modules else ():
        imported.load()()
    module, name = PROGRAMS[program]
    if module:
        sys.exit(getattr(importlib.import_module(module), name)())
    if words[0] == "-u":
        for stream in (sys.stdout, sys.stderr):
            assert isinstance(stream, io.TextIOWrapper)
            stream.reconfigure(write_through=True)
        words = words[1:]
    if words[0] == "-m":
        sys.path[0] = folder
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(words[0]).resolve().parent)
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")
    if _has_gloo_threads():
        # One that still holds a tensor of Python's when the interpreter goes down aborts the process
        # (pytorch/pytorch#179291): while this one sleeps, it can let go.
        time.sleep(0.5)
    sys.exit(0)


def _has_gloo_threads() -> bool:
    """Whether this process runs collectives of PyTorch's gloo backend in threads."""
    return any(name.read_text() == "pt_gloo_runloop\n" for name in Path("/proc/self/task").glob("*/comm"))


if __name__ == "__main__":
    words = sys.argv[2:]
    main(Path(sys.argv[1]), [word for word in words if word != "--nested"], "--nested" in words)
