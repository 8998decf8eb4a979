"""Calls of torch's stores that the exchanges of ranks depend on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.rank_threads import PATIENCE_SECONDS, tcp_store
from torch_ckpt.ranks.store import peek

STORES = ["TCPStore", "HashStore", "FileStore"]


@pytest.fixture(params=[(kind, prefix) for kind in STORES for prefix in ("", "below")], ids=str)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> dist.Store:
    kind, prefix = request.param
    makers: dict[str, Callable[[], dist.Store]] = {
        "TCPStore": tcp_store,
        "HashStore": dist.HashStore,
        "FileStore": lambda: dist.FileStore(str(tmp_path / "s"), 1),
    }
    store = makers[kind]()
    return dist.PrefixStore(prefix, store) if prefix else store


def test_peek_returns_a_value_and_neither_waits_for_nor_creates_an_absent_key(
    store: dist.Store,
) -> None:
    assert peek(store, "k") is None
    assert not store.check(["k"])
    for value in (b"one", b"", b"\x00\xff" * (1 << 20)):
        store.set("k", value)
        assert peek(store, "k") == value
        assert store.get("k") == value
    store.delete_key("k")
    assert peek(store, "k") is None


def test_one_of_several_threads_owns_a_key(store: dist.Store) -> None:
    together_at = threading.Barrier(4)

    def own(me: str) -> bool:
        together_at.wait(PATIENCE_SECONDS)
        return bool(store.compare_set("owner", "", me) == me.encode())

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(own, "abcd")) == 1
