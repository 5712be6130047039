"""A client's connection: requests of any thread over one socket, each reply to the thread that asked."""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import struct
import threading
import time
import weakref
from collections import deque
from pathlib import Path
from typing import Any

from disco_accel.errors import StoreError, StoreFull, StoreGone
from disco_accel.store.messages import (
    CLIENT_FIGURES,
    FIGURES,
    REPLY,
    STATS_PAGES,
    Malformed,
    Opcode,
    Reply,
    ReplyStatus,
    Request,
    parse_reply,
)
from disco_accel.store.socket_path import connect

# Numbers, not flags of an enumeration: combining those takes microseconds of each message.
_AT_ONCE = int(socket.MSG_NOSIGNAL) | int(socket.MSG_DONTWAIT)
_CLOSED_IN_OTHERS = int(socket.MSG_CMSG_CLOEXEC)
_ANCILLARY = socket.CMSG_LEN(4 * array.array("i").itemsize)
_GIVES_BACK = {Opcode.GET: Opcode.RELEASE, Opcode.CREATE: Opcode.FREE}
"""The request that undoes another whose reply nobody waits for any more."""
_open: weakref.WeakSet[Channel] = weakref.WeakSet()


class Channel:
    """The socket. ``ask`` is for requests with a reply, ``tell`` for those without; both from any thread.

    ``tell`` may be called by a finalizer, in any thread and in the middle of a call of the same channel. It only
    appends to a queue, and sends if no thread is sending; a sending thread looks at the queue again before it stops.
    """

    def __init__(self, path: Path, timeout: float) -> None:
        """Connect. ``timeout``: seconds after which a store that does not answer counts as gone."""
        self.path = path
        self._timeout = timeout
        self._socket = connect(path, timeout)
        # Of the operating system, not Python's: that one would make sends wait too.
        whole = int(timeout)
        limit = struct.pack("ll", whole, int((timeout - whole) * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._pid = os.getpid()
        self._sending = threading.Lock()
        self._told: deque[bytes] = deque()
        # Its lock is reentrant: a finalizer in the middle of a call may find that the store has ended.
        self._turn = threading.Condition()
        self._reading = False
        self._number = 0
        self._replies: dict[int, tuple[Reply, int | None] | None] = {}
        self._abandoned: dict[int, Opcode] = {}
        self._gone: str | None = None
        _open.add(self)

    def ask(self, request: Request) -> tuple[Reply, int | None]:
        """The reply to ``request``, and the descriptor beside it.

        Raises:
            StoreFull, StoreError: it was refused.
            StoreGone: the store has ended.
        """
        self.check()
        with self._turn:
            # 0 is the number of requests without one.
            self._number = number = self._number % 0xFFFFFFFF + 1
            self._replies[number] = None
        try:
            with self._sending:
                self._send(request.pack(number))
            # The request may wait for leases that ended meanwhile.
            self._send_told()
            reply, file = self._wait(number)
        except BaseException:
            with self._turn:
                late = self._replies.pop(number, None)
                if late is None and self._gone is None:
                    self._abandoned[number] = request.opcode
            if late is not None:
                self._undo(request.opcode, *late)
            raise
        finally:
            self._send_told()
        if reply.status is ReplyStatus.OK:
            return reply, file
        if file is not None:
            os.close(file)
        raise (StoreFull if reply.status is ReplyStatus.FULL else StoreError)(f"store: {reply.text}")

    def tell(self, request: Request) -> None:
        """Send ``request`` soon, without an error: where the store is gone, it needs not be told."""
        self._told.append(request.pack())
        self._send_told()

    def check(self) -> None:
        """Raise StoreError in a process that was forked since, StoreGone if the connection has ended."""
        if not self.of_this_process():
            raise StoreError(
                "this connection to the store belongs to the process that forked this one: Store.connect() here"
            )
        if self._gone is not None:
            raise StoreGone(self._gone)

    def of_this_process(self) -> bool:
        """False in one that was forked since, where threads that held the locks do not exist."""
        return os.getpid() == self._pid

    def alive(self) -> bool:
        """Whether the store still has the connection open; asks the operating system, not the store."""
        if self._gone is not None or not self.of_this_process():
            return False
        ready = select.poll()
        ready.register(self._socket, select.POLLRDHUP)
        if any(events & (select.POLLRDHUP | select.POLLHUP | select.POLLERR) for _, events in ready.poll(0)):
            self._end("it has ended")
        return self._gone is None

    def close(self) -> None:
        """End the connection; calls that wait fail with StoreGone."""
        if self.of_this_process():
            self._end("this connection was closed")

    def forget(self) -> None:
        """In a forked process: close the socket, so that the store sees the end of the process that connected."""
        with contextlib.suppress(OSError):
            os.close(self._socket.detach())
        self._gone = "this connection belongs to the process that forked this one"

    def _end(self, why: str) -> None:
        with self._turn:
            if self._gone is None:
                self._gone = (
                    f"the store at {self.path} is gone: {why}. Tensors that it gave stay readable; connect again once "
                    "it is back, and put again what is needed then"
                )
            self._turn.notify_all()
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            # Not closed while another thread reads from it: its number could be another file's by then.
            if not self._reading:
                self._socket.close()

    def _send(self, data: bytes) -> None:
        """Under ``_sending``."""
        try:
            self._socket.send(data, _AT_ONCE)
            return
        except BlockingIOError:
            pass
        except OSError:
            self._end("it has ended")
            raise StoreGone(self._gone) from None
        ready = select.poll()
        ready.register(self._socket, select.POLLOUT)
        until = time.monotonic() + self._timeout
        while (left := until - time.monotonic()) > 0 and self._gone is None:
            ready.poll(min(left, 0.1) * 1000)
            try:
                self._socket.send(data, _AT_ONCE)
                return
            except BlockingIOError:
                continue
            except OSError:
                break
        self._end("it has ended, or does not take requests")
        raise StoreGone(self._gone)

    def _send_told(self) -> None:
        """Send the messages of ``tell``, unless a thread is sending that will."""
        while self._told and self._gone is None and self.of_this_process():
            if not self._sending.acquire(blocking=False):
                return
            try:
                while self._told:
                    self._send(self._told.popleft())
            except (StoreGone, IndexError):
                pass
            finally:
                self._sending.release()

    def _wait(self, number: int) -> tuple[Reply, int | None]:
        """The reply of that number: read here, or by another thread that waits for its own."""
        while True:
            with self._turn:
                while (found := self._replies[number]) is None and self._reading and self._gone is None:
                    self._turn.wait()
                if found is not None:
                    del self._replies[number]
                    return found
                if self._gone is not None:
                    raise StoreGone(self._gone)
                self._reading = True
            try:
                self._receive()
            finally:
                with self._turn:
                    self._reading = False
                    if self._gone is not None:
                        self._socket.close()
                    # Each thread that waits has an entry of its own.
                    if len(self._replies) > 1:
                        self._turn.notify_all()

    def _receive(self) -> None:
        """Read one reply and give it to the thread that asked."""
        try:
            data, files = receive(self._socket, REPLY.size + 1)
        except BlockingIOError:
            self._end(f"it has not answered for {self._timeout:g} s")
            return
        except OSError:
            data, files = b"", []
        if not data:
            self._end("it has ended")
            return
        file = files[0] if files else None
        for more in files[1:]:
            os.close(more)
        try:
            reply = parse_reply(data)
        except Malformed as error:
            if file is not None:
                os.close(file)
            self._end(str(error))
            return
        with self._turn:
            if reply.number in self._replies:
                self._replies[reply.number] = (reply, file)
                return
            opcode = self._abandoned.pop(reply.number, None)
        self._undo(opcode, reply, file)

    def _undo(self, opcode: Opcode | None, reply: Reply, file: int | None) -> None:
        """Nobody waits for ``reply``, of a request that an exception ended: give back its lease or object."""
        if file is not None:
            os.close(file)
        if opcode in _GIVES_BACK and reply.status is ReplyStatus.OK:
            self.tell(Request(_GIVES_BACK[opcode], object=reply.object))


def ask_page(channel: Channel, page: int) -> tuple[dict[str, int], int]:
    """The figures of one page about the store, by name, and the number of pages. Raises StoreGone."""
    reply = channel.ask(Request(Opcode.STATS, amount=page))[0]
    return {name: value for name, value in zip(FIGURES[page], reply.figures, strict=True) if name}, reply.amount


def ask_figures(channel: Channel) -> dict[str, Any]:
    """All figures of the store, and under ``clients`` those of each client. Raises StoreGone."""
    asked = [ask_page(channel, page) for page in range(STATS_PAGES)]
    found: dict[str, Any] = {name: value for figures, _ in asked for name, value in figures.items()}
    clients: list[dict[str, Any]] = []
    for page in range(STATS_PAGES, asked[-1][1]):
        try:
            reply = channel.ask(Request(Opcode.STATS, amount=page))[0]
        except StoreError:
            # One has ended meanwhile.
            channel.check()
            break
        named = {"label": reply.text} if reply.text else {}
        clients.append(dict(zip(CLIENT_FIGURES, reply.figures, strict=True)) | named)
    return found | {"clients": clients}


def receive(connection: socket.socket, size: int, flags: int = 0) -> tuple[bytes, list[int]]:
    """One message of at most ``size`` bytes and the descriptors beside it, closed in programs that this one starts.

    ``socket.recv_fds`` of Python 3.11 takes no notice of its flags.
    """
    data, messages, _flags, _address = connection.recvmsg(size, _ANCILLARY, flags | _CLOSED_IN_OTHERS)
    if not messages:
        return data, []
    descriptors = array.array("i")
    for level, kind, content in messages:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
    return data, list(descriptors)


def _forked() -> None:
    for channel in list(_open):
        channel.forget()


os.register_at_fork(after_in_child=_forked)
