"""The handle to a background save. saving/job.py describes what such a save does."""

from __future__ import annotations

import warnings
import weakref
from concurrent.futures import Future
from typing import ClassVar

import torch
from torch.distributed.checkpoint.metadata import Metadata

from torch_ckpt._base.progress import Progress
from torch_ckpt._base.wrapped_optimizers import unwrapped
from torch_ckpt.saving.job import Job, wait_for
from torch_ckpt.saving.metrics import SaveMetrics


class AsyncSave:
    """Handle to a background save, returned by :func:`torch_ckpt.async_save`.

    A save of this rank is *staged* when its sources have been copied and may change, and
    *committed* when the checkpoint is durable and visible. Methods may be called from any thread.
    If the handle is dropped, the save continues.

    Examples:
        ```python
        handle = torch_ckpt.async_save({"model": model}, "checkpoints/100")
        handle.guard(optimizer)  # optimizer.step() waits until the model has been copied
        train_one_step()
        metadata = handle.result()  # waits for the commit
        ```
    """

    def __init__(self, job: Job) -> None:
        self._job = job

    # A property, because a forked child replaces the futures.
    @property
    def staged(self) -> Future[None]:
        """Future that is done when the sources may change. It has an error if the save failed
        before."""
        return self._job.write.staged

    @property
    def committed(self) -> Future[Metadata]:
        """Future that is done when the checkpoint is durable and visible on all ranks.

        Its result is the metadata; its error is the one that :meth:`result` raises.
        """
        return self._job.committed

    def wait_staged(self, timeout: float | None = None) -> None:
        """Waits until the sources may change.

        Args:
            timeout: seconds to wait; None waits without limit.

        Raises:
            TimeoutError: the time is up; the save continues.
            CheckpointException: the save failed before it was staged.
            CheckpointError: this process was forked from the one that saves.
        """
        with self._job.blocking():
            wait_for(self.staged, timeout, "staged", self._job)

    def result(self, timeout: float | None = None) -> Metadata:
        """Waits until the checkpoint is durable and visible.

        Args:
            timeout: seconds to wait; None waits without limit.

        Returns:
            The checkpoint's metadata.

        Raises:
            TimeoutError: the time is up; the save continues.
            CheckpointException: the save failed; it holds the cause of each rank that failed.
            OnCommitFailed: ``on_commit`` failed on the coordinator; raised on all ranks. The
                checkpoint is committed.
            CheckpointError: this process was forked from the one that saves.
        """
        return wait_for(self.committed, timeout, "committed", self._job)

    def done(self) -> bool:
        """Returns True if the save has ended, successfully or not."""
        return self.committed.done()

    def guard(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes the optimizer's next step wait until it may change the sources.

        The step waits until CPU tensors have been copied. For CUDA tensors the current stream waits
        for the copies, and the CPU only until they have been submitted. After a failed save the
        step does not wait.

        A step that is replayed as a CUDA graph runs no hooks. So if the optimizer is ``capturable``
        and the state has CUDA tensors, this call itself waits until they have been copied.

        Args:
            optimizer: a torch optimizer, or a wrapper of one.
        """
        if self._job.state.devices and any(
            group.get("capturable") for group in optimizer.param_groups
        ):
            self.wait_staged_quietly()
            return
        _Guard.of(unwrapped(optimizer)).job = self._job

    def progress(self) -> Progress:
        """Returns the progress of this rank's write, in bytes."""
        return self._job.write.progress()

    def wait_staged_quietly(self) -> None:
        """Waits until the sources may change or the save has failed, without raising its error."""
        with self._job.blocking():
            self._job.write.wait_staged()

    @property
    def differing(self) -> str:
        """The values that differ between ranks, found by ``check_replicas="warn"``; empty if none
        differs.

        Complete once the save is staged.
        """
        return self._job.differing

    def metrics(self) -> SaveMetrics:
        """Returns the durations and sizes of the save on this rank; complete once it is done."""
        return self._job.metrics

    def __del__(self) -> None:
        job = getattr(self, "_job", None)
        if job is not None and not job.committed.done() and not job.inherited:
            warnings.warn(
                f"the handle of the save to {job.metrics.path} was dropped before the save ended; "
                "it continues, and the next save or check_for_errors() raises its error, if any",
                stacklevel=2,
            )


class _Guard:
    """The single hook of this package on an optimizer; a hook cannot be removed during a step."""

    _of: ClassVar[weakref.WeakKeyDictionary[torch.optim.Optimizer, _Guard]] = (
        weakref.WeakKeyDictionary()
    )

    def __init__(self) -> None:
        self.job: Job | None = None

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> _Guard:
        guard = cls._of.get(optimizer)
        if guard is None:
            guard = cls._of[optimizer] = cls()
            optimizer.register_step_pre_hook(guard)
        return guard

    def __call__(self, *_: object) -> None:
        job, self.job = self.job, None
        if job is not None:
            job.hold_back()
