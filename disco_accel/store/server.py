"""The store's process: one event loop that takes requests and never waits for a client."""

from __future__ import annotations

import array
import contextlib
import os
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from disco_accel.errors import DeviceLost, ExecutionError, StoreError, StoreFull
from disco_accel.eviction import store_policy_named
from disco_accel.store.capacity_ledger import CapacityLedger
from disco_accel.store.messages import (
    BEAT_SECONDS,
    MAX_DIMENSIONS,
    REQUEST,
    SILENT,
    GrantPage,
    Malformed,
    Opcode,
    Reply,
    ReplyStatus,
    parse_request,
)
from disco_accel.store.object_manager import ObjectManager
from disco_accel.store.objects import Client, Object, Waiter
from disco_accel.store.request_handler import RequestHandler
from disco_accel.store.socket_path import listen, peer_of
from disco_accel.store.tiers import CopyLanes, DeviceTier

_OUTBOX = 64
"""Replies that wait for a client that does not read; with more it is cut off."""
# Numbers, not members of an enumeration, which Python's socket module would convert at each message.
_SOL_SOCKET, _SCM_RIGHTS = int(socket.SOL_SOCKET), int(socket.SCM_RIGHTS)
_NO_FIGURES = (0,) * MAX_DIMENSIONS
_OK, _GET, _WANT = ReplyStatus.OK, Opcode.GET, Opcode.WANT
_IN_A_ROW = 16
"""Requests that one client gets done before others have their turn."""


@dataclass(eq=False, slots=True)
class _Connection:
    """One client's socket. ``process``: a descriptor that tells when the process ends that connected: one that it
    forked may keep the socket open. ``outbox``: replies that it has not room for, each with a descriptor of its
    own."""

    socket: socket.socket
    client: Client
    process: int
    outbox: deque[tuple[bytes, int | None]] = field(default_factory=deque)
    dead: bool = False


class Server:
    """A store that listens at ``path`` from its construction on, and serves in ``run``. Raises ConfigError: a store
    listens there, the folder is not this user's own, or there is no such policy."""

    def __init__(self, path: Path, ledger: CapacityLedger, policy: str, tier: DeviceTier) -> None:
        """``policy``: a name of ``STORE_POLICIES``."""
        chosen = store_policy_named(policy)
        self.path = path
        self._listener, self._lock = listen(path)
        self._wake_in, self._wake_out = socket.socketpair()
        for end in (self._wake_in, self._wake_out):
            end.setblocking(False)
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._lanes = CopyLanes(tier, self._wake)
        self.manager = ObjectManager(ledger, chosen, self._lanes, self._answer)
        self._handler = RequestHandler(self.manager, tier)
        self._connections: dict[Client, _Connection] = {}
        self._ended: list[_Connection] = []
        self._pages: dict[Client, GrantPage] = {}
        self._beaten = 0.0
        self._stopping = False
        self._selector = selectors.DefaultSelector()
        self._register(self._listener, self._accept)
        self._register(self._wake_out, self._woken)

    def run(self) -> None:
        """Serve until ``stop``, then close everything."""
        try:
            while not self._stopping:
                # Before the loop sleeps: prefetches that are due, and the budgets that they lead to.
                until = self.manager.tick()
                self._write_pages()
                self._close_ended()
                if self._pages:
                    until = BEAT_SECONDS if until is None else min(until, BEAT_SECONDS)
                for key, events in self._selector.select(until):
                    key.data(events)
                    if self._ended:
                        self._close_ended()
        finally:
            self._close()

    def stop(self) -> None:
        """End ``run`` soon; from any thread, or from a signal's handler."""
        self._stopping = True
        self._wake()

    def _wake(self) -> None:
        # Full means that the loop is about to wake up anyway; closed, that it has ended.
        with contextlib.suppress(OSError):
            self._wake_in.send(b"\0")

    def _woken(self, _events: int) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_out.recv(4096):
                pass
        self.manager.transfers_ended()

    def _register(self, file: socket.socket | int, call: Callable[[int], None]) -> None:
        self._selector.register(file, selectors.EVENT_READ, call)

    def _accept(self, _events: int) -> None:
        try:
            made, _address = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:
            # No descriptor is left. The one kept for this case turns the client away, which would wait for ever else.
            os.close(self._spare)
            with contextlib.suppress(OSError):
                self._listener.accept()[0].close()
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
            return
        pid, user = peer_of(made)
        process = _watch(pid) if user == os.getuid() else None
        if process is None:
            made.close()
            return
        made.setblocking(False)
        connection = _Connection(made, Client(pid), process)
        self._connections[connection.client] = connection
        self.manager.clients[connection.client] = None
        self._register(made, lambda events: self._ready(connection, events))
        self._register(process, lambda events: self._mark_ended(connection))

    def _ready(self, connection: _Connection, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._send_outbox(connection)
        if events & selectors.EVENT_READ:
            for _ in range(_IN_A_ROW):
                if connection.dead or not self._read(connection):
                    return

    def _read(self, connection: _Connection) -> bool:
        """Take one request. Whether to look for another at once: after those that their sender does not wait for.
        Descriptors that a client sends are dropped by the operating system."""
        try:
            data = connection.socket.recv(REQUEST.size + 1)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._mark_ended(connection)
            return False
        try:
            request = parse_request(data)
        except Malformed as error:
            self.manager.counts["malformed"] += 1
            self._send(connection, Reply(ReplyStatus.MALFORMED, error.number, text=str(error)), None)
            return False
        reply = self._handler.handle(connection.client, request, time.monotonic())
        if request.opcode in SILENT:
            if self._pages:
                self._write_pages()
            return True
        if reply is not None and request.opcode is _WANT and reply.status is _OK:
            self._send_page(connection, reply)
        elif reply is not None:
            self._send(connection, reply, None)
        return False

    def _send_page(self, connection: _Connection, reply: Reply) -> None:
        if connection.client not in self._pages:
            try:
                self._pages[connection.client] = GrantPage()
            except ExecutionError as error:
                self._send(connection, Reply(ReplyStatus.REFUSED, reply.number, text=str(error)), None)
                return
        self._write_pages()
        self._send(connection, reply, self._pages[connection.client].file)

    def _write_pages(self) -> None:
        """Budgets as they are now; and, each quarter of a second, that the store is there."""
        for client, page in self._pages.items():
            page.write(client.grant)
        now = time.monotonic()
        if now - self._beaten > BEAT_SECONDS / 2:
            self._beaten = now
            for page in self._pages.values():
                page.beat()

    def _answer(self, waiter: Waiter, item: Object, refusal: StoreError | None) -> None:
        """The manager's answer to a request that may have waited."""
        connection = self._connections.get(waiter.client)
        if connection is None or connection.dead:
            return
        if refusal is not None:
            status = ReplyStatus.FULL if isinstance(refusal, StoreFull) else ReplyStatus.REFUSED
            self._send(connection, Reply(status, waiter.number, text=str(refusal)), None)
            return
        shape = item.shape
        figures = shape + _NO_FIGURES[len(shape) :]
        reply = Reply(_OK, waiter.number, 0 if item.final else 1, item.id, item.tier, item.dtype, len(shape), figures)
        self._send(connection, reply, item.file if waiter.opcode is _GET else None)

    def _send(self, connection: _Connection, reply: Reply, file: int | None) -> None:
        if connection.dead:
            return
        data = reply.pack()
        if not connection.outbox and self._sent(connection, data, file):
            return
        if connection.dead or len(connection.outbox) >= _OUTBOX:
            self._mark_ended(connection)
            return
        try:
            # The object may be gone, and its descriptor's number another's, by the time that there is room.
            connection.outbox.append((data, None if file is None else os.dup(file)))
        except OSError:
            self._mark_ended(connection)
            return
        self._listen_for(connection, selectors.EVENT_READ | selectors.EVENT_WRITE)

    def _sent(self, connection: _Connection, data: bytes, file: int | None) -> bool:
        """Whether ``data`` is sent: else there is no room, or the client is gone and ``dead``."""
        try:
            if file is None:
                connection.socket.send(data)
            else:
                connection.socket.sendmsg([data], [(_SOL_SOCKET, _SCM_RIGHTS, array.array("i", [file]))])
        except BlockingIOError:
            return False
        except OSError:
            self._mark_ended(connection)
            return False
        return True

    def _send_outbox(self, connection: _Connection) -> None:
        while connection.outbox and self._sent(connection, *connection.outbox[0]):
            file = connection.outbox.popleft()[1]
            if file is not None:
                os.close(file)
        if not connection.outbox and not connection.dead:
            self._listen_for(connection, selectors.EVENT_READ)

    def _listen_for(self, connection: _Connection, events: int) -> None:
        key = self._selector.get_key(connection.socket)
        if key.events != events:
            self._selector.modify(connection.socket, events, key.data)

    def _mark_ended(self, connection: _Connection) -> None:
        """End ``connection`` before the loop goes on; not at once, where callers still use it."""
        if not connection.dead:
            connection.dead = True
            self._ended.append(connection)

    def _close_ended(self) -> None:
        while self._ended:
            connection = self._ended.pop()
            self._selector.unregister(connection.socket)
            connection.socket.close()
            self._selector.unregister(connection.process)
            os.close(connection.process)
            for _data, file in connection.outbox:
                if file is not None:
                    os.close(file)
            connection.outbox.clear()
            del self._connections[connection.client]
            page = self._pages.pop(connection.client, None)
            if page is not None:
                page.close()
            self.manager.end(connection.client)

    def _close(self) -> None:
        for connection in list(self._connections.values()):
            self._mark_ended(connection)
        self._close_ended()
        self._lanes.close()
        # Memory of a device that is lost goes with the process.
        with contextlib.suppress(DeviceLost):
            self.manager.transfers_ended()
            self.manager.close()
        self._selector.close()
        with contextlib.suppress(OSError):
            os.unlink(self.path)
        for end in (self._listener, self._wake_in, self._wake_out):
            end.close()
        os.close(self._spare)
        os.close(self._lock)


def _watch(pid: int) -> int | None:
    """A descriptor that tells when process ``pid`` ends, None if it has."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None
