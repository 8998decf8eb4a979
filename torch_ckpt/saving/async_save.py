"""The handle to a save in the background; saving/job.py has the life of one."""

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
    """A save under way, made by :func:`torch_ckpt.async_save`."""

    def __init__(self, job: Job) -> None:
        self._job = job

    # Not kept: a forked child has others.
    @property
    def staged(self) -> Future[None]:
        """Done when the sources may change; fails where the save did so before."""
        return self._job.write.staged

    @property
    def committed(self) -> Future[Metadata]:
        """Done, with the metadata, when the checkpoint is durable and visible on all ranks."""
        return self._job.committed

    def wait_staged(self, timeout: float | None = None) -> None:
        """Waits until the sources may change.

        Raises:
            TimeoutError: ``timeout`` seconds have passed; the save goes on.
            CheckpointException: the save has failed before.
        """
        with self._job.blocking():
            wait_for(self.staged, timeout, "staged", self._job)

    def result(self, timeout: float | None = None) -> Metadata:
        """Waits until the checkpoint is durable and visible; its metadata.

        Raises:
            TimeoutError: ``timeout`` seconds have passed; the save goes on.
            CheckpointException: the save failed, with the cause of each rank that did.
            OnCommitFailed: ``on_commit`` failed, on the coordinator; raised on all ranks. The
                checkpoint is committed.
            CheckpointError: this process is a forked child of the one that saves.
        """
        return wait_for(self.committed, timeout, "committed", self._job)

    def done(self) -> bool:
        """Whether the save has ended, well or badly."""
        return self.committed.done()

    def guard(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes the optimizer's next step wait until it may change the sources.

        CPU tensors have then been copied. For CUDA tensors the current stream waits, on the device,
        for the copies; the CPU waits only until they have been submitted. A failed save holds
        nothing back.

        A step that is replayed as a CUDA graph asks nobody. So for an optimizer that is
        ``capturable`` this call itself waits until CUDA tensors have been copied.
        """
        if self._job.sources.devices and any(
            group.get("capturable") for group in optimizer.param_groups
        ):
            self.wait_staged_quietly()
            return
        _Guard.of(unwrapped(optimizer)).job = self._job

    def progress(self) -> Progress:
        """Bytes of this rank so far."""
        return self._job.write.progress()

    def wait_staged_quietly(self) -> None:
        """Waits until the sources may change, be it that the save has failed."""
        with self._job.blocking():
            self._job.write.wait_staged()

    @property
    def differing(self) -> str:
        """Which values differ between ranks, by ``check_replicas="warn"``; empty if none does.

        Complete once the sources have been staged.
        """
        return self._job.differing

    def metrics(self) -> SaveMetrics:
        """What the save took on this rank; complete once it is done."""
        return self._job.metrics

    def __del__(self) -> None:
        job = getattr(self, "_job", None)
        if job is not None and not job.committed.done() and not job.inherited:
            warnings.warn(
                f"the handle of the save to {job.metrics.path} was dropped before the save ended; "
                "it goes on, and an error is raised by the next one or by check_for_errors()",
                stacklevel=2,
            )


class _Guard:
    """The one hook of ours on an optimizer; optimizers cannot lose hooks amid a step."""

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
