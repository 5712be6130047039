"""Tensors in a store that processes share: ``Store.connect()``, then create, get, put, free."""

from __future__ import annotations

import functools
import operator
import os
import threading
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from disco_accel.errors import ConfigError, StoreError, StoreFull, StoreGone
from disco_accel.native.backend import is_host
from disco_accel.native.shared_memory import lay_over, map_file
from disco_accel.store import offload, saved_activations
from disco_accel.store.connection import Channel, ask_figures, ask_page
from disco_accel.store.cuda_objects import CudaObjects
from disco_accel.store.messages import (
    DEVICE_PAGE,
    DTYPES,
    GPU_MEMORY,
    GRANT,
    MAX_AMOUNT,
    MAX_DEVICES,
    MAX_NEXT_USE,
    NO_NEXT_USE,
    Malformed,
    Opcode,
    Reply,
    Request,
    Tier,
    grant_words,
    is_silent,
    mask_of,
    nbytes_of,
    words_of,
)
from disco_accel.store.objects import footprint_of
from disco_accel.store.socket_path import client_label, socket_path

TIMEOUT = 300.0
"""Seconds after which a store that does not answer counts as gone. A get may wait for clients to end their steps."""
_DTYPES = {getattr(torch, name): number for number, (name, _size) in enumerate(DTYPES) if hasattr(torch, name)}
_TORCH = {number: dtype for dtype, number in _DTYPES.items()}


@dataclass(slots=True)
class _WrittenObject:
    """An object that this process still writes: its memory, mapped when it is first got, and the descriptor."""

    memory: torch.Tensor
    file: int
    reply: Reply


class Store:
    """A connection to a store, for all threads of the process that made it.

    Its end, also that of its process, frees the objects that it created, once nobody reads them. Every method raises
    StoreGone where the store has ended, and StoreError where a forked process calls it.
    """

    def __init__(self, channel: Channel) -> None:
        """See ``connect``."""
        self._channel = channel
        self._lock = threading.Lock()
        self._written: dict[int, _WrittenObject] = {}
        self._grant: memoryview[int] | None = None
        self._gpu: CudaObjects | None = None
        self._device: torch.device | None = None

    @classmethod
    def connect(
        cls, path: str | os.PathLike[str] | None = None, timeout: float = TIMEOUT, label: str | None = None
    ) -> Store:
        """The store that listens at ``path`` (default: ``$DISCO_STORE``, else where ``disco-accel store serve`` does).

        ``label`` (default: ``$DISCO_STORE_LABEL``, else none): the store's quotas and figures call this client so.

        Raises:
            StoreGone: none listens there.
            StoreError, ConfigError: it, or the folder of its socket, is not this user's own, or there is no such label.
        """
        name = client_label(label)
        channel = Channel(socket_path(path), timeout)
        if name:
            try:
                channel.ask(Request(Opcode.LABEL, shape=words_of(name)))
            except BaseException:
                channel.close()
                raise
        return cls(channel)

    def create(self, shape: Sequence[int], dtype: torch.dtype, device: str = "host") -> int:
        """A new object of zeros, contiguous, and its id. ``device``: ``host``, or ``device`` for one that is used
        there and may be evicted to the host once it is put.

        Raises:
            ConfigError: there is no such tensor or device.
            StoreFull: there is no room.
        """
        tiers = {tier.name.lower(): tier for tier in Tier}
        if device not in tiers:
            raise ConfigError(f"device: '{device}' is not one of a store; there are {', '.join(tiers)}")
        if dtype not in _DTYPES:
            raise ConfigError(
                f"dtype: {dtype} is not one of a store; there are {', '.join(name for name, _ in DTYPES)}"
            )
        try:
            sizes = tuple(operator.index(size) for size in shape)
            nbytes_of(sizes, _DTYPES[dtype])
        except TypeError:
            raise ConfigError(f"shape: {shape!r} is not a sequence of whole numbers, such as (2, 3)") from None
        except Malformed as error:
            raise ConfigError(f"shape: {error}") from None
        request = Request(Opcode.CREATE, device=tiers[device], dtype=_DTYPES[dtype], shape=sizes)
        return self._ask_for_room(request)[0].object

    def get(self, id: int) -> torch.Tensor:
        """The tensor ``id``, brought back if it was evicted.

        While this process has not put it, all its gets are one memory to write to. Afterwards each get shows the final
        content; writing to it makes a copy of that page for this tensor alone. It stays on its device while a tensor of
        its memory lives.

        Raises:
            StoreError: there is no such object, or another process has not put it yet.
            StoreFull: there is no room to bring it back.
        """
        self._channel.check()
        with self._lock:
            written = self._written.get(id)
            if written is not None:
                return _shaped(written.memory, written.reply)
        reply, file = self._ask_for_room(Request(Opcode.GET, object=_name(id)))
        if file is None:
            raise StoreError(f"store: object {id} came without its memory")
        keep = False
        try:
            memory = self._map(reply, file)
            if reply.amount:
                with self._lock:
                    first = self._written.setdefault(id, _WrittenObject(memory, file, reply))
                keep = first.file == file
                memory = first.memory
            return _shaped(memory, reply)
        finally:
            if not keep:
                os.close(file)

    def put(self, id: int, next_use: float | None = None) -> None:
        """Give ``id`` to the store: its content is final, and it may be evicted while nobody has a tensor of it.

        Tensors of it that this process still has keep their content; later writes to them are seen by them alone.
        ``next_use``: in so many seconds it is used next, and is brought back before; a later put of anybody who reads
        it says so anew. Raises StoreError: another mapping can still write to it, such as a forked process's; it is as
        before then.
        """
        if next_use is not None and not 0 <= next_use * 1e6 <= MAX_NEXT_USE:
            raise ConfigError(f"next_use: {next_use} is not a number of seconds from now")
        amount = NO_NEXT_USE if next_use is None else int(next_use * 1e6)
        request = Request(Opcode.PUT, object=_name(id), amount=amount)
        self._channel.check()
        with self._lock:
            written = self._written.get(id)
            if written is None:
                self._channel.ask(request)
                return
            # The kernel refuses to make a file final while there is a mapping to write to it.
            self._let_write(written, False)
            try:
                self._ask_put(request, written)
            except (StoreError, ConfigError):
                raise
            except BaseException:
                # An interrupt, and nobody knows whether the store has done it: done twice it is the same.
                self._ask_put(request, written)
                self._finish(id)
                raise
            self._finish(id)

    def _ask_put(self, request: Request, written: _WrittenObject) -> None:
        """Ask to make ``written`` final. Where that is refused its memory can be written to again; not where the
        store is gone: the file may be final then, and is nobody's any more."""
        try:
            self._channel.ask(request)
        except StoreGone:
            raise
        except StoreError:
            self._let_write(written, True)
            raise

    def _let_write(self, written: _WrittenObject, writes: bool) -> None:
        if self._gpu is not None and written.reply.device == Tier.DEVICE:
            self._gpu.let_write(written.memory, writes)
        else:
            lay_over(written.memory, written.file, shared_writes=writes)

    def _finish(self, id: int) -> None:
        os.close(self._written.pop(id).file)

    def free(self, id: int) -> None:
        """The object ``id`` of this process is no more. Tensors of it stay as they are; its memory is free once they,
        and those of other processes, are gone. Raises StoreError: there is no such object, or another process created
        it."""
        self._channel.ask(Request(Opcode.FREE, object=_name(id)))
        with self._lock:
            written = self._written.pop(id, None)
        if written is not None:
            os.close(written.file)

    def prefetch(self, id: int) -> None:
        """``id`` is used soon: bring it back now, if objects that are used later can leave for it. Does not wait."""
        self._channel.ask(Request(Opcode.PREFETCH, object=_name(id)))

    def ping(self) -> None:
        """Return when the store has answered."""
        self._channel.ask(Request(Opcode.PING))

    def wanted(self, minimum: int, max_useful: int, devices: Collection[int] = (0,), run: int = 0) -> None:
        """This process wants a budget of device memory of ``minimum`` to ``max_useful`` bytes on each of
        ``devices``; both 0: none any more. ``granted`` says what it gets on each, now and later. ``run``: a number that
        processes have in common which wait for each other in each step: all of them get their minimums, or none."""
        for key, value in (("minimum", minimum), ("max_useful", max_useful)):
            if not 0 <= value <= MAX_AMOUNT:
                raise ConfigError(f"{key}: {value} is not a number of bytes")
        if max_useful < minimum:
            raise ConfigError(f"max_useful: {max_useful} is less than the minimum, {minimum}")
        if not devices or not all(0 <= device < MAX_DEVICES for device in devices):
            raise ConfigError(
                f"devices: {list(devices)}: a store counts devices from 0 to {MAX_DEVICES - 1}, name some"
            )
        if not 0 <= run <= MAX_AMOUNT:
            raise ConfigError(f"run: {run} is not a number from 0 to {MAX_AMOUNT}")
        request = Request(
            Opcode.WANT, amount=minimum, max_useful=max_useful, object=mask_of(devices), shape=(run,) if run else ()
        )
        _reply, file = self._channel.ask(request)
        if file is not None:
            try:
                if self._grant is None:
                    self._grant = grant_words(file)
            finally:
                os.close(file)

    def granted(self) -> int:
        """Bytes of device memory that this process may hold now; it has to hold no more at the end of its step.
        Read from memory, without a message.

        Raises:
            StoreError: nothing was wanted.
            StoreGone: the store has ended; nobody keeps the grant for this process.
        """
        words = self._grant
        if words is None:
            self._channel.check()
            raise StoreError("granted: nothing was wanted; call wanted(minimum, max_useful) first")
        if is_silent(words):
            self._channel.alive()
        self._channel.check()
        return words[GRANT]

    def held(self, nbytes: int) -> None:
        """This process now holds ``nbytes`` of its budget: it has shrunk to its grant, or taken it."""
        if not 0 <= nbytes <= MAX_AMOUNT:
            raise ConfigError(f"held: {nbytes} is not a number of bytes")
        self._channel.check()
        self._channel.tell(Request(Opcode.HELD, amount=nbytes))

    def report(self, device: int, nbytes: int) -> None:
        """This process has ``nbytes`` more of ``device`` apart from the store, or less where negative: first-class
        memory, which objects and budgets make room for."""
        self._channel.check()
        self._channel.tell(Request(Opcode.FIRST_CLASS, device=device, amount=nbytes))

    def stats(self) -> dict[str, Any]:
        """Figures of the store, and under ``clients`` those of each client."""
        return ask_figures(self._channel)

    def offload(self, module: torch.nn.Module, *, min_bytes: int = offload.MIN_BYTES) -> offload.Offloaded:
        """Move the frozen weights of ``module`` here: ``disco_accel.store.offload.offload``."""
        return offload.offload(self, module, min_bytes=min_bytes)

    def saved_activations(self, min_bytes: int = saved_activations.MIN_BYTES) -> AbstractContextManager[None]:
        """Move tensors that autograd saves here: ``disco_accel.store.saved_activations.saved_activations``."""
        return saved_activations.saved_activations(self, min_bytes)

    def alive(self) -> bool:
        """Whether the store is there; asks the operating system alone."""
        return self._channel.alive()

    def close(self) -> None:
        """End the connection. Tensors stay readable."""
        self._channel.close()
        self._grant = None
        with self._lock if self._channel.of_this_process() else nullcontext():
            written, self._written = self._written, {}
        for item in written.values():
            os.close(item.file)

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()

    @property
    def device(self) -> torch.device:
        """Of tensors of the device tier: ``cpu`` where that is a slice of host memory. Raises StoreError: this process
        does not see the store's GPU."""
        if self._device is None:
            figures, _pages = ask_page(self._channel, DEVICE_PAGE)
            if figures["device_kind"] == GPU_MEMORY:
                self._gpu = CudaObjects.of(figures)
            self._device = torch.device("cpu") if self._gpu is None else self._gpu.device
        return self._device

    def _ask_for_room(self, request: Request) -> tuple[Reply, int | None]:
        """Once more where this process's own tensors of a GPU, which nobody has any more, took the room."""
        ended = 0 if self._gpu is None else self._gpu.ended
        try:
            return self._channel.ask(request)
        except StoreFull:
            if self._gpu is None or not self._gpu.drain(ended):
                raise
        return self._channel.ask(request)

    def _map(self, reply: Reply, file: int) -> torch.Tensor:
        """The object's memory, 1-d: its elements where it is final, else whole pages of bytes. The lease ends with the
        last tensor of it."""
        nbytes = nbytes_of(reply.shape, reply.dtype)
        # Finalizers call it, in any thread and at any point of another call.
        release = functools.partial(self._channel.tell, Request(Opcode.RELEASE, object=reply.object))
        if nbytes == 0:
            release()
            nowhere = self.device if reply.device == Tier.DEVICE else torch.device("cpu")
            return torch.empty(0, dtype=torch.uint8, device=nowhere)
        try:
            if reply.device == Tier.DEVICE and not is_host(self.device) and self._gpu is not None:
                memory = self._gpu.map(file, nbytes, writes=bool(reply.amount), freed=release)
                return memory if reply.amount else memory[:nbytes].view(_TORCH[reply.dtype])
            if reply.amount:
                return map_file(file, footprint_of(nbytes), shared_writes=True, freed=release)
            dtype = _TORCH[reply.dtype]
            return map_file(
                *(file, footprint_of(nbytes)),
                shared_writes=False,
                freed=release,
                dtype=dtype,
                count=nbytes // dtype.itemsize,
            )
        except BaseException:
            release()
            raise


def _shaped(memory: torch.Tensor, reply: Reply) -> torch.Tensor:
    """The tensor in ``memory``, as ``Store._map`` gives it. Each view takes a microsecond or two: none is needless."""
    if reply.amount or not memory.numel():
        memory = memory[: nbytes_of(reply.shape, reply.dtype)].view(_TORCH[reply.dtype])
    return memory if reply.dimensions == 1 else memory.view(reply.shape)


def _name(id: int) -> int:
    if not 0 < id < 1 << 64:
        raise StoreError(f"no object {id}: ids come from create")
    return id
