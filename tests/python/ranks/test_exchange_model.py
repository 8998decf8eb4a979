"""Random schedules of ranks that die, stop and wake during a save, checked against the promises of
docs/async.md.

Two to four ranks run the real exchanges of a save: a plan, and a write that commits. A failed test
prints the seed; ``python -m tests.python.ranks.test_exchange_model SEED`` repeats the schedule.
Each mutant breaks one rule of the protocol, and must be found.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from tests.simulated_ranks import Process, SimulatedStore, Violation, World
from torch_ckpt.ranks import exchange
from torch_ckpt.ranks.exchange import MAY_HAVE_COMMITTED, Answers, Exchange
from torch_ckpt.ranks.failures import RankFailures

#: Seconds without a heartbeat after which a rank is declared dead.
TIMEOUT = 10.0

#: Seconds for which the coordinator waits at the end.
CLOSE_SECONDS = 20.0

#: Stops, in seconds. Ranks that stop for less than the timeout are not declared dead.
SHORT_STOP, DEATH = 2.0, float("inf")
STOPS = (DEATH, DEATH, SHORT_STOP, 11.5, 14.0, 30.0)

#: Number of schedules in a test run.
SCHEDULES = int(os.environ.get("TORCH_CKPT_SCHEDULES", "1000"))


class Schedule:
    """One save, with the faults that its seed decides."""

    def __init__(self, seed: object) -> None:
        chance = random.Random(f"faults {seed}")
        self.size = chance.randint(2, 4)
        self.world = World(seed, self.size, is_hosted=chance.random() < 0.25)
        for _ in range(chance.choice((0, 1, 1, 1, 2))):
            victim = chance.choice(self.world.processes)
            victim.faults.append((chance.randint(1, 45), chance.choice(STOPS)))
        ranks = range(self.size)
        self.templates = [chance.choice((b"one", b"other")) for _ in ranks]
        self.separate = chance.random() < 0.5
        self.work = [chance.choice((0.0, 0.0, 0.3, 14.0)) for _ in ranks]
        self.plan_seconds = [chance.choice((0.0,) * 9 + (14.0,)) for _ in ranks]
        self.commit_seconds = chance.choice((0.0, 0.0, 14.0))
        self.fails = {chance.randrange(self.size): chance.choice(("plan", "write"))}
        if chance.random() < 0.8:
            self.fails.clear()
        #: Rank whose work sends no heartbeats.
        self.stalled = chance.randrange(self.size) if chance.random() < 0.1 else None
        self.has_begun = self.has_committed = False
        self.undone: list[int] = []
        self.ends: dict[int, float] = {}

    def run(self) -> None:
        """Runs the schedule.

        Raises:
            Violation: a promise is broken.
        """
        self.world.run(self.save)
        self.check()

    # --- one rank --------------------------------------------------------------------------------

    def save(self, process: Process) -> str:
        ranks = Exchange(self.world.groups[process.rank], "save", TIMEOUT)
        try:
            return self.save_in_steps(process, ranks)
        finally:
            ranks.close(CLOSE_SECONDS)
            self.ends[process.rank] = self.world.now

    def save_in_steps(self, process: Process, ranks: Exchange) -> str:
        world = self.world

        def message() -> tuple[Any, str]:
            with ranks.alive(lambda: int(world.now * 1000)):
                process.sleep(self.plan_seconds[ranks.rank])
            token = ranks.share(self.templates[ranks.rank])
            self.fail_if_planned(ranks.rank, "plan")
            return (token, ranks.rank), f"kept by {ranks.rank}"

        def plan(messages: list[Any]) -> Any:
            if [number for _token, number in messages] != list(range(self.size)):
                self.break_promise(f"the coordinator received {messages}")
            if [ranks.shared(token) for token, _number in messages] != self.templates:
                self.break_promise("the coordinator received other templates")
            return Answers(map(str, range(self.size))) if self.separate else "for all"

        answer, kept = ranks.exchange("plan", message, plan)
        if answer != (str(ranks.rank) if self.separate else "for all"):
            self.break_promise(f"rank {ranks.rank} received the answer {answer!r}")
        if kept != f"kept by {ranks.rank}":
            self.break_promise(f"rank {ranks.rank} kept {kept!r}")

        def write() -> tuple[int, int]:
            process.sleep(25.0 if ranks.rank == self.stalled else self.work[ranks.rank])
            self.fail_if_planned(ranks.rank, "write")
            return ranks.rank, ranks.rank

        writes_since = world.now

        def commit(written: list[int]) -> str:
            self.has_begun = True
            # The other ranks have lost the store, because its host was stopped.
            decided_at = world.created_at["save/2.write/verdict"]
            lapses = [
                end - begin for begin, end in process.stops if writes_since <= begin < decided_at
            ]
            if world.is_hosted and max(lapses, default=0.0) > 1.25 * TIMEOUT:
                self.break_promise(f"rank 0 commits after it was stopped: {process.stops}")
            process.step()
            process.sleep(self.commit_seconds)
            process.step()
            self.has_committed = True
            process.step()
            return f"committed {len(written)}"

        with ranks.alive(lambda: 0 if ranks.rank == self.stalled else int(world.now * 1000)):
            return ranks.exchange("write", write, commit, self.undone.append)[0]

    def fail_if_planned(self, rank: int, step: str) -> None:
        if self.fails.get(rank) == step:
            raise OSError(f"planned on {rank}")

    def break_promise(self, text: str) -> None:
        self.world.violation = self.world.violation or text

    # --- the promises ----------------------------------------------------------------------------

    def check(self) -> None:
        """Checks the outcomes of all ranks."""
        world, processes = self.world, self.world.processes
        faulty = {
            process.rank: max(seconds for request, seconds in process.faults)
            for process in processes
            if any(request <= process.requests for request, _seconds in process.faults)
        }
        stopped = {rank for rank, seconds in faulty.items() if seconds > SHORT_STOP}
        silent = set(stopped)
        if self.stalled is not None:
            silent.add(self.stalled)
        failed = {}
        for process in processes:
            if isinstance(process.result, CheckpointException):
                failed[process.rank] = process.result
                # Such a rank ends the save before the others, and then sends no heartbeats: it has
                # lost the store, or its coordinator was stopped after the verdict.
                causes = [cause for cause, _stack in process.result.failures.values()]
                is_cut_off = any(isinstance(cause, ConnectionError) for cause in causes)
                if is_cut_off or (0 in silent and "received the values" in str(process.result)):
                    silent.add(process.rank)
            elif isinstance(process.result, BaseException):
                raise Violation(f"rank {process.rank} raised {process.result!r}")
            elif not process.has_died and not self.has_committed:
                raise Violation(f"rank {process.rank} reports a save that is not committed")
        blamable = silent | self.fails.keys()
        for rank, error in failed.items():
            if self.has_begun and MAY_HAVE_COMMITTED not in str(error):
                raise Violation(f"rank {rank} does not know that rank 0 commits: {error}")
            self.check_causes(rank, error, blamable, silent, stopped)
        if self.undone and self.has_begun:
            raise Violation(f"ranks {self.undone} undid their part of a commit")
        if failed and not blamable:
            raise Violation(f"ranks {[*failed]} failed without a reason")
        if self.fails and len(failed) < sum(not process.has_died for process in processes):
            raise Violation(f"only ranks {[*failed]} report the error of {self.fails}")
        if not silent and world.keys:
            raise Violation(f"keys are left: {sorted(world.keys)}")
        repeats = [key for key, count in world.sets.items() if count > 1 and "/alive/" not in key]
        if repeats and not silent:
            raise Violation(f"keys were set more than once: {repeats}")
        stops = sum(seconds for seconds in faulty.values() if seconds != DEATH)
        limit = 60.0 + self.commit_seconds + stops + 5 * 1.25 * TIMEOUT + 2 * CLOSE_SECONDS
        for rank, end in self.ends.items():
            if end > limit:
                raise Violation(f"rank {rank} ended after {end:.0f} s, not within {limit:.0f} s")

    def check_causes(
        self,
        rank: int,
        error: CheckpointException,
        blamable: set[int],
        silent: set[int],
        stopped: set[int],
    ) -> None:
        """Checks that an error names only ranks that caused it."""
        for named, (cause, _stack) in error.failures.items():
            if isinstance(cause, ConnectionError):
                if not (self.world.is_hosted and named == rank and stopped & {0, rank}):
                    raise Violation(f"rank {rank} lost the store: {cause}")
            elif named not in blamable:
                raise Violation(f"rank {rank} blames rank {named}: {error}")
            elif isinstance(cause, TimeoutError) and named not in silent:
                raise Violation(f"rank {rank} declares rank {named} dead: {error}")
            elif not isinstance(cause, TimeoutError) and "planned on" not in str(cause):
                raise Violation(f"rank {rank} reports {cause!r}")


def find_violation(schedules: int, first_seed: int = 0) -> tuple[int, Violation] | None:
    """Returns the seed of the first schedule that breaks a promise, and the promise."""
    for seed in range(first_seed, first_seed + schedules):
        try:
            Schedule(seed).run()
        except Violation as violation:
            return seed, violation
    return None


def test_every_schedule_keeps_the_promises() -> None:
    first = int(os.environ.get("TORCH_CKPT_FIRST_SEED", "0"))
    found = find_violation(SCHEDULES, first)
    assert found is None, f"seed {found[0]}: {found[1]}"


# --- mutants -------------------------------------------------------------------------------------

#: By its title: the owner of a name, the name and its replacement.
MUTANTS: dict[str, tuple[Any, str, Any]] = {
    # A coordinator commits that did not run for long, together with its store.
    "trust an own pause": (Exchange, "_refuse_to_commit", lambda _self, _lapse: exchange._DECIDED),
    # Nothing reports that the coordinator may have committed.
    "give no advice": (exchange, "MAY_HAVE_COMMITTED", ""),
    # A rank takes the time for which it was stopped as the silence of other ranks.
    "count an own pause": (exchange, "max", lambda *of: 0.0 if of[0] == 0.0 else max(*of)),
}


def mutant(owner: type, name: str, **constants: str) -> Callable[[Callable[..., Any]], None]:
    """Registers a replacement of a method. It is called with the original method first."""
    original = getattr(owner, name)

    def register(replacement: Callable[..., Any]) -> None:
        def method(*arguments: Any) -> Any:
            return replacement(original, *arguments, **constants)

        title = " ".join([replacement.__name__.replace("_", " "), *constants.values()])
        MUTANTS[title] = owner, name, method

    return register


def check_then_set(
    atomic: Any, store: SimulatedStore, key: str, expected: str, desired: Any, kind: str
) -> Any:
    """Creates a key by a check and a set, not by one atomic request."""
    if not key.endswith(kind) or expected:
        return atomic(store, key, expected, desired)
    if store.check([key]):
        return atomic(store, key, "absent", "absent")
    store.set(key, desired)
    return desired.encode() if isinstance(desired, str) else bytes(desired)


mutant(SimulatedStore, "compare_set", kind="/owner")(check_then_set)
mutant(SimulatedStore, "compare_set", kind="/verdict")(check_then_set)


@mutant(Exchange, "_wait")
def close_at_once(wait: Any, ranks: Exchange, keys: dict[int, str], patience: float) -> Any:
    """Deletes the keys at the end without waiting for the other ranks."""
    is_end = any("/bye/" in key for key in keys.values())
    return [] if is_end else wait(ranks, keys, patience)


@mutant(Exchange, "_receive")
def delete_the_answer(receive: Any, ranks: Exchange) -> Any:
    """Deletes the answer to all ranks as soon as one rank has read it."""
    answer = receive(ranks)
    ranks._request(ranks._delete, [f"{ranks._key}/to/all"])
    return answer


@mutant(Exchange, "close")
def delete_shared_bytes(close: Any, ranks: Exchange, timeout: float) -> None:
    """Deletes shared bytes at the end, even if the coordinator may still read them."""
    ranks._may_be_read = False
    close(ranks, timeout)


@mutant(SimulatedStore, "compare_set")
def ignore_the_verdict(
    compare_set: Any, store: SimulatedStore, key: str, expected: str, desired: Any
) -> Any:
    """Lets the coordinator go on although it was declared dead."""
    found = compare_set(store, key, expected, desired)
    return desired if key.endswith("/verdict") and store._process.rank == 0 else found


@mutant(SimulatedStore, "set")
def send_no_heartbeat_while_waiting(
    store_set: Any, store: SimulatedStore, key: str, value: Any
) -> None:
    """Lets the coordinator send no heartbeat while it waits for other ranks."""
    if not key.endswith("/alive/0") or store._world.is_beating:
        store_set(store, key, value)


@mutant(Exchange, "_answer")
def post_own_answers_last(answer: Any, ranks: Exchange, value: Any) -> Any:
    """Directs ranks to their own answers before these are posted."""
    post, held = ranks._set, []

    def late(key: str, data: bytes) -> list[str]:
        if not key.endswith("/all"):
            held.append((key, data))
            return [key]
        keys = post(key, data)
        for one in held:
            post(*one)
        return keys

    with mock.patch.object(ranks, "_set", late):
        return answer(ranks, value)


@mutant(Exchange, "_declare_dead")
def undo_a_possible_commit(declare: Any, ranks: Exchange, silent: list[int]) -> RankFailures:
    """Treats a coordinator that was silent after its verdict as one that has not begun."""
    return declare(ranks, silent)._replace(combining=False)  # type: ignore[no-any-return]


@mutant(Exchange, "_declare_dead")
def blame_slow_ranks(declare: Any, ranks: Exchange, silent: list[int]) -> Any:
    """Declares ranks dead that still write, together with the coordinator."""
    others = range(1, ranks.size)
    absent = [r for r in others if not ranks._store.check([f"{ranks._key}/from/{r}"])]
    return declare(ranks, sorted({*silent, *absent}))


@mutant(Exchange, "_heartbeats")
def wait_for_ever(beats: Any, ranks: Exchange, keys: dict[int, str]) -> dict[int, bytes]:
    """Takes ranks that send no heartbeat for alive."""
    return dict.fromkeys(beats(ranks, keys), os.urandom(8))


@pytest.mark.parametrize("title", MUTANTS)
def test_a_mutant_breaks_a_promise(title: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*MUTANTS[title], raising=False)
    assert find_violation(4 * SCHEDULES) is not None


if __name__ == "__main__":
    begun = time.monotonic()
    number = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    if len(sys.argv) > 3:
        setattr(*MUTANTS[sys.argv[3]])
    found = find_violation(number, int(sys.argv[1]))
    done = number if found is None else found[0] - int(sys.argv[1]) + 1
    print(found or "no violation", f"{done / (time.monotonic() - begun):.0f} schedules a second")
