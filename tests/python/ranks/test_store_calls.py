"""Store calls of several ranks, in every order of two ranks' calls.

The store is an object of this process. A test runs all the work of one rank just before the n-th
call of another rank, for each n.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.rank_threads import PATIENCE_SECONDS, SHORT, tcp_store, together
from torch_ckpt.ranks.exchange import Answers, Exchange
from torch_ckpt.ranks.group import RankGroup
from torch_ckpt.ranks.store import peek

# More than the calls of any work in this file.
MOST_CALLS = 60


class Keys:
    """The keys of all ranks."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.lock = threading.RLock()
        #: Reads of absent keys, which would have waited.
        self.waits: list[str] = []
        #: Keys that were set, with repeats.
        self.sets: list[str] = []


class RankStore(dist.Store):  # type: ignore[misc]
    """One rank's view of the store. Calls an action before the n-th call."""

    def __init__(self, keys: Keys) -> None:
        super().__init__()
        self.keys = keys
        self._calls = 0
        self._nth, self._act = -1, lambda: None

    def act_before(self, nth: int, act: Callable[[], None]) -> None:
        """Sets the action and counts calls from 0 again."""
        self._calls, self._nth, self._act = 0, nth, act

    def _call(self) -> None:
        number, self._calls = self._calls, self._calls + 1
        if number == self._nth:
            self._act()

    def set(self, key: str, value: Any) -> None:
        self._call()
        with self.keys.lock:
            self.keys.sets.append(key)
            self.keys.values[key] = _bytes(value)

    def get(self, key: str) -> bytes:
        self._call()
        with self.keys.lock:
            if key not in self.keys.values:
                self.keys.waits.append(key)
                raise RuntimeError(f"would wait for {key}")
            return self.keys.values[key]

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        self._call()
        expected, desired = _bytes(expected), _bytes(desired)
        with self.keys.lock:
            if self.keys.values.get(key, b"" if not expected else None) == expected:
                self.keys.values[key] = desired
            return self.keys.values.get(key, expected)

    def check(self, keys: list[str]) -> bool:
        self._call()
        with self.keys.lock:
            return all(key in self.keys.values for key in keys)

    def delete_key(self, key: str) -> bool:
        self._call()
        with self.keys.lock:
            return self.keys.values.pop(key, None) is not None

    deleteKey = delete_key  # the name by which torch calls it


def _bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


class Group:
    """Ranks over one :class:`Keys`."""

    def __init__(self, size: int, timeout: float = 20.0) -> None:
        self.keys = Keys()
        self.stores = [RankStore(self.keys) for _ in range(size)]
        # Keeps a reference: a Python store lives no longer than its object.
        groups = [RankGroup(one, rank, size, "t") for rank, one in enumerate(self.stores)]
        self.ranks = [Exchange.open(one, "save", timeout) for one in groups]


def plan(ranks: Exchange) -> Any:
    """Sends bytes that all ranks share to the coordinator."""
    return ranks.exchange(
        "plan",
        lambda: (ranks.share(b"template"), None),
        lambda tokens: Answers([*map(ranks.shared, tokens)]),
    )[0]


def orders(run: Callable[[int], bool]) -> None:
    """Runs a test with each number of a call, until there is no such call."""
    for nth in range(MOST_CALLS):
        if not run(nth):
            assert nth > 0, "no call was interrupted"
            return
    raise AssertionError("the calls do not end")


def in_own_thread(act: Callable[[], object], acted: list[bool]) -> Callable[[], None]:
    """Runs ``act`` to its end in a separate thread."""

    def run() -> None:
        acted.append(True)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(act).result(PATIENCE_SECONDS)

    return run


@pytest.mark.parametrize(("first", "second"), [(0, 1), (1, 0), (1, 2)])
def test_one_of_two_ranks_that_share_the_same_bytes_posts_them(first: int, second: int) -> None:
    def run(nth: int) -> bool:
        group, acted = Group(3), []
        one, other = group.ranks[first], group.ranks[second]
        group.stores[first].act_before(nth, in_own_thread(lambda: other.share(b"template"), acted))
        one.share(b"template")
        if not acted:
            return False
        owners = [key for key in group.keys.values if key.endswith("/owner")]
        posts = [key for key in group.keys.sets if "/shared/" in key]
        assert len(posts) <= 1
        assert len(owners) == 1
        assert posts or {first, second} & {0}  # the coordinator has its own bytes
        return True

    orders(run)


@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, 1)])
def test_ranks_that_close_at_once_read_no_key_that_the_other_has_deleted(
    first: int, second: int
) -> None:
    def run(nth: int) -> bool:
        group, acted = Group(3), []
        # Both find no such bytes, and both would post them if one call did not decide.
        group.stores[first].act_before(
            1, in_own_thread(lambda: group.ranks[second].share(b"t"), [])
        )
        group.ranks[first].share(b"t")
        assert set(together(group.ranks, plan).values()) == {b"template"}
        group.stores[first].act_before(nth, in_own_thread(group.ranks[second].close, acted))
        group.ranks[first].close()
        # The other rank has not closed if there was no such call.
        group.ranks[0].close(PATIENCE_SECONDS if acted else 0.05)
        assert group.keys.waits == []
        if acted:
            assert group.keys.values == {}
        return bool(acted)

    orders(run)


def test_bytes_stay_while_a_coordinator_that_was_declared_dead_may_read_them() -> None:
    group = Group(2, SHORT)
    coordinator, other = group.ranks
    has_decided, go_on = threading.Event(), threading.Event()

    def combine(tokens: list[Any]) -> Any:
        has_decided.set()
        go_on.wait(PATIENCE_SECONDS)
        return Answers([coordinator.shared(token) for token in tokens])

    def work(ranks: Exchange) -> Any:
        mine = b"of one" if ranks is other else b"of the coordinator"
        try:
            return ranks.exchange("plan", lambda: (ranks.share(mine), None), combine)[0]
        finally:
            ranks.close(SHORT)
            if ranks is other:
                go_on.set()

    outcomes = together(group.ranks, work)
    assert has_decided.is_set()
    assert "no heartbeat" in str(outcomes[1])
    assert outcomes[0] == b"of the coordinator"


# --- every store ---------------------------------------------------------------------------------


@pytest.fixture(params=["TCPStore", "HashStore", "FileStore"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> dist.Store:
    if request.param == "TCPStore":
        return tcp_store()
    return (
        dist.FileStore(str(tmp_path / "s"), 1) if request.param == "FileStore" else dist.HashStore()
    )


@pytest.mark.parametrize("prefix", ["", "below"])
def test_peek_returns_a_value_and_neither_waits_for_nor_creates_an_absent_key(
    store: dist.Store, prefix: str
) -> None:
    keys = dist.PrefixStore(prefix, store) if prefix else store
    assert peek(keys, "k") is None
    assert not keys.check(["k"])
    for value in (b"one", b"", b"\x00\xff" * (1 << 20)):
        keys.set("k", value)
        assert peek(keys, "k") == value
        assert keys.get("k") == value
    keys.delete_key("k")
    assert peek(keys, "k") is None


@pytest.mark.parametrize("prefix", ["", "below"])
def test_one_of_several_threads_owns_a_key(store: dist.Store, prefix: str) -> None:
    keys = dist.PrefixStore(prefix, store) if prefix else store
    together_at = threading.Barrier(4)

    def own(me: str) -> bool:
        together_at.wait(PATIENCE_SECONDS)
        return bool(keys.compare_set("owner", "", me) == me.encode())

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(own, "abcd")) == 1
