"""What a merge computes, recorded without its values: each tensor of the result is made from files later, by itself.

transformers and PEFT run once over fake tensors. The recording keeps their ATen calls, in order, and the storages that
each of them reads and writes. The calls that a result depends on run again on real tensors, and a storage is freed
after its last use. They are the same calls with the same arguments, so a result has PEFT's bits.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from disco_accel.errors import ConfigError
from disco_accel.sizes import format_size

_WHOLE_WRITES = ("aten.copy_.", "aten.fill_.", "aten.zero_.", "aten.normal_.", "aten.uniform_.")
"""Calls that leave nothing of their first argument."""
_LARGEST_LITERAL = 1 << 20
"""Bytes of a tensor that Python code makes of numbers, such as indices of rows."""
INSTEAD = "merge it in memory with PEFT's merge_and_unload"


class _MergeInput(Protocol):
    """A tensor that a merge reads from a file, contiguous."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def room(self) -> int:
        """Bytes held at most while it is read, its own among them."""

    def read(self) -> torch.Tensor:
        """Its values, in memory of their own. Raises ConfigError."""


@dataclass(frozen=True, slots=True)
class _TensorView:
    """A view of a recorded storage, in elements of ``dtype``."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return torch.Size(self.size).numel() * self.dtype.itemsize

    def of(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The same view of a real storage."""
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True, slots=True)
class _Call:
    function: Any
    args: Any
    kwargs: Any
    reads: frozenset[int]
    writes: frozenset[int]
    overwrites: frozenset[int]
    makes: tuple[_TensorView, ...]
    made_at: tuple[int, ...]


@dataclass(slots=True)
class _Ledger:
    """Bytes of tensors that are held now, and at most so far; ``limit``: a merge never holds more."""

    limit: int
    held: int = 0
    peak: int = 0

    def take(self, nbytes: int) -> None:
        """Count bytes before they are allocated. Raises ConfigError: they would be more than the limit."""
        if self.held + nbytes > self.limit:
            raise ConfigError(
                f"--memory: {format_size(self.held + nbytes)} of tensors are needed at a time, "
                f"{format_size(self.limit)} are given; give more"
            )
        self.held += nbytes
        self.peak = max(self.peak, self.held)

    def give(self, nbytes: int) -> None:
        """Count bytes that are freed."""
        self.held -= nbytes


@dataclass(slots=True)
class _MergeGroup:
    """Results that are made together, because calls that make one make another.

    ``calls``: of the recording, in order; none where a result is a tensor of a file. ``peak``: bytes held at most.
    """

    calls: list[int]
    results: dict[str, _TensorView]
    inputs: frozenset[int]
    peak: int = 0


class _MergeRecording(TorchDispatchMode):
    """A mode above ``FakeTensorMode``, on while transformers and PEFT run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inputs: dict[int, _MergeInput] = {}
        self._calls: list[_Call] = []
        self._storages: dict[int, tuple[torch.Tensor, int]] = {}
        """Storage → a tensor that keeps it, and its bytes."""
        self._writers: dict[int, list[int]] = defaultdict(list)
        self._off = False

    def stand_in(self, source: _MergeInput) -> torch.Tensor:
        """A fake tensor that stands for ``source``. The mode must be on."""
        self._off = True
        try:
            fake = torch.empty(source.shape, dtype=source.dtype)
        finally:
            self._off = False
        view = self.view_of(fake)
        self.inputs[view.storage] = source
        return fake

    def view_of(self, tensor: torch.Tensor) -> _TensorView:
        """Where ``tensor``, which is fake, lies."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:
            # The tensor is kept, so that no other storage gets the address.
            self._storages[storage._cdata] = tensor, storage.nbytes()
        size, stride = tuple(tensor.size()), tuple(tensor.stride())
        return _TensorView(storage._cdata, tensor.dtype, size, stride, int(tensor.storage_offset()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._off:
            return func(*args, **kwargs)
        views = tree_map(self._as_view, (args, kwargs))
        made = func(*args, **kwargs)
        read = {view.storage for view in tree_leaves(views) if isinstance(view, _TensorView)}
        written = _written(func, views)
        outputs = [self.view_of(value) for value in tree_leaves(made) if isinstance(value, torch.Tensor)]
        made_at = tuple(n for n, view in enumerate(outputs) if view.storage not in read)
        makes = tuple(outputs[n] for n in made_at)
        if not written and not makes:
            return made  # a view, or a question about one
        whole = frozenset(v.storage for v in written if self._is_whole(v) and str(func).startswith(_WHOLE_WRITES))
        source = tree_map(self._as_view, (args[1:], kwargs)) if whole else views
        reads = frozenset(view.storage for view in tree_leaves(source) if isinstance(view, _TensorView))
        changed = frozenset(view.storage for view in written)
        for key in {*changed, *(view.storage for view in makes)}:
            self._writers[key].append(len(self._calls))
        self._calls.append(_Call(func, views[0], views[1], reads, changed, whole - reads, makes, made_at))
        return made

    def _as_view(self, value: Any) -> Any:
        if isinstance(value, FakeTensor):
            if value.is_conj() or value.is_neg():
                raise ConfigError(f"the merge uses lazily conjugated tensors, which are not recorded; {INSTEAD}")
            return self.view_of(value)
        if isinstance(value, torch.Tensor) and value.numel() * value.element_size() > _LARGEST_LITERAL:
            raise ConfigError(f"the merge uses a tensor of {list(value.shape)} that is in no file; {INSTEAD}")
        return value

    def _is_whole(self, view: _TensorView) -> bool:
        return view.offset == 0 and view.nbytes == self.room(view.storage)

    def groups(self, results: Mapping[str, _TensorView]) -> list[_MergeGroup]:
        """All ``results``, those that share calls together, in the order of their first ones.

        Raises:
            ConfigError: a result depends on values that no file has, such as a weight drawn at random.
        """
        group_of_call: dict[int, int] = {}
        groups: dict[int, _MergeGroup] = {}
        for number, (name, view) in enumerate(results.items()):
            calls, inputs = self._needed(name, view)
            found = _MergeGroup(sorted(calls), {name: view}, frozenset(inputs))
            for other in sorted({group_of_call[call] for call in calls if call in group_of_call}):
                before = groups.pop(other)
                found.calls = sorted({*found.calls, *before.calls})
                found.results = before.results | found.results
                found.inputs |= before.inputs
            groups[number] = found
            group_of_call |= dict.fromkeys(found.calls, number)
        order = {name: position for position, name in enumerate(results)}
        made = sorted(groups.values(), key=lambda group: min(order[name] for name in group.results))
        for group in made:
            group.peak = _peak(self, group)
        return made

    def _needed(self, name: str, view: _TensorView) -> tuple[set[int], set[int]]:
        """Numbers of the calls that make ``view`` as it is at the end, and the storages of inputs that they read."""
        calls: set[int] = set()
        inputs: set[int] = set()
        reached: dict[int, int] = {}
        waiting = [(view.storage, len(self._calls))]
        while waiting:
            storage, before = waiting.pop()
            if reached.get(storage, -1) >= before:
                continue
            reached[storage] = before
            writers = self._writers.get(storage, [])
            for position in reversed(writers[: bisect_left(writers, before)]):
                call = self._calls[position]
                if position not in calls:
                    calls.add(position)
                    waiting += [(read, position) for read in call.reads]
                    self._require_files(name, call)
                if storage in call.overwrites or any(made.storage == storage for made in call.makes):
                    break
            else:
                if storage not in self.inputs:
                    raise _in_no_file(name)
                inputs.add(storage)
        return calls, inputs

    def _require_files(self, name: str, call: _Call) -> None:
        if torch.Tag.nondeterministic_seeded in call.function.tags:
            raise _in_no_file(name)

    def call(self, number: int) -> _Call:
        """The recorded call of that number."""
        return self._calls[number]

    def room(self, storage: int) -> int:
        """Bytes of a storage."""
        return self._storages[storage][1]

    def run(self, group: _MergeGroup, ledger: _Ledger, done: Callable[[str, torch.Tensor], None]) -> None:
        """Make the results of ``group`` from the files and give each to ``done``, which must not keep it.

        Raises:
            ConfigError: a file cannot be read, or the ledger's limit is too low.
        """
        with torch.no_grad():
            _run(self, group, ledger, done)


def _in_no_file(name: str) -> ConfigError:
    return ConfigError(
        f"{name}: the merged weight depends on values that neither the base nor the adapter has in a file; an adapter "
        f"that lacks tensors, or whose layers are drawn from a seed, is not merged here: {INSTEAD}"
    )


def _written(function: Any, views: tuple[Any, Any]) -> list[_TensorView]:
    args, kwargs = views
    found: list[_TensorView] = []
    if not function._schema.is_mutable:
        return found
    for position, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            found += [view for view in tree_leaves(value) if isinstance(view, _TensorView)]
    return found


def _schedule(recording: _MergeRecording, group: _MergeGroup) -> Iterator[tuple[str, Any]]:
    """The steps of a group, in order: ``read`` or ``allocate`` a storage, ``run`` a call, ``give`` a result, ``free`` a
    storage."""
    calls = [recording.call(number) for number in group.calls]
    last = {view.storage: -1 for view in group.results.values()}
    written: dict[int, int] = {}
    for position, call in enumerate(calls):
        made = [view.storage for view in call.makes]
        last |= dict.fromkeys((*call.reads, *call.writes, *made), position)
        written |= dict.fromkeys((*call.writes, *made), position)
    whole_at: dict[int, list[str]] = defaultdict(list)
    for name, view in group.results.items():
        whole_at[written.get(view.storage, -1)].append(name)
    held: set[int] = set()
    for position in range(-1, len(calls)):
        needed = {group.results[name].storage for name in whole_at[position]}
        if position >= 0:
            needed = {*calls[position].reads, *calls[position].writes}
        for storage in sorted(needed - held):
            new = position >= 0 and storage in calls[position].overwrites
            yield "allocate" if new or storage not in recording.inputs else "read", storage
        held |= needed
        if position >= 0:
            yield "run", calls[position]
            held |= {view.storage for view in calls[position].makes}
        yield from (("give", name) for name in whole_at[position])
        for storage in sorted(key for key in held if last[key] <= position):
            yield "free", storage
            held.discard(storage)


def _peak(recording: _MergeRecording, group: _MergeGroup) -> int:
    """Bytes that ``_run`` holds at most."""
    held = most = 0
    for step, what in _schedule(recording, group):
        if step == "read":
            most = max(most, held + recording.inputs[what].room)
        if step in ("read", "allocate"):
            held += recording.room(what)
        elif step == "run":
            held += sum(recording.room(storage) for storage in {view.storage for view in what.makes})
        elif step == "free":
            held -= recording.room(what)
        most = max(most, held)
    return most


def _run(
    recording: _MergeRecording, group: _MergeGroup, ledger: _Ledger, done: Callable[[str, torch.Tensor], None]
) -> None:
    real: dict[int, torch.UntypedStorage] = {}
    before = ledger.held
    try:
        for step, what in _schedule(recording, group):
            if step == "read":
                source, room = recording.inputs[what], recording.room(what)
                ledger.take(source.room)
                real[what] = source.read().untyped_storage()
                ledger.give(source.room - room)
            elif step == "allocate":
                ledger.take(recording.room(what))
                real[what] = torch.UntypedStorage(recording.room(what))
            elif step == "run":
                for storage in {view.storage for view in what.makes}:
                    ledger.take(recording.room(storage))
                _make(what, real)
            elif step == "give":
                view = group.results[what]
                done(what, view.of(real[view.storage]))
            else:
                del real[what]
                ledger.give(recording.room(what))
    finally:
        real.clear()
        ledger.held = before


def _make(call: _Call, real: dict[int, torch.UntypedStorage]) -> None:
    def value(view: Any) -> Any:
        if isinstance(view, _TensorView):
            return view.of(real[view.storage])
        return view.clone() if isinstance(view, torch.Tensor) else view

    made = call.function(*tree_map(value, call.args), **tree_map(value, call.kwargs))
    tensors = [each for each in tree_leaves(made) if isinstance(each, torch.Tensor)]
    for position, view in zip(call.made_at, call.makes, strict=True):
        tensor = tensors[position]
        found = tensor.dtype, tuple(tensor.size()), tuple(tensor.stride()), tensor.storage_offset()
        if found != (view.dtype, view.size, view.stride, view.offset):
            raise ConfigError(f"{call.function} made {found}, where {view} was expected; {INSTEAD}")
        real[view.storage] = tensor.untyped_storage()
