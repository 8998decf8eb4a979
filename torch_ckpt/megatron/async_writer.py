"""Storage writer with the interface that Megatron expects.

Megatron turns a save into functions that its async queue calls, possibly in another process.

1. ``prepare_write_data`` looks up this rank's values and creates a :class:`WriteTask`, which can be
   pickled.
2. The preload function stages the task: engine threads in the calling process copy the sources and
   write them. The function returns once all sources are copied.
3. The save function waits for the engine and puts exactly one item into the queue that it was
   given: the results or an error. It never raises, because an exception would kill Megatron's
   workers.
4. ``retrieve_write_results`` takes this item, in the writer's process.
"""

from __future__ import annotations

import dataclasses
import os
import queue
import re
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import WRAPPED_EXCEPTION
from torch.distributed.checkpoint.filesystem import _StoragePrefix, _StorageWriterTransforms
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from torch_ckpt import _core
from torch_ckpt._base.checks import require_choice
from torch_ckpt._base.cycle_collector import RelaxedGc, no_gc
from torch_ckpt._base.life_cycle import LiveObjects
from torch_ckpt._base.log import LOGGER
from torch_ckpt.checkpoint.directory import DirectoryIdentity
from torch_ckpt.checkpoint.file_system import WriterArguments
from torch_ckpt.checkpoint.lease import remove_own
from torch_ckpt.checkpoint.metadata import stored_properties
from torch_ckpt.errors import CheckpointError, NotCommitted
from torch_ckpt.megatron.results_queue import ResultsQueue
from torch_ckpt.megatron.write_task import Results, WriteTask, make_portable
from torch_ckpt.ranks.failures import capture_exceptions
from torch_ckpt.ranks.group import TIMEOUT_SECONDS, is_distributed, own_rank
from torch_ckpt.saving.items import keeps_default_lookup, resolve
from torch_ckpt.saving.object_target import ObjectTarget
from torch_ckpt.saving.target import DirectoryTarget
from torch_ckpt.saving.writer import FileSystemWriter

if TYPE_CHECKING:
    from typing_extensions import Unpack  # in typing since Python 3.11

# Megatron expects a list of buckets. This one has one task, or none if there is nothing to write.
Buckets = list[WriteTask]

#: Names of the last three arguments of ``write_preloaded_data_multithread``, in any version.
_LAST_ARGUMENTS = ("rank", "staged", "write_buckets", "results_queue", "global_results_queue")


class _Original:
    """Base that returns an object of the original class for arguments that the engine cannot honor,
    while :func:`install` has replaced that class.

    ``__new__`` must not be in the writer's class: ``inspect.signature``, from which Megatron reads
    the options, prefers it to ``__init__``.
    """

    #: Returns the original class; None if it is not replaced.
    original: ClassVar[Callable[[], type[Any]] | None] = None
    #: Qualified name of the original class.
    original_name: ClassVar[str] = (
        "megatron.core.dist_checkpointing.strategies.filesystem_async.FileSystemWriterAsync"
    )

    def __new__(cls, *args: object, **kwargs: object) -> Any:
        opens = kwargs.get("open_file", open) is not open
        if cls.original is not None and (
            opens or kwargs.get("use_msc") or kwargs.get("_extensions")
        ):
            return cls.original()(*args, **kwargs)
        return super().__new__(cls)


class FileSystemWriterAsync(_Original, FileSystemWriter):
    """Writes distributed checkpoints in two stages: the save is planned first, and a function
    writes the files later.

    Accepts the arguments of Megatron-core's ``FileSystemWriterAsync`` and of
    :class:`FileSystemWriter`. Create one object for each save. In ``dcp.save``, the writer works
    like a ``FileSystemWriter``.

    Args:
        path: directory or URL of the checkpoint.
        separation_hint: prefix of fully qualified names. Items whose names begin with this prefix
            are written to separate files. The names of these files also begin with the prefix.
            Requires a ``thread_count`` of at least 2; each of the two groups of files gets half of
            the threads.
        use_msc, open_file: arguments of the original class. If :func:`install` has replaced that
            class, and ``use_msc``, another function than ``open`` or ``_extensions`` is passed, the
            constructor returns an object of the original class, because the engine cannot write
            such files.
        on_failure: ``"return"`` makes ``retrieve_write_results`` return a wrapped exception, which
            Megatron gathers on all ranks; ``"raise"`` makes the method raise the error.
        timeout: seconds without a heartbeat after which a rank is declared dead. Applies while
            other ranks wait for that rank to plan or finalize a save.
        kwargs: passed to :class:`FileSystemWriter`, such as ``thread_count``.

    Attributes:
        results_queue: queue for the save function; None if this rank has nothing to write.
        write_buckets: list that contains the task for the preload function; empty if this rank has
            nothing to write. None before ``prepare_write_data`` has been called.

    Raises:
        ValueError: an option has an invalid value, or only the original class can write.

    Examples:
        ```python
        writer = torch_ckpt.megatron.FileSystemWriterAsync("checkpoints/100", thread_count=2)
        finalizing, *_ = save_state_dict_async_plan(state, writer)
        save_fn, preload_fn, args = writer.get_save_function_and_args()
        ```
    """

    can_run_decentralized_global_plan = True
    # Megatron compares each plan with the plan of the previous save, which had another directory.
    sends_identity = False
    use_msc = False

    # The writers of this process whose files may not exist yet.
    _planned: ClassVar[LiveObjects[FileSystemWriterAsync]] = LiveObjects()
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
        **kwargs: Unpack[WriterArguments],
    ) -> None:
        require_choice("on_failure", on_failure, ("return", "raise"))
        super().__init__(path, *args, separation_hint=separation_hint, **kwargs)
        if use_msc or open_file is not open or self.transforms.extensions:
            raise ValueError(
                "the engine cannot write through use_msc=True, open_file= or _extensions=; use "
                f"{self.original_name}"
            )
        if self.serialization_format.name != "TORCH_SAVE":
            raise ValueError(
                f"FileSystemWriterAsync cannot write {self.serialization_format}; pass "
                "serialization_format=SerializationFormat.TORCH_SAVE"
            )
        self.on_failure = on_failure
        self.timeout = timeout
        self.results_queue: ResultsQueue | None = None
        self.prefix = ""
        #: Text after the rank in this save's file names, as chosen by the coordinator's target.
        self.tag_of_save = ""
        self.write_buckets: Buckets | None = None
        self._failure: Exception | None = None

    # --- in the order of a save ------------------------------------------------------------------

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        # Megatron passes only the bool, and its previous save may still be in progress. In
        # dcp.save, a previous save that still has a lease has failed.
        self.ends_earlier_leases = self.rank is not None
        if self.rank is None:
            self.rank = own_rank()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self.write_buckets = self.results_queue = self._failure = None
        self.tag_of_save = ""
        return super().prepare_local_plan(plan)

    def prepare_decentralized_global_plan(self, local_plan: SavePlan) -> SavePlan:
        """Returns the plan with this rank's own file names, without communicating with other
        ranks."""
        return with_file_prefix(local_plan, own_rank())

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Looks up the values of a plan, but does not copy them yet.

        Args:
            plan: the central plan, with the prefix of this rank's file names.
            planner: planner of the state dict.

        Raises:
            CheckpointError: the planner resolved an item to a value that cannot be written, or
                another process holds the directory lock while it removes files.
        """
        RelaxedGc.end()
        items = list(plan.items)
        target = self.target
        if isinstance(target, DirectoryTarget) and target.lease is None:
            # Protects this rank's files from removal until the coordinator commits. With a cached
            # plan, the coordinator may have no lease yet.
            target.take_lease(ends_earlier=False)
        with self._lock:
            self.prefix = self._choose_prefix(plan.storage_data.prefix)
            self._planned.add(self)
        with no_gc():
            direct = keeps_default_lookup(planner)
            values = [resolve(planner, item, direct, whole=_dequantize) for item in items]
        task = WriteTask(
            directory=str(self.path),
            prefix=self.prefix,
            items=items,
            values=values,
            rank=own_rank(),
            ranks=dist.get_world_size() if is_distributed() else 1,
            options=self.write_options(),
            directory_identity=DirectoryIdentity.of(target.directory),
            opened=target.directory,
            lease=weakref.ref(self.lease) if self.lease is not None else None,
        )
        self.write_buckets = [task] if items else []
        self.results_queue = ResultsQueue() if items else None

    def abandon(self) -> None:
        super().abandon()
        for task in self.write_buckets or ():
            task.opened = None

    def fail(self, error: BaseException) -> None:
        """Marks the save as failed on this rank. The other ranks receive the error when the save is
        finalized."""
        RelaxedGc.end()
        # Do not use a queue, because creating the queue may be what failed.
        self.write_buckets = self.results_queue = None
        self._failure = make_portable(error)

    def get_save_function_and_args(
        self,
    ) -> tuple[Callable[..., None] | None, Callable[[], Buckets] | None, list[Any]]:
        """Returns the functions of the planned save, for an asynchronous queue.

        Returns:
            A tuple (save function, preload function, arguments). Call the preload function, replace
            the second argument with the result, then call ``save_function(*arguments)``. The
            functions and the arguments are picklable. If this rank has nothing to write, the tuple
            is ``(None, None, [])``.
        """
        if not self.write_buckets:
            return None, None, []
        return (
            partial(self.write_preloaded_data_multithread, [self.transforms], self.use_msc),
            partial(self.preload_tensors, self.write_buckets, True),
            [own_rank(), self.write_buckets, self.results_queue],
        )

    @staticmethod
    def preload_tensors(write_buckets: Buckets, non_blocking: bool = True) -> Buckets:
        """Stages a task and starts writing the task's files. Returns as soon as the tensors being
        saved can safely be modified.

        Does nothing if the task is already staged.

        Args:
            write_buckets: the second of the arguments returned by ``get_save_function_and_args``,
                or the writer's attribute ``write_buckets``.
            non_blocking: accepted for compatibility with Megatron, but ignored; copies from devices
                use a side stream.

        Returns:
            The second argument of the save function.

        Raises:
            ValueError: ``write_buckets`` contains more than one task.
        """
        if len(write_buckets) > 1:
            raise ValueError(
                f"cannot stage {len(write_buckets)} write tasks at once; pass the write_buckets "
                "of a single writer, which contain one task"
            )
        return [task.stage() for task in write_buckets]

    @staticmethod
    def write_preloaded_data_multithread(
        transform_list: list[_StorageWriterTransforms], *arguments: Any, **named: object
    ) -> None:
        """Waits until a staged task has ended, and puts the task's outcome into a queue. Never
        raises. The queue receives one item: either a dict of results by file number, or an
        exception.

        Args:
            transform_list: ignored, like ``use_msc`` and ``open_file``, because the engine uses
                none of them.
            arguments: ``use_msc`` and ``open_file``, if the version of the replaced package has
                these arguments; then ``rank``, the result of the preload function, and the queue.
                A task that has not been staged yet is staged first.
            named: any of these arguments, passed by name.
        """
        last: list[Any] = [named[name] for name in _LAST_ARGUMENTS if name in named]
        rank, staged, results_queue = [*arguments, *last][-3:]
        if isinstance(results_queue, ResultsQueue):
            # If this fails, put() fails, too, and the error is logged below.
            with suppress(OSError, CheckpointError):
                results_queue.begin(f"the files of rank {rank}")
        outcome = _outcome_of(staged)
        try:
            results_queue.put(outcome)
        except Exception as error:
            # retrieve_write_results() will find no results and raise.
            LOGGER.error(
                "rank %d: the save fails, because its results could not be sent: %s", rank, error
            )

    #: nvidia-resiliency-ext calls this function to write with processes instead of threads.
    write_preloaded_data_multiproc = write_preloaded_data_multithread

    @staticmethod
    def write_preloaded_data(
        transform_list: list[_StorageWriterTransforms],
        local_proc_idx: int,
        write_bucket: WriteTask,
        results_queue: Any,
        count_queue: Any,
        use_fsync: bool = True,
        **others: object,
    ) -> None:
        """Waits until one staged task has ended, and puts the task's results or error into a queue.

        Args:
            transform_list: ignored, because the engine uses none.
            local_proc_idx: number of the bucket.
            write_bucket: an element of ``write_buckets``, or of the preload function's result.
            results_queue: queue that receives one tuple: the bucket's number, followed by either
                the list of results or an exception.
            count_queue: queue from which one item is taken and then marked as done.
            use_fsync: accepted for compatibility with Megatron, but ignored; the task already
                stores this option.
            others: other arguments, such as ``use_msc``; ignored.
        """
        outcome = _outcome_of([write_bucket])
        if isinstance(outcome, dict):
            results_queue.put((local_proc_idx, list(chain.from_iterable(outcome.values()))))
        else:
            results_queue.put((local_proc_idx, outcome))
        count_queue.get()
        count_queue.task_done()

    def retrieve_write_results(self) -> list[WriteResult] | WRAPPED_EXCEPTION:
        """Takes the results of the save function from the results queue.

        Returns:
            The results of all items, or a wrapped exception if the save failed and ``on_failure``
            is "return".

        Raises:
            RuntimeError: the save function failed, reported nothing, or did not report all items.
                If the function failed, its error is the cause. Raised only if ``on_failure`` is
                "raise".
        """
        if self.on_failure == "raise":
            return self._receive_results()
        results: list[WriteResult] | WRAPPED_EXCEPTION = capture_exceptions(self._receive_results)
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        target = self.target
        if isinstance(target, DirectoryTarget):
            self._require_files(target, results)
            super().finish(metadata, results)
            return
        # The store has confirmed each object.
        folder = target.directory
        try:
            super().finish(metadata, results)
        except NotCommitted:
            # With a cached plan, each rank has a tag of its own, and the target deletes only the
            # coordinator's objects.
            folder.remove(_files_of(chain.from_iterable(results)))
            raise

    def remove_written(self, results: list[WriteResult]) -> None:
        """Deletes the files that this rank has written, after another rank has failed."""
        target = self.target
        if isinstance(target, ObjectTarget):
            target.directory.remove(_files_of(results))
        else:
            remove_own(target.directory, _files_of(results))

    # --- other methods of torch's interface ------------------------------------------------------

    @property
    def checkpoint_dir(self) -> str | os.PathLike[str]:
        """The path or URL that was passed to the writer."""
        return self._given_path

    @property
    def checkpoint_id(self) -> str:
        """The checkpoint directory or URL."""
        return str(self.path)

    @property
    def has_data_to_write(self) -> bool:
        """True if this rank has something to write in the planned save."""
        return bool(self.write_buckets)

    # --- private ---------------------------------------------------------------------------------

    def _hand_over(self) -> None:
        """Makes the coordinator responsible for this rank's files: the end of this rank's save no
        longer deletes them, and the coordinator's lease protects them."""
        target = self._target
        if self._commits or target is None:
            return
        if isinstance(target, ObjectTarget):
            target.keep_all()
        elif target.lease is not None:
            target.lease.hand_over()
            target.lease = None

    def _require_files(self, target: DirectoryTarget, results: list[list[WriteResult]]) -> None:
        """Raises an error if a file that the metadata would refer to is missing or too short."""
        ends: dict[str, int] = {}
        for result in chain.from_iterable(results):
            info = result.storage_data
            end = info.offset + info.length
            ends[info.relative_path] = max(end, ends.get(info.relative_path, 0))
        for name, end in ends.items():
            path = os.path.join(self.path, name)
            try:
                size = target.directory.length_of(name)
            except FileNotFoundError:
                size = 0
            if size < end:
                raise CheckpointError(
                    f"{path} should have at least {end} bytes, but has {size}: another program "
                    "removed or changed it after it was written. Nothing was committed; save again"
                )

    def _choose_prefix(self, prefix: str) -> str:
        target = self.target
        if isinstance(target, ObjectTarget):
            # A cached plan may have the tag of another save.
            rank = re.match(r"__\d+_", prefix)
            return (rank[0] if rank else prefix) + (self.tag_of_save or target.tag)
        if re.fullmatch(r"__\d+_", prefix):
            prefix += self.tag_of_save
        # Prefixes of other saves that have not created their files yet.
        directory = os.path.realpath(self.path)
        others = {
            writer.prefix
            for writer in self._planned
            if writer is not self and os.path.realpath(writer.path) == directory
        }
        return _core.choose_prefix(target.directory, prefix, others)

    def _receive_results(self) -> list[WriteResult]:
        where = f"rank {own_rank()}, files {self.prefix}* in {self.checkpoint_id}"
        if self._failure is not None:
            raise RuntimeError(f"Worker failure: {self._failure} ({where})") from self._failure
        if self.results_queue is None:
            self._hand_over()
            return []
        assert self.write_buckets is not None
        (task,) = self.write_buckets
        try:
            outcome = self.results_queue.get_nowait()
        except queue.Empty:
            if not task.is_cancelled:
                raise RuntimeError(
                    f"results_queue should not be empty: {where}: the worker exited without "
                    "reporting a result, or never started; check whether it was killed"
                ) from None
            outcome = None
        outcome = task.claim(outcome)
        # The files exist by now, or were deleted.
        self._planned.discard(self)
        if isinstance(outcome, BaseException):
            raise RuntimeError(f"Worker failure: {outcome} ({where})") from outcome
        results = list(chain.from_iterable(outcome.values()))
        expected = len(task.items)
        if len(results) != expected:
            raise RuntimeError(
                f"Incomplete worker results (expected {expected}, got {len(results)}): {where}; "
                "check the worker's log and save again"
            )
        self._hand_over()
        return results


def _files_of(results: Iterable[WriteResult]) -> set[str]:
    return {result.storage_data.relative_path for result in results}


def _outcome_of(buckets: Buckets) -> Results | Exception:
    """Waits until a task has ended, staging it first if necessary. Returns an error instead of
    raising it."""
    try:
        staged = FileSystemWriterAsync.preload_tensors(buckets)
        return staged[0].outcome() if staged else {}
    except Exception as error:
        return make_portable(error)


def _dequantize(value: Any) -> Any:
    """Dequantizes a tensor whose class has its own ``dequantize``, which torch's format cannot
    store.

    Returns any other value unchanged.
    """
    kind = type(value)
    if isinstance(value, torch.Tensor) and kind.dequantize is not torch.Tensor.dequantize:
        return value.dequantize()
    return value


def with_file_prefix(plan: SavePlan, rank: int) -> SavePlan:
    return dataclasses.replace(plan, storage_data=_StoragePrefix(f"__{rank}_"))


def same_plans(plan: SavePlan, loaded: SavePlan) -> bool:
    """Returns True if the plans differ at most in file names and in fields that metadata does not
    store."""
    fields = {field.name for field in dataclasses.fields(plan)} - {"storage_data", "items"}
    return (
        all(getattr(plan, name) == getattr(loaded, name, None) for name in fields)
        and len(plan.items) == len(loaded.items)
        and all(map(_same_item, plan.items, loaded.items))
    )


def require_same(plan: SavePlan, cached: SavePlan) -> None:
    if same_plans(plan, cached):
        return
    before = {item.index for item in cached.items}
    now = {item.index for item in plan.items}
    changed = sorted({index.fqn for index in before ^ now})
    what = ", ".join(changed[:5]) or "shapes, dtypes, offsets or nesting of the same names"
    raise CheckpointError(
        f"the state dict has changed since the cached plan was made ({what}); when it changes, "
        "plan without cached_ckpt_structure (enable_cache=False)"
    )


def _same_item(item: WriteItem, loaded: WriteItem) -> bool:
    ours, theirs = item.tensor_data, loaded.tensor_data
    if ours is None or theirs is None:
        return item == loaded
    return (
        (item.index, item.type, item.bytes_io_data)
        == (loaded.index, loaded.type, loaded.bytes_io_data)
        and (ours.chunk, ours.size) == (theirs.chunk, theirs.size)
        and stored_properties(ours.properties) == stored_properties(theirs.properties)
    )
