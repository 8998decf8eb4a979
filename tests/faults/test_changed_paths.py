"""Changes of the target of a save's path, before each of the save's system calls.

The directory is exchanged with an unrelated checkpoint's, a link in the path is retargeted,
or the working directory is changed under a relative path. In all cases the save stays in the
directory that it has opened, or reports that it did not commit. It never changes the other
checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp

from tests.faults.saves import save_as_rank, save_below, save_below_as_rank
from tests.interposed import Order, Run, Server
from tests.support import cause_of
from tests.sweeps import (
    NEW,
    SAVES,
    SWEEPING,
    TORTURE,
    Bench,
    Counts,
    found_in,
    points,
    unnamed_in,
)
from torch_ckpt.errors import NotCommitted

pytestmark = [*SWEEPING, pytest.mark.full]

COUNTS = Counts("changed paths", "points", "committed", "not committed")


@dataclass(frozen=True)
class Ground:
    """A save's directory and an unrelated one, both with the old checkpoint.

    Attributes:
        tree: directory above both.
        path: path of the save.
        other: the unrelated directory.
        order: changes the target of the path.
    """

    tree: Path
    path: Path
    other: Path
    order: Order

    def contents(self) -> dict[int, dict[str, bytes]]:
        """Returns the files of each directory of the tree, by its inode."""
        found: dict[int, dict[str, bytes]] = {}
        for directory, _, names in os.walk(self.tree):
            if names:
                files = {name: Path(directory, name).read_bytes() for name in names}
                found[os.stat(directory).st_ino] = files
        return found

    def path_of(self, inode: int) -> Path:
        """Returns the present path of a directory."""
        return next(
            Path(directory)
            for directory, _, _ in os.walk(self.tree)
            if os.stat(directory).st_ino == inode
        )


@contextmanager
def exchanged_directories(bench: Bench) -> Iterator[Ground]:
    with bench.two_directories() as (tree, path, other):
        yield Ground(tree, path, other, Order("exchange", paths=(str(path), str(other))))


@contextmanager
def retargeted_link(bench: Bench) -> Iterator[Ground]:
    with bench.two_directories() as (tree, path, other):
        link, second = tree / "latest", tree / "second"
        link.symlink_to("runs")
        second.symlink_to("others")
        order = Order("exchange", paths=(str(link), str(second)))
        yield Ground(tree, link / path.name, other, order)


@contextmanager
def changed_working_directory(bench: Bench) -> Iterator[Ground]:
    with bench.two_directories() as (tree, path, other):
        yield Ground(tree, path, other, Order("chdir", paths=(str(other.parent), "")))


CHANGES = [exchanged_directories, retargeted_link, changed_working_directory]
HOW = ["torch_ckpt.save", "dcp.save", "async_save"]


def run_save(server: Server, ground: Ground, how: str, order: Order) -> Run:
    if order.action == "chdir":
        return server.run(order, ground.tree, save_below, str(ground.path), NEW, 4, how)
    return server.run(order, ground.tree, SAVES[how], str(ground.path), NEW, 4)


def has_opened(run: Run, path: Path) -> bool:
    """Returns True if the save had opened its directory before the path was changed."""
    assert run.hit is not None
    before = run.calls[: run.calls.index(run.hit)]
    return any(call.kind == "open" and call.path == str(path) for call in before)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("change", CHANGES)
def test_a_save_stays_in_its_directory_when_its_path_changes(
    server: Server, bench: Bench, change: Callable[..., object], how: str
) -> None:
    with change(bench) as ground:
        sound = run_save(server, ground, how, Order())
        assert sound.error is None
        assert has_opened(with_last_call_hit(sound), ground.path), "the sweep does not see the save"
    kinds = set()
    for number in points(sound.numbered, 1000 if TORTURE else 7, change.__name__, how):
        with change(bench) as ground:
            before = ground.contents()
            own, other = os.stat(ground.path).st_ino, os.stat(ground.other).st_ino
            run = run_save(server, ground, how, replace(ground.order, first=number))
            if run.hit is None:
                assert number > sound.numbered // 2
                break
            kinds.add(run.hit.kind)
            after = ground.contents()
            assert after.keys() == before.keys(), (run.hit, "directories were created or removed")
            if not has_opened(run, ground.path) and ground.order.action == "exchange":
                # The path was changed before the save opened it.
                own, other = other, own
            assert after[other] == before[other], run.hit
            if run.error is None:
                COUNTS.add(f"{change.__name__} {how}", "points", "committed")
                assert found_in(ground.path_of(own)) == "new", run.hit
                assert not unnamed_in(ground.path_of(own)), run.hit
            else:
                COUNTS.add(f"{change.__name__} {how}", "points", "not committed")
                assert isinstance(run.error, dcp.CheckpointException), run.hit
                cause = cause_of(run.error)
                assert isinstance(cause, NotCommitted), (run.hit, cause)
                assert str(ground.path) in str(cause)
                assert str(ground.path_of(own)) in str(cause)
                assert ground.order.action == "exchange", run.hit
                assert after[own] == before[own], run.hit
    assert len(kinds) > 2, "the sweep sees few calls"


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("change", CHANGES)
def test_a_save_of_two_ranks_stays_in_one_directory_when_its_path_changes(
    servers: list[Server],
    bench: Bench,
    tmp_path: Path,
    change: Callable[..., object],
    rank: int,
) -> None:
    row = f"{change.__name__} at a call of rank {rank}"
    store = tmp_path / "store"
    with change(bench) as ground:
        sound = run_ranks(servers, ground, Order(), rank, store)
        assert [run.error for run in sound] == [None, None]
    for number in points(sound[rank].numbered, 1, change.__name__, "two ranks", rank):
        with change(bench) as ground:
            before = ground.contents()
            own, other = os.stat(ground.path).st_ino, os.stat(ground.other).st_ino
            runs = run_ranks(servers, ground, replace(ground.order, first=number), rank, store)
            hit = runs[rank].hit
            if hit is None:
                assert number > sound[rank].numbered // 2
                break
            after = ground.contents()
            assert after.keys() == before.keys(), (hit, "directories were created or removed")
            if runs[0].error is None:
                COUNTS.add(row, "points", "committed")
                assert runs[1].error is None, hit
                if not has_opened(runs[rank], ground.path) and ground.order.action == "exchange":
                    own, other = other, own
                assert found_in(ground.path_of(own)) == "new", hit
                assert not unnamed_in(ground.path_of(own)), hit
                assert after[other] == before[other], hit
            else:
                COUNTS.add(row, "points", "not committed")
                assert ground.order.action == "exchange", hit
                assert after == before, hit
                for run in runs:
                    assert isinstance(run.error, dcp.CheckpointException), (hit, run.error)
                    cause = cause_of(run.error)
                    assert isinstance(cause, NotCommitted), (hit, cause)
                    assert str(ground.path) in str(cause)


def run_ranks(
    servers: list[Server], ground: Ground, order: Order, rank: int, store: Path
) -> list[Run]:
    """Runs a save of two ranks, of which one has the order. Returns the run of each rank."""
    work = save_below_as_rank if ground.order.action == "chdir" else save_as_rank
    store.unlink(missing_ok=True)
    for number, server in enumerate(servers):
        given = order if number == rank else Order()
        arguments = (str(ground.path), NEW, 2, "torch_ckpt.save", number, str(store))
        server.start(given, ground.tree, work, *arguments)
    return [server.finish() for server in servers]


def with_last_call_hit(run: Run) -> Run:
    """Returns a run whose last call is marked as the one that the order hit."""
    calls = [*run.calls[:-1], replace(run.calls[-1], action="exchange")]
    return replace(run, calls=calls)
