"""Sweeps over all system calls of a save: ways to save, checks of what is left, and counts.

Environment variables:
    TORCH_CKPT_TORTURE: if set, every point is swept, otherwise a sample of the points.
    TORCH_CKPT_SEED: seed of the sample; printed at the end.
    TORCH_CKPT_RESULTS: a directory for the counts, as JSON.
"""

from __future__ import annotations

import functools
import json
import os
import random
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed.checkpoint as dcp

import torch_ckpt
from tests.interposed import Server
from tests.support import (
    StateDict,
    assert_equal,
    cause_of,
    emptied,
    random_tensor,
    stock_load,
    stock_save,
)

TORTURE = bool(os.environ.get("TORCH_CKPT_TORTURE"))
SEED = int(os.environ.get("TORCH_CKPT_SEED") or 1)

#: Marks of sweeps: a limit for all points, and no warnings about replaced checkpoints.
SWEEPING = [
    pytest.mark.timeout(3600 if TORTURE else 300),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
    pytest.mark.filterwarnings("ignore:an unused file could not be removed"),
]

# Each of four files is large enough for direct I/O, and a single file needs two chunks.
_BYTES_OF_A_TENSOR = (1 << 20) + (64 << 10)

OLD, NEW, NEXT = 1, 2, 3


@functools.cache
def state_of(seed: int) -> StateDict:
    """Makes four tensors of one size, so that each of up to four files gets one, and more items."""
    state: StateDict = {
        f"t{i}": random_tensor((_BYTES_OF_A_TENSOR // 4 // 100, 100), torch.float32, 10 * seed + i)
        for i in range(4)
    }
    return state | {"step": seed, "small": random_tensor((7,), torch.int64, seed)}


def tensors_of(seed: int) -> StateDict:
    return {name: value for name, value in state_of(seed).items() if name != "step"}


# --- what a child does ---------------------------------------------------------------------------


def save_alone(path: str, seed: int, threads: int) -> None:
    torch_ckpt.save(
        state_of(seed), path, no_dist=True, options=torch_ckpt.WriteOptions(thread_count=threads)
    )


def save_through_page_cache(path: str, seed: int, threads: int) -> None:
    torch_ckpt.save(
        state_of(seed),
        path,
        no_dist=True,
        options=torch_ckpt.WriteOptions(thread_count=threads, direct_io=False),
    )


def save_by_dcp(path: str, seed: int, threads: int) -> None:
    writer = torch_ckpt.FileSystemWriter(path, thread_count=threads)
    dcp.save(state_of(seed), storage_writer=writer, no_dist=True)


def save_in_background(path: str, seed: int, threads: int) -> None:
    torch_ckpt.async_save(
        state_of(seed), path, no_dist=True, options=torch_ckpt.WriteOptions(thread_count=threads)
    ).result()


def save_safetensors(path: str, seed: int, threads: int) -> None:
    """Saves the tensors to two files and an index."""
    torch_ckpt.save(
        tensors_of(seed),
        path,
        no_dist=True,
        format=torch_ckpt.Safetensors(max_shard_size=2 * _BYTES_OF_A_TENSOR),
        options=torch_ckpt.WriteOptions(thread_count=threads),
    )


def publish(path: str, seed: int, threads: int) -> None:
    """Publishes version ``seed`` with a delta, and deletes the version before."""
    torch_ckpt.publish(
        tensors_of(seed),
        path,
        version=seed,
        delta=True,
        keep=1,
        no_dist=True,
        format=torch_ckpt.Safetensors(max_shard_size=2 * _BYTES_OF_A_TENSOR),
        options=torch_ckpt.WriteOptions(thread_count=threads),
    )


def save_by_stock(path: str, seed: int, threads: int) -> None:
    stock_save(state_of(seed), path, thread_count=threads, sync_files=True)


#: Imported by name, as the tables refer to it.
SAVES = {
    "torch_ckpt.save": save_alone,
    "torch_ckpt.save direct_io=False": save_through_page_cache,
    "dcp.save": save_by_dcp,
    "async_save": save_in_background,
    "safetensors": save_safetensors,
    "publish": publish,
    "stock dcp.save": save_by_stock,
}


@dataclass(frozen=True)
class Scenario:
    """One way to save.

    Attributes:
        how: a key of SAVES.
        threads: the writer's ``thread_count``.
        overwrites: True if the directory has an older checkpoint.
    """

    how: str
    threads: int
    overwrites: bool

    def __str__(self) -> str:
        return f"{self.how} {self.threads} {'over' if self.overwrites else 'first'}"

    @property
    def before(self) -> str:
        """Names the contents of the directory before the save, in the words of :func:`found_in`."""
        return "old" if self.overwrites else "none"


OURS = [
    Scenario(how, threads, overwrites)
    for how in ("torch_ckpt.save", "dcp.save", "async_save")
    for threads in (1, 4)
    for overwrites in (False, True)
] + [Scenario("torch_ckpt.save direct_io=False", 4, True)]
SAFETENSORS = [Scenario("safetensors", 4, overwrites) for overwrites in (False, True)]
PUBLISH = [Scenario("publish", 4, overwrites) for overwrites in (False, True)]
#: Control runs, which are counted and assert nothing.
STOCK = [
    Scenario("stock dcp.save", threads, overwrites)
    for threads in (1, 4)
    for overwrites in (False, True)
]


def scenarios(all_: Iterable[Scenario], first: Scenario) -> pytest.MarkDecorator:
    """Parametrizes a test by scenarios, of which only ``first`` runs in ``make test``."""
    parameters = [
        pytest.param(scenario, marks=() if scenario == first else pytest.mark.full)
        for scenario in all_
    ]
    return pytest.mark.parametrize("scenario", parameters, ids=str)


class Bench:
    """Directories for consecutive saves, each in the initial state of its scenario.

    Args:
        workdir: parent directory of all of them.
    """

    def __init__(self, workdir: Path) -> None:
        self.workdir = workdir
        self._older: dict[str, Path] = {}
        self._made = 0

    @contextmanager
    def directory(self, scenario: Scenario) -> Iterator[tuple[Path, Path]]:
        """Makes a tree and the checkpoint's directory in it for the duration of a block."""
        self._made += 1
        tree = self.workdir / f"tree-{self._made}"
        path = tree / "runs" / "step"
        tree.mkdir()
        if scenario.overwrites:
            path.parent.mkdir()
            shutil.copytree(self._older_of(scenario), path, symlinks=True)
        yield tree, path
        # Not deleted if the block has failed: the files show the cause.
        shutil.rmtree(tree)

    @contextmanager
    def two_directories(self) -> Iterator[tuple[Path, Path, Path]]:
        """Makes a tree with two directories of one name, each with the old checkpoint."""
        scenario = Scenario("torch_ckpt.save", 4, True)
        with self.directory(scenario) as (tree, path):
            other = tree / "others" / path.name
            shutil.copytree(self._older_of(scenario), other, symlinks=True)
            yield tree, path, other

    def _older_of(self, scenario: Scenario) -> Path:
        # Stock writes over files of the same names, so its older checkpoint has as many files.
        of_its_own = scenario in (*STOCK, *SAFETENSORS, *PUBLISH)
        name = f"{scenario.how} {scenario.threads}" if of_its_own else "ours"
        if name not in self._older:
            path = self._older[name] = self.workdir / f"older {name}"
            if of_its_own:
                SAVES[scenario.how](str(path), OLD, scenario.threads)
            else:
                save_alone(str(path), OLD, 4)
        return self._older[name]


def found_in(path: Path, *, stock: bool = False) -> str:
    """Identifies the state that a directory loads as: "none", "old", "new" or "next".

    Returns "a mix" for any other state, or "unreadable" if loading fails.
    """
    is_model = os.path.lexists(path / "torch_ckpt.checksums")
    if not is_model and not os.path.lexists(path / ".metadata"):
        return "none"
    contents = tensors_of if is_model else state_of
    loaded = emptied(contents(OLD))
    try:
        if stock:
            stock_load(loaded, path)
        else:
            torch_ckpt.load(loaded, path, no_dist=True)
    except dcp.CheckpointException as error:
        return f"unreadable: {cause_of(error)!r}"
    except Exception as error:
        return f"unreadable: {error!r}"
    for seed, name in ((OLD, "old"), (NEW, "new"), (NEXT, "next")):
        try:
            assert_equal(loaded, contents(seed))
        except AssertionError:
            continue
        return name
    return "a mix"


def names_in(path: Path) -> set[str]:
    return set(os.listdir(path)) if path.exists() else set()


def unnamed_in(path: Path) -> set[str]:
    """Lists the files of a checkpoint's directory that its metadata does not name."""
    metadata = torch_ckpt.FileSystemReader(path).read_metadata()
    named = {info.relative_path for info in metadata.storage_data.values()}
    return names_in(path) - named - {".metadata"}


# --- which points --------------------------------------------------------------------------------


def points(count: int, wanted: int, *what: Any) -> Iterator[int]:
    """Yields numbers of calls at regular distances, the first by the seed; every number in torture
    runs.

    Args:
        count: calls of a successful run. "Every number" has no end: the caller stops after a run
            with fewer calls, because the order of threads varies.
        wanted: approximate number of points.
        what: name of the sweep, so that sweeps have different samples.
    """
    if TORTURE or wanted >= count:
        yield from range(1, 5000)
        raise AssertionError("a save of 5,000 calls, or one that never ends")
    stride = count // wanted
    first = random.Random(f"{SEED} {' '.join(map(str, what))}").randrange(stride)
    yield from range(1 + first, count + 1, stride)


# --- counts --------------------------------------------------------------------------------------


class Counts:
    """Counts of one kind of sweep by way to save, printed at the end of the session.

    Args:
        name: name of the kind and of the JSON file.
        columns: names of all counts, in order.
    """

    of: ClassVar[dict[str, Counts]] = {}

    def __init__(self, name: str, *columns: str) -> None:
        self.name = name
        self.columns = columns
        self.rows: dict[str, dict[str, int]] = {}
        self.notes: list[str] = []
        Counts.of[name] = self

    def add(self, row: str, *columns: str) -> None:
        """Adds one to columns of a row."""
        of_row = self.rows.setdefault(row, dict.fromkeys(self.columns, 0))
        for column in columns:
            of_row[column] += 1

    def note(self, what: Any) -> None:
        """Adds a note to the JSON file: a point that ended badly."""
        self.notes.append(str(what))

    def lines(self) -> Iterator[str]:
        for row, columns in self.rows.items():
            counts = ", ".join(f"{count} {column}" for column, count in columns.items())
            yield f"{self.name}: {row}: {counts}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    counts = [of for of in Counts.of.values() if of.rows]
    if not counts:
        return
    terminalreporter.section("sweeps")
    for of in counts:
        for line in of.lines():
            terminalreporter.write_line(line)
    torture = "TORCH_CKPT_TORTURE=1 " if TORTURE else ""
    terminalreporter.write_line(f"replay with {torture}TORCH_CKPT_SEED={SEED}")
    directory = os.environ.get("TORCH_CKPT_RESULTS")
    if directory:
        os.makedirs(directory, exist_ok=True)
        for of in counts:
            contents = {"seed": SEED, "everything": TORTURE, "rows": of.rows, "notes": of.notes}
            (Path(directory) / f"{of.name}.json").write_text(json.dumps(contents, indent=1) + "\n")


# --- fixtures ------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def server(shim: Path) -> Iterator[Server]:
    """Server that forks the children of all sweeps."""
    started = Server(shim, [(work, (NEW, 4)) for work in SAVES.values()])
    yield started
    started.close()


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("sweeps"))
