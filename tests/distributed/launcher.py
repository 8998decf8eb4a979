"""Ranks that run cases: functions that all ranks of a launch call.

A test file has cases, which are functions ``case_*(launch)``, and ends with ``test_on_ranks =
on_ranks(globals())``: a test for each case and number of ranks. Its ``IMPORTED`` lists modules that
are slow to import; ``at_end()`` is called before its ranks end. The ranks are forked at the first
of their cases and reused for the others. A rank that dies, hangs or loses step fails its case, with
the output of all ranks, and the next case gets new ranks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.distributed.cases import serve
from tests.ranks import GRACE_SECONDS, Ranks

#: Seconds for one case, and for the end of ranks. The timeout of process groups is shorter.
CASE_SECONDS = 120.0

#: The numbers of ranks in torture runs.
TORTURE = bool(os.environ.get("TORCH_CKPT_TORTURE"))

Case = TypeVar("Case", bound=Callable[..., None])


def on(*sizes: int, only: bool = False) -> Callable[[Case], Case]:
    """Sets the numbers of ranks of a case; the default is two.

    Args:
        only: no other numbers in ``make torture``. Without sizes, only tests call the case.
    """

    def mark(case: Case) -> Case:
        case.sizes, case.only = sizes, only  # type: ignore[attr-defined]
        return case

    return mark


def takes_several(case: Case) -> Case:
    """Marks a case in which ranks act differently."""
    case.takes_several = True  # type: ignore[attr-defined]
    return case


def on_ranks(
    module: dict[str, Any],
    thorough: Sequence[int] = (2, 4),
    skipped: Callable[[str], str] = lambda case: "",
) -> Any:
    """Makes the test of a file of cases.

    Args:
        module: the file's globals.
        thorough: additional numbers of ranks in ``make torture``.
        skipped: returns the reason to skip a case by its name, or "".
    """
    parameters = []
    for key, case in module.items():
        if not key.startswith("case_"):
            continue
        sizes = set(getattr(case, "sizes", (2,)))
        if TORTURE and not getattr(case, "only", False):
            sizes |= set(thorough) - ({1} if hasattr(case, "takes_several") else set())
        case_name = key.removeprefix("case_")
        reason = skipped(case_name)
        marks = pytest.mark.skipif(bool(reason), reason=reason)
        for size in sorted(sizes):
            parameters.append(pytest.param(size, case_name, id=f"{size}-{case_name}", marks=marks))

    @pytest.mark.parametrize(("size", "case"), parameters)
    def test_on_ranks(launches: Launches, size: int, case: str) -> None:
        launches.run(size, case)

    return test_on_ranks


def between(saves: str, loads: str, sizes: Sequence[tuple[int, int]]) -> Any:
    """Makes a test in which some numbers of ranks load what others have saved, by two cases of the
    file."""

    @pytest.mark.parametrize(("saved_by", "loaded_by"), sizes)
    def test_between(launches: Launches, saved_by: int, loaded_by: int) -> None:
        launches.run(saved_by, saves)
        launches.run(loaded_by, loads)

    return test_between


class Launches:
    """Groups of ranks of one test file.

    Args:
        module: the file's name, as a rank imports it.
        workdir: directory of all groups.
        modules: see :class:`Ranks`.
    """

    def __init__(self, module: str, workdir: Path, modules: Sequence[str] = ()) -> None:
        self._module = module
        self._workdir = workdir
        self._modules = modules
        self._groups: dict[int, Group] = {}

    def run(self, size: int, case: str) -> None:
        """Runs a case on ``size`` ranks, and fails if the case fails."""
        if size not in self._groups:
            self._groups[size] = Group(self._module, size, self._workdir, self._modules)
        self._groups[size].run(case)

    def end(self) -> None:
        """Ends all groups at the same time. Fails if a rank does not end normally."""
        with ExitStack() as ends:
            for group in self._groups.values():
                group.request_end()
                ends.callback(group.end)


class Group:
    """Ranks that run cases of a module.

    Args:
        module: its name.
        size: number of ranks.
        workdir: directory of all groups of a module, so that one can load what another saved.
        modules: see :class:`Ranks`.
        case_seconds: time limit of a case.
        grace_seconds: time limit of the other ranks once a rank has failed.
    """

    def __init__(
        self,
        module: str,
        size: int,
        workdir: Path,
        modules: Sequence[str] = (),
        case_seconds: float = CASE_SECONDS,
        grace_seconds: float = GRACE_SECONDS,
    ) -> None:
        self.workdir = workdir
        self._module = module
        self._size = size
        self._modules = modules
        self._case_seconds = case_seconds
        self._grace_seconds = grace_seconds
        self._ranks: Ranks | None = None

    def run(self, case: str) -> None:
        """Runs a case on all ranks.

        Raises:
            AssertionError: the case failed on a rank. The text has the tracebacks, and the output
                of all ranks if a rank died, hangs or lost step.
        """
        if self._ranks is None:
            self._ranks = self._started()
        group = self._ranks
        lengths = [len(child.said()) for child in group.children]
        failures: dict[int, str] = {}
        for rank, child in enumerate(group.children):
            try:
                child.connection.send(case)
            except OSError:
                failures[rank] = f"ended before the case, with code {child.wait()}"
        passed, lost = self._outcomes(group, failures)
        if passed == self._size:
            return
        lines = [f"rank {rank}: {failure}" for rank, failure in sorted(failures.items())]
        if lost or passed:
            lines.append(group.said(lengths))
            self._ranks = None
            group.kill()
        raise AssertionError("\n".join(lines))

    def _started(self) -> Ranks:
        arguments = (self._module, self.workdir)
        group = Ranks(self._size, serve, *arguments, modules=self._modules)
        try:
            for rank in range(self._size):
                group.answer(rank, CASE_SECONDS)
        except BaseException:
            group.kill()
            raise
        return group

    def request_end(self) -> None:
        """Makes the ranks end; :meth:`end` waits for them."""
        with suppress(OSError):
            for child in self._ranks.children if self._ranks is not None else ():
                child.connection.send(None)

    def end(self) -> None:
        """Waits for the ranks to end. Fails unless all exit with code 0, which includes the
        shutdown of the interpreter and of the engine's threads."""
        if self._ranks is None:
            return
        group, self._ranks = self._ranks, None
        try:
            codes = group.codes(CASE_SECONDS)
            assert codes == [0] * self._size, f"exit codes {codes}\n{group.said()}"
        finally:
            group.kill()

    def _outcomes(self, group: Ranks, failures: dict[int, str]) -> tuple[int, bool]:
        """Waits for all ranks and appends failures. Returns how many passed, and whether a rank
        cannot run another case."""
        waiting: dict[Any, int] = {
            child.connection: rank
            for rank, child in enumerate(group.children)
            if rank not in failures
        }
        passed, lost = 0, bool(failures)
        until = time.monotonic() + (self._grace_seconds if lost else self._case_seconds)
        while waiting and (left := until - time.monotonic()) > 0:
            for connection in wait(list(waiting), left):
                rank = waiting.pop(connection)
                assert isinstance(connection, Connection)
                try:
                    failure = connection.recv()
                except (EOFError, ConnectionResetError):
                    lost, failure = True, group.end_of(rank)
                if failure is None:
                    passed += 1
                else:
                    failures[rank] = failure
                    until = min(until, time.monotonic() + self._grace_seconds)
        hanging = sorted(waiting.values())
        after = "others have failed" if failures else f"{self._case_seconds:g} s"
        for rank in hanging:
            failures[rank] = f"hangs after {after}, and is killed"
        group.where(hanging)
        return passed, lost or bool(hanging)


class Outcomes:
    """Results that ranks send: a name and a value for each case. Ranks may die in their last case.

    Args:
        ranks: the sending ranks.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._found: list[dict[str, Any]] | None = None

    def found(self, case: str, dead: int | None = None) -> list[Any]:
        """Returns by rank the result of a case; None for a rank that may have died in the case."""
        if self._found is None:
            self._found = [dict(self._sent(rank)) for rank in range(self.ranks.size)]
        missing = [rank for rank, of_rank in enumerate(self._found) if case not in of_rank]
        assert missing in ([], [dead]), self.ranks.said()
        return [of_rank.get(case) for of_rank in self._found]

    def _sent(self, rank: int) -> Iterator[tuple[str, Any]]:
        child = self.ranks.children[rank]
        with suppress(EOFError):
            try:
                while True:
                    yield child.receive(CASE_SECONDS)
            except TimeoutError:
                self.ranks.where([rank])
                raise AssertionError(f"rank {rank} hangs\n{self.ranks.said()}") from None
