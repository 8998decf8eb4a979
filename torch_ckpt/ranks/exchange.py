"""Exchanges between the ranks of a save, a load or a call of torch_ckpt.multihost.

Exchanges use the store of the process group and never its collectives. Only the modules that send
tensors, loading/shared_reads.py and multihost/moving.py, use collectives.

Each step runs on every rank. All ranks exchange their outcomes, including errors, before any rank
continues. So a failure raises the same ``CheckpointFailed`` on all ranks, and no rank waits for a
rank that has failed. A rank that was interrupted raises the interruption instead.

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
6. If the coordinator did not run for so long that others may have declared it dead, it does not
   commit. It checks this itself, because a store that it hosts has not run either.
7. Several ranks may send the same bytes. The rank that creates ``shared/{digest}/owner`` posts them
   as ``shared/{digest}``; the other ranks only send the digest. Only the coordinator reads the
   bytes.
8. At the end, each rank posts ``bye/{rank}``.

Keys are deleted as follows. A key that may be absent is never read by a call that waits for the key
(see ``peek``).

=================== =============================================================================
key                 deleted by
=================== =============================================================================
from/{rank}         the coordinator, when it has read it; the rank itself, if the coordinator's
                    answer shows that the coordinator never will
to/{rank}           the rank, when it has read it
shared/{digest}     the rank that posted it, at the end, unless the coordinator may still read it
all others          the coordinator, at the end, when all ranks have posted ``bye/{rank}``
=================== =============================================================================
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast, overload

from torch.distributed.checkpoint.api import CheckpointException

from torch_ckpt import _core
from torch_ckpt._base import exit_threads
from torch_ckpt.ranks.failures import (
    Failure,
    PeerLost,
    RankFailures,
    capture_exceptions,
    dead_ranks_failures,
    failed_on,
    heartbeat_failures,
    raise_on,
)
from torch_ckpt.ranks.group import SINGLE_RANK, TIMEOUT_SECONDS, RankGroup
from torch_ckpt.ranks.store import peek

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing since Python 3.11

T = TypeVar("T")
K = TypeVar("K")
R = TypeVar("R")

# The other ranks wait for the coordinator longer by this factor. Otherwise they might declare it
# dead while it is about to declare another rank dead.
_LONGER = 1.25

# Seconds between heartbeats, and between checks for them; less if the timeout is short.
_HEARTBEAT_SECONDS = 5.0

# Size of the pieces of a large value: TCPStore closes the connection if a value exceeds 8 MiB.
_PIECE_BYTES = 4 << 20

# Prefix of a value that is stored in its key, without pieces.
_COMPLETE = b"="

_DECIDED = b"the coordinator goes on"

#: Appended to errors if the coordinator may have committed.
MAY_HAVE_COMMITTED = "; rank 0 may have committed, so also check whether the checkpoint exists"


class Answers(list[R]):
    """Separate answers to the ranks, indexed by rank. If all of them are the same object, it is
    sent only once."""


class _OwnAnswer:
    """An answer that directs each rank to its own answer."""


class Exchange:
    """One rank's part in the exchanges of a save, a load or a call. The module docstring describes
    the protocol.

    As a context manager, it calls :meth:`close` at the end. If the block fails before its first
    step, it calls :meth:`fail`. Steps must be made from one thread.

    Args:
        group: the ranks that participate.
        prefix: prefix of the keys; the same on all ranks and used only once.
        timeout: seconds without a heartbeat after which a rank that others wait for is declared
            dead. The step then raises ``CheckpointException`` on all ranks, with a ``TimeoutError``
            for the dead rank. If the store does not answer, the step raises ``CheckpointException``
            with a ``ConnectionError`` for this rank, and nothing is undone.

    Attributes:
        timeout: see above.
        sent: number of messages that this rank has sent to other ranks so far, and their total size
            in bytes.
    """

    #: Name of the step with which :meth:`fail` reports an error.
    first_step = "plan"

    def __init__(
        self,
        group: RankGroup = SINGLE_RANK,
        prefix: str = "",
        timeout: float = TIMEOUT_SECONDS,
    ) -> None:
        self.distributed = group.distributed
        self.rank = group.rank
        self.size = group.size
        self.is_coordinator = group.rank == 0
        self.sent = (0, 0)
        # Keeps the connection and the server alive.
        self._group = group
        self._clock = group.clock
        self._prefix = prefix
        self.timeout = timeout
        self._limit = _LONGER * timeout
        self._heartbeat_seconds = min(timeout / 10, _HEARTBEAT_SECONDS)
        self._store: Any = group.connections[0] if group.connections else None
        self._lost: dict[int, Any] | None = None  # set once the store is lost
        self._steps = 0
        self._step = ""
        self._key = ""  # the part of the keys that names the step
        self._commits = False  # the coordinator may commit in this step
        self._is_declared_dead = False  # this rank is the coordinator and was declared dead
        self._cancelled: Failure | None = None
        self._woken = group.clock.Event()
        # Last time at which this rank is known to have run, and the longest time between two
        # heartbeats. Set while heartbeats are sent.
        self._ran_at: float | None = None
        self._lapse = 0.0
        self._posted: list[str] = []  # keys of this rank's value in this step
        self._common_keys: list[str] = []  # keys that the coordinator deletes at the end
        self._absent: list[int] = []  # ranks that have not arrived, or not in time
        self._shared: dict[str, bytes] = {}  # data that the coordinator has, by token
        self._owned: dict[str, list[str]] = {}  # keys that this rank must delete, by token
        self._may_be_read = False  # the coordinator may still read the keys that this rank owns

    @classmethod
    def open(cls, group: RankGroup, kind: str, timeout: float) -> Exchange:
        """Begins an exchange. Every rank must call it, in the same order among the calls with the
        same kind."""
        return cls(group, group.next_prefix(kind) if group.distributed else "", timeout)

    @overload
    def exchange(
        self,
        step: str,
        send: Callable[[], tuple[T, K]],
        combine: Callable[[list[T]], Answers[R]],
        undo: Callable[[K], None] | None = None,
    ) -> tuple[R, K]: ...

    @overload
    def exchange(
        self,
        step: str,
        send: Callable[[], tuple[T, K]],
        combine: Callable[[list[T]], R],
        undo: Callable[[K], None] | None = None,
    ) -> tuple[R, K]: ...

    def exchange(
        self,
        step: str,
        send: Callable[[], tuple[T, K]],
        combine: Callable[[list[T]], Any],
        undo: Callable[[K], None] | None = None,
    ) -> tuple[Any, K]:
        """Runs ``send`` on all ranks, and ``combine`` on the coordinator with the values sent.

        Args:
            step: name of the step, the same on all ranks.
            send: returns the value to send, and the value that this rank keeps.
            combine: returns the answer for all ranks, or :class:`Answers`.
            undo: called with the value kept if ``send`` succeeded on this rank but failed on
                another. It is not called if ``combine`` has started, or if this rank cannot know
                whether it has. None means that ``combine`` commits nothing, so that errors need not
                mention a possible commit.

        Returns:
            The answer for this rank, and the value that this rank keeps.
        """
        self._begin(step)
        self._commits = undo is not None
        local = capture_exceptions(send)
        value = local if isinstance(local, Failure) else local[0]
        if self.size > 1 and self._store is None:
            self._store = self._request(self._group.connection)
        if self.rank != 0:
            self._post(value)
            answer = self._receive()
        else:
            answer = self._collect(value)
            if not isinstance(answer, RankFailures):
                answer = capture_exceptions(combine, answer)
                if isinstance(answer, Failure):
                    answer = RankFailures({0: answer}, combining=True)
            answer = self._answer(answer)
        if isinstance(answer, RankFailures):
            if undo is not None and not answer.combining and not isinstance(local, Failure):
                undo(local[1])
            raise_on(self.rank, step, answer.by_rank)
        return answer, local[1]

    def run(self, step: str, local: Callable[[], K]) -> K:
        """Runs ``local`` on all ranks, and returns its result. If it fails on any rank, all ranks
        raise."""
        return self.exchange(step, lambda: (None, local()), lambda _values: None)[1]

    @contextmanager
    def alive(self, counter: Callable[[], int]) -> Iterator[None]:
        """Block in which this rank is not declared dead as long as ``counter`` changes.

        Use it for work in ``send`` or ``combine`` that may exceed the timeout. A separate thread
        calls ``counter`` every few seconds; it may return the number of bytes written, for example.
        """
        if self.size == 1:
            yield
            return
        begun = self._clock.monotonic()

        def beat() -> None:
            now = self._clock.monotonic()
            if self._ran_at is not None:
                self._lapse = max(self._lapse, now - self._ran_at)
                # Set this last, because _collect() reads it first.
                self._ran_at = now
            with suppress(RuntimeError):  # the next step reports a lost store
                (self._store or self._group.connection()).set(
                    f"{self._prefix}/alive/{self.rank}", f"{begun}/{counter()}"
                )

        self._ran_at, self._lapse = begun, 0.0
        ended, thread = self._clock.repeat(self._heartbeat_seconds, beat)
        try:
            yield
        finally:
            ended.set()
            if thread is not None and self._lost is None:
                # Limited, because a stopped store does not answer.
                thread.join(self._heartbeat_seconds)
            self._ran_at = None

    def share(self, data: bytes) -> bytes | str:
        """Returns a token for data that several ranks share, so that the data is sent only once.
        ``send`` sends the token, and ``combine`` passes it to :meth:`shared`."""
        if self.size == 1:
            return data
        token = f"{self._prefix}/shared/{hashlib.sha256(data).hexdigest()}"
        if self.rank == 0:
            self._shared[token] = data
        if self._store is None:
            self._store = self._request(self._group.connection)
        owner, me = f"{token}/owner", str(self.rank).encode()
        # Use an atomic operation: with a check and a set, two ranks could become the owner.
        if token not in self._owned and self._request(self._store.compare_set, owner, "", me) == me:
            self._owned[token] = [owner]
            if self.rank != 0:
                self._owned[token] += self._request(self._set, token, data)
        return token

    def shared(self, token: bytes | str) -> bytes:
        """Returns the data for a token that :meth:`share` returned. Only the coordinator may call
        it, in ``combine``."""
        if isinstance(token, bytes):
            return token
        if token not in self._shared:
            self._shared[token] = self._request(self._read_one, token)
        return self._shared[token]

    def cancel(self, failure: Failure) -> None:
        """Ends this rank's wait, and fails the step on it. May be called from any thread.

        On the coordinator, the failure is also sent to the ranks that have arrived.
        """
        self._cancelled = failure

    def wake(self) -> None:
        """Makes this rank poll again at once, without finishing its current pause. May be called
        from any thread."""
        self._woken.set()

    def close_in_background(self) -> None:
        """Calls :meth:`close` in a thread, for which the interpreter waits when it exits."""
        if self.size > 1:
            try:
                exit_threads.spawn(self.close)
            except RuntimeError:  # no new threads at interpreter exit
                self.close()

    def close(self, timeout: float = 60.0) -> None:
        """Ends this rank's part after the last step, whether or not the step succeeded.

        Every rank must call it. The coordinator waits until the other ranks have read the last
        answer, so that the process that hosts the store may exit, and then deletes the keys. Never
        raises, because the outcome is already known.

        Args:
            timeout: seconds that the coordinator waits. After that, it leaves the keys in the
                store.
        """
        if self.size == 1:
            return
        self._limit = min(self._limit, timeout)
        with suppress(CheckpointException):
            if self._store is None:
                self._store = self._request(self._group.connection)
            if self._owned and not self._may_be_read:
                self._request(self._delete, [key for keys in self._owned.values() for key in keys])
            if self.rank != 0:
                self._request(self._store.set, f"{self._prefix}/bye/{self.rank}", "bye")
                return
            present = [rank for rank in range(1, self.size) if rank not in self._absent]
            byes = {rank: f"{self._prefix}/bye/{rank}" for rank in present}
            # If the exchange was cancelled, keep the answer for ranks that have not arrived yet.
            if not self._wait(byes, timeout) and self._cancelled is None:
                # A rank that was declared dead may still arrive, and then reads that it was.
                common = [] if self._absent else self._common_keys
                alive = [f"{self._prefix}/alive/{rank}" for rank in (0, *present)]
                self._request(self._delete, [*byes.values(), *alive, *common])

    def fail(self, error: BaseException) -> None:
        """Reports to the other ranks that this rank cannot begin, so that they do not wait for it.

        Ends the exchange in the background. The caller raises the error itself.
        """
        if self.size == 1:
            return

        def report() -> None:
            def raise_error() -> NoReturn:
                raise error

            with suppress(BaseException):
                self.run(self.first_step, raise_error)
            self.close()

        with suppress(RuntimeError):  # no new threads at interpreter exit
            exit_threads.spawn(report)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        frames: TracebackType | None,
    ) -> None:
        if error is not None and self._steps == 0 and self.first_step:
            self.fail(error)
            return
        # The result is known, so do not wait long for a rank that died after its last step. If the
        # user has interrupted a wait, hardly wait for the same ranks again.
        self.close(1.0 if isinstance(error, KeyboardInterrupt) else min(self.timeout, 60.0))

    # --- a step on all ranks ---------------------------------------------------------------------

    def _begin(self, step: str) -> None:
        self._step, self._steps = step, self._steps + 1
        self._key = f"{self._prefix}/{self._steps}.{step}"

    # --- a step on the coordinator ---------------------------------------------------------------

    def _collect(self, value: Any) -> list[Any] | RankFailures:
        """Returns the values of all ranks, or the failures of ranks."""
        values: list[Any] = [value] + [None] * (self.size - 1)
        failures: dict[int, Failure] = {}
        if self.size > 1:
            keys = {rank: f"{self._key}/from/{rank}" for rank in range(1, self.size)}
            dead = self._wait(keys, self.timeout)
            # Without these heartbeats, the other ranks may have declared this rank dead.
            ran_at, now = self._ran_at, self._clock.monotonic()
            lapse = 0.0 if ran_at is None else max(now - ran_at, self._lapse)
            is_in_time = not self._commits or lapse < self._limit - self._heartbeat_seconds
            mine = _DECIDED if is_in_time else self._refuse_to_commit(lapse)
            verdict_key = f"{self._key}/verdict"
            verdict = self._request(self._store.compare_set, verdict_key, "", mine)
            self._common_keys += [verdict_key, f"{self._key}/to/all"]
            self._is_declared_dead = verdict != mine
            if verdict != _DECIDED:
                failures = pickle.loads(verdict).by_rank
            elif dead:
                failures = heartbeat_failures(self._step, dead, self.timeout)
            taken = self._request(self._read, [*keys.values()], True)
            self._absent = [rank for rank in keys if taken[rank - 1] is None]
            values[1:] = [data and capture_exceptions(pickle.loads, data) for data in taken]
        if self._cancelled is not None:
            values[0] = self._cancelled
        failures = {r: v for r, v in enumerate(values) if isinstance(v, Failure)} | failures
        causes = {r: one for r, one in failures.items() if not isinstance(one.error, PeerLost)}
        return RankFailures(causes or failures) if failures else values

    def _answer(self, answer: Any) -> Any:
        """Posts the answers, the answer to all ranks last. Returns the answer to this rank."""
        by_key: dict[str, Any] = {f"{self._key}/to/all": answer}
        if isinstance(answer, Answers):
            by_rank, answer = answer, answer[0]
            by_key = {f"{self._key}/to/all": answer}
            if any(other is not answer for other in by_rank):
                by_key = {f"{self._key}/to/{rank}": by_rank[rank] for rank in range(1, self.size)}
                by_key[f"{self._key}/to/all"] = _OwnAnswer
        if self.size == 1 or self._is_declared_dead:
            return answer
        data = capture_exceptions(lambda: {key: pickle.dumps(v) for key, v in by_key.items()})
        if isinstance(data, Failure):
            answer = RankFailures({0: data}, combining=True)
            data = {f"{self._key}/to/all": pickle.dumps(answer)}
        for key, value in data.items():
            posted = self._request(self._set, key, value)
        self._common_keys += posted[:-1]
        return answer

    def _refuse_to_commit(self, lapse: float) -> bytes:
        """Returns the verdict of a coordinator that did not run for some seconds."""
        error = TimeoutError(
            f"rank 0, the coordinator, did not run for {lapse:.1f} s during '{self._step}', so "
            "other ranks may have declared it dead: check whether its process or machine was "
            "suspended, or increase the timeout"
        )
        return pickle.dumps(RankFailures(dead_ranks_failures(error, [0])))

    # --- a step on the other ranks ---------------------------------------------------------------

    def _post(self, value: Any) -> None:
        data = capture_exceptions(pickle.dumps, value)
        if isinstance(data, Failure):
            data = pickle.dumps(data)
        self._may_be_read = True
        self._posted = self._request(self._set, f"{self._key}/from/{self.rank}", data)

    def _receive(self) -> Any:
        """Returns the answer of the coordinator, or of the rank that declared it dead."""
        key = f"{self._key}/to/all"
        dead = self._wait({0: key}, self._limit)
        if dead:
            return self._request(self._declare_dead, dead)
        if self._cancelled is not None:
            raise failed_on(self._step, {self.rank: self._cancelled})
        received = pickle.loads(self._request(self._read_one, key))
        self._may_be_read = False
        if received is _OwnAnswer:
            [own] = self._request(self._read, [f"{self._key}/to/{self.rank}"], True)
            return pickle.loads(cast(bytes, own))
        if isinstance(received, RankFailures):
            self._request(self._delete_unread)
        return received

    def _delete_unread(self) -> None:
        if peek(self._store, f"{self._key}/verdict") == _DECIDED:
            # The coordinator has read this rank's value, or never will.
            self._delete(self._posted)

    def _declare_dead(self, dead: list[int]) -> RankFailures:
        """Sets the verdict in place of a coordinator that sends no heartbeat, unless it is already
        set.

        Args:
            dead: the ranks that send no heartbeat, including the coordinator.
        """
        failures = heartbeat_failures(self._step, dead, self._limit)
        mine = pickle.dumps(RankFailures(failures))
        verdict = self._store.compare_set(f"{self._key}/verdict", "", mine)
        if verdict == _DECIDED:
            error = TimeoutError(
                f"rank 0, the coordinator, received the values of '{self._step}', but then sent no "
                f"heartbeat for {self._limit:g} s: check that its process is still running"
                f"{MAY_HAVE_COMMITTED if self._commits else ''}"
            )
            return RankFailures(dead_ranks_failures(error, [0]), combining=True)
        self._may_be_read = False
        if verdict == mine:
            self._set(f"{self._key}/to/all", mine)
        return cast(RankFailures, pickle.loads(verdict))

    # --- waiting ---------------------------------------------------------------------------------

    def _wait(self, keys: dict[int, str], patience: float) -> list[int]:
        """Waits for a key from each rank, unless the wait is cancelled. Returns the ranks that are
        declared dead.

        If the coordinator is declared dead, so are the other ranks that have not posted their
        values and send no heartbeat either.

        Polls, because the store's own wait blocks the connection for other threads, and prints two
        warnings if it times out.
        """
        calm_since = checked_at = self._clock.monotonic()
        heard_at = dict.fromkeys(keys, checked_at)
        beats = dict.fromkeys(keys, b"")
        interval = min(self._heartbeat_seconds, patience / 10)
        others = {rank: f"{self._key}/from/{rank}" for rank in range(1, self.size)}
        before_timeout: dict[int, bytes] | None = None  # heartbeats of the other ranks
        while not self._request(self._store.check, [keys[rank] for rank in beats]):
            if self._cancelled is not None:
                return []
            now = self._clock.monotonic()
            if now >= checked_at + interval:
                # The time for which this rank did not run does not count.
                lapse = max(0.0, now - checked_at - 2 * interval)
                checked_at, before = now, beats
                beats = self._request(self._heartbeats, {rank: keys[rank] for rank in before})
                heard_at = {r: heard_at[r] + lapse if beats[r] == before[r] else now for r in beats}
                silence = now - min(heard_at.values(), default=now)
                if silence >= patience and self.rank == 0:
                    # Also report ranks whose heartbeats stopped a little later.
                    return [rank for rank, then in heard_at.items() if now - then >= patience / 2]
                if self.rank != 0 and silence < patience - 2 * interval:
                    before_timeout = None
                elif self.rank != 0:
                    last = self._request(self._heartbeats, others)
                    before_timeout = before_timeout or last
                    if silence >= patience:
                        return [0, *(r for r in last if last[r] == before_timeout.get(r))]
            _core.fault_point("wait for ranks", self._step)
            pause = min(1.0, interval, max(0.001, (now - calm_since) / 10))
            if self._woken.wait(pause):
                self._woken.clear()
                calm_since = self._clock.monotonic()
        return []

    def _heartbeats(self, keys: dict[int, str]) -> dict[int, bytes]:
        """Returns the last heartbeat of each rank whose key is absent."""
        if self.rank == 0:
            # Send a heartbeat: the other ranks must not declare this rank dead while it waits.
            self._store.set(f"{self._prefix}/alive/0", str(self._clock.monotonic()))
        beats = {}
        for rank, key in keys.items():
            if not self._store.check([key]):
                beats[rank] = peek(self._store, f"{self._prefix}/alive/{rank}") or b""
        return beats

    # --- requests to the store -------------------------------------------------------------------

    def _request(self, work: Callable[..., T], *args: Any) -> T:
        """Runs a request to the store. Fails at once if the store is already lost."""
        if self._lost is None:
            advice = MAY_HAVE_COMMITTED if self._commits else ""
            try:
                return self._group.store_thread.request(
                    self._step, self.rank, self._limit, work, *args, advice=advice
                )
            except CheckpointException as error:
                # Do not keep the error itself: its frames would keep the store alive.
                self._lost = error.failures
        raise failed_on(self._step, self._lost)

    def _set(self, key: str, data: bytes) -> list[str]:
        """Posts a value. Returns the keys that store it."""
        messages, size = self.sent
        self.sent = messages + 1, size + len(data)
        if len(data) <= _PIECE_BYTES:
            self._store.set(key, _COMPLETE + data)
            return [key]
        starts = range(0, len(data), _PIECE_BYTES)
        pieces = [f"{key}/{number}" for number in range(len(starts))]
        for piece, start in zip(pieces, starts, strict=True):
            self._store.set(piece, data[start : start + _PIECE_BYTES])
        # Set this key last, because readers wait for it.
        self._store.set(key, str(len(starts)))
        return [*pieces, key]

    def _read(self, keys: list[str], take: bool = False) -> list[bytes | None]:
        """Returns the values of keys; None for an absent key. ``take`` also deletes the keys, which
        no other rank may do."""
        # One request for all keys. It does not wait, because all keys exist and only this rank
        # deletes them.
        if take and len(keys) > 1 and self._store.has_extended_api() and self._store.check(keys):
            heads = self._store.multi_get(keys)
        else:
            heads = [peek(self._store, key) for key in keys]
        values: list[bytes | None] = []
        for key, head in zip(keys, heads, strict=True):
            pieces: list[str] = []
            value = head and head.removeprefix(_COMPLETE)
            if head is not None and not head.startswith(_COMPLETE):
                pieces = [f"{key}/{number}" for number in range(int(head))]
                value = b"".join(peek(self._store, piece) or b"" for piece in pieces)
            values.append(value)
            for each in (*pieces, key) if take and head is not None else ():
                self._store.delete_key(each)
        return values

    def _read_one(self, key: str) -> bytes:
        [value] = self._read([key])
        if value is None:
            raise RuntimeError(f"the key '{key}' is no longer in the store")
        return value

    def _delete(self, keys: list[str]) -> None:
        for key in keys:
            self._store.delete_key(key)
