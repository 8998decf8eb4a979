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
from dataclasses import dataclass
from multiprocessing.connection import wait
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
        launches(size, case)

    return test_on_ranks


def between(saves: str, loads: str, sizes: Sequence[tuple[int, int]]) -> Any:
    """Makes a test in which some numbers of ranks load what others have saved, by two cases of the
    file."""

    @pytest.mark.parametrize(("saved_by", "loaded_by"), sizes)
    def test_between(launches: Launches, saved_by: int, loaded_by: int) -> None:
        launches(saved_by, saves)
        launches(loaded_by, loads)

    return test_between


#: Runs a case on a number of ranks, and fails if the case fails.
Launches = Callable[[int, str], None]


@pytest.fixture(scope="module")
def launches(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Launches]:
    """Makes a group of ranks for each size in the cases of a file."""
    module = f"tests.distributed.{request.path.stem}"
    imported = getattr(request.module, "IMPORTED", ())
    workdir = tmp_path_factory.mktemp(request.path.stem)
    groups: dict[int, Group] = {}

    def run(size: int, case: str) -> None:
        if size not in groups:
            groups[size] = Group(module, size, workdir, imported)
        groups[size].run(case)

    yield run
    with ExitStack() as ends:
        for group in groups.values():
            group.request_end()
            ends.callback(group.end)


@dataclass
class Group:
    """Ranks that run cases of a module.

    Attributes:
        module: its name, as a rank imports it.
        workdir: directory of all groups of a module, so that one can load what another saved.
        modules: see :class:`Ranks`.
        case_seconds: time limit of a case.
        grace_seconds: time limit of the other ranks once a rank has failed.
    """

    module: str
    size: int
    workdir: Path
    modules: Sequence[str] = ()
    case_seconds: float = CASE_SECONDS
    grace_seconds: float = GRACE_SECONDS
    _ranks: Ranks | None = None

    def run(self, case: str) -> None:
        """Runs a case on all ranks.

        Raises:
            AssertionError: the case failed on a rank. The text has the tracebacks, and the output
                of all ranks if a rank died, hangs or lost step.
        """
        if self._ranks is None:
            self._ranks = Ranks(self.size, serve, self.module, self.workdir, modules=self.modules)
            for rank in range(self.size):
                self._ranks.answer(rank, CASE_SECONDS)
        group = self._ranks
        lengths = [len(child.said()) for child in group.children]
        for child in group.children:
            # A rank that has ended is found below.
            with suppress(OSError):
                child.connection.send(case)
        failures, passed, lost = self._outcomes(group)
        if passed == self.size:
            return
        lines = [f"rank {rank}: {failure}" for rank, failure in sorted(failures.items())]
        if lost or passed:
            lines.append(group.said(lengths))
            self._ranks = None
            group.kill()
        raise AssertionError("\n".join(lines))

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
            assert codes == [0] * self.size, f"exit codes {codes}\n{group.said()}"
        finally:
            group.kill()

    def _outcomes(self, group: Ranks) -> tuple[dict[int, str], int, bool]:
        """Waits for all ranks. Returns the failures by rank, how many passed, and whether a rank
        cannot run another case."""
        waiting = {child.connection: rank for rank, child in enumerate(group.children)}
        failures: dict[int, str] = {}
        passed, lost = 0, False
        until = time.monotonic() + self.case_seconds
        while waiting and (left := until - time.monotonic()) > 0:
            for connection in wait(list(waiting), left):
                rank = waiting.pop(connection)
                try:
                    failure = group.children[rank].receive()
                except EOFError as error:
                    lost, failure = True, str(error)
                if failure is None:
                    passed += 1
                else:
                    failures[rank] = failure
                    until = min(until, time.monotonic() + self.grace_seconds)
        after = "others have failed" if failures else f"{self.case_seconds:g} s"
        for rank in waiting.values():
            failures[rank] = f"hangs after {after}, and is killed"
        group.where(sorted(waiting.values()))
        return failures, passed, lost or bool(waiting)
