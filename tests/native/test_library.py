"""Compiled libraries on disk: never half there, never another's, built anew when they are broken."""

from __future__ import annotations

import ctypes
import hashlib
import os
import resource
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from disco_accel.native import plain_library
from disco_accel.native.library_file import Library
from disco_accel.native.plain_library import ExtensionError, load_plain

ROOT = Path(__file__).resolve().parents[2]
RACES = int(os.environ.get("DISCO_BUILD_RACES", "8"))
KILLS = int(os.environ.get("DISCO_BUILD_KILLS", "4"))
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")


@pytest.mark.parametrize("kind", ["plain", "torch"])
@pytest.mark.parametrize(
    ("scenario", "count"), [("race", RACES), ("half_linked", 1), ("killed_while_linking", 1), ("kills", KILLS)]
)
def test_no_process_ever_loads_a_part(scenario: str, kind: str, count: int, tmp_path: Path) -> None:
    """Racing builders, one that is half through linking, and kills at any time; DISCO_BUILD_RACES=100 and
    DISCO_BUILD_KILLS=50 make it long."""
    command = [sys.executable, "-m", "tests.native.building", scenario, kind, str(tmp_path), str(count)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Library:
    """A library that was built; it answers 42."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    (tmp_path / "tiny.cpp").write_text('extern "C" int disco_tiny() { return 42; }\n')
    assert load_plain("tiny", "tiny.cpp", tmp_path).disco_tiny() == 42
    return plain_library._plain("tiny", "tiny.cpp", tmp_path)


def replace_with(library: Library, data: bytes) -> None:
    """Another file in its place: this process has the one from before loaded, and runs its code when it ends."""
    mode = library.path.stat().st_mode
    library.path.unlink()
    library.path.write_bytes(data)
    library.path.chmod(mode)


def truncated(library: Library) -> None:
    replace_with(library, library.path.read_bytes()[:4096])


def flipped(library: Library) -> None:
    data = bytearray(library.path.read_bytes())
    data[len(data) // 2] ^= 1
    replace_with(library, bytes(data))


def without_record(library: Library) -> None:
    library.record.unlink()


def with_odd_record(library: Library) -> None:
    library.record.write_bytes(b"\xff\0" * 5000)


def another_library(library: Library) -> None:
    replace_with(library, b"")


def not_loadable(library: Library) -> None:
    """Whole, and no library: what another machine's loader takes."""
    replace_with(library, b"int main")
    library.record.write_text(f"8 {hashlib.sha256(b'int main').hexdigest()}\n")


BREAKS = (truncated, flipped, without_record, with_odd_record, another_library, not_loadable)


@pytest.mark.parametrize("breaks", BREAKS)
def test_a_broken_library_is_built_anew(breaks: Callable[[Library], None], tiny: Library) -> None:
    """Whatever was done to the file, the next process gets a working one."""
    breaks(tiny)
    assert answer(tiny) == "42"


@pytest.mark.parametrize("breaks", BREAKS)
def test_a_broken_library_that_may_not_be_built_is_a_typed_error(
    breaks: Callable[[Library], None], tiny: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DISCO_BUILD_EXT=0 with nothing but a broken library: no crash, and the message says what is wrong with it."""
    breaks(tiny)
    monkeypatch.setenv("DISCO_BUILD_EXT", "0")
    assert "tiny.so" in answer(tiny) and "DISCO_BUILD_EXT=0 forbids building it" in answer(tiny)


def answer(library: Library) -> str:
    """What a new process gets of the library, or the message of its ExtensionError."""
    root = str(library.directory.parents[1])
    program = f"""
        from pathlib import Path
        from disco_accel.native.plain_library import ExtensionError, load_plain
        try:
            print(load_plain("tiny", "tiny.cpp", Path({root!r})).disco_tiny())
        except ExtensionError as error:
            print(error)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, (done.returncode, done.stderr)
    return done.stdout.strip()


def group_can_write(library: Library) -> None:
    library.path.chmod(0o775)


def others_can_write_the_folder(library: Library) -> None:
    library.directory.chmod(0o777)


def a_link_to_a_library(library: Library) -> None:
    library.path.rename(library.directory / "real.so")
    library.path.symlink_to("real.so")


def a_link_to_the_folder(library: Library) -> None:
    library.directory.rename(library.directory.parent / "real")
    library.directory.symlink_to("real")


def a_pipe(library: Library) -> None:
    library.path.unlink()
    os.mkfifo(library.path)


def of_another_user(library: Library) -> None:
    os.chown(library.path, 12345, -1)


def in_a_folder_of_another_user(library: Library) -> None:
    os.chown(library.directory, 12345, -1)


@pytest.mark.parametrize(
    ("breaks", "says"),
    [
        (group_can_write, "can be written by others"),
        (others_can_write_the_folder, "can be written by others"),
        (a_link_to_a_library, "is not a plain file"),
        (a_link_to_the_folder, "is not a folder"),
        (a_pipe, "is not a plain file"),
        pytest.param(of_another_user, "belongs to user 12345", marks=AS_ROOT),
        pytest.param(in_a_folder_of_another_user, "belongs to user 12345", marks=AS_ROOT),
    ],
)
def test_what_others_can_have_written_is_not_loaded(
    breaks: Callable[[Library], None], says: str, tiny: Library
) -> None:
    """Neither loaded nor overwritten; the message says what to do."""
    breaks(tiny)
    with pytest.raises(ExtensionError, match=f"{says}.*remove .*TORCH_EXTENSIONS_DIR"):
        tiny.load(ctypes.CDLL)


def test_a_folder_that_others_can_write_is_not_built_in(tiny: Library) -> None:
    """A library could be swapped between its check and its loading."""
    tiny.path.unlink()
    tiny.directory.chmod(0o777)
    with pytest.raises(ExtensionError, match="can be written by others"):
        tiny.ready()


def test_modes_do_not_depend_on_the_umask(tiny: Library, tmp_path: Path) -> None:
    """With a umask of 0 what was built is still loaded."""
    root = tmp_path / "open"
    root.mkdir()
    (root / "tiny.cpp").write_text((tmp_path / "tiny.cpp").read_text())
    before = os.umask(0)
    try:
        os.environ["TORCH_EXTENSIONS_DIR"] = str(root / "a" / "b")
        for _ in range(2):
            assert load_plain("tiny", "tiny.cpp", root).disco_tiny() == 42
    finally:
        os.umask(before)


def as_child(work: Callable[[], None]) -> str:
    """The message of the ExtensionError that ``work`` raises in a process of its own; empty if it raises none."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        try:
            work()
            os._exit(0)
        except ExtensionError as error:
            os.write(writer, str(error).encode())
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as pipe:
        message = pipe.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    return message


@AS_ROOT
def test_another_user_takes_what_root_has_built(tiny: Library, tmp_path: Path) -> None:
    """And gets a typed error where root has built nothing, or something broken: the folder is not theirs."""
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(0o755)

    def as_user() -> None:
        os.setuid(12345)
        assert tiny.load(ctypes.CDLL).disco_tiny() == 42

    assert as_child(as_user) == ""
    truncated(tiny)
    assert "Permission denied" in as_child(as_user)
    tiny.path.unlink()
    assert "TORCH_EXTENSIONS_DIR" in as_child(as_user)


def test_no_room_is_a_typed_error(tiny: Library) -> None:
    """A file system that is full; nothing is left behind, and the next build works."""
    tiny.path.unlink()

    def without_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
        tiny.ready()

    assert "tiny" in as_child(without_room)
    assert not tiny.path.exists() and not list(tiny.directory.glob("building-*"))
    assert tiny.load(ctypes.CDLL).disco_tiny() == 42


def test_a_folder_that_cannot_be_made_is_a_typed_error(tiny: Library, tmp_path: Path) -> None:
    """A read-only cache, or a file in its place."""
    for folder in (tmp_path / "tiny.cpp", Path("/proc/disco")):
        os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)
        with pytest.raises(ExtensionError, match=r"cannot be built: .*TORCH_EXTENSIONS_DIR"):
            load_plain("tiny", "tiny.cpp", tmp_path)


def test_times_of_files_mean_nothing(tiny: Library) -> None:
    """A clock that was wrong when the library was built, or is now, neither rebuilds nor keeps a broken one."""
    made = tiny.path.stat().st_ino
    for seconds in (0, 4_000_000_000):
        for file in (tiny.path, tiny.record):
            os.utime(file, (seconds, seconds))
        assert tiny.ready().stat().st_ino == made
    truncated(tiny)
    os.utime(tiny.path, (4_000_000_000, 4_000_000_000))
    assert tiny.fault() is not None and answer(tiny) == "42"


def test_a_process_without_a_home_gets_a_typed_error() -> None:
    """No HOME and no entry for the user: a sentence, no traceback."""
    program = """
        import os, pwd
        os.environ.pop("HOME", None)
        os.environ.pop("TORCH_EXTENSIONS_DIR", None)
        def missing(uid): raise KeyError(uid)
        pwd.getpwuid = missing
        from disco_accel.native.plain_library import ExtensionError, cache_root
        try:
            cache_root()
        except ExtensionError as error:
            print(error)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert "set HOME, or TORCH_EXTENSIONS_DIR" in done.stdout, done.stderr
