"""Building the extension: keyed, switchable, and clear about what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from disco_accel.native import extension
from disco_accel.native.plain_library import ExtensionError, build_plain


def test_a_library_that_is_there_is_not_built_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With building forbidden, a built library still loads."""
    extension.load_extension()
    monkeypatch.setenv("DISCO_BUILD_EXT", "0")
    assert extension.build("disco_runtime", extension.sources()).exists()


def test_without_permission_or_compiler_the_error_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DISCO_BUILD_EXT=0 and a missing compiler are typed errors that name the way out; nothing is left behind."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("DISCO_BUILD_EXT", "0")
    with pytest.raises(ExtensionError, match="DISCO_BUILD_EXT=0 forbids"):
        extension.build("disco_runtime", extension.sources())
    with pytest.raises(ExtensionError, match="DISCO_BUILD_EXT=0 forbids"):
        build_plain("disco_malloc_watch", "torch/malloc_watch.cpp")
    monkeypatch.delenv("DISCO_BUILD_EXT")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ExtensionError, match=r"no-such-compiler.*install g\+\+"):
        extension.build("disco_runtime", extension.sources())
    with pytest.raises(ExtensionError, match="no-such-compiler"):
        build_plain("disco_malloc_watch", "torch/malloc_watch.cpp")
    assert list(tmp_path.iterdir()) == []


def test_a_build_that_was_killed_does_not_hold_up_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's lock file stays behind when a build is killed, and PyTorch would wait for it for ever."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    source = tmp_path / "empty.cpp"
    source.write_text("int disco_nothing() { return 0; }\n")
    monkeypatch.setattr(extension, "ROOT", tmp_path)
    directory = tmp_path / "cache" / f"empty-torch{torch.__version__}-{extension._key([source], extension._FLAGS)}"
    directory.mkdir(parents=True)
    (directory / "lock").touch()
    assert extension.build("empty", [source]).exists()


def test_a_library_is_built_anew_for_what_it_is_linked_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator decorator links the engine: kept beside a new engine, it would load the old one a second time."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(extension, "_compile", lambda name, *rest: (rest[-1] / f"{name}.so").touch())
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    files = extension.sources()
    libraries = [extension.build("user", files, libraries=(engine,)) for engine in ("/a.so", "/b.so", "/a.so")]
    assert libraries[0] == libraries[2] != libraries[1]


def test_the_engine_is_compiled_as_pytorch_is() -> None:
    """PyTorch's wheels are built without the assertions that its headers have for debugging."""
    assert "-DNDEBUG" in extension._FLAGS
    cuda = extension.cuda_flags((Path("/first"), Path("/second")))
    assert "-DNDEBUG" in cuda and cuda.index("-I/first") < cuda.index("-I/second")


def test_the_directory_depends_on_torch_and_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another PyTorch or other flags build elsewhere."""
    files = extension.sources()
    key = extension._key(files, ("-O2",))
    assert key == extension._key(files, ("-O2",)) != extension._key(files, ("-O0",))
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    assert extension._key(files, ("-O2",)) != key


def test_a_broken_source_is_a_typed_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler's last lines are in the message, and a later attempt is not blocked by a stale lock."""
    root = tmp_path / "sources"
    (root / "torch").mkdir(parents=True)
    (root / "torch" / "broken.cpp").write_text("int main( { return 0; }\n")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    for _ in range(2):
        with pytest.raises(ExtensionError, match=r"broken\.cpp"):
            build_plain("broken", "torch/broken.cpp", root)
