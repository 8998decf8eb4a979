"""Exceptions of torch_ckpt: one class for each failure that a caller may want to handle separately.

Failed system calls raise plain ``OSError`` with ``errno`` and ``filename`` set, so a full disk is
``ENOSPC``. Options that contradict each other raise ``ValueError``.
"""

from __future__ import annotations

from typing import Any


class CheckpointError(Exception):
    """Base class of torch_ckpt's errors. Raised directly if a failure has no class of its own.

    With several ranks, :func:`torch_ckpt.save` and :func:`torch_ckpt.load` raise torch's
    ``CheckpointException``, which maps each rank that failed to its error.

    Example::

        try:
            torch_ckpt.save(state, "checkpoints/100")
        except CheckpointException as error:  # from torch.distributed.checkpoint.api
            for rank, (cause, _frames) in error.failures.items():
                print(rank, cause)
    """


class _CommitError(CheckpointError):
    def __init__(self, message: str, errno: int = 0) -> None:
        super().__init__(message, errno)
        self.errno = errno


class NotCommitted(_CommitError):
    """The new checkpoint was not published. Any earlier checkpoint in the directory is unchanged.

    Attributes:
        errno: errno of the failed system call; 0 if no system call failed.
    """

    def __str__(self) -> str:
        return f"{self.args[0]} (not committed: nothing was published)"


class DurabilityUncertain(_CommitError):
    """The new checkpoint might be visible, but might not survive a power failure.

    Either the last fsync failed after the checkpoint had become visible, or the rename that makes
    the checkpoint visible failed with an error (``EIO``, ``ETIMEDOUT``) that does not show whether
    the rename took effect. The files of both the old and the new checkpoint are kept. Save again.

    Attributes:
        errno: errno of the failed system call.
    """

    def __str__(self) -> str:
        return (
            f"{self.args[0]} (the checkpoint may already be visible, but may not survive a power "
            "failure: save again)"
        )


class Corrupt(CheckpointError):
    """A file does not match its checksum or its description in the metadata."""


class Unsafe(CheckpointError):
    """Loading the checkpoint would run code, or access files outside the checkpoint's directory."""


class LoadMismatch(CheckpointError):
    """The checkpoint does not fit the state dict that was passed to the load.

    Attributes:
        report: all differences, as a :class:`torch_ckpt.LoadReport`.
    """

    def __init__(self, message: str, report: Any) -> None:
        super().__init__(message, report)
        self.report = report

    def __str__(self) -> str:
        return str(self.args[0])


class OnCommitFailed(CheckpointError):
    """The ``on_commit`` callback failed on the coordinator. The checkpoint is committed and kept.

    Raised on all ranks. On the coordinator, the cause of this error is the callback's exception.
    """


class RootInUse(CheckpointError):
    """Another job is writing to the root of a :class:`torch_ckpt.CheckpointManager`, or has taken
    the root over from this job.

    The message names the jobs' hosts and processes. If another job is writing, use another root,
    wait until that job ends, or pass ``takeover=True``. If this job was taken over, its saves and
    deletions fail and change nothing, even if the other job has ended since.
    """


class SourceChanged(CheckpointError):
    """A tensor was modified before a background save had copied it.

    The message names the tensor. To prevent this error, call
    :meth:`torch_ckpt.AsyncSave.wait_staged` before modifying the tensor, pass the optimizer to
    :meth:`torch_ckpt.AsyncSave.guard`, or save with ``staging="blocking"``.
    """
