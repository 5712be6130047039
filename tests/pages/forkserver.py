"""Programs that start fast: a process that has imported PyTorch and transformers once, and forks for each command.

    python tests/pages/forkserver.py FOLDER

listens on FOLDER/socket and writes FOLDER/bin with ``python`` and ``disco-accel``, which run here what the installed
ones run. What those start in turn (a launcher's script, say) is a process of its own and imports anew. ``accelerate``
is not among them: what it does with our section is decided while PyTorch is imported.
"""

from __future__ import annotations

import array
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import traceback
from pathlib import Path

PRELOAD = (
    "torch",
    "transformers.trainer",
    "peft",
    "accelerate",
    "disco_accel.recipes.lora",
    "disco_accel.recipes.prefill",
)
PROGRAMS = {
    "disco-accel": ("disco_accel.cli.main", "main"),
    "python": ("", ""),
}
_CLIENT = """#!{python} -IS
import array, json, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    request = json.dumps([{program!r}, sys.argv[1:], os.getcwd(), dict(os.environ)])
    server.sendmsg([request.encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))])
    server.shutdown(socket.SHUT_WR)
    sys.exit(int(server.makefile().read()))
"""


def main(folder: Path) -> None:
    """Serve until killed; prints ``ready`` when commands can come."""
    for name in PRELOAD:
        importlib.import_module(name)
    address = str(folder / "socket")
    (folder / "bin").mkdir(exist_ok=True)
    # Children of the server end by themselves; nobody waits for them.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen()
        for program in PROGRAMS:
            client = folder / "bin" / program
            client.write_text(_CLIENT.format(python=sys.executable, address=address, program=program))
            client.chmod(0o755)
        print("ready", flush=True)
        while True:
            connection, _ = server.accept()
            if os.fork() == 0:
                server.close()
                _serve(connection)
            connection.close()


def _serve(connection: socket.socket) -> None:
    """Run one request in a fork of its own and answer with its exit status."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    message, passed, _, _ = connection.recvmsg(1, socket.CMSG_SPACE(12))
    message += b"".join(iter(lambda: connection.recv(1 << 16), b""))
    files = array.array("i", passed[0][2])
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())
        os._exit(0)
    connection.close()
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
    """End this process as the program would."""
    try:
        module, name = PROGRAMS[program]
        if module:
            sys.exit(getattr(importlib.import_module(module), name)())
        sys.path[0] = folder
        if words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            runpy.run_path(words[0], run_name="__main__")
        sys.exit(0)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        raise
    except BaseException:
        traceback.print_exc()
        sys.exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
