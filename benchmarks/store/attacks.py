"""Attacks on a tensor store: ``python -m benchmarks.store.attacks``.

Damaged messages: each is refused or another valid one; none hangs the store, ends it or makes it grow. And SIGKILLs of
clients and of the store at random moments while clients create, put, read and free: no wrong byte is read, nothing is
left.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from disco_accel.errors import DiscoError, StoreError, StoreGone
from disco_accel.store.client import Store
from disco_accel.store.connection import receive
from disco_accel.store.messages import REPLY, REQUEST, Opcode, ReplyStatus, Request, Tier, parse_reply, words_of

ROOT = Path(__file__).resolve().parents[2]
SIZES = ("--host", "24MiB", "--device", "8MiB")
VICTIMS = 3
"""Clients at work at one time."""


@dataclass
class Damaged:
    """``taken``: damaged messages that were valid all the same. ``cut_off``: connections that the store ended."""

    sent: int = 0
    taken: int = 0
    refused: int = 0
    cut_off: int = 0
    descriptors_grown: int = 0
    resident_kib_grown: int = 0
    memory_left: int = 0


@dataclass
class Deaths:
    """``gone``: how often a client was told that its store has ended, and went on. ``restarts``: of the store."""

    clients: int = 0
    restarts: int = 0
    reads: int = 0
    wrong: int = 0
    refused: int = 0
    gone: int = 0
    descriptors_grown: int = 0
    memory_left: int = 0
    files_left: int = 0


@contextlib.contextmanager
def place() -> Iterator[Path]:
    """A socket's path in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="disco-store-") as folder:
        yield Path(folder) / "store"


def start(path: Path) -> subprocess.Popen[str]:
    """A store that listens at ``path`` when this returns."""
    words = [sys.executable, "-m", "disco_accel.cli.main", "store", "serve", "--socket", str(path), *SIZES]
    made = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert made.stdout is not None and str(path) in made.stdout.readline()
    return made


def end(process: subprocess.Popen[str], how: int = signal.SIGTERM) -> None:
    """Signal a store and wait until it has ended."""
    process.send_signal(how)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def mutated_messages(count: int, rng: random.Random) -> Damaged:
    """Send ``count`` damaged messages to a store of its own."""
    found = Damaged()
    with place() as path:
        process = start(path)
        with Store.connect(path, timeout=60) as control:
            control.ping()
            before = _descriptors(process.pid), _resident(process.pid)
            raw, names = _raw(path), [1]
            for number in range(count):
                if number % 2000 == 1999:
                    # What one client still holds ends with it.
                    raw.close()
                    raw = _raw(path)
                try:
                    raw.send(_damaged(rng, names))
                    found.sent += 1
                    _read_all(raw, found, names)
                except OSError:
                    raw.close()
                    raw, found.cut_off = _raw(path), found.cut_off + 1
            raw.close()
            _settled(control)
            stats = control.stats()
            found.memory_left = stats["host_used"] + stats["device_used"] + stats["first_class"] + stats["budgets"]
            # Large files are closed by a worker, some time after they are gone from the books.
            _wait_for(lambda: _descriptors(process.pid) <= before[0], 10.0)
            found.descriptors_grown = _descriptors(process.pid) - before[0]
            found.resident_kib_grown = _resident(process.pid) - before[1]
        end(process)
    return found


def _raw(path: Path) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # Python's own timeout would make calls wait that must not.
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 30, 0))
    made.connect(os.fspath(path))
    return made


def _damaged(rng: random.Random, names: list[int]) -> bytes:
    """A valid request with some bytes changed, or one of another length, or noise."""
    kind = rng.random()
    if kind < 0.05:
        return rng.randbytes(rng.choice((1, 15, REQUEST.size - 1, REQUEST.size, REQUEST.size + 1, 4000)))
    name = rng.choice(names)
    shape = tuple(rng.choice((0, 1, 3, 1000)) for _ in range(rng.randrange(4)))
    request = rng.choice(
        (
            Request(Opcode.PING, 1),
            Request(Opcode.CREATE, 2, rng.choice(list(Tier)), dtype=rng.randrange(17), shape=shape),
            Request(Opcode.GET, 3, object=name),
            Request(Opcode.PUT, 4, amount=rng.choice((-1, 0, 10**6)), object=name),
            Request(Opcode.FREE, 5, object=name),
            Request(Opcode.RELEASE, 6, object=name),
            Request(Opcode.PREFETCH, 7, object=name),
            Request(Opcode.STATS, 8, amount=rng.randrange(5)),
            Request(Opcode.LABEL, 11, shape=words_of("train-a")),
            Request(Opcode.WANT, 9, amount=rng.randrange(1 << 24), object=rng.randrange(8), max_useful=1 << 25),
            Request(Opcode.HELD, amount=rng.randrange(1 << 24)),
            Request(Opcode.FIRST_CLASS, device=rng.randrange(3), amount=rng.randrange(-(1 << 24), 1 << 24)),
        )
    )
    data = bytearray(request.pack())
    for _ in range(rng.randrange(4)):
        data[rng.randrange(len(data))] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))
    return bytes(data[: rng.randrange(1, len(data))] if kind > 0.97 else data)


def _read_all(raw: socket.socket, found: Damaged, names: list[int]) -> None:
    """Take what the store has answered so far, and wait now and then so that it keeps up."""
    flags = 0
    if found.sent % 16:
        flags = socket.MSG_DONTWAIT
    else:
        raw.send(Request(Opcode.PING, 0xFFFFFFFF).pack())
    while True:
        try:
            data, files = receive(raw, REPLY.size + 1, flags)
        except BlockingIOError:
            if not flags & socket.MSG_DONTWAIT:
                raise RuntimeError("the store has not answered for 30 s") from None
            return
        for file in files:
            os.close(file)
        if not data:
            raise ConnectionError
        reply = parse_reply(data)
        if reply.number == 0xFFFFFFFF:
            return
        if reply.status is ReplyStatus.OK:
            found.taken += 1
            if reply.object and reply.object not in names:
                names.append(reply.object)
                del names[1:-50]
        else:
            found.refused += 1


def kills(clients: int, servers: int, rng: random.Random) -> Deaths:
    """Kill so many clients, and so many times the store, at random moments."""
    found = Deaths(clients, servers)
    with place() as path, mmap.mmap(-1, mmap.PAGESIZE) as memory, memoryview(memory).cast("q") as counts:
        known = path.parent / "ids"
        known.touch()
        process = start(path)
        base = _descriptors(process.pid)
        victims = [_fork(path, known, counts, rng, number) for number in range(VICTIMS)]
        for number in sorted([*rng.sample(range(clients + servers), clients + servers)]):
            time.sleep(rng.uniform(0.0, 0.06))
            if number % (max(1, (clients + servers) // max(1, servers))) == 1 and servers:
                servers -= 1
                end(process, signal.SIGKILL)
                process = start(path)
                base = _descriptors(process.pid)
                # Until somebody is at work again.
                _wait_for(lambda seen=counts[_READS]: counts[_READS] > seen)
            else:
                place_of = rng.randrange(VICTIMS)
                _kill(victims[place_of])
                victims[place_of] = _fork(path, known, counts, rng, VICTIMS + number)
        for victim in victims:
            _kill(victim)
        with Store.connect(path, timeout=60) as control:
            _settled(control)
            stats = control.stats()
            found.memory_left = stats["host_used"] + stats["device_used"] + stats["objects"]
        _wait_for(lambda: _descriptors(process.pid) <= base)
        found.descriptors_grown = _descriptors(process.pid) - base
        end(process)
        found.files_left = len({p.name for p in path.parent.iterdir()} - {"ids", "store.lock"})
        found.reads, found.wrong, found.refused, found.gone = counts[_READS], counts[1], counts[2], counts[3]
    return found


_READS, _WRONG, _REFUSED, _GONE = range(4)
"""Places of the counters that victims share with their parent; several add to one, so small losses are possible."""


def _fork(path: Path, known: Path, counts: memoryview, rng: random.Random, number: int) -> int:
    seed = rng.randrange(1 << 30)
    child = os.fork()
    if child == 0:
        try:
            _victim(path, known, counts, random.Random(seed))
        except BaseException as error:
            print(f"victim {number}: {type(error).__name__}: {error}", file=sys.stderr)
            counts[_WRONG] += 1
        os._exit(1)
    return child


def _kill(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def _value(name: int) -> int:
    """Of each byte of an object: not that of its neighbours, and never 0."""
    return name * 37 % 255 + 1


def _victim(path: Path, known: Path, counts: memoryview, rng: random.Random) -> None:
    """Use the store until killed; connect again when it is gone."""
    torch.set_num_threads(1)
    log = os.open(known, os.O_WRONLY | os.O_APPEND)
    while True:
        kept: list[tuple[int, torch.Tensor]] = []
        try:
            store = Store.connect(path, timeout=60)
            own: list[int] = []
            while True:
                _one_step(store, own, kept, known, log, counts, rng)
        except StoreGone:
            counts[_GONE] += 1
            for name, tensor in kept:
                counts[_WRONG] += not bool((tensor == _value(name)).all())
            time.sleep(0.01)


def _one_step(
    store: Store,
    own: list[int],
    kept: list[tuple[int, torch.Tensor]],
    known: Path,
    log: int,
    counts: memoryview,
    rng: random.Random,
) -> None:
    try:
        choice = rng.random()
        if choice < 0.4:
            nbytes = rng.choice((1, 4096, 100_000, 1_000_000))
            name = store.create((nbytes,), torch.uint8, rng.choice(("host", "device", "device")))
            store.get(name).fill_(_value(name))
            store.put(name, rng.choice((None, 0.01, 0.1)))
            own.append(name)
            os.write(log, b"%020d\n" % name)
        elif choice < 0.5 and len(own) > 5:
            store.free(own.pop(rng.randrange(len(own))))
        else:
            recent = known.read_bytes()[-21 * 30 :].split()
            if recent:
                name = int(rng.choice(recent))
                tensor = store.get(name)
                counts[_WRONG] += not bool((tensor == _value(name)).all())
                counts[_READS] += 1
                kept.append((name, tensor))
                del kept[:-3]
        if len(own) > 12:
            store.free(own.pop(0))
    except StoreGone:
        raise
    except StoreError:
        counts[_REFUSED] += 1


def _descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def _resident(pid: int) -> int:
    """KiB of memory of its own."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def _settled(control: Store) -> None:
    """Wait until the store has noticed that all others are gone."""
    _wait_for(lambda: len(control.stats()["clients"]) == 1)


def _wait_for(condition: object, seconds: float = 60.0) -> None:
    assert callable(condition)
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)


def main(argv: Sequence[str] | None = None) -> int:
    """Print what was found, as JSON. Exit status 1 if a byte was wrong or something grew."""
    parser = argparse.ArgumentParser(prog="benchmarks.store.attacks", description=__doc__)
    parser.add_argument("--messages", type=int, default=100_000, help="damaged messages (default: 100000)")
    parser.add_argument("--clients", type=int, default=150, help="SIGKILLs of clients (default: 150)")
    parser.add_argument("--servers", type=int, default=50, help="SIGKILLs of the store (default: 50)")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    rng = random.Random(options.seed)
    try:
        deaths = kills(options.clients, options.servers, rng)
        print(json.dumps({"deaths": asdict(deaths)}), flush=True)
        damaged = mutated_messages(options.messages, rng)
        print(json.dumps({"messages": asdict(damaged)}))
    except DiscoError as error:
        print(f"store_attacks: {error}", file=sys.stderr)
        return 1
    bad = deaths.wrong or deaths.memory_left or deaths.descriptors_grown > 0 or deaths.files_left
    return int(bool(bad or damaged.memory_left or damaged.descriptors_grown > 0))


if __name__ == "__main__":
    sys.exit(main())
