"""Ranks that run cases: functions that all ranks of a launch do together.

A test file has cases, which are functions ``case_*(launch)``, and ends with
``test_on_ranks = on_ranks(globals())``: a test for each case and number of ranks. Its ``IMPORTED``
are modules that take long to import; ``at_end()`` is called before its ranks end. The ranks are
forked when the first of their cases is asked for, and stay for the others. A rank that dies, hangs
or loses step fails its case, with what all ranks have said, and the next case gets new ranks.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.distributed.cases import serve
from tests.forked import ENVIRONMENT, REPOSITORY, Child
from tests.ranks import Ranks, ranks

#: Of one case, and of the ends of ranks. Ranks give up a silent process group before.
CASE_SECONDS = 120.0

#: For the others, once a rank has failed.
GRACE_SECONDS = 10.0

#: Of one run of torchrun or a script.
TIMEOUT_SECONDS = 240

# torchrun asks its ranks to end, and kills them after 30 seconds.
ENDING_SECONDS = 60

#: Everything on every number of ranks on which it makes sense.
TORTURE = bool(os.environ.get("TORCH_CKPT_TORTURE"))

Case = TypeVar("Case", bound=Callable[..., None])


def on(*sizes: int, only: bool = False) -> Callable[[Case], Case]:
    """Says on how many ranks a case is run, where that is not two.

    Args:
        only: on no others in ``make torture``. Without sizes it is for tests to call.
    """

    def mark(case: Case) -> Case:
        case.sizes, case.only = sizes, only  # type: ignore[attr-defined]
        return case

    return mark


def takes_several(case: Case) -> Case:
    """Marks a case in which ranks do not do the same."""
    case.takes_several = True  # type: ignore[attr-defined]
    return case


def on_ranks(
    module: dict[str, Any],
    thorough: Sequence[int] = (2, 4),
    skipped: Callable[[str], str] = lambda case: "",
) -> Any:
    """The test of a file of cases.

    Args:
        module: the file's globals.
        thorough: on how many ranks its cases are run in ``make torture``, beside those that they
            say.
        skipped: by the name of a case why it is not run; "" where it is.
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
    """The test that some numbers of ranks load what others have saved, by two cases of the file."""

    @pytest.mark.parametrize(("saved_by", "loaded_by"), sizes)
    def test_between(launches: Launches, saved_by: int, loaded_by: int) -> None:
        launches.run(saved_by, saves)
        launches.run(loaded_by, loads)

    return test_between


class Launches:
    """The groups of ranks of one test file.

    Args:
        module: the file's, as a rank imports it.
        workdir: for all of them.
        modules: as for :class:`Ranks`.
    """

    def __init__(self, module: str, workdir: Path, modules: Sequence[str] = ()) -> None:
        self._module = module
        self._workdir = workdir
        self._modules = modules
        self._groups: dict[int, Group] = {}

    def run(self, size: int, case: str) -> None:
        """Runs a case on so many ranks; fails where it does."""
        if size not in self._groups:
            self._groups[size] = Group(self._module, size, self._workdir, self._modules)
        self._groups[size].run(case)

    def end(self) -> None:
        """Ends all ranks, at the same time; fails where some do not end well."""
        with ExitStack() as ends:
            for group in self._groups.values():
                group.tell_to_end()
                ends.callback(group.end)


class Group:
    """Ranks that run the cases of a module that they are told.

    Args:
        module: its name.
        size: how many ranks.
        workdir: for all groups of a module, so that one can load what another saved.
        modules: as for :class:`Ranks`.
        case_seconds: that a case may take.
        grace_seconds: that the others may take once a rank has failed.
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
            AssertionError: it failed on some; with their tracebacks, and where they are not all in
                step, what all have said.
        """
        if self._ranks is None:
            self._ranks = self._started()
        group = self._ranks
        said = [len(child.said()) for child in group.children]
        failures: dict[int, str] = {}
        for rank, child in enumerate(group.children):
            try:
                child.connection.send(case)
            except OSError:
                failures[rank] = f"ended before the case, with code {child.wait()}"
        passed, lost = self._outcomes(group, failures)
        if passed == self._size:
            return
        told = [f"rank {rank}: {failure}" for rank, failure in sorted(failures.items())]
        if lost or passed:
            told.append(group.said(said))
            self._ranks = None
            group.kill()
        raise AssertionError("\n".join(told))

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

    def tell_to_end(self) -> None:
        """Lets the ranks begin to end; :meth:`end` comes next."""
        with suppress(OSError):
            for child in self._ranks.children if self._ranks is not None else ():
                child.connection.send(None)

    def end(self) -> None:
        """Waits for the ends of the ranks; fails where they do not end as a program that went well,
        interpreter and the engine's threads included."""
        if self._ranks is None:
            return
        group, self._ranks = self._ranks, None
        try:
            codes = group.codes(CASE_SECONDS)
            assert codes == [0] * self._size, f"exit codes {codes}\n{group.said()}"
        finally:
            group.kill()

    def _outcomes(self, group: Ranks, failures: dict[int, str]) -> tuple[int, bool]:
        """Waits for all, and adds what went wrong; how many have passed, and whether some are in no
        state for another case."""
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
    """What each of some ranks sends of its cases, a name and what came of it, up to its end. Ranks
    may die in their last case.

    Args:
        ranks: that send it.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._found: list[dict[str, Any]] | None = None

    def found(self, case: str, dead: int | None = None) -> list[Any]:
        """By rank what a case returned; None on the rank that may have died in it."""
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


def by_fork(
    size: int, *arguments: str | Path, modules: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """As :func:`torchrun` without its processes: ranks are forked. Where one fails the others are
    ended, as by torchrun."""
    words = [*map(str, arguments)]
    with ranks(size, run_program, words, modules=modules) as group:
        until = time.monotonic() + TIMEOUT_SECONDS
        running = list(group.children)
        code = 0
        while running and (ended := wait(running, max(0.0, until - time.monotonic()))):
            for child in ended:
                assert isinstance(child, Child)
                running.remove(child)
                code = code or child.wait()
            if code != 0:
                until = min(until, time.monotonic() + GRACE_SECONDS)
                for child in running:
                    child.signal(signal.SIGTERM)
        if running and code == 0:
            group.where([group.children.index(child) for child in running])
            raise TimeoutError(f"{group.said()}\nkilled after {TIMEOUT_SECONDS} s")
        output = "".join(child.said() for child in group.children)
        return subprocess.CompletedProcess(words, code, output)


def run_program(_: Connection, words: list[str]) -> None:
    """Runs a script, or "-m" and a module, with its arguments, as Python does; a rank's."""
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")


def torchrun(ranks: int, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs a script, or "-m" and a module, with arguments of its own; its output is in stdout.

    Raises:
        TimeoutError: it has hung, and all its ranks have been ended; with the output.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), *map(str, arguments)]
    process = subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env={**os.environ, **ENVIRONMENT},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"{_ended(process)}\nkilled after {TIMEOUT_SECONDS} s") from None
    return subprocess.CompletedProcess(command, process.returncode, output)


def _ended(agent: subprocess.Popen[str]) -> str:
    """Ends torchrun; its output. Ranks have sessions of their own: only torchrun can end them."""
    agent.terminate()
    try:
        return agent.communicate(timeout=ENDING_SECONDS)[0]
    except subprocess.TimeoutExpired:
        os.killpg(agent.pid, signal.SIGKILL)
        return agent.communicate()[0]
