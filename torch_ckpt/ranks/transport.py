"""Transports the values of a step between ranks, through keys of a store. Heartbeats reveal dead
ranks.

1. Every rank posts its value as ``{step}/from/{rank}``. The coordinator waits for all values.
2. The coordinator sets ``{step}/verdict`` if it is not set. Only if it has set the verdict may it
   combine the values, which may commit.
3. The coordinator posts its answer as ``{step}/to/all``, for which the other ranks wait. If ranks
   get different answers, it first posts ``{step}/to/{rank}`` for each rank, and ``to/all`` only
   directs the ranks to their own answers.
4. A rank that sends no heartbeat while others wait for it is declared dead, and the step fails. If
   the coordinator sends no heartbeat, the rank that has waited longest sets the verdict and answers
   in its place. If the coordinator resumes, it finds this verdict and does not commit.
5. A rank sends a heartbeat by changing the value of ``alive/{rank}``.
6. Several ranks may send the same bytes. The rank that creates ``shared/{digest}/owner`` posts them
   as ``shared/{digest}``; the other ranks only send the digest. Only the coordinator reads the
   bytes. The owner deletes them at the end, unless the coordinator may still read them.
7. The reader of a key deletes it. The coordinator deletes the keys that several ranks read, once
   it has read ``bye/{rank}`` from each of them.
8. A key that may be absent is never read by a call that waits for the key: see ``peek``.
9. If the coordinator did not run for so long that others may have declared it dead, it does not
   commit. It checks this itself, because a store that it hosts has not run either.
"""

from __future__ import annotations

import hashlib
import pickle
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, TypeVar, cast

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.checkpoint.api import WRAPPED_EXCEPTION, CheckpointException

from torch_ckpt import _core
from torch_ckpt.ranks.failures import failed_on
from torch_ckpt.ranks.outcomes import (
    RankFailures,
    attempt,
    failed,
    heartbeat_failures,
)
from torch_ckpt.ranks.store_thread import StoreThread, peek

T = TypeVar("T")

# The other ranks wait for the coordinator longer by this factor. Otherwise they might declare it
# dead while it is about to declare another rank dead.
_LONGER = 1.25

# Seconds between heartbeats, and between checks for them; less if the timeout is short.
_PULSE_SECONDS = 5.0

# Size of the pieces of a large value: TCPStore closes the connection if a value exceeds 8 MiB.
_PIECE_BYTES = 4 << 20

_DECIDED = b"the coordinator goes on"

#: Appended to errors if the coordinator may have committed.
MAY_HAVE_COMMITTED = "; rank 0 may have committed, so also check whether the checkpoint exists"

# Prefix of a value that is stored in its key, without pieces.
_WHOLE = b"="


class _Each:
    """An answer that directs each rank to its own answer."""


class Alone:
    """The transport for a single rank. Every step begins with a call of gather."""

    distributed = False
    rank = 0
    size = 1
    #: Number of messages that this rank has sent so far, and their total size in bytes.
    sent = (0, 0)

    def gather(self, step: str, value: Any, *, commits: bool = False) -> list[Any] | None:
        """Returns the outcomes of all ranks on the coordinator, and None on other ranks.

        Args:
            commits: True if the coordinator may commit in this step.
        """
        return [value]

    def share(self, data: bytes) -> bytes | str:
        """Returns a token for data that several ranks share. Pass it to gather in the value."""
        return data

    def shared(self, token: bytes | str) -> bytes:
        """Returns the data for a token. Only the coordinator may call it, after gather."""
        assert isinstance(token, bytes)
        return token

    def scatter(self, parts: list[Any] | None) -> Any:
        """Returns to each rank its own part. The coordinator passes the parts."""
        return parts[0] if parts is not None else None

    def broadcast(self, value: Any) -> Any:
        """Returns the coordinator's value on every rank."""
        return value

    def alive(self, counter: Callable[[], int]) -> AbstractContextManager[None]:
        return nullcontext()

    def cancel(self, failure: WRAPPED_EXCEPTION) -> None:
        pass

    def wake(self) -> None:
        pass

    def close(self, timeout: float) -> None:
        pass


class OverStore(Alone):
    """The transport over a store. The module docstring describes the protocol.

    Must be used from one thread. Methods that use the store raise CheckpointException if it is
    lost.
    """

    distributed = True

    def __init__(
        self,
        rank: int,
        size: int,
        connect: Callable[[], Store],
        asker: StoreThread,
        prefix: str,
        timeout: float,
    ) -> None:
        self.rank = rank
        self.size = size
        self._connection = connect
        self._asker = asker
        self._prefix = prefix
        # Created on first use. Any, because stores also accept bytes, unlike their type stubs.
        self._store: Any = None
        self._timeout = timeout
        self._limit = _LONGER * timeout
        self._pulse = min(timeout / 10, _PULSE_SECONDS)
        self._steps = 0
        self._step = ""
        self._given_up = False  # this rank is the coordinator and was declared dead
        self._cancelled: WRAPPED_EXCEPTION | None = None
        self._woken = threading.Event()
        self._commits = False  # the coordinator may commit in this step
        # Set once the store is lost.
        self._lost: dict[int, WRAPPED_EXCEPTION] | None = None
        self._absent: list[int] = []  # ranks that have not arrived, or not in time
        self._posted: list[str] = []  # keys of this rank's value in this step
        self._verdicts: list[str] = []
        self._answers: list[str] = []
        self._shared: dict[str, bytes] = {}  # data that the coordinator has, by token
        self._owned: dict[str, list[str]] = {}  # keys that this rank must delete, by token
        self._may_be_read = False  # the coordinator may still read the keys that this rank owns
        # Last time at which this rank is known to have run. Set while heartbeats are sent.
        self._ran_at: float | None = None
        self._lapse = 0.0  # the longest time between two heartbeats

    def gather(self, step: str, value: Any, *, commits: bool = False) -> list[Any] | None:
        self._step = step
        self._steps += 1
        self._commits = commits
        self._ask(self._connect)
        if self.rank != 0:
            data = attempt(pickle.dumps, value)
            data = pickle.dumps(data) if failed(data) else data
            self._may_be_read = True
            self._posted = self._ask(self._set, self._key("from", self.rank), data)
            return None
        keys = {rank: self._key("from", rank) for rank in range(1, self.size)}
        silent = self._await(keys, self._timeout)
        self._verdicts.append(self._key("verdict"))
        mine = self._verdict()
        verdict = self._ask(self._store.compare_set, self._key("verdict"), "", mine)
        self._given_up = verdict != mine
        if verdict == _DECIDED:
            failures = heartbeat_failures(step, silent, self._timeout)
        else:
            failures = pickle.loads(verdict).by_rank
        if self._cancelled is not None:
            value = self._cancelled
        gathered = [value] + [None] * (self.size - 1)
        taken = self._ask(self._take_all, keys)
        self._absent = [rank for rank in keys if rank not in taken]
        for rank, data in taken.items():
            gathered[rank] = attempt(pickle.loads, data)
        for rank, failure in failures.items():
            gathered[rank] = failure
        return gathered

    def share(self, data: bytes) -> bytes | str:
        token = f"shared/{hashlib.sha256(data).hexdigest()}"
        if self.rank == 0:
            self._shared[token] = data
        self._ask(self._connect)
        self._ask(self._post_shared, token, data)
        return token

    def shared(self, token: bytes | str) -> bytes:
        assert isinstance(token, str)
        if token not in self._shared:
            self._shared[token] = self._ask(self._get, token)
        return self._shared[token]

    def scatter(self, parts: list[Any] | None) -> Any:
        if parts is None:
            received = self._receive(self._key("to", "all"))
            return self._take_own() if received is _Each else received
        if all(part is parts[0] for part in parts):
            return self.broadcast(parts[0])
        values: dict[int | str, Any] = {rank: parts[rank] for rank in range(1, self.size)}
        return self._answer(values | {"all": _Each}) or parts[0]

    def broadcast(self, value: Any) -> Any:
        if self.rank != 0:
            return self._receive(self._key("to", "all"))
        return self._answer({"all": value}) or value

    @contextmanager
    def alive(self, counter: Callable[[], int]) -> Iterator[None]:
        begun, done = time.monotonic(), threading.Event()

        def beat() -> None:
            while not done.wait(self._pulse):
                self._note_that_it_runs()
                sign = f"{begun}/{counter()}"
                with suppress(RuntimeError):  # the next step reports a lost store
                    self._connect()
                    self._store.set(f"alive/{self.rank}", sign)

        thread = threading.Thread(target=beat, name="torch_ckpt alive", daemon=True)
        with suppress(RuntimeError):  # no new threads at interpreter exit
            thread.start()
            self._ran_at, self._lapse = begun, 0.0
        try:
            yield
        finally:
            done.set()
            if thread.ident is not None and self._lost is None:
                thread.join(self._pulse)  # limited, because a stopped store does not answer
            self._ran_at = None

    def cancel(self, failure: WRAPPED_EXCEPTION) -> None:
        self._cancelled = failure

    def wake(self) -> None:
        self._woken.set()

    def close(self, timeout: float) -> None:
        self._limit = min(self._limit, timeout)
        others = [rank for rank in range(1, self.size) if rank not in self._absent]
        with suppress(CheckpointException):
            self._ask(self._connect)
            if not self._may_be_read:
                self._ask(self._delete, [key for keys in self._owned.values() for key in keys])
            if self.rank != 0:
                self._ask(self._store.set, f"bye/{self.rank}", "bye")
            elif not self._await({rank: f"bye/{rank}" for rank in others}, timeout):
                self._ask(self._tidy, [0, *others])

    # --- private ---------------------------------------------------------------------------------

    def _connect(self) -> None:
        if self._store is None:
            self._store = PrefixStore(self._prefix, self._connection())

    def _key(self, kind: str, rank: int | str = "") -> str:
        return f"{self._steps}.{self._step}/{kind}/{rank}"

    def _note_that_it_runs(self) -> None:
        now = time.monotonic()
        if self._ran_at is not None:
            self._lapse = max(self._lapse, now - self._ran_at)
            # Set this last, because _verdict() reads it first.
            self._ran_at = now

    def _verdict(self) -> bytes:
        """Returns the verdict of the coordinator, which has stopped waiting for other ranks."""
        ran_at = self._ran_at
        lapse = 0.0 if ran_at is None else max(time.monotonic() - ran_at, self._lapse)
        if not self._commits or lapse < self._limit - self._pulse:
            return _DECIDED
        error = TimeoutError(
            f"rank 0, the coordinator, did not run for {lapse:.1f} s during '{self._step}', so "
            "other ranks may have declared it dead: check whether its process or machine was "
            "suspended, or increase the timeout"
        )
        failures: dict[int, WRAPPED_EXCEPTION] = {0: (error, traceback.StackSummary())}
        return pickle.dumps(RankFailures(failures, combining=False))

    def _await(self, keys: dict[int, str], patience: float) -> list[int]:
        """Waits for a key from each rank, unless the wait is cancelled. Returns the ranks that
        timed out.

        Polls, because the store's own wait blocks the connection for other threads, and prints two
        warnings if it times out.
        """
        calm_since = looked = time.monotonic()
        heard = dict.fromkeys(keys, looked)
        signs = dict.fromkeys(keys, b"")
        pulse = min(self._pulse, patience / 10)
        while not self._ask(self._store.check, [keys[rank] for rank in signs]):
            if self._cancelled is not None:
                return []
            now = time.monotonic()
            if now >= looked + pulse:
                looked, before = now, signs
                signs = self._ask(self._signs, {rank: keys[rank] for rank in before})
                heard = {r: heard[r] if signs[r] == before[r] else now for r in signs}
                if any(now - then >= patience for then in heard.values()):
                    # Also report ranks whose heartbeats stopped a little later.
                    return [rank for rank, then in heard.items() if now - then >= patience / 2]
            _core.fault_point("wait for ranks", self._step)
            if self._woken.wait(min(1.0, pulse, max(0.001, (now - calm_since) / 10))):
                self._woken.clear()
                calm_since = time.monotonic()
        return []

    def _signs(self, keys: dict[int, str]) -> dict[int, bytes]:
        """Returns the last heartbeat of each rank whose key is absent."""
        if self.rank == 0:
            # Send a heartbeat: the other ranks must not declare this rank dead while it waits.
            self._store.set("alive/0", str(time.monotonic()))
        signs = {}
        for rank, key in keys.items():
            if not self._store.check([key]):
                signs[rank] = peek(self._store, f"alive/{rank}") or b""
        return signs

    def _answer(self, values: dict[int | str, Any]) -> RankFailures | None:
        """Posts the answers, the answer to all ranks last. If the answers cannot be pickled, posts
        and returns failures instead."""
        if self._given_up:
            return None
        data = attempt(lambda: {self._key("to", to): pickle.dumps(v) for to, v in values.items()})
        if failed(data):
            failures = RankFailures({0: data}, combining=True)
            self._answer({"all": failures})
            return failures
        self._answers += self._ask(self._set_all, data)[self._key("to", "all")]
        return None

    def _receive(self, key: str) -> Any:
        """Returns the answer of the coordinator, or of the rank that declared it dead."""
        if self._await({0: key}, self._limit):
            return self._ask(self._give_up, key)
        if self._cancelled is not None:
            raise failed_on(self._step, {self.rank: self._cancelled})
        received = pickle.loads(self._ask(self._get, key))
        self._may_be_read = False
        if isinstance(received, RankFailures):
            self._ask(self._clear)
        return received

    def _take_own(self) -> Any:
        """Returns the answer to this rank only, and deletes its key."""
        key = self._key("to", self.rank)
        return pickle.loads(self._ask(self._take_all, {self.rank: key})[self.rank])

    def _clear(self) -> None:
        if peek(self._store, self._key("verdict")) == _DECIDED:
            # The coordinator has read this rank's value, or never will.
            self._delete(self._posted)

    def _give_up(self, answer: str) -> RankFailures:
        """Sets the verdict in place of a coordinator that sends no heartbeat, unless it is already
        set."""
        others = range(1, self.size)
        silent = [r for r in others if not self._store.check([self._key("from", r)])]
        failures = heartbeat_failures(self._step, [0, *silent], self._limit)
        mine = pickle.dumps(RankFailures(failures, combining=False))
        verdict = self._store.compare_set(self._key("verdict"), "", mine)
        if verdict == _DECIDED:
            error = TimeoutError(
                f"rank 0, the coordinator, received the values of '{self._step}', but then sent no "
                f"heartbeat for {self._limit:g} s: check that its process is still running"
                f"{self._advice()}"
            )
            return RankFailures({0: (error, traceback.StackSummary())}, combining=True)
        self._may_be_read = False
        if verdict == mine:
            self._set(answer, mine)
        return cast(RankFailures, pickle.loads(verdict))

    def _set(self, key: str, data: bytes) -> list[str]:
        """Posts a value. Returns the keys that store it."""
        messages, size = self.sent
        self.sent = messages + 1, size + len(data)
        if len(data) <= _PIECE_BYTES:
            self._store.set(key, _WHOLE + data)
            return [key]
        starts = range(0, len(data), _PIECE_BYTES)
        pieces = _pieces(key, len(starts))
        for piece, start in zip(pieces, starts, strict=True):
            self._store.set(piece, data[start : start + _PIECE_BYTES])
        # Set this key last, because readers wait for it.
        self._store.set(key, str(len(starts)))
        return [*pieces, key]

    def _set_all(self, data: dict[str, bytes]) -> dict[str, list[str]]:
        return {key: self._set(key, value) for key, value in data.items()}

    def _post_shared(self, token: str, data: bytes) -> None:
        owner, me = f"{token}/owner", str(self.rank).encode()
        # Use an atomic operation: with a check and a set, two ranks could become the owner.
        if token in self._owned or self._store.compare_set(owner, "", me) != me:
            return
        self._owned[token] = [owner]
        if self.rank != 0:
            self._owned[token] += self._set(token, data)

    def _get(self, key: str) -> bytes:
        return self._joined(key, self._value(key))

    def _value(self, key: str) -> bytes:
        value = peek(self._store, key)
        if value is None:
            raise RuntimeError(f"the key '{key}' is no longer in the store")
        return value

    def _joined(self, key: str, head: bytes) -> bytes:
        """Returns the complete value of a key. ``head`` is what the key itself contains."""
        if head.startswith(_WHOLE):
            return head[len(_WHOLE) :]
        return b"".join(self._value(piece) for piece in _pieces(key, int(head)))

    def _delete(self, keys: list[str]) -> None:
        for key in keys:
            self._store.delete_key(key)

    def _take_all(self, keys: dict[int, str]) -> dict[int, bytes]:
        """Returns and deletes the values that the ranks have posted."""
        taken = {}
        for (rank, key), head in zip(keys.items(), self._heads([*keys.values()]), strict=True):
            if head is None:
                continue
            taken[rank] = self._joined(key, head)
            pieces = [] if head.startswith(_WHOLE) else _pieces(key, int(head))
            self._delete([*pieces, key])
        return taken

    def _heads(self, keys: list[str]) -> list[bytes | None]:
        """Returns what each key itself contains, without pieces; None for an absent key."""
        # One request for all keys. It does not wait, because all keys exist and only this rank
        # deletes them.
        if keys and self._store.has_extended_api() and self._store.check(keys):
            return cast(list[bytes | None], self._store.multi_get(keys))
        return [peek(self._store, key) for key in keys]

    def _tidy(self, ranks: list[int]) -> None:
        if self._cancelled is not None:
            # Keep the answer for ranks that have not arrived yet.
            return
        for rank in ranks:
            self._store.delete_key(f"alive/{rank}")
            self._store.delete_key(f"bye/{rank}")
        # A rank that was declared dead may still arrive, and then reads that it was.
        if not self._absent:
            self._delete([*self._verdicts, *self._answers])

    def _advice(self) -> str:
        return MAY_HAVE_COMMITTED if self._commits else ""

    def _ask(self, work: Callable[..., T], *args: Any) -> T:
        """Runs a request to the store. Fails at once if the store is already lost."""
        if self._lost is None:
            try:
                return self._asker.ask(
                    self._step, self.rank, self._limit, work, *args, advice=self._advice()
                )
            except CheckpointException as error:
                # Do not keep the error itself: its frames would keep the store alive.
                self._lost = error.failures
        raise failed_on(self._step, self._lost)


def _pieces(key: str, count: int) -> list[str]:
    """Returns the keys of the pieces of a value that is too large for one key."""
    return [f"{key}/{number}" for number in range(count)]
