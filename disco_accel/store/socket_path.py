"""The socket at which a store listens, in a folder of its user's own, closed to all others.

Environment: ``DISCO_STORE`` is the path of the socket; ``DISCO_STORE_LABEL`` the name of a client;
``XDG_RUNTIME_DIR`` the folder for a user's sockets.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import struct
from pathlib import Path

from disco_accel.errors import ConfigError, StoreError, StoreGone
from disco_accel.store.messages import is_label

SOCKET_VARIABLE = "DISCO_STORE"
LABEL_VARIABLE = "DISCO_STORE_LABEL"
_MAX_PATH = 107
"""Bytes of a Unix socket's path (Linux, ``unix(7)``)."""
_BACKLOG = 512


def socket_path(path: str | os.PathLike[str] | None = None) -> Path:
    """``path``, else ``$DISCO_STORE``, else ``store`` in ``$XDG_RUNTIME_DIR/disco_accel`` or ``/tmp/disco_accel-UID``.
    Raises ConfigError: the path is too long for a socket."""
    if path is None:
        path = os.environ.get(SOCKET_VARIABLE) or None
    if path is None:
        runtime = os.environ.get("XDG_RUNTIME_DIR", "")
        folder = Path(runtime) / "disco_accel" if runtime.startswith("/") else Path(f"/tmp/disco_accel-{os.getuid()}")
        path = folder / "store"
    found = Path(os.path.abspath(path))
    if len(os.fsencode(found)) > _MAX_PATH:
        raise ConfigError(f"--socket: {found} is longer than the {_MAX_PATH} bytes that a socket's path may have")
    return found


def client_label(given: str | None = None) -> str:
    """``given``, else ``$DISCO_STORE_LABEL``: the name of this client; "" for none. Raises ConfigError: no client can
    be called so."""
    name = os.environ.get(LABEL_VARIABLE, "") if given is None else given
    if name and not is_label(name):
        source = LABEL_VARIABLE if given is None else "label"
        raise ConfigError(f"{source}: {name!r} is not 1 to 64 letters, digits, '.', '_' or '-', such as train-a")
    return name


def check_folder(folder: Path, create: bool = False) -> None:
    """Nobody but this user can put a socket into ``folder``, or reach one there. Raises ConfigError: it is a link,
    belongs to somebody else or is open to others, or there is none."""
    if create:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{folder}: cannot be made: {error.strerror}") from error
    try:
        found = os.lstat(folder)
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}: a store keeps its socket there") from error
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"{folder}: is a link or a file, not a folder: remove it, or name another --socket")
    if found.st_uid != os.getuid():
        raise ConfigError(f"{folder}: belongs to user {found.st_uid}: name a --socket in a folder of your own")
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(f"{folder}: others can enter it: chmod 700 {folder}")


def listen(path: Path) -> tuple[socket.socket, int]:
    """A socket that listens at ``path``, and the lock that says so: a descriptor, kept open for as long as it listens.

    A dead store's socket is replaced: the operating system frees the lock of a process that ends, however it ends.
    Raises ConfigError: a store listens there already, or the folder is not this user's own.
    """
    check_folder(path.parent, create=True)
    lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"a store listens at {path} already: use it, or name another --socket") from None
        if os.path.lexists(path):
            if not stat.S_ISSOCK(os.lstat(path).st_mode):
                raise ConfigError(f"{path}: is there, and no socket: name another --socket")
            os.unlink(path)
        # Nobody can connect before it listens, and by then the mode is right.
        made.bind(os.fspath(path))
        os.chmod(path, 0o600)
        made.listen(_BACKLOG)
        made.setblocking(False)
    except BaseException as error:
        made.close()
        os.close(lock)
        if isinstance(error, OSError):
            raise ConfigError(f"{path}: no socket can be made there: {error.strerror}") from error
        raise
    return made, lock


def connect(path: Path, timeout: float) -> socket.socket:
    """A connection to the store at ``path``, which is this user's.

    Raises:
        ConfigError: the folder of ``path`` is not this user's own.
        StoreGone: no store listens there.
        StoreError: the one that listens is another user's.
    """
    start = f"start one with: disco-accel store serve --socket {path}"
    try:
        os.lstat(path.parent)
    except FileNotFoundError as error:
        raise StoreGone(f"no store listens at {path}: {start}") from error
    except OSError:
        # The folder's own check says why.
        pass
    check_folder(path.parent)
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        made.settimeout(timeout)
        made.connect(os.fspath(path))
        made.settimeout(None)
        _pid, user = peer_of(made)
        if user != os.getuid():
            raise StoreError(f"the store at {path} is user {user}'s: name your own with --socket or {SOCKET_VARIABLE}")
    except BaseException as error:
        made.close()
        if isinstance(error, OSError):
            raise StoreGone(f"no store listens at {path} ({error.strerror or error}): {start}") from error
        raise
    return made


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Process and user at the other end, as the operating system says."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, user, _group = struct.unpack("3i", data)
    return pid, user
