"""The writer in Megatron's shape: its save is a function that somebody else runs, anywhere.

1. ``prepare_write_data`` finds this rank's values and puts them into a :class:`WriteTask`, which
   can be pickled.
2. The preload function stages the task: the engine starts to copy and to write, on its own threads,
   in the process that calls it, and the function returns when no source is needed any more.
3. The save function waits for the engine's end and puts what was written, or why it was not, into
   the queue that it is given; exactly one item. It raises nothing: that would end the workers of
   others.
4. ``retrieve_write_results`` takes it from there, in the process of the writer.
"""

from __future__ import annotations

import os
import pickle
import queue
import re
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import WRAPPED_EXCEPTION
from torch.distributed.checkpoint.filesystem import _StorageWriterTransforms
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from torch_ckpt import _core
from torch_ckpt._base.cycle_collector import RelaxedGc, no_gc
from torch_ckpt._base.live_objects import LiveObjects
from torch_ckpt._base.log import LOGGER
from torch_ckpt._base.options import require_choice
from torch_ckpt.checkpoint.directory import Place
from torch_ckpt.checkpoint.index import METADATA_NAME
from torch_ckpt.checkpoint.lease import DirectoryLease
from torch_ckpt.checkpoint.metadata import DCP_VERSION
from torch_ckpt.errors import CheckpointError
from torch_ckpt.megatron.results_queue import ResultsQueue
from torch_ckpt.megatron.structures import named_plan
from torch_ckpt.megatron.torch_write import Results, whole
from torch_ckpt.megatron.write_task import WriteTask, portable
from torch_ckpt.ranks.meeting import TIMEOUT_SECONDS, is_distributed, own_rank
from torch_ckpt.ranks.outcomes import attempt
from torch_ckpt.saving.items import keeps_default_lookup, resolve
from torch_ckpt.saving.rank_write import WriteOptions
from torch_ckpt.saving.writer import FileSystemWriter, completed

Staged = WriteTask | Sequence[WriteTask]  # an empty one is nothing to write

#: What all versions of their function take in this order, the last of all.
_MULTIPROC_ARGUMENTS = ("rank", "write_buckets", "global_results_queue")


class FileSystemWriterAsync(FileSystemWriter):
    """Writes distributed checkpoints in two parts: a plan here, a function that runs anywhere.

    Takes what Megatron-core's class of this name takes, and all of :class:`FileSystemWriter`. One
    object for each save; with ``dcp.save`` it is a ``FileSystemWriter``.

    Args:
        path: directory of the checkpoint.
        separation_hint: items whose fully qualified name begins with it go into files of their own,
            whose names begin with it. Needs ``thread_count >= 2``; each side has half of them.
        use_msc: write through the package ``multistorageclient``; ``path`` is what that takes.
        open_file: called with a path and ``"wb"`` instead of ``open``. With another function
            than that, with ``use_msc`` and with ``_extensions`` the files are written by torch's
            own code, in Python threads.
        on_failure: ``"return"`` makes ``retrieve_write_results`` return a wrapped exception, which
            reaches every rank with the results; ``"raise"`` makes it raise.
        timeout: in seconds: a rank that the others wait for when a save is planned or finalized,
            and that gives no sign of life for so long, is given up on all ranks.

    Attributes:
        checkpoint_dir: ``path`` as it was given.
        results_queue: where the save function is to put what it has written; None where there is
            nothing to write.
        has_data_to_write: whether this rank has anything to write.
    """

    can_run_decentralized_global_plan = True

    # Of this process, as long as somebody has them.
    _made: ClassVar[LiveObjects[FileSystemWriterAsync]] = LiveObjects()
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(
        self,
        path: str | os.PathLike[str],
        *args: Any,
        separation_hint: str | None = None,
        use_msc: bool = False,
        open_file: Callable[..., Any] = open,
        on_failure: str = "return",
        timeout: float = TIMEOUT_SECONDS,
        **kwargs: Any,
    ) -> None:
        require_choice("on_failure", on_failure, ("return", "raise"))
        super().__init__(path, *args, separation_hint=separation_hint, **kwargs)
        if self.serialization_format.name != "TORCH_SAVE":
            raise ValueError(
                f"asynchronous saves are of torch's format, not of {self.serialization_format}"
            )
        self.checkpoint_dir = path
        self.use_msc = use_msc
        self.open_file = _msc().open if use_msc else open_file
        self.on_failure = on_failure
        self.timeout = timeout
        self.results_queue: ResultsQueue | None = None
        self.prefix = ""
        self._given_tag = ""
        self._task: WriteTask | None = None
        self._part: DirectoryLease | None = None
        self._failure: Exception | None = None

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_part": None}

    # --- in the order of a save ------------------------------------------------------------------

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        # Megatron's plan gives only the bool. The save before may be under way then, and commits
        # first; with dcp.save it has failed.
        self.ends_earlier_leases = self.rank is not None
        if self.rank is None:
            self.rank = own_rank()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        super().reset(checkpoint_id)
        if checkpoint_id:
            self.checkpoint_dir = checkpoint_id

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self._task = self.results_queue = self._failure = None
        if self.use_msc:
            _msc().os.makedirs(str(self.checkpoint_dir), exist_ok=True)
            return plan
        return super().prepare_local_plan(plan)

    def prepare_decentralized_global_plan(self, local_plan: SavePlan) -> SavePlan:
        """The plan with this rank's file names, which no other rank has; no collective."""
        return named_plan(local_plan, own_rank())

    def use_tag(self, tag: str) -> None:
        """What the coordinator's lease puts into the names of all ranks' files, if anything."""
        self._given_tag = tag

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Finds the values of a plan; nothing is copied yet.

        Args:
            plan: with the prefix of this rank's file names.
            planner: has the state dict.

        Raises:
            CheckpointError: the planner resolved an item to what cannot be written.
        """
        RelaxedGc.end()
        items = list(plan.items)
        self._take_part()
        with self._lock:
            self.prefix = self._own_prefix(plan.storage_data.prefix)
            self._made.add(self)
        with no_gc():
            direct = keeps_default_lookup(planner)
            if self.engine_can_write():
                values = [resolve(planner, item, direct, whole=whole) for item in items]
            else:
                values = [whole(planner.resolve_data(item)) for item in items]
        self._task = WriteTask(
            directory=str(self.checkpoint_dir if self.use_msc else self.path),
            prefix=self.prefix,
            items=items,
            values=values,
            rank=own_rank(),
            ranks=dist.get_world_size() if is_distributed() else 1,
            by_engine=self.engine_can_write(),
            options=WriteOptions.of(self),
            background=self.background,
            open_file=self.open_file,
            place=Place.of(self.directory) if self._is_local() else None,
            opened=self.directory if self._is_local() else None,
            leases=[weakref.ref(lease) for lease in (self._lease, self._part) if lease is not None],
        )
        self.results_queue = ResultsQueue() if items else None

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        if self.engine_can_write():
            return super().write_data(plan, planner)
        self.prepare_write_data(plan, planner)
        assert self._task is not None
        outcome = self._task.stage().outcome(self.transforms)
        self._made.discard(self)
        if isinstance(outcome, Exception):
            raise outcome
        return completed([result for of_file in outcome.values() for result in of_file])

    def abandon(self) -> None:
        super().abandon()
        # Whichever rank is the last to end removes the files of all.
        self._part = None
        if self._task is not None:
            self._task.opened = None

    def fail(self, error: BaseException) -> None:
        """Makes the save one that has failed on this rank, which the others learn at its end."""
        RelaxedGc.end()
        # Not by a queue: perhaps that one could not be made is what has failed.
        self._task = self.results_queue = None
        self._failure = portable(error)

    def get_save_function_and_args(
        self,
    ) -> tuple[Callable[..., None] | None, Callable[[], Staged] | None, list[Any]]:
        """What is to run elsewhere.

        Returns:
            The save function, the preload function and the save function's last arguments, of which
            the second is to be replaced by what the preload function returns. All can be pickled.
            ``(None, None, [])`` where this rank has nothing to write.
        """
        task = self._task
        if task is None or not task.items:
            return None, None, []
        return (
            self._save_function(),
            partial(type(self).preload_tensors, task, True),
            [task.rank, task, self.results_queue],
        )

    @staticmethod
    def preload_tensors(write_buckets: Staged, non_blocking: bool = True) -> Staged:
        """Stages a task: returns when its sources may change. Its files are being written by then.

        Args:
            write_buckets: the task that ``get_save_function_and_args`` gives, or ``write_buckets``.
            non_blocking: accepted as Megatron's; copies from devices always run on a side stream.

        Returns:
            What the save function takes. Of a task that was staged before it is the same.

        Raises:
            ValueError: several tasks.
        """
        if isinstance(write_buckets, WriteTask):
            return write_buckets.stage()
        if not write_buckets:
            return write_buckets
        if len(write_buckets) > 1:
            raise ValueError(
                "write_buckets of one writer are one task, which is staged as a whole; got "
                f"{len(write_buckets)}"
            )
        return write_buckets[0].stage()

    @staticmethod
    def write_preloaded_data_multithread(
        transform_list: list[_StorageWriterTransforms],
        use_msc: bool,
        rank: int,
        staged: Staged,
        results_queue: Any,
    ) -> None:
        """Waits for the end of a staged task and puts its outcome, one item; raises nothing.

        Args:
            transform_list: torch's stream transforms.
            use_msc: unused; the task knows.
            rank: of the writer.
            staged: what the preload function returned; a task that is not staged is staged here.
            results_queue: gets the results by file number, or an exception.
        """
        if isinstance(results_queue, ResultsQueue):
            # Where that cannot be sent, neither can the outcome, which is told below.
            with suppress(OSError, CheckpointError):
                results_queue.begin(f"the files of rank {rank}")
        outcome = _outcome_of(staged, transform_list)
        try:
            results_queue.put(outcome)
        except Exception as error:
            # Who asks for the results finds none, and says so.
            LOGGER.error("rank %d: the results of a save could not be sent: %s", rank, error)

    @staticmethod
    def write_preloaded_data_multiproc(
        transform_list: list[_StorageWriterTransforms], *arguments: Any, **named: Any
    ) -> None:
        """As :meth:`write_preloaded_data_multithread`, by the name and in the shapes of others.

        Args:
            transform_list: torch's stream transforms.
            arguments: ``rank``, ``write_buckets`` and ``global_results_queue``; before them
                ``use_msc``, and ``open_file`` before ``rank``, where a version has them.
            named: the same by name.
        """
        last = [named[name] for name in _MULTIPROC_ARGUMENTS if name in named]
        rank, staged, results_queue = [*arguments, *last][-len(_MULTIPROC_ARGUMENTS) :]
        FileSystemWriterAsync.write_preloaded_data_multithread(
            transform_list, False, rank, staged, results_queue
        )

    @staticmethod
    def write_preloaded_data(
        transform_list: list[_StorageWriterTransforms],
        local_proc_idx: int,
        write_bucket: WriteTask,
        results_queue: Any,
        count_queue: Any,
        use_fsync: bool = True,
        **others: Any,
    ) -> None:
        """Waits for the end of one of what was staged, and tells of it; raises nothing of its own.

        Args:
            transform_list: torch's stream transforms.
            local_proc_idx: the number of the bucket.
            write_bucket: one of ``write_buckets``, or of what the preload function returned.
            results_queue: gets the number, and the list of results or an exception.
            count_queue: one is taken of it and marked as done afterwards.
            use_fsync: accepted as Megatron's; the task knows.
            others: accepted, as ``use_msc``.
        """
        outcome = _outcome_of(write_bucket, transform_list)
        if isinstance(outcome, Exception):
            results_queue.put((local_proc_idx, outcome))
        else:
            results_queue.put((local_proc_idx, [r for of in outcome.values() for r in of]))
        count_queue.get()
        count_queue.task_done()

    def retrieve_write_results(self) -> list[WriteResult] | WRAPPED_EXCEPTION:
        """What the save function has put: results, by file.

        Raises (or returns, wrapped; see ``on_failure``):
            RuntimeError: the save function failed, with its cause; or it has put nothing, or not
                the results of all items.
        """
        if self.on_failure == "raise":
            return self._results_of_worker()
        # A failure is then just what torch calls a wrapped exception.
        results: list[WriteResult] | WRAPPED_EXCEPTION = attempt(self._results_of_worker)
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        if not self.use_msc:
            self._require_files(results)
            super().finish(metadata, results)
            return
        metadata.version = DCP_VERSION
        metadata.storage_data = {r.index: r.storage_data for of_rank in results for r in of_rank}
        metadata.storage_meta = self.storage_meta()
        with self.open_file(os.path.join(str(self.checkpoint_dir), METADATA_NAME), "wb") as stream:
            pickle.dump(metadata, stream)

    # --- more of torch's contract ----------------------------------------------------------------

    @property
    def checkpoint_id(self) -> str:
        """The directory."""
        return str(self.checkpoint_dir if self.use_msc else self.path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return str(checkpoint_id).startswith("msc://") or bool(
            super().validate_checkpoint_id(checkpoint_id)
        )

    def engine_can_write(self) -> bool:
        return self.open_file is open and super().engine_can_write()

    @property
    def has_data_to_write(self) -> bool:
        """Whether this rank writes anything in the save that is planned."""
        return self._task is not None and bool(self._task.items)

    @property
    def write_buckets(self) -> list[WriteTask] | None:
        """What the preload function takes, in a list; None before ``prepare_write_data``."""
        if self._task is None:
            return None
        return [self._task] if self._task.items else []

    # --- private ---------------------------------------------------------------------------------

    def _save_function(self) -> Callable[..., None]:
        return partial(type(self).write_preloaded_data_multithread, [self.transforms], self.use_msc)

    def _is_local(self) -> bool:
        return not self.use_msc and super()._is_local()

    def _take_part(self) -> None:
        """Keeps others from removing this rank's files before the coordinator commits.

        A cached plan is written without the coordinator, which then has perhaps no lease yet, or
        gives up the one of the save before.

        Raises:
            CheckpointError: another process does not end to remove files there.
        """
        if self._is_local() and self._lease is None and self._part is None:
            self._part = DirectoryLease(self.directory, None, ends_earlier=False)

    def _hand_over(self) -> None:
        """The coordinator protects this rank's files from here on."""
        part, self._part = self._part, None
        if part is not None:
            part.hand_over()

    def _require_files(self, results: list[list[WriteResult]]) -> None:
        """Raises where a file is not there that the metadata would name: somebody removed it."""
        ends: dict[str, int] = {}
        for of_rank in results:
            for result in of_rank:
                info = result.storage_data
                end = info.offset + info.length
                ends[info.relative_path] = max(end, ends.get(info.relative_path, 0))
        for name, end in ends.items():
            path = os.path.join(self.path, name)
            try:
                size = self.directory.length_of(name)
            except FileNotFoundError:
                size = 0
            if size < end:
                raise CheckpointError(
                    f"{path} should have {end} bytes, and has {size}: somebody has removed or "
                    "changed it since it was written, so nothing is committed"
                )

    def _own_prefix(self, prefix: str) -> str:
        if self.use_msc:
            return prefix
        if re.fullmatch(r"__\d+_", prefix):
            prefix += self._given_tag
        # Those of saves that have not made a file yet.
        here = os.path.realpath(self.path)
        others = {
            writer.prefix
            for writer in self._made
            if writer is not self and os.path.realpath(writer.path) == here
        }
        return _core.choose_prefix(self.directory, prefix, others)

    def _results_of_worker(self) -> list[WriteResult]:
        where = f"rank {own_rank()}, files {self.prefix}* in {self.checkpoint_id}"
        if self._failure is not None:
            raise RuntimeError(f"Worker failure: {self._failure} ({where})") from self._failure
        if self.results_queue is None:
            self._hand_over()
            return []
        task = self._task
        try:
            outcome = self.results_queue.get_nowait()
        except queue.Empty:
            if task is None or not task.is_cancelled:
                raise RuntimeError(
                    f"results_queue should not be empty: {where}: the worker has ended without a "
                    "word, or has not begun; look whether it was killed"
                ) from None
            outcome = None
        if task is not None:
            outcome = task.take(outcome)
        # Whatever it has written is there by now, or has gone.
        self._made.discard(self)
        if isinstance(outcome, BaseException):
            raise RuntimeError(f"Worker failure: {outcome} ({where})") from outcome
        results = [result for of_file in outcome.values() for result in of_file]
        self._hand_over()
        expected = len(task.items) if task is not None else 0
        if len(results) != expected:
            raise RuntimeError(
                f"Incomplete worker results (expected {expected}, got {len(results)}): {where}; "
                "this probably means that the worker has failed"
            )
        return results


def _outcome_of(
    staged: Staged, transform_list: list[_StorageWriterTransforms]
) -> Results | Exception:
    """Waits for the end of what is staged, or stages it; never raises."""
    try:
        task = FileSystemWriterAsync.preload_tensors(staged)
        if not isinstance(task, WriteTask):
            return {}
        return task.outcome(transform_list[0] if transform_list else None)
    except Exception as error:
        return portable(error)


def _msc() -> Any:
    try:
        import multistorageclient  # type: ignore[import-not-found]
    except ImportError as error:
        raise CheckpointError(
            "use_msc=True needs the package multi-storage-client, which is not installed"
        ) from error
    return multistorageclient
