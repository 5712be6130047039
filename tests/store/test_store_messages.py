"""The wire: what is packed is read back, and nothing else is taken."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disco_accel.store.messages import (
    DTYPES,
    MAX_TEXT,
    REPLY,
    REQUEST,
    SILENT,
    Malformed,
    Opcode,
    Reply,
    ReplyStatus,
    Request,
    Tier,
    parse_reply,
    parse_request,
    words_of,
)

VALID = {
    Opcode.PING: Request(Opcode.PING, 7),
    Opcode.CREATE: Request(Opcode.CREATE, 8, Tier.DEVICE, dtype=8, shape=(3, 0, 5)),
    Opcode.GET: Request(Opcode.GET, 9, object=1 << 63),
    Opcode.PUT: Request(Opcode.PUT, 10, amount=-1, object=3),
    Opcode.FREE: Request(Opcode.FREE, 11, object=3),
    Opcode.RELEASE: Request(Opcode.RELEASE, 0, object=3),
    Opcode.PREFETCH: Request(Opcode.PREFETCH, 12, object=3),
    Opcode.STATS: Request(Opcode.STATS, 13, amount=2),
    Opcode.WANT: Request(Opcode.WANT, 14, amount=5, max_useful=6),
    Opcode.LABEL: Request(Opcode.LABEL, 15, shape=words_of("train-a.7_B")),
    Opcode.HELD: Request(Opcode.HELD, amount=5),
    Opcode.FIRST_CLASS: Request(Opcode.FIRST_CLASS, device=3, amount=-(1 << 40)),
}


def test_a_c_program_finds_each_field_at_its_offset() -> None:
    """The layout that docs/store.md names; a struct of C with the same fields needs no packing."""
    assert (REQUEST.size, REPLY.size) == (104, 288)
    data = Request(Opcode.FIRST_CLASS, 0x01020304, 5, -6, 0, 0).pack()
    assert struct.unpack_from("<BBHIq", data) == (1, 32, 5, 0x01020304, -6)
    data = Request(Opcode.WANT, 1, amount=2, max_useful=3).pack()
    assert struct.unpack_from("<qQqBB", data, 8) == (2, 0, 3, 0, 0)
    data = Reply(ReplyStatus.FULL, 9, 10, 11, 1, 8, 2, (12, 13, 0, 0, 0, 0, 0, 0), "why").pack()
    assert struct.unpack_from("<BBHIqQBB", data) == (1, 3, 1, 9, 10, 11, 8, 2)
    assert struct.unpack_from("<2q", data, 32) == (12, 13)
    assert data[96:99] == b"why"


@pytest.mark.parametrize("opcode", Opcode)
def test_every_request_comes_back_as_it_was(opcode: Opcode) -> None:
    assert parse_request(VALID[opcode].pack()) == VALID[opcode]


def test_a_reply_comes_back_with_its_text_cut_between_characters() -> None:
    reply = Reply(ReplyStatus.REFUSED, 1, text="ä" * MAX_TEXT)
    found = parse_reply(reply.pack())
    assert found.text == "ä" * (MAX_TEXT // 2) and found.status is ReplyStatus.REFUSED
    assert parse_reply(Reply(ReplyStatus.OK, 2, dimensions=2, figures=(3, 4, 0, 0, 0, 0, 0, 0)).pack()).shape == (3, 4)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (Request(Opcode.CREATE, 1, 2), "no device 2"),
        (Request(Opcode.CREATE, 1, dtype=len(DTYPES)), "no element type"),
        (Request(Opcode.CREATE, 1, shape=(-1,)), "negative"),
        (Request(Opcode.CREATE, 1, shape=(1 << 40, 1 << 40)), "at most"),
        (Request(Opcode.GET, 1), "object 0"),
        (Request(Opcode.PING, 1, object=1), "object 1"),
        (Request(Opcode.PING, 1, shape=(1,)), "has no shape"),
        (Request(Opcode.WANT, 1, amount=2, max_useful=1), "less than the minimum"),
        (Request(Opcode.HELD, amount=-1), "not in"),
        (Request(Opcode.FIRST_CLASS, device=64, amount=1), "no device 64"),
        (Request(Opcode.LABEL, 1), "no name"),
        (Request(Opcode.LABEL, 1, shape=(*words_of("a"), 0)), "no name"),
        (Request(Opcode.LABEL, 1, shape=words_of("a b")), "no name"),
        (Request(Opcode.LABEL, 1, shape=(-1,)), "no name"),
        (Request(Opcode.LABEL, 1, dtype=1, shape=words_of("a")), "has no shape"),
    ],
)
def test_a_field_out_of_bounds_is_named(wrong: Request, says: str) -> None:
    with pytest.raises(Malformed, match=says) as found:
        parse_request(wrong.pack())
    assert found.value.number == wrong.number


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(list(Opcode)), st.integers(0, 103), st.integers(0, 255))
def test_a_changed_byte_is_refused_or_another_valid_request(opcode: Opcode, place: int, value: int) -> None:
    data = bytearray(VALID[opcode].pack())
    data[place] = value
    try:
        found = parse_request(bytes(data))
    except Malformed:
        return
    assert found.pack() == bytes(data)


@pytest.mark.parametrize("data", [b"", b"\1", b"\0" * 104, b"\1" * 105, Reply(ReplyStatus.OK, 1).pack()])
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(Malformed):
        parse_request(data)


def test_replies_are_checked_too() -> None:
    good = Reply(ReplyStatus.OK, 1).pack()
    for place, value in ((0, 2), (1, 9), (24, 200), (25, 9)):
        with pytest.raises(Malformed):
            parse_reply(good[:place] + bytes([value]) + good[place + 1 :])
    with pytest.raises(Malformed):
        parse_reply(good[:-1])
    assert Opcode.FIRST_CLASS in SILENT
