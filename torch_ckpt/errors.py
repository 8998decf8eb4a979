"""What can go wrong, one class for each thing that a caller may want to tell apart.

Failed system calls are plain ``OSError`` with ``errno`` and ``filename`` set, so ``ENOSPC`` is
``ENOSPC``; options that contradict each other are ``ValueError``.
"""

from __future__ import annotations

from typing import Any


class CheckpointError(Exception):
    """Base of the errors below."""


class _CommitError(CheckpointError):
    def __init__(self, message: str, errno: int = 0) -> None:
        super().__init__(message, errno)
        self.errno = errno


class NotCommitted(_CommitError):
    """The new checkpoint was not published; what was in the directory before is untouched."""

    def __str__(self) -> str:
        return f"{self.args[0]} (not committed: nothing was published)"


class DurabilityUncertain(_CommitError):
    """The checkpoint is visible, but the last fsync failed: a power cut may undo it.

    Or the rename that makes it visible has failed in a way (``EIO``, ``ETIMEDOUT``) that does not
    tell whether it was carried out. Neither the old checkpoint's files nor the new one's have gone.
    """

    def __str__(self) -> str:
        return f"{self.args[0]} (the checkpoint may be visible now, and a power cut may undo it)"


class Corrupt(CheckpointError):
    """A file does not hold what the metadata or its own checksum says."""


class Unsafe(CheckpointError):
    """Loading it would run code or leave the checkpoint's directory."""


class LoadMismatch(CheckpointError):
    """A checkpoint does not fit the state dict that it was to be loaded into.

    Attributes:
        report: all that differs, a :class:`torch_ckpt.LoadReport`.
    """

    def __init__(self, message: str, report: Any) -> None:
        super().__init__(message, report)
        self.report = report

    def __str__(self) -> str:
        return str(self.args[0])


class OnCommitFailed(CheckpointError):
    """``on_commit`` failed on the coordinator. The checkpoint is committed, and stays."""


class RootInUse(CheckpointError):
    """Another run writes beneath the root of a :class:`torch_ckpt.CheckpointManager`, and lives."""


class SourceChanged(CheckpointError):
    """A tensor was written to before a background save had copied it."""
