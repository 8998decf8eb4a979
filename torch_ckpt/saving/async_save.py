"""The handle to a background save. saving/job.py describes the save itself."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable
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

    The save is *staged* as soon as this rank's tensors have been copied and can safely be modified.
    The save is *committed* as soon as the checkpoint is durable and visible. Any thread can call
    the methods. If the handle is dropped, the save continues.

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
        """Future that is done as soon as the tensors being saved can safely be modified. If the
        save fails before that, the future raises the save's error."""
        return self._job.write.staged

    @property
    def committed(self) -> Future[Metadata]:
        """Future that is done as soon as the checkpoint is durable and visible to all ranks.

        The result is the metadata. If the save fails, the future raises the same error as
        :meth:`result`.
        """
        return self._job.committed

    def wait_staged(self, timeout: float | None = None) -> None:
        """Blocks until the tensors being saved can safely be modified.

        Args:
            timeout: seconds to wait; None waits indefinitely.

        Raises:
            TimeoutError: the save was not staged in time. The save continues.
            CheckpointException: the save failed before it was staged.
            CheckpointError: this process was forked from the process that started the save.
        """
        with self._job.blocking():
            wait_for(self.staged, timeout, "staged", self._job)

    def result(self, timeout: float | None = None) -> Metadata:
        """Blocks until the checkpoint is durable and visible.

        Args:
            timeout: seconds to wait; None waits indefinitely.

        Returns:
            The checkpoint's metadata.

        Raises:
            TimeoutError: the save did not end in time. The save continues.
            CheckpointException: the save failed. The exception contains the cause from each failed
                rank.
            OnCommitFailed: the checkpoint is committed, but ``on_commit`` failed on the
                coordinator. Raised on all ranks.
            CheckpointError: this process was forked from the process that started the save.
        """
        return wait_for(self.committed, timeout, "committed", self._job)

    def done(self) -> bool:
        """Returns True if the save has ended, successfully or not."""
        return self.committed.done()

    def guard(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes the optimizer's next step wait until the tensors being saved can safely be
        modified.

        The step blocks until all CPU tensors have been copied. For CUDA tensors, the step blocks
        only until the copies have been submitted, and the current stream waits for the copies. If
        the save fails, the step does not wait.

        A CUDA graph runs no hooks when it is replayed. Therefore, if the optimizer is
        ``capturable`` and the state contains CUDA tensors, this call itself blocks until the CUDA
        tensors have been copied.

        Args:
            optimizer: a torch optimizer, or a wrapper around one.
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
        """Blocks until the tensors being saved can safely be modified, or the save has failed. Does
        not raise the save's error."""
        with self._job.blocking():
            self._job.write.wait_staged()

    @property
    def differing(self) -> str:
        """Describes the values that ``check_replicas="warn"`` found to differ between ranks. Empty
        if there are none. The text is complete as soon as the save is staged.
        """
        return self._job.differing

    def metrics(self) -> SaveMetrics:
        """Returns the durations and sizes of the save on this rank. All values are final when the
        save has ended."""
        return self._job.metrics

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if _is_finalizing():
            return  # exit_threads has waited for the save; by now, modules may be empty
        job = getattr(self, "_job", None)
        if job is not None and not job.committed.done() and not job.inherited:
            warnings.warn(
                f"the handle of the save to {job.metrics.path} was dropped before the save ended. "
                "The save continues. If it fails, the next save or check_for_errors() raises the "
                "error",
                stacklevel=2,
            )


class _Guard:
    """The single hook that this package registers with an optimizer. It stays registered, because
    a hook cannot be removed during a step."""

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
