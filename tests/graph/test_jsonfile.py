"""Files that would take much memory or time are refused before they are parsed, and messages stay short."""

from __future__ import annotations

import json
import random
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from disco_accel.cli.main import main
from disco_accel.errors import DiscoError, GraphFileError, VerifyError
from disco_accel.graph import strict_json
from disco_accel.graph.files import read_memgraph, read_taskgraph, taskgraph_from_json
from disco_accel.graph.strict_json import MAX_TOKEN, parse_json
from disco_accel.plan import make_plan
from disco_accel.verify.static import verify
from tests.support.oracles.adversary import run_reference

LONG = 20_000_000


def plan(**changes: bytes) -> bytes:
    """A plan file in which some values are other bytes."""
    values = {
        "top": b"",
        "op": b'"mm"',
        "id": b"1",
        "kind": b'"compute"',
        "size": b"256",
        "duration": b"1.0",
        **changes,
    }
    return (
        b'{"format": "memgraph", "version": 1, %(top)s "devices": [{"id": 0, "memory": 4096}], "vertices": ['
        b'{"id": 0, "kind": "input", "device": 0, "size": 256, "addr": 256},'
        b'{"id": %(id)s, "kind": %(kind)s, "op": %(op)s, "device": 0, "size": %(size)s, "inputs": [0], "addr": 0,'
        b' "duration": %(duration)s}], "edges": {"data": [], "memory": []}}'
    ) % {key.encode(): value for key, value in values.items()}


ENDLESS: dict[str, Callable[[], bytes]] = {
    "op": lambda: plan(op=b'"' + b"a" * LONG + b'"'),
    "id": lambda: plan(id=b'"' + b"a" * LONG + b'"'),
    "kind": lambda: plan(kind=b'"' + b"a" * LONG + b'"'),
    "a name": lambda: plan(top=b'"name": "' + b"a" * LONG + b'",'),
    "what nobody reads": lambda: plan(top=b'"comment": ["' + b"a" * LONG + b'"],'),
    "a key": lambda: plan(top=b'"' + b"a" * LONG + b'": 1,'),
    "a text of quotes": lambda: plan(op=b'"' + b'\\"' * (LONG // 2) + b'"'),
    "a text of backslashes": lambda: plan(op=b'"' + b"\\\\" * (LONG // 2) + b'"'),
    "a text of delimiters": lambda: plan(op=b'"' + b"}, ]:" * (LONG // 5) + b'"'),
    "a text without end": lambda: b'{"op": "' + b"a" * LONG,
    "digits": lambda: plan(size=b"9" * LONG),
    "digits behind a point": lambda: plan(duration=b"0." + b"1" * LONG),
    "an exponent": lambda: plan(duration=b"1e" + b"1" * LONG),
    "characters beyond ASCII": lambda: plan(top=b'"name": "\xf0\x9f\x98\x80",' + b" " * (1 << 26)),
    "keys": lambda: plan(top=b'"x": {' + b",".join(b'"%d":1' % i for i in range(300_000)) + b'"":1},'),
    "keys of the whole": lambda: b'{"a":{}' + b',"b":{}' * (LONG // 7) + b"}",
}


@pytest.mark.parametrize("what", ENDLESS)
def test_what_has_no_end_is_refused_before_it_is_parsed(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In little more memory than the file takes itself."""

    def parsed(*args: object, **kwargs: object) -> None:
        raise AssertionError("the file was parsed")

    data = ENDLESS[what]()
    monkeypatch.setattr(strict_json.json, "loads", parsed)
    monkeypatch.setattr(strict_json, "MAX_KEYS", LONG // 10)
    tracemalloc.start()
    try:
        with pytest.raises(GraphFileError) as refused:
            parse_json(data)
        assert tracemalloc.get_traced_memory()[1] < 2.5 * len(data)
    finally:
        tracemalloc.stop()
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize("what", ["op", "digits"])
def test_the_command_line_names_the_file(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    file.write_bytes(ENDLESS[what]())
    for arguments in (
        ["verify", str(Path(__file__).parents[1] / "data/bad/no.task.json"), str(file)],
        ["bound", str(file)],
    ):
        assert main(arguments) == 2
        captured = capsys.readouterr()
        assert str(file) in captured.err and "longer than" in captured.err and len(captured.err) < 400


def test_an_object_of_many_keys_is_refused_wherever_it_is() -> None:
    many = {f"k{i}": {} for i in range(strict_json.MAX_KEYS_OF_ONE + 1)}
    with pytest.raises(GraphFileError, match="keys"):
        parse_json(json.dumps({"a": [many]}).encode())
    many.popitem()
    parse_json(json.dumps({"a": [many]}).encode())


def test_texts_and_numbers_up_to_the_limit_are_read() -> None:
    text, number = "a" * MAX_TOKEN, "1." + "0" * (MAX_TOKEN - 2)
    assert parse_json(f'{{"a": "{text}", "b": {number}}}'.encode()) == {"a": text, "b": 1.0}
    assert parse_json(b"[" + b"1," * MAX_TOKEN + b" " * MAX_TOKEN + b"1]") == [1] * (MAX_TOKEN + 1)
    with pytest.raises(GraphFileError, match="longer"):
        parse_json(f'["{text}a"]'.encode())
    with pytest.raises(GraphFileError, match="longer"):
        parse_json(f"[{number}0]".encode())


def test_long_tokens_are_found_wherever_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a lexer, in random JSON of quotes, backslashes and delimiters."""
    monkeypatch.setattr(strict_json, "MAX_TOKEN", 8)
    token = re.compile(rb'"((?:[^"\\]|\\.)*)"|([^,:\[\]{}"\s]+)')
    rng = random.Random(3)
    parts = (b"a", b",", b"]", b":", b" ", b'\\"', b"\\\\", b"\\n", b"[")
    answers = set()
    for _ in range(4000):
        values = []
        for _ in range(rng.randrange(1, 6)):
            if rng.random() < 0.6:
                values.append(b'"' + b"".join(rng.choices(parts, k=rng.choice((0, 1, 3, 5, 8, 9)))) + b'"')
            else:
                values.append(b"".join(rng.choices((b"1", b"2"), k=rng.choice((1, 7, 8, 9)))))
        data = b"[" + rng.choice((b",", b" ,\n")).join(values) + b" " * rng.choice((0, 20)) + b"]"
        json.loads(data)
        longest = max(len(m[1] if m[1] is not None else m[2]) for m in token.finditer(data))
        # Nobody is refused without need, and nobody over the limit gets through.
        assert (strict_json._long_token(data) is not None) == (longest > 8), data
        answers.add(longest > 8)
    assert answers == {True, False}


def _task(name: str, op: str) -> dict[str, Any]:
    vertices = [
        {"id": 0, "kind": "input", "device": 0, "size": 512},
        {"id": 1, "kind": "compute", "device": 0, "size": 512, "inputs": [0], "op": op},
    ]
    return {
        "format": "taskgraph",
        "version": 1,
        "name": name,
        "devices": [{"id": 0, "memory": 4096}],
        "vertices": vertices,
    }


def test_messages_cut_what_they_quote() -> None:
    """Names of vertices and graphs that are long, of several lines or not printable."""
    name = "n\n\x1b[31m" + "n" * 60_000
    graph = taskgraph_from_json(_task(name, name))
    good = make_plan(graph)
    messages = []
    for memory, task, made in ((256, graph, good), (4096, graph, good)):
        try:
            make_plan(task, memory=memory)
            spoilt = type(made)(made.name, made.devices, made.vertices, {}, made.data_edges, made.memory_edges, {})
            with pytest.raises(VerifyError) as reference:
                run_reference(task, spoilt, 0)
            messages.append(str(reference.value))
            verify(task, spoilt)
        except DiscoError as error:
            messages.append(str(error))
    assert len(messages) == 3
    for message in messages:
        assert "n" * 10 in message and len(message) < 300 and message.isprintable()


def test_graph_files_name_places_shortly(tmp_path: Path) -> None:
    file = tmp_path / "graph.json"
    file.write_text(json.dumps({**_task("x", "y"), "format": "z" * 60_000}))
    for read in (read_taskgraph, read_memgraph):
        with pytest.raises(GraphFileError) as refused:
            read(file)
        assert len(str(refused.value)) < 400
