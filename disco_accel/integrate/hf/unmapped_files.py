"""transformers reads a checkpoint's files without mapping them, in one thread and for the time of one load.

Pages of a mapped file count as resident memory of the process that has read them, beside the weights made of them:
such a load has the whole checkpoint twice at its peak.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from transformers import modeling_utils

from disco_accel.capture.thread_patches import patched
from disco_accel.integrate.hf.safetensors_file import LazyTensor, StoredTensor

_OPENER = "safe_open"


@contextmanager
def files_read_unmapped(stored: Iterable[StoredTensor]) -> Iterator[None]:
    """Inside, the files of ``stored`` are read tensor by tensor where transformers opens them to load a model.

    Other threads, other files and other devices than the CPU get safetensors' own ``safe_open``. Where a later
    transformers opens files by another name, all do: the bits are the same, and the files are mapped.
    """
    if not hasattr(modeling_utils, _OPENER):
        yield
        return
    files: dict[str, dict[str, LazyTensor]] = defaultdict(dict)
    for tensor in stored:
        files[os.path.realpath(tensor.file)][tensor.name] = LazyTensor(tensor)

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def opened(filename: Any, framework: Any = "pt", device: Any = "cpu", **options: Any) -> Any:
            tensors = files.get(os.path.realpath(filename))
            if tensors is None or framework not in ("pt", "torch", "pytorch") or str(device) != "cpu":
                return original(filename, framework=framework, device=device, **options)
            return _UnmappedFile(tensors, lambda: original(filename, framework=framework, device=device, **options))

        return opened

    with patched(modeling_utils, _OPENER, make):
        yield


class _UnmappedFile:
    """What transformers uses of an open file, its tensors by name; all else is the mapped file's, once it is asked."""

    def __init__(self, tensors: Mapping[str, LazyTensor], mapped: Callable[[], Any]) -> None:
        self._tensors = tensors
        self._mapped = mapped

    def __enter__(self) -> _UnmappedFile:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is open between two reads."""

    def keys(self) -> list[str]:
        """Names of the tensors, in safetensors' order."""
        return sorted(self._tensors)

    def get_slice(self, name: str) -> Any:
        """The tensor ``name``, read each time it is indexed. Raises safetensors' error for a name not in the file."""
        return self._tensors[name] if name in self._tensors else self._mapped().get_slice(name)

    def get_tensor(self, name: str) -> Any:
        """The tensor ``name``, read whole. Raises as ``get_slice``, and ConfigError."""
        return self.get_slice(name)[...]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mapped(), name)
