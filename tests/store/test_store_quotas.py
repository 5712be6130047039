"""What each client may take at most: by default, and where its label has a quota of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from disco_accel.errors import ConfigError, StoreError, StoreFull
from disco_accel.store.client import Store
from disco_accel.store.connection import Channel
from disco_accel.store.messages import Opcode, Request, words_of
from disco_accel.store.store_command import parse_quotas
from tests.store.serving import MIB, filled, serving, until

QUOTAS = {"large": 6 * MIB, "small": MIB}


def test_a_labels_quota_takes_the_place_of_everybodys(tmp_path: Path) -> None:
    with (
        serving(tmp_path, quota=2 * MIB, quotas=QUOTAS) as server,
        Store.connect(server.path, label="large") as large,
        Store.connect(server.path, label="small") as small,
        Store.connect(server.path, label="other") as other,
        Store.connect(server.path) as nameless,
    ):
        for store, most, words in (
            (large, 6, r"process \d+ \(large\)"),
            (small, 1, r"process \d+ \(small\)"),
            (other, 2, r"process \d+ \(other\)"),
            (nameless, 2, r"process \d+"),
        ):
            filled(store, most * MIB, 1, "host")
            with pytest.raises(StoreFull, match=f"quota: 4096 bytes wanted, {words} owns {most * MIB} of {most * MIB}"):
                store.create((1,), torch.uint8)
        assert [client.get("label") for client in large.stats()["clients"]] == ["large", "small", "other", None]
        assert [store.stats()["quota"] for store in (large, small, nameless)] == [6 * MIB, MIB, 2 * MIB]


def test_who_reaches_its_quota_starves_nobody(tmp_path: Path) -> None:
    """Of objects that are in use and cannot be evicted, and of budgets; each client has a quota of its own, also where
    two have one label."""
    with (
        serving(tmp_path, device=8 * MIB, quotas={"greedy": 3 * MIB}) as server,
        Store.connect(server.path, label="greedy") as one,
        Store.connect(server.path, label="greedy") as two,
        Store.connect(server.path) as modest,
    ):
        kept = [store.get(filled(store, MIB, 1)) for store in (one, two) for _ in range(3)]
        for store in (one, two):
            with pytest.raises(StoreFull, match="quota"):
                store.create((MIB,), torch.uint8, "device")
        assert (modest.get(filled(modest, 2 * MIB, 7)) == 7).all()
        kept.clear()
        one.wanted(MIB, 100 * MIB)
        modest.wanted(2 * MIB, 100 * MIB)
        # Objects that nobody uses any more are saved, and leave.
        until(lambda: one.granted() == 3 * MIB and modest.granted() == 5 * MIB)


def test_a_label_is_given_once_and_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tmp_path, quotas=QUOTAS) as server:
        monkeypatch.setenv("DISCO_STORE_LABEL", "small")
        with Store.connect(server.path) as named, Store.connect(server.path, label="") as nameless:
            assert [client.get("label") for client in named.stats()["clients"]] == ["small", None]
            filled(nameless, 2 * MIB, 1)
        for before in (Request(Opcode.LABEL, shape=words_of("small")), Request(Opcode.CREATE, dtype=0, shape=(1,))):
            channel = Channel(server.path, 10.0)
            channel.ask(before)
            with pytest.raises(StoreError, match="given once, before"):
                channel.ask(Request(Opcode.LABEL, shape=words_of("large")))
            channel.close()
        for wrong in ("a b", "x" * 65, "ä", "a\n", "a=1"):
            with pytest.raises(ConfigError, match=r"label: .* letters, digits"):
                Store.connect(server.path, label=wrong)
        monkeypatch.setenv("DISCO_STORE_LABEL", "a/b")
        with pytest.raises(ConfigError, match="DISCO_STORE_LABEL: 'a/b' is not"):
            Store.connect(server.path)


def test_quotas_are_read_from_the_command_line() -> None:
    assert parse_quotas([]) == (None, {})
    assert parse_quotas(["a=2MiB", "1GiB", "b.c-d_e=3KiB"]) == (1 << 30, {"a": 2 * MIB, "b.c-d_e": 3 << 10})
    for wrong, says in (
        (["a=1MiB", "a=2MiB"], "a has a quota already"),
        (["1MiB", "2MiB"], "each client has a quota already"),
        (["=1MiB"], "LABEL=SIZE"),
        (["a b=1MiB"], "LABEL=SIZE"),
        (["a=b=1MiB"], "LABEL=SIZE"),
        (["a="], "size"),
        (["a=-1MiB"], "size"),
        (["a=0B"], "size"),
    ):
        with pytest.raises(ConfigError, match=says):
            parse_quotas(wrong)
