"""Child processes that save, one for each rank, and that may lose their disk at any time."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import torch_ckpt
from tests.crash.disks import cut_power
from tests.ranks import Ranks
from tests.support import assert_equal, emptied, random_tensor
from torch_ckpt import WriteOptions
from torch_ckpt.steps import open_steps
from torch_ckpt.steps.root_lease import LEASE_NAME

StateDict = dict[str, Any]

TIMEOUT_SECONDS = 60


# --- states --------------------------------------------------------------------------------------


def part_of_state(step: int, rank: int) -> StateDict:
    """Returns the state of one rank. All tensors differ between steps.

    One of its files is large enough for direct I/O, and one is not. Steps with the same tens digit
    have files with the same layout; a longer history moves all later items.
    """
    large = random_tensor((300 * 1024,), torch.float32, 10 * step)
    return {
        "shared": large,
        "small": {f"{i}": torch.full((i + 1, 7), step + i, dtype=torch.int64) for i in range(12)},
        f"of rank {rank}": random_tensor((150 * 1024,), torch.int32, 10 * step + rank + 1),
        "history": [i / 7 for i in range(1 + step // 10 * 10)],
        "step": step,
    }


@functools.cache
def whole_state(step: int, ranks: int) -> StateDict:
    """Returns the state of all ranks. It is cached and must not be modified."""
    state: StateDict = {}
    for rank in range(ranks):
        state |= part_of_state(step, rank)
    return state


def tensors_of(state: StateDict) -> StateDict:
    """Converts a state to tensors, because safetensors files cannot hold other values."""
    return {
        "small": state["small"],
        **{key: value for key, value in state.items() if isinstance(value, torch.Tensor)},
        "history": torch.tensor(state["history"]),
        "step": torch.tensor(state["step"]),
    }


# --- ways to save --------------------------------------------------------------------------------


def _save(state: StateDict, path: Path, *, no_dist: bool = False, **options: Any) -> None:
    torch_ckpt.save(state, path, no_dist=no_dist, options=WriteOptions(**options))


def _dcp_save(state: StateDict, path: Path, **options: Any) -> None:
    dcp.save(state, storage_writer=torch_ckpt.FileSystemWriter(path, **options))


def _async_save(state: StateDict, path: Path, **options: Any) -> None:
    handle = torch_ckpt.async_save(state, path, options=WriteOptions(**options))
    handle.result(TIMEOUT_SECONDS)


def _dcp_async_save(state: StateDict, path: Path, **options: Any) -> None:
    _wait(dcp.async_save(state, storage_writer=torch_ckpt.FileSystemWriter(path, **options)))


def _stock_save(state: StateDict, path: Path, **options: Any) -> None:
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path, **options))


def _stock_async_save(state: StateDict, path: Path, **options: Any) -> None:
    writer = dcp.FileSystemWriter(path, **options)
    _wait(dcp.async_save(state, storage_writer=writer))


def _manager(root: Path, **options: Any) -> torch_ckpt.CheckpointManager:
    write = WriteOptions(**options)
    return torch_ckpt.CheckpointManager(root, keep=1, preemption=None, write=write)


def _managed_save(state: StateDict, root: Path, **options: Any) -> None:
    with _manager(root, **options) as manager:
        manager.save(state["step"], state)


def _managed_save_again(state: StateDict, root: Path, **options: Any) -> None:
    """Saves step 2 after training was rewound to step 1, which replaces an existing step 2."""
    with _manager(root, **options) as manager:
        nothing = emptied(state)
        if 1 in manager.all_steps():
            manager.restore(nothing, 1)
        else:
            manager.save(1, nothing)
            manager.wait_until_finished()
            manager.pin(1)
        manager.save(2, state)


def _save_safetensors(
    state: StateDict, path: Path, *, no_dist: bool = False, **options: Any
) -> None:
    write, tensors = WriteOptions(**options), tensors_of(state)
    torch_ckpt.save(tensors, path, format="safetensors", no_dist=no_dist, options=write)


def _publish(state: StateDict, root: Path, *, no_dist: bool = False, **options: Any) -> None:
    write, step = WriteOptions(**options), state["step"]
    torch_ckpt.publish(
        tensors_of(state), root, step, delta=True, keep=1, no_dist=no_dist, options=write
    )


def _wait(response: Any) -> None:
    response.result(TIMEOUT_SECONDS)


#: Functions that save, by name. Each returns once the save is reported as successful.
WAYS: dict[str, Callable[..., None]] = {
    "torch_ckpt.save": _save,
    "dcp.save": _dcp_save,
    "torch_ckpt.async_save": _async_save,
    "dcp.async_save": _dcp_async_save,
    "CheckpointManager": _managed_save,
    "CheckpointManager, one step": _managed_save_again,
    "safetensors": _save_safetensors,
    "publish": _publish,
    "stock dcp.save": _stock_save,
    "stock dcp.async_save": _stock_async_save,
}


def is_managed(way: str) -> bool:
    """Returns True if the path is a root of steps, of which the newest counts."""
    return way.startswith("CheckpointManager")


def is_model(way: str) -> bool:
    """Returns True if the way stores only tensors, in safetensors files."""
    return way in ("safetensors", "publish")


def commit_of(way: str, path: Path) -> re.Pattern[str]:
    """Returns the name in the rename by which a save commits."""
    if is_managed(way) or way == "publish":
        return re.compile(r"\d{10}")
    return re.compile(re.escape(path.name) if way == "safetensors" else r"\.metadata")


def engine_of(way: str) -> str:
    return "stock" if way.startswith("stock") else "torch_ckpt"


def save(way: str, step: int, path: Path, rank: int, **options: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # By default so small a save would write one file per rank.
        WAYS[way](part_of_state(step, rank), path, thread_count=2, **options)


def load_outcome(path: Path, engine: str, steps: list[int], ranks: int) -> str:
    """Loads a checkpoint and describes the result.

    Returns:
        ``step 7`` if exactly this step was loaded; ``nothing`` if no checkpoint was committed;
        ``mixture`` if the result is none of ``steps``; otherwise the error of the load.
    """
    has_only_tensors = (path / "torch_ckpt.checksums").exists()
    if not has_only_tensors and not (path / ".metadata").exists():
        return "nothing"
    states = {step: whole_state(step, ranks) for step in steps}
    if has_only_tensors:
        states = {step: tensors_of(state) for step, state in states.items()}
    # Steps differ in the shape of a tensor, but not in the names of objects.
    shapes = [emptied(state) for state in states.values()][: None if has_only_tensors else 1]
    outcome = ""
    for loaded in shapes:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if engine == "stock":
                    dcp.load(loaded, storage_reader=dcp.FileSystemReader(path), no_dist=True)
                else:
                    torch_ckpt.load(loaded, path, no_dist=True)
        except (Exception, dcp.CheckpointException) as error:
            outcome = _cannot_be_loaded(error)
            if "LoadMismatch" not in outcome:
                return outcome
        else:
            return _which(loaded, states)
    return outcome


def publication_outcome(root: Path, steps: list[int], ranks: int) -> str:
    """Loads the newest version and describes the result as :func:`load_outcome` does, with the
    outcome of ``latest`` if that is not a complete version."""
    versions = open_steps(root).entries(leftovers=False)
    if not versions:
        return "nothing"
    found = load_outcome(Path(versions[-1].path), "torch_ckpt", steps, ranks)
    if os.path.lexists(root / "latest"):
        latest = load_outcome(root / "latest", "torch_ckpt", steps, ranks)
        if not latest.startswith("step"):
            return f"{found}, and latest leads to {latest}"
    return found


def restore_outcome(root: Path, steps: list[int], ranks: int) -> str:
    """Restores the newest step and describes the result as :func:`load_outcome` does, with
    leftovers in the root."""
    state = emptied(whole_state(steps[0], ranks))
    try:
        with warnings.catch_warnings():
            # A manager that skips a damaged step only warns.
            warnings.simplefilter("error", UserWarning)
            with _manager(root) as manager:
                states = {step: whole_state(step, ranks) for step in steps}
                found = _which(state, states) if manager.restore(state) else "nothing"
    except (Exception, dcp.CheckpointException) as error:
        return _cannot_be_loaded(error)
    names = os.listdir(root) if root.exists() else []
    left = [name for name in names if not name.isdecimal() and not name.startswith(LEASE_NAME)]
    return f"{found}, and {sorted(left)}" if left else found


def _cannot_be_loaded(error: BaseException) -> str:
    if isinstance(error, dcp.CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return f"cannot be loaded: {type(error).__name__}"


def _which(loaded: StateDict, states: dict[int, StateDict]) -> str:
    for step, state in states.items():
        with contextlib.suppress(AssertionError):
            assert_equal(loaded, state)
            return f"step {step}"
    return "mixture"


# --- processes -----------------------------------------------------------------------------------


class Savers(Ranks):
    """The ranks of a group, which make several saves. Used by one thread."""

    def __init__(self, size: int) -> None:
        super().__init__(size, _work)

    @property
    def pids(self) -> list[int]:
        return [child.pid for child in self.children]

    @property
    def alive(self) -> bool:
        return all(child.alive for child in self.children)

    def do(
        self,
        work: Callable[..., None],
        *arguments: Any,
        marked: Callable[[str], None] | None = None,
    ) -> list[str]:
        """Runs ``work(rank, *arguments)`` on every rank.

        Args:
            work: a function that a new process can import.
            marked: called for each :func:`mark` of a rank; the rank waits until it returns.

        Returns:
            The error of each rank; empty if it succeeded.
        """
        self.begin(work, *arguments)
        return [self.end(rank, marked) for rank in range(self.size)]

    def begin(self, work: Callable[..., None], *arguments: Any) -> None:
        for rank in range(self.size):
            self.connection(rank).send((work, arguments))

    def end(self, rank: int, marked: Callable[[str], None] | None = None) -> str:
        while True:
            try:
                kind, text = self.children[rank].receive(TIMEOUT_SECONDS)
            except TimeoutError:
                raise AssertionError(f"rank {rank} hangs\n{self.said()}") from None
            except EOFError:
                return f"it {self.end_of(rank)}"
            if kind == "end":
                return text
            assert marked is not None, f"unexpected mark {text}"
            marked(text)
            self.connection(rank).send(None)

    def connection(self, rank: int) -> Connection:
        """Returns the connection of a rank, to wait for several at once; see :meth:`end`."""
        return self.children[rank].connection


@contextmanager
def savers(size: int = 1) -> Iterator[Savers]:
    group = Savers(size)
    try:
        yield group
    finally:
        group.kill()


_to_parent: Connection | None = None


def mark(name: str) -> None:
    """Reports from a rank to the test that it has reached a point, and waits for the answer."""
    assert _to_parent is not None
    _to_parent.send(("mark", name))
    _to_parent.recv()


def _work(connection: Connection) -> None:
    global _to_parent
    _to_parent = connection
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")
    while True:
        try:
            work, arguments = connection.recv()
        except EOFError:
            return
        try:
            work(rank, *arguments)
            outcome = ""
        except BaseException as error:
            outcome = f"{type(error).__name__}: {error}"
        if outcome:
            # Frames of the error hold the directory open and are in reference cycles.
            gc.collect()
        connection.send(("end", outcome))


# --- work of the ranks ---------------------------------------------------------------------------


def save_only(rank: int, way: str, step: int, path: Path, options: dict[str, Any]) -> None:
    save(way, step, path, rank, **options)


def save_and_cut(
    rank: int, way: str, step: int, path: Path, options: dict[str, Any], point: Path
) -> None:
    """Cuts the power in the process whose save has returned, so that nothing happens in between."""
    save(way, step, path, rank, **options)
    cut_power(point)
